"""Values that a sweep reads from earlier sweeps at full length, chosen by a minimum cut.

The cut separates values that exist only once, such as results of attention, from the values that the sweep
recomputes. AOTAutograd's partitioner does the same (torch/_functorch/partitioners.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import networkx
from torch.fx import Node

SOURCE, SINK = "source", "sink"


def narrowest_crossing(
    reads: Mapping[Node, Iterable[Node]],
    fixed: Collection[Node],
    wanted: Iterable[Node],
    sizes: Mapping[Node, int | None],
) -> set[Node]:
    """Choose values to keep that take the fewest bytes together.

    Among equally narrow choices, take the one that spares the most computation. Return the empty set if
    a value that cannot be kept has to cross.

    reads   value → those of the values that it is computed from
    fixed   values that cannot be computed a second time
    wanted  values that the later sweep reads
    sizes   bytes that a value takes if it is kept; None: it cannot be kept
    """
    flow = networkx.DiGraph()
    flow.add_nodes_from((SOURCE, SINK))  # an edge without a capacity has no limit
    for node, operands in reads.items():
        size = sizes[node]
        flow.add_edge((node, False), (node, True), **({} if size is None else {"capacity": size}))
        flow.add_edges_from(((operand, True), (node, False)) for operand in operands)
    flow.add_edges_from((SOURCE, (node, False)) for node in fixed)
    flow.add_edges_from(((node, True), SINK) for node in wanted)
    try:
        _, (before, after) = networkx.minimum_cut(
            flow, SOURCE, SINK, flow_func=networkx.algorithms.flow.shortest_augmenting_path
        )
    except networkx.NetworkXUnbounded:  # a value that cannot be kept has to cross; `Program.kept` shows which
        return set()
    return {node for node in reads if (node, False) in before and (node, True) in after}

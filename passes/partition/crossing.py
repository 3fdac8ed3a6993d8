"""What a sweep reads of earlier ones at full length: the narrowest cut between what exists only once, such as
results of attention, and what the sweep computes anew (a minimum cut, as in the partitioner of AOTAutograd,
torch/_functorch/partitioners.py)."""

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
    """Values to keep, of the fewest bytes together; of equally narrow ones, those that spare the most
    computation.

    reads   value → those of the values that it is computed from
    fixed   values that cannot be computed a second time
    wanted  what is read in the end
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
    except networkx.NetworkXUnbounded:  # something that cannot be kept has to cross; the program says what
        return set()
    return {node for node in reads if (node, False) in before and (node, True) in after}

"""Sums over chunks that are only added to one another share an accumulator.

The gradient of a weight that several layers of a region share is a sum of products. With an accumulator
of its own, each product would take as much memory as the weight, for the whole sweep. Only matrix
products share accumulators, because each chunk simply adds its part. Other sums do not: rows of blocks
are added at their places, and maxima are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from ..ir import Program, Sweep, shape_of, value_of
from ..rules import is_product

aten = torch.ops.aten


def shared_totals(program: Program) -> Program:
    """Replace sums that are only added to one another by an accumulator for their total."""
    added = [n for nodes in program.full_length for n in nodes if n.target is aten.add.Tensor]
    returned = {o for o in program.outputs if isinstance(o, Node)}
    sweeps, whole = [], set[Node]()
    for sweep in program.sweeps:
        joined = joined_sums(sweep, added, returned)
        totals = dict.fromkeys(joined.values())
        whole.update(sums_below(totals, sweep.sums))
        sums = (*(n for n in sweep.sums if n not in joined), *totals)
        sweeps.append(replace(sweep, sums=sums, joined=tuple(joined.items())))
    left = tuple(tuple(n for n in nodes if n not in whole) for nodes in program.full_length)
    return replace(program, sweeps=tuple(sweeps), full_length=left)


def joined_sums(sweep: Sweep, added: Collection[Node], returned: set[Node]) -> Mapping[Node, Node]:
    """Map each sum of a sweep to its total, if nothing else than additions of such sums reads it."""
    terms = {n: [n] for n in sweep.sums if is_product(n)}
    own = set(terms)
    for node in added:
        operands = node.all_input_nodes
        alike = all(a in terms and is_alike(a, node) and list(a.users) == [node] for a in operands)
        if (
            alike
            and len(node.args) == len(operands) == 2
            and not node.kwargs
            and returned.isdisjoint(operands)
        ):
            terms[node] = [n for a in operands for n in terms.pop(a)]
    return {n: total for total, summed in terms.items() for n in summed if total not in own}


def is_alike(node: Node, other: Node) -> bool:
    return shape_of(node) == shape_of(other) and value_of(node).dtype == value_of(other).dtype


def sums_below(totals: Collection[Node], sums: Collection[Node]) -> set[Node]:
    """Collect the totals, and the additions between them and ``sums``."""
    found: set[Node] = set()
    stack = list(totals)
    while stack:
        node = stack.pop()
        if node not in found and node not in sums:
            found.add(node)
            stack += node.all_input_nodes
    return found

"""Losses of the rows that a mask picks: ``F.cross_entropy(logits[mask], labels[mask])``.

If a loss can ignore labels, it equals the loss of all rows, with ignored labels where the mask is false.
Then no rows are picked, and the head streams with its loss as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import are_equal, arguments
from ...passes.rules import form_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, is_pointwise, part_of


@dataclass(frozen=True)
class MappedRows:
    """Rows that are picked from a value, and then mapped.

    source  the value
    mask    the mask
    maps    pointwise functions of the rows, in the order in which they are applied
    """

    source: Node
    mask: Node
    maps: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class PickedLoss:
    """A loss of picked rows: its operator, the rows, their labels, and all its other arguments."""

    operator: torch._ops.OpOverload
    rows: MappedRows
    labels: MappedRows
    others: dict


def picked_loss(trace: GraphModule) -> PickedLoss | None:
    """Match the loss at the end of a trace. It must be able to ignore rows, and one mask must pick its rows
    and their labels."""
    last = trace.graph.output_node().args[0]
    if not isinstance(last, Node) or part_of(last) is not Part.LOSS:
        return None
    given = arguments(last)
    if "ignore_index" not in given or given["target"].meta["val"].dtype is not torch.int64:
        return None
    rows, labels = picked(given["self"]), picked(given["target"])
    if rows is None or labels is None or rows.mask is not labels.mask:
        return None
    whole = (
        rows.source.meta["val"].dim()
        == labels.source.meta["val"].dim() + 1
        == rows.mask.meta["val"].dim() + 1
    )
    others = {name: value for name, value in given.items() if name not in ("self", "target")}
    return PickedLoss(last.target, rows, labels, others) if whole else None


def picked(node: Node) -> MappedRows | None:
    """Match a pointwise function of the rows ``source[mask]``. None for other nodes."""
    maps: list[Node] = []
    while True:
        if form_of(node) is Form.LOOK_UP:
            source, (mask, *more) = node.args[0], node.args[1]
            by_mask = not more and mask is not None and mask.meta["val"].dtype is torch.bool
            return MappedRows(source, mask, maps[::-1]) if by_mask else None
        if not node.all_input_nodes or not maps_numbers(node) and not is_same(node):
            return None
        if maps_numbers(node):
            maps.append(node)
        node = node.args[0]


def maps_numbers(node: Node) -> bool:
    """Is it a pointwise function of its first argument alone?"""
    return is_pointwise(node) and node.all_input_nodes == [node.args[0]]


def is_same(node: Node) -> bool:
    """Is a node a view of a value, with the same shape?"""
    value, source = node.meta["val"], node.args[0]
    if part_of(node) is not Part.MERGE or not isinstance(source, Node):
        return False
    return are_equal(value.shape, source.meta["val"].shape)

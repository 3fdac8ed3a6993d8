"""Losses of the rows that a mask picks: ``F.cross_entropy(logits[mask], labels[mask])``.

If a loss can ignore labels, it equals the loss of all rows, with ignored labels where the mask is false.
Then no rows are picked, and the head streams with its loss as usual. The same holds for rows that are cut
off sequences laid end to end: ``F.cross_entropy(logits.view(-1, V)[:-1], labels.view(-1)[1:])``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import are_equal, arguments, is_equal
from ...passes.rules import form_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import NONE, Part, is_pointwise, part_of, slice_of, with_arguments
from ..reading.aten import erase_unread, inserted, size_as_node, sum_of
from ..reading.values import fake_of, is_changed
from .indexed_rows import counted_along

aten = torch.ops.aten


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


@dataclass(frozen=True)
class CutRows:
    """Rows from ``start`` to before ``stop`` (None: the end) of ``whole``: of sequences laid end to end."""

    whole: Node
    start: object
    stop: object


def ignore_cut_rows(module: GraphModule) -> GraphModule:
    """Write a loss of the first rows of sequences laid end to end as the loss of all rows. Each label moves
    as many rows forward as labels are cut off, and rows without a label are ignored."""
    cut = []
    for node in list(module.graph.nodes):
        given = arguments(node) if part_of(node) is Part.LOSS else {}
        if "ignore_index" not in given or given["reduction"] == NONE:
            continue
        rows, labels = cut_rows(given["self"]), cut_rows(given["target"])
        if rows is None or labels is None or not are_shifted(rows, labels):
            continue
        with module.graph.inserting_before(node):
            target = moved_back(node, labels, given["ignore_index"])
            new = inserted(node, node.target, *with_arguments(node, self=rows.whole, target=target))
        node.replace_all_uses_with(new)
        cut.append(node)
    erase_unread(module.graph, cut)
    return module


def cut_rows(node: Node) -> CutRows | None:
    """Match a slice of several sequences that are laid end to end. None for other nodes."""
    whole = node.args[0] if node.args else None
    if not isinstance(whole, Node) or part_of(whole) is not Part.MERGE or is_changed(whole):
        return None
    source, part = fake_of(whole.args[0]), slice_of(node, fake_of(whole).dim())
    if part is None or part.lost or part.dim != 0 or source.dim() != fake_of(whole).dim() + 1:
        return None
    return None if is_equal(source.shape[0], 1) else CutRows(whole, part.start, part.stop)


def are_shifted(rows: CutRows, labels: CutRows) -> bool:
    """Are these the first rows, and the last labels, with fewer cut off than a sequence has?"""
    tokens, by = fake_of(labels.whole.args[0]), labels.start
    if rows.start != 0 or labels.stop is not None or tokens.dim() != 2 or tokens.dtype is not torch.int64:
        return False
    same = is_equal(tokens.numel(), fake_of(rows.whole).shape[0])
    return same and isinstance(by, int) and 0 < by and bool(by < tokens.shape[1])


def moved_back(like: Node, labels: CutRows, ignored: int) -> Node:
    """Insert a label for every row: that of the row ``labels.start`` rows later, or else ``ignored``."""
    source, by = labels.whole.args[0], labels.start
    places, sequences = counted_along(like, source, 1), counted_along(like, source, 0)
    batch, tokens = (size_as_node(like, source, d) for d in (0, 1))
    inside = inserted(like, aten.roll.default, (source, [-by], [1]))
    following = inserted(like, aten.roll.default, (inside, [-1], [0]))
    at_end = inserted(like, aten.ge.Scalar, (places, sum_of(tokens, -by, like)))
    last = inserted(like, aten.ge.Scalar, (sequences, sum_of(batch, -1, like)))
    none = inserted(like, aten.logical_and.default, (at_end, last))
    found = inserted(like, aten.where.self, (at_end, following, inside))
    found = inserted(like, aten.masked_fill.Scalar, (found, none, ignored))
    return inserted(like, aten.flatten.using_ints, (found,))

"""Columns beside attention scores (sinks, zero logits), moved behind them one by one.

In ``cat([sink, scores], -1).softmax(-1)[..., 1:]`` column i is key i - 1, so a chunk of keys would begin
one column late. No operation in between depends on the order of columns: each treats every column by
itself, or takes all of them together (softmax, sums, maxima), until a slice separates them. So the
former are applied to both parts separately, and the latter to ``cat([scores, sink], -1)``, where column
i is key i. Several columns are joined one by one, because a value of one column has no dimension that
could be one of keys. The rewrite is done in Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import Size, are_equal, is_equal
from ...passes.rules.forward import TO_THE_END, Slice, is_orderless_along, slice_of
from ..reading.aten import erase_unread, inserted
from ..reading.row_ties import operand_dim
from ..reading.values import fake_of, is_changed
from ..rows.row_slices import Known, Parts, RowRange, columns_of, with_rows

aten = torch.ops.aten


def move_leading_columns(module: GraphModule) -> GraphModule:
    """Move columns that stand beside a matrix of tokens by tokens to its end, one by one. Their order must
    not matter to any reader."""
    for node in list(module.graph.nodes):
        beside = columns_beside(columns_of(node)) if node.users else None
        readers = None if beside is None else readers_of(node)
        if beside is not None and readers is not None:
            Move(*beside, readers).write()
    return module


MOST = 16  # most columns that are moved: each becomes a value of its own


def columns_beside(parts: Parts | None) -> tuple[int, int] | None:
    """Count the columns in front of a matrix with as many columns as rows, and those behind it. None if there
    are more than ``MOST``, or if all are behind it already, one by one."""
    for at, piece in enumerate(() if parts is None else parts.pieces):
        others = (*parts.sizes[:at], *parts.sizes[at + 1 :])
        if piece is None or not all(isinstance(s, int) for s in others) or not 0 < sum(others) <= MOST:
            continue
        if at or any(size != 1 for size in others):
            shape = fake_of(piece).shape
            square = any(is_equal(s, shape[parts.dim]) for d, s in enumerate(shape) if d != parts.dim)
            return (sum(parts.sizes[:at]), sum(parts.sizes[at + 1 :])) if square else None
    return None


@dataclass
class Readers:
    """The readers of columns.

    dims      values that have the columns → the dimension that holds them
    together  operations that take all columns together
    cuts      slices that separate the columns
    """

    dims: dict[Node, int] = field(default_factory=dict)
    together: set[Node] = field(default_factory=set)
    cuts: dict[Node, Slice] = field(default_factory=dict)


def readers_of(root: Node) -> Readers | None:
    """Collect all readers of a value's columns. None if the order of columns matters to one of them."""
    found, stack = Readers({root: fake_of(root).dim() - 1}), [root]
    while stack:
        value = stack.pop()
        for user in value.users:
            new = result_of(user, value, found)
            if new is None or found.dims.get(user, new) != new:
                return None
            if new >= 0 and user not in found.dims:
                found.dims[user] = new
                stack.append(user)
    return found


def result_of(user: Node, value: Node, found: Readers) -> int | None:
    """Find the dimension of a reader's result that has the columns; -1 if none has. None if their order
    matters."""
    dim, fake = found.dims[value], fake_of(user) if user.op == "call_function" else None
    if not isinstance(fake, torch.Tensor) or is_changed(user):
        return None
    cut = slice_of(user, fake_of(value).dim())
    if cut is not None and cut.dim == dim:
        found.cuts[user] = cut
        return -1
    if is_orderless_along(user, dim, fake_of(value).dim()):
        found.together.add(user)
        return dim if has_columns(user) else -1
    dims = [d for d in range(fake.dim()) if operand_dim(user, value, d) == dim]
    return dims[0] if len(dims) == 1 else None


def has_columns(node: Node) -> bool:
    """Is the result of an operation on all columns together as large as its operand (softmax)?"""
    return are_equal(fake_of(node).shape, fake_of(node.args[0]).shape)


class Move:
    """The move of ``front`` columns to the end of a matrix, where ``behind`` columns are already. All are
    joined to it one by one."""

    def __init__(self, front: int, behind: int, readers: Readers):
        self.front, self.behind, self.readers = front, behind, readers
        self.count = front + behind
        self.own = RowRange(front, -behind or None)
        groups = ((RowRange(0, front), front), (RowRange(-behind, None), behind))
        self.groups = [(rows, count) for rows, count in groups if count]
        self.known: Known = {}

    def write(self) -> None:
        """Rewrite all readers, if every slice takes columns of one part alone."""
        parts = {user: self.part_of(cut, user.args[0]) for user, cut in self.readers.cuts.items()}
        if None in parts.values():
            return
        graph = next(iter(self.readers.dims)).graph
        changed = [n for n in graph.nodes if n in self.readers.together or n in parts]
        for node in changed:
            with graph.inserting_before(node):
                if node in parts:
                    node.replace_all_uses_with(self.cut(node, *parts[node]))
                else:
                    self.apply(node)
        erase_unread(graph, changed)

    def part_of(self, cut: Slice, value: Node) -> tuple[RowRange, int, int | None] | None:
        """Find the part whose columns a slice takes, and their range in it. None if it takes columns of
        several parts."""
        width = fake_of(value).shape[cut.dim]
        start, stop = (size_of(bound, width) for bound in (cut.start, cut.stop))
        if start is None or stop is None:
            return None
        stop = start + 1 if cut.lost else stop
        if is_equal(start, self.front) and is_equal(stop, width - self.behind):
            return self.own, 0, None
        for group, first in (
            (RowRange(0, self.front), 0),
            (RowRange(-self.behind, None), width - self.behind),
        ):
            size = self.front if group.is_front() else self.behind
            a, b = (next((i for i in range(size + 1) if is_equal(first + i, x)), None) for x in (start, stop))
            if size and a is not None and b is not None and a < b:
                return group, a, b
        return None

    def cut(self, node: Node, part: RowRange, start: int, stop: int | None) -> Node:
        cut = self.readers.cuts[node]
        made = with_rows(node.args[0], cut.dim, part, node, self.known)
        if stop is not None and not is_equal(fake_of(made).shape[cut.dim], stop - start):
            made = inserted(node, aten.slice.Tensor, (made, cut.dim, start, stop))
        return inserted(node, aten.squeeze.dim, (made, cut.dim)) if cut.lost else made

    def one_by_one(self, value: Node, dim: int, like: Node) -> list[Node]:
        """List the columns beside the matrix, each as a value of its own."""
        made = []
        for group, size in self.groups:
            columns = with_rows(value, dim, group, like, self.known)
            cuts = [(aten.slice.Tensor, (columns, dim, i, i + 1)) for i in range(size)]
            made += [columns] if size == 1 else [inserted(like, *cut) for cut in cuts]
        return made

    def apply(self, node: Node) -> None:
        """Apply an operation on all columns together to the matrix and the columns behind it."""
        value, *others = node.args
        dim = self.readers.dims[value]
        own = with_rows(value, dim, self.own, node, self.known)
        joined = inserted(node, aten.cat.default, ([own, *self.one_by_one(value, dim, node)], dim))
        new = inserted(node, node.target, (joined, *others), dict(node.kwargs))
        if not has_columns(node):
            node.replace_all_uses_with(new)
            return
        self.known[node, dim, self.own] = inserted(node, aten.slice.Tensor, (new, dim, 0, -self.count))
        at = -self.count
        for group, size in self.groups:
            bounds = [(new, dim, i, i + 1 or TO_THE_END) for i in range(at, at + size)]
            made = [inserted(node, aten.slice.Tensor, args) for args in bounds]
            at += size
            one = made[0] if size == 1 else inserted(node, aten.cat.default, (made, dim))
            self.known[node, dim, group] = one


def size_of(bound: object, width: Size) -> Size | None:
    """Convert a bound of a slice to a place counted from the first column."""
    size = width if bound is None else fake_of(bound) if isinstance(bound, Node) else bound
    if not isinstance(size, (int, torch.SymInt)):
        return None
    return size + width if isinstance(size, int) and size < 0 else size

"""Columns in front of attention scores (sinks, a zero logit) are moved behind them.

In ``cat([sink, scores], -1).softmax(-1)[..., 1:]`` column i is key i - 1, so a chunk of keys would begin one
column late. No operation in between depends on the order of columns: each treats every column by itself, or
takes all of them together (softmax, sums, maxima), until a slice parts them again. So the former are applied
to both parts apart, and the latter to ``cat([scores, sink], -1)``, where column i is key i. Rewritten in
Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ..passes.ir import is_equal
from ..passes.rules.forward import TO_THE_END, Slice, is_orderless_along, slice_of
from .aten import inserted
from .attention import erase_unread
from .row_slices import Parts, Rows, Sliced, columns_of, operand_dim, sliced
from .token_axes import fake_of

aten = torch.ops.aten


def move_leading_columns(module: GraphModule) -> GraphModule:
    """Put columns in front of a matrix of tokens and tokens behind it, where the order does not matter."""
    for node in list(module.graph.nodes):
        count = leading(columns_of(node)) if node.users else None
        readers = None if count is None else readers_of(node)
        if readers is not None:
            Move(count, readers).write()
    return module


MOST = 1  # columns behind a matrix that the analysis follows (passes/rules/views.py, `cat`)


def leading(parts: Parts | None) -> int | None:
    """How many columns, ``MOST`` at most, stand in front of a matrix with as many columns as rows."""
    if parts is None or len(parts.pieces) < 2 or parts.pieces[-1] is None:
        return None
    front, shape = parts.sizes[:-1], fake_of(parts.pieces[-1]).shape
    square = any(is_equal(s, shape[parts.dim]) for d, s in enumerate(shape) if d != parts.dim)
    known = square and all(isinstance(s, int) for s in front) and sum(front) <= MOST
    return sum(front) if known else None


@dataclass
class Readers:
    """What reads columns.

    dims      values that have the columns → the dimension that holds them
    together  operations that take all columns together
    cuts      slices that part the columns again
    """

    dims: dict[Node, int] = field(default_factory=dict)
    together: set[Node] = field(default_factory=set)
    cuts: dict[Node, Slice] = field(default_factory=dict)


def readers_of(root: Node) -> Readers | None:
    """All readers of the columns of a value; None if the order of columns matters to one of them."""
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
    """The dimension of a reader's result that has the columns, -1 if none; None if their order matters."""
    dim, fake = found.dims[value], fake_of(user) if user.op == "call_function" else None
    if not isinstance(fake, torch.Tensor):
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
    own, given = fake_of(node).shape, fake_of(node.args[0]).shape
    return len(own) == len(given) and all(map(is_equal, own, given))


class Move:
    """The move of so many columns from the front to the end."""

    def __init__(self, count: int, readers: Readers):
        self.count, self.readers = count, readers
        self.known: Sliced = {}

    @property
    def own(self) -> Rows:
        return Rows(self.count, None)

    @property
    def front(self) -> list[Rows]:
        return [Rows(i, i + 1) for i in range(self.count)]

    def write(self) -> None:
        """Change all readers, if every slice is one of columns of one part alone."""
        parts = {user: self.part_of(cut) for user, cut in self.readers.cuts.items()}
        if not all(parts.values()):
            return
        graph = next(iter(self.readers.dims)).graph
        changed = [n for n in graph.nodes if n in self.readers.together or n in parts]
        for node in changed:
            with graph.inserting_before(node):
                if node in parts:
                    node.replace_all_uses_with(self.cut(node, parts[node]))
                else:
                    self.apply(node)
        erase_unread(graph, changed)

    def part_of(self, cut: Slice) -> list[Rows]:
        """The columns that a slice takes: all of the matrix, or some in front of it; none of others."""
        start, stop = cut.start, cut.start + 1 if cut.lost and isinstance(cut.start, int) else cut.stop
        if (start, stop) == (self.count, None):
            return [self.own]
        known = isinstance(start, int) and isinstance(stop, int)
        return self.front[start:stop] if known and 0 <= start < stop <= self.count else []

    def cut(self, node: Node, parts: list[Rows]) -> Node:
        cut, value = self.readers.cuts[node], node.args[0]
        made = [sliced(value, cut.dim, rows, node, self.known) for rows in parts]
        one = made[0] if len(made) == 1 else inserted(node, aten.cat.default, (made, cut.dim))
        return inserted(node, aten.squeeze.dim, (one, cut.dim)) if cut.lost else one

    def apply(self, node: Node) -> None:
        """Apply an operation on all columns together to the matrix and the columns behind it."""
        value, *others = node.args
        dim = self.readers.dims[value]
        made = [sliced(value, dim, rows, node, self.known) for rows in (self.own, *self.front)]
        joined = inserted(node, aten.cat.default, (made, dim))
        new = inserted(node, node.target, (joined, *others), dict(node.kwargs))
        if not has_columns(node):
            node.replace_all_uses_with(new)
            return
        self.known[node, dim, self.own] = inserted(node, aten.slice.Tensor, (new, dim, 0, -self.count))
        for rows in self.front:
            start, stop = rows.start - self.count, rows.stop - self.count or TO_THE_END
            self.known[node, dim, rows] = inserted(node, aten.slice.Tensor, (new, dim, start, stop))

"""Attention masks with extra columns, for keys that are no tokens of the sequence (memory keys).

``F.pad(mask, (2, 0), value=True)`` has two columns that belong to no token, so its columns cannot be
aligned with the tokens of its rows. The padding is therefore moved up, through operations that treat
each column by itself, to the row of numbers that the mask is computed from (positions, documents,
padding of a batch). There the extra columns repeat the numbers at the ends, so that operations read no
other numbers than before. In the finished mask they get the value of the padding. Each chunk then
computes its own rows of the mask, with all columns. The rewrite is done in Dynamo's graph, before
autograd sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, is_equal
from ...passes.rules.forward import Part, filling_of, is_filled, part_of, with_arguments
from ..reading.aten import erase_unread, inserted, size_as_node, sum_of
from ..reading.values import fake_of, is_parameter
from ..rows.row_slices import Parts, columns_of, may_be_repeated, operand_dim, repeated

aten = torch.ops.aten


@dataclass(frozen=True)
class Padding:
    """The number of columns added before a dimension's own and behind them, and the value they hold."""

    before: int
    behind: int
    value: float


def pad_before_masks(module: GraphModule) -> GraphModule:
    """Compute masks with extra columns from padded positions."""
    for node in list(module.graph.nodes):
        parts = columns_of(node)
        found = None if parts is None else padding_of(parts)
        if found is None or not is_mask(node, found[0]):
            continue
        source, padding = found
        with module.graph.inserting_before(node):
            padded = Padded(node, padding)
            made = padded.of(source, fake_of(source).dim() - 1)
            if padded.is_thin:
                node.replace_all_uses_with(padded.filled(made, source))
        erase_unread(module.graph, [node] if padded.is_thin else [made])
    return module


def padding_of(parts: Parts) -> tuple[Node, Padding] | None:
    """Find the one value that is padded, and its padding. None for several values, or for different
    padding."""
    own = [i for i, p in enumerate(parts.pieces) if p is not None and not is_filled(p)]
    if len(own) != 1:
        return None
    at = own[0]
    before, behind = parts.sizes[:at], parts.sizes[at + 1 :]
    values = {filling(parts, p) for i, p in enumerate(parts.pieces) if i != at}
    if len(values) != 1 or not all(isinstance(s, int) for s in (*before, *behind)):
        return None
    return parts.pieces[at], Padding(sum(before), sum(behind), values.pop())


def filling(parts: Parts, piece: Node | None) -> float:
    if piece is None:
        return arguments(parts.node).get("value") or 0
    return filling_of(piece)


def is_mask(node: Node, source: Node) -> bool:
    """Does a padded value without a gradient become the columns of a matrix with that many rows?"""
    size, fake = fake_of(source).shape[-1], fake_of(node)
    if fake.requires_grad or is_parameter(fake_of(source)):
        return False
    seen, stack = {node}, [node]
    while stack:
        shape = fake_of(value := stack.pop()).shape
        if len(shape) > 1 and is_equal(shape[-2], size):
            return True
        places = ((user, operand_dim(user, value, len(fake_of(user).shape) - 1)) for user in readers(value))
        more = {user for user, dim in places if dim == len(shape) - 1} - seen
        seen |= more
        stack += more
    return False


def readers(node: Node) -> list[Node]:
    return [n for n in node.users if n.op == "call_function" and isinstance(fake_of(n), torch.Tensor)]


class Padded:
    """Copies of a mask's operands with the extra columns, each made once.

    is_thin  whether the padding ended at single rows everywhere, so that no [T, T] matrix is copied
    """

    def __init__(self, like: Node, padding: Padding):
        self.like, self.padding, self.is_thin = like, padding, True
        self.known: dict[tuple[Node, int], Node] = {}

    def of(self, node: Node, dim: int) -> Node:
        """Return a value with the extra columns along a dimension."""
        if (node, dim) not in self.known:
            self.known[node, dim] = self.made(node, dim)
        return self.known[node, dim]

    def made(self, node: Node, dim: int) -> Node:
        before, behind = self.padding.before, self.padding.behind
        if is_filled(node):
            sizes = list(arguments(node)["size"])
            sizes[dim] = sum_of(sizes[dim], before + behind, self.like)
            return inserted(self.like, node.target, *with_arguments(node, size=sizes))
        if part_of(node) is Part.TRIANGLE and dim == fake_of(node).dim() - 1:
            given = arguments(node)
            wider = self.of(given["self"], dim)
            return inserted(self.like, node.target, (wider, given["diagonal"] + before))
        if part_of(node) is Part.DIAGONAL and dim == 1:
            return self.diagonal(node)
        operands = node.all_input_nodes if may_be_repeated(node, self.like) else ()
        places = {a: operand_dim(node, a, dim) for a in operands}
        if all(at is None for at in places.values()):
            return self.picked(node, dim)
        values = {a: a if at is None else self.of(a, at) for a, at in places.items()}
        return repeated(node, dim, values, self.like)

    def picked(self, row: Node, dim: int) -> Node:
        """Extend a row of numbers by repeating its ends. An index does so, and the row is then read
        whole."""
        size = fake_of(row).shape[dim]
        others = (s for d, s in enumerate(fake_of(row).shape) if d != dim)
        self.is_thin &= not any(is_equal(s, size) for s in others)
        at = inserted(self.like, aten.clamp.default, (self.places(row, dim), 0, self.length(row, dim, -1)))
        return inserted(self.like, aten.index_select.default, (row, dim, at))

    def diagonal(self, node: Node) -> Node:
        """Build the padded identity matrix: ones where a column's place is that of the row."""
        rows, fake = arguments(node)["n"], fake_of(node)
        at = inserted(self.like, aten.arange.default, (rows,), {"device": fake.device})
        at = inserted(self.like, aten.unsqueeze.default, (at, 1))
        made = inserted(self.like, torch.eq, (at, self.places(node, 1)))
        return inserted(self.like, aten.to.dtype, (made, fake.dtype))

    def places(self, like: Node, dim: int) -> Node:
        """Number the columns of a padded value. Its own first column is 0."""
        bounds = (-self.padding.before, self.length(like, dim, self.padding.behind))
        return inserted(self.like, aten.arange.start, bounds, {"device": fake_of(like).device})

    def length(self, node: Node, dim: int, more: int) -> object:
        return sum_of(size_as_node(self.like, node, dim), more, self.like)

    def filled(self, made: Node, source: Node) -> Node:
        """Fill the extra columns of the padded mask with the value of the padding."""
        dim, fake = fake_of(source).dim() - 1, fake_of(source)
        at = self.places(source, dim)
        own = inserted(self.like, aten.ge.Scalar, (at, 0))
        if self.padding.behind:
            last = self.length(source, dim, 0)
            own = inserted(self.like, torch.logical_and, (own, inserted(self.like, torch.lt, (at, last))))
        value = inserted(
            self.like,
            aten.scalar_tensor.default,
            (self.padding.value,),
            {"dtype": fake.dtype, "device": fake.device},
        )
        return inserted(self.like, aten.where.self, (own, made, value))

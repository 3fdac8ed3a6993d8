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
from ...passes.rules import filling_of
from ...passes.rules.forward import Part, is_filled, part_of
from ..reading.aten import erase_unread, inserted, size_as_node, sum_of
from ..reading.row_ties import operand_dim
from ..reading.values import fake_of, is_parameter
from ..rows.row_slices import Known, OtherRows, Parts, columns_of, with_rows

aten = torch.ops.aten


@dataclass(frozen=True)
class Padding(OtherRows):
    """A row of numbers with more at its ends: ``before`` in front of its own and ``behind`` them. A mask has
    ``value`` there."""

    before: int
    behind: int
    value: float

    @property
    def first(self) -> int:
        return -self.before

    def count(self, size: object, like: Node) -> object:
        return sum_of(size, self.before + self.behind, like)

    def read(self, node: Node, dim: int, like: Node) -> Node:
        """Extend a row of numbers by repeating its ends. An index does so, and the row is then read
        whole."""
        at = inserted(
            like, aten.clamp.default, (self.places(node, dim, like), 0, length(node, dim, -1, like))
        )
        return inserted(like, aten.index_select.default, (node, dim, at))

    def made(self, node: Node, dim: int, like: Node) -> Node | None:
        """Build the padded identity matrix: ones where a column's place is that of the row."""
        if part_of(node) is not Part.DIAGONAL or dim != 1:
            return None
        rows, fake = arguments(node)["n"], fake_of(node)
        at = inserted(like, aten.arange.default, (rows,), {"device": fake.device})
        at = inserted(like, aten.unsqueeze.default, (at, 1))
        made = inserted(like, torch.eq, (at, self.places(node, 1, like)))
        return inserted(like, aten.to.dtype, (made, fake.dtype))

    def places(self, node: Node, dim: int, like: Node) -> Node:
        """Number the columns of a padded value. Its own first column is 0."""
        bounds = (-self.before, length(node, dim, self.behind, like))
        return inserted(like, aten.arange.start, bounds, {"device": fake_of(node).device})


def length(node: Node, dim: int, more: int, like: Node) -> object:
    return sum_of(size_as_node(like, node, dim), more, like)


def pad_before_masks(module: GraphModule) -> GraphModule:
    """Compute masks with extra columns from padded positions."""
    for node in list(module.graph.nodes):
        parts = columns_of(node)
        found = None if parts is None else padding_of(parts)
        if found is None or not is_mask(node, found[0]):
            continue
        source, padding = found
        known: Known = {}
        with module.graph.inserting_before(node):
            made = with_rows(source, fake_of(source).dim() - 1, padding, node, known)
            thin = not any(made.args[0] is at[0] and is_square(*at[:2]) for at, made in known.items())
            if thin:
                node.replace_all_uses_with(filled(made, source, padding, node))
        erase_unread(module.graph, [node] if thin else [made])
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


def is_square(row: Node, dim: int) -> bool:
    """Has a value a row for each of its columns, so that a copy of it is a matrix?"""
    size = fake_of(row).shape[dim]
    return any(is_equal(s, size) for d, s in enumerate(fake_of(row).shape) if d != dim)


def filled(made: Node, source: Node, padding: Padding, like: Node) -> Node:
    """Fill the extra columns of the padded mask with the value of the padding."""
    dim, fake = fake_of(source).dim() - 1, fake_of(source)
    at = padding.places(source, dim, like)
    own = inserted(like, aten.ge.Scalar, (at, 0))
    if padding.behind:
        last = length(source, dim, 0, like)
        own = inserted(like, torch.logical_and, (own, inserted(like, torch.lt, (at, last))))
    kwargs = {"dtype": fake.dtype, "device": fake.device}
    value = inserted(like, aten.scalar_tensor.default, (padding.value,), kwargs)
    return inserted(like, aten.where.self, (own, made, value))

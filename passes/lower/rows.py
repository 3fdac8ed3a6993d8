"""Rows of a chunk: which of them exist, and where they are in the chunk and among all rows.

A row exists if its token is in the value's domain (``lo`` and ``hi`` of its fact).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..ir import Edge, Mark, Tokens, rank_of, value_of
from ..rules import indices_of
from .reading import Reading

aten, prims = torch.ops.aten, torch.ops.prims


class RowReading(Reading):
    """A node's operands and positions, with regard to rows of the chunk that do not exist."""

    def operand(self, edge: Edge) -> Node:
        """Read an operand as its edge says; an index looks up row 0 where a row does not exist. The number
        that the chunk computes for such a row may be outside the table."""
        value = super().operand(edge)
        if edge.operand in self.draft.inside and edge.operand in indices_of(self.node):
            return self.zero_beyond(edge.operand, value, edge.operand)
        return value

    def blocks_of_rows(self, block: int) -> Node:
        """Return the token of each row, ``[C]``; of blocks of several tokens, the number of the block."""
        rows = self.graph.call_function(
            prims.iota.default,
            (self.scalar("rows", block),),
            dict(start=0, step=1, dtype=torch.int64, device=self.device(), requires_grad=False),
        )
        return self.graph.call_function(aten.add.Scalar, (rows, self.scalar("first", block)))

    def inside_domain(self, fact: Tokens, rank: int, mark: Mark) -> Node:
        """Build a boolean that is true where a row of the chunk exists. It is shaped to broadcast against a
        value of that rank."""
        tokens, length = self.blocks_of_rows(mark.block), self.scalar("length", mark.block)
        call = self.graph.call_function
        inside = None
        if fact.lo > 0:
            inside = call(aten.ge.Scalar, (tokens, fact.lo))
        if fact.hi < 0:
            below = call(aten.lt.Scalar, (tokens, call(operator.add, (length, fact.hi))))
            inside = below if inside is None else call(aten.logical_and.default, (inside, below))
        if mark.step != 1:
            size = self.scalar("rows", mark.block)
            grouped = call(aten.view.default, (inside, [1, size, 1]))
            grouped = call(aten.expand.default, (grouped, [self.symbol(mark.outer_size), size, mark.inner]))
            inside = call(aten.reshape.default, (grouped, [self.size(mark)]))
        return call(
            aten.view.default, (inside, [1] * mark.dim + [self.size(mark)] + [1] * (rank - mark.dim - 1))
        )

    def fill_outside(self, node: Node, value: Node, filling, source: Node | None = None) -> Node:
        """Fill the rows that the source does not have.

        source  an operand of the node; None: its first argument
        """
        source = node.args[0] if source is None else source
        fact = self.domain(source)
        if fact.lo <= 0 and fact.hi >= 0:
            return value
        if not isinstance(filling, Node):
            like = value_of(source)
            filling = self.graph.call_function(
                aten.full.default, ([], filling), dict(dtype=like.dtype, device=like.device)
            )
        inside = self.inside_domain(fact, rank_of(node), self.fact(node).rows)
        return self.graph.call_function(aten.where.self, (inside, value, filling))

    def rows_of_chunk(self, index: Node, mark: Mark, low: int = 0) -> tuple[Node, Node]:
        """Locate the rows that an index names in the chunk, and tell which of them are there.

        A row of another chunk gets the place of some row that exists.

        index  a value (or number) of the body: positions along the marked dimension at full length, negative
               ones from its end
        low    the token of row 0 of that dimension
        """
        call = self.graph.call_function
        rows, length, first = (self.scalar(name, mark.block) for name in ("rows", "length", "first"))
        size = call(operator.mul, (length, self.symbol(mark.step_size))) if mark.step != 1 else length
        index = call(
            aten.where.self, (call(aten.lt.Scalar, (index, 0)), call(aten.add.Tensor, (index, size)), index)
        )
        inner = call(aten.remainder.Scalar, (index, mark.inner)) if mark.inner != 1 else None
        tokens = call(aten.floor_divide.default, (index, mark.inner)) if mark.inner != 1 else index
        outer = call(aten.floor_divide.default, (tokens, length)) if mark.outer != 1 else None
        tokens = call(aten.remainder.Scalar, (tokens, length)) if mark.outer != 1 else tokens
        offset = call(operator.sub, (low, first)) if low else call(operator.neg, (first,))
        local = call(aten.add.Tensor, (tokens, offset))
        inside = call(
            aten.logical_and.default, (call(aten.ge.Scalar, (local, 0)), call(aten.lt.Scalar, (local, rows)))
        )
        local = call(aten.clamp.default, (local, 0, call(operator.sub, (rows, 1))))
        if outer is not None:
            local = call(aten.add.Tensor, (local, call(aten.mul.Tensor, (outer, rows))))
        if inner is not None:
            local = call(aten.add.Tensor, (call(aten.mul.Scalar, (local, mark.inner)), inner))
        return local, inside

    def places(self, node: Node, device: torch.device) -> Node:
        """Compute the position in the full value (row-major) of every entry of the chunk's rows."""
        call, fact, rank = self.graph.call_function, self.fact(node), rank_of(node)
        sizes = self.sizes(node)
        total: Node | None = None
        for dim in range(rank):
            full = sizes[dim]
            if dim == fact.rows.dim:
                place, full = self.places_of_rows(fact, sizes[dim], device)
            elif fact.keys is not None and dim == fact.keys.dim:
                place, full = (
                    self.counted(self.scalar("keys"), device, self.first_key()),
                    self.scalar("length"),
                )
            else:
                place = self.counted(sizes[dim], device)
            place = call(aten.view.default, (place, [-1] + [1] * (rank - dim - 1)))
            if total is not None:
                place = call(aten.add.Tensor, (call(aten.mul.Tensor, (total, full)), place))
            total = place
        assert total is not None, f"{node} has no dimensions"
        return total

    def first_key(self) -> Node:
        """Return the token of the first key of the chunk."""
        return self.graph.call_function(operator.sub, (self.scalar("first"), self.scalar("offset")))

    def positions(self, node: Node, dim: int) -> Node:
        """Compute positions along a dimension of a value. For a dimension of tokens or keys, these are the
        positions of the chunk's among all of them."""
        size, device = self.sizes(node)[dim], value_of(node).device
        if self.carries_tokens(node, dim):
            return self.places_of_rows(self.fact(node), size, device)[0]
        return self.counted(size, device, self.first_key() if self.carries_keys(node, dim) else None)

    def counted(self, count: int | Node, device: torch.device, first: Node | None = None) -> Node:
        """Count up from ``first``: ``first, first + 1, …``, ``count`` numbers in all."""
        steps = self.graph.call_function(
            prims.iota.default,
            (count,),
            dict(start=0, step=1, dtype=torch.int64, device=device, requires_grad=False),
        )
        return steps if first is None else self.graph.call_function(aten.add.Tensor, (steps, first))

    def places_of_rows(self, fact: Tokens, size: Node, device: torch.device) -> tuple[Node, Node]:
        """Compute positions of the chunk's rows along the full token dimension, and the size of that
        dimension."""
        call, mark = self.graph.call_function, fact.rows
        rows, length, first = (self.scalar(name, mark.block) for name in ("rows", "length", "first"))
        if fact.hi != fact.lo:
            length = call(operator.add, (length, fact.hi - fact.lo))
        first = call(operator.sub, (first, fact.lo)) if fact.lo else first
        place = self.counted(rows, device, first)
        if mark.step == 1:
            return place, length
        outer = self.symbol(mark.outer_size)
        groups = call(aten.view.default, (self.counted(outer, device), [outer, 1, 1]))
        place = call(aten.view.default, (place, [1, rows, 1]))
        place = call(aten.add.Tensor, (call(aten.mul.Tensor, (groups, length)), place))
        inner = call(aten.mul.Scalar, (place, mark.inner)), self.counted(mark.inner, device)
        place = call(aten.reshape.default, (call(aten.add.Tensor, inner), [size]))
        return place, call(operator.mul, (length, self.symbol(mark.step_size)))

    def iota(self, node: Node, start: Any, step: Any) -> Node:
        rows = self.graph.call_function(
            prims.convert_element_type.default,
            (self.places(node, node.kwargs["device"]), node.kwargs["dtype"]),
        )
        if step != 1:
            rows = self.graph.call_function(aten.mul.Scalar, (rows, step))
        return (
            rows
            if start == 0
            else self.graph.call_function(
                aten.add.Scalar, (rows, self.read_int(start) if isinstance(start, Node) else start)
            )
        )

    def zeros(self, node: Node) -> Node:
        """Make the chunk's rows of a value of zeros."""
        value = value_of(node)
        return self.graph.call_function(
            aten.full.default, (self.sizes(node), 0), dict(dtype=value.dtype, device=value.device)
        )

    def zero_unless(self, inside: Node, value: Node, like: Node) -> Node:
        """Zero a value where a mask is false. The zeros have the dtype of ``like``."""
        return self.chosen(inside, value, 0, value_of(like).dtype, value_of(like).device)

    def chosen(
        self, where: Node, value: Node, other: float, dtype: torch.dtype, device: torch.device
    ) -> Node:
        """Choose a value where a mask is true, and a number elsewhere."""
        number = self.graph.call_function(aten.full.default, ([], other), dict(dtype=dtype, device=device))
        return self.graph.call_function(aten.where.self, (where, value, number))

    def zero_beyond(self, operand: Node, value: Node, like: Node, filling: float = 0) -> Node:
        """Zero the rows of a value that an operand does not have, or fill them with another number. The value
        is shaped like ``like``."""
        fact = self.domain(operand)
        if not isinstance(fact, Tokens) or fact.lo <= 0 and fact.hi >= 0:
            return value
        inside = self.inside_domain(fact, rank_of(like), fact.rows)
        return self.chosen(inside, value, filling, value_of(like).dtype, value_of(like).device)

    def places_along(self, operand: Node, filling: int) -> Node:
        """Compute the position of each of the chunk's rows among all rows of a value. The result broadcasts
        against the value. Rows that do not exist get the number ``filling``."""
        call, fact, rank = self.graph.call_function, self.fact(operand), rank_of(operand)
        device, dim = value_of(operand).device, fact.rows.dim
        place, _ = self.places_of_rows(fact, self.size(fact.rows), device)
        place = call(aten.view.default, (place, [-1] + [1] * (rank - dim - 1)))
        fact = self.domain(operand)
        if fact.lo <= 0 and fact.hi >= 0:
            return place
        inside = self.inside_domain(fact, rank, fact.rows)
        return self.chosen(inside, place, filling, torch.int64, device)

    def summand(self, operand: Node) -> Node:
        """Read an operand of a sum over rows, with zeros in rows that do not exist."""
        return self.zero_beyond(operand, self.read(operand), operand)

    def place_of_row(self, node: Node, index: Any) -> tuple[Node, Node]:
        """Locate one row of all tokens in the chunk, as ``[1]``, and tell whether it is there."""
        index = self.read_int(index) if isinstance(index, Node) else index
        place = self.graph.call_function(
            aten.full.default, ([1], index), dict(dtype=torch.int64, device=value_of(node).device)
        )
        return self.rows_of_chunk(place, self.fact(node).rows, self.fact(node).lo)

    def row_picked(self, operand: Node, dim: int, index: Any) -> Node:
        """Pick one row of all tokens, ``[…, 1, …]``, from the chunk that has it; zero in other chunks."""
        local, inside = self.place_of_row(operand, index)
        row = self.graph.call_function(aten.index_select.default, (self.read(operand), dim, local))
        return self.zero_unless(inside, row, operand)

    def key_picked(self, operand: Node, dim: int, index: Any) -> Node:
        """Pick one key of all, ``[…, 1, …]``; zero if the chunk does not read it."""
        call, keys, device = self.graph.call_function, self.scalar("keys"), value_of(operand).device
        place = call(
            aten.full.default, ([1], self.key_at(operand, dim, index)), dict(dtype=torch.int64, device=device)
        )
        place = call(aten.sub.Scalar, (place, self.first_key()))
        bounds = call(aten.ge.Scalar, (place, 0)), call(aten.lt.Scalar, (place, keys))
        place = call(aten.clamp.default, (place, 0, call(operator.sub, (keys, 1))))
        key = call(aten.index_select.default, (self.read(operand), dim, place))
        inside = call(aten.view.default, (call(aten.logical_and.default, bounds), [1] * rank_of(operand)))
        return self.zero_unless(inside, key, operand)

    def key_put(self, node: Node, dim: int, index: Any, key: Node, like: Node) -> Node:
        """Put one key, ``[…, 1, …]``, into the chunk's keys of a value of zeros."""
        call, shape = self.graph.call_function, [1] * rank_of(node)
        shape[dim] = -1
        places = call(aten.view.default, (self.positions(node, dim), shape))
        at_key = call(aten.eq.Scalar, (places, self.key_at(node, dim, index)))
        return self.zero_unless(at_key, key, like)

    def key_at(self, node: Node, dim: int, index: Any) -> Any:
        """Convert the index of a key to its place counted from the first key."""
        index, size = (
            self.read_int(index) if isinstance(index, Node) else index or 0,
            value_of(node).shape[dim],
        )
        if not isinstance(index, int) or index >= 0:
            return index
        count = size if isinstance(size, int) else self.symbol(size)
        return self.graph.call_function(operator.add, (count, index))

    def row_put(self, node: Node, dim: int, index: Any, row: Node, like: Node) -> Node:
        """Put one row, ``[…, 1, …]``, into the chunk's rows of a value of zeros. Only the chunk that has the
        row writes it."""
        local, inside = self.place_of_row(node, index)
        return self.graph.call_function(
            aten.index_add.default, (self.zeros(node), dim, local, self.zero_unless(inside, row, like))
        )

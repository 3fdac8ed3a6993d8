"""Inputs of a chunk body, as a driver slices them, and sizes of values at chunk length."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir import (
    Analysis,
    Binding,
    BindingRole,
    Body,
    ChosenKernel,
    Edge,
    Kind,
    Mark,
    Role,
    Size,
    Sweep,
    Tokens,
    canonical_order,
    hint,
    in_blocks,
    is_tensor,
    numbers_told,
    shape_of,
    symbols_in,
    total_dtype,
    value_of,
)

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


def known_number(value: object) -> Any:
    """Return a number that is the same at every length, or None. A number in which all sizes cancel (``rows /
    (2 * rows)``) is a constant, although it has a symbolic type."""
    if isinstance(value, torch.SymInt | torch.SymFloat) and value.node.expr.is_number:
        return int(value.node.expr) if isinstance(value, torch.SymInt) else float(value.node.expr)
    return value if isinstance(value, int | float) else None


class Inputs:
    """The graph of a body while it is written, with its inputs so far."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.bindings: dict[tuple, tuple[Binding, Node]] = {}

    def bind(self, binding: Binding) -> Node:
        """Return the body's input for a binding, made at its first use. Its name is made unique."""
        role, source = binding.role, binding.source
        key = (role, source, binding.name if source is None else None, binding.low, binding.output)
        if key not in self.bindings:
            self.bindings[key] = (binding, self.placeholder(binding))
            for given in numbers_told(binding):  # Inductor needs each symbol of an expression as an input
                for symbol in symbols_in(given):
                    self.symbol(symbol)
            if binding.mark is not None:  # strides of row views are multiples of these
                self.counts(binding.mark.block)
        return self.bindings[key][1]

    def counts(self, block: int) -> None:
        """Bind the rows of a chunk and of all tokens as inputs, counted in blocks of ``block`` tokens."""
        for name in ("rows", "length"):
            self.bind(Binding(BindingRole.SCALAR, None, in_blocks(name, block)))

    def placeholder(self, binding: Binding) -> Node:
        last = list(self.bindings.values())[-1][1] if self.bindings else None
        name = binding.name if binding.source is None else f"{binding.name}_{binding.role}"
        if any(n.target == name for _, n in self.bindings.values()):
            name = f"{name}_{len(self.bindings)}"
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            return self.graph.placeholder(name)

    def symbol(self, size: Size) -> Node | int:
        """Bind a size that is neither rows nor keys as an input, unless it is a constant."""
        known = known_number(size)
        if known is not None or isinstance(size, int):
            return known
        name = "size_" + "".join(c if c.isalnum() else "_" for c in str(size.node.expr))
        return self.bind(Binding(BindingRole.SCALAR, None, name, size=size))

    def body(self, kernels: Iterable[ChosenKernel] = ()) -> Body:
        """Finish the body, which returns nothing. Its inputs are in the order in which it reads them. Inputs
        that no node reads come last, such as sizes that Inductor needs."""
        self.graph.output(())
        read = dict.fromkeys(i for n in canonical_order(self.graph) for i in n.all_input_nodes)
        given = {placeholder: binding for binding, placeholder in self.bindings.values()}
        inputs = [*filter(given.__contains__, read), *(n for n in given if n not in read)]
        begin = next(n for n in self.graph.nodes if n.op != "placeholder")
        for placeholder in inputs:
            begin.prepend(placeholder)
        bindings = tuple(map(given.__getitem__, inputs))
        return Body(GraphModule({}, self.graph), bindings, tuple(kernels))


class Draft(Inputs):
    """A chunk body while it is written, with its values for the nodes of a sweep.

    values      node of the sweep → its value in the body
    appended    node → the buffer of keys that its rows were appended to
    final_rows  key accumulator → the chunk's own rows of it
    """

    def __init__(self, sweep: Sweep, analysis: Analysis, kernels: Mapping[Node, ChosenKernel]):
        super().__init__()
        self.sweep, self.analysis, self.kernels = sweep, analysis, kernels
        self.inside = frozenset(sweep.nodes)
        self.values: dict[Node, Node] = {}
        self.appended: dict[Node, Node] = {}
        self.final_rows: dict[Node, Node] = {}
        self.used: dict[ChosenKernel, None] = {}

    def scalar(self, name: str, block: int = 1) -> Node:
        """Bind a number of the chunk, counted in blocks of ``block`` tokens.

        name  ``rows`` C, ``keys`` S, ``first`` token, ``offset`` of the chunk in its key range, ``length`` T
        """
        return self.bind(Binding(BindingRole.SCALAR, None, in_blocks(name, block)))


class Reading:
    """One node of a body while it is written, and its operands at chunk length."""

    def __init__(self, draft: Draft, node: Node):
        self.draft, self.node = draft, node
        self.sweep, self.analysis, self.graph = draft.sweep, draft.analysis, draft.graph
        self.scalar, self.symbol = draft.scalar, draft.symbol

    def size(self, mark: Mark, name: str = "rows") -> Node:
        size = self.scalar(name, mark.block)
        if mark.step == 1:
            return size
        return self.graph.call_function(operator.mul, (size, self.symbol(mark.step_size)))

    def unflattened(self, node: Node, mark: Mark, name: str = "rows") -> list:
        """Return the sizes of a value with the token dimension split into outer, rows, inner."""
        sizes = self.sizes(node)
        sizes[mark.dim : mark.dim + 1] = [
            self.symbol(mark.outer_size),
            self.scalar(name, mark.block),
            mark.inner,
        ]
        return sizes

    def sizes(self, node: Node, output: int | None = None) -> list:
        """Return the shape of a value at chunk length."""
        fact = self.fact(node, output)
        shape = list(value_of(node, output).shape)
        sizes: list = [s if isinstance(s, int) else None for s in shape]
        if isinstance(fact, Tokens):
            sizes[fact.rows.dim] = self.size(fact.rows)
            if fact.keys is not None:
                sizes[fact.keys.dim] = self.columns(shape[fact.keys.dim], fact.keys)
        for i, size in enumerate(sizes):
            if size is None:
                sizes[i] = self.symbol(shape[i])
        return sizes

    def columns(self, size, mark: Mark) -> Node:
        """Count the keys of the chunk, and the columns beyond all keys (attention sinks).

        size  columns of the matrix of scores at full length
        """
        keys, extra = self.size(mark, "keys"), hint(size) - hint(self.analysis.length)
        return self.graph.call_function(operator.add, (keys, extra)) if extra else keys

    def column(self, node: Node, at: int | None) -> object:
        """Convert a bound of a slice along keys to the chunk's columns. A bound within the keys counts from
        the first key, and stays as it is. A bound beyond them counts from the last key."""
        length = hint(self.analysis.length)
        if isinstance(at, Node):
            at = hint(value_of(at))
        if at is None or at < length:
            return at
        return self.columns(min(at, shape_of(node)[self.fact(node).keys.dim]), self.fact(node).keys)

    def fact(self, node: Node, output: int | None = None) -> Any:
        fact = self.analysis.facts[node]
        return fact[output or 0] if isinstance(fact, tuple) else fact

    def read(self, node: Node, low: int | None = None) -> Node:
        """Read the chunk's rows of a value, wherever it is stored; all of a value without rows.

        low  the token of its row 0; None: that of the fact less the shift of the edge
        """
        fact = self.fact(node) if not isinstance(value_of(node), (tuple, list)) else None
        if isinstance(fact, Tokens) and low is None:
            low = fact.lo - self.shift(node)
        if node in self.draft.inside and (not isinstance(fact, Tokens) or low == fact.lo):
            return self.final_rows(node) if node in self.sweep.keysums else self.draft.values[node]
        if not isinstance(fact, Tokens):
            return self.read_whole(node)
        assert low is not None
        value = self.draft.bind(Binding(BindingRole.ROWS, node, node.name, fact.rows, low, columns=fact.keys))
        return value if fact.rows.step == 1 else self.reshaped(value, self.sizes(node))

    def read_keys(self, node: Node) -> Node:
        """Read the key range of a value."""
        fact = self.fact(node)
        if not isinstance(fact, Tokens):
            return self.read_whole(node)
        if node in self.draft.appended:
            return self.draft.appended[node]
        return self.draft.bind(Binding(BindingRole.KEYS, node, node.name, fact.rows))

    def read_whole(self, node: Node) -> Node:
        """Read a value with all its rows. The chunk itself has only some rows of a value of tokens, and only
        a part of a sum, so that these are always inputs."""
        partial = node in self.sweep.summed or isinstance(self.fact(node), Tokens)
        if node in self.draft.inside and not partial:
            return self.draft.values[node]
        if not is_tensor(node):
            return self.draft.bind(Binding(BindingRole.SCALAR, node, node.name))
        return self.draft.bind(Binding(BindingRole.WHOLE, node, node.name))

    def final_rows(self, node: Node) -> Node:
        """Read the chunk's own rows of a key accumulator. They are final because every later row has added
        its part."""
        if node not in self.draft.final_rows:
            mark, dtype = self.fact(node).rows, value_of(node).dtype
            total = self.draft.bind(Binding(BindingRole.KEYTOTAL, node, node.name, mark))
            rows = self.graph.call_function(
                streambp.rows_at.default, (total, mark.dim, self.scalar("offset"), self.scalar("rows"))
            )
            if total_dtype(dtype) != dtype:
                rows = self.graph.call_function(prims.convert_element_type.default, (rows, dtype))
            self.draft.final_rows[node] = rows
        return self.draft.final_rows[node]

    def shift(self, operand: Node) -> int:
        """Return the constant shift by which this node reads an operand's rows, or 0."""
        reaches = (
            e.reach
            for e in self.analysis.edges.get(self.node, ())
            if e.operand is operand and e.role is Role.HALO and e.reach.lo == e.reach.hi
        )
        return next((int(reach.lo) for reach in reaches), 0)

    def domain(self, operand: Node) -> Any:
        """Return the fact of an operand, with its domain counted in the rows of this node."""
        fact, shift = self.fact(operand), self.shift(operand)
        return (
            replace(fact, lo=fact.lo - shift, hi=fact.hi - shift)
            if isinstance(fact, Tokens) and shift
            else fact
        )

    def operand(self, edge: Edge) -> Node:
        """Read an operand as its edge says."""
        if edge.role is Role.HALO and edge.reach.lo == edge.reach.hi:  # rows shifted by a constant
            return self.read(edge.operand, self.fact(edge.operand).lo - int(edge.reach.lo))
        if edge.role is Role.HALO:  # all rows, of an earlier sweep even if this one has some of them
            return self.draft.bind(Binding(BindingRole.WHOLE, edge.operand, edge.operand.name))
        if edge.role is Role.WHOLE:
            return self.read_whole(edge.operand)
        return self.read_keys(edge.operand) if edge.role is Role.KEYS else self.read(edge.operand)

    def edges(self, node: Node) -> tuple[Edge, ...]:
        return self.analysis.edges[node]

    def adds_up(self, node: Node) -> bool:
        """Is a node a sum over chunks?"""
        return self.analysis.kinds[node] is Kind.SUM

    def makes_keys(self, node: Node, operand: Node) -> bool:
        """Does a node have a column per key, and its operand none? An example is scores of blocks, repeated
        for each key of a block."""
        made, read = self.fact(node), self.fact(operand)
        return isinstance(made, Tokens) and made.keys is not None and read.keys is None

    def key_columns(self, node: Node, value: Node) -> Node:
        """Select the columns of the chunk's keys from a value that has all columns of a node. Columns beyond
        all keys are kept."""
        call, mark = self.graph.call_function, self.fact(node).keys
        first = call(operator.sub, (self.scalar("first"), self.scalar("offset")))
        keys = call(streambp.rows_at.default, (value, mark.dim, first, self.scalar("keys")))
        extra = hint(value_of(node).shape[mark.dim]) - hint(self.analysis.length)
        if not extra:
            return keys
        beyond = call(aten.slice.Tensor, (value, mark.dim, -extra, sys.maxsize))
        return call(aten.cat.default, ([keys, beyond], mark.dim))

    def carries_keys(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.keys is not None and fact.keys.dim == dim

    def carries_tokens(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.rows.dim == dim

    def read_int(self, node: Node) -> Any:
        """Read a number that the graph computes."""
        known = known_number(value_of(node))
        if known is not None:
            return known
        return self.draft.bind(Binding(BindingRole.SCALAR, node, node.name))

    def reshaped(self, value: Node, sizes: list) -> Node:
        return self.graph.call_function(aten.reshape.default, (value, sizes))

    def device(self) -> torch.device:
        return next(value_of(n).device for n in self.sweep.nodes if is_tensor(n))

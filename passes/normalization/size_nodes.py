"""Sizes as nodes: expressions of the sizes of a graph's inputs, written into the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from ..ir import is_tangent, parted, simplified, value_of

aten = torch.ops.aten

DIVISIONS = {"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}


class SizeNodes:
    """Sizes of a graph's inputs, and the nodes that read them.

    No size is read from a tangent, because a forward has none.

    known    size → an input that has it, and in which dimension
    parts    part of a size beside its constant → that size, and the constant
    symbols  symbol → an input that is its number
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict[object, tuple[Node, int]] = {}
        self.parts: dict[object, tuple[object, int]] = {}
        self.symbols: dict[object, Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = None if is_tangent(node) else value_of(node)
            if isinstance(value, torch.SymInt):
                self.symbols.setdefault(value.node.expr, node)
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    expr = size.node.expr if isinstance(size, torch.SymInt) else size
                    self.known.setdefault(expr, (node, dim))
                    if isinstance(size, torch.SymInt) and not expr.is_number:
                        self.learn_part(expr)

    def learn_part(self, expr) -> None:
        """Learn the part of a size beside its constant: from ``(t - 1) // 2 + 1``, the quotient."""
        part, factor, rest = parted(expr)
        if factor == 1 and rest:
            self.parts.setdefault(part, (expr, rest))

    def written(self, size: int | torch.SymInt, before: Node) -> Node | int | None:
        """Write a node or number for a size. Returns None if no sums, products, quotients and remainders of
        input sizes make it."""
        return size if isinstance(size, int) else self.expression(simplified(size.node.expr), before)

    def expression(self, expr, before: Node) -> Node | int | None:
        if expr.is_Integer:
            return int(expr)
        if expr in self.symbols:
            return self.symbols[expr]
        if expr in self.known:
            return self.input_size(expr, before)
        if expr in self.parts:
            whole, rest = self.parts[expr]
            return self.sum(self.input_size(whole, before), -rest, before)
        terms = expr.args
        if type(expr).__name__ in DIVISIONS:
            over, under = (self.expression(part, before) for part in terms)
            divide = DIVISIONS[type(expr).__name__]
            return None if over is None or under is None else self.combined(divide, over, under, before)
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            terms = [expr.base] * int(expr.exp)
        elif not (expr.is_Add or expr.is_Mul):
            return None
        first, *parts = (self.expression(part, before) for part in terms)
        total = first
        for part in parts:
            if total is None or part is None:
                return None
            total = self.sum(total, part, before) if expr.is_Add else self.product(total, part, before)
        return total

    def input_size(self, expr, before: Node) -> Node:
        """Write a node for a size that an input has."""
        node, dim = self.known[expr]
        with self.graph.inserting_before(before):
            size = self.graph.call_function(aten.sym_size.int, (node, dim))
        size.meta["val"] = value_of(node).shape[dim]
        return size

    def sum(self, a: Node | int, b: Node | int, before: Node) -> Node | int:
        return self.combined(operator.add, a, b, before)

    def product(self, a: Node | int, b: Node | int, before: Node) -> Node | int:
        return self.combined(operator.mul, a, b, before)

    def combined(self, combine: Callable, a: Node | int, b: Node | int, before: Node) -> Node | int:
        values = [value_of(p) if isinstance(p, Node) else p for p in (a, b)]
        if not isinstance(a, Node) and not isinstance(b, Node):
            return combine(a, b)
        with self.graph.inserting_before(before):
            total = self.graph.call_function(combine, (a, b))
        total.meta["val"] = combine(*values)
        return total

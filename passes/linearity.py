"""Linearity of a backward in its incoming gradient.

Autograd's own backward is linear; that of a custom function (a clipped or quantised gradient) need not
be. Only a linear one allows gradients to be computed for a tangent of one, and scaled when the real
tangent is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node

from .ir import arguments, is_tensor, is_view, value_of
from .rules import filling_of, form_of, linear_of
from .rules.facets import Form


def is_linear(graph: Graph, tangent: Node, outputs: Iterable[object]) -> bool:
    """Are all outputs linear in the tangent, as far as the rules of their ops tell? A linear output is zero
    for a tangent of zero, and twice as large for twice the tangent."""
    linear, zero = {tangent}, set[Node]()

    def fits(x: object) -> bool:
        return x in linear or is_nothing(x)

    def is_nothing(x: object) -> bool:
        return x in zero if isinstance(x, Node) else isinstance(x, (int, float)) and x == 0

    for node in graph.nodes:
        if is_zero(node, zero):
            zero.add(node)
        if linear.isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        if is_tensor(node) and is_rounded(value_of(node)) or not keeps(node, linear, fits):
            return False
        linear.add(node)
    return all(not isinstance(o, Node) or fits(o) for o in outputs)


def is_rounded(value: torch.Tensor) -> bool:
    """Does a value have an integer dtype, or float16? A loss is scaled to keep its gradients away from the
    smallest numbers of float16."""
    return not (value.is_floating_point() or value.is_complex()) or value.dtype is torch.float16


def is_zero(node: Node, zero: set[Node]) -> bool:
    """Is a value all zeros, created so or as a view or copy of such a value?"""
    if filling_of(node) == 0:
        return True
    same = is_view(node) or form_of(node) in (Form.COPY, Form.CAST, Form.ALIAS)
    return bool(node.args) and node.args[0] in zero and same


def keeps(node: Node, linear: set[Node], is_linear_or_zero: Callable[[object], bool]) -> bool:
    """Is a node linear in those of its operands that are linear in the tangent?"""
    if node.target is operator.getitem:
        return node.args[0] in linear
    terms = linear_of(node)
    if terms is None:
        return False
    given = arguments(node)
    others = {n for name, value in given.items() if name not in terms.names for n in nodes_in(value)}
    return linear.isdisjoint(others) and all(
        all(map(is_linear_or_zero, parts_of_argument(given[term[0]])))
        if len(term) == 1
        else sum(given[factor] in linear for factor in term) == 1
        for term in terms.terms
    )


def parts_of_argument(value: object) -> tuple:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def nodes_in(value: object) -> list[Node]:
    return [a for a in parts_of_argument(value) if isinstance(a, Node)]

"""Abstract interpretation of a graph over the domains of masks: one visit per node."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import Graph, Node

from ..ir import value_of
from ..phases import check_time
from ..rules import find_rule, form_of, functional
from ..rules.facets import Form
from .domains import Abstract, Affine, Indicator
from .operands import as_band, is_bounded


def evaluate(graph: Graph, with_tokens: Container[Node] | None = None) -> dict[Node, Abstract]:
    """The abstract value of every node of the graph (``None`` where nothing is known).

    with_tokens  the placeholders that carry tokens; others hold weights, which mask nothing. By default none
                 is taken for a weight
    """
    evaluation = Evaluation(with_tokens)
    for node in graph.nodes:
        check_time()
        evaluation.visit(node)
    return evaluation.values


class Evaluation:
    """What is known so far; called with an argument of a node, its abstract value (see `operands.Known`)."""

    def __init__(self, with_tokens: Container[Node] | None):
        self.with_tokens = with_tokens
        self.values: dict[Node, Abstract] = {}
        self.bounded: set[Node] = set()
        self.nonnegative: set[Node] = set()
        self.indicators: dict[Node, Indicator] = {}

    def visit(self, node: Node) -> None:
        if not isinstance(value_of(node), torch.Tensor):
            return
        rule = find_rule(node) if node.op == "call_function" else None
        if rule is not None and rule.mask is not None and functional(node.target) is None:
            value = rule.mask(node, self)
            if isinstance(value, Indicator):
                self.indicators[node], value = value, as_band(value, node)
            wraps = isinstance(value, Affine) and not has_numbers(value_of(node).dtype, value)
            self.values[node] = None if wraps else value
        if self.masks_nothing(node):
            self.bounded.add(node)
        if rule is not None and rule.nonnegative:
            self.nonnegative.add(node)

    def __call__(self, arg: object) -> Abstract:
        if isinstance(arg, Node):
            return self.values.get(arg)
        return Affine(float(arg)) if isinstance(arg, (bool, int, float)) else None

    def repeated_by(self, arg: Node) -> Node:
        while form_of(arg) is Form.EXPAND:
            arg = arg.args[0]
        return arg

    def masks_nothing(self, node: Node) -> bool:
        """Are the numbers of a node far from the lowest of their dtype?"""
        if not value_of(node).dtype.is_floating_point:
            return True
        if node.op == "placeholder":
            return self.with_tokens is not None and node not in self.with_tokens
        value = self(node)
        if isinstance(value, Affine):
            return is_bounded(value.const)
        rule = find_rule(node) if node.op == "call_function" else None
        return rule is not None and rule.bounded is not None and rule.bounded(node, self)


WIDE_ENOUGH = 32  # bits of a dtype that counts the tokens of any sequence


def has_numbers(dtype: torch.dtype, value: Affine) -> bool:
    """Are all numbers of an affine value numbers of a dtype? Integers wrap around beyond its limits: 0 - 1 is
    255 in uint8. Half precision rounds positions from 257 (bfloat16) or 2049 (float16) on."""
    if dtype is torch.bool:
        return True
    if dtype.is_complex or value.slopes and (dtype.itemsize * 8 < WIDE_ENOUGH or not dtype.is_signed):
        return False
    limits = None if dtype.is_floating_point else torch.iinfo(dtype)
    return limits is None or limits.min <= value.const <= limits.max

"""Abstract interpretation of a graph over the domains of masks: one visit per node."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch.fx import Graph, Node

from ..ir import value_of
from ..phases import check_time
from ..rules import find_rule, form_of, functional
from ..rules.facets import Form
from .domains import Abstract, Affine, Indicator
from .operands import as_band, is_bounded, numbers_of

SAME_ENTRIES = (Form.ALIAS, Form.COPY, Form.RESHAPE, Form.UNSQUEEZE, Form.SQUEEZE)


def evaluate(graph: Graph, with_tokens: Container[Node] | None = None) -> dict[Node, Abstract]:
    """Evaluate every node of the graph to its abstract value (``None`` where nothing is known).

    with_tokens  the placeholders that carry tokens; others hold weights, which mask nothing. None: no
                 placeholder is taken for a weight
    """
    evaluation = Evaluation(with_tokens)
    for node in graph.nodes:
        check_time()
        evaluation.visit(node)
    return evaluation.values


class Evaluation:
    """Abstract values so far; a call with an argument of a node returns its abstract value. See
    `operands.Known`."""

    def __init__(self, with_tokens: Container[Node] | None):
        self.with_tokens = with_tokens
        self.values: dict[Node, Abstract] = {}
        self.bounded: set[Node] = set()
        self.nonnegative: set[Node] = set()
        self.integral: set[Node] = set()
        self.indicators: dict[Node, Indicator] = {}

    def visit(self, node: Node) -> None:
        if not isinstance(value_of(node), torch.Tensor):
            return
        rule = find_rule(node) if node.op == "call_function" else None
        if rule is not None and rule.mask is not None and functional(node.target) is None:
            value = rule.mask(node, self)
            if isinstance(value, Indicator):
                self.indicators[node], value = value, as_band(value, node)
            known = value is not None and self.computes_exactly(node, value)
            self.values[node] = value if known else None
        if self.masks_nothing(node):
            self.bounded.add(node)
        if rule is not None and rule.nonnegative:
            self.nonnegative.add(node)
        if self.has_integers(node):
            self.integral.add(node)

    def computes_exactly(self, node: Node, value: Abstract) -> bool:
        """Can the dtype of a node represent all known numbers that it reads and makes? A constant that a
        floating-point node reads may be rounded: kernels differ in that, and `Indicator` allows for it."""
        numbers = [a for a in numbers_of(node) if isinstance(a, (int, float, Node))]
        values = [value_of(a) if isinstance(a, Node) else a for a in numbers]
        dtype = value_of(node).dtype
        if isinstance(value, Affine) and not has_number(dtype, value.const):
            return False
        if dtype is torch.bool and len(values) == 2 and any(isinstance(v, torch.Tensor) for v in values):
            dtype = torch.result_type(*values)
        known = [v for v in (value, *map(self, numbers)) if isinstance(v, Affine)]
        if dtype.is_floating_point:
            return all(counts_tokens(dtype) for v in known if v.slopes)
        return all(has_number(dtype, v.const) and (counts_tokens(dtype) or not v.slopes) for v in known)

    def __call__(self, arg: object) -> Abstract:
        if isinstance(arg, Node):
            return self.values.get(arg)
        return Affine(float(arg)) if isinstance(arg, (bool, int, float)) else None

    def repeated_by(self, arg: Node) -> Node:
        while form_of(arg) is Form.EXPAND:
            arg = arg.args[0]
        return arg

    def floor_division_behind(self, arg: Node) -> Node | None:
        while form_of(arg) in SAME_ENTRIES:
            arg = arg.args[0]
        return arg if form_of(arg) is Form.FLOOR_DIVIDE else None

    def masks_nothing(self, node: Node) -> bool:
        """Are the numbers of a node far from the lowest of their dtype, so that they mask no key?"""
        if not value_of(node).dtype.is_floating_point:
            return True
        if node.op == "placeholder":
            return self.with_tokens is not None and node not in self.with_tokens
        value = self(node)
        if isinstance(value, Affine):
            return is_bounded(value.const)
        rule = find_rule(node) if node.op == "call_function" else None
        return rule is not None and rule.bounded is not None and rule.bounded(node, self)

    def has_integers(self, node: Node) -> bool:
        dtype = value_of(node).dtype
        if not dtype.is_floating_point:
            return not dtype.is_complex
        return form_of(node) in (*SAME_ENTRIES, Form.CAST, Form.EXPAND) and node.args[0] in self.integral


WIDE_ENOUGH = 32  # bits of a dtype that counts the tokens of any sequence


def counts_tokens(dtype: torch.dtype) -> bool:
    """Can a dtype represent the positions of all tokens, and their differences? Half precision rounds them
    from 257 (bfloat16) or 2049 (float16) on, and small integers wrap around."""
    return dtype is torch.bool or dtype.is_signed and dtype.itemsize * 8 >= WIDE_ENOUGH


def has_number(dtype: torch.dtype, number: float) -> bool:
    """Can a dtype represent a number, without rounding or wrapping around (0 - 1 is 255 in uint8)?"""
    if dtype.is_complex:
        return False
    if dtype is torch.bool or math.isinf(number):
        return dtype is torch.bool or dtype.is_floating_point
    if dtype.is_floating_point:
        return float(torch.tensor(number, dtype=dtype)) == number
    limits = torch.iinfo(dtype)
    return float(number).is_integer() and limits.min <= number <= limits.max

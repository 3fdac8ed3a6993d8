"""Ops that make constants and ranges."""

from __future__ import annotations

import math

from torch.fx import Node

from ...ir import shape_of, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    is_constant,
)
from ...mask_analysis.operands import (
    Known,
    is_boolean,
    without_zero_slopes,
)


def constant(node: Node, known: Known) -> Abstract:
    """Evaluate ``full(shape, value)`` or ``scalar_tensor(value)``."""
    fill = node.args[1] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    return in_dtype(Affine(float(fill)), node) if isinstance(fill, (bool, int, float)) else None


def in_dtype(value: Abstract, node: Node) -> Abstract:
    """Convert a constant to the number that the result stores."""
    dtype = value_of(node).dtype
    if not is_constant(value) or dtype.is_floating_point or dtype.is_complex:
        return value
    return Affine(float(bool(value.const) if is_boolean(node) else math.trunc(value.const)))


def ranged(node: Node, known: Known) -> Abstract:
    start, step_ = node.kwargs["start"], node.kwargs["step"]
    return (
        None
        if isinstance(start, Node) or isinstance(step_, Node)
        else without_zero_slopes(Affine(start, ((0, step_),)), node)
    )


def accumulated(node: Node, known: Known) -> Abstract:
    value, dim = known(node.args[0]), node.args[1] % max(len(shape_of(node)), 1)
    if not is_constant(value):
        return None
    return without_zero_slopes(Affine(value.const, ((dim, value.const),)), node)

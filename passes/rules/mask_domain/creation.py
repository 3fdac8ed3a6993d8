"""Ops that make constants and ranges."""

from __future__ import annotations

from torch.fx import Node

from ...ir import shape_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    is_constant,
)
from ...mask_analysis.operands import (
    Known,
    without_zero_slopes,
)


def constant(node: Node, known: Known) -> Abstract:
    """``full(shape, value)``, ``scalar_tensor(value)``."""
    fill = node.args[1] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    return Affine(float(fill)) if isinstance(fill, (bool, int, float)) else None


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

"""Ops that turn masked scores into zeros: softmax, exponentials, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from ...ir import shape_of
from ...mask_analysis.domains import (
    Abstract,
    Band,
    is_empty_outside,
    is_zero_outside,
)
from ...mask_analysis.operands import (
    Known,
)

aten = torch.ops.aten


def normalized(node: Node, known: Known) -> Abstract:
    """Evaluate a softmax over keys, which turns empty scores into zeros. A row without a visible key becomes
    NaN."""
    scores = known(node.args[0])
    if isinstance(scores, Band) and not scores.lo <= 0 <= scores.hi:
        return None  # the first rows, or the last ones, see no key
    return safely_normalized(node, known)


def safely_normalized(node: Node, known: Known) -> Abstract:
    """Evaluate a softmax that turns a row without a visible key into zeros."""
    return zeroed(known(node.args[0]), node.args[1] % len(shape_of(node)))


def largest_backward(node: Node, known: Known) -> Abstract:
    """Evaluate the gradient of a row's largest score. It is zero except at that score, which is never
    hidden."""
    return zeroed(known(node.args[1]), node.args[2] % len(shape_of(node))) if node.args[3] else None


def zeroed(scores: Abstract, dim: int) -> Band | None:
    """Build the matrix that is zero where scores along their keys are empty. None if it is unknown which
    masks hide them."""
    if is_empty_outside(scores) and scores.key == dim and scores.visibility_masks is not None:
        return replace(scores, outside=0.0, key_masks=scores.visibility_masks, zero_inside=False)
    return None


def vanished(node: Node, known: Known) -> Abstract:
    """Evaluate an exponential, a sigmoid or a ReLU, each of which turns minus infinity into zero."""
    scores = known(node.args[0])
    return (
        replace(scores, outside=0.0, key_masks=(), zero_inside=False)
        if isinstance(scores, Band) and scores.outside == -math.inf
        else None
    )


def normalized_backward(node: Node, known: Known) -> Abstract:
    """Evaluate the gradient through a softmax, a sigmoid or a ReLU. It is zero where the op's result is."""
    gradient, value = (known(x) for x in node.args[:2])
    ordinary = gradient is None or is_zero_outside(gradient) or node.args[0] in known.bounded
    return value if is_zero_outside(value) and ordinary else None

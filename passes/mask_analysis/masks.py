"""Ops on masks: how they are joined, how they fill scores, and what a softmax makes of what is empty."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from ..ir import Agreement, shape_of, value_of
from .domains import (
    HIDING,
    Abstract,
    Affine,
    Band,
    all_of,
    everything,
    hull,
    intersected,
    is_constant,
    is_zero_outside,
    mask_of,
    matrix,
    one,
    same_axes,
    visible,
)
from .evaluation import Evaluation, lifted, lowest, shown

aten, streambp = torch.ops.aten, torch.ops.streambp


def conjoined(node: Node, get: Evaluation) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return other if constant_.const else Affine(0.0)
    if isinstance(a, Agreement) and isinstance(b, Agreement):
        return Agreement(a.same + b.same, a.upto + b.upto)
    for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):
        if isinstance(band, Agreement) and not isinstance(other, Band):
            return band
        if isinstance(band, Band) and band.outside is False:
            if isinstance(other, Band) and other.outside is False and same_axes(band, other):
                return intersected(band, other)
            return replace(
                band, seen=all_of(band.seen, one(mask_of(arg, node, band, False)) if other is None else None)
            )
    return both_masks(node, False) if a is b is None else None


def both_masks(node: Node, hides: bool) -> Band | None:
    """Two masks of which nothing is known, each hiding its own keys."""
    if len(shape_of(node)) < 2:
        return None
    return everything(node, hides, *(one(mask_of(x, node, matrix(node), hides)) for x in node.args[:2]))


def disjoined(node: Node, get: Evaluation) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return Affine(1.0) if constant_.const else other
    if isinstance(a, Band) and isinstance(b, Band) and a.outside is b.outside is False and same_axes(a, b):
        either = Band(a.row, a.key, min(a.lo, b.lo), max(a.hi, b.hi), False, assumes=a.assumes + b.assumes)
        if either.lo > -math.inf or either.hi < math.inf:
            return either
    left = [visible(a), visible(b)]  # both as what hides
    if None not in left and same_axes(*left):
        return replace(intersected(*left), outside=True)
    for band, other, arg in ((left[0], b, node.args[1]), (left[1], a, node.args[0])):
        if band is not None:
            return replace(
                band,
                outside=True,
                seen=all_of(band.seen, one(mask_of(arg, node, band, True)) if other is None else None),
            )
    return both_masks(node, True) if a is b is None else None


def inverted(node: Node, get: Evaluation) -> Abstract:
    """The complement of a half-plane is a half-plane; of another band, the same band with the outside
    true."""
    value = get(node.args[0])
    if is_constant(value):
        return Affine(float(not value.const))
    if not isinstance(value, Band):
        return None
    return visible(value) or (replace(value, outside=True) if value.outside is False else None)


def chosen(node: Node, get: Evaluation) -> Abstract:
    """``where(mask, inside, filling)``."""
    condition, inside, filling = (lifted(x, node, get) for x in node.args[:3])
    if is_constant(condition):
        return inside if condition.const else filling
    for zero, band in ((inside, filling), (filling, inside)):
        if zero == Affine(0.0) and isinstance(band, Band) and is_zero_outside(band):
            return band
    if (
        isinstance(inside, Band)
        and isinstance(filling, Band)
        and is_zero_outside(inside)
        and is_zero_outside(filling)
        and same_axes(inside, filling)
    ):
        return hull(inside, filling)
    found = []
    if is_constant(filling):
        found.append(
            emptied(node.args[1], seen_where(node.args[0], condition, node, False), filling.const, node, get)
        )
    if is_constant(inside):  # where(hidden, -inf, scores)
        found.append(
            emptied(
                node.args[2],
                visible(condition) or seen_where(node.args[0], condition, node, True),
                inside.const,
                node,
                get,
            )
        )
    bands = [band for band in found if band is not None]
    return next((band for band in bands if band.outside in HIDING), bands[0] if bands else None)


def seen_where(arg: object, condition: Abstract, like: Node, hides: bool) -> Band | None:
    """A condition as what is visible where it is not ``hides``: a band, a padding, or a stored mask."""
    if isinstance(condition, Band) and condition.outside is False and not hides:
        return condition
    if isinstance(condition, Agreement) and condition.upto and not hides:  # taken to grow with the rows
        return replace(matrix(like), hi=0, outside=False, assumes=(condition,))
    if condition is not None or len(shape_of(like)) < 2:
        return None
    return everything(like, False, one(mask_of(arg, like, matrix(like), hides)))


def emptied(scores: object, mask: Band | None, value: float, node: Node, get: Evaluation) -> Band | None:
    """Scores filled with one number where a mask does not leave them."""
    outside = lowest(value, node)
    if mask is None or outside is None:
        return None
    if value == 0:
        return replace(mask, outside=0.0, seen=()) if mask.hi < math.inf or mask.lo > -math.inf else None
    inner = lifted(scores, node, get)
    if isinstance(inner, Band) and inner.outside in HIDING and same_axes(inner, mask):
        return intersected(replace(mask, outside=outside, zero=inner.zero), inner)
    return replace(
        mask,
        outside=outside,
        seen=all_of(mask.seen, shown(scores, node, mask, get)),
        zero=inner == Affine(0.0),
    )


def filled(node: Node, get: Evaluation) -> Abstract:
    """``masked_fill(x, hidden, value)``."""
    x, hidden = (lifted(a, node, get) for a in node.args[:2])
    value = get(node.args[2])
    if is_constant(hidden):
        return value if hidden.const else x
    if not is_constant(value):
        return None
    if value == Affine(0.0) and isinstance(x, Band) and is_zero_outside(x):
        return x
    found = emptied(
        node.args[0], visible(hidden) or seen_where(node.args[1], hidden, node, True), value.const, node, get
    )
    if found is None and isinstance(x, Band) and x.outside in HIDING and lowest(value.const, node) in HIDING:
        return replace(x, outside=x.outside if lowest(value.const, node) == x.outside else "min", seen=None)
    return found


def normalized(node: Node, get: Evaluation) -> Abstract:
    """Softmax over keys turns empty scores into zeros.

    All scores of a row that sees no key become NaN, unless it is the safe softmax.
    """
    scores = get(node.args[0])
    if node.target is aten._softmax.default and isinstance(scores, Band) and not scores.lo <= 0 <= scores.hi:
        return None  # the first rows, or the last ones, see no key
    return zeroed(scores, node.args[1] % len(shape_of(node)))


def largest_backward(node: Node, get: Evaluation) -> Abstract:
    """The gradient of a row's largest score is zero but at that, which is never hidden."""
    return zeroed(get(node.args[1]), node.args[2] % len(shape_of(node))) if node.args[3] else None


def zeroed(scores: Abstract, dim: int) -> Band | None:
    """What is zero where scores along their keys are empty."""
    if (
        isinstance(scores, Band)
        and scores.outside in HIDING
        and scores.key == dim
        and scores.rests_on is not None
    ):
        return replace(scores, outside=0.0, seen=scores.rests_on, zero=False)
    return None


def vanished(node: Node, get: Evaluation) -> Abstract:
    """An exponential turns minus infinity into zero, and so do a sigmoid and a ReLU."""
    scores = get(node.args[0])
    return (
        replace(scores, outside=0.0, seen=(), zero=False)
        if isinstance(scores, Band) and scores.outside == -math.inf
        else None
    )


def normalized_backward(node: Node, get: Evaluation) -> Abstract:
    value = get(node.args[1])
    return value if isinstance(value, Band) and is_zero_outside(value) else None


TABLE = {
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), conjoined),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), disjoined),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), inverted),
    aten.where.self: chosen,
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), filled),
    aten._softmax.default: normalized,
    aten._safe_softmax.default: normalized,
    **dict.fromkeys((aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.relu.default), vanished),
    streambp.to_extreme.default: largest_backward,
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten.sigmoid_backward.default, aten.threshold_backward.default),
        normalized_backward,
    ),
}

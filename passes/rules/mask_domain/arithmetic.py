"""Arithmetic on positions, on scores, and on masks that are added to them."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch.fx import Node

from ...ir import shape_of, value_of
from ...mask_analysis.domains import (
    EMPTY,
    Abstract,
    Affine,
    Band,
    Difference,
    Distance,
    Indicator,
    as_key_mask,
    band_of_key_masks,
    full_band,
    have_same_axes,
    hull,
    intersection,
    is_constant,
    is_empty_outside,
    is_finite,
    is_zero_outside,
    merged,
    with_dims_renamed,
)
from ...mask_analysis.operands import (
    Known,
    broadcast_value,
    hiding_masks,
    is_boolean,
    is_bounded,
    lowest,
    one_per_row,
    token_pair,
    without_zero_slopes,
)
from .indicators import Instead, Numbers, entrywise
from .logic import conjoined, disjoined


def sum_of_numbers(node: Node) -> Numbers | None:
    alpha = node.kwargs.get("alpha", 1)
    return None if isinstance(alpha, Node) else lambda a, b: a + alpha * b


def difference_of_numbers(node: Node) -> Numbers | None:
    alpha = node.kwargs.get("alpha", 1)
    return None if isinstance(alpha, Node) else lambda a, b: a - alpha * b


def quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


@entrywise(sum_of_numbers, 2)
def added(node: Node, known: Known) -> Abstract:
    """Evaluate a sum of positions, of zeros outside a band, or of scores and an additive mask. Of booleans,
    it is a disjunction."""
    if is_boolean(node):
        return disjoined(node, known)
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    if isinstance(a, Affine) and isinstance(b, Affine):
        return affine_sum(a, b, node.kwargs.get("alpha", 1), node)
    if is_zero_outside(a) and is_zero_outside(b) and have_same_axes(a, b):
        return hull(a, b)
    for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):
        if is_empty_outside(band) and is_empty_outside(other) and have_same_axes(band, other):
            return intersection(band, other)
        if is_empty_outside(band):
            return replace(
                band,
                key_masks=merged((band.key_masks, hiding_masks(arg, node, band, known))),
                zero_inside=band.zero_inside and other == Affine(0.0),
            )
    return scores_with_mask(node, known)


@entrywise(difference_of_numbers, 2)
def subtracted(node: Node, known: Known) -> Abstract:
    """Evaluate a difference of positions, of zeros outside a band, or scores less a number of their row."""
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    if isinstance(a, Affine) and isinstance(b, Affine):
        return affine_sum(a, b, -node.kwargs.get("alpha", 1), node)
    if is_zero_outside(a) and is_zero_outside(b) and have_same_axes(a, b):
        return hull(a, b)
    if a is b is None and not value_of(node).dtype.is_floating_point:
        return difference(node, known)
    if b is None and is_empty_outside(a) and isinstance(node.args[1], Node):
        return replace(a, zero_inside=False) if one_per_row(node.args[1], node, a) else None
    return None


def difference(node: Node, known: Known) -> Difference | None:
    """Evaluate a per-token value of the row less that of the key, or the other way round."""
    found = token_pair(node, known)
    if found is None or node.kwargs.get("alpha", 1) != 1:
        return None
    pair, row_is_first = found
    wraps = value_of(node).dtype is not torch.int64  # a guard bounds positions of 64 bits
    return Difference(*pair, sign=0 if wraps else 1 if row_is_first else -1)


def affine_sum(a: Affine, b: Affine, scale: float, node: Node) -> Affine | None:
    """Compute ``a + scale * b``; None if it may overflow."""
    const, slopes = a.const + scale * b.const, dict(a.slopes)
    if math.isnan(const) or not is_bounded(scale) and b.slopes:
        return None
    for d, s in b.slopes:
        slopes[d] = slopes.get(d, 0) + scale * s
    return without_zero_slopes(Affine(const, tuple(slopes.items())), node)


def scores_with_mask(node: Node, known: Known) -> Band | None:
    """Evaluate scores plus an unknown additive mask."""
    if len(shape_of(node)) < 2 or not value_of(node).dtype.is_floating_point:
        return None
    groups = [hiding_masks(arg, node, full_band(node), known) for arg in node.args[:2]]
    return band_of_key_masks(node, "min", groups)


@entrywise(lambda node: operator.mul, 2)
def multiplied(node: Node, known: Known) -> Abstract:
    """Evaluate a product: scaled positions, or masked scores or zeros times another factor. The other factor
    must leave the scores masked, and the zeros zero. Of booleans, it is a conjunction."""
    if is_boolean(node):
        return conjoined(node, known)
    padded = indicator_with_padding(node, known)
    if padded is not None:
        return padded
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    for scale, other in ((a, b), (b, a)):
        if is_constant(scale) and isinstance(other, Affine):
            return affine_sum(Affine(0.0), other, scale.const, node)
    for band, other in ((a, b), (b, a)):
        if is_zero_outside(band) and is_finite(other):
            return band
        if is_empty_outside(band) and is_constant(other) and stays_lowest(other.const, node):
            return band
    return None


def indicator_with_padding(node: Node, known: Known) -> Indicator | None:
    """Evaluate a matrix that is zero outside a band, times the zeros and ones of a padding mask. The numbers
    of the padding mask are checked when the graph runs: they matter inside the band alone."""
    for first, second in (node.args[:2], node.args[1::-1]):
        if not (isinstance(first, Node) and second in known.integral and known(second) is None):
            continue
        if second in known.indicators and not known.indicators[second].is_of_zeros_and_ones():
            continue
        indicator = known.indicators.get(first)
        if indicator is None or not indicator.hidden.is_exactly(0):
            continue
        mask = broadcast_value(first, node, Instead(known, first, indicator.mask))
        if isinstance(mask, Band):
            key_masks = merged((mask.key_masks, as_key_mask(second, node, mask, False)))
            return replace(indicator, mask=replace(mask, key_masks=key_masks))
    return None


def stays_lowest(scale: float, node: Node) -> bool:
    """Does a scale leave scores hidden by a lowest number far below the others?"""
    return scale >= torch.finfo(value_of(node).dtype).max ** -0.25


@entrywise(lambda node: quotient, 2)
def divided(node: Node, known: Known) -> Abstract:
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    if is_empty_outside(a) and is_constant(b) and b.const > 0 and stays_lowest(1 / b.const, node):
        return a
    nonzero = b is None or is_constant(b) and b.const != 0
    return a if is_zero_outside(a) and nonzero else None


def product_added(node: Node, known: Known) -> Abstract:
    """Evaluate ``baddbmm(mask, queries, keys)``: a mask added to scores."""
    mask = broadcast_value(node.args[0], node, known)
    finite = all(x in known.bounded or known(x) is None for x in node.args[1:3])
    if not is_empty_outside(mask) or node.kwargs.get("beta", 1) != 1 or not finite:
        return None
    return replace(mask, zero_inside=False)


def contracted(node: Node, known: Known) -> Abstract:
    """Evaluate a linear map over the heads of a matrix that is zero outside a band."""
    operands, made = node.args[2].split("->")
    values = [known(arg) for arg in node.args[:2]]
    for value, other, labels in zip(values, reversed(values), operands.split(",")):
        if not is_zero_outside(value) or not is_finite(other):
            continue
        if {labels[value.row], labels[value.key]} <= set(made):
            return with_dims_renamed(value, {d: made.index(a) for d, a in enumerate(labels) if a in made})
    return None


@entrywise(lambda node: max, 2)
def at_least(node: Node, known: Known) -> Abstract:
    """Evaluate ``maximum(scores, lowest number)``: empty scores stay practically empty. Of booleans, it is a
    disjunction."""
    if is_boolean(node):
        return disjoined(node, known)
    for band, other in (node.args[:2], node.args[1::-1]):
        value, least = broadcast_value(band, node, known), broadcast_value(other, node, known)
        if is_empty_outside(value) and is_constant(least):
            return replace(value, outside="min") if lowest(least.const, node) in EMPTY else None
    return None


@entrywise(lambda node: min, 2)
def at_most(node: Node, known: Known) -> Abstract:
    """Evaluate ``minimum(scores, mask)``: an entry that either of them empties is empty. Of booleans, it is a
    conjunction."""
    if is_boolean(node):
        return conjoined(node, known)
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):
        if is_empty_outside(band) and is_empty_outside(other) and have_same_axes(band, other):
            return intersection(band, other)
        if is_empty_outside(band):
            hidden = merged((band.key_masks, hiding_masks(arg, node, band, known)))
            return replace(band, key_masks=hidden, zero_inside=False)
    return None


@entrywise(lambda node: abs, 1)
def distance(node: Node, known: Known) -> Abstract:
    """Evaluate ``abs(key - row)``, which only a comparison reads."""
    value = known(node.args[0])
    if isinstance(value, Difference):
        return replace(value, sign=0)
    if not isinstance(value, Affine) or value.const != 0:
        return None
    slopes = dict(value.slopes)
    return Distance(*sorted(slopes)) if sorted(slopes.values()) == [-1, 1] else None


@entrywise(lambda node: operator.neg, 1)
def negated(node: Node, known: Known) -> Abstract:
    value = known(node.args[0])
    if isinstance(value, Affine):
        return Affine(-value.const, tuple((d, -s) for d, s in value.slopes))
    if isinstance(value, Difference):
        return replace(value, sign=-value.sign)
    return value if is_zero_outside(value) else None

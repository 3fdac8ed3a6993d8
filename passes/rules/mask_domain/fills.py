"""Ops that fill scores where a mask hides them."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.fx import Node

from ...ir import DocumentMask, shape_of
from ...mask_analysis.domains import (
    EMPTY,
    Abstract,
    Affine,
    Band,
    as_key_mask,
    as_visible,
    band_of_key_masks,
    full_band,
    have_same_axes,
    hull,
    intersection,
    is_constant,
    is_empty_outside,
    is_zero_outside,
    merged,
)
from ...mask_analysis.operands import (
    Known,
    broadcast_value,
    hiding_masks,
    lowest,
)


def chosen(node: Node, known: Known) -> Abstract:
    """``where(mask, inside, filling)``."""
    condition, inside, filling = (broadcast_value(x, node, known) for x in node.args[:3])
    if is_constant(condition):
        return inside if condition.const else filling
    for zero, band in ((inside, filling), (filling, inside)):
        if zero == Affine(0.0) and is_zero_outside(band):
            return band
    if (
        isinstance(inside, Band)
        and isinstance(filling, Band)
        and is_zero_outside(inside)
        and is_zero_outside(filling)
        and have_same_axes(inside, filling)
    ):
        return hull(inside, filling)
    found = []
    if is_constant(filling):
        found.append(
            emptied(
                node.args[1], visible_where(node.args[0], condition, node, False), filling.const, node, known
            )
        )
    if is_constant(inside):  # where(hidden, -inf, scores)
        found.append(
            emptied(
                node.args[2],
                as_visible(condition) or visible_where(node.args[0], condition, node, True),
                inside.const,
                node,
                known,
            )
        )
    bands = [band for band in found if band is not None]
    return next((band for band in bands if band.outside in EMPTY), bands[0] if bands else None)


def visible_where(arg: object, condition: Abstract, like: Node, masked_value: bool) -> Band | None:
    """A condition as what is visible where it is not ``masked_value``: a band, a padding mask, or
    a stored mask."""
    if isinstance(condition, Band) and condition.outside is False and not masked_value:
        return condition
    if (
        isinstance(condition, DocumentMask) and condition.ordered and not masked_value
    ):  # taken to grow with the rows
        return replace(full_band(like), hi=0, outside=False, assumes=(condition,))
    if condition is not None or len(shape_of(like)) < 2:
        return None
    return band_of_key_masks(like, False, [as_key_mask(arg, like, full_band(like), masked_value)])


def emptied(scores: object, mask: Band | None, value: float, node: Node, known: Known) -> Band | None:
    """Scores filled with one number where a mask does not leave them."""
    outside = lowest(value, node)
    if mask is None or outside is None:
        return None
    if value == 0:
        return replace(mask, outside=0.0, key_masks=()) if mask.hi < math.inf or mask.lo > -math.inf else None
    inner = broadcast_value(scores, node, known)
    if is_empty_outside(inner) and have_same_axes(inner, mask):
        return intersection(replace(mask, outside=outside, zero_inside=inner.zero_inside), inner)
    return replace(
        mask,
        outside=outside,
        key_masks=merged((mask.key_masks, hiding_masks(scores, node, mask, known))),
        zero_inside=inner == Affine(0.0),
    )


def filled(node: Node, known: Known) -> Abstract:
    """``masked_fill(x, hidden, value)``."""
    x, hidden = (broadcast_value(a, node, known) for a in node.args[:2])
    value = known(node.args[2])
    if is_constant(hidden):
        return value if hidden.const else x
    if not is_constant(value):
        return None
    if value == Affine(0.0) and is_zero_outside(x):
        return x
    found = emptied(
        node.args[0],
        as_visible(hidden) or visible_where(node.args[1], hidden, node, True),
        value.const,
        node,
        known,
    )
    if found is None and is_empty_outside(x) and lowest(value.const, node) in EMPTY:
        return replace(
            x, outside=x.outside if lowest(value.const, node) == x.outside else "min", key_masks=None
        )
    return found

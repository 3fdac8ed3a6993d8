"""Boolean operations on masks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from ...ir import DocumentMask, shape_of, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    as_key_mask,
    as_visible,
    band_of_key_masks,
    full_band,
    have_same_axes,
    intersection,
    is_constant,
    merged,
)
from ...mask_analysis.operands import (
    Known,
    broadcast_value,
)


def conjoined(node: Node, known: Known) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return other if constant_.const else Affine(0.0)
    if isinstance(a, DocumentMask) and isinstance(b, DocumentMask):
        return DocumentMask(a.equal + b.equal, a.ordered + b.ordered)
    for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):
        if isinstance(band, DocumentMask) and not isinstance(other, Band):
            return band
        if isinstance(band, Band) and band.outside is False:
            if isinstance(other, Band) and other.outside is False and have_same_axes(band, other):
                return intersection(band, other)
            return replace(
                band,
                key_masks=merged(
                    (band.key_masks, as_key_mask(arg, node, band, False) if other is None else None)
                ),
            )
    return both_masks(node, False) if a is b is None else None


def both_masks(node: Node, masked_value: bool) -> Band | None:
    """Two masks of which nothing is known, each hiding its own keys."""
    if len(shape_of(node)) < 2:
        return None
    return band_of_key_masks(
        node, masked_value, [as_key_mask(x, node, full_band(node), masked_value) for x in node.args[:2]]
    )


def disjoined(node: Node, known: Known) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return Affine(1.0) if constant_.const else other
    if (
        isinstance(a, Band)
        and isinstance(b, Band)
        and a.outside is b.outside is False
        and have_same_axes(a, b)
    ):
        either = Band(a.row, a.key, min(a.lo, b.lo), max(a.hi, b.hi), False, assumes=a.assumes + b.assumes)
        if either.lo > -math.inf or either.hi < math.inf:
            return either
    left, right = as_visible(a), as_visible(b)  # both as what hides
    if left is not None and right is not None and have_same_axes(left, right):
        return replace(intersection(left, right), outside=True)
    for band, other, arg in ((left, b, node.args[1]), (right, a, node.args[0])):
        if band is not None:
            return replace(
                band,
                outside=True,
                key_masks=merged(
                    (band.key_masks, as_key_mask(arg, node, band, True) if other is None else None)
                ),
            )
    return both_masks(node, True) if a is b is None else None


def inverted(node: Node, known: Known) -> Abstract:
    """The complement of a half-plane is a half-plane; of another band, the same band with the outside
    true."""
    value = known(node.args[0])
    if is_constant(value):
        return Affine(float(not value.const))
    if not isinstance(value, Band):
        return None
    return as_visible(value) or (replace(value, outside=True) if value.outside is False else None)

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
    band_of_key_masks,
    document_band,
    full_band,
    have_same_axes,
    hull,
    intersection,
    is_constant,
    is_empty_outside,
    is_visible_mask,
    is_zero_outside,
    merged,
    negation,
)
from ...mask_analysis.operands import (
    Known,
    broadcast_value,
    hiding_masks,
    is_boolean,
    lowest,
)
from .creation import in_dtype
from .indicators import entrywise
from .logic import Operand, conjunction, disjunction, operand


@entrywise(lambda node: lambda condition, inside, filling: inside if condition else filling, 3)
def chosen(node: Node, known: Known) -> Abstract:
    """Evaluate ``where(mask, inside, filling)``."""
    condition, inside, filling = (broadcast_value(x, node, known) for x in node.args[:3])
    if is_constant(condition):
        return inside if condition.const else filling
    if is_boolean(node):
        return chosen_mask(node, *(operand(x, node, known) for x in node.args[:3]))
    for zero, band, negated in ((inside, filling, True), (filling, inside, False)):
        if zero == Affine(0.0) and is_zero_outside(band):
            return narrowed(band, visible_where(node.args[0], node, known, negated))
    if is_zero_outside(inside) and is_zero_outside(filling) and have_same_axes(inside, filling):
        return hull(inside, filling)
    if is_visible_mask(condition) and is_zero_outside(filling) and have_same_axes(condition, filling):
        return hull(replace(condition, outside=0.0, key_masks=(), zero_inside=False), filling)
    mask, scores, masked_scores = node.args[:3]
    found = []
    if is_constant(filling):
        found.append(emptied(scores, visible_where(mask, node, known), filling.const, node, known))
    if is_constant(inside):  # where(masked, -inf, scores)
        visible = visible_where(mask, node, known, negated=True)
        found.append(emptied(masked_scores, visible, inside.const, node, known))
    bands = [band for band in found if band is not None]
    return next((band for band in bands if is_empty_outside(band)), bands[0] if bands else None)


def narrowed(band: Band, mask: Band | None) -> Band:
    """Narrow a matrix that is zero outside a band by a mask outside which it is filled with zeros. An example
    is ``tril`` of ``triu``."""
    if mask is None or mask.assumes or not have_same_axes(band, mask):
        return band
    return intersection(band, replace(mask, outside=0.0, key_masks=(), zero_inside=False))


def chosen_mask(node: Node, condition: Operand, inside: Operand, filling: Operand) -> Abstract:
    """Evaluate ``where(condition, a, b)`` of booleans, which is ``condition & a | ~condition & b``. None
    unless ``a`` or ``b`` is a constant."""
    for a, b, chooses_a in ((inside, filling, condition), (filling, inside, condition.negation())):
        if is_constant(b.value):
            joint = conjunction if not b.value.const else disjunction
            return joint(node, chooses_a if not b.value.const else chooses_a.negation(), a)
    return None


def visible_where(mask: object, like: Node, known: Known, negated: bool = False) -> Band | None:
    """Find the visible entries of a boolean mask. The mask is true where they are (``negated``: where they
    are not)."""
    value = broadcast_value(mask, like, known)
    found = negation(value) if negated else value
    if is_visible_mask(found):
        return found
    if isinstance(found, DocumentMask):
        return document_band(found, like)
    if value is not None or len(shape_of(like)) < 2:
        return None
    mask = known.repeated_by(mask) if isinstance(mask, Node) else mask
    return band_of_key_masks(like, False, [as_key_mask(mask, like, full_band(like), negated)])


def emptied(scores: object, mask: Band | None, value: float, node: Node, known: Known) -> Band | None:
    """Evaluate scores that are filled with one number where a mask hides them."""
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


@entrywise(lambda node: lambda x, masked, value: value if masked else x, 3)
def filled(node: Node, known: Known) -> Abstract:
    """Evaluate ``masked_fill(x, masked, value)``."""
    x, masked = (broadcast_value(a, node, known) for a in node.args[:2])
    value = in_dtype(known(node.args[2]), node)
    if is_constant(masked):
        return value if masked.const else x
    if not is_constant(value):
        return None
    if is_boolean(node):
        joint = disjunction if value.const else conjunction
        mask = operand(node.args[1], node, known)
        return joint(node, mask if value.const else mask.negation(), operand(node.args[0], node, known))
    if value == Affine(0.0) and is_zero_outside(x):
        return x
    visible = visible_where(node.args[1], node, known, negated=True)
    found = emptied(node.args[0], visible, value.const, node, known)
    outside = lowest(value.const, node)
    if found is None and is_empty_outside(x) and outside in EMPTY:
        return replace(x, outside=outside if outside == x.outside else "min", key_masks=None)
    return found

"""Boolean operations on masks.

A disjunction is the negation of the conjunction of the negations. Whatever is known of a mask is known
of its negation, too, so that one rule serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.fx import Node

from ...ir import DocumentMask, shape_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    Difference,
    KeyMasks,
    as_key_mask,
    band_of_key_masks,
    document_band,
    full_band,
    have_same_axes,
    intersection,
    is_constant,
    is_visible_mask,
    merged,
    negation,
)
from ...mask_analysis.operands import Known, broadcast_value, is_boolean, token_pair
from .comparisons import ZERO, comparison


@dataclass(frozen=True)
class Operand:
    """A boolean operand of an op, or its negation.

    arg      the op's argument, or None where it cannot be read as a mask of keys
    value    the abstract value of this operand: of the argument, or of its negation
    negated  this operand is the negation of the argument
    """

    arg: object
    value: Abstract
    negated: bool = False

    def negation(self) -> Operand:
        return Operand(self.arg, negation(self.value), not self.negated)

    def key_mask(self, node: Node, band: Band) -> KeyMasks | None:
        """Treat an operand without a known value as a mask of keys; None otherwise."""
        return None if self.value is not None else as_key_mask(self.arg, node, band, self.negated)

    def or_padding(self, node: Node) -> Abstract:
        """Return the value of this operand; of an unknown mask that is the same for each row, its band."""
        key_masks = self.key_mask(node, full_band(node)) if len(shape_of(node)) > 1 else None
        if not key_masks or any(mask.by_row for mask in key_masks):
            return self.value
        return band_of_key_masks(node, False, [key_masks])


def operand(arg: object, node: Node, known: Known) -> Operand:
    value = broadcast_value(arg, node, known)
    if value is None and isinstance(arg, Node):
        arg = known.repeated_by(arg)
    return Operand(arg, value) if is_boolean(arg) else Operand(None, truth(value, node))


def truth(value: Abstract, node: Node) -> Abstract:
    """Convert a value that is no boolean to a mask of its entries that are not zero."""
    return comparison("ne", value, ZERO, node)


def conjoined(node: Node, known: Known) -> Abstract:
    """Evaluate ``a & b``."""
    if not is_boolean(node):
        return None
    return conjunction(node, *(operand(x, node, known) for x in node.args[:2]))


def disjoined(node: Node, known: Known) -> Abstract:
    """Evaluate ``a | b``."""
    if not is_boolean(node):
        return None
    return disjunction(node, *(operand(x, node, known) for x in node.args[:2]))


def exclusive(node: Node, known: Known) -> Abstract:
    """Evaluate ``a ^ b``. Of masks, it is one of the two and not the other. Of per-token values, it is zero
    where they are equal."""
    a, b = (operand(x, node, known) for x in node.args[:2])
    pair = token_pair(node, known) if known(node.args[0]) is known(node.args[1]) is None else None
    if not is_boolean(node):
        return pair and Difference(*pair[0], sign=0)
    if pair is not None:
        return DocumentMask(equal=(pair[0],), negated=True, key_masks=())
    left, right = conjunction(node, a, b.negation()), conjunction(node, a.negation(), b)
    return disjunction(node, Operand(None, left), Operand(None, right))


def inverted(node: Node, known: Known) -> Abstract:
    """Evaluate ``~a`` or ``logical_not(a)``."""
    value = known(node.args[0])
    if is_boolean(node.args[0]):
        return negation(value)
    if is_boolean(node):
        return comparison("eq", value, ZERO, node)
    if isinstance(value, Affine):  # of an integer
        return Affine(-value.const - 1, tuple((d, -s) for d, s in value.slopes))
    return None


def conjunction(node: Node, a: Operand, b: Operand) -> Abstract:
    """Evaluate ``a & b`` of boolean operands."""
    for constant, other in ((a, b), (b, a)):
        if is_constant(constant.value):
            return other.or_padding(node) if constant.value.const else ZERO
    if isinstance(a.value, DocumentMask) and isinstance(b.value, DocumentMask):
        return documents(a.value, b.value)
    if isinstance(a.value, Band) and isinstance(b.value, Band) and have_same_axes(a.value, b.value):
        found = bands(a.value, b.value)
        if found is not None:
            return found
    for this, other in ((a, b), (b, a)):
        if is_visible_mask(this.value):
            return restricted(this.value, other, node)
    for this, other in ((a, b), (b, a)):
        if isinstance(this.value, DocumentMask) and not this.value.negated:
            hiding = (this.value.key_masks, other.key_mask(node, full_band(node)))
            return replace(this.value, key_masks=merged(hiding))
    if a.value is b.value is None:
        return band_of_key_masks(node, False, [x.key_mask(node, full_band(node)) for x in (a, b)])
    return None


def disjunction(node: Node, a: Operand, b: Operand) -> Abstract:
    """Evaluate ``a | b`` of boolean operands."""
    if is_visible_mask(a.value) and is_visible_mask(b.value) and have_same_axes(a.value, b.value):
        found = bands(replace(a.value, outside=True), replace(b.value, outside=True))
        if found is not None:
            return replace(found, outside=False)
    return negation(conjunction(node, a.negation(), b.negation()))


def bands(a: Band, b: Band) -> Band | None:
    """Intersect two bands, or return None. Two bands that are true outside are true outside their hull."""
    if a.outside is b.outside is False:
        return intersection(a, b)
    lo, hi = min(a.lo, b.lo), max(a.hi, b.hi)
    if a.outside is b.outside is True and (lo > -math.inf or hi < math.inf):
        return Band(a.row, a.key, lo, hi, True, assumes=tuple(dict.fromkeys(a.assumes + b.assumes)))
    return None


def documents(a: DocumentMask, b: DocumentMask) -> DocumentMask | None:
    """Intersect two document masks. A negated mask tells which comparisons hold where it is false. Of two of
    them, those in both remain."""
    if a.negated != b.negated:
        return replace(b if a.negated else a, key_masks=None)
    if not a.negated:
        key_masks = merged((a.key_masks, b.key_masks))
        return DocumentMask(a.equal + b.equal, a.ordered + b.ordered, key_masks=key_masks)
    equal, ordered = (tuple(p for p in x if p in y) for x, y in ((a.equal, b.equal), (a.ordered, b.ordered)))
    return DocumentMask(equal, ordered, negated=True) if equal or ordered else None


def restricted(band: Band, other: Operand, node: Node) -> Band:
    """Restrict a band of visible entries by another mask, which hides some of them."""
    if isinstance(other.value, DocumentMask):
        document = document_band(other.value, node)
        if document is not None and have_same_axes(band, document):
            return intersection(band, document)
    return replace(band, key_masks=merged((band.key_masks, other.key_mask(node, band))))

"""The abstract domains of mask analysis, and how their values combine.

* `Affine`    a tensor whose entry is ``const + Σ slope[d] * index[d]`` (ranges, position ids, constants);
* `Band`      a matrix of rows (queries) and keys that differs from its filling only where
  ``lo <= key - row <= hi``: a causal or sliding-window mask, and scores or probabilities that it masks;
* `Indicator`  a matrix of two numbers, one where a boolean mask is true;
* `Distance`  ``abs(key - row)``;
* `Difference`  a matrix that says whether a per-token value of the row equals that of the key, or exceeds it;
* `DocumentMask` (of `passes.ir`)  a boolean that compares per-token values of a row and a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

from torch.fx import Node

from ..ir import DocumentMask, KeyMask, is_tensor, shape_of

KeyMasks = tuple[KeyMask | DocumentMask, ...]


@dataclass(frozen=True)
class Affine:
    """A tensor with entries ``const + Σ slope * index[dim]``; booleans are 0 and 1."""

    const: float
    slopes: tuple[tuple[int, float], ...] = ()

    def slope(self, dim: int) -> float:
        return dict(self.slopes).get(dim, 0)


@dataclass(frozen=True)
class Band:
    """A matrix over (row, key) dimensions that equals ``outside`` unless ``lo <= key - row <= hi``.

    outside      ``False`` (a boolean mask that is true where a key is visible), ``True`` (one that is true
                 where a key is masked), ``0.0``, ``-inf``, or ``"min"`` (so low that it vanishes beside any
                 visible key)
    key_masks    the only masks that hide entries inside the band: ``()`` where every entry is visible,
                 ``None`` where they are unknown. For a matrix that is zero outside: the masks that must leave
                 every row a visible key for it to be zero
    zero_inside  visible entries are ``0`` (an additive mask that is not yet added to scores)
    assumes      stored masks that are assumed to mask everything outside, and document masks whose positions
                 are assumed to increase
    """

    row: int
    key: int
    lo: float
    hi: float
    outside: object
    key_masks: KeyMasks | None = None
    zero_inside: bool = False
    assumes: tuple[KeyMask | DocumentMask, ...] = ()

    def __str__(self) -> str:
        if (self.lo, self.hi) == (-math.inf, 0):
            return "causal: proved"
        if self.hi == 0:
            return f"window {int(1 - self.lo)}: proved"
        return f"band [{self.lo}, {self.hi}]: proved"

    @property
    def exact(self) -> bool:
        """Does the mask hide the entries outside its band and no others, without assumptions?"""
        return self.key_masks == () and not self.assumes and (self.zero_inside or self.outside is False)

    @property
    def visibility_masks(self) -> KeyMasks | None:
        """Masks that must leave every row a visible key for the outside to be empty; None if unknown."""
        if self.outside != "min":
            return self.key_masks if is_zero_outside(self) else ()
        return self.key_masks if self.key_masks or self.lo <= 0 <= self.hi else None


@dataclass(frozen=True)
class Interval:
    """Bounds of a number, whose rounding depends on the dtype and on the device."""

    low: float
    high: float

    def is_exactly(self, number: float) -> bool:
        return self.low == self.high == number


@dataclass(frozen=True)
class Indicator:
    """A matrix of two numbers: one where a boolean mask shows a key, another everywhere else.

    mask  the visible entries, as a band
    """

    mask: Band
    visible: Interval
    hidden: Interval

    def is_of_zeros_and_ones(self) -> bool:
        return all(number.is_exactly(0) or number.is_exactly(1) for number in (self.visible, self.hidden))


@dataclass(frozen=True)
class Distance:
    """A matrix over (row, key) dimensions that equals ``abs(key - row)``."""

    row: int
    key: int


@dataclass(frozen=True)
class Difference:
    """An integer matrix that is zero exactly where the row's per-token value equals the key's.

    sign  1: positive where the row's value is larger; -1: positive where the key's is; 0: unknown
    """

    row: Node
    key: Node
    sign: int


Abstract = Affine | Band | Indicator | Distance | Difference | DocumentMask | None
EMPTY = (-math.inf, "min")  # fillings that empty a score


def with_dims_renamed(value: Abstract, dims: dict[int, int]) -> Abstract:
    """Rename dimensions (old → new). None if the value depends on a dimension that is dropped, or is no
    `Affine`, `Band` or `Distance`."""
    if isinstance(value, Affine):
        if any(d not in dims for d, _ in value.slopes):
            return None
        return Affine(value.const, tuple((dims[d], s) for d, s in value.slopes))
    if isinstance(value, Band | Distance):
        if value.row not in dims or value.key not in dims:
            return None
        return replace(value, row=dims[value.row], key=dims[value.key])
    return None


def have_same_axes(a: Band, b: Band) -> bool:
    return (a.row, a.key) == (b.row, b.key)


def is_constant(value: Abstract) -> TypeGuard[Affine]:
    return isinstance(value, Affine) and not value.slopes


def is_empty_outside(value: Abstract) -> TypeGuard[Band]:
    """Does a softmax over these scores, or over this additive mask, read no entry outside a band?"""
    return isinstance(value, Band) and value.outside in EMPTY


def is_zero_outside(value: Abstract) -> TypeGuard[Band]:
    """Is a value a matrix that is zero outside a band? Such a matrix adds nothing to a sum there."""
    return isinstance(value, Band) and value.outside is not False and value.outside == 0.0


def is_finite(value: Abstract) -> bool:
    """Is zero times the value zero? An unknown value is taken to be finite."""
    if isinstance(value, Band):
        return value.outside != -math.inf
    return not is_constant(value) or math.isfinite(value.const)


def is_visible_mask(value: Abstract) -> TypeGuard[Band]:
    """Is a value a boolean mask that is false outside a band?"""
    return isinstance(value, Band) and value.outside is False


def intersection(a: Band, b: Band) -> Band:
    """Intersect two masks: find the entries that both leave visible. A proved range is preferred to an
    assumed one: it is kept where it reaches no further ahead."""
    key_masks, zero = merged((a.key_masks, b.key_masks)), a.zero_inside and b.zero_inside
    outside = a.outside if a.outside == b.outside else "min"
    for proved, assumed in ((a, b), (b, a)):
        if assumed.assumes and not proved.assumes and proved.hi <= assumed.hi:
            return replace(proved, outside=outside, key_masks=key_masks, zero_inside=zero)
    return replace(
        a,
        lo=max(a.lo, b.lo),
        hi=min(a.hi, b.hi),
        outside=outside,
        key_masks=key_masks,
        zero_inside=zero,
        assumes=tuple(dict.fromkeys(a.assumes + b.assumes)),
    )


def hull(a: Band, b: Band) -> Band | None:
    """Find the smallest band that holds both; outside of it both matrices are zero. None if the masks of both
    together are unknown."""
    key_masks = merged((a.key_masks, b.key_masks))
    if key_masks is None:
        return None
    assumes = tuple(dict.fromkeys(a.assumes + b.assumes))
    return replace(a, lo=min(a.lo, b.lo), hi=max(a.hi, b.hi), key_masks=key_masks, assumes=assumes)


def as_visible(masked: Abstract) -> Band | None:
    """Find the visible entries of a boolean mask that is true where a key is masked. None if they are
    unknown."""
    if not isinstance(masked, Band):
        return None
    if masked.outside is True:
        return replace(masked, outside=False)
    return complement(masked) if masked.exact else None


def negation(value: Abstract) -> Abstract:
    """Negate a boolean value, as ``~value`` does. Nothing is lost: the negation of the result is the value
    again."""
    if is_constant(value):
        return Affine(float(not value.const))
    if isinstance(value, DocumentMask):
        return replace(value, negated=not value.negated)
    if not isinstance(value, Band):
        return None
    return as_visible(value) or (replace(value, outside=True) if value.outside is False else None)


def complement(band: Band) -> Band | None:
    """Find where an exact band is false. This is a band if the given one is a half-plane, and None
    otherwise."""
    if band.lo == -math.inf:
        return replace(band, lo=band.hi + 1, hi=math.inf)
    return replace(band, lo=-math.inf, hi=band.lo - 1) if band.hi == math.inf else None


def merged(groups: Iterable[KeyMasks | None]) -> KeyMasks | None:
    """Merge the masks of several groups that hide keys together. None if a group is unknown, or if more than
    one tensor holds several masks: which masks of the batches belong together is unknown."""
    found: KeyMasks = ()
    for group in groups:
        if group is None:
            return None
        found = tuple(dict.fromkeys((*found, *group)))
    return found if sum(mask.batch > 1 for mask in found) <= 1 else None


def as_key_mask(arg: object, like: Node, band: Band, masked_value: bool | None) -> KeyMasks | None:
    """Treat an unknown operand of a matrix as a mask of its keys. It is one mask for all rows, or one for
    each row. None if its shape does not fit."""
    if not isinstance(arg, Node) or not is_tensor(arg):
        return None
    shift, shape = len(shape_of(like)) - len(shape_of(arg)), shape_of(arg)
    row, key = band.row - shift, band.key - shift
    if key < 0 or shape[key] != shape_of(like)[band.key] or shape[key] == 1:
        return None
    if row < 0 or shape[row] == 1:
        return (KeyMask(arg, None, key, masked_value),)
    return (KeyMask(arg, row, key, masked_value),) if shape[row] == shape_of(like)[band.row] else None


def band_of_key_masks(node: Node, outside: object, groups: Iterable[KeyMasks | None]) -> Band | None:
    """Build the band of a matrix that only these masks hide. The band of padding masks is everything. The
    band of a stored mask is assumed to be causal. None if no masks are known."""
    rank, key_masks = len(shape_of(node)), merged(groups)
    if not key_masks:
        return None
    stored = tuple(mask for mask in key_masks if isinstance(mask, KeyMask) and mask.by_row)
    hi = 0 if stored else math.inf
    return Band(rank - 2, rank - 1, -math.inf, hi, outside, key_masks, assumes=stored)


def stored_mask(node: Node) -> Band | None:
    """Treat an unknown value as an additive mask."""
    return band_of_key_masks(node, "min", [as_key_mask(node, node, full_band(node), None)])


def document_band(mask: DocumentMask, node: Node) -> Band | None:
    """Build a band of which a document mask hides entries. It is causal if the mask has positions, which are
    assumed to increase. None if nothing is known of it as a band."""
    key_masks = merged(((replace(mask, key_masks=()),), mask.key_masks))
    if mask.negated or not (mask.ordered or key_masks):
        return None
    hi, assumes = (0, (mask,)) if mask.ordered else (math.inf, ())
    return replace(full_band(node), hi=hi, outside=False, key_masks=key_masks, assumes=assumes)


def full_band(node: Node) -> Band:
    """Build the band of all rows and keys of a matrix of scores, its last two dimensions."""
    rank = len(shape_of(node))
    return Band(rank - 2, rank - 1, -math.inf, math.inf, None)

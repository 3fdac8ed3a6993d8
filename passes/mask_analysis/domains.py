"""What is known of a mask without its numbers: two small domains, and how their values combine.

* `Affine`  an integer tensor whose entry is ``const + Σ slope[d] * index[d]`` (ranges, position ids, a mask
that is all true);
* `Band`    a matrix that differs from its filling only where ``lo <= key - row <= hi``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.fx import Node

from ..ir import Agreement, KeyMask, shape_of


@dataclass(frozen=True)
class Affine:
    """``const + Σ slope * index[dim]``; booleans are 0 and 1."""

    const: float
    slopes: tuple[tuple[int, float], ...] = ()

    def slope(self, dim: int) -> float:
        return dict(self.slopes).get(dim, 0)


@dataclass(frozen=True)
class Band:
    """A matrix over (row, key) dims that equals ``outside`` unless ``lo <= key - row <= hi``.

    outside  ``False`` (a boolean mask; ``True``: one of what is hidden), ``0.0``, ``-inf``, or ``"min"`` (so
             low that it vanishes beside
             any visible key)
    seen     the masks that hide entries inside, and nothing else does: ``()`` where every entry is visible,
             ``None`` where one cannot
             tell. Of zeros: what their proof rests on
    zero     entries that are visible are ``0`` (an additive mask, not yet added to scores)
    assumes  stored masks that are taken to hide all that is outside, and values that are taken to grow with
             the rows
    """

    row: int
    key: int
    lo: float
    hi: float
    outside: object
    seen: tuple[KeyMask, ...] | None = None
    zero: bool = False
    assumes: tuple[KeyMask | Agreement, ...] = ()

    def __str__(self) -> str:
        if (self.lo, self.hi) == (-math.inf, 0):
            return "causal: proved"
        if self.hi == 0:
            return f"window {int(1 - self.lo)}: proved"
        return f"band [{self.lo}, {self.hi}]: proved"

    @property
    def exact(self) -> bool:
        """Is this the mask of its band and nothing else?"""
        return self.seen == () and not self.assumes and (self.zero or self.outside is False)

    @property
    def rests_on(self) -> tuple[KeyMask, ...] | None:
        """Masks by which every row must see a key for the outside to be truly empty; None if that cannot be
        told."""
        if self.outside != "min":
            return self.seen if is_zero_outside(self) else ()
        return self.seen if self.seen or self.lo <= 0 <= self.hi else None


@dataclass(frozen=True)
class Distance:
    """A matrix over (row, key) dims that equals ``abs(key - row)``."""

    row: int
    key: int


Abstract = Affine | Band | Distance | Agreement | None
HIDING = (-math.inf, "min")  # fillings that empty a score


def moved(value: Abstract, dims: dict[int, int]) -> Abstract:
    """Rename dimensions (old → new); a dimension that is dropped must not matter."""
    if isinstance(value, Affine):
        if any(d not in dims for d, _ in value.slopes):
            return None
        return Affine(value.const, tuple((dims[d], s) for d, s in value.slopes))
    if isinstance(value, Band | Distance):
        if value.row not in dims or value.key not in dims:
            return None
        return replace(value, row=dims[value.row], key=dims[value.key])
    return None


def same_axes(a: Band, b: Band) -> bool:
    return (a.row, a.key) == (b.row, b.key)


def is_constant(value: Abstract) -> bool:
    return isinstance(value, Affine) and not value.slopes


def is_zero_outside(band: Band) -> bool:
    return band.outside is not False and band.outside == 0.0


def intersected(a: Band, b: Band) -> Band:
    """Entries that two masks of scores leave, each hiding others. What is known of one is worth more than
    what is taken of the other."""
    seen, zero = all_of(a.seen, b.seen), a.zero and b.zero
    for sure, guess in ((a, b), (b, a)):
        if guess.assumes and not sure.assumes and sure.hi <= guess.hi:
            return replace(sure, seen=seen, zero=zero)
    return replace(
        a,
        lo=max(a.lo, b.lo),
        hi=min(a.hi, b.hi),
        outside=a.outside if a.outside == b.outside else "min",
        seen=seen,
        zero=zero,
        assumes=tuple(dict.fromkeys(a.assumes + b.assumes)),
    )


def hull(a: Band, b: Band) -> Band | None:
    """Outside of both, zeros."""
    seen = all_of(a.seen, b.seen)
    assumes = tuple(dict.fromkeys(a.assumes + b.assumes))
    return (
        replace(a, lo=min(a.lo, b.lo), hi=max(a.hi, b.hi), seen=seen, assumes=assumes)
        if seen is not None
        else None
    )


def visible(hidden: Abstract) -> Band | None:
    """What a boolean that hides entries leaves to be seen."""
    if not isinstance(hidden, Band):
        return None
    if hidden.outside is True:
        return replace(hidden, outside=False)
    return complement(hidden) if hidden.exact else None


def complement(band: Band) -> Band | None:
    """Where an exact band is false: a band too, if it was a half-plane."""
    if band.lo == -math.inf:
        return replace(band, lo=band.hi + 1, hi=math.inf)
    return replace(band, lo=-math.inf, hi=band.lo - 1) if band.hi == math.inf else None


def all_of(*seens: tuple[KeyMask, ...] | None) -> tuple[KeyMask, ...] | None:
    """What several masks leave to be seen. They must be told apart by no more than one batch."""
    if None in seens:
        return None
    found = tuple(dict.fromkeys(s for seen in seens for s in seen))
    return found if sum(s.batch > 1 for s in found) <= 1 else None


def one(seen: KeyMask | None) -> tuple[KeyMask, ...] | None:
    return None if seen is None else (seen,)


def mask_of(arg: object, like: Node, band: Band, hides: bool | None) -> KeyMask | None:
    """An operand of a matrix of which nothing is known, as what hides some of its keys: from all rows alike,
    or from each its own."""
    if not isinstance(arg, Node):
        return None
    shift, shape = len(shape_of(like)) - len(shape_of(arg)), shape_of(arg)
    row, key = band.row - shift, band.key - shift
    if key < 0 or shape[key] != shape_of(like)[band.key] or shape[key] == 1:
        return None
    if row < 0 or shape[row] == 1:
        return KeyMask(arg, None, key, hides)
    return KeyMask(arg, row, key, hides) if shape[row] == shape_of(like)[band.row] else None


def everything(node: Node, outside: object, *seens: tuple[KeyMask, ...] | None) -> Band | None:
    """A matrix that hides by what is given alone: nothing is known of its band, or, of a stored mask, taken
    to be causal."""
    rank, seen = len(shape_of(node)), all_of(*seens)
    stored = tuple(s for s in seen or () if s.row is not None)
    return (
        Band(rank - 2, rank - 1, -math.inf, 0 if stored else math.inf, outside, seen, assumes=stored)
        if seen
        else None
    )


def stored_mask(node: Node) -> Band | None:
    """An additive mask of which nothing is known."""
    return everything(node, "min", one(mask_of(node, node, matrix(node), None)))


def matrix(node: Node) -> Band:
    """The axes of a matrix of scores: rows and keys are its last."""
    rank = len(shape_of(node))
    return Band(rank - 2, rank - 1, -math.inf, math.inf, None)

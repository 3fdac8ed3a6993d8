"""Comparisons: of positions, which make bands, and of per-token values, which make document masks."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

from torch.fx import Node

from ...ir import DocumentMask, op_name, shape_of, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    Difference,
    Distance,
    is_constant,
    is_zero_outside,
    negation,
)
from ...mask_analysis.operands import Known, broadcast_value, is_boolean, token_pair
from .indicators import Numbers, entrywise

MIRRORED = {"eq": "eq", "ne": "ne", "le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
ZERO = Affine(0.0)


@entrywise(lambda node: comparison_of_numbers(op_name(node)), 2)
def compared(node: Node, known: Known) -> Abstract:
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    name = op_name(node)
    if a is b is None:
        return document_mask(node, name, known)
    if is_constant(b) and is_boolean(node.args[0]):
        return of_boolean(name, a, b.const)
    if is_constant(a) and is_boolean(node.args[1]):
        return of_boolean(MIRRORED[name], b, a.const)
    return comparison(name, a, b, node)


def comparison_of_numbers(name: str) -> Numbers:
    """Build a comparison of numbers that is NaN where they may be equal but for rounding."""
    compare = getattr(operator, name)

    def compared_numbers(a: float, b: float) -> float:
        close = a != b and math.isclose(a, b, rel_tol=0.25)
        return math.nan if close else compare(a, b)

    return compared_numbers


def comparison(name: str, a: Abstract, b: Abstract, node: Node) -> Abstract:
    """Compare ``a`` with ``b``; neither may be a boolean, unless it is a constant."""
    if isinstance(a, Affine) and isinstance(b, Affine):
        return of_positions(name, a, b, node)
    if is_constant(a):
        a, b, name = b, a, MIRRORED[name]
    if not is_constant(b):
        return None
    if isinstance(a, Band):
        return of_scores(name, a, b.const)
    if isinstance(a, Distance) and name in ("le", "lt"):
        width = math.ceil(b.const) - 1 if name == "lt" else math.floor(b.const)
        return Band(a.row, a.key, -width, width, False, ())
    return of_difference(name, a, b.const) if isinstance(a, Difference) else None


def of_boolean(name: str, value: Abstract, const: float) -> Abstract:
    """Compare a boolean with a number: the result is that boolean, its negation, or a constant."""
    compare = getattr(operator, name)
    if_false, if_true = compare(0, const), compare(1, const)
    if if_false == if_true:
        return Affine(float(if_true))
    return value if if_true else negation(value)


def of_scores(name: str, band: Band, const: float) -> Band | None:
    """Compare masked scores, or an additive mask, with the number that they are filled with."""
    if band.outside == -math.inf and const == -math.inf and name in ("eq", "ne"):
        return replace(band, outside=name == "eq", zero_inside=False)
    if const == 0 and band.zero_inside and name in ("eq", "ne"):
        return replace(band, outside=name == "ne", zero_inside=False)
    if is_zero_outside(band) and band.key_masks == () and not band.zero_inside:
        outside = getattr(operator, name)(0.0, const)  # where a ReLU is zero, where a product overflows
        return replace(band, outside=outside, key_masks=None)
    return None


def of_difference(name: str, value: Difference, const: float) -> DocumentMask | None:
    """Compare the difference of two per-token values with a number."""
    pair = (value.row, value.key)
    if name in ("eq", "ne"):
        return DocumentMask(equal=(pair,), negated=name == "ne", key_masks=()) if const == 0 else None
    if value.sign < 0:
        name, const = MIRRORED[name], -const
    if value.sign == 0:
        return None
    negated = name in ("le", "lt")  # the opposite of "row - key is at least ``least``"
    least = math.floor(const) + 1 if name in ("le", "gt") else math.ceil(const)
    key_masks = None if least else ()
    return DocumentMask(ordered=(pair,), negated=negated, key_masks=key_masks) if least >= 0 else None


def of_positions(name: str, a: Affine, b: Affine, node: Node) -> Abstract:
    """Compare positions of rows with positions of keys, which gives a band."""
    slopes = {d: a.slope(d) - b.slope(d) for d in {*dict(a.slopes), *dict(b.slopes)}}
    slopes = {d: s for d, s in slopes.items() if s}
    const = float(a.const - b.const)
    if not slopes:
        return Affine(float(getattr(operator, name)(a.const, b.const)))
    sign = math.copysign(1, next(iter(slopes.values())))
    if all(slope * sign > 0 for slope in slopes.values()):
        return of_least(name if sign > 0 else MIRRORED[name], sign * const)
    if sorted(slopes.values()) != [-1, 1] or not const.is_integer():
        return None
    rank = len(shape_of(node))
    key, row = rank - 1, rank - 2  # scores are [..., row, key] when a mask is made
    if set(slopes) != {row, key}:
        row, key = sorted(slopes)
    if slopes[key] < 0:  # const + row - key ? 0 is key - row - const ? 0, mirrored
        const, name = -const, MIRRORED[name]
    return band_of(name, row, key, -const)


def of_least(name: str, least: float) -> Affine | None:
    """Compare numbers of which ``least`` is the smallest with zero. None if that does not decide it for all
    of them."""
    holds = {"ge": least >= 0, "gt": least > 0, "ne": least > 0}
    fails = {"lt": least >= 0, "le": least > 0, "eq": least > 0}
    if holds.get(name) or fails.get(name):
        return Affine(float(name in holds))
    return None


def band_of(name: str, row: int, key: int, bound: float) -> Band:
    """Build the band in which ``key - row`` compares with a bound."""
    if name in ("eq", "ne"):
        return Band(row, key, bound, bound, name == "ne", ())
    if name in ("le", "lt"):
        return Band(row, key, -math.inf, bound - (name == "lt"), False, ())
    return Band(row, key, bound + (name == "gt"), math.inf, False, ())


@dataclass(frozen=True)
class Blocks:
    """The blocks of tokens that positions are in: ``(position + start) // size``."""

    start: float
    size: int


def block_of_positions(node: Node, known: Known) -> Blocks | None:
    """Find the blocks if a value of every row, or every key, is the number of its position's block. None for
    any other value."""
    quotient = known.floor_division_behind(node)
    if quotient is None or value_of(quotient).dtype.is_floating_point:
        return None
    position, size = known(quotient.args[0]), known(quotient.args[1])
    if not isinstance(position, Affine) or not is_constant(size) or size.const < 1:
        return None
    floors = quotient.kwargs.get("rounding_mode", "floor") == "floor"
    by_one = [slope for _, slope in position.slopes] == [1]
    nothing_else = math.prod(shape_of(quotient)) == max(shape_of(quotient))  # positions do not start again
    return Blocks(position.const, int(size.const)) if floors and by_one and nothing_else else None


def of_blocks(name: str, row: Blocks, key: Blocks, node: Node) -> Band:
    """Compare blocks of rows with blocks of keys: a band, of which some entries are hidden. Tokens of one
    block are less than its size apart."""
    ahead, apart = row.start - key.start, row.size - 1
    lo, hi = {
        "ge": (-math.inf, ahead + apart),
        "gt": (-math.inf, ahead - 1),
        "le": (ahead - apart, math.inf),
        "lt": (ahead + 1, math.inf),
    }.get(name, (ahead - apart, ahead + apart))
    rank = len(shape_of(node))
    return Band(rank - 2, rank - 1, lo, hi, name == "ne", None)


def document_mask(node: Node, name: str, known: Known) -> DocumentMask | Band | None:
    """Compare a value of every row with one of every key."""
    found = token_pair(node, known)
    if found is None:
        return None
    pair, row_is_first = found
    name = name if row_is_first else MIRRORED[name]
    row, key = (block_of_positions(side, known) for side in pair)
    if row is not None and key is not None and row.size == key.size:
        return of_blocks(name, row, key, node)
    if name in ("eq", "ne"):
        return DocumentMask(equal=(pair,), negated=name == "ne", key_masks=())
    key_masks = () if name in ("ge", "lt") else None  # a strict order hides equal values as well
    return DocumentMask(ordered=(pair,), negated=name in ("le", "lt"), key_masks=key_masks)

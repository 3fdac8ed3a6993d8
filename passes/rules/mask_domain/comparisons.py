"""Comparisons: of positions, which make bands, and of per-token values, which make document masks."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

from torch.fx import Node

from ...ir import DocumentMask, shape_of, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    Distance,
    is_constant,
    is_zero_outside,
)
from ...mask_analysis.operands import (
    Known,
    broadcast_value,
)


def compared(node: Node, known: Known) -> Abstract:
    a, b = (broadcast_value(x, node, known) for x in node.args[:2])
    name = node.target.overloadpacket.__name__
    if isinstance(a, Band) and a.outside == -math.inf and b == Affine(-math.inf) and name in ("eq", "ne"):
        return replace(
            a, outside=name == "eq", zero_inside=False
        )  # which scores are empty: those outside are
    if isinstance(a, Band) and a.zero_inside and b == Affine(0.0) and name in ("eq", "ne"):
        return replace(a, outside=name == "ne", zero_inside=False)  # which entries of a mask hide
    if (
        isinstance(a, Band)
        and is_zero_outside(a)
        and a.key_masks == ()
        and b == Affine(0.0)
        and not a.zero_inside
    ):
        return replace(
            a, outside=name in ("eq", "le", "ge"), key_masks=None
        )  # where a ReLU of scores is shut
    if isinstance(a, Distance) and is_constant(b) and name in ("le", "lt"):
        width = math.ceil(b.const) - 1 if name == "lt" else math.floor(b.const)
        return Band(a.row, a.key, -width, width, False, ())
    if not (isinstance(a, Affine) and isinstance(b, Affine)):
        return agreeing(node, name) if a is b is None else None
    slopes = dict(a.slopes)
    for d, s in b.slopes:
        slopes[d] = slopes.get(d, 0) - s
    slopes = {d: s for d, s in slopes.items() if s}
    const = float(a.const - b.const)
    if not slopes:
        return Affine(float(getattr(operator, name)(const, 0)))
    if len(slopes) != 2 or sorted(slopes.values()) != [-1, 1]:
        return None
    rank = len(shape_of(node))
    key, row = rank - 1, rank - 2  # scores are [..., row, key] when a mask is made
    if set(slopes) != {row, key}:
        row, key = sorted(slopes)
    if not const.is_integer():
        return None
    # const + sign * (key - row)  ?  0
    sign = slopes[key]
    if name == "eq":
        bound = -const * sign
        return Band(row, key, bound, bound, False, ())
    if name == "ne":
        return None
    less = (name in ("le", "lt")) == (sign > 0)
    strict = name in ("lt", "gt")
    bound = -const * sign
    if less:
        return Band(row, key, -math.inf, bound - strict, False, ())
    return Band(row, key, bound + strict, math.inf, False, ())


def agreeing(node: Node, name: str) -> DocumentMask | None:
    """A comparison of a value of every row with one of every key."""
    rank = len(shape_of(node))
    sides = {}  # which of the two has a value for every row, and which for every key
    for arg in node.args[:2]:
        if isinstance(arg, Node) and rank >= 2 and not value_of(arg).dtype.is_floating_point:
            sizes = (1,) * (rank - len(shape_of(arg))) + shape_of(arg)
            if sizes[-2:] in ((shape_of(node)[-2], 1), (1, shape_of(node)[-1])):
                sides["row" if sizes[-1] == 1 else "key"] = arg
    if len(sides) < 2 or shape_of(node)[-1] == 1:
        return None
    pair = (sides["row"], sides["key"])
    if name == "eq":
        return DocumentMask(equal=(pair,))
    below = "le" if node.args[0] is sides["key"] else "ge"
    return DocumentMask(ordered=(pair,)) if name in (below, below.replace("e", "t")) else None

"""Ops on numbers: what sums, products and comparisons make of places, of scores, and of masks that are added
to them."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch.fx import Node

from ..ir import Agreement, shape_of, value_of
from .domains import (
    HIDING,
    Abstract,
    Affine,
    Band,
    Distance,
    all_of,
    everything,
    hull,
    intersected,
    is_constant,
    is_zero_outside,
    matrix,
    same_axes,
)
from .evaluation import Evaluation, cleaned, lifted, lowest, one_per_row, shown

aten = torch.ops.aten


def added(sign: int):
    def handler(node: Node, get: Evaluation) -> Abstract:
        a, b = (lifted(x, node, get) for x in node.args[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            scale = sign * (node.kwargs.get("alpha", 1))
            slopes = dict(a.slopes)
            for d, s in b.slopes:
                slopes[d] = slopes.get(d, 0) + scale * s
            return cleaned(Affine(a.const + scale * b.const, tuple(slopes.items())), node)
        if (
            isinstance(a, Band)
            and isinstance(b, Band)
            and is_zero_outside(a)
            and is_zero_outside(b)
            and same_axes(a, b)
        ):
            return hull(a, b)
        if sign < 0:  # scores less their row's largest
            less = (
                isinstance(a, Band) and a.outside in HIDING and isinstance(node.args[1], Node) and b is None
            )
            return replace(a, zero=False) if less and one_per_row(node.args[1], node, a) else None
        for band, other, arg in (
            (a, b, node.args[1]),
            (b, a, node.args[0]),
        ):  # a mask added to scores empties them outside its band
            if isinstance(band, Band) and band.outside in HIDING:
                if isinstance(other, Band) and other.outside in HIDING and same_axes(band, other):
                    return intersected(band, other)
                return replace(
                    band,
                    seen=all_of(band.seen, shown(arg, node, band, get)),
                    zero=band.zero and other == Affine(0.0),
                )
        return padded(node, get)

    return handler


def padded(node: Node, get: Evaluation) -> Band | None:
    """Scores plus an additive mask."""
    if len(shape_of(node)) < 2 or not value_of(node).dtype.is_floating_point:
        return None
    return everything(node, "min", *(shown(arg, node, matrix(node), get) for arg in node.args[:2]))


def multiplied(node: Node, get: Evaluation) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for scale, other in ((a, b), (b, a)):
        if is_constant(scale) and isinstance(other, Affine):
            return cleaned(
                Affine(scale.const * other.const, tuple((d, scale.const * s) for d, s in other.slopes)), node
            )
    for band, other in ((a, b), (b, a)):
        if isinstance(band, Band) and is_zero_outside(band):
            return band
        if (
            isinstance(band, Band)
            and band.outside in HIDING
            and is_constant(other)
            and stays_lowest(other.const, node)
        ):
            return band
    return None


def stays_lowest(scale: float, node: Node) -> bool:
    """Is what was hidden by a lowest number still far below the scores when all are scaled?"""
    return scale >= torch.finfo(value_of(node).dtype).max ** -0.25


def divided(node: Node, get: Evaluation) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    if (
        isinstance(a, Band)
        and a.outside in HIDING
        and is_constant(b)
        and b.const > 0
        and stays_lowest(1 / b.const, node)
    ):
        return a
    return a if isinstance(a, Band) and is_zero_outside(a) else None


def product_added(node: Node, get: Evaluation) -> Abstract:
    """``baddbmm(mask, queries, keys)``: a mask added to scores."""
    mask = lifted(node.args[0], node, get)
    plain = node.kwargs.get("beta", 1) == 1 and isinstance(mask, Band) and mask.outside in HIDING
    return replace(mask, zero=False) if plain else None


def at_least(node: Node, get: Evaluation) -> Abstract:
    """``maximum(scores, lowest number)``: what is empty stays practically so."""
    for band, other in (node.args[:2], node.args[1::-1]):
        value, least = lifted(band, node, get), lifted(other, node, get)
        if isinstance(value, Band) and value.outside in HIDING and is_constant(least):
            return replace(value, outside="min") if lowest(least.const, node) in HIDING else None
    return None


def distance(node: Node, get: Evaluation) -> Abstract:
    """``abs(row - key)``; only a comparison reads it."""
    value = get(node.args[0])
    slopes = dict(value.slopes) if isinstance(value, Affine) else {}
    return (
        Distance(*sorted(slopes))
        if len(slopes) == 2 and sorted(slopes.values()) == [-1, 1] and value.const == 0
        else None
    )


def negated(node: Node, get: Evaluation) -> Abstract:
    value = get(node.args[0])
    if isinstance(value, Affine):
        return Affine(-value.const, tuple((d, -s) for d, s in value.slopes))
    return value if isinstance(value, Band) and is_zero_outside(value) else None


def compared(node: Node, get: Evaluation) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    name = node.target.overloadpacket.__name__
    if isinstance(a, Band) and a.outside == -math.inf and b == Affine(-math.inf) and name in ("eq", "ne"):
        return replace(a, outside=name == "eq", zero=False)  # which scores are empty: those outside are
    if isinstance(a, Band) and a.zero and b == Affine(0.0) and name in ("eq", "ne"):
        return replace(a, outside=name == "ne", zero=False)  # which entries of a mask hide
    if isinstance(a, Band) and is_zero_outside(a) and a.seen == () and b == Affine(0.0) and not a.zero:
        return replace(a, outside=name in ("eq", "le", "ge"), seen=None)  # where a ReLU of scores is shut
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


def agreeing(node: Node, name: str) -> Agreement | None:
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
        return Agreement(same=(pair,))
    below = "le" if node.args[0] is sides["key"] else "ge"
    return Agreement(upto=(pair,)) if name in (below, below.replace("e", "t")) else None


TABLE = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), added(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), added(-1)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiplied),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), divided),
    aten.neg.default: negated,
    aten.abs.default: distance,
    aten.maximum.default: at_least,
    aten.baddbmm.default: product_added,
    aten.addmm.default: product_added,
    **{
        getattr(getattr(aten, name), kind): compared
        for name in ("le", "lt", "ge", "gt", "eq", "ne")
        for kind in ("Tensor", "Scalar")
    },
}

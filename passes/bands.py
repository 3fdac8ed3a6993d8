"""Which columns of a score matrix are provably empty: an abstract evaluation of the mask's own subgraph.

Masks are made from ranges, comparisons and padding rows. Evaluated over the domains of ``domains.py``, their emptiness can be *proved*.
Nothing is assumed: an op not listed here evaluates to ``None`` (unknown), and unknown prunes nothing. Where a proof rests on a padding or
on a stored mask, its value says so, for a condition that is checked when the graph runs: lowest numbers (not ``-inf``) empty a row only
beside a key that is seen, and a stored mask may hold anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from .domains import (HIDING, Abstract, Affine, Band, Distance, all_of, everything, hull, intersected, is_constant, is_zero_outside, mask_of,
                      matrix, moved, one, same_axes, visible)
from .ir import Alike, Seen, shape_of, tensor_operands, value_of

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


def evaluate(graph: Graph, with_tokens: Container[Node] | None = None) -> dict[Node, Abstract]:
    """The abstract value of every node of the graph (``None`` where nothing is known).

    with_tokens  the placeholders that carry tokens; others hold weights, which hide nothing. By default none is taken for a weight
    """
    found = Evaluation(with_tokens)
    for node in graph.nodes:
        found.visit(node)
    return found.values


class Evaluation:
    """What is known so far; called with an argument, its abstract value.

    plain  floating-point nodes without lowest numbers: made of products, weights and looked-up rows by `ORDINARY` operations
    """

    def __init__(self, with_tokens: Container[Node] | None):
        self.with_tokens = with_tokens
        self.values: dict[Node, Abstract] = {}
        self.plain: set[Node] = set()

    def visit(self, node: Node) -> None:
        if not isinstance(value_of(node), torch.Tensor):
            return
        if node.op == "call_function":
            handler = HANDLERS.get(node.target)
            self.values[node] = None if handler is None else handler(node, self)
        if self.hides_nothing(node):
            self.plain.add(node)

    def __call__(self, arg: object) -> Abstract:
        if isinstance(arg, Node):
            return self.values.get(arg)
        return Affine(float(arg)) if isinstance(arg, (bool, int, float)) else None

    def hides_nothing(self, node: Node) -> bool:
        if not value_of(node).dtype.is_floating_point:
            return True
        if node.op == "placeholder":
            return self.with_tokens is not None and node not in self.with_tokens
        if isinstance(self(node), Affine):
            return is_ordinary(self(node).const)
        if node.target in PRODUCTS:
            return node.target not in SUMS or node.args[0] in self.plain
        if node.target is aten.log1p.default:  # of a softplus: what else it is taken of may be -1
            return node.args[0] in self.plain and node.args[0].target is aten.exp.default
        return node.target in ORDINARY and all(a in self.plain for a in tensor_operands(node)) and all(
            is_ordinary(a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, (int, float)) and node.target is not aten.slice.Tensor)


def is_ordinary(number: float) -> bool:
    """Far from the lowest number of every dtype."""
    return abs(number) <= torch.finfo(torch.float16).max / 2


def lifted(arg: object, node: Node, get: Evaluation) -> Abstract:
    """An operand's value in the dimensions of a broadcast output."""
    value = get(arg)
    if not isinstance(arg, Node) or value is None or isinstance(value, Alike):  # which is of the last two dimensions
        return value
    shift = len(shape_of(node)) - len(shape_of(arg))
    return moved(value, {d: d + shift for d in range(len(shape_of(arg)))})


def same(node: Node, get: Evaluation) -> Abstract:
    """A copy, or a cast that keeps every value: an integer may become wider, a float stay a float, a boolean anything."""
    value, old, new = get(node.args[0]), value_of(node.args[0]).dtype, value_of(node).dtype
    if new is torch.bool and isinstance(value, Band) and value.zero:
        return replace(value, outside=True, zero=False)  # which entries of a mask hide
    if old == new or old.is_floating_point and new.is_floating_point and isinstance(value, Band):
        return value
    whole = isinstance(value, Affine) and float(value.const).is_integer() and all(float(s).is_integer() for _, s in value.slopes)
    if whole and new is not torch.bool:
        return value
    flag = is_constant(value) and value.const in (0, 1)
    return value if flag or old is torch.bool and new is torch.bool else None


def copied(node: Node, get: Evaluation) -> Abstract:
    """``copy(target, source)``: the source, in the dtype of the target."""
    source, target = node.args[:2][::-1]
    return lifted(source, node, get) if value_of(source).dtype == value_of(target).dtype else None


def reshaped(node: Node, get: Evaluation) -> Abstract:
    """A dimension that keeps its size and what comes before it keeps its meaning; what merges or splits must not matter."""
    old, new = shape_of(node.args[0]), shape_of(node)
    if isinstance(get(node.args[0]), Alike):
        return get(node.args[0]) if old[-2:] == new[-2:] else None
    places = {(math.prod(new[:i]), size): i for i, size in enumerate(new) if size != 1}
    keys = {i: (math.prod(old[:i]), size) for i, size in enumerate(old) if size != 1}
    return moved(get(node.args[0]), {i: places[key] for i, key in keys.items() if key in places})


def expanded(node: Node, get: Evaluation) -> Abstract:
    return lifted(node.args[0], node, get)


def permuted(node: Node, get: Evaluation) -> Abstract:
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    else:
        order = list(range(rank))
        a, b = (node.args[1] % rank, node.args[2] % rank) if node.target is aten.transpose.int else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return moved(get(node.args[0]), {old: new for new, old in enumerate(order)})


def sliced(node: Node, get: Evaluation) -> Abstract:
    value, shape = get(node.args[0]), shape_of(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    if (len(node.args) > 4 and node.args[4] != 1) or isinstance(start, Node):
        return None
    start = max(0, start + shape[dim] if start < 0 else min(start, shape[dim]))
    if isinstance(value, Affine):
        return cleaned(Affine(value.const + value.slope(dim) * start, value.slopes), node)
    if isinstance(value, Band) and dim in (value.row, value.key):
        shift = 0 if not start else start if dim == value.row else -start
        if shift and (value.assumes or any(s.cells for s in value.seen or ())):
            return None  # a stored mask is checked as it is stored
        all_see = value.seen == () and value.lo == -math.inf  # the first key, whichever that is
        kept = dim == value.row or is_zero_outside(value) or all_see or shape_of(node) == shape
        return replace(value, lo=value.lo + shift, hi=value.hi + shift, seen=value.seen if kept else None)
    matters = isinstance(value, Distance) and dim in (value.row, value.key) or isinstance(value, Alike) and dim >= len(shape) - 2
    return None if matters and shape_of(node) != shape else value


def selected(node: Node, get: Evaluation) -> Abstract:
    value, shape = get(node.args[0]), shape_of(node.args[0])
    dim, index = node.args[1] % len(shape), node.args[2]
    if isinstance(value, Band):
        return moved(value, {d: d - (d > dim) for d in range(len(shape)) if d != dim})
    if not isinstance(value, Affine) or isinstance(index, Node):
        return None
    rest = Affine(value.const + value.slope(dim) * (index % shape[dim]), tuple(s for s in value.slopes if s[0] != dim))
    return moved(rest, {d: d - (d > dim) for d in range(len(shape)) if d != dim})


def cleaned(value: Affine, node: Node) -> Affine:
    """Drop slopes that are zero, or run along a dimension of size one."""
    shape = shape_of(node)
    return Affine(value.const, tuple((d, s) for d, s in value.slopes if s != 0 and shape[d] != 1))


def constant(node: Node, get: Evaluation) -> Abstract:
    fill = node.args[1] if node.target is aten.full.default else node.args[0]
    return Affine(float(fill)) if isinstance(fill, (bool, int, float)) else None


def ranged(node: Node, get: Evaluation) -> Abstract:
    start, step_ = node.kwargs["start"], node.kwargs["step"]
    return None if isinstance(start, Node) or isinstance(step_, Node) else cleaned(Affine(start, ((0, step_),)), node)


def one_per_row(node: Node, like: Node, band: Band) -> bool:
    shift = len(shape_of(like)) - len(shape_of(node))
    return band.key < shift or shape_of(node)[band.key - shift] == 1


def shown(arg: object, like: Node, band: Band, get: Evaluation) -> tuple[Seen, ...] | None:
    """What hides entries of an operand of a score matrix."""
    value = lifted(arg, like, get)
    if isinstance(value, Band) and value.outside in HIDING:
        return value.seen if same_axes(value, band) else None
    if arg in get.plain if isinstance(arg, Node) else is_ordinary(arg):
        return ()
    return one(mask_of(arg, like, band, None))


def added(sign: int):
    def handler(node: Node, get: Evaluation) -> Abstract:
        a, b = (lifted(x, node, get) for x in node.args[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            scale = sign * (node.kwargs.get("alpha", 1))
            slopes = dict(a.slopes)
            for d, s in b.slopes:
                slopes[d] = slopes.get(d, 0) + scale * s
            return cleaned(Affine(a.const + scale * b.const, tuple(slopes.items())), node)
        if isinstance(a, Band) and isinstance(b, Band) and is_zero_outside(a) and is_zero_outside(b) and same_axes(a, b):
            return hull(a, b)
        if sign < 0:  # scores less their row's largest
            less = isinstance(a, Band) and a.outside in HIDING and isinstance(node.args[1], Node) and b is None
            return replace(a, zero=False) if less and one_per_row(node.args[1], node, a) else None
        for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):  # a mask added to scores empties them outside its band
            if isinstance(band, Band) and band.outside in HIDING:
                if isinstance(other, Band) and other.outside in HIDING and same_axes(band, other):
                    return intersected(band, other)
                return replace(band, seen=all_of(band.seen, shown(arg, node, band, get)), zero=band.zero and other == Affine(0.0))
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
            return cleaned(Affine(scale.const * other.const, tuple((d, scale.const * s) for d, s in other.slopes)), node)
    for band, other in ((a, b), (b, a)):
        if isinstance(band, Band) and is_zero_outside(band):
            return band
        if isinstance(band, Band) and band.outside in HIDING and is_constant(other) and stays_lowest(other.const, node):
            return band
    return None


def stays_lowest(scale: float, node: Node) -> bool:
    """Is what was hidden by a lowest number still far below the scores when all are scaled?"""
    return scale >= torch.finfo(value_of(node).dtype).max ** -0.25


def divided(node: Node, get: Evaluation) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    if isinstance(a, Band) and a.outside in HIDING and is_constant(b) and b.const > 0 and stays_lowest(1 / b.const, node):
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
    return Distance(*sorted(slopes)) if len(slopes) == 2 and sorted(slopes.values()) == [-1, 1] and value.const == 0 else None


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


def agreeing(node: Node, name: str) -> Alike | None:
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
        return Alike(same=(pair,))
    below = "le" if node.args[0] is sides["key"] else "ge"
    return Alike(upto=(pair,)) if name in (below, below.replace("e", "t")) else None


def conjoined(node: Node, get: Evaluation) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return other if constant_.const else Affine(0.0)
    if isinstance(a, Alike) and isinstance(b, Alike):
        return Alike(a.same + b.same, a.upto + b.upto)
    for band, other, arg in ((a, b, node.args[1]), (b, a, node.args[0])):
        if isinstance(band, Alike) and not isinstance(other, Band):
            return band
        if isinstance(band, Band) and band.outside is False:
            if isinstance(other, Band) and other.outside is False and same_axes(band, other):
                return intersected(band, other)
            return replace(band, seen=all_of(band.seen, one(mask_of(arg, node, band, False)) if other is None else None))
    return both_masks(node, False) if a is b is None else None


def both_masks(node: Node, hides: bool) -> Band | None:
    """Two masks of which nothing is known, each hiding its own keys."""
    if len(shape_of(node)) < 2:
        return None
    return everything(node, hides, *(one(mask_of(x, node, matrix(node), hides)) for x in node.args[:2]))


def disjoined(node: Node, get: Evaluation) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if is_constant(constant_):
            return Affine(1.0) if constant_.const else other
    if isinstance(a, Band) and isinstance(b, Band) and a.outside is b.outside is False and same_axes(a, b):
        either = Band(a.row, a.key, min(a.lo, b.lo), max(a.hi, b.hi), False, assumes=a.assumes + b.assumes)
        if either.lo > -math.inf or either.hi < math.inf:
            return either
    left = [visible(a), visible(b)]  # both as what hides
    if None not in left and same_axes(*left):
        return replace(intersected(*left), outside=True)
    for band, other, arg in ((left[0], b, node.args[1]), (left[1], a, node.args[0])):
        if band is not None:
            return replace(band, outside=True, seen=all_of(band.seen, one(mask_of(arg, node, band, True)) if other is None else None))
    return both_masks(node, True) if a is b is None else None


def inverted(node: Node, get: Evaluation) -> Abstract:
    """The complement of a half-plane is a half-plane; of another band, the same band with the outside true."""
    value = get(node.args[0])
    if is_constant(value):
        return Affine(float(not value.const))
    if not isinstance(value, Band):
        return None
    return visible(value) or (replace(value, outside=True) if value.outside is False else None)


def lowest(value: float, node: Node) -> object:
    """How a filling empties a score: exactly (-inf), practically (the dtype's minimum), as zero, or not at all."""
    if value == -math.inf or value == 0:
        return value
    dtype = value_of(node).dtype
    return "min" if dtype.is_floating_point and value <= torch.finfo(dtype).min / 2 else None


def chosen(node: Node, get: Evaluation) -> Abstract:
    """``where(mask, inside, filling)``."""
    condition, inside, filling = (lifted(x, node, get) for x in node.args[:3])
    if is_constant(condition):
        return inside if condition.const else filling
    for zero, band in ((inside, filling), (filling, inside)):
        if zero == Affine(0.0) and isinstance(band, Band) and is_zero_outside(band):
            return band
    if isinstance(inside, Band) and isinstance(filling, Band) and is_zero_outside(inside) and is_zero_outside(filling) and same_axes(inside, filling):
        return hull(inside, filling)
    found = []
    if is_constant(filling):
        found.append(emptied(node.args[1], seen_where(node.args[0], condition, node, False), filling.const, node, get))
    if is_constant(inside):  # where(hidden, -inf, scores)
        found.append(emptied(node.args[2], visible(condition) or seen_where(node.args[0], condition, node, True), inside.const, node, get))
    bands = [band for band in found if band is not None]
    return next((band for band in bands if band.outside in HIDING), bands[0] if bands else None)


def seen_where(arg: object, condition: Abstract, like: Node, hides: bool) -> Band | None:
    """A condition as what is visible where it is not ``hides``: a band, a padding, or a stored mask."""
    if isinstance(condition, Band) and condition.outside is False and not hides:
        return condition
    if isinstance(condition, Alike) and condition.upto and not hides:  # taken to grow with the rows
        return replace(matrix(like), hi=0, outside=False, assumes=(condition,))
    if condition is not None or len(shape_of(like)) < 2:
        return None
    return everything(like, False, one(mask_of(arg, like, matrix(like), hides)))


def emptied(scores: object, mask: Band | None, value: float, node: Node, get: Evaluation) -> Band | None:
    """Scores filled with one number where a mask does not leave them."""
    outside = lowest(value, node)
    if mask is None or outside is None:
        return None
    if value == 0:
        return replace(mask, outside=0.0, seen=()) if mask.hi < math.inf or mask.lo > -math.inf else None
    inner = lifted(scores, node, get)
    if isinstance(inner, Band) and inner.outside in HIDING and same_axes(inner, mask):
        return intersected(replace(mask, outside=outside, zero=inner.zero), inner)
    return replace(mask, outside=outside, seen=all_of(mask.seen, shown(scores, node, mask, get)), zero=inner == Affine(0.0))


def filled(node: Node, get: Evaluation) -> Abstract:
    """``masked_fill(x, hidden, value)``."""
    x, hidden = (lifted(a, node, get) for a in node.args[:2])
    value = get(node.args[2])
    if is_constant(hidden):
        return value if hidden.const else x
    if not is_constant(value):
        return None
    if value == Affine(0.0) and isinstance(x, Band) and is_zero_outside(x):
        return x
    found = emptied(node.args[0], visible(hidden) or seen_where(node.args[1], hidden, node, True), value.const, node, get)
    if found is None and isinstance(x, Band) and x.outside in HIDING and lowest(value.const, node) in HIDING:
        return replace(x, outside=x.outside if lowest(value.const, node) == x.outside else "min", seen=None)
    return found


def joined(node: Node, get: Evaluation) -> Abstract:
    """Ranges that continue one another are one range."""
    parts = node.args[0]
    rank = len(shape_of(node))
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    scores = get(parts[0])
    if isinstance(scores, Band) and dim == scores.key and all(shape_of(p)[dim] == 1 for p in parts[1:]):
        always = scores.outside in HIDING and any(p in get.plain for p in parts[1:])  # a sink: every row sees that
        return replace(scores, seen=() if always else scores.seen, zero=False)  # columns beyond the keys are always read
    values, at = [], 0
    for part in parts:
        value = get(part)
        if not isinstance(value, Affine):
            return None
        values.append((part, value, at))
        at += shape_of(part)[dim]
    long = [(v, start) for p, v, start in values if shape_of(p)[dim] > 1] or [(values[0][1], 0)]
    whole = cleaned(Affine(long[0][0].const - long[0][0].slope(dim) * long[0][1], long[0][0].slopes), node)
    for part, value, start in values:
        shifted = Affine(whole.const + whole.slope(dim) * start, whole.slopes)
        if cleaned(shifted, part) != cleaned(value, part):
            return None
    return whole


def accumulated(node: Node, get: Evaluation) -> Abstract:
    value, dim = get(node.args[0]), node.args[1] % max(len(shape_of(node)), 1)
    if not is_constant(value):
        return None
    return cleaned(Affine(value.const, ((dim, value.const),)), node)


def looked_up(node: Node, get: Evaluation) -> Abstract:
    """A range read at ranges is a range."""
    table = get(node.args[0])
    if not isinstance(table, Affine):
        return None
    total = Affine(table.const)
    for dim, index in enumerate(node.args[1]):
        if table.slope(dim) == 0:
            continue
        at = lifted(index, node, get) if index is not None else None
        if not isinstance(at, Affine):
            return None
        slopes = dict(total.slopes)
        for d, s in at.slopes:
            slopes[d] = slopes.get(d, 0) + table.slope(dim) * s
        total = Affine(total.const + table.slope(dim) * at.const, tuple(slopes.items()))
    if any(s for d, s in table.slopes if d >= len(node.args[1])):
        return None
    return cleaned(total, node)


def summed(node: Node, get: Evaluation) -> Abstract:
    """A sum over dimensions that are neither row nor key leaves zeros where they are."""
    value, rank = get(node.args[0]), len(shape_of(node.args[0]))
    dims = {d % rank for d in node.args[1]} if len(node.args) > 1 and node.args[1] else set(range(rank))
    if not isinstance(value, Band) or not is_zero_outside(value) or value.row in dims or value.key in dims:
        return None
    keep = len(node.args) > 2 and node.args[2]
    return moved(value, {d: d if keep else d - sum(e < d for e in dims) for d in range(rank) if d not in dims})


def normalized(node: Node, get: Evaluation) -> Abstract:
    """Softmax over keys turns empty scores into zeros."""
    return zeroed(get(node.args[0]), node.args[1] % len(shape_of(node)))


def largest_backward(node: Node, get: Evaluation) -> Abstract:
    """The gradient of a row's largest score is zero but at that, which is never hidden."""
    return zeroed(get(node.args[1]), node.args[2] % len(shape_of(node))) if node.args[3] else None


def zeroed(scores: Abstract, dim: int) -> Band | None:
    """What is zero where scores along their keys are empty."""
    if isinstance(scores, Band) and scores.outside in HIDING and scores.key == dim and scores.rests_on is not None:
        return replace(scores, outside=0.0, seen=scores.rests_on, zero=False)
    return None


def normalized_backward(node: Node, get: Evaluation) -> Abstract:
    value = get(node.args[1])
    return value if isinstance(value, Band) and is_zero_outside(value) else None


HANDLERS = {
    **dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default,
                     prims.convert_element_type.default, aten.lift_fresh_copy.default), same),
    aten.copy.default: copied,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
                     aten.squeeze.dims, aten.squeeze.default), reshaped),
    aten.expand.default: expanded,
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), permuted),
    aten.slice.Tensor: sliced, aten.select.int: selected,
    aten.full.default: constant, aten.scalar_tensor.default: constant, prims.iota.default: ranged,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), added(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), added(-1)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiplied),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), divided),
    aten.neg.default: negated, aten.abs.default: distance, aten.maximum.default: at_least,
    aten.baddbmm.default: product_added, aten.addmm.default: product_added,
    **{getattr(getattr(aten, name), kind): compared for name in ("le", "lt", "ge", "gt", "eq", "ne")
       for kind in ("Tensor", "Scalar")},
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), conjoined),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), disjoined),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), inverted),
    aten.where.self: chosen,
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), filled),
    aten.cat.default: joined, aten.cumsum.default: accumulated, aten.index.Tensor: looked_up,
    aten.sum.dim_IntList: summed, aten._softmax.default: normalized, aten._safe_softmax.default: normalized,
    streambp.to_extreme.default: largest_backward, aten._softmax_backward_data.default: normalized_backward,
}

SUMS = {aten.addmm.default, aten.baddbmm.default}  # products to which something is added
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.embedding.default, *SUMS}
ORDINARY = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten._to_copy.default, prims.convert_element_type.default, aten.cat.default, aten.constant_pad_nd.default,
    aten.index.Tensor, aten.gather.default, aten.where.self, aten.cumsum.default, aten.amax.default, aten.maximum.default, aten.minimum.default,
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
    aten.neg.default, aten.abs.default, aten.reciprocal.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default,
    aten.exp.default, aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar,
}

"""Which columns of a score matrix are provably empty: an abstract evaluation of the mask's own subgraph.

Masks are made from ranges, comparisons and padding rows. Evaluated over two small domains, their emptiness can be *proved*:

* `Affine`  an integer tensor whose entry is ``const + Σ slope[d] * index[d]`` (ranges, position ids, a mask that is all true);
* `Band`    a matrix that differs from its filling only where ``lo <= key - row <= hi``.

Nothing is assumed: an op not listed here evaluates to ``None`` (unknown), and unknown prunes nothing.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from .ir import shape_of, value_of

aten, prims = torch.ops.aten, torch.ops.prims


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

    outside  ``False`` (a boolean mask), ``0.0``, ``-inf``, or ``"min"`` (so low that it vanishes beside any visible key)
    exact    inside, a boolean is all ``True`` and an additive mask all ``0``
    dense    inside, no entry is masked, so that every row sees a key
    """

    row: int
    key: int
    lo: float
    hi: float
    outside: object
    exact: bool = False
    dense: bool = False

    def __str__(self) -> str:
        if (self.lo, self.hi) == (-math.inf, 0):
            return "causal: proved"
        if self.hi == 0:
            return f"window {int(1 - self.lo)}: proved"
        return f"band [{self.lo}, {self.hi}]: proved"


@dataclass(frozen=True)
class Distance:
    """A matrix over (row, key) dims that equals ``abs(key - row)``."""

    row: int
    key: int


Abstract = Affine | Band | Distance | None


def evaluate(graph: Graph) -> dict[Node, Abstract]:
    """The abstract value of every node of the graph (``None`` where nothing is known)."""
    values: dict[Node, Abstract] = {}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(value_of(node), torch.Tensor):
            values[node] = step(node, values)
    return values


def step(node: Node, values: dict[Node, Abstract]) -> Abstract:
    handler = HANDLERS.get(node.target)
    return None if handler is None else handler(node, lambda a: known(a, values))


def known(arg: object, values: dict[Node, Abstract]) -> Abstract:
    if isinstance(arg, Node):
        return values.get(arg)
    return Affine(float(arg)) if isinstance(arg, (bool, int, float)) else None


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


def lifted(arg: object, node: Node, get) -> Abstract:
    """An operand's value in the dimensions of a broadcast output."""
    value = get(arg)
    if not isinstance(arg, Node) or value is None:
        return value
    shift = len(shape_of(node)) - len(shape_of(arg))
    return moved(value, {d: d + shift for d in range(len(shape_of(arg)))})


def same(node: Node, get) -> Abstract:
    """A copy, or a cast that keeps every value: an integer may become wider, a float stay a float, a boolean anything."""
    value, old, new = get(node.args[0]), value_of(node.args[0]).dtype, value_of(node).dtype
    if old == new or old.is_floating_point and new.is_floating_point and isinstance(value, Band):
        return value
    whole = isinstance(value, Affine) and float(value.const).is_integer() and all(float(s).is_integer() for _, s in value.slopes)
    if whole and new is not torch.bool:
        return value
    flag = isinstance(value, Affine) and not value.slopes and value.const in (0, 1)
    return value if flag or old is torch.bool and new is torch.bool else None


def is_score(node: object) -> bool:
    """Is this a product of queries and keys, scaled at most? Such scores hide no key by themselves."""
    while isinstance(node, Node) and node.target in SCALED:
        node = node.args[0]
    return isinstance(node, Node) and node.target in (aten.bmm.default, aten.mm.default, aten.baddbmm.default)


SCALED = (aten.view.default, aten._unsafe_view.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
          aten.tanh.default, aten.clone.default, prims.convert_element_type.default, aten.add.Scalar)


def reshaped(node: Node, get) -> Abstract:
    """A dimension that keeps its size and what comes before it keeps its meaning; what merges or splits must not matter."""
    old, new = shape_of(node.args[0]), shape_of(node)
    places = {(math.prod(new[:i]), size): i for i, size in enumerate(new) if size != 1}
    keys = {i: (math.prod(old[:i]), size) for i, size in enumerate(old) if size != 1}
    return moved(get(node.args[0]), {i: places[key] for i, key in keys.items() if key in places})


def expanded(node: Node, get) -> Abstract:
    return lifted(node.args[0], node, get)


def permuted(node: Node, get) -> Abstract:
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    else:
        order = list(range(rank))
        a, b = (node.args[1] % rank, node.args[2] % rank) if node.target is aten.transpose.int else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return moved(get(node.args[0]), {old: new for new, old in enumerate(order)})


def sliced(node: Node, get) -> Abstract:
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
        return replace(value, lo=value.lo + shift, hi=value.hi + shift, dense=value.dense and shape_of(node) == shape)
    return value


def selected(node: Node, get) -> Abstract:
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


def constant(node: Node, get) -> Abstract:
    fill = node.args[1] if node.target is aten.full.default else node.args[0]
    return Affine(float(fill)) if isinstance(fill, (bool, int, float)) else None


def ranged(node: Node, get) -> Abstract:
    start, step_ = node.kwargs["start"], node.kwargs["step"]
    return None if isinstance(start, Node) or isinstance(step_, Node) else cleaned(Affine(start, ((0, step_),)), node)


def one_per_row(node: Node, like: Node, band: Band) -> bool:
    shift = len(shape_of(like)) - len(shape_of(node))
    return band.key < shift or shape_of(node)[band.key - shift] == 1


def added(sign: int):
    def handler(node: Node, get) -> Abstract:
        a, b = (lifted(x, node, get) for x in node.args[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            scale = sign * (node.kwargs.get("alpha", 1))
            slopes = dict(a.slopes)
            for d, s in b.slopes:
                slopes[d] = slopes.get(d, 0) + scale * s
            return cleaned(Affine(a.const + scale * b.const, tuple(slopes.items())), node)
        if isinstance(a, Band) and isinstance(b, Band) and a.outside == b.outside == 0.0 and same_axes(a, b):
            return replace(a, lo=min(a.lo, b.lo), hi=max(a.hi, b.hi), exact=False)
        if sign < 0 and not isinstance(a, Band):
            return None
        if sign < 0 and a.outside in (-math.inf, "min") and isinstance(node.args[1], Node) and b is None and one_per_row(node.args[1], node, a):
            return replace(a, exact=False)  # scores less their row's largest
        for band, other in ((a, b), (b, a)):  # a mask added to scores empties them outside its band
            if isinstance(band, Band) and band.outside in (-math.inf, "min"):
                if sign < 0:
                    return None
                if isinstance(other, Band) and other.outside in (-math.inf, "min") and same_axes(band, other):
                    return replace(band, lo=max(band.lo, other.lo), hi=min(band.hi, other.hi), dense=False,
                                   outside=band.outside if band.outside == other.outside else "min", exact=band.exact and other.exact)
                zero = isinstance(other, Affine) and other == Affine(0.0)
                return replace(band, exact=band.exact and zero, dense=band.dense and (zero or is_score(node.args[0] if band is b else node.args[1])))
        return None

    return handler


def multiplied(node: Node, get) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for scale, other in ((a, b), (b, a)):
        if isinstance(scale, Affine) and not scale.slopes and isinstance(other, Affine):
            return cleaned(Affine(scale.const * other.const, tuple((d, scale.const * s) for d, s in other.slopes)), node)
    for band, other in ((a, b), (b, a)):
        if isinstance(band, Band) and band.outside == 0.0:
            return replace(band, exact=False)
        if isinstance(band, Band) and isinstance(other, Affine) and not other.slopes and other.const >= 1:
            return band
    return None


def divided(node: Node, get) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    if isinstance(a, Band) and a.outside == -math.inf and isinstance(b, Affine) and not b.slopes and b.const > 0:
        return a
    return replace(a, exact=False) if isinstance(a, Band) and a.outside == 0.0 else None


def product_added(node: Node, get) -> Abstract:
    """``baddbmm(mask, queries, keys)``: a mask added to scores."""
    mask = lifted(node.args[0], node, get)
    plain = node.kwargs.get("beta", 1) == 1 and isinstance(mask, Band) and mask.outside in (-math.inf, "min")
    return replace(mask, exact=False) if plain else None


def at_least(node: Node, get) -> Abstract:
    """``maximum(scores, lowest number)``: what is empty stays practically so."""
    for band, other in (node.args[:2], node.args[1::-1]):
        value, least = lifted(band, node, get), lifted(other, node, get)
        if isinstance(value, Band) and value.outside in (-math.inf, "min") and isinstance(least, Affine) and not least.slopes:
            return replace(value, outside="min", exact=False) if lowest(least.const, node) in ("min", -math.inf) else None
    return None


def distance(node: Node, get) -> Abstract:
    """``abs(row - key)``; only a comparison reads it."""
    value = get(node.args[0])
    slopes = dict(value.slopes) if isinstance(value, Affine) else {}
    return Distance(*sorted(slopes)) if len(slopes) == 2 and sorted(slopes.values()) == [-1, 1] and value.const == 0 else None


def negated(node: Node, get) -> Abstract:
    value = get(node.args[0])
    if isinstance(value, Affine):
        return Affine(-value.const, tuple((d, -s) for d, s in value.slopes))
    return replace(value, exact=False) if isinstance(value, Band) and value.outside == 0.0 else None


def same_axes(a: Band, b: Band) -> bool:
    return (a.row, a.key) == (b.row, b.key)


def compared(node: Node, get) -> Abstract:
    a, b = (lifted(x, node, get) for x in node.args[:2])
    name = node.target.overloadpacket.__name__
    if isinstance(a, Band) and a.outside == -math.inf and b == Affine(-math.inf) and name in ("eq", "ne"):
        return replace(a, outside=name == "eq", exact=False)  # which scores are empty: those outside are
    if isinstance(a, Distance) and isinstance(b, Affine) and not b.slopes and name in ("le", "lt"):
        width = math.ceil(b.const) - 1 if name == "lt" else math.floor(b.const)
        return Band(a.row, a.key, -width, width, False, True)
    if not (isinstance(a, Affine) and isinstance(b, Affine)):
        return None
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
        return Band(row, key, bound, bound, False, True)
    if name == "ne":
        return None
    less = (name in ("le", "lt")) == (sign > 0)
    strict = name in ("lt", "gt")
    bound = -const * sign
    if less:
        return Band(row, key, -math.inf, bound - strict, False, True)
    return Band(row, key, bound + strict, math.inf, False, True)


def conjoined(node: Node, get) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if isinstance(constant_, Affine) and not constant_.slopes:
            return other if constant_.const else Affine(0.0)
    bands = [v for v in (a, b) if isinstance(v, Band) and v.outside is False]
    if len(bands) == 2 and same_axes(*bands):
        return Band(a.row, a.key, max(a.lo, b.lo), min(a.hi, b.hi), False, a.exact and b.exact)
    return replace(bands[0], exact=False) if bands else None


def disjoined(node: Node, get) -> Abstract:
    if value_of(node).dtype is not torch.bool:
        return None
    a, b = (lifted(x, node, get) for x in node.args[:2])
    for constant_, other in ((a, b), (b, a)):
        if isinstance(constant_, Affine) and not constant_.slopes:
            return Affine(1.0) if constant_.const else other
    if isinstance(a, Band) and isinstance(b, Band) and a.outside is b.outside is False and same_axes(a, b):
        return Band(a.row, a.key, min(a.lo, b.lo), max(a.hi, b.hi), False, False)
    return None


def inverted(node: Node, get) -> Abstract:
    """The complement of a half-plane is a half-plane."""
    value = get(node.args[0])
    if isinstance(value, Affine) and not value.slopes:
        return Affine(float(not value.const))
    if isinstance(value, Band) and value.outside is True:
        return replace(value, outside=False)
    exact = isinstance(value, Band) and value.outside is False and value.exact
    return complement(value) if exact else None


def lowest(value: float, node: Node) -> object:
    """How a filling empties a score: exactly (-inf), practically (the dtype's minimum), as zero, or not at all."""
    if value == -math.inf or value == 0:
        return value
    dtype = value_of(node).dtype
    return "min" if dtype.is_floating_point and value <= torch.finfo(dtype).min / 2 else None


def chosen(node: Node, get) -> Abstract:
    """``where(mask, inside, filling)``."""
    condition, inside, filling = (lifted(x, node, get) for x in node.args[:3])
    if isinstance(condition, Affine) and not condition.slopes:
        return inside if condition.const else filling
    for zero, band in ((inside, filling), (filling, inside)):
        if zero == Affine(0.0) and isinstance(band, Band) and band.outside is not False and band.outside == 0.0:
            return replace(band, exact=False)
    if not (isinstance(condition, Band) and condition.outside is False):
        return None
    if isinstance(inside, Affine) and not inside.slopes and condition.exact:  # where(hidden, -inf, scores)
        visible = complement(condition)
        outside = lowest(inside.const, node)
        if visible is not None and outside is not None and outside != 0:
            zero = isinstance(filling, Affine) and filling == Affine(0.0)
            return replace(visible, outside=outside, exact=zero and outside != 0, dense=visible.lo <= 0 <= visible.hi)
    if isinstance(filling, Affine) and not filling.slopes:
        outside = lowest(filling.const, node)
        if outside is not None:
            zero_inside = isinstance(inside, Affine) and inside == Affine(0.0)
            dense = condition.exact and condition.lo <= 0 <= condition.hi
            return replace(condition, outside=outside, exact=condition.exact and zero_inside and outside != 0, dense=dense)
    return None


def complement(band: Band) -> Band | None:
    """Where an exact band is false: a band too, if it was a half-plane."""
    if band.lo == -math.inf:
        return replace(band, lo=band.hi + 1, hi=math.inf)
    return replace(band, lo=-math.inf, hi=band.lo - 1) if band.hi == math.inf else None


def filled(node: Node, get) -> Abstract:
    """``masked_fill(x, hidden, value)``."""
    x, hidden = (lifted(a, node, get) for a in node.args[:2])
    value = get(node.args[2])
    if isinstance(hidden, Affine) and not hidden.slopes:
        return value if hidden.const else x
    if isinstance(hidden, Band) and hidden.outside is False and hidden.exact and isinstance(value, Affine):
        visible, outside = complement(hidden), lowest(value.const, node)
        if visible is not None and outside is not None:
            return replace(visible, outside=outside, dense=visible.lo <= 0 <= visible.hi,
                           exact=isinstance(x, Affine) and x == Affine(0.0) and outside != 0)
    if isinstance(x, Band) and isinstance(value, Affine) and lowest(value.const, node) == x.outside:
        return replace(x, exact=False, dense=False)  # more is hidden, nothing less
    return None


def joined(node: Node, get) -> Abstract:
    """Ranges that continue one another are one range."""
    parts = node.args[0]
    rank = len(shape_of(node))
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    scores = get(parts[0])
    if isinstance(scores, Band) and dim == scores.key and all(shape_of(p)[dim] == 1 for p in parts[1:]):
        return replace(scores, exact=False)  # columns beyond the keys are always read
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


def accumulated(node: Node, get) -> Abstract:
    value, dim = get(node.args[0]), node.args[1] % max(len(shape_of(node)), 1)
    if not isinstance(value, Affine) or value.slopes:
        return None
    return cleaned(Affine(value.const, ((dim, value.const),)), node)


def looked_up(node: Node, get) -> Abstract:
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


def summed(node: Node, get) -> Abstract:
    """A sum over dimensions that are neither row nor key leaves zeros where they are."""
    value, rank = get(node.args[0]), len(shape_of(node.args[0]))
    dims = {d % rank for d in node.args[1]} if len(node.args) > 1 and node.args[1] else set(range(rank))
    if not isinstance(value, Band) or value.outside != 0.0 or value.row in dims or value.key in dims:
        return None
    keep = len(node.args) > 2 and node.args[2]
    return moved(replace(value, exact=False), {d: d if keep else d - sum(e < d for e in dims) for d in range(rank) if d not in dims})


def normalized(node: Node, get) -> Abstract:
    """Softmax over keys turns empty scores into zeros; its gradient is zero where it is."""
    value = get(node.args[0])
    rank = len(shape_of(node))
    if isinstance(value, Band) and value.key == node.args[1] % rank and (
            value.outside == -math.inf or (value.outside == "min" and value.dense)):
        return replace(value, outside=0.0, exact=False)
    return None


def normalized_backward(node: Node, get) -> Abstract:
    value = get(node.args[1])
    return replace(value, exact=False) if isinstance(value, Band) and value.outside == 0.0 else None


HANDLERS = {
    **dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default,
                     prims.convert_element_type.default, aten.lift_fresh_copy.default), same),
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
    aten.neg.default: negated, aten.abs.default: distance, aten.baddbmm.default: product_added, aten.maximum.default: at_least,
    **{getattr(getattr(aten, name), kind): compared for name in ("le", "lt", "ge", "gt", "eq", "ne")
       for kind in ("Tensor", "Scalar")},
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), conjoined),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), disjoined),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), inverted),
    aten.where.self: chosen,
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), filled),
    aten.cat.default: joined, aten.cumsum.default: accumulated, aten.index.Tensor: looked_up,
    aten.sum.dim_IntList: summed, aten._softmax.default: normalized, aten._softmax_backward_data.default: normalized_backward,
}

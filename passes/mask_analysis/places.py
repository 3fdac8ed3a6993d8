"""Ops that move entries, or make them from their places: views, slices, joins, look-ups, ranges."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from ..ir import Agreement, shape_of, value_of
from .domains import HIDING, Abstract, Affine, Band, Distance, is_constant, is_zero_outside, moved
from .evaluation import Evaluation, cleaned, lifted

aten, prims = torch.ops.aten, torch.ops.prims


def same(node: Node, get: Evaluation) -> Abstract:
    """A copy, or a cast that keeps every value: an integer may become wider, a float stay a float, a boolean
    anything."""
    value, old, new = get(node.args[0]), value_of(node.args[0]).dtype, value_of(node).dtype
    if new is torch.bool and isinstance(value, Band) and value.zero:
        return replace(value, outside=True, zero=False)  # which entries of a mask hide
    if old == new or old.is_floating_point and new.is_floating_point and isinstance(value, Band):
        return value
    whole = (
        isinstance(value, Affine)
        and float(value.const).is_integer()
        and all(float(s).is_integer() for _, s in value.slopes)
    )
    if whole and new is not torch.bool:
        return value
    flag = is_constant(value) and value.const in (0, 1)
    return value if flag or old is torch.bool and new is torch.bool else None


def copied(node: Node, get: Evaluation) -> Abstract:
    """``copy(target, source)``: the source, in the dtype of the target."""
    source, target = node.args[:2][::-1]
    return lifted(source, node, get) if value_of(source).dtype == value_of(target).dtype else None


def reshaped(node: Node, get: Evaluation) -> Abstract:
    """A dimension that keeps its size and what comes before it keeps its meaning; what merges or splits must
    not matter."""
    old, new = shape_of(node.args[0]), shape_of(node)
    if isinstance(get(node.args[0]), Agreement):
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
        a, b = (
            (node.args[1] % rank, node.args[2] % rank) if node.target is aten.transpose.int else (0, rank - 1)
        )
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
    matters = (
        isinstance(value, Distance)
        and dim in (value.row, value.key)
        or isinstance(value, Agreement)
        and dim >= len(shape) - 2
    )
    return None if matters and shape_of(node) != shape else value


def selected(node: Node, get: Evaluation) -> Abstract:
    value, shape = get(node.args[0]), shape_of(node.args[0])
    dim, index = node.args[1] % len(shape), node.args[2]
    if isinstance(value, Band):
        return moved(value, {d: d - (d > dim) for d in range(len(shape)) if d != dim})
    if not isinstance(value, Affine) or isinstance(index, Node):
        return None
    rest = Affine(
        value.const + value.slope(dim) * (index % shape[dim]), tuple(s for s in value.slopes if s[0] != dim)
    )
    return moved(rest, {d: d - (d > dim) for d in range(len(shape)) if d != dim})


def constant(node: Node, get: Evaluation) -> Abstract:
    fill = node.args[1] if node.target is aten.full.default else node.args[0]
    return Affine(float(fill)) if isinstance(fill, (bool, int, float)) else None


def ranged(node: Node, get: Evaluation) -> Abstract:
    start, step_ = node.kwargs["start"], node.kwargs["step"]
    return (
        None
        if isinstance(start, Node) or isinstance(step_, Node)
        else cleaned(Affine(start, ((0, step_),)), node)
    )


def joined(node: Node, get: Evaluation) -> Abstract:
    """Ranges that continue one another are one range."""
    parts = node.args[0]
    rank = len(shape_of(node))
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    scores = get(parts[0])
    if isinstance(scores, Band) and dim == scores.key and all(shape_of(p)[dim] == 1 for p in parts[1:]):
        always = scores.outside in HIDING and any(
            p in get.plain for p in parts[1:]
        )  # a sink: every row sees that
        return replace(
            scores, seen=() if always else scores.seen, zero=False
        )  # columns beyond the keys are always read
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
    return moved(
        value, {d: d if keep else d - sum(e < d for e in dims) for d in range(rank) if d not in dims}
    )


TABLE = {
    **dict.fromkeys(
        (
            aten.clone.default,
            aten.detach.default,
            aten.alias.default,
            aten._to_copy.default,
            prims.convert_element_type.default,
            aten.lift_fresh_copy.default,
        ),
        same,
    ),
    aten.copy.default: copied,
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
        ),
        reshaped,
    ),
    aten.expand.default: expanded,
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), permuted),
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.full.default: constant,
    aten.scalar_tensor.default: constant,
    prims.iota.default: ranged,
    aten.cat.default: joined,
    aten.cumsum.default: accumulated,
    aten.index.Tensor: looked_up,
    aten.sum.dim_IntList: summed,
}

"""Ops that move entries: copies, views, slices, concatenations, look-ups, sums over other dimensions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ...ir import shape_of, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    Difference,
    Distance,
    have_same_axes,
    is_constant,
    is_empty_outside,
    is_zero_outside,
    with_dims_renamed,
)
from ...mask_analysis.operands import (
    PAIRWISE,
    Known,
    broadcast_value,
    is_boolean,
    without_zero_slopes,
)
from .comparisons import ZERO, comparison
from .indicators import entrywise, moving

aten = torch.ops.aten


@entrywise(lambda node: lambda number: number, 1)
def same(node: Node, known: Known) -> Abstract:
    """Evaluate a copy, or a cast that keeps every value. An integer may become wider, a float stay a float,
    and a boolean become anything."""
    value, old, new = known(node.args[0]), value_of(node.args[0]).dtype, value_of(node).dtype
    if new is torch.bool and old is not torch.bool:
        return comparison("ne", value, ZERO, node)
    if old == new or old.is_floating_point and new.is_floating_point and isinstance(value, Band):
        return value
    if isinstance(value, Difference):
        return value if new.is_floating_point or new.itemsize >= old.itemsize else None
    whole = (
        isinstance(value, Affine)
        and float(value.const).is_integer()
        and all(float(s).is_integer() for _, s in value.slopes)
    )
    if whole and new is not torch.bool:
        return value
    return value if is_constant(value) and value.const in (0, 1) else None


def copied(node: Node, known: Known) -> Abstract:
    """Evaluate ``copy(target, source)``: the source, if the target has the same dtype."""
    source, target = node.args[:2][::-1]
    return broadcast_value(source, node, known) if value_of(source).dtype == value_of(target).dtype else None


@moving
def reshaped(node: Node, known: Known) -> Abstract:
    """Evaluate a reshape: a dimension keeps its meaning if its size and those before it stay. The sizes
    before it may change if their product does not. The value must not depend on dimensions that merge or
    split."""
    old, new = shape_of(node.args[0]), shape_of(node)
    if isinstance(known(node.args[0]), PAIRWISE):
        return known(node.args[0]) if old[-2:] == new[-2:] else None
    places = {(math.prod(new[:i]), size): i for i, size in enumerate(new) if size != 1}
    keys = {i: (math.prod(old[:i]), size) for i, size in enumerate(old) if size != 1}
    return with_dims_renamed(
        known(node.args[0]), {i: places[key] for i, key in keys.items() if key in places}
    )


@moving
def expanded(node: Node, known: Known) -> Abstract:
    return broadcast_value(node.args[0], node, known)


@moving
def permuted(node: Node, known: Known) -> Abstract:
    """Evaluate ``permute(x, dims)``, ``transpose(x, a, b)`` or ``t(x)``."""
    rank, dims = len(shape_of(node)), node.args[1:]
    if dims and isinstance(dims[0], (list, tuple)):
        order = [d % rank for d in dims[0]]
    else:
        order = list(range(rank)) if dims else list(range(rank))[::-1]
        if dims:
            a, b = (d % rank for d in dims)
            order[a], order[b] = b, a
    return with_dims_renamed(known(node.args[0]), {old: new for new, old in enumerate(order)})


@moving
def sliced(node: Node, known: Known) -> Abstract:
    value, shape = known(node.args[0]), shape_of(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    if (len(node.args) > 4 and node.args[4] != 1) or isinstance(start, Node):
        return None
    start = max(0, start + shape[dim] if start < 0 else min(start, shape[dim]))
    if isinstance(value, Affine):
        return without_zero_slopes(Affine(value.const + value.slope(dim) * start, value.slopes), node)
    if isinstance(value, Band) and dim in (value.row, value.key):
        shift = 0 if not start else start if dim == value.row else -start
        if shift and (value.assumes or any(s.by_row for s in value.key_masks or ())):
            return None  # a stored mask is checked as it is stored
        all_see = value.key_masks == () and value.lo == -math.inf  # see the first key, whichever it is
        kept = dim == value.row or is_zero_outside(value) or all_see or shape_of(node) == shape
        return replace(
            value, lo=value.lo + shift, hi=value.hi + shift, key_masks=value.key_masks if kept else None
        )
    matters = (
        isinstance(value, Distance)
        and dim in (value.row, value.key)
        or isinstance(value, PAIRWISE)
        and dim >= len(shape) - 2
    )
    return None if matters and shape_of(node) != shape else value


@moving
def selected(node: Node, known: Known) -> Abstract:
    """Evaluate ``x[..., index]``: dimensions behind the selected one move forward."""
    value, shape = known(node.args[0]), shape_of(node.args[0])
    dim, index = node.args[1] % len(shape), node.args[2]
    if isinstance(value, Band):
        return with_dims_renamed(value, {d: d - (d > dim) for d in range(len(shape)) if d != dim})
    if not isinstance(value, Affine) or isinstance(index, Node):
        return None
    rest = Affine(
        value.const + value.slope(dim) * (index % shape[dim]), tuple(s for s in value.slopes if s[0] != dim)
    )
    return with_dims_renamed(rest, {d: d - (d > dim) for d in range(len(shape)) if d != dim})


def joined(node: Node, known: Known) -> Abstract:
    """Evaluate ``cat`` of columns behind scores, of masks of several heads, or of ranges. Each range must
    continue the one before it."""
    rank = len(shape_of(node))
    parts = [part for part in node.args[0] if len(shape_of(part)) == rank]  # parts of another rank are empty
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    scores = known(parts[0])
    if isinstance(scores, Band) and dim == scores.key and all(shape_of(p)[dim] == 1 for p in parts[1:]):
        sink = is_empty_outside(scores) and any(p in known.bounded for p in parts[1:])
        # columns behind the keys are always read; a sink is visible to every row
        return replace(scores, key_masks=() if sink else scores.key_masks, zero_inside=False)
    if isinstance(scores, Band) and dim not in (scores.row, scores.key):
        return functools.reduce(beside, map(known, parts))
    values = [value for part in parts if isinstance(value := known(part), Affine)]
    if len(values) < len(parts):
        return None
    return joined_ranges(node, parts, values, dim)


def beside(left: Abstract, right: Abstract) -> Band | None:
    """Join masks of different heads along heads, into a band of the entries that either leaves visible. The
    masks that hide entries inside it are known only where both values are the same."""
    if left == right or not isinstance(left, Band) or not isinstance(right, Band):
        return left if isinstance(left, Band) and left == right else None
    if not have_same_axes(left, right) or left.outside != right.outside or left.assumes or right.assumes:
        return None
    lo, hi, zero = min(left.lo, right.lo), max(left.hi, right.hi), left.zero_inside and right.zero_inside
    return replace(left, lo=lo, hi=hi, key_masks=None, zero_inside=zero)


def joined_ranges(node: Node, parts: Sequence[Node], values: Sequence[Affine], dim: int) -> Affine | None:
    """Join ranges to one, if each part continues the one before it."""
    starts = list(itertools.accumulate((shape_of(part)[dim] for part in parts), initial=0))
    first = next((k for k, part in enumerate(parts) if shape_of(part)[dim] > 1), 0)  # it has a slope
    slope = values[first].slope(dim)
    whole = without_zero_slopes(
        Affine(values[first].const - slope * starts[first], values[first].slopes), node
    )
    for part, value, start in zip(parts, values, starts):
        shifted = Affine(whole.const + whole.slope(dim) * start, whole.slopes)
        if without_zero_slopes(shifted, part) != without_zero_slopes(value, part):
            return None
    return whole


def looked_up(node: Node, known: Known) -> Abstract:
    """Evaluate a look-up: a range read at ranges is a range."""
    table = known(node.args[0])
    if not isinstance(table, Affine):
        return None
    indices = node.args[1]
    used = [d for d, index in enumerate(indices) if index is not None]
    if any(slope and d not in used for d, slope in table.slopes):
        return None
    total, start = Affine(table.const), first_index_dim(node, used)
    end = start + max(len(shape_of(indices[d])) for d in used)  # behind the dimensions of the indices
    for dim in used:
        at = known(indices[dim])
        if table.slope(dim) == 0:
            continue
        if not isinstance(at, Affine) or is_boolean(indices[dim]) or least(at, indices[dim]) < 0:
            return None  # a negative index counts from the end
        slopes = dict(total.slopes)
        for d, s in at.slopes:
            place = end - len(shape_of(indices[dim])) + d
            slopes[place] = slopes.get(place, 0) + table.slope(dim) * s
        total = Affine(total.const + table.slope(dim) * at.const, tuple(slopes.items()))
    return without_zero_slopes(total, node)


def least(value: Affine, node: Node) -> float:
    """Compute the least entry of a range."""
    return value.const + sum(min(0, s * (shape_of(node)[d] - 1)) for d, s in value.slopes)


def first_index_dim(node: Node, used: list[int]) -> int:
    """Find the place of the indices' dimensions in ``x[i, :, j]``. They come in front, unless the indices are
    neighbours."""
    return used[0] if used == list(range(used[0], used[-1] + 1)) else 0


def summed(node: Node, known: Known) -> Abstract:
    """Evaluate a sum over dimensions that are neither row nor key, which leaves zeros where they are."""
    value, rank = known(node.args[0]), len(shape_of(node.args[0]))
    dims = {d % rank for d in node.args[1]} if len(node.args) > 1 and node.args[1] else set(range(rank))
    if not isinstance(value, Band) or not is_zero_outside(value) or value.row in dims or value.key in dims:
        return None
    keep = len(node.args) > 2 and node.args[2]
    return with_dims_renamed(
        value, {d: d if keep else d - sum(e < d for e in dims) for d in range(rank) if d not in dims}
    )

"""Operands of transfer functions: their abstract values, and the masks that they are."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch.fx import Node

from ..ir import DocumentMask, Pair, shape_of, value_of
from .domains import (
    EMPTY,
    Abstract,
    Affine,
    Band,
    Difference,
    Distance,
    Indicator,
    Interval,
    KeyMasks,
    as_key_mask,
    complement,
    have_same_axes,
    is_empty_outside,
    with_dims_renamed,
)

PAIRWISE = (DocumentMask, Difference)  # values whose rows and keys are the last two dimensions


class Known(Protocol):
    """The results of the analysis so far; a call with an argument of a node returns its abstract value.

    bounded     floating-point nodes whose numbers are far from the lowest of their dtype
    nonnegative nodes of which no number is negative
    integral    nodes of which every number is an integer, and so finite
    indicators  matrices of two numbers → these numbers; their abstract value is the matrix as a band
    """

    @property
    def bounded(self) -> Container[Node]: ...

    @property
    def indicators(self) -> Mapping[Node, Indicator]: ...

    @property
    def nonnegative(self) -> Container[Node]: ...

    @property
    def integral(self) -> Container[Node]: ...

    def __call__(self, arg: object) -> Abstract: ...

    def repeated_by(self, arg: Node) -> Node:
        """Return the value that an operand repeats along dimensions of size one, or the operand itself."""
        ...

    def floor_division_behind(self, arg: Node) -> Node | None:
        """Find the floor division whose entries an operand has, in any shape, or None."""
        ...


NUMBERS = {"Tensor", "number", "float", "Optional[number]", "Optional[float]"}


def numbers_of(node: Node) -> list[object]:
    """List the arguments that hold numbers of a tensor: tensors and scalars. Dimensions, sizes and indices
    are left out."""
    schema = node.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), node.args)), **node.kwargs}
    return [given[a.name] for a in schema if a.name in given and str(a.type) in NUMBERS]


def is_bounded(number: float) -> bool:
    """Is a number far from the lowest number of every dtype?"""
    return abs(number) <= torch.finfo(torch.float16).max / 2


def broadcast_value(arg: object, node: Node, known: Known) -> Abstract:
    """Return an operand's abstract value in the dimensions of a broadcast output."""
    value = known(arg)
    if not isinstance(arg, Node) or value is None or isinstance(value, PAIRWISE):
        return value
    shape, sizes = shape_of(node), shape_of(arg)
    shift = len(shape) - len(sizes)
    if isinstance(value, Band | Distance) and any(
        sizes[d] != shape[d + shift] for d in (value.row, value.key)
    ):
        return None
    return with_dims_renamed(value, {d: d + shift for d in range(len(sizes))})


def without_zero_slopes(value: Affine, node: Node) -> Affine:
    """Drop slopes that are zero, or run along a dimension of size one."""
    shape = shape_of(node)
    return Affine(value.const, tuple((d, s) for d, s in value.slopes if s != 0 and shape[d] != 1))


def is_boolean(arg: object) -> bool:
    """Is an argument a tensor of booleans, or a boolean? A node may also stand for a size."""
    value = value_of(arg) if isinstance(arg, Node) else arg
    return value.dtype is torch.bool if isinstance(value, torch.Tensor) else isinstance(value, bool)


def token_pair(node: Node, known: Known) -> tuple[Pair, bool] | None:
    """Find the operands of a matrix that have one value per row and one per key. Return them as (row's,
    key's), and whether the row's is the first operand. None if the operands are others."""
    rank, sides = len(shape_of(node)), {}
    for arg in node.args[:2]:
        value = value_of(arg) if isinstance(arg, Node) else arg  # a node may also stand for a size
        if not isinstance(value, torch.Tensor) or rank < 2 or value.dtype.is_floating_point:
            return None
        arg = known.repeated_by(arg)
        sizes = (1,) * (rank - len(shape_of(arg))) + shape_of(arg)
        if sizes[-2:] not in ((shape_of(node)[-2], 1), (1, shape_of(node)[-1])):
            return None
        sides["row" if sizes[-1] == 1 else "key"] = arg
    if len(sides) < 2 or shape_of(node)[-1] == 1:
        return None
    return (sides["row"], sides["key"]), next(iter(sides)) == "row"


def one_per_row(node: Node, like: Node, band: Band) -> bool:
    shift = len(shape_of(like)) - len(shape_of(node))
    return band.key < shift or shape_of(node)[band.key - shift] == 1


def hiding_masks(arg: object, like: Node, band: Band, known: Known) -> KeyMasks | None:
    """Find the masks that hide entries of an operand of a score matrix; None if unknown."""
    value = broadcast_value(arg, like, known)
    if isinstance(value, Band) and value.outside in EMPTY:
        return value.key_masks if have_same_axes(value, band) else None
    bounded = (
        arg in known.bounded if isinstance(arg, Node) else isinstance(arg, float | int) and is_bounded(arg)
    )
    if bounded:
        return ()
    return as_key_mask(arg, like, band, None)


def lowest(value: float, node: Node) -> object:
    """Classify how a filling empties a score. It does so exactly (``-inf``), practically (``"min"``, near the
    dtype's minimum), as zero (``0``), or not at all (None)."""
    if value == -math.inf or value == 0:
        return value
    dtype = value_of(node).dtype
    return "min" if dtype.is_floating_point and value <= torch.finfo(dtype).min / 2 else None


def as_band(indicator: Indicator, node: Node) -> Band | None:
    """Convert an indicator to an additive mask, or to a matrix that is zero outside a band. None if it is
    neither."""
    mask, visible, hidden = indicator.mask, indicator.visible, indicator.hidden
    found = [with_numbers(mask, visible, hidden, node)]
    inverse = complement(mask) if mask.exact else None
    if inverse is not None:
        found.append(with_numbers(inverse, hidden, visible, node))
    bands = [band for band in found if band is not None]
    return next((b for b in bands if is_empty_outside(b)), bands[0] if bands else None)


def with_numbers(mask: Band, visible: Interval, hidden: Interval, node: Node) -> Band | None:
    """Convert a mask to a matrix of two numbers, or to None if the hidden one hides nothing."""
    if hidden.is_exactly(0):
        everything = mask.lo == -math.inf and mask.hi == math.inf
        return None if everything else replace(mask, outside=0.0, key_masks=())
    outside = lowest(hidden.high, node)
    if outside not in EMPTY:
        return None
    key_masks = mask.key_masks if is_bounded(visible.low) and is_bounded(visible.high) else None
    return replace(mask, outside=outside, key_masks=key_masks, zero_inside=visible.is_exactly(0))

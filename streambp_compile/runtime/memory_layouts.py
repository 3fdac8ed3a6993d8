"""Values in the layout and with the rows that compiled bodies expect; copied only where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..passes.ir import Layout, Mark, layout_of


def aligned(value: torch.Tensor, mark: Mark, shift: int, length: int) -> torch.Tensor:
    """Shift a value by rows: row t of the result is row ``t + shift``; missing rows are zero.

    length  tokens; rows are counted in the blocks of the mark
    """
    rows, length = value.shape[mark.dim] // mark.step, mark.count(length)
    if shift == 0 and rows == length:
        return value
    split = value.unflatten(mark.dim, (mark.outer, rows, mark.inner))
    low, high = max(0, -shift), min(length, rows - shift)  # tokens that have a row
    if low == 0 and high == length:
        return split.narrow(mark.dim + 1, shift, length).flatten(mark.dim, mark.dim + 2)
    shape = [*split.shape]
    shape[mark.dim + 1] = length
    full = value.new_zeros(shape)
    if low < high:
        full.narrow(mark.dim + 1, low, high - low).copy_(split.narrow(mark.dim + 1, low + shift, high - low))
    return full.flatten(mark.dim, mark.dim + 2)


def memory_like(fake: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Allocate memory of a shape, laid out like a fake tensor."""
    strides = layout_of(fake).strides(shape)
    return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)


def has_layout(value: torch.Tensor, shape: Sequence[int], fake: torch.Tensor) -> bool:
    """Has a value this shape, laid out like a fake tensor?"""
    return list(value.shape) == list(shape) and has_strides(value, layout_of(fake).strides(shape))


def laid_out(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the value in exactly this dense layout; a copy only if it is laid out otherwise."""
    return strided(value, layout.strides(value.shape))


def strided(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the value with exactly these strides; a copy only if it has others."""
    if has_strides(value, strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def has_strides(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Are these the strides of a value, in all dimensions with more than one entry?"""
    return all(a == b or s == 1 for a, b, s in zip(value.stride(), strides, value.shape))

"""Memory layouts of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .values import hint


@dataclass(frozen=True)
class Layout:
    """A dense memory layout: dimensions from outermost to innermost."""

    order: tuple[int, ...]

    @staticmethod
    def of(value: torch.Tensor) -> Layout | None:
        """Find the layout of a (fake) tensor, or None if it is not dense. A tensor is not dense if it is
        expanded, or sliced from a larger one."""
        return Layout.of_strides([hint(s) for s in value.shape], [hint(s) for s in value.stride()])

    @staticmethod
    def of_strides(sizes: Sequence[int], strides: Sequence[int]) -> Layout | None:
        """Find the layout from sizes and strides alone, or None if they are not dense."""
        order = sorted(range(len(sizes)), key=lambda d: (-strides[d] if sizes[d] != 1 else -(1 << 62), d))
        layout = Layout(tuple(order))
        dense = all(a == b or s == 1 for a, b, s in zip(layout.strides(sizes), strides, sizes))
        return layout if dense else None

    def strides(self, sizes) -> list:
        result, step = [1] * len(sizes), 1
        for dim in reversed(self.order):
            result[dim] = step
            step = step * sizes[dim]
        return result


def layout_of(value: torch.Tensor) -> Layout:
    """Return the layout that a value gets in memory of its own: its own layout if dense, else contiguous."""
    return Layout.of(value) or Layout(tuple(range(value.dim())))


def strides_of_part(value: torch.Tensor, sizes: Sequence[int]) -> list:
    """Choose the strides of a matrix of these sizes as chunks read it. A matrix that is part of a larger one
    keeps its own strides, if these are positive numbers, so that it is not copied. Any other matrix gets
    the strides of its layout in memory of its own."""
    own = list(value.stride())
    constant = all(isinstance(stride, int) and stride > 0 for stride in own)
    return own if constant and has_gaps(value) else layout_of(value).strides(sizes)


def is_expanded(value: torch.Tensor) -> bool:
    """Does a (fake) tensor have entries that share memory? Chunks read such a tensor as it is. A part of a
    larger tensor does not count, because it has memory of its own by then: one row, say, that is picked
    from a sum over chunks."""
    return Layout.of(value) is None and not has_gaps(value)


def has_gaps(value: torch.Tensor) -> bool:
    """Is a (fake) tensor, apart from expanded dimensions, part of a larger one?"""
    pairs = [(hint(size), hint(stride)) for size, stride in zip(value.shape, value.stride())]
    kept = [(size, stride) for size, stride in pairs if stride != 0]
    return Layout.of_strides([size for size, _ in kept], [stride for _, stride in kept]) is None

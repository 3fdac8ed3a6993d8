"""How dense tensors lie in memory."""

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
        """The layout of a (fake) tensor, or None if it is not dense (expanded, or cut from something
        wider)."""
        return Layout.of_strides([hint(s) for s in value.shape], [hint(s) for s in value.stride()])

    @staticmethod
    def of_strides(sizes: Sequence[int], strides: Sequence[int]) -> Layout | None:
        """The same from sizes and strides alone."""
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
    """The layout that a value is given where it gets memory of its own."""
    return Layout.of(value) or Layout(tuple(range(value.dim())))


def strides_of_part(value: torch.Tensor, sizes: Sequence[int]) -> list:
    """The strides of a matrix of these sizes as chunks read it: its own where it is part of a wider one, so
    that it is not copied, else those of the layout that it is given."""
    own = list(value.stride())
    constant = all(isinstance(stride, int) and stride > 0 for stride in own)
    return own if constant and has_gaps(value) else layout_of(value).strides(sizes)


def is_expanded(value: torch.Tensor) -> bool:
    """Has a (fake) tensor entries that share memory? Chunks read it as it is. A part of something larger has
    memory of its own by then: one row, say, that is picked from a sum over chunks."""
    return Layout.of(value) is None and not has_gaps(value)


def has_gaps(value: torch.Tensor) -> bool:
    """Is a (fake) tensor, before it was expanded, part of something larger?"""
    pairs = [(hint(size), hint(stride)) for size, stride in zip(value.shape, value.stride())]
    kept = [(size, stride) for size, stride in pairs if stride != 0]
    return Layout.of_strides([size for size, _ in kept], [stride for _, stride in kept]) is None

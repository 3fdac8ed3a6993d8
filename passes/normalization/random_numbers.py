"""Random numbers of other distributions, computed from uniform ones.

Any chunk can draw these again by their place (`normalize.draw_by_place`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import total_dtype


def unit(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw uniform numbers in [0, 1). They are in float32 for half precision, which would round some of them
    to 1."""
    return torch.rand(size, dtype=total_dtype(dtype), device=device)


def standard_normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute each number of a normal distribution from two uniform ones (Box and Muller 1958)."""
    radius = (-2 * (1 - unit(size, dtype, device)).log()).sqrt()
    return radius * (2 * math.pi * unit(size, dtype, device)).cos()


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, generator: object = None) -> Tensor:
    """Compute the values that ``x.uniform_(low, high)`` writes."""
    if generator is not None:
        return NotImplemented
    return (unit(x.shape, x.dtype, x.device) * (high - low) + low).to(x.dtype)


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> Tensor:
    """Compute the values that ``x.normal_(mean, std)`` writes."""
    if generator is not None:
        return NotImplemented
    return (standard_normal(x.shape, x.dtype, x.device) * std + mean).to(x.dtype)


def randn(size: Sequence[int], dtype: torch.dtype | None = None, device=None, **layout: object) -> Tensor:
    """Compute the values of ``torch.randn(size)``."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    return standard_normal(size, dtype, device).to(dtype)


def normal_around(mean: Tensor | float, std: Tensor | float, generator: object = None) -> Tensor:
    """Compute the values of ``torch.normal(mean, std)``, where one or both are tensors."""
    if generator is not None:
        return NotImplemented
    like = mean + std
    assert isinstance(like, Tensor)
    return (standard_normal(like.shape, like.dtype, like.device) * std + mean).to(like.dtype)

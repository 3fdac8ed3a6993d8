"""Masks in the form that kernels take: numbers added to scores, ``-inf`` where a key is hidden."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layout import first, put


def additive(
    mask: Tensor, keys: int, rows: int, diagonal: int | None, dtype: torch.dtype, multiple: int
) -> Tensor:
    """Convert a boolean mask (true where a row may attend) or an additive one to numbers added to scores.

    mask      broadcastable to ``[B, H, rows, keys]``
    diagonal  row i sees no key behind ``diagonal + i``; None: the mask alone decides
    multiple  rows of the result start at multiples of so many entries
    """
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    mask = mask.expand(*mask.shape[:3], keys)
    shape = [*mask.shape[:2], mask.shape[2] if diagonal is None else rows, keys]
    if mask.dtype == dtype and diagonal is None and multiple == 1:
        return mask
    room = mask.new_empty((*shape[:-1], -(-keys // multiple) * multiple), dtype=dtype)
    bias = first(room, 3, keys)
    if mask.dtype == torch.bool:
        room.fill_(-math.inf)
        bias.masked_fill_(mask, 0)
    else:
        room.narrow(3, keys, room.shape[3] - keys).zero_()
        put(bias, narrowed(mask, dtype))
    if diagonal is not None:
        bias.masked_fill_(later(rows, keys, diagonal, mask.device), -math.inf)
    return bias


def narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Restrict numbers to those that a narrower dtype can hold. The lowest number of a wide dtype does not
    become ``-inf``."""
    if mask.dtype == dtype or torch.finfo(mask.dtype).min >= torch.finfo(dtype).min:
        return mask
    return mask.clamp(min=torch.finfo(dtype).min).masked_fill_(mask == -math.inf, -math.inf)


def later(rows: int, keys: int, diagonal: int, device: torch.device) -> Tensor:
    """Build a mask ``[rows, keys]``, true where a key lies behind the diagonal."""
    last = torch.arange(diagonal, diagonal + rows, device=device).unsqueeze(1)
    return torch.arange(keys, device=device) > last


def hidden_rows(bias: Tensor) -> Tensor:
    """Build a mask ``[B, H, rows]`` (or smaller, to broadcast), true where a row sees no key at all."""
    return bias.amax(-1) == -math.inf

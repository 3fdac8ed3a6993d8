"""Memory layouts of the operands of attention: those that kernels return, and those that they read.

Copies and slices are made by operators, not by methods that open a device first, so that all of this
also runs on fake tensors of a device that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def heads_last(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate ``[B, H, T, D]`` laid out as ``[B, T, H, D]``, which kernels return and projections want."""
    batch, heads, rows, width = shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def statistics(query: Tensor) -> torch.dtype:
    """Return the dtype of log-sum-exps."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def is_heads_last(t: Tensor) -> bool:
    batch, heads, rows, width = t.shape
    wanted = (rows * heads * width, width, heads * width, 1)
    return all(a == b or size == 1 for a, b, size in zip(t.stride(), wanted, t.shape))


def heads_put_last(t: Tensor) -> Tensor:
    """Lay values out as ``[B, T, H, D]``, by a copy only if they lie otherwise."""
    return t if is_heads_last(t) else put(heads_last(t.shape, t), t)


def put(target: Tensor, source: Tensor) -> Tensor:
    """Fill the target with the source, and return the target."""
    return torch.ops.aten.copy_.default(target, source)


def copied(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def dense(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else copied(t)


def readable(t: Tensor, multiple: int) -> Tensor:
    """Return a tensor that kernels can load, by a copy where needed. Its features are at stride one, and its
    other steps are multiples of one load."""
    if t.stride(-1) != 1 and (t.shape[-1] > 1 or multiple > 1):
        return dense(t)
    steps = [t.storage_offset(), *(step for step, size in zip(t.stride()[:-1], t.shape[:-1]) if size > 1)]
    return t if all(step % multiple == 0 for step in steps) else copied(t)


def widened(t: Tensor, width: int) -> Tensor:
    """Pad features with zeros. They add nothing to scores, and their part of the results is cut off again."""
    return t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1]))


def by_key_head(t: Tensor, key_heads: int) -> Tensor:
    """Group queries by the key head that they share: ``[B, Hq, ...]`` → ``[B, Hkv, Hq / Hkv, ...]``."""
    return t.unflatten(1, (key_heads, t.shape[1] // key_heads))


def cut(t: Tensor, dim: int, part: slice) -> Tensor:
    """Slice a tensor along one dimension."""
    return t.narrow(dim, part.start, part.stop - part.start)


def first(t: Tensor, dim: int, count: int) -> Tensor:
    return t if t.shape[dim] == count else t.narrow(dim, 0, count)

"""Attention from plain products and a softmax, for every device, dtype, head width and mask.

Scores exist for a block of rows at a time. They are computed in float32 (float64 for float64). Grouped
heads are more rows of one product, so that no key or value is repeated. Gradients of keys and values add
up inside the products.
"""

from __future__ import annotations

import math

from torch import Tensor

from .layout import by_key_head, cut, first, heads_last, put, statistics
from .masks import later

BLOCK = 1 << 26  # bytes of scores at once: little beside a chunk's hidden rows, yet many rows of a product


def rows_at_once(query: Tensor, keys: int) -> int:
    """Count the rows of a block: as many as have scores of ``BLOCK`` bytes, but at least one."""
    return max(1, BLOCK // max(1, query.shape[0] * query.shape[1] * keys * statistics(query).itemsize))


def row_blocks(query: Tensor, keys: int, diagonal: int | None):
    """Yield slices of rows, each with the number of keys that its last row sees."""
    step, rows = rows_at_once(query, keys), query.shape[2]
    for begin in range(0, rows, step):
        last = min(begin + step, rows)
        yield slice(begin, last), keys if diagonal is None else max(0, min(keys, diagonal + last))


def stacked(t: Tensor, key_heads: int) -> Tensor:
    """Reshape ``[B, Hq, R, D]`` to ``[B Hkv, (Hq / Hkv) R, D]``."""
    return by_key_head(t, key_heads).flatten(2, 3).flatten(0, 1)


def scores(
    query: Tensor, key: Tensor, bias: Tensor | None, rows: slice, diagonal: int | None, scale: float
) -> Tensor:
    """Compute the scores ``[B, Hq, R, S]`` of a block of rows, ``-inf`` where a key is hidden."""
    (batch, heads), keys, count = query.shape[:2], key.shape[2], rows.stop - rows.start
    made = stacked(query, key.shape[1]) @ key.flatten(0, 1).transpose(1, 2)
    made = made.mul_(scale).view(batch, heads, count, keys)
    if bias is not None:
        made.add_(first(cut(bias, 2, rows) if bias.shape[2] > 1 else bias, 3, keys))
    if diagonal is not None and diagonal + rows.start + 1 < keys:
        made.masked_fill_(later(count, keys, diagonal + rows.start, key.device), -math.inf)
    return made


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, diagonal: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output ``[B, Hq, C, Dv]`` and the log-sum-exp ``[B, Hq, C]``. A row without keys has zeros
    and ``-inf``."""
    dtype, (batch, heads, count, _) = statistics(query), query.shape
    wide_key, wide_value = key.to(dtype), value.to(dtype)
    out = heads_last((batch, heads, count, value.shape[-1]), query)
    lse = query.new_empty((batch, heads, count), dtype=dtype)

    def attend(rows: slice, keys: int) -> None:
        seen, values = first(wide_key, 2, keys), first(wide_value, 2, keys)
        weights = scores(cut(query, 2, rows).to(dtype), seen, bias, rows, diagonal, scale)
        top = weights.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0)
        weights.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        mixed = stacked(weights, key.shape[1]) @ values.flatten(0, 1)
        mixed = mixed.view(batch, heads, -1, value.shape[-1])
        put(cut(lse, 2, rows), (total.log() + top).squeeze(-1))
        put(cut(out, 2, rows), mixed.div_(total.masked_fill(total == 0, 1)))

    for rows, keys in row_blocks(query, key.shape[2], diagonal):
        attend(rows, keys)  # its scores are freed before the next call
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    diagonal: int | None,
    scale: float,
    key_grad: Tensor,
    value_grad: Tensor,
) -> Tensor:
    """Compute ``dQ``, and add ``dK`` and ``dV`` to accumulators. ``lse`` is ``+inf`` for a row that sees no
    key."""
    dtype, heads = statistics(query), key.shape[1]
    wide_key, wide_value = key.to(dtype), value.to(dtype)
    dq = heads_last(query.shape, query)

    def differentiate(rows: slice, keys: int) -> None:
        q, g = (cut(t, 2, rows).to(dtype) for t in (query, grad))
        seen, values = first(wide_key, 2, keys), first(wide_value, 2, keys)
        weights = scores(q, seen, bias, rows, diagonal, scale)
        weights.sub_(cut(lse, 2, rows).unsqueeze(-1)).exp_()
        part = g.mul(cut(out, 2, rows)).sum(-1, keepdim=True)
        inner = stacked(g, heads) @ values.flatten(0, 1).transpose(1, 2)
        inner = inner.view_as(weights).sub_(part).mul_(weights).mul_(scale)
        add_product(stacked(weights, heads).transpose(1, 2), stacked(g, heads), first(value_grad, 2, keys))
        add_product(stacked(inner, heads).transpose(1, 2), stacked(q, heads), first(key_grad, 2, keys))
        put(cut(dq, 2, rows), (stacked(inner, heads) @ seen.flatten(0, 1)).view(q.shape))

    for rows, keys in row_blocks(query, key.shape[2], diagonal):
        differentiate(rows, keys)
    return dq


def add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Compute ``total += left @ right``: ``[B Hkv, S, R]``, ``[B Hkv, R, D]`` into ``[B, Hkv, S, D]``."""
    stacks = total.shape[0] == 1 or total.stride(0) == total.shape[1] * total.stride(1)
    if stacks and total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left, right)
    else:
        total.add_((left @ right).view(total.shape))

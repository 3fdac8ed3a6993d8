"""One Triton kernel that joins two parts of attention by their log-sum-exps, in place.

Torch's operators would take six kernels, with values in float32 between them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of one head, for each program


@triton.jit
def join_kernel(
    out,
    lse,
    more,
    more_lse,
    heads,
    rows,
    width,
    out_batch,
    out_head,
    out_row,
    lse_batch,
    lse_head,
    lse_row,
    more_batch,
    more_head,
    more_row,
    more_lse_batch,
    more_lse_head,
    more_lse_row,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join some rows of one head. A row that has met no key in either part gives zeros."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = row < rows
    inside = there[:, None] & (column < width)[None, :]
    a_at = lse + batch * lse_batch + head * lse_head + row * lse_row
    b_at = more_lse + batch * more_lse_batch + head * more_lse_head + row * more_lse_row
    a = tl.load(a_at, mask=there, other=0.0)
    b = tl.load(b_at, mask=there, other=0.0)
    most = tl.maximum(a, b)
    seen = most > -float("inf")
    most = tl.where(seen, most, 0.0)
    before, now = tl.exp(a - most), tl.exp(b - most)
    total = tl.where(seen, before + now, 1.0)
    x_at = out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
    y_at = more + batch * more_batch + head * more_head + row[:, None] * more_row + column[None, :]
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    joined = (x * (before / total)[:, None] + y * (now / total)[:, None]).to(out.dtype.element_ty)
    tl.store(x_at, joined, mask=inside)
    tl.store(a_at, tl.where(seen, most + tl.log(total), a), mask=there)


def join_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Join ``more`` into ``out``, and its log-sum-exp into ``lse``. Shapes: outputs ``[B, H, C, D]`` with
    features at stride one, log-sum-exps ``[B, H, C]`` in float32."""
    batch, heads, rows, width = out.shape
    join_kernel[(triton.cdiv(rows, ROWS), batch * heads)](
        out,
        lse,
        more,
        more_lse,
        heads,
        rows,
        width,
        *out.stride()[:3],
        *lse.stride(),
        *more.stride()[:3],
        *more_lse.stride(),
        ROWS=ROWS,
        WIDTH=triton.next_power_of_2(width),
    )

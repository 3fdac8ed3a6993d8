"""Triton kernels of grouped matrix products, which read the group offsets on the device.

Shapes as in `grouped`. Rows are gathered and scattered through ``order`` as they are read and written,
so no sorted copy exists. The grid is the largest that the offsets could need; programs beyond it return
at once. Addresses are 64-bit: more than 2**31 elements are read and written correctly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mm_kernel(
    rows,
    weight,
    order,
    ends,
    out,
    n_rows,
    width,
    columns,
    row_stride,
    row_inner,
    group_stride,
    weight_stride,
    weight_inner,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of rows of one group. Rows of no group count as one more group, whose results are
    zero."""
    slot = tl.arange(0, SLOTS)
    end = tl.load(ends + slot, mask=slot < GROUPS, other=n_rows)
    start = tl.load(ends + slot - 1, mask=(slot > 0) & (slot <= GROUPS), other=0)
    start = tl.where(slot > GROUPS, n_rows, start)
    tiles = (end - start + ROWS - 1) // ROWS
    behind = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    group = tl.sum((behind <= tile).to(tl.int32), 0)
    if group <= GROUPS:
        here = slot == group
        first = tl.sum(tl.where(here, start + (tile - behind + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(here, end, 0), 0)
        place = first + tl.arange(0, ROWS)
        inside = place < last
        row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if group < GROUPS:
            matrix = weight + group.to(tl.int64) * group_stride + column[None, :].to(tl.int64) * weight_inner
            for low in range(0, width, WIDTH):
                at = low + tl.arange(0, WIDTH)
                left = tl.load(
                    rows + row[:, None] * row_stride + at[None, :].to(tl.int64) * row_inner,
                    mask=inside[:, None] & (at < width)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    matrix + at[:, None].to(tl.int64) * weight_stride,
                    mask=(at < width)[:, None] & (column < columns)[None, :],
                    other=0.0,
                )
                total = tl.dot(left, right, total, input_precision=PRECISION)
        tl.store(
            out + row[:, None] * columns + column[None, :],
            total.to(out.dtype.element_ty),
            mask=inside[:, None] & (column < columns)[None, :],
        )


@triton.jit
def outer_kernel(
    left,
    right,
    order,
    ends,
    total,
    height,
    columns,
    left_stride,
    left_inner,
    right_stride,
    right_inner,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to one tile of the total of one group. For a group without rows, nothing is read or written."""
    group = tl.program_id(2)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    if start < end:
        up = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
        across = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        part = tl.zeros((HEIGHT, COLUMNS), dtype=tl.float32)
        for low in range(start, end, ROWS):
            place = low + tl.arange(0, ROWS)
            inside = place < end
            row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
            a = tl.load(
                left + row[None, :] * left_stride + up[:, None].to(tl.int64) * left_inner,
                mask=inside[None, :] & (up < height)[:, None],
                other=0.0,
            )
            b = tl.load(
                right + row[:, None] * right_stride + across[None, :].to(tl.int64) * right_inner,
                mask=inside[:, None] & (across < columns)[None, :],
                other=0.0,
            )
            part = tl.dot(a, b, part, input_precision=PRECISION)
        cells = total + (group.to(tl.int64) * height + up[:, None]) * columns + across[None, :]
        mask = (up < height)[:, None] & (across < columns)[None, :]
        tl.store(cells, tl.load(cells, mask=mask, other=0.0) + part, mask=mask)


@dataclass(frozen=True)
class Tiles:
    """Sizes and launch options of tiles: ``side`` of the results, ``depth`` of the sum taken at a time."""

    side: int
    depth: int
    warps: int
    stages: int


def tiles_for(operand: Tensor) -> Tiles:
    """Choose tiles for the dtype of an operand. Operands of all stages fit the 99 KiB of shared memory that
    the smallest devices have."""
    return Tiles(128, 32, 8, 3) if operand.dtype.itemsize == 2 else Tiles(64, 32, 4, 3)


def precision() -> str:
    """Return the precision in which `torch.mm` multiplies float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def grouped_mm(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Compute ``rows[i] @ weight[group of i]`` → ``[R, N]``; zero for a row of no group."""
    count, (groups, width, columns) = len(rows), weight.shape
    out, tiles = rows.new_empty(count, columns), tiles_for(rows)
    most = triton.cdiv(count, tiles.side) + groups + 1  # the last tile of each group may be partial
    grid = (most, triton.cdiv(columns, tiles.side))
    mm_kernel[grid](
        rows,
        weight,
        order,
        ends,
        out,
        count,
        width,
        columns,
        *rows.stride(),
        *weight.stride(),
        GROUPS=groups,
        SLOTS=triton.next_power_of_2(groups + 1),
        ROWS=tiles.side,
        WIDTH=tiles.depth,
        COLUMNS=tiles.side,
        PRECISION=precision(),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def add_grouped_outer_(left: Tensor, right: Tensor, order: Tensor, ends: Tensor, total: Tensor) -> None:
    """Compute ``total[g] += left[rows of g]ᵀ right[rows of g]``, where ``total`` is contiguous."""
    groups, height, columns = total.shape
    tiles = tiles_for(left)
    grid = (triton.cdiv(height, tiles.side), triton.cdiv(columns, tiles.side), groups)
    outer_kernel[grid](
        left,
        right,
        order,
        ends,
        total,
        height,
        columns,
        *left.stride(),
        *right.stride(),
        ROWS=tiles.depth,
        HEIGHT=tiles.side,
        COLUMNS=tiles.side,
        PRECISION=precision(),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )

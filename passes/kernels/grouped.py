"""Grouped matrix products (mixture of experts), and the choice of their kernels.

Only the device knows how many rows each group has. A host that asked would synchronise for every product
of every chunk, so GPU kernels read the group offsets themselves.

Shapes: rows ``[R, K]``, weight ``[G, K, N]``, groups ``[R]`` (the group of each row); order ``[R]``
sorts rows by group, ends ``[G]`` is where each group ends in that order.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .products import add_product_
from .simulated_device import device_type, simulated_capability

aten = torch.ops.aten


def sorted_groups(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort rows by group, and return ``order`` and ``ends`` of ``count`` groups. Rows of no group (``count``
    or more) come last."""
    ordered, order = groups.sort(stable=True)
    numbers = torch.arange(count, device=groups.device, dtype=groups.dtype)
    return order, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


def grouped_mm(rows: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
    """Compute ``rows[i] @ weight[groups[i]]`` → ``[R, N]``; zero for a row of no group."""
    order, ends = sorted_groups(groups, weight.shape[0])
    return kernel_for(PRODUCTS, rows, weight).run(rows, weight, order, ends)


def grouped_outer(left: Tensor, right: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sum ``left[i]ᵀ right[i]`` per group: ``[R, K]``, ``[R, N]``, ``[R]`` → ``[G, K, N]``."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    total = left.new_zeros((count, left.shape[1], right.shape[1]), dtype=dtype)
    add_grouped_outer_(left, right, groups, total)
    return total.to(left.dtype)


def add_grouped_outer_(left: Tensor, right: Tensor, groups: Tensor, total: Tensor) -> None:
    """Add the sum of ``left[i]ᵀ right[i]`` per group to a contiguous total."""
    order, ends = sorted_groups(groups, total.shape[0])
    kernel_for(SUMS, left, right).run(left, right, order, ends, total)


@dataclass(frozen=True)
class GroupedKernel:
    """A kernel, a test that it fits two operands, and the reason for its place in its table."""

    name: str
    fits: Callable[[Tensor, Tensor], bool]
    why: str
    run: Callable


def kernel_for(table: tuple[GroupedKernel, ...], first: Tensor, second: Tensor) -> GroupedKernel:
    """Choose the first kernel of a table that fits these operands."""
    return next(kernel for kernel in table if kernel.fits(first, second))


# torch's own

CAPABILITIES = ((9, 0), (10, 0))  # elsewhere GroupedBlas.cpp (torch 2.11) copies the offsets to the host
MOST_GROUPS = 1023  # GroupMM.cu


def fits_torch(rows: Tensor, weight: Tensor) -> bool:
    if not (rows.dtype == weight.dtype == torch.bfloat16 and on_cuda(rows) and sys.platform == "linux"):
        return False
    return len(weight) <= MOST_GROUPS and is_aligned(weight) and capability(rows.device) in CAPABILITIES


def is_aligned(weight: Tensor) -> bool:
    """Do rows, columns and matrices start at multiples of 16 bytes, with one dense dimension? The kernel
    requires this (GroupedMMUtils.h)."""
    across, along = sorted(weight.stride()[1:], reverse=True)
    starts = (*weight.shape[1:], across, weight.stride(0), weight.storage_offset())
    return along == 1 and all(count % 8 == 0 for count in starts)


def run_torch(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    made = aten._grouped_mm.default(rows.index_select(0, order), weight, ends)
    count = len(order)
    grouped = torch.arange(count, device=rows.device) < ends.select(0, -1)
    out = rows.new_zeros(
        count + 1, weight.shape[2]
    )  # the last row takes the results of rows of no group, which are not computed
    return out.index_copy_(0, torch.where(grouped, order, count), made)[:count]


# Triton


def fits_triton(first: Tensor, second: Tensor) -> bool:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return on_cuda(first) and first.dtype == second.dtype and first.dtype in dtypes and has_triton()


def run_triton(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.streambp.grouped_mm_triton(rows, weight, order, ends)


def add_triton(left: Tensor, right: Tensor, order: Tensor, ends: Tensor, total: Tensor) -> None:
    torch.ops.streambp.add_grouped_outer_triton_(left, right, order, ends, total)


# A loop over groups


def slices_of(ends: Tensor) -> list[tuple[int, slice]]:
    """List every group that has rows, and the slice of its rows."""
    numbers = ends.tolist()
    slices = [slice(start, end) for start, end in zip([0, *numbers], numbers)]
    return [(group, part) for group, part in enumerate(slices) if part.start < part.stop]


def run_loop(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    ordered, made = rows.index_select(0, order), rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, part in slices_of(ends):
        torch.mm(ordered[part], weight[group], out=made[part])
    return torch.empty_like(made).index_copy_(0, order, made)


def add_loop(left: Tensor, right: Tensor, order: Tensor, ends: Tensor, total: Tensor) -> None:
    left, right = left.index_select(0, order), right.index_select(0, order)
    for group, part in slices_of(ends):
        add_product_(left[part].t(), right[part], total[group])


def always(first: Tensor, second: Tensor) -> bool:
    return True


# Properties of the device


def on_cuda(value: Tensor) -> bool:
    return device_type(value) == "cuda" and torch.version.hip is None


def capability(device: torch.device) -> tuple[int, int]:
    return simulated_capability() or capability_here(device)


@functools.cache
def capability_here(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


LOOP = "free on a CPU; on other devices, and for float64, it synchronises"
PRODUCTS = (
    GroupedKernel(
        "torch", fits_torch, "CUTLASS, as fast as a plain product; reads offsets on the device", run_torch
    ),
    GroupedKernel("triton", fits_triton, "reads offsets on the device, on any GPU; no copies", run_triton),
    GroupedKernel("loop", always, LOOP, run_loop),
)
SUMS = (  # torch's kernel would round the part of every chunk to bfloat16, and write groups that have no rows
    GroupedKernel(
        "triton", fits_triton, "accumulates in float32; leaves groups without rows alone", add_triton
    ),
    GroupedKernel("loop", always, LOOP, add_loop),
)

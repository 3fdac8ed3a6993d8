"""Matrix products that accumulate in place, in float32 where their operands are half precision.

Nothing here synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .simulated_device import device_type

BLOCK = 1024  # rows and columns of the operand blocks that are converted at a time where no kernel converts
ACCUMULATES_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}  # out_dtype of cuBLAS's products


def add_product_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """``total += left @ right`` without a partial result; half-precision operands accumulate in float32.

    left, right, total  ``[M, K]``, ``[K, N]``, ``[M, N]``, or a batch of each
    """
    add = torch.addmm if total.dim() == 2 else torch.baddbmm
    if left.dtype == total.dtype:
        add(total, left, right, out=total)
    elif mixes_dtypes(left, total):
        add(total, left, right, out_dtype=total.dtype, out=total)
    elif total.dim() == 2:
        add_product_in_blocks_(left, right, total)
    else:
        for matrices in zip(left, right, total):
            add_product_in_blocks_(*matrices)


def mixes_dtypes(operand: Tensor, total: Tensor) -> bool:
    """Does ``addmm(out_dtype=)`` run on these? It does on CUDA.

    It skips its copy of the first operand where that is ``out`` (aten/src/ATen/native/cuda/Blas.cpp, torch
    2.11), so the total is read and written once, by the product itself. ROCm has it for some kernels only.
    """
    on_cuda = device_type(operand) == "cuda" and torch.version.hip is None
    return on_cuda and ACCUMULATES_IN.get(operand.dtype) == total.dtype


def add_product_in_blocks_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """The same for kernels of one dtype: a block of each operand is converted at a time."""
    for rows, sums in zip(left.split(BLOCK), total.split(BLOCK)):
        rows = rows.to(total.dtype)
        for columns, part in zip(right.split(BLOCK, 1), sums.split(BLOCK, 1)):
            part.addmm_(rows, columns.to(total.dtype))


def scale_(value: Tensor, factor: Tensor) -> None:
    """``value *= factor`` with one rounding: the factor, one number, is not rounded to the value's dtype."""
    if value.dim() == 0:
        value.mul_(factor.reshape(()))
        return
    factor = factor.reshape(1)  # with a dimension it takes part in type promotion
    for block in blocks_of(value):
        block.mul_(factor)


def blocks_of(value: Tensor) -> tuple[Tensor, ...]:
    """Pieces for an operation of mixed dtypes: a CPU converts its operands whole before it computes."""
    if device_type(value) != "cpu" or not value.numel():
        return (value,)
    return value.split(max(1, BLOCK * BLOCK * len(value) // value.numel()))

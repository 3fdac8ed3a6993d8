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
    """Compute ``total += left @ right`` without a partial result.

    Half-precision operands accumulate in float32.

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
    """Does ``addmm(out_dtype=)`` run on these operands? It does on CUDA.

    It skips its copy of the first operand where that is ``out`` (aten/src/ATen/native/cuda/Blas.cpp,
    torch 2.11), so the total is read and written once, by the product itself. ROCm has it for some
    kernels only.
    """
    on_cuda = device_type(operand) == "cuda" and torch.version.hip is None
    return on_cuda and ACCUMULATES_IN.get(operand.dtype) == total.dtype


def add_product_in_blocks_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Add a product by kernels of one dtype, which needs a conversion of its operands.

    One block of each operand is converted at a time.
    """
    for rows, sums in zip(left.split(BLOCK), total.split(BLOCK)):
        rows = rows.to(total.dtype)
        for columns, part in zip(right.split(BLOCK, 1), sums.split(BLOCK, 1)):
            part.addmm_(rows, columns.to(total.dtype))


def scale_(value: Tensor, factor: Tensor) -> None:
    """Compute ``value *= factor`` with one rounding.

    The factor, one number, is not rounded to the value's dtype.
    """
    if value.dim() == 0:
        value.mul_(factor.reshape(()))
        return
    factor = factor.reshape(1)  # with a dimension it takes part in type promotion
    for block in blocks_of(value):
        block.mul_(factor)


def blocks_of(value: Tensor) -> tuple[Tensor, ...]:
    """Split a value into pieces for an operation of mixed dtypes.

    A CPU converts its operands whole before it computes. On other devices, the only piece is the value
    itself.
    """
    if device_type(value) != "cpu" or not value.numel():
        return (value,)
    return value.split(max(1, BLOCK * BLOCK * len(value) // value.numel()))


def copied_operands(*operands: Tensor) -> int:
    """Count the bytes of operands that a batch of half-precision products copies on a CPU.

    oneDNN reads dense operands, and copies others, such as keys cut from a longer buffer (torch:
    aten/src/ATen/native/mkldnn/Matmul.cpp, ``is_mkldnn_optimized_format``).
    """
    left, right = operands[-2:]
    if device_type(left) != "cpu" or left.dtype not in ACCUMULATES_IN or not has_kernel(left.dtype):
        return 0
    return sum(x.numel() * x.itemsize for x in (left, right) if not is_dense(x))


def has_kernel(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply numbers of this dtype on this processor?"""
    known = torch.ops.mkldnn
    return known._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else known._is_mkldnn_fp16_supported()


def is_dense(batch: Tensor) -> bool:
    """Are the matrices of a batch, or their transposes, without gaps?"""
    _, rows, columns = batch.shape
    return batch.is_contiguous() or batch.stride() == (rows * columns, 1, rows)

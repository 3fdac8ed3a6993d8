"""Torch's fused attention kernels behind one calling convention, and the memory that each takes.

``forward(query, key, value, bias, diagonal, scale)`` returns output and log-sum-exp; ``backward(grad,
query, key, value, out, lse, bias, diagonal, scale, key_grad, value_grad)`` returns ``dQ`` and adds
``dK``, ``dV`` to their accumulators. ``diagonal`` is None, or row i sees no key behind ``diagonal + i``;
the table says which diagonals a kernel takes (`selection.TABLE`).

Scratch functions take the arguments of the ATen operator (real, fake or meta tensors: only sizes and
strides are read) and return the bytes that exist beside its results. They follow torch 2.11's sources,
named at each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layout import cut, dense, first, heads_put_last, put, statistics

aten = torch.ops.aten


def add_gradients(dk: Tensor, dv: Tensor, key_grad: Tensor, value_grad: Tensor) -> None:
    """Add the gradients of a kernel to accumulators of a wider dtype, without the features of its padding."""
    key_grad.add_(first(dk, 3, key_grad.shape[3]))
    value_grad.add_(first(dv, 3, value_grad.shape[3]))


def no_seed(like: Tensor) -> Tensor:
    """Return a placeholder for the random state that kernels take, although they draw nothing. It is on their
    device, so that nothing waits."""
    return like.new_empty((), dtype=torch.int64)


def rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# The CPU's flash kernel: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp

CPU_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CPU_KEYS = 512  # keys of a tile of scores; one that the diagonal crosses is computed whole


def cpu_forward(query, key, value, bias, diagonal, scale):
    return CPU_FORWARD(query, key, value, 0.0, diagonal is not None, attn_mask=bias, scale=scale)


KEYS_AT_ONCE = 512  # keys whose gradients exist beside their accumulators: a tile of the kernel


def cpu_backward(grad, query, key, value, out, lse, bias, diagonal, scale, key_grad, value_grad):
    """Compute ``dQ``, and add ``dK`` and ``dV`` to accumulators. Without causality, this is done for some
    keys at a time: the joined log-sum-exp makes their parts of ``dQ`` add up, and gradients of all keys
    would exist a second time. Half precision takes all keys at once, because the parts would be rounded."""
    keys, whole = key.shape[2], diagonal is not None or query.dtype.itemsize == 2
    step = keys if whole else KEYS_AT_ONCE

    def part(here: slice) -> Tensor:
        k, v, key_part, value_part = (cut(t, 2, here) for t in (key, value, key_grad, value_grad))
        seen = None if bias is None else cut(bias, 3, here)
        dq, dk, dv = CPU_BACKWARD(
            grad, query, k, v, out, lse, 0.0, diagonal is not None, attn_mask=seen, scale=scale
        )
        add_gradients(dk, dv, key_part, value_part)
        return dq

    first_keys, *others = (slice(start, min(keys, start + step)) for start in range(0, keys, step))
    total = part(first_keys)
    for here in others:
        total.add_(part(here))
    return total


def cpu_tile(rows: int, keys: int) -> tuple[int, int]:
    """Return the rows and the keys of the tile of scores that a thread works on."""
    tile = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(tile, rows), min(CPU_KEYS, keys)


def cpu_forward_scratch(query, key, *_) -> int:
    rows, keys = cpu_tile(query.shape[2], key.shape[2])
    numbers = rows * (keys + 2 + query.shape[3]) * statistics(query).itemsize
    return torch.get_num_threads() * (numbers + halves(query, rows * keys))


def cpu_backward_scratch(grad, query, key, value, out, lse, *_) -> int:
    rows, keys = cpu_tile(query.shape[2], key.shape[2])
    numbers = 2 * rows * keys * statistics(query).itemsize
    relaid = sum(t.nbytes for t in (grad, lse) if not t.transpose(1, 2).is_contiguous())
    return torch.get_num_threads() * (numbers + halves(query, 2 * rows * keys)) + relaid


def halves(query: Tensor, numbers: int) -> int:
    """Count the bytes of a second copy of the scores, which half-precision operands need in their dtype."""
    return numbers * query.dtype.itemsize if query.dtype.itemsize == 2 else 0


# FlashAttention-2, and what a user activates in its place (torch.nn.attention.activate_flash_attention_impl
# replaces these very operators): aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp

FLASH_FORWARD = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
BLOCK_OF_ROWS = 128  # its accumulators are padded to multiples of so many rows
FILLS = 264  # blocks below which the forward splits keys among several: two for each processor of an H200


def flash_forward(query, key, value, bias, diagonal, scale):
    out, lse, *_ = FLASH_FORWARD(query, key, value, 0.0, diagonal is not None, False, scale=scale)
    return out, lse


def flash_backward(grad, query, key, value, out, lse, bias, diagonal, scale, key_grad, value_grad):
    seed = no_seed(query)
    rows, keys = query.shape[2], key.shape[2]
    dq, dk, dv = FLASH_BACKWARD(
        grad,
        query,
        key,
        value,
        out,
        dense(lse),
        None,
        None,
        rows,
        keys,
        0.0,
        diagonal is not None,
        seed,
        seed,
        scale=scale,
    )
    add_gradients(dk, dv, key_grad, value_grad)
    return dq


def flash_width(width: int) -> int:
    return rounded(width, 32 if width <= 128 else 64)


def flash_forward_scratch(query, key, *_) -> int:
    """Count the bytes of partial outputs in float32, which exist where rows are too few to fill a GPU. The
    kernel then splits the keys (``set_params_splitkv``)."""
    batch, heads, rows, width = query.shape
    blocks = batch * heads * math.ceil(rows / 64)
    if blocks >= 0.8 * FILLS:
        return 0
    splits = min(128, FILLS // max(1, blocks), math.ceil(key.shape[2] / 64))
    return 0 if splits <= 1 else splits * batch * heads * rows * (flash_width(width) + 1) * 4


def flash_backward_scratch(grad, query, key, value, out, *_) -> int:
    """Count the bytes of the kernel's own buffers, and of operands made contiguous. The buffers are
    ``softmax_d``, ``dq_accum``, ``dk_expanded`` and ``dv_expanded``."""
    batch, heads, rows, width = query.shape
    padded = rounded(rows, BLOCK_OF_ROWS)
    expanded = 2 * batch * key.shape[2] * heads * width * key.dtype.itemsize if heads != key.shape[1] else 0
    relaid = sum(t.nbytes for t in (grad, out) if not t.transpose(1, 2).is_contiguous())
    return batch * heads * padded * 4 * (1 + flash_width(width)) + expanded + relaid


# cuDNN: aten/src/ATen/native/cudnn/MHA.cpp

CUDNN_FORWARD = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


def whatever_the_length(t: Tensor) -> Tensor:
    """Remove the length of the buffer from the strides of one sequence that is cut from it. The stride
    between sequences tells that length. cuDNN keeps its plans by strides as well, and a plan takes some 50
    ms to make."""
    return t.squeeze(0).unsqueeze(0) if t.shape[0] == 1 else t


def cudnn_forward(query, key, value, bias, diagonal, scale):
    query, key, value = map(whatever_the_length, (query, key, value))
    out, lse, *_ = CUDNN_FORWARD(query, key, value, None, True, 0.0, diagonal is not None, False, scale=scale)
    return out, lse.reshape(out.shape[:3])


def cudnn_backward(grad, query, key, value, out, lse, bias, diagonal, scale, key_grad, value_grad):
    """Compute ``dQ``, and add ``dK`` and ``dV`` to accumulators. Plans are kept by the layouts of query, key
    and value alone, so all other operands come in one layout."""
    query, key, value = map(whatever_the_length, (query, key, value))
    seed = no_seed(query)
    grad, out, lse = heads_put_last(grad), heads_put_last(out), dense(lse).unsqueeze(-1)
    dq, dk, dv = CUDNN_BACKWARD(
        grad,
        query,
        key,
        value,
        out,
        lse,
        seed,
        seed,
        None,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        diagonal is not None,
        scale=scale,
    )
    add_gradients(dk, dv, key_grad, value_grad)
    return dq


def cudnn_forward_scratch(*_) -> int:
    return 0


def cudnn_backward_scratch(grad, query, key, *_) -> int:
    """Estimate the bytes of ``dQ``, a number per row, and expanded ``dK``, ``dV``. It is an estimate because
    plans size their workspace."""
    batch, heads, rows, width = query.shape
    expanded = 2 * batch * key.shape[2] * heads * width * key.dtype.itemsize if heads != key.shape[1] else 0
    return batch * heads * rows * 4 * (1 + width) + expanded


# Memory-efficient attention: aten/src/ATen/native/transformers/cuda/{attention.cu, attention_backward.cu},
# mem_eff_attention/kernel_*.h. The operators below _scaled_dot_product_efficient_attention take [B, T, H, D]
# and align causality at the bottom right if asked to (torch.nn.attention.bias does so), so that a chunk is
# one call and is rounded once.

EFFICIENT_FORWARD = aten._efficient_attention_forward.default
EFFICIENT_BACKWARD = aten._efficient_attention_backward.default
WHOLE, BOTTOM_RIGHT = 0, 2  # sdp::CustomMaskType
LSE_ROWS = 32  # kAlignLSE: log-sum-exps are padded to so many rows
BIAS_STEP = 16  # rows of a bias start at multiples of so many entries, as torch's own pad_bias makes them


def efficient_forward(query, key, value, bias, diagonal, scale):
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, *_ = EFFICIENT_FORWARD(
        q,
        k,
        v,
        for_all_heads(bias, query, key),
        None,
        None,
        None,
        None,
        0.0,
        WHOLE if diagonal is None else BOTTOM_RIGHT,
        True,
        scale=scale,
    )
    return out.transpose(1, 2), first(lse, 2, query.shape[2])


def efficient_backward(grad, query, key, value, out, lse, bias, diagonal, scale, key_grad, value_grad):
    """Compute ``dQ``, and add ``dK`` and ``dV`` to accumulators. The kernel takes the output's rows to be
    ``Hq * Dv`` apart, whatever its strides (``o_strideM``)."""
    grad, out = heads_put_last(grad), heads_put_last(out)
    g, q, k, v, o = (t.transpose(1, 2) for t in (grad, query, key, value, out))
    rows, seed = query.shape[2], no_seed(query)
    padded = lse.new_full((*lse.shape[:2], rounded(rows, LSE_ROWS)), math.inf)
    put(first(padded, 2, rows), lse)
    dq, dk, dv, _ = EFFICIENT_BACKWARD(
        g,
        q,
        k,
        v,
        for_all_heads(bias, query, key),
        o,
        None,
        None,
        rows,
        key.shape[2],
        padded,
        0.0,
        seed,
        seed,
        WHOLE if diagonal is None else BOTTOM_RIGHT,
        False,
        scale=scale,
    )
    add_gradients(dk.transpose(1, 2), dv.transpose(1, 2), key_grad, value_grad)
    return dq.transpose(1, 2)


def efficient_backward_meta(grad, query, key, value, bias, out, *_, **__):
    """Return results of the operator without data. Torch's own meta function leaves out an argument (2.11 to
    2.13)."""
    return tuple(t.new_empty(t.shape) for t in (query, key, value)) + (None,)


def for_all_heads(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def efficient_forward_scratch(query, key, value, *_) -> int:
    """Count the bytes of an output in float32, which wide values in half precision need. See
    ``kNeedsOutputAccumulatorBuffer``."""
    batch, rows, heads, _ = query.shape
    spilled = value.shape[3] > 128 and query.dtype.itemsize == 2
    return batch * rows * heads * value.shape[3] * 4 if spilled else 0


def efficient_backward_scratch(grad, query, key, value, *_) -> int:
    """Count the bytes of buffers in float32. These are ``delta``, its products where they are made outside,
    ``dQ``, and wide ``dK``, ``dV``."""
    batch, rows, heads, width = query.shape
    half, blocks = query.dtype.itemsize == 2, math.ceil(rows / 64)
    delta = batch * heads * rows * 4
    products = 0 if half else batch * heads * rows * value.shape[3] * 4
    queries = batch * heads * blocks * 64 * rounded(width, 64) * 4
    splits = max(1, min(200 // (batch * heads), math.ceil(key.shape[1] / 64)))
    spilled = max(width, value.shape[3]) > 128 and half
    wide = rounded(width, 64) + rounded(value.shape[3], 64)
    keys = batch * heads * splits * 64 * wide * 4 if spilled else 0
    return max(delta + products, delta + queries + keys)

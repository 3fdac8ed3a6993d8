"""CUDA's attention operators on a CPU: what kernels demand is asserted, results are float64's, rounded.

The sources of the demands are files of pytorch's aten/src/ATen/native (2.11), named at each. `installed`
registers the operators for CPU tensors, where torch has none, for as long as its context lasts.
"""

import contextlib
import math

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
INF = math.inf


def demand(holds: bool, what: str) -> None:
    assert holds, f"the kernel on a GPU would fail or read wrong memory: {what}"


def repeated(t: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, S, D]`` as float64 with one key head for each query head."""
    return t.double().repeat_interleave(heads // t.shape[1], 1)


def scores(q: Tensor, k: Tensor, bias: Tensor | None, diagonal: int | None, scale: float) -> Tensor:
    """``[B, H, M, N]`` in float64; row i sees no key behind ``diagonal + i``."""
    found = q.double() @ repeated(k, q.shape[1]).transpose(-1, -2) * scale
    if bias is not None:
        found = found + bias.double()
    if diagonal is not None:
        later = torch.arange(k.shape[2]) > torch.arange(diagonal, diagonal + q.shape[2])[:, None]
        found = found.masked_fill(later, -INF)
    return found


def attend(q, k, v, bias, diagonal, scale) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64; a row without keys gives zeros and ``-inf``."""
    found = scores(q, k, bias, diagonal, scale)
    lse = found.logsumexp(-1)
    weights = (found - lse.masked_fill(lse == -INF, INF).unsqueeze(-1)).exp()
    return weights @ repeated(v, q.shape[1]), lse


def gradients(grad, q, k, v, out, lse, bias, diagonal, scale) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in float64, of keys and values for every query head; weights come of the given lse."""
    weights = (scores(q, k, bias, diagonal, scale) - lse.double().unsqueeze(-1)).exp()
    demand(not weights.isnan().any(), "weights are no numbers: -inf minus -inf")
    inner = grad.double() @ repeated(v, q.shape[1]).transpose(-1, -2)
    inner = weights * (inner - (grad.double() * out.double()).sum(-1, keepdim=True)) * scale
    return (
        inner @ repeated(k, q.shape[1]),
        inner.transpose(-1, -2) @ q.double(),
        weights.transpose(-1, -2) @ grad.double(),
    )


def summed_groups(t: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients for every query head, rounded as the kernel stores them, added up for the key heads."""
    stored = t.to(dtype).unflatten(1, (like.shape[1], -1))
    return torch.empty_like(like).copy_(stored.double().sum(2))


def same(tensors, attribute: str) -> bool:
    return len({getattr(t, attribute) for t in tensors}) == 1


# transformers/cuda/flash_attn/flash_api.cpp: mha_fwd, mha_bwd; attention.cu and attention_backward.cu around
# them


def demand_of_flash(q, k, v, *others) -> None:
    demand(q.dtype in HALVES and same((q, k, v, *others), "dtype"), "fp16 or bf16, all alike")
    for t in (q, k, v, *others):
        demand(t.stride(-1) == 1, "contiguous last dimension (mha_fwd, mha_bwd)")
        steps = [s for s, n in zip(t.stride()[:-1], t.shape[:-1]) if n > 1]
        demand(all(s % 8 == 0 for s in (*steps, t.storage_offset())), "loads of 16 bytes (kernel_traits.h)")
    width = q.shape[3]
    demand(width % 8 == 0 and width <= 256, "head_size a multiple of 8, at most 256 (mha_fwd)")
    demand(not 192 < width <= 224, "widths 193..224 have no backward on sm86, sm89, sm120 (sdp_utils.cpp)")
    demand(k.shape[3] == v.shape[3] == width, "values as wide as queries (CHECK_SHAPE in mha_fwd)")
    demand(k.shape[:3] == v.shape[:3] and q.shape[1] % k.shape[1] == 0, "key heads divide query heads")


def flash_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    demand_of_flash(query, key, value)
    demand(dropout_p == 0 and scale is not None, "asked without dropout and with a scale")
    offset = key.shape[2] - query.shape[2]  # aligned at the bottom right (mha_fwd since FlashAttention 2.1)
    out, lse = attend(query, key, value, None, offset if is_causal else None, scale)
    made = torch.empty_like(query).copy_(out)  # empty_like(q_padded): the query's layout
    none = torch.empty(0)
    lse = lse.masked_fill(lse == -INF, INF).float()  # softmax.h: +inf for a row without keys
    return made, lse, none, none, query.shape[2], key.shape[2], none, none, none


def flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    demand_of_flash(query, key, value, out, grad_out)
    demand(cum_seq_q is None and cum_seq_k is None, "no lengths: not varlen (_flash_attention_backward)")
    demand(logsumexp.dtype == torch.float32 and logsumexp.is_contiguous(), "mha_bwd reads only its pointer")
    demand(logsumexp.shape == query.shape[:3], "a log-sum-exp of [B, H, T]")
    demand(out.shape == grad_out.shape == query.shape, "shapes (CHECK_SHAPE in mha_bwd)")
    demand(key.shape[2] > 0, "keys there are")
    offset = key.shape[2] - query.shape[2] if is_causal else None
    dq, dk, dv = gradients(grad_out, query, key, value, out, logsumexp, None, offset, scale)
    dk, dv = summed_groups(dk, key, query.dtype), summed_groups(dv, value, query.dtype)
    return torch.empty_like(query).copy_(dq), dk, dv


# transformers/cuda/attention.cu: _efficient_attention_forward; mem_eff_attention/kernel_forward.h:
# check_supported


def demand_of_efficient(query, key, value, *others) -> None:
    tensors = (query, key, value, *others)
    demand(query.dtype in (torch.float32, *HALVES) and same(tensors, "dtype"), "fp32, fp16, bf16")
    demand(all(t.dim() == 4 and t.shape[2] == query.shape[2] for t in tensors), "equal heads")
    demand(key.shape[1] == value.shape[1] and query.shape[3] == key.shape[3], "equal lengths and widths")
    step = 4 if query.dtype == torch.float32 else 8
    for t in (query, key, value):
        demand(t.stride(3) == 1, "CHECK_NOSPARSE_LASTCONTIGUOUS_CUDA")
        demand(t.shape[3] % step == 0 == t.storage_offset() % step, "aligned pointers (sdp_utils.cpp)")
        demand(t.shape[1] == 1 or t.stride(1) % step == 0, "strideM aligned (check_supported)")
        demand(t.shape[2] == 1 or t.stride(2) % step == 0, "strideH aligned (check_supported)")
        demand(t.shape[0] == 1 or t.stride(0) % step == 0, "strideB aligned (check_supported)")


def demand_of_bias(bias, query, key) -> None:
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    demand(bias.shape == shape, "a bias expanded to all heads and rows")
    demand(bias.dtype == query.dtype and bias.stride(3) == 1, "a bias of the query's dtype, contiguous")
    aligned = all(s % 8 == 0 for s, n in zip(bias.stride()[:3], bias.shape) if n > 1)
    demand(aligned and bias.storage_offset() % 8 == 0, "rows of a bias aligned (check_supported)")
    room = bias.untyped_storage().nbytes() // bias.element_size() - bias.storage_offset()
    last = sum(s * (n - 1) for s, n in zip(bias.stride()[:3], bias.shape))
    demand(room >= last + -(-bias.shape[3] // 8) * 8, "rows of a bias are loaded in steps of 8 (BiasLoader)")


def causality(mask_type: int, query, key) -> int | None:
    demand(mask_type in (0, 1, 2), "custom_mask_type")
    demand(mask_type != 2 or key.shape[1] >= query.shape[1], "an unsigned offset (kernel_forward.h)")
    return {0: None, 1: 0, 2: key.shape[1] - query.shape[1]}[mask_type]


def efficient_forward(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    demand_of_efficient(query, key, value)
    demand(compute_log_sumexp and dropout_p == 0 and cu_seqlens_q is None is seqlen_k, "dense, with lse")
    if bias is not None:
        demand_of_bias(bias, query, key)
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = attend(*heads_first, bias, causality(custom_mask_type, query, key), scale)
    rows = query.shape[1]
    padded = torch.full((*lse.shape[:2], -(-rows // 32) * 32), INF)  # kAlignLSE = 32, padded with inf
    padded[:, :, :rows] = lse.masked_fill(lse == -INF, 0)  # 0 for a row without keys (kernel_forward.h)
    seed = torch.empty((), dtype=torch.int64)
    return out.transpose(1, 2).to(query.dtype).contiguous(), padded, seed, seed, rows, key.shape[1]


def efficient_backward(
    grad_out_,
    query,
    key,
    value,
    bias,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    logsumexp,
    dropout_p,
    philox_seed,
    philox_offset,
    custom_mask_type,
    bias_requires_grad,
    *,
    scale=None,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    demand_of_efficient(query, key, value, out, grad_out_)
    demand(query.shape[1] > 0 and key.shape[1] > 0, "rows and keys there are (check_supported)")
    demand(out.is_contiguous(), "o_strideM() is heads times width, whatever the strides (kernel_backward.h)")
    demand(logsumexp.dtype == torch.float32 and logsumexp.stride(2) == 1, "lse_scalar_t is float")
    demand(logsumexp.shape[1] == 1 or logsumexp.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)")
    demand(logsumexp.shape[0] == 1 or logsumexp.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)")
    rows = query.shape[1]
    demand(logsumexp.shape[2] == -(-rows // 32) * 32, "a log-sum-exp of full blocks (kAlignLSE)")
    demand(bool((logsumexp[:, :, rows:] == INF).all()), "the log-sum-exp padded with inf")
    if bias is not None:
        demand_of_bias(bias, query, key)
    heads_first = (t.transpose(1, 2) for t in (grad_out_, query, key, value, out))
    diagonal = causality(custom_mask_type, query, key)
    found = gradients(*heads_first, logsumexp[:, :, :rows], bias, diagonal, scale)
    return (*(t.transpose(1, 2).to(query.dtype).contiguous() for t in found), torch.empty(0))


# cudnn/MHA.cpp: build_graph, run_cudnn_SDP_fprop, run_cudnn_SDP_bprop; sdp_utils.cpp:
# check_cudnn_tensor_shapes


def demand_of_cudnn(query, key, value) -> None:
    widths = (query.shape[3], value.shape[3])
    demand(query.dtype in HALVES and same((query, key, value), "dtype"), "fp16 or bf16")
    demand(max(widths) <= 128 and not any(w % 8 for w in widths), "head_dim (check_cudnn_tensor_shapes)")
    demand(key.shape[2] > 1, "key length 1 is not supported (check_cudnn_tensor_shapes)")
    demand(all(t.stride(3) == 1 for t in (query, key, value)), "check_last_dim_stride_equals_1_dense")
    demand(query.shape[1] % key.shape[1] == 0, "key heads divide query heads")


def cudnn_forward(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    demand_of_cudnn(query, key, value)
    demand(attn_bias is None and compute_log_sumexp and dropout_p == 0, "no mask (pytorch#196678)")
    diagonal = 0 if is_causal else None  # set_causal_mask: aligned at the top left
    out, lse = attend(query, key, value, None, diagonal, scale)
    alike = out.shape == query.shape  # alloc_with_matching_layout
    made = (torch.empty_like(query) if alike else query.new_empty(out.shape)).copy_(out)
    none = torch.empty(0)
    return made, lse.float().unsqueeze(-1), none, none, query.shape[2], key.shape[2], none, none, none


def cudnn_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    demand_of_cudnn(query, key, value)
    demand(attn_bias is None and cum_seq_q is None, "no mask, and undefined lengths for what is not nested")
    demand(logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous(), "packed statistics")
    demand(logsumexp.dtype == torch.float32, "statistics in float32")
    for t in (out, grad_out):
        demand(t.transpose(1, 2).is_contiguous(), "one layout: plans know those of q, k, v (MHA.cpp)")
    lse, diagonal = logsumexp.squeeze(-1), 0 if is_causal else None
    dq, dk, dv = gradients(grad_out, query, key, value, out, lse, None, diagonal, scale)
    dk, dv = summed_groups(dk, key, torch.float32), summed_groups(dv, value, torch.float32)
    return torch.empty_like(query).copy_(dq), dk, dv


OPERATORS = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


@contextlib.contextmanager
def installed():
    """CUDA's attention operators take CPU tensors here."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in OPERATORS.items():
            library.impl(name, function, "CPU")
        yield

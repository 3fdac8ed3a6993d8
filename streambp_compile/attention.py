"""Attention has one spelling on every device: ``streambp::attention``, put into the graph before autograd sees it.

``scaled_dot_product_attention`` becomes another ATen kernel for every device, dtype, mask and release of torch, and some of those change what
the user said (a boolean mask becomes -65504 for cuDNN in torch 2.11). What a graph means must not depend on that. So the call is replaced
in Dynamo's graph, with the same arguments, by the function of the same name here. Facts, proofs and sweeps then come out the same on a CPU and on
any GPU, and the kernel is chosen when a chunk body is written.

A region that cannot be streamed gets torch's own call back.
"""

from __future__ import annotations

import math
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from . import internals
from .axis import fake_of

streambp = torch.ops.streambp


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, contiguous: bool = False,
) -> Tensor:
    """The function of torch of that name, as ``streambp::attention`` where it can be, else as products and a softmax.

    query ``[B, Hq, T, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]``, or all three without ``H``; mask broadcastable to
    ``[B, Hq, T, S]``, boolean (true: may attend) or added to the scores. A row that may attend to nothing gives zeros.

    contiguous  lay the result out as ``[B, Hq, T, Dv]``; otherwise it is ``[B, T, Hq, Dv]`` in memory, as fused kernels return it
    """
    if dropout_p or not is_fusible(query, key, value, attn_mask, enable_gqa):
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    flat = query.dim() == 3
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    mask = None if attn_mask is None else score_mask(attn_mask, query, key, flat, is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    out, _ = streambp.attention(query, key, value, mask, is_causal and mask is None, scale, 0)
    if flat:
        out = out.squeeze(1)
    return out.contiguous() if contiguous else out


def is_fusible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    """Can one fused operator do it? Not where a mask is learned, under a vmap, or where key heads are broadcast otherwise than in groups."""
    rank = query.dim()
    if rank not in (3, 4) or not (key.dim() == value.dim() == rank) or not query.dtype == key.dtype == value.dtype:
        return False
    if not query.dtype.is_floating_point or any(map(internals.is_batched, (query, key, value))):
        return False
    if mask is not None and (mask.requires_grad or mask.dim() > rank):
        return False
    if rank == 4 and not grouped and query.shape[1] != key.shape[1]:
        return False
    heads = rank == 3 or query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    return heads and query.shape[0] == key.shape[0] == value.shape[0]


def score_mask(mask: Tensor, query: Tensor, key: Tensor, flat: bool, causal: bool) -> Tensor:
    """A mask as numbers to be added to scores, of rank four; with causality in it, if that was asked for too."""
    if flat and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask.logical_not(), -math.inf)
    if causal:
        rows, keys = (torch.arange(t.shape[2], device=mask.device) for t in (query, key))
        mask = mask.masked_fill(keys > rows[:, None], -math.inf)
    return mask


def keep_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ctx.causal, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output, *([] if mask is None else [mask]))


def attention_gradients(ctx, gradient: Tensor, _):
    query, key, value, out, logsumexp, *mask = ctx.saved_tensors
    found = streambp.attention_backward(gradient, query, key, value, out, logsumexp, mask[0] if mask else None, ctx.causal, ctx.scale)
    return *found, None, None, None, None


torch.library.register_autograd("streambp::attention", attention_gradients, setup_context=keep_for_backward)


def one_attention(module: GraphModule) -> GraphModule:
    """Write every ``scaled_dot_product_attention`` of a Dynamo graph, and of the graphs that it holds, as the function here."""
    for part in [m for m in module.modules() if isinstance(m, GraphModule)]:
        calls = part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        for node in calls:
            node.target = scaled_dot_product_attention
            fake = fake_of(node)
            if isinstance(fake, Tensor) and fake.dim() == 4 and not fake.transpose(1, 2).is_contiguous():
                node.update_kwarg("contiguous", True)
        if calls:
            part.recompile()
    return module


def torch_attention(module: GraphModule) -> bool:
    """Give a region torch's own attention back. Is there any in it?"""
    calls = module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)
    for node in calls:
        node.target = F.scaled_dot_product_attention
        node.kwargs = {name: arg for name, arg in node.kwargs.items() if name != "contiguous"}
    module.recompile()
    return bool(calls)

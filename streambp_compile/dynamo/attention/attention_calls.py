"""One spelling of attention on every device, put into the graph before autograd sees it.

``scaled_dot_product_attention`` becomes a different ATen kernel for each device, dtype, mask and release
of torch, and some of those change the user's arguments (a boolean mask becomes -65504 for cuDNN in torch
2.11). The meaning of a graph must not depend on that. So the call is replaced in Dynamo's graph, with
the same arguments, by the function of the same name here. Facts, proofs and sweeps are then the same on
a CPU and on any GPU, and the kernel is chosen when a chunk body is written. ``flex_attention`` becomes
its mask and its scores, written out: the mask is then proved like any other, and without a score
function it is the same operator.

A region that cannot be streamed gets torch's own call back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import copied, hint
from ...passes.rules.forward import Part, part_of
from ..reading.aten import erase_unread
from ..reading.values import fake_of

streambp = torch.ops.streambp

AS_KERNELS = (0, 2, 1, 3)  # fused kernels return [B, H, T, D] that lies in memory as [B, T, H, D]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: tuple[int, ...] = AS_KERNELS,
) -> Tensor:
    """Compute torch's function of this name by ``streambp::attention``, or by products and a softmax. The
    latter are used with dropout and where `is_fusible` is False.

    query ``[B, Hq, T, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]``, or all three without
    ``H``; mask broadcastable to ``[B, Hq, T, S]``, boolean (true: may attend) or added to the scores. A
    row that may attend to nothing gives zeros.

    layout  the dimensions of a result of rank four, in the order in which they lie in memory: views of it are
            views of torch's result, too
    """
    query, key, value, attn_mask = (as_autocast(t) for t in (query, key, value, attn_mask))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = as_numbers(attn_mask, query.dtype)
    if dropout_p or not is_fusible(query, key, value, attn_mask, enable_gqa):
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    flat = query.dim() == 3
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    mask = None if attn_mask is None else score_mask(attn_mask, query, key, flat, is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    out, _ = streambp.attention(query, key, value, mask, is_causal and mask is None, scale, 0)
    if flat:
        out = out.squeeze(1)
    return out if layout == AS_KERNELS else in_memory_order(out, layout)


def in_memory_order(value: Tensor, layout: tuple[int, ...]) -> Tensor:
    """Copy a value such that its dimensions lie in memory in a given order."""
    return value.permute(layout).contiguous().permute([layout.index(dim) for dim in range(value.dim())])


def memory_order(value: Tensor) -> tuple[int, ...]:
    """Find the order in which the dimensions of a value of rank four lie in memory."""
    if value.permute(AS_KERNELS).is_contiguous():
        return AS_KERNELS
    return tuple(sorted(range(value.dim()), key=lambda dim: -hint(value.stride(dim))))


def as_autocast(value: Tensor | None) -> Tensor | None:
    """Cast an operand as autocast does for torch's function. Autocast does not cast for the function here,
    and rotary tables, for example, widen queries."""
    if value is None or not value.is_floating_point() or value.dtype is torch.float64:
        return value
    device = value.device.type
    return value.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else value


def is_fusible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    """Can one fused operator compute this attention? It cannot where a mask is learned, under a vmap, or
    where key heads are broadcast otherwise than in groups."""
    rank = query.dim()
    if (
        rank not in (3, 4)
        or not (key.dim() == value.dim() == rank)
        or not query.dtype == key.dtype == value.dtype
    ):
        return False
    if not query.dtype.is_floating_point or any(map(internals.is_batched, (query, key, value))):
        return False
    if mask is not None and (mask.requires_grad or mask.dim() > rank):
        return False
    if rank == 4 and not grouped and query.shape[1] != key.shape[1]:
        return False
    heads = rank == 3 or query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    return heads and query.shape[0] == key.shape[0] == value.shape[0]


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to numbers that are added to scores. Torch's operators below its own function
    would read it as zeros and ones."""
    shown, hidden = (torch.scalar_tensor(n, dtype=dtype, device=mask.device) for n in (0.0, -math.inf))
    return torch.where(mask, shown, hidden)


def score_mask(mask: Tensor, query: Tensor, key: Tensor, flat: bool, causal: bool) -> Tensor:
    """Convert a mask to numbers of rank four with a row for each query. If causality was requested too, the
    mask includes it."""
    if mask.dtype is torch.bool:
        mask = as_numbers(mask, query.dtype)
    if flat and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if causal:
        rows, keys = (torch.arange(t.shape[2], device=mask.device) for t in (query, key))
        mask = mask.masked_fill(keys > rows[:, None], -math.inf)
    return mask.expand(-1, -1, query.shape[2], -1) if mask.shape[2] == 1 else mask


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: GraphModule,
    block_mask: tuple,
    scale: float,
    kernel_options: object,
    score_buffers: tuple = (),
    mask_buffers: tuple = (),
) -> tuple[Tensor]:
    """Compute the operator behind ``torch.nn.attention.flex_attention`` by ordinary operations. Only its
    first result is returned.

    score_mod   ``(score, batch, head, row, column, *buffers)`` → score, for single numbers
    block_mask  its last entry is ``(batch, head, row, column, *buffers)`` → bool; blocks are for kernels, and
                not read here
    """
    places = tuple(torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2]))
    mask = over_scores(block_mask[-1], None, places, mask_buffers)
    if returns_first_input(score_mod):
        return (scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True),)
    groups, work = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scores = query.to(work) @ key.to(work).transpose(-2, -1) * scale
    scores = over_scores(score_mod, scores, places, score_buffers).masked_fill(mask.logical_not(), -math.inf)
    return (torch.ops.aten._safe_softmax(scores, -1).to(query.dtype) @ value,)


def over_scores(
    function: GraphModule, scores: Tensor | None, places: tuple[Tensor, ...], buffers: tuple
) -> Tensor:
    """Apply a function of one score and its place, or of a place alone, to ``[B, H, T, S]``. Dimensions
    that it does not read have size one in the result, or are left out."""
    read = [bool(n.users) for n in function.graph.find_nodes(op="placeholder")][scores is not None :]
    indexed = [d for d in range(4) if read[d] or scores is None and d > 1]
    mapped = function
    for dim in (3, 2, 1, 0):
        if scores is not None or dim in indexed:
            along = (0 if d == dim and d in indexed else None for d in range(4))
            mapped = torch.vmap(mapped, (*([] if scores is None else [0]), *along, *(None for _ in buffers)))
    given = [place if d in indexed else place[0] for d, place in enumerate(places)]
    with internals.index_by_tensors():
        result = mapped(*(() if scores is None else (scores,)), *given, *buffers)
    return result.unsqueeze(1) if scores is None and 0 in indexed and 1 not in indexed else result


def returns_first_input(function: GraphModule) -> bool:
    result = next(iter(function.graph.find_nodes(op="output"))).args[0]
    result = result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
    return result is next(iter(function.graph.find_nodes(op="placeholder")))


def keep_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ctx.causal, ctx.scale, *_ = inputs
    ctx.save_for_backward(query, key, value, *output, *([] if mask is None else [mask]))


def attention_gradients(ctx, gradient: Tensor, _):
    query, key, value, out, logsumexp, *mask = ctx.saved_tensors
    found = streambp.attention_backward(
        gradient, query, key, value, out, logsumexp, mask[0] if mask else None, ctx.causal, ctx.scale
    )
    return *found, *[None] * (len(ctx.needs_input_grad) - len(found))


torch.library.register_autograd("streambp::attention", attention_gradients, setup_context=keep_for_backward)


def one_attention(module: GraphModule) -> GraphModule:
    """Write every ``scaled_dot_product_attention`` of a graph and its subgraphs as the function here.
    ``flex_attention`` is written out, where its mask hides all that its blocks leave out."""
    for part in [m for m in module.modules() if isinstance(m, GraphModule)]:
        written = part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        calls = [*written, *(n for n in part.graph.nodes if part_of(n) is Part.ATTENTION)]
        for node in calls:
            node.target = scaled_dot_product_attention
            fake = fake_of(node)
            if isinstance(fake, Tensor) and fake.dim() == 4 and memory_order(fake) != AS_KERNELS:
                node.update_kwarg("layout", memory_order(fake))
        flexible = part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
        flexible = [node for node in flexible if mask_says_all(part, node) and only_result_is_read(node)]
        for node in flexible:
            written_out(part, node)
        if calls or flexible:
            part.recompile()
    return module


def with_input_for_ranges(module: GraphModule) -> GraphModule | None:
    """Add an input for the keys that masks show each row, if a region has attention with a mask.

    No node reads it until a mask is known to show ranges (passes/visible_ranges.py).
    """
    parts = [m for m in module.modules() if isinstance(m, GraphModule)]
    if not any(is_masked(node) for part in parts for node in part.graph.nodes):
        return None
    found = copied(module)
    last = found.graph.find_nodes(op="placeholder")[-1]
    with found.graph.inserting_after(last):
        found.graph.placeholder("visible_ranges")
    found.recompile()
    return found


def is_masked(node: Node) -> bool:
    """Is a node attention with a mask?"""
    if node.target is scaled_dot_product_attention:
        return (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is not None
    return node.target is flex_attention


def only_result_is_read(node: Node) -> bool:
    """Is the first result the only one that is read, and not the log-sum-exp?"""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def mask_says_all(module: GraphModule, node: Node) -> bool:
    """Does the function of a block mask hide all that its blocks leave out? Kernels skip those blocks without
    calling it. It does where ``create_block_mask`` made the blocks from it in this graph, and where one
    block has all rows and keys."""
    blocks = node.args[4]
    tensors = [a for a in blocks[:-1] if isinstance(a, Node) and isinstance(fake_of(a), Tensor)]
    if tensors and all(", in create_block_mask" in a.meta.get("stack_trace", "") for a in tensors):
        return True
    sizes = [a for a in blocks[:-1] if isinstance(a, int)]
    lengths = [fake_of(a).shape[2] for a in node.args[:2]]
    return len(sizes) >= 2 and all(size >= hint(length) for size, length in zip(sizes[-2:], lengths))


def written_out(module: GraphModule, node: Node) -> None:
    """Replace one call of flex attention by ordinary operations, and erase the blocks of its mask."""
    blocks = node.args[4]
    node.target = flex_attention
    node.update_arg(4, (blocks[-1],))
    for arg in (
        node.args[3],
        blocks[-1],
    ):  # share equal functions among layers, so that the layers are equal
        function = getattr(module, arg.target)
        if not function.graph.find_nodes(op="get_attr"):
            arg.target = next(
                name
                for name, part in module.named_children()
                if isinstance(part, GraphModule) and part.code == function.code
            )
    erase_unread(module.graph, [a for a in blocks[:-1] if isinstance(a, Node)])


# Functions that replace a call of torch's → torch's own, which runs where a region is not streamed.
TORCH_SPELLING: dict[Callable, Callable] = {scaled_dot_product_attention: F.scaled_dot_product_attention}


def torch_attention(module: GraphModule) -> bool:
    """Restore torch's own attention in a region and its subgraphs. Returns whether there was any of ours."""
    found = False
    for part in [m for m in module.modules() if isinstance(m, GraphModule)]:
        calls = [n for n in part.graph.nodes if n.op == "call_function" and n.target in TORCH_SPELLING]
        for node in calls:
            node.target = TORCH_SPELLING[node.target]
            node.kwargs = {name: arg for name, arg in node.kwargs.items() if name != "layout"}
        part.recompile()
        found = found or bool(calls)
    return found

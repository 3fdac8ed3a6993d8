"""Fused attention: queries are rows, and causality limits the keys that a row sees."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from ..ir import EVERYWHERE, PAST, Signature, arguments, refuse, shape_of
from . import rule, rule_by_name
from .facets import CostClass, Form


def mask_labels(node: Node, mask: Node | None, heads: int) -> tuple:
    if mask is None:
        return ()
    b, h, t, s = shape_of(mask)
    return (("b" if b > 1 else None, "h" if h == heads and h > 1 else None, "q", "k"),)


def range_labels(node: Node) -> tuple:
    """Label the dimensions of the ranges of keys that attention reads in place of a mask."""
    ranges = arguments(node)["ranges"]
    if ranges is None:
        return ()
    _, masks, rows, _ = shape_of(ranges)
    return ((None, "b" if masks > 1 else None, "q" if rows > 1 else None, None),)


def emit_attention(body, node: Node):
    return body.attention(node)


@rule("streambp::attention", emit=emit_attention, cost=CostClass.PRODUCT, form=Form.ATTENTION)
def attention(node: Node) -> Signature:
    query, key = node.args[0], node.args[1]
    heads, grouped = shape_of(query)[1], shape_of(key)[1]
    h = "h" if heads == grouped else "g"
    return Signature(
        (
            ("b", "h", "q", "d"),
            ("b", h, "k", "d"),
            ("b", h, "k", "e"),
            *mask_labels(node, node.args[3], heads),
            *range_labels(node),
        ),
        (("b", "h", "q", "e"), ("b", "h", "q")),
        reach={"k": PAST if node.args[4] else EVERYWHERE},
        rows="q",
        keys="k",
    )


def emit_attention_backward(body, node: Node):
    return body.attention_backward(node)


@rule(
    "streambp::attention_backward",
    emit=emit_attention_backward,
    cost=CostClass.PRODUCT,
    linear="grad",
    form=Form.ATTENTION_BACKWARD,
)
def attention_backward(node: Node) -> Signature:
    query, key = node.args[1], node.args[2]
    heads, grouped = shape_of(query)[1], shape_of(key)[1]
    h = "h" if heads == grouped else "g"
    queries, keys, values = ("b", "h", "q", "D"), ("b", h, "k", "D"), ("b", h, "k", "E")
    outs = ("b", "h", "q", "e")
    return Signature(
        (
            outs,
            ("b", "h", "q", "d"),
            ("b", h, "k", "d"),
            ("b", h, "k", "e"),
            outs,
            ("b", "h", "q"),
            *mask_labels(node, node.args[6], heads),
            *range_labels(node),
        ),
        (queries, keys, values),
        reach={"k": PAST if node.args[7] else EVERYWHERE},
        rows="q",
        keys="k",
    )


# torch's fused kernels, with their backward. Normalisation writes them as
# ``streambp.attention`` where it can.


def refused_kernel(node: Node) -> Signature:
    raise refuse(
        node,
        "This attention kernel draws its own dropout, or returns more than its result",
        "Call torch.nn.functional.scaled_dot_product_attention with dropout_p=0",
    )


rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    keep=True,
    form=Form.FUSED_ATTENTION,
)(refused_kernel)
rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    form=Form.FUSED_ATTENTION_BACKWARD,
)(refused_kernel)


# flash_attn's operators, by their schemas (flash_attn/flash_attn_interface.py, 2.7 and 2.8). Calls that
# torch's attention can express are rewritten as such before they come here. The others are refused with a
# reason.

FLASH_ATTN_FORWARD = "flash_attn::_flash_attn_forward"
FLASH_ATTN = (
    "q",
    "k",
    "v",
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
    "return_softmax",
)
FLASH_ATTN_VARLEN_FORWARD = "flash_attn::_flash_attn_varlen_forward"
CACHE = ("block_table", "leftpad_k", "seqused_k")
FLASH_ATTN_VARLEN = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *FLASH_ATTN[3:],
    *CACHE,
    "zero_tensors",
)
KERNEL_ONLY = (  # parameter, its value without effect, its effect otherwise
    (
        "dropout_p",
        0,
        "This call draws dropout inside the flash_attn kernel, where a chunk cannot draw the same numbers "
        "again",
    ),
    ("softcap", 0, "This call caps scores (softcap) inside the flash_attn kernel"),
    ("alibi_slopes", None, "This call adds ALiBi slopes inside the flash_attn kernel"),
    ("return_softmax", False, "This flash_attn call returns a probability for every pair of tokens"),
    *((name, None, "This flash_attn call reads keys of a cache") for name in CACHE),
)
SDPA = 'Choose attn_implementation="sdpa", or call scaled_dot_product_attention'
PACKED = 'Choose attn_implementation="sdpa", and pass position_ids that restart with each packed sequence'


def kernel_only(given: Mapping[str, object]) -> str:
    """Describe the part of a flash_attn call that only its kernel can do; empty if there is none."""
    return next((does for name, nothing, does in KERNEL_ONLY if given.get(name, nothing) != nothing), "")


@rule_by_name(FLASH_ATTN_FORWARD, "flash_attn::_flash_attn_backward")
def flash_attn(node: Node) -> Signature:
    given = {**dict(zip(FLASH_ATTN, node.args)), **node.kwargs} if "forward" in str(node.target) else {}
    other = "Only calls by flash_attn's own autograd function, with as many queries as keys, are supported"
    raise refuse(node, kernel_only(given) or other, SDPA)


@rule_by_name(FLASH_ATTN_VARLEN_FORWARD, "flash_attn::_flash_attn_varlen_backward")
def flash_attn_varlen(node: Node) -> Signature:
    given = dict(zip(FLASH_ATTN_VARLEN, node.args)) | node.kwargs if "forward" in str(node.target) else {}
    other = "Queries and keys of this call are not packed alike, or its gradient is not flash_attn's own"
    raise refuse(node, kernel_only(given) or other, PACKED)


@rule_by_name("higher_order::flex_attention", "higher_order::flex_attention_backward")
def flex_attention(node: Node) -> Signature:
    """Refuse flex attention whose mask was not written out before autograd."""
    raise refuse(
        node,
        "This block mask was not created in the compiled function, or the call returns its log-sum-exp",
        "Call create_block_mask inside the compiled function, without return_lse or return_aux",
    )

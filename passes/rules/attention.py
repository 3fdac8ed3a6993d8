"""Fused attention: queries are rows, keys are what causality lets a row see."""

from __future__ import annotations

from torch.fx import Node

from ..ir import EVERYWHERE, PAST, Signature, shape_of
from . import rule


def mask_labels(node: Node, mask: Node | None, heads: int) -> tuple:
    if mask is None:
        return ()
    b, h, t, s = shape_of(mask)
    return (("b" if b > 1 else None, "h" if h == heads and h > 1 else None, "q", "k"),)


def emit_attention(body, node: Node):
    return body.attention(node)


@rule("streambp::attention", emit=emit_attention)
def attention(node: Node) -> Signature:
    query, key = node.args[0], node.args[1]
    heads, grouped = shape_of(query)[1], shape_of(key)[1]
    h = "h" if heads == grouped else "g"
    return Signature(
        (("b", "h", "q", "d"), ("b", h, "k", "d"), ("b", h, "k", "e"), *mask_labels(node, node.args[3], heads)),
        (("b", "h", "q", "e"), ("b", "h", "q")),
        reach={"k": PAST if node.args[4] else EVERYWHERE}, rows="q", keys="k")


def emit_attention_backward(body, node: Node):
    return body.attention_backward(node)


@rule("streambp::attention_backward", emit=emit_attention_backward)
def attention_backward(node: Node) -> Signature:
    query, key = node.args[1], node.args[2]
    heads, grouped = shape_of(query)[1], shape_of(key)[1]
    h = "h" if heads == grouped else "g"
    queries, keys, values = ("b", "h", "q", "D"), ("b", h, "k", "D"), ("b", h, "k", "E")
    outs = ("b", "h", "q", "e")
    return Signature(
        (outs, ("b", "h", "q", "d"), ("b", h, "k", "d"), ("b", h, "k", "e"), outs, ("b", "h", "q"), *mask_labels(node, node.args[6], heads)),
        (queries, keys, values),
        reach={"k": PAST if node.args[7] else EVERYWHERE}, rows="q", keys="k")

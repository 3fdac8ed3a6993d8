"""Attention whose keys are the sequence's own and a few more. These are memory tokens, learned or zero
keys, prefixes of prefix tuning, the states of an earlier segment.

Such keys come as ``cat([memory, k], dim)``, or as padding, and key i is then not of token i. So the
attention is written as two, before autograd sees it: one over the sequence's own keys, and one over the
others. They are joined by their log-sum-exps, and the backward of both takes the joined result, as
FlashAttention's does for blocks of keys (arXiv 2205.14135, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import are_equal, arguments, is_equal
from ...passes.rules.forward import Part, part_of
from ..reading.aten import erase_unread, inserted
from ..reading.values import fake_of, is_parameter
from ..rows.row_slices import (
    Known,
    Parts,
    RowRange,
    Rowwise,
    origin_of_rows,
    rows_between,
    same_rows,
    with_rows,
)
from .attention_calls import TORCH_SPELLING, as_autocast, is_fusible, score_mask, streambp


class Joined(torch.autograd.Function):
    """Attention over a sequence's keys and a few more.

    query ``[B, H, T, D]``, key ``[B, Hkv, T, D]``, value ``[B, Hkv, T, Dv]``, mask to be added or None;
    more_key ``[B, Hkv, P, D]``, more_value ``[B, Hkv, P, Dv]``, more_mask ``[.., T, P]`` to be added or None
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, more_key, more_value, more_mask, scale: float):
        own, own_sum = streambp.attention(query, key, value, mask, False, scale, 0)
        more, more_sum = streambp.attention(query, more_key, more_value, more_mask, False, scale, 0)
        total = torch.logaddexp(own_sum, more_sum)
        out = own * share(own_sum, total, own.dtype) + more * share(more_sum, total, own.dtype)
        ctx.save_for_backward(query, key, value, mask, more_key, more_value, more_mask, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask, more_key, more_value, more_mask, out, total = ctx.saved_tensors
        dq, dk, dv = streambp.attention_backward(
            gradient, query, key, value, out, total, mask, False, ctx.scale
        )
        more_dq, more_dk, more_dv = streambp.attention_backward(
            gradient, query, more_key, more_value, out, total, more_mask, False, ctx.scale
        )
        return dq + more_dq, dk, dv, None, more_dk, more_dv, None, None


def share(part: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the share of a total from the logarithms of both, ``[B, H, T, 1]``. It is zero in a row that
    sees no key."""
    return (part - total.masked_fill(total == -math.inf, 0)).exp().unsqueeze(-1).to(dtype)


def attention_with_more_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    more_key: Tensor,
    more_value: Tensor,
    more_mask: Tensor | None,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` over the sequence's keys and more keys, each with their
    columns of the mask. The dimension of heads may be missing."""
    given = map(as_autocast, (query, key, value, more_key, more_value))
    flat = query.dim() == 3
    query, key, value, more_key, more_value = (t.unsqueeze(1) if flat else t for t in given)
    masks = [
        None if m is None else score_mask(m, query, k, flat, False)
        for m, k in ((attn_mask, key), (more_mask, more_key))
    ]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    out = Joined.apply(query, key, value, masks[0], more_key, more_value, masks[1], scale)
    return (out.squeeze(1) if flat else out).contiguous()


def torch_attention_with_more_keys(
    query, key, value, attn_mask, scale, enable_gqa, more_key, more_value, more_mask
) -> Tensor:
    """Compute the same by torch's own function, for a region that runs unchunked."""
    keys, values = torch.cat((key, more_key), -2), torch.cat((value, more_value), -2)
    mask = None if attn_mask is None else torch.cat((attn_mask, more_mask), -1)
    return F.scaled_dot_product_attention(
        query, keys, values, mask, scale=scale, enable_gqa=enable_gqa
    ).contiguous()


TORCH_SPELLING[attention_with_more_keys] = torch_attention_with_more_keys


@dataclass(frozen=True)
class OwnKeys:
    """The sequence's own keys: one of the parts that keys were joined of."""

    parts: Parts
    at: int

    def rows(self, like: Node) -> tuple[RowRange, list[RowRange]]:
        """Return the rows of these keys, and those of the others. Sizes are inserted where the graph is being
        written."""
        at, count = self.at, len(self.parts.sizes)
        others = [(i, j) for i, j in ((0, at), (at + 1, count)) if i < j]
        own, *others = (rows_between(self.parts, i, j, like) for i, j in ((at, at + 1), *others))
        return own, others


def part_shared_keys(module: GraphModule) -> GraphModule:
    """Write attention over a sequence's keys and a few more as attention over each of the two."""
    without: Rowwise = set()
    for node in [n for n in module.graph.nodes if part_of(n) is Part.ATTENTION]:
        own = own_keys(node, without)
        if own is not None:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(apart(node, own))
            erase_unread(module.graph, [node])
            without = set()
    return module


def own_keys(node: Node, without: Rowwise) -> OwnKeys | None:
    """Find the keys of an attention that belong to the sequence of its queries. None where all or none do,
    or where that is unknown."""
    found = origins(node, ("key", "value"), without)
    if not found:
        return None
    query = arguments(node)["query"]
    own, *others = (own_part(parts, query) for parts in found)
    if own is None or len(own.parts.sizes) == 1:
        return None
    alike = (o is not None and o.at == own.at and are_equal(o.parts.sizes, own.parts.sizes) for o in others)
    return own if all(alike) else None


def origins(node: Node, names: Sequence[str], without: Rowwise) -> list[Parts]:
    """Find where the rows of these operands of an attention were joined. The list is empty if one of them
    was not, or if the attention cannot be written as several.

    without  see `row_slices.origin_of_rows`
    """
    given = arguments(node)
    mask = given["attn_mask"]
    if given["dropout_p"] or given["is_causal"]:
        return []
    operands = [fake_of(given[n]) for n in ("query", "key", "value")]
    if not is_fusible(*operands, None if mask is None else fake_of(mask), given["enable_gqa"]):
        return []
    found = []
    for name in names:
        parts = origin_of_rows(given[name], fake_of(given[name]).dim() - 2, without)
        if parts is None:
            return []
        found.append(parts)
    return found


def own_part(parts: Parts, query: Node) -> OwnKeys | None:
    """Find the one joined value that is computed from the inputs of the queries. The others have no input in
    common with the queries.

    Behind an earlier layer, queries depend on that layer's other keys as well. The sequence's own keys
    are then those that share rows with them.
    """
    made_of = inputs_of(query)
    related = [p is not None and not made_of.isdisjoint(inputs_of(p)) for p in parts.pieces]
    if sum(related) > 1:
        rows = set(same_rows(query, fake_of(query).dim() - 2))
        related = [p is not None and not rows.isdisjoint(same_rows(p, parts.dim)) for p in parts.pieces]
    if sum(related) != 1:
        return None
    at = related.index(True)
    return OwnKeys(parts, at) if is_equal(parts.sizes[at], fake_of(query).shape[-2]) else None


def inputs_of(node: Node) -> set[Node]:
    """Collect the inputs, without weights, that a value's numbers depend on."""
    found, seen, stack = set(), {node}, [node]
    while stack:
        node = stack.pop()
        if node.op == "placeholder" and not is_parameter(fake_of(node)):
            found.add(node)
        for operand in node.all_input_nodes:
            if operand not in seen and isinstance(fake_of(operand), (Tensor, tuple, list)):
                seen.add(operand)
                stack.append(operand)
    return found


def apart(node: Node, own: OwnKeys, queries: RowRange | None = None) -> Node:
    """Insert the attention of a node, over the sequence's own keys and over the others.

    queries  the rows of queries that attend; None: all of them
    """
    given: dict = arguments(node)
    known: Known = {}

    def cut(operand: Node, dim: int, *rows: RowRange) -> Node:
        at = fake_of(operand).dim() + dim
        made = [with_rows(operand, at, r, node, known) for r in rows]
        return made[0] if len(made) == 1 else inserted(node, torch.ops.aten.cat.default, (made, at))

    def cut_mask(mask: Node | None, dim: int, *rows: RowRange) -> Node | None:
        """Slice a mask. One that is the same for all rows, or for all keys, stays as it is."""
        same = mask is None or fake_of(mask).dim() < -dim or is_equal(fake_of(mask).shape[dim], 1)
        return mask if same else cut(mask, dim, *rows)

    query, mask = given["query"], given["attn_mask"]
    if queries is not None:
        query, mask = cut(query, -2, queries), cut_mask(mask, -2, queries)
    own_rows, more = own.rows(node)
    first = [cut(given[n], -2, own_rows) for n in ("key", "value")]
    others = [cut(given[n], -2, *more) for n in ("key", "value")]
    masks = [cut_mask(mask, -1, *rows) for rows in ([own_rows], more)]
    args = (query, *first, masks[0], given["scale"], given["enable_gqa"], *others, masks[1])
    return inserted(node, attention_with_more_keys, args, as_written=True)

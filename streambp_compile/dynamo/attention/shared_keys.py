"""Attention whose keys are the sequence's own and a few more. These are memory tokens, learned or zero
keys, prefixes of prefix tuning, the states of an earlier segment.

Such keys come as ``cat([memory, k], dim)``, or as padding, and key i is then not of token i. So the
attention is written as two, before autograd sees it: one over the sequence's own keys, and one over the
others, whose scores have a column for each of them. They are joined by their log-sum-exps, and the
backward of both takes the joined result, as FlashAttention's does for blocks of keys (arXiv 2205.14135,
section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, hint, is_equal
from ...passes.rules.forward import Part, part_of
from ..reading.aten import erase_unread, inserted
from ..reading.values import fake_of, is_parameter
from ..rows.row_slices import Parts, RowRange, Rowwise, Sliced, origin_of_rows, same_rows, sliced
from .attention_calls import TORCH_SPELLING, as_autocast, is_fusible, score_mask, streambp


class Joined(torch.autograd.Function):
    """Attention over a sequence's keys and a few more.

    query ``[B, H, T, D]``, key ``[B, Hkv, T, D]``, value ``[B, Hkv, T, Dv]``, mask to be added or None;
    more_key ``[B, H, P, D]``, more_value ``[B, H, P, Dv]``, more_mask ``[.., T, P]`` to be added or None
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, more_key, more_value, more_mask, scale: float):
        own, own_sum = streambp.attention(query, key, value, mask, False, scale, 0)
        scores = scores_of(query, more_key, more_mask, scale)
        total = torch.logaddexp(own_sum, scores.logsumexp(-1).to(own_sum.dtype))
        part = weights(own_sum, total).unsqueeze(-1).to(own.dtype)
        more = weights(scores, total.unsqueeze(-1)).to(own.dtype) @ more_value
        out = own * part + more
        ctx.save_for_backward(query, key, value, mask, more_key, more_value, more_mask, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask, more_key, more_value, more_mask, out, total = ctx.saved_tensors
        dq, dk, dv = streambp.attention_backward(
            gradient, query, key, value, out, total, mask, False, ctx.scale
        )
        scores = scores_of(query, more_key, more_mask, ctx.scale)
        shares = weights(scores, total.unsqueeze(-1))
        against = (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1, keepdim=True)
        inner = (gradient @ more_value.transpose(-1, -2)).to(total.dtype) - against
        change = (shares * inner * ctx.scale).to(query.dtype)
        more_dv = shares.to(gradient.dtype).transpose(-1, -2) @ gradient
        more_dk = change.transpose(-1, -2) @ query
        return dq + change @ more_key, dk, dv, None, more_dk, more_dv, None, None


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    return scores if mask is None else scores + mask


def weights(logs: Tensor, total: Tensor) -> Tensor:
    """Compute shares of a total from the logarithms of both. They are zero in a row that sees no key."""
    return (logs - total.masked_fill(total == -math.inf, 0)).exp()


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
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        more_key, more_value = (t.repeat_interleave(groups, 1) for t in (more_key, more_value))
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
    """The numbers of keys before the sequence's own, and behind them."""

    before: int
    behind: int

    @property
    def rows(self) -> RowRange:
        return RowRange(self.before, -self.behind if self.behind else None)

    @property
    def others(self) -> tuple[RowRange, ...]:
        front = (RowRange(0, self.before),) if self.before else ()
        return (*front, RowRange(-self.behind, None)) if self.behind else front


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
    owns = [own_part(parts, query) for parts in found]
    if owns[0] is None or owns[0] != owns[1] or not owns[0].others:
        return None
    return owns[0]


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
    """Find the one joined value that is computed from the inputs of the queries. The others must have known
    sizes, and no input in common with the queries.

    Behind an earlier layer, queries depend on that layer's other keys as well. The sequence's own keys
    are then those that share rows with them, if the others are fewer.
    """
    made_of = inputs_of(query)
    related = [p is not None and not made_of.isdisjoint(inputs_of(p)) for p in parts.pieces]
    if sum(related) > 1:
        rows = set(same_rows(query, fake_of(query).dim() - 2))
        related = [p is not None and not rows.isdisjoint(same_rows(p, parts.dim)) for p in parts.pieces]
        if not are_fewer(parts, related):
            return None
    if sum(related) != 1:
        return None
    at = related.index(True)
    before, behind = parts.sizes[:at], parts.sizes[at + 1 :]
    rows = fake_of(query).shape[-2]
    if not all(isinstance(s, int) for s in (*before, *behind)) or not is_equal(parts.sizes[at], rows):
        return None
    return OwnKeys(sum(before), sum(behind))


def are_fewer(parts: Parts, related: Sequence[bool]) -> bool:
    """Are the rows that are unrelated to the queries fewer than the related ones?"""
    sizes = [[hint(s) for s, r in zip(parts.sizes, related) if r is wanted] for wanted in (False, True)]
    return sum(sizes[0]) < sum(sizes[1])


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
    known: Sliced = {}

    def cut(operand: Node, dim: int, *rows: RowRange) -> Node:
        at = fake_of(operand).dim() + dim
        made = [sliced(operand, at, r, node, known) for r in rows]
        return made[0] if len(made) == 1 else inserted(node, torch.ops.aten.cat.default, (made, at))

    def cut_mask(mask: Node | None, dim: int, *rows: RowRange) -> Node | None:
        """Slice a mask. One that is the same for all rows, or for all keys, stays as it is."""
        same = mask is None or fake_of(mask).dim() < -dim or is_equal(fake_of(mask).shape[dim], 1)
        return mask if same else cut(mask, dim, *rows)

    query, mask = given["query"], given["attn_mask"]
    if queries is not None:
        query, mask = cut(query, -2, queries), cut_mask(mask, -2, queries)
    own_rows, more = (own.rows,), own.others
    first = [cut(given[n], -2, *own_rows) for n in ("key", "value")]
    others = [cut(given[n], -2, *more) for n in ("key", "value")]
    masks = [cut_mask(mask, -1, *rows) for rows in (own_rows, more)]
    args = (query, *first, masks[0], given["scale"], given["enable_gqa"], *others, masks[1])
    return inserted(node, attention_with_more_keys, args, as_written=True)

"""Reductions and the softmax family.

Over tokens, a sum adds up chunk by chunk, and a reduction with a `Merge` is merged. A softmax over tokens is
rewritten with its log-sum-exp before the rules meet it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..ir import Signature, refuse, shape_of, value_of
from . import form_of, rule
from .facets import HIGHEST, LOWEST, CostClass, Form, Merge
from .mask_domain import layout, normalization
from .mask_domain.bounded import if_operands_are
from .signatures import all_at_once, argument, dims_of

aten = torch.ops.aten
FUSED = CostClass.FUSED
LARGEST, LEAST = Merge(LOWEST, aten.maximum.default), Merge(HIGHEST, aten.minimum.default)
ANY, ALL = Merge(0.0, aten.logical_or.default), Merge(1.0, aten.logical_and.default)
PRODUCT = Merge(1.0, aten.mul.Tensor)
LAST = (1 << 63) - 1  # a position behind all others


def reduced(node: Node, dims: tuple[int, ...], keepdim: bool, contracts: str, outputs: int = 1) -> Signature:
    labels = tuple(range(len(shape_of(node.args[0]))))
    out = (
        tuple(None if i in dims else i for i in labels)
        if keepdim
        else tuple(i for i in labels if i not in dims)
    )
    return Signature((labels,), (out,) * outputs, contracts=contracts)


def emit_sum(body, node: Node):
    """Write a chunk's part of a sum. A part in half precision comes in the dtype of its accumulator."""
    return body.copied(node, wide=True)


@rule("aten::sum", emit=emit_sum, cost=FUSED, linear="self")
def sum_all(node: Node) -> Signature:
    return reduced(node, dims_of(None, len(shape_of(node.args[0]))), False, "sum")


@rule("aten::sum.dim_IntList", emit=emit_sum, cost=FUSED, linear="self", form=Form.SUM, mask=layout.summed)
def sum_dims(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(node, dims_of(node.args[1], rank), bool(argument(node, 2, "keepdim", False)), "sum")


@rule("aten::mean.dim", cost=FUSED, linear="self")
@rule("aten::argmax", "aten::argmin", cost=FUSED, positions=(-1,))
@rule(
    "aten::amax",
    cost=FUSED,
    bounded=if_operands_are,
    visible_only=True,
    merge=LARGEST,
    picks=True,
    form=Form.LARGEST,
)
@rule("aten::amin", cost=FUSED, merge=LEAST, picks=True, form=Form.LEAST)
@rule("aten::any.dim", "aten::any.dims", cost=FUSED, merge=ANY)
@rule("aten::all.dim", "aten::all.dims", cost=FUSED, merge=ALL)
@rule("aten::prod.dim_int", cost=FUSED, merge=PRODUCT)
@rule(
    "aten::logsumexp", cost=FUSED, merge=Merge(LOWEST, aten.logaddexp.default), keep=True, visible_only=True
)
def reduce_dims(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(
        node, dims_of(argument(node, 1, "dim"), rank), bool(argument(node, 2, "keepdim", False)), "all"
    )


@rule("aten::mean", cost=FUSED, linear="self")
@rule("aten::max", cost=FUSED, merge=LARGEST, picks=True, form=Form.LARGEST)
@rule("aten::min", cost=FUSED, merge=LEAST, picks=True, form=Form.LEAST)
@rule("aten::any", cost=FUSED, merge=ANY)
@rule("aten::all", cost=FUSED, merge=ALL)
@rule("aten::prod", cost=FUSED, merge=PRODUCT)
def reduce_all(node: Node) -> Signature:
    return reduced(node, dims_of(None, len(shape_of(node.args[0]))), False, "all")


def same(call: Callable, a: Node, b: Node) -> Node:
    """Compare two values: true where they are equal, or both not a number."""
    strange = call(aten.logical_and.default, (call(aten.isnan.default, (a,)), call(aten.isnan.default, (b,))))
    return call(aten.logical_or.default, (call(aten.eq.Tensor, (a, b)), strange))


def emit_extreme(body, node: Node):
    """Write the largest (or least) of the rows so far. The first place that has it is written, too, if the
    sweep reads it."""
    if not body.adds_up(node):
        return body.copy(node)
    call, (x, dim), keepdim = (
        body.graph.call_function,
        node.args[:2],
        bool(argument(node, 2, "keepdim", False)),
    )
    largest = form_of(node) is Form.MAXIMUM
    merge = LARGEST if largest else LEAST
    rows, total = (
        body.rows_of_merge(node, merge),
        body.total_of(node, 0, merge.identity_of(value_of(x).dtype)),
    )
    reduced_by = (aten.amax if largest else aten.amin).default
    value = call(reduced_by, (rows, [dim], True))
    part = value if keepdim else call(aten.squeeze.dim, (value, dim))
    joined = call(merge.join, (total, part))
    if body.is_read(node, 1):
        places, device = body.total_of(node, 1, LAST), value_of(x).device
        has = same(call, rows, value)
        place = body.chosen(has, body.places_along(x, LAST), LAST, torch.int64, device)
        place = call(aten.amin.default, (place, [dim], keepdim))
        old = body.chosen(same(call, total, joined), places, LAST, torch.int64, device)
        new = body.chosen(same(call, part, joined), place, LAST, torch.int64, device)
        body.replace_total(places, call(aten.minimum.default, (old, new)))
    return body.replace_total(total, joined)


EXTREME: dict[str, Any] = dict(emit=emit_extreme, cost=FUSED, positions=(1,), picks=True)


@rule("aten::max.dim", form=Form.MAXIMUM, visible_only=True, merge=LARGEST, **EXTREME)
@rule("aten::min.dim", form=Form.MINIMUM, merge=LEAST, **EXTREME)
def extreme(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(
        node, dims_of(node.args[1], rank), bool(argument(node, 2, "keepdim", False)), "all", outputs=2
    )


@rule("aten::var_mean.correction", cost=FUSED)
def var_mean(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(
        node,
        dims_of(argument(node, 1, "dim"), rank),
        bool(argument(node, 3, "keepdim", node.kwargs.get("keepdim", False))),
        "all",
        outputs=2,
    )


@rule("aten::var.correction", cost=FUSED)
def var(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(
        node, dims_of(argument(node, 1, "dim"), rank), bool(node.kwargs.get("keepdim", False)), "all"
    )


def emit_sort(body, node: Node):
    rank = len(shape_of(node.args[0]))
    if any(body.carries_keys(node.args[0], dim) for dim in range(rank)):
        raise refuse(node, "This operation sorts the keys of each row", "Use topk for the largest of them")
    return body.copied(node)


RANKED: dict[str, Any] = dict(cost=CostClass.KERNEL, positions=(1,), picks=True)


@rule("aten::topk", **RANKED)
@rule("aten::sort", "aten::sort.stable", emit=emit_sort, form=Form.SORT, **RANKED)
def ranked(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    if node.target.overloadpacket.__name__ == "topk":
        dim = argument(node, 2, "dim", -1)
    elif node.target._overloadname == "stable":
        dim = node.kwargs.get("dim", -1)
    else:
        dim = argument(node, 1, "dim", -1)
    dim %= max(rank, 1)
    out = tuple(None if i == dim else i for i in range(rank))
    return Signature((tuple(range(rank)),), (out,) * len(value_of(node)), contracts="all")


def normalized(node: Node, dim: int, operands: int) -> Signature:
    """Build the signature in which every entry along ``dim`` reads all of ``dim``. If ``dim`` carries tokens,
    they are the keys of a row."""
    rank = len(shape_of(node))
    dim %= max(rank, 1)
    labels = tuple(range(rank))
    return Signature((labels,) * operands, (labels,), keys=dim)


KEPT: dict[str, Any] = dict(cost=FUSED, keep=True)


@rule("aten::_softmax", form=Form.SOFTMAX, mask=normalization.normalized, visible_only=True, **KEPT)
@rule(
    "aten::_safe_softmax",
    form=Form.SAFE_SOFTMAX,
    mask=normalization.safely_normalized,
    visible_only=True,
    **KEPT,
)
@rule("aten::_log_softmax", form=Form.LOG_SOFTMAX, **KEPT)
def softmax(node: Node) -> Signature:
    return normalized(node, node.args[1], 1)


@rule(
    "aten::_softmax_backward_data",
    linear="grad_output",
    mask=normalization.normalized_backward,
    form=Form.SOFTMAX_BACKWARD,
    **KEPT,
)
@rule("aten::_log_softmax_backward_data", linear="grad_output", form=Form.LOG_SOFTMAX_BACKWARD, **KEPT)
def softmax_backward(node: Node) -> Signature:
    return normalized(node, node.args[2], 2)


@rule(
    "streambp::to_extreme",
    cost=FUSED,
    linear="grad",
    mask=normalization.largest_backward,
    visible_only=True,
    form=Form.TO_EXTREME,
)
def to_extreme(node: Node) -> Signature:
    dim, labels = node.args[2], tuple(range(len(shape_of(node))))
    return Signature((tuple(None if i == dim else i for i in labels), labels), (labels,), keys=dim)


@rule("aten::histc", "aten::bincount", cost=CostClass.KERNEL, form=Form.COUNT)
def counts(node: Node) -> Signature:
    return all_at_once(node)

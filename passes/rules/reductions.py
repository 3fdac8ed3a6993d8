"""Reductions and the softmax family. A sum over tokens adds up chunk by chunk; nothing else does."""

from __future__ import annotations

from torch.fx import Node

from ..ir import Signature, shape_of, value_of
from . import rule
from .facets import CostClass, Form
from .mask_domain import layout, normalization
from .mask_domain.bounded import if_operands_are
from .signatures import all_at_once, argument, dims_of

FUSED = CostClass.FUSED


def reduced(node: Node, dims: tuple[int, ...], keepdim: bool, contracts: str, outputs: int = 1) -> Signature:
    labels = tuple(range(len(shape_of(node.args[0]))))
    out = (
        tuple(None if i in dims else i for i in labels)
        if keepdim
        else tuple(i for i in labels if i not in dims)
    )
    return Signature((labels,), (out,) * outputs, contracts=contracts)


def emit_sum(body, node: Node):
    """A chunk's part of a sum of half precision comes in the dtype of its accumulator."""
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
@rule("aten::amax", cost=FUSED, bounded=if_operands_are, visible_only=True)
@rule(
    "aten::amin",
    "aten::any.dim",
    "aten::any.dims",
    "aten::all.dim",
    "aten::all.dims",
    "aten::prod.dim_int",
    "aten::logsumexp",
    cost=FUSED,
)
def reduce_dims(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    return reduced(
        node, dims_of(argument(node, 1, "dim"), rank), bool(argument(node, 2, "keepdim", False)), "all"
    )


@rule("aten::mean", cost=FUSED, linear="self")
@rule("aten::max", "aten::min", "aten::any", "aten::all", "aten::prod", cost=FUSED)
def reduce_all(node: Node) -> Signature:
    return reduced(node, dims_of(None, len(shape_of(node.args[0]))), False, "all")


@rule("aten::max.dim", cost=FUSED, positions=(1,), form=Form.MAXIMUM, visible_only=True)
@rule("aten::min.dim", cost=FUSED, positions=(1,), form=Form.MINIMUM)
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


@rule("aten::topk", cost=CostClass.KERNEL, positions=(1,))
@rule("aten::sort", "aten::sort.stable", cost=CostClass.KERNEL, positions=(1,), form=Form.SORT)
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
    """Every entry along ``dim`` reads all of ``dim``; should that be tokens, they are the keys of a row."""
    rank = len(shape_of(node))
    dim %= max(rank, 1)
    labels = tuple(range(rank))
    return Signature((labels,) * operands, (labels,), keys=dim)


@rule("aten::_softmax", cost=FUSED, keep=True, mask=normalization.normalized, visible_only=True)
@rule("aten::_safe_softmax", cost=FUSED, keep=True, mask=normalization.safely_normalized, visible_only=True)
@rule("aten::_log_softmax", cost=FUSED, keep=True)
def softmax(node: Node) -> Signature:
    return normalized(node, node.args[1], 1)


@rule(
    "aten::_softmax_backward_data",
    cost=FUSED,
    linear="grad_output",
    keep=True,
    mask=normalization.normalized_backward,
)
@rule("aten::_log_softmax_backward_data", cost=FUSED, linear="grad_output", keep=True)
def softmax_backward(node: Node) -> Signature:
    return normalized(node, node.args[2], 2)


@rule(
    "streambp::to_extreme", cost=FUSED, linear="grad", mask=normalization.largest_backward, visible_only=True
)
def to_extreme(node: Node) -> Signature:
    dim, labels = node.args[2], tuple(range(len(shape_of(node))))
    return Signature((tuple(None if i == dim else i for i in labels), labels), (labels,), keys=dim)


@rule("aten::histc", "aten::bincount", cost=CostClass.KERNEL, form=Form.COUNT)
def counts(node: Node) -> Signature:
    return all_at_once(node)

"""One visit per node: its abstract value, and whether it is made of ordinary numbers, which hide nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

import torch
from torch.fx import Node

from ..ir import Agreement, KeyMask, shape_of, tensor_operands, value_of
from .domains import HIDING, Abstract, Affine, Band, mask_of, moved, one, same_axes

aten, prims = torch.ops.aten, torch.ops.prims

SUMS = {aten.addmm.default, aten.baddbmm.default}  # products to which something is added
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.embedding.default, *SUMS}
ORDINARY = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.where.self,
    aten.cumsum.default,
    aten.amax.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.abs.default,
    aten.reciprocal.default,
    aten.relu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar,
    aten.pow.Scalar,
}

Handler = Callable[[Node, "Evaluation"], Abstract]


class Evaluation:
    """What is known so far; called with an argument, its abstract value.

    table  op → how its value follows from those of its operands
    plain  floating-point nodes without lowest numbers: made of products, weights and looked-up rows by
           `ORDINARY` operations
    """

    def __init__(self, table: Mapping[object, Handler], with_tokens: Container[Node] | None):
        self.table, self.with_tokens = table, with_tokens
        self.values: dict[Node, Abstract] = {}
        self.plain: set[Node] = set()

    def visit(self, node: Node) -> None:
        if not isinstance(value_of(node), torch.Tensor):
            return
        if node.op == "call_function":
            handler = self.table.get(node.target)
            self.values[node] = None if handler is None else handler(node, self)
        if self.hides_nothing(node):
            self.plain.add(node)

    def __call__(self, arg: object) -> Abstract:
        if isinstance(arg, Node):
            return self.values.get(arg)
        return Affine(float(arg)) if isinstance(arg, (bool, int, float)) else None

    def hides_nothing(self, node: Node) -> bool:
        if not value_of(node).dtype.is_floating_point:
            return True
        if node.op == "placeholder":
            return self.with_tokens is not None and node not in self.with_tokens
        if isinstance(self(node), Affine):
            return is_ordinary(self(node).const)
        if node.target in PRODUCTS:
            return node.target not in SUMS or node.args[0] in self.plain
        if node.target is aten.log1p.default:  # of a softplus: what else it is taken of may be -1
            return node.args[0] in self.plain and node.args[0].target is aten.exp.default
        return (
            node.target in ORDINARY
            and all(a in self.plain for a in tensor_operands(node))
            and all(
                is_ordinary(a)
                for a in (*node.args, *node.kwargs.values())
                if isinstance(a, (int, float)) and node.target is not aten.slice.Tensor
            )
        )


def is_ordinary(number: float) -> bool:
    """Far from the lowest number of every dtype."""
    return abs(number) <= torch.finfo(torch.float16).max / 2


def lifted(arg: object, node: Node, get: Evaluation) -> Abstract:
    """An operand's value in the dimensions of a broadcast output."""
    value = get(arg)
    if (
        not isinstance(arg, Node) or value is None or isinstance(value, Agreement)
    ):  # which is of the last two dimensions
        return value
    shift = len(shape_of(node)) - len(shape_of(arg))
    return moved(value, {d: d + shift for d in range(len(shape_of(arg)))})


def cleaned(value: Affine, node: Node) -> Affine:
    """Drop slopes that are zero, or run along a dimension of size one."""
    shape = shape_of(node)
    return Affine(value.const, tuple((d, s) for d, s in value.slopes if s != 0 and shape[d] != 1))


def one_per_row(node: Node, like: Node, band: Band) -> bool:
    shift = len(shape_of(like)) - len(shape_of(node))
    return band.key < shift or shape_of(node)[band.key - shift] == 1


def shown(arg: object, like: Node, band: Band, get: Evaluation) -> tuple[KeyMask, ...] | None:
    """What hides entries of an operand of a score matrix."""
    value = lifted(arg, like, get)
    if isinstance(value, Band) and value.outside in HIDING:
        return value.seen if same_axes(value, band) else None
    if arg in get.plain if isinstance(arg, Node) else is_ordinary(arg):
        return ()
    return one(mask_of(arg, like, band, None))


def lowest(value: float, node: Node) -> object:
    """How a filling empties a score: exactly (-inf), practically (the dtype's minimum), as zero, or not at
    all."""
    if value == -math.inf or value == 0:
        return value
    dtype = value_of(node).dtype
    return "min" if dtype.is_floating_point and value <= torch.finfo(dtype).min / 2 else None

"""Pointwise ops: row t reads row t alone.

Most of them need no row, because ``torch.Tag.pointwise`` describes them. These rows are of ops of which more
is known, and of ops that lack the tag.
"""

from typing import Any

from torch.fx import Node

from ..ir import Signature, shape_of
from . import rule
from .facets import CostClass, Form
from .mask_domain import arithmetic, comparisons, fills, layout, logic, normalization
from .mask_domain.bounded import if_nonnegative, if_operands_are
from .signatures import argument, broadcast

FUSED, VIEW = CostClass.FUSED, CostClass.VIEW

SAME: dict[str, Any] = dict(mask=layout.same, bounded=if_operands_are)
rule("aten::clone", "aten::lift_fresh_copy", cost=FUSED, linear="self", form=Form.COPY, **SAME)(broadcast)
rule("aten::detach", "aten::alias", cost=VIEW, linear="self", form=Form.ALIAS, **SAME)(broadcast)
rule("aten::_to_copy", cost=FUSED, linear="self", form=Form.CAST, **SAME)(broadcast)
rule("prims::convert_element_type", cost=FUSED, linear="a", form=Form.CAST, **SAME)(broadcast)
rule("aten::copy", cost=FUSED, linear="self + src", writes=0, form=Form.ASSIGN, mask=layout.copied)(broadcast)

# Arithmetic

for name, terms, transfer in (
    ("neg", "self", arithmetic.negated),
    ("add.Tensor", "self + other", arithmetic.added),
    ("add.Scalar", "self + other", arithmetic.added),
    ("sub.Tensor", "self + other", arithmetic.subtracted),
    ("sub.Scalar", "self + other", arithmetic.subtracted),
    ("mul.Tensor", "self * other", arithmetic.multiplied),
    ("mul.Scalar", "self * other", arithmetic.multiplied),
    ("div.Tensor", "self", arithmetic.divided),
    ("div.Scalar", "self", arithmetic.divided),
    ("where.self", "self + other", fills.chosen),
    ("maximum", None, arithmetic.at_least),
    ("minimum", None, arithmetic.at_most),
    ("clamp_min", None, arithmetic.at_least),
    ("clamp_max", None, arithmetic.at_most),
    ("reciprocal", None, None),
    ("tanh", None, None),
    ("pow.Tensor_Tensor", None, None),
    ("pow.Tensor_Scalar", None, None),
    ("pow.Scalar", None, None),
):
    rule(f"aten::{name}", cost=FUSED, linear=terms, mask=transfer, bounded=if_operands_are)(broadcast)
for name, transfer in (
    ("abs", arithmetic.distance),
    ("exp", normalization.vanished),
    ("sigmoid", normalization.vanished),
    ("relu", normalization.vanished),
):
    rule(f"aten::{name}", cost=FUSED, mask=transfer, bounded=if_operands_are, nonnegative=True)(broadcast)
rule("aten::exp2", cost=FUSED, mask=normalization.vanished, nonnegative=True)(broadcast)
rule("aten::log1p", cost=FUSED, bounded=if_nonnegative)(broadcast)
rule(
    "aten::floor_divide", "aten::div.Tensor_mode", "aten::div.Scalar_mode", cost=FUSED, form=Form.FLOOR_DIVIDE
)(broadcast)
rule(
    "aten::masked_fill.Scalar",
    "aten::masked_fill.Tensor",
    cost=FUSED,
    linear="self + value",
    mask=fills.filled,
)(broadcast)

# Comparisons and logic

for name in ("eq", "ne", "le", "lt", "ge", "gt"):
    rule(
        f"aten::{name}.Tensor",
        f"aten::{name}.Scalar",
        cost=FUSED,
        mask=comparisons.compared,
        form=Form.EQUAL if name == "eq" else Form.COMPARED,
    )(broadcast)
rule("aten::bitwise_and.Tensor", "aten::logical_and", cost=FUSED, mask=logic.conjoined)(broadcast)
rule("aten::bitwise_or.Tensor", "aten::logical_or", cost=FUSED, mask=logic.disjoined)(broadcast)
rule(
    "aten::bitwise_xor.Tensor",
    "aten::bitwise_xor.Scalar",
    "aten::logical_xor",
    cost=FUSED,
    mask=logic.exclusive,
)(broadcast)
rule("aten::bitwise_not", "aten::logical_not", cost=FUSED, mask=logic.inverted)(broadcast)

# Complex numbers

rule("aten::_conj", cost=VIEW, linear="self")(broadcast)
rule("aten::resolve_conj", cost=FUSED, linear="self")(broadcast)
rule("aten::polar", cost=FUSED, linear="abs")(broadcast)
rule("aten::complex", cost=FUSED, linear="real + imag")(broadcast)

# Gradients of activations

GRADIENT: dict[str, Any] = dict(cost=FUSED, linear="grad_output")
rule(
    "aten::threshold_backward",
    "aten::sigmoid_backward",
    mask=normalization.normalized_backward,
    **GRADIENT,
)(broadcast)
rule(
    "aten::gelu_backward",
    "aten::silu_backward",
    "aten::tanh_backward",
    "aten::native_dropout_backward",
    **GRADIENT,
)(broadcast)

# Features of which one half gates the other


@rule("aten::glu", cost=FUSED, bounded=if_operands_are)
def glu(node: Node) -> Signature:
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", -1) % rank
    given, made = (tuple(half if i == dim else i for i in range(rank)) for half in ("halves", None))
    return Signature((given,), (made,), contracts="all")


# Constants in the shape of an operand

rule("aten::fill.Scalar", cost=FUSED, filling="value")(broadcast)
rule("aten::fill.Tensor", cost=FUSED, linear="value", form=Form.ASSIGN)(broadcast)
rule("aten::full_like", cost=FUSED, filling="fill_value")(broadcast)
rule("aten::zeros_like", cost=FUSED, filling=0)(broadcast)
rule("aten::ones_like", cost=FUSED, filling=1)(broadcast)

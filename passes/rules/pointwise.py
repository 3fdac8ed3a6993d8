"""Row t reads row t, and nothing else. Most such ops are known by ``torch.Tag.pointwise``; these lack the
tag, or a facet is known of them."""

from . import rule
from .mask_domain import arithmetic, comparisons, fills, layout, logic, normalization
from .mask_domain.bounded import if_operands_are, of_exponential
from .signatures import broadcast

rule(
    "aten::clone",
    "aten::detach",
    "aten::alias",
    "aten::_to_copy",
    "aten::lift_fresh_copy",
    "prims::convert_element_type",
    mask=layout.same,
    bounded=if_operands_are,
)(broadcast)

rule("aten::copy", mask=layout.copied)(broadcast)
rule("aten::where.self", mask=fills.chosen, bounded=if_operands_are)(broadcast)
rule("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", mask=fills.filled)(broadcast)
rule("aten::add.Tensor", "aten::add.Scalar", mask=arithmetic.added, bounded=if_operands_are)(broadcast)
rule("aten::sub.Tensor", "aten::sub.Scalar", mask=arithmetic.subtracted, bounded=if_operands_are)(broadcast)
rule("aten::mul.Tensor", "aten::mul.Scalar", mask=arithmetic.multiplied, bounded=if_operands_are)(broadcast)
rule("aten::div.Tensor", "aten::div.Scalar", mask=arithmetic.divided, bounded=if_operands_are)(broadcast)
rule("aten::neg", mask=arithmetic.negated, bounded=if_operands_are)(broadcast)
rule("aten::abs", mask=arithmetic.distance, bounded=if_operands_are)(broadcast)
rule("aten::maximum", mask=arithmetic.at_least, bounded=if_operands_are)(broadcast)
rule("aten::exp", "aten::sigmoid", "aten::relu", mask=normalization.vanished, bounded=if_operands_are)(
    broadcast
)
rule("aten::exp2", mask=normalization.vanished)(broadcast)
rule("aten::log1p", bounded=of_exponential)(broadcast)
rule("aten::minimum", mask=logic.conjoined, bounded=if_operands_are)(broadcast)
rule(
    "aten::reciprocal",
    "aten::tanh",
    "aten::pow.Tensor_Tensor",
    "aten::pow.Tensor_Scalar",
    "aten::pow.Scalar",
    bounded=if_operands_are,
)(broadcast)
rule(
    *(
        f"aten::{name}.{kind}"
        for name in ("eq", "ne", "le", "lt", "ge", "gt")
        for kind in ("Tensor", "Scalar")
    ),
    mask=comparisons.compared,
)(broadcast)
rule("aten::bitwise_and.Tensor", "aten::logical_and", mask=logic.conjoined)(broadcast)
rule("aten::bitwise_or.Tensor", "aten::logical_or", mask=logic.disjoined)(broadcast)
rule("aten::bitwise_xor.Tensor", "aten::bitwise_xor.Scalar", "aten::logical_xor", mask=logic.exclusive)(
    broadcast
)
rule("aten::bitwise_not", "aten::logical_not", mask=logic.inverted)(broadcast)
rule("aten::threshold_backward", "aten::sigmoid_backward", mask=normalization.normalized_backward)(broadcast)

rule(
    "aten::_conj",
    "aten::resolve_conj",
    "aten::polar",
    "aten::complex",
    "aten::gelu_backward",
    "aten::silu_backward",
    "aten::tanh_backward",
    "aten::fill.Scalar",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
)(broadcast)

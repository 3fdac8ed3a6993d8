"""Row t reads row t, and nothing else. Most such ops are known by ``torch.Tag.pointwise``; these lack the
tag."""

from . import rule
from .signatures import broadcast

rule(
    "aten::clone",
    "aten::detach",
    "aten::alias",
    "aten::_to_copy",
    "aten::lift_fresh_copy",
    "aten::copy",
    "prims::convert_element_type",
    "aten::where.self",
    "aten::masked_fill.Scalar",
    "aten::masked_fill.Tensor",
    "aten::_conj",
    "aten::resolve_conj",
    "aten::polar",
    "aten::complex",
    "aten::threshold_backward",
    "aten::gelu_backward",
    "aten::silu_backward",
    "aten::tanh_backward",
    "aten::sigmoid_backward",
    "aten::fill.Scalar",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
)(broadcast)

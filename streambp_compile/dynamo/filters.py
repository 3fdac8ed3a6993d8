"""Convolutions along the tokens that keep their number, with filters of any length and in groups, as one
operator; and its gradients."""

from __future__ import annotations

import torch

from ..passes.kernels import filters

streambp = torch.ops.streambp


def filter_of_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: int,
    dilation: int,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A convolution of ``[B, C, T]`` by ``[O, C / groups, K]``, of which tap k reads the row
    ``before - k * dilation`` before its own; as autocast computes it."""
    made = streambp.filtered(x.to(dtype), weight.to(dtype), before, dilation, groups)
    return made if bias is None else made + bias[:, None].to(dtype)


def keep_operands(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def filtered_back(ctx, grad: torch.Tensor):
    (x, weight), (before, dilation, groups) = ctx.saved_tensors, ctx.how
    behind = filters.reach(weight.shape[-1], before, dilation)[1]
    given = filter_grad = None
    if ctx.needs_input_grad[0]:
        given = streambp.filtered(grad, filters.turned(weight, groups), behind, dilation, groups)
    if ctx.needs_input_grad[1]:
        filter_grad = streambp.filter_grad(x, grad, weight, before, dilation, groups)
    return given, filter_grad, None, None, None


torch.library.register_autograd("streambp::filtered", filtered_back, setup_context=keep_operands)

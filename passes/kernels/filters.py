"""Convolutions along the tokens that give a row for every row, and convolutions of receptive fields.

Of the first, row ``t`` is computed from the rows around it; rows before the first and behind the last are
zero. The gradient of the input is such a convolution again, with the filter reversed. That of the filter is
a sum over rows. Of the second, each entry of the batch is a copy of the rows that some tokens read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import define

aten = torch.ops.aten


def reach(taps: int, before: int, dilation: int) -> tuple[int, int]:
    """Return the first and the last row that a row reads, relative to itself."""
    return -before, dilation * (taps - 1) - before


def rows_around(full: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Copy rows ``[start, start+length)``, with zeros where there is no row."""
    out = full.new_zeros([*full.shape[:dim], length, *full.shape[dim + 1 :]])
    first, last = max(0, start), min(full.shape[dim], start + length)
    if last > first:
        out.narrow(dim, first - start, last - first).copy_(full.narrow(dim, first, last - first))
    return out


def rows_around_meta(full: Tensor, dim: int, start, length) -> Tensor:
    return full.new_empty([*full.shape[:dim], length, *full.shape[dim + 1 :]])


def convolved(x: Tensor, weight: Tensor, stride: list, padding: list, dilation: list, groups: int) -> Tensor:
    """Compute ``aten.convolution`` of each entry of the batch. An entry is what some tokens read."""
    none = [0] * len(stride)
    return aten.convolution(x, weight, None, stride, padding, dilation, False, none, groups).contiguous()


def convolved_grad(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list, padding: list, dilation: list, groups: int
) -> Tensor:
    """Compute the gradient of the entries of the batch."""
    how = (None, stride, padding, dilation, False, [0] * len(stride), groups)
    return aten.convolution_backward(grad, x, weight, *how, [True, False, False])[0].contiguous()


def convolved_weight_grad(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list, padding: list, dilation: list, groups: int
) -> Tensor:
    """Compute the gradient of the weight: a sum over the entries of the batch."""
    how = (None, stride, padding, dilation, False, [0] * len(stride), groups)
    return aten.convolution_backward(grad, x, weight, *how, [False, True, False])[1].contiguous()


def convolved_meta(x: Tensor, weight: Tensor, stride: list, padding: list, dilation: list, groups: int):
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    made = [(n + 2 * p - d * (taps - 1) - 1) // s + 1 for n, taps, s, p, d in sizes]
    return x.new_empty([x.shape[0], weight.shape[0], *made])


def padded(x: Tensor, taps: int, before: int, dilation: int) -> Tensor:
    return F.pad(x, (before, reach(taps, before, dilation)[1]))


def filtered(x: Tensor, weight: Tensor, before: int, dilation: int, groups: int) -> Tensor:
    """Compute the convolution of ``[B, C, T]`` by ``[O, C / groups, K]``. Tap k of row t reads row ``t -
    before + k * dilation``."""
    return convolved(padded(x, weight.shape[-1], before, dilation), weight, [1], [0], [dilation], groups)


def filter_grad(x: Tensor, grad: Tensor, weight: Tensor, before: int, dilation: int, groups: int) -> Tensor:
    """Compute the gradient of the weight of `filtered`. The weight is read for its shape alone."""
    rows = padded(x, weight.shape[-1], before, dilation)
    return convolved_weight_grad(grad, rows, weight, [1], [0], [dilation], groups)


def turned(weight: Tensor, groups: int) -> Tensor:
    """Build the filter that takes gradients of rows back to the rows that were read."""
    made, given, taps = weight.shape
    parts = weight.view(groups, made // groups, given, taps).transpose(1, 2).flip(-1)
    return parts.reshape(groups * given, made // groups, taps)


def receptive_fields(
    x: Tensor, dim: int, first: int, count: int, step: int, start: int, width: int
) -> Tensor:
    """Copy the rows of ``[B, ...]`` that each of ``count`` tokens reads, from token ``first`` on. Token t
    reads ``width`` rows along ``dim``, from row ``step * t + start`` on. Rows that do not exist are zeros.

    Returns ``[B, count, ...]``, with ``width`` rows along ``dim``.
    """
    firsts = (first + torch.arange(count, device=x.device)).unsqueeze(1) * step + start
    places = firsts + torch.arange(width, device=x.device)
    rows = x.index_select(dim, places.clamp(0, x.shape[dim] - 1).flatten()).unflatten(dim, places.shape)
    missing = ((places < 0) | (places >= x.shape[dim])).view(*places.shape, *[1] * (x.dim() - 1 - dim))
    return rows.masked_fill(missing, 0).movedim(dim, 1).contiguous()


def receptive_fields_meta(x: Tensor, dim: int, first, count, step: int, start: int, width: int) -> Tensor:
    return x.new_empty([x.shape[0], count, *x.shape[1:dim], width, *x.shape[dim + 1 :]])


define(
    "receptive_fields(Tensor x, int dim, SymInt first, SymInt count, int step, int start, int width) "
    "-> Tensor",
    receptive_fields,
    receptive_fields_meta,
)
HOW = "int[] stride, int[] padding, int[] dilation, int groups"
define(f"convolved(Tensor x, Tensor weight, {HOW}) -> Tensor", convolved, convolved_meta)
define(
    f"convolved_grad(Tensor grad, Tensor x, Tensor weight, {HOW}) -> Tensor",
    convolved_grad,
    lambda grad, x, weight, *how: torch.empty_like(x, memory_format=torch.contiguous_format),
)
define(
    f"convolved_weight_grad(Tensor grad, Tensor x, Tensor weight, {HOW}) -> Tensor",
    convolved_weight_grad,
    lambda grad, x, weight, *how: torch.empty_like(weight, memory_format=torch.contiguous_format),
)
define(
    "filtered(Tensor x, Tensor weight, int before, int dilation, int groups) -> Tensor",
    filtered,
    lambda x, weight, before, dilation, groups: x.new_empty(x.shape[0], weight.shape[0], x.shape[2]),
)
define(
    "filter_grad(Tensor x, Tensor grad, Tensor weight, int before, int dilation, int groups) -> Tensor",
    filter_grad,
    lambda x, grad, weight, before, dilation, groups: torch.empty_like(
        weight, memory_format=torch.contiguous_format
    ),
)
define(
    "rows_around(Tensor full, int dim, SymInt start, SymInt length) -> Tensor", rows_around, rows_around_meta
)


def keep_operands(ctx, inputs: tuple, output: Tensor) -> None:
    x, weight, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def convolved_back(ctx, grad: Tensor):
    given = (grad, *ctx.saved_tensors, *ctx.how)
    of_rows = torch.ops.streambp.convolved_grad(*given) if ctx.needs_input_grad[0] else None
    of_weight = torch.ops.streambp.convolved_weight_grad(*given) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None, None, None, None


torch.library.register_autograd("streambp::convolved", convolved_back, setup_context=keep_operands)


def filtered_back(ctx, grad: Tensor):
    (x, weight), (before, dilation, groups) = ctx.saved_tensors, ctx.how
    behind = reach(weight.shape[-1], before, dilation)[1]
    given = of_weight = None
    if ctx.needs_input_grad[0]:
        given = torch.ops.streambp.filtered(grad, turned(weight, groups), behind, dilation, groups)
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.streambp.filter_grad(x, grad, weight, before, dilation, groups)
    return given, of_weight, None, None, None


torch.library.register_autograd("streambp::filtered", filtered_back, setup_context=keep_operands)

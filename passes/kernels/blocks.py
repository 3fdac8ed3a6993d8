"""Operators that lead from rows of tokens to rows of blocks of tokens, and back.

A sequence that is split into blocks has a row for each token, or a fixed number of rows for each block.
These differ where the last block is short. Chunks hold whole blocks, so that blocks are rows like any
other. Values that blocks exchange exist at full length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import define, nothing


def regrouped(x: Tensor, dim: int, size: int, given: int, made: int) -> Tensor:
    """Truncate a value to its first ``size`` rows, or pad it with zeros behind.

    given, made  rows of a block in the operand and in the result; one of them is 1, where rows are
                 tokens
    """
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]]).contiguous()


def regrouped_meta(x: Tensor, dim: int, size: int, given: int, made: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def copied(x: Tensor, dim: int) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def copied_meta(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def add_among_rows_(rows: Tensor, dim: int, start: int, full: Tensor) -> None:
    """Add rows to those of a value from ``start`` on; rows behind its last one are left out."""
    count = max(0, min(rows.shape[dim], full.shape[dim] - start))
    full.narrow(dim, min(start, full.shape[dim]), count).add_(rows.narrow(dim, 0, count))


define("regrouped(Tensor x, int dim, SymInt size, int given, int made) -> Tensor", regrouped, regrouped_meta)
define("at_once(Tensor x, int dim) -> Tensor", copied, copied_meta)
define("by_block(Tensor x, int dim) -> Tensor", copied, copied_meta)
define("add_among_rows_(Tensor rows, int dim, SymInt start, Tensor(a!) full) -> ()", add_among_rows_, nothing)


def keep_rows(ctx, inputs: tuple, output: Tensor) -> None:
    x, ctx.dim, _, ctx.given, ctx.made = inputs
    ctx.size = x.shape[ctx.dim]


def regrouped_back(ctx, grad: Tensor):
    back = torch.ops.streambp.regrouped(grad, ctx.dim, ctx.size, ctx.made, ctx.given)
    return back, None, None, None, None


def keep_dim(ctx, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim = inputs


torch.library.register_autograd("streambp::regrouped", regrouped_back, setup_context=keep_rows)
torch.library.register_autograd(
    "streambp::at_once",
    lambda ctx, grad: (torch.ops.streambp.by_block(grad, ctx.dim), None),
    setup_context=keep_dim,
)
torch.library.register_autograd(
    "streambp::by_block",
    lambda ctx, grad: (torch.ops.streambp.at_once(grad, ctx.dim), None),
    setup_context=keep_dim,
)

# The operators as calls of torch's own, for a region that runs unchunked.
PLAIN = {
    torch.ops.streambp.regrouped.default: regrouped,
    torch.ops.streambp.at_once.default: copied,
    torch.ops.streambp.by_block.default: copied,
}

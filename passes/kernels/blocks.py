"""Functions of blocks: a sequence is cut into blocks of so many tokens, and each block is mapped by itself.

State-space and linear-attention models in block form compute a block's own part, and a state per block, that
way. A `BlockFunction` is the graph of one such value, for any number of blocks. The operator
``streambp::over_blocks`` applies it; its gradients are block functions again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from .operators import define


class Unit(enum.Enum):
    """What a dimension of an operand, or of the result, counts."""

    ROWS = "rows"  # tokens: one row per token, padded by zeros to full blocks inside
    BLOCKS = "blocks"  # one entry per block
    WHOLE = "whole"  # neither; as a result, it is added up over blocks


@dataclass(frozen=True)
class BlockAxis:
    """Where an operand or a result of a block function has its tokens or blocks."""

    along: Unit
    dim: int = 0


@dataclass(frozen=True)
class BlockFunction:
    """A function that maps each block of tokens by itself.

    module    ``(number of blocks, *operands) → result``; rows come and go as full blocks
    length    tokens per block
    operands  a `BlockAxis` for each operand; at least one has rows
    result    the axis of the result
    shape     of the result; the size of its axis says nothing
    width     bytes per token that are alive at the widest moment inside
    full      only full blocks have a result; a short last one is filled up with its last row, so that its
              numbers are as harmless as those of a row, and what is made of it is dropped
    """

    module: GraphModule
    length: int
    operands: tuple[BlockAxis, ...]
    result: BlockAxis
    shape: tuple[int, ...]
    dtype: torch.dtype
    width: int = 0
    full: bool = False

    def blocks_in(self, rows):
        """How many blocks so many rows give."""
        return rows // self.length if self.full else blocks_in(rows, self.length)

    def rows_of(self, operands: list[Tensor]) -> int:
        """The number of tokens."""
        return next(x.shape[a.dim] for x, a in zip(operands, self.operands) if a.along is Unit.ROWS)


FUNCTIONS: dict[str, BlockFunction] = {}
"""By the name that calls of ``over_blocks`` give."""


def blocks_in(rows, length: int):
    """Blocks of so many rows; the last may be short."""
    return -(-rows // length)


def over_blocks(operands: list[Tensor], function: str) -> Tensor:
    """A block function of a whole sequence, or of some of its blocks."""
    found = FUNCTIONS[function]
    rows = found.rows_of(operands)
    count = blocks_in(rows, found.length)
    given = []
    for x, axis in zip(operands, found.operands):
        if axis.along is Unit.ROWS:
            x = padded_rows(x, axis.dim, count * found.length, found.full)
        elif axis.along is Unit.BLOCKS and found.full:
            x = padded_rows(x, axis.dim, count)
        given.append(x)
    result = found.module(count, *given)
    if found.result.along is not Unit.WHOLE:
        size = rows if found.result.along is Unit.ROWS else found.blocks_in(rows)
        result = result.narrow(found.result.dim, 0, size)
    return result.clone(memory_format=torch.contiguous_format)


def over_blocks_meta(operands: list[Tensor], function: str) -> Tensor:
    found = FUNCTIONS[function]
    rows, shape = found.rows_of(operands), list(found.shape)
    if found.result.along is not Unit.WHOLE:
        per_row = found.result.along is Unit.ROWS
        shape[found.result.dim] = rows if per_row else found.blocks_in(rows)
    return operands[0].new_empty(shape, dtype=found.dtype)


def padded_rows(x: Tensor, dim: int, size: int, repeated: bool = False) -> Tensor:
    """A copy with zero rows behind, up to ``size``; or with its last row, repeated."""
    rows = x.shape[dim]
    out = x.new_zeros(shape_with(x, dim, size))
    out.narrow(dim, 0, rows).copy_(x)
    if repeated and rows:
        out.narrow(dim, rows, size - rows).copy_(x.narrow(dim, rows - 1, 1))
    return out


def shape_with(x: Tensor, dim: int, size) -> list:
    shape = list(x.shape)
    shape[dim] = size
    return shape


define("over_blocks(Tensor[] operands, str function) -> Tensor", over_blocks, over_blocks_meta)
define(
    "padded_rows(Tensor x, int dim, SymInt size, bool repeated=False) -> Tensor",
    padded_rows,
    lambda x, dim, size, repeated=False: x.new_empty(shape_with(x, dim, size)),
)

"""Associative scans in blocks of tokens, as `over_blocks` (blocks.py) streams them.

Torch writes a scan out as pairs of rows, pairs of pairs, and so on over the whole sequence. The same scan in
blocks: each block by itself, then the last rows of the blocks, then every row with the last row of the block
before. Only those last rows exist at full length. (Blelloch, Prefix sums and their applications, 1990.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

Scan = Callable[[Sequence[Tensor]], list[Tensor]]
Combine = Callable[[int, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""Earlier rows with later ones, both along so many more dimensions than the first."""

BLOCKS = (64, 32, 16, 8)  # tokens; powers of two


def scan_in_blocks(
    scan: Callable[..., list[Tensor]],
    operator: Callable,
    leaves: Sequence[Tensor],
    dim: int,
    additional_inputs: tuple,
) -> list[Tensor]:
    """The inclusive scan of rows along the first dimension; Dynamo traces this.

    scan      torch's own, ``(operator, leaves, dim) → leaves``
    operator  combines rows, ``(*left, *right) → results``, many at once along the first dimension
    """
    block = block_for(leaves[0].shape[0])
    if dim != 0 or additional_inputs or not block:
        return scan(operator, leaves, dim, additional_inputs)

    def combine(more: int, left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
        return combined_rows(operator, more, left, right)

    return scan_of_blocks(combine, leaves, block, lambda ends: scan(operator, ends, 0))


def block_for(length: int) -> int:
    """Tokens of a block; 0 for fewer tokens than two blocks."""
    return next((size for size in BLOCKS if length >= 2 * size), 0)


def scan_of_blocks(combine: Combine, leaves: Sequence[Tensor], block: int, scan_ends: Scan) -> list[Tensor]:
    """The scan of rows along the first dimension, in blocks of so many rows.

    combine    earlier rows with later ones
    scan_ends  the scan of the last rows of the blocks
    """
    length = leaves[0].shape[0]
    inside = scan_inside(combine, [in_blocks(x, block) for x in leaves])
    ends = scan_ends([x[:, -1] for x in inside])
    # The first block has none before it; its combination is computed, and not used.
    before = [torch.cat([x[:1], x[:-1]]).unsqueeze(1).expand_as(y) for x, y in zip(ends, inside)]
    combined = combine(1, before, inside)
    first = in_blocks(torch.arange(length, device=leaves[0].device) < block, block)
    return [
        torch.where(first.view(*first.shape, *[1] * (x.dim() - 2)), x, y).flatten(0, 1)[:length]
        for x, y in zip(inside, combined)
    ]


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """``[T, …]`` as ``[T / block, block, …]``, with zero rows behind where that is no whole number."""
    length = rows.shape[0]
    count = (length + block - 1) // block  # of symbols, sympy simplifies this one at once
    if count * block != length:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, count * block - length))
    return rows.unflatten(0, (count, block))


def scan_inside(combine: Combine, rows: Sequence[Tensor]) -> list[Tensor]:
    """The scan of each block by itself: of single rows, of pairs, of fours (Sklansky, 1960)."""
    half = 1
    while half < rows[0].shape[1]:
        parts = [x.unflatten(1, (-1, 2, half)) for x in rows]
        left, right = [x[:, :, 0] for x in parts], [x[:, :, 1] for x in parts]
        ends = [x[:, :, -1:].expand_as(x) for x in left]
        joined = combine(2, ends, right)
        rows = [torch.stack([x, y], 2).flatten(1, 3) for x, y in zip(left, joined)]
        half *= 2
    return list(rows)


def combined_rows(
    operator: Callable, more: int, left: Sequence[Tensor], right: Sequence[Tensor]
) -> list[Tensor]:
    """Rows combined along the first dimension, and so many more."""
    for _ in range(more):
        operator = torch.vmap(operator, in_dims=1, out_dims=1)
    return tree_leaves(operator(*left, *right))

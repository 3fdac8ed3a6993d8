"""Associative scans in blocks of tokens, as `part_blocks` (blocks/blocks.py) streams them.

Torch's own scan combines pairs of rows, then pairs of pairs, and so on over the whole sequence. The scan
here first scans each block by itself, then the last rows of the blocks. It then combines every row with
the scanned last row of the block before. Only those last rows exist at full length. (Blelloch, Prefix
sums and their applications, 1990.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

BLOCKS = (64, 32, 16, 8)  # tokens; powers of two


def scan_in_blocks(
    scan: Callable[..., list[Tensor]],
    operator: Callable,
    leaves: Sequence[Tensor],
    dim: int,
    additional_inputs: tuple,
) -> list[Tensor]:
    """Compute the inclusive scan of rows along the first dimension; Dynamo traces this. Torch's own scan
    runs instead where there are too few rows for two blocks, another dimension, or additional inputs.

    scan      torch's own, ``(operator, leaves, dim) → leaves``
    operator  combines rows, ``(*left, *right) → results``, many at once along the first dimension
    """
    if dim != 0 or additional_inputs or not block_for(leaves[0].shape[0]):
        return scan(operator, leaves, dim, additional_inputs)
    return scan_of_rows(operator, leaves)


def scan_of_rows(operator: Callable, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Scan rows in blocks, and the last rows of the blocks in blocks again, while there are many."""
    length = leaves[0].shape[0]
    block = block_for(length)
    if block:
        return scan_of_blocks(operator, leaves, block)
    few = 2 * min(BLOCKS)
    padded = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, few - length)).unsqueeze(0) for x in leaves]
    return [x[0, :length] for x in scan_inside(operator, padded)]


def block_for(length: int) -> int:
    """Return the largest block size, in tokens, of which two fit into a length; 0 if none does."""
    return next((size for size in BLOCKS if length >= 2 * size), 0)


def scan_of_blocks(operator: Callable, leaves: Sequence[Tensor], block: int) -> list[Tensor]:
    """Scan rows along the first dimension, in blocks of ``block`` rows."""
    length = leaves[0].shape[0]
    inside = scan_inside(operator, [in_blocks(x, block) for x in leaves])
    ends = scan_of_rows(operator, [x[:, -1] for x in inside])
    # No block comes before the first: its combination is computed, but not used.
    before = [torch.cat([x[:1], x[:-1]]).unsqueeze(1).expand_as(y) for x, y in zip(ends, inside)]
    combined = combined_rows(operator, 1, before, inside)
    first = in_blocks(torch.arange(length, device=leaves[0].device) < block, block)
    return [
        torch.where(first.view(*first.shape, *[1] * (x.dim() - 2)), x, y).flatten(0, 1)[:length]
        for x, y in zip(inside, combined)
    ]


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """Reshape ``[T, …]`` to ``[T / block, block, …]``. Zero rows at the end fill the last block."""
    length = rows.shape[0]
    count = (length + block - 1) // block  # sympy simplifies this form immediately, if the length is a symbol
    # Also where no row is missing: a symbolic length itself cannot be split into blocks of a known size.
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, count * block - length))
    return rows.unflatten(0, (count, block))


def scan_inside(operator: Callable, rows: Sequence[Tensor]) -> list[Tensor]:
    """Scan each block by itself: combine single rows, then pairs, then groups of four, … (Sklansky, 1960)."""
    half = 1
    while half < rows[0].shape[1]:
        parts = [x.unflatten(1, (x.shape[1] // (2 * half), 2, half)) for x in rows]
        left, right = [x[:, :, 0] for x in parts], [x[:, :, 1] for x in parts]
        ends = [x[:, :, -1:].expand_as(x) for x in left]
        joined = combined_rows(operator, 2, ends, right)
        rows = [torch.stack([x, y], 2).flatten(1, 3) for x, y in zip(left, joined)]
        half *= 2
    return list(rows)


def combined_rows(
    operator: Callable, more: int, left: Sequence[Tensor], right: Sequence[Tensor]
) -> list[Tensor]:
    """Combine rows along the first dimension and ``more`` further ones. The operator itself handles the
    first dimension alone."""
    for _ in range(more):
        operator = torch.vmap(operator, in_dims=1, out_dims=1)
    return tree_leaves(operator(*left, *right))

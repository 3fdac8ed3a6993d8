"""Diagonals of square matrices, as sums of the entries where a row meets its own column.

A view of a diagonal steps along rows and columns at once, and no chunk of rows can be cut out of that.
So entries off the diagonal are masked by a comparison of places, and a sum over columns leaves one
number per row. These are decompositions: torch calls them in place of the operators, on values whose
sizes may be symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir import is_equal


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Compute ``x.diagonal(offset, dim1, dim2)``, whose entries run along the last dimension."""
    row, column = dim1 % x.dim(), dim2 % x.dim()
    if not is_square(x.shape, row, column):
        return NotImplemented
    shown = torch.where(places(x.shape, offset, row, column, x.device), x, x.new_zeros(()))
    entries = shown.sum(column, dtype=x.dtype).movedim(row - (row > column), -1)
    rows = x.shape[row]
    return entries[..., : rows - offset] if offset > 0 else entries[..., -offset:] if offset else entries


def diagonal_backward(grad: Tensor, sizes: list[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """Build a matrix of zeros, with a gradient on the diagonal."""
    row, column = dim1 % len(sizes), dim2 % len(sizes)
    if not is_square(sizes, row, column):
        return NotImplemented
    entries = along(grad, offset, row, column)
    at = places(sizes, offset, row, column, grad.device)
    return torch.where(at, entries, grad.new_zeros(()))


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Replace the entries on the diagonal of a matrix."""
    row, column = dim1 % x.dim(), dim2 % x.dim()
    if not is_square(x.shape, row, column):
        return NotImplemented
    entries = along(src, offset, row, column)
    return torch.where(places(x.shape, offset, row, column, x.device), entries, x)


def is_square(sizes, row: int, column: int) -> bool:
    """Does a matrix have as many rows as columns, at every length?"""
    return is_equal(sizes[row], sizes[column])


def places(sizes, offset: int, row: int, column: int, device: torch.device) -> Tensor:
    """Mark the diagonal of a matrix by booleans that broadcast against it."""

    def counted(dim: int) -> Tensor:
        return torch.arange(sizes[dim], device=device).view(-1, *[1] * (len(sizes) - 1 - dim))

    return counted(row) + offset == counted(column)


def along(entries: Tensor, offset: int, row: int, column: int) -> Tensor:
    """Place the entries of a diagonal in their rows, with zeros where a row has none."""
    if offset:
        entries = torch.nn.functional.pad(entries, (0, offset) if offset > 0 else (-offset, 0))
    return entries.movedim(-1, row - (row > column)).unsqueeze(column)

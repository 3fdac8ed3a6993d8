"""Functions of the rows that a mask picks: an expert, applied to the tokens that a router sends to it.

The number of picked rows depends on the data. Each picked row is mapped by itself, and comes back to its
own place, so that the whole is a function of rows like any other: a chunk picks among its own rows. A
`PickedFunction` is the graph of the function, for any number of picked rows. Its operators apply it; its
gradients are such functions again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from .operators import define


@dataclass(frozen=True)
class Picked:
    """The way in which an operand is read, or a result written, where the mask is true.

    dims   for each of its leading dimensions, the same dimension of the mask; none for a value that is
           read whole (a weight), or for a result that is added up over all picked rows (its gradient)
    shape  of a result; the sizes of its leading dimensions are not read
    dtype  of a result
    added  several picked rows may come to one place, and are added up there; otherwise the last one
           stays
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    added: bool = True


@dataclass(frozen=True)
class PickedFunction:
    """A function of the rows at which a mask is true.

    module    ``(number of picked rows, *operands) → list of results``; picked rows are the first
              dimension
    operands  the way in which each operand behind the mask is read
    results   the way in which each result is written
    width     bytes per picked row that are alive at the widest moment inside
    wanted    operands that have gradients, by their index; a gradient function has none
    """

    module: GraphModule
    operands: tuple[Picked, ...]
    results: tuple[Picked, ...]
    width: int = 0
    wanted: tuple[int, ...] = ()


PICKED_FUNCTIONS: dict[str, PickedFunction] = {}
"""Functions by the name that calls of the operator give, a hash of their contents. Compiled bodies call them
by that name, so none is replaced or removed while the process lives."""


def over_picked(operands: list[Tensor], function: str) -> list[Tensor]:
    """Apply a function to the picked rows.

    operands  the mask (booleans), then those of the function

    Returns its results, which are zero where nothing was picked.
    """
    found, mask = PICKED_FUNCTIONS[function], operands[0]
    places = mask.nonzero().unbind(1)
    given = [look_up_rows(x, how, places) for x, how in zip(operands[1:], found.operands)]
    rows = found.module(places[0].shape[0], *given)
    return [put_rows(mask, x, how, places) for x, how in zip(rows, found.results)]


def look_up_rows(x: Tensor, how: Picked, places: tuple[Tensor, ...]) -> Tensor:
    return x[tuple(places[d] for d in how.dims)] if how.dims else x


def put_rows(mask: Tensor, rows: Tensor, how: Picked, places: tuple[Tensor, ...]) -> Tensor:
    if not how.dims:
        return rows.contiguous()
    out = rows.new_zeros(result_shape(mask, how))
    return out.index_put_(tuple(places[d] for d in how.dims), rows, accumulate=how.added)


def result_shape(mask: Tensor, how: Picked) -> list:
    return [*(mask.shape[d] for d in how.dims), *how.shape[len(how.dims) :]]


def over_picked_meta(operands: list[Tensor], function: str) -> list[Tensor]:
    mask, results = operands[0], PICKED_FUNCTIONS[function].results
    return [mask.new_empty(result_shape(mask, how), dtype=how.dtype) for how in results]


def scratch(operands: list[Tensor], function: str) -> int:
    """Count the bytes inside a call that picks every row once."""
    found = PICKED_FUNCTIONS[function]
    return found.width * most_rows(operands[0], found)


def most_rows(mask: Tensor, found: PickedFunction) -> int:
    """Count the rows that a mask could pick."""
    picking = min((how.dims for how in (*found.operands, *found.results) if how.dims), key=len)
    return math.prod(mask.shape[d] for d in picking)


# Two names for one kernel: results that have a row per token, and results that are sums over tokens.
SCHEMA = "(Tensor[] operands, str function) -> Tensor[]"
for _name in ("picked_rows", "picked_sums"):
    define(f"{_name}{SCHEMA}", over_picked, over_picked_meta, composed=False, scratch=scratch)

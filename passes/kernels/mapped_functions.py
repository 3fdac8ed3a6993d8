"""Functions that are mapped over rows, and the operators that call them.

A `MappedFunction` is a graph that `FUNCTIONS` holds under a name of its contents. Four operators call one by
that name:

- ``picked_rows`` and ``picked_sums`` apply it to the rows that a mask picks: an expert, applied to the
  tokens that a router sends to it. The number of picked rows depends on the data. Each picked row is mapped
  by itself, and comes back to its own place, so that a chunk picks among its own rows.
- ``token_loop`` applies it to one token after another: each state depends on the token's rows and the state
  before. It continues from the state before a chunk.
- ``token_loop_back`` runs backwards: a row of its result is the gradient that a token gives to the state
  before it.

Gradients are such functions again, under names that begin with that of the function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from .operators import define


@dataclass(frozen=True)
class MappedValue:
    """The way in which a function reads an operand, or the way in which its result is written.

    dims   for each of its leading dimensions, the same dimension of the mask, or of the tokens; none for a
           value that is read whole (a weight), or for a result that is added up over all rows (its gradient)
    shape  of a result; the sizes of its leading dimensions are not read
    dtype  of the value
    added  several picked rows may come to one place, and are added up there; otherwise the last one
           stays
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    added: bool = True


@dataclass(frozen=True)
class MappedFunction:
    """A function of rows.

    module    ``(number of rows, *operands) → list of results``. Rows of picked operands and results are the
              first dimension. A step of a loop reads one row, without that dimension: ``(1, state,
              *operands) → [state]``
    operands  the way in which each operand is read; neither the mask nor the state is one. The first operand
              of a loop has a row per token
    results   the way in which each result is written
    width     bytes per row that are alive at the widest moment inside
    wanted    operands that have gradients, by their index; a gradient function has none
    """

    module: GraphModule
    operands: tuple[MappedValue, ...]
    results: tuple[MappedValue, ...]
    width: int = 0
    wanted: tuple[int, ...] = ()


FUNCTIONS: dict[str, MappedFunction] = {}
"""Functions by the name that calls of the operators give, a hash of their contents. Compiled bodies call them
by that name, so none is replaced or removed while the process lives."""


def over_picked(operands: list[Tensor], function: str) -> list[Tensor]:
    """Apply a function to the picked rows.

    operands  the mask (booleans), then those of the function

    Returns its results, which are zero where nothing was picked.
    """
    found, mask = FUNCTIONS[function], operands[0]
    places = mask.nonzero().unbind(1)
    given = [look_up_rows(x, how, places) for x, how in zip(operands[1:], found.operands)]
    rows = found.module(places[0].shape[0], *given)
    return [put_rows(mask, x, how, places) for x, how in zip(rows, found.results)]


def look_up_rows(x: Tensor, how: MappedValue, places: tuple[Tensor, ...]) -> Tensor:
    return x[tuple(places[d] for d in how.dims)] if how.dims else x


def put_rows(mask: Tensor, rows: Tensor, how: MappedValue, places: tuple[Tensor, ...]) -> Tensor:
    if not how.dims:
        return rows.contiguous()
    out = rows.new_zeros(result_shape(mask, how))
    return out.index_put_(tuple(places[d] for d in how.dims), rows, accumulate=how.added)


def result_shape(rows: Tensor, how: MappedValue) -> list:
    return [*(rows.shape[d] for d in how.dims), *how.shape[len(how.dims) :]]


def over_picked_meta(operands: list[Tensor], function: str) -> list[Tensor]:
    return [blank(operands[0], how) for how in FUNCTIONS[function].results]


def blank(rows: Tensor, how: MappedValue) -> Tensor:
    """Create memory for a result, of as many rows as the mask or the tokens have."""
    return rows.new_empty(result_shape(rows, how), dtype=how.dtype)


def scratch(operands: list[Tensor], function: str) -> int:
    """Count the bytes inside a call that picks every row once."""
    found = FUNCTIONS[function]
    return found.width * most_rows(operands[0], found)


def most_rows(mask: Tensor, found: MappedFunction) -> int:
    """Count the rows that a mask could pick."""
    picking = min((how.dims for how in (*found.operands, *found.results) if how.dims), key=len)
    return math.prod(mask.shape[d] for d in picking)


def token_loop(operands: list[Tensor], function: str, state: Tensor | None) -> Tensor:
    """Compute the states after each token, ``[T, size]``. ``state`` is the one before the first, ``[1,
    size]``; None stands for zeros."""
    found, out = FUNCTIONS[function], states_meta(operands, function, state)
    now = first_state(out, state)
    for t in range(len(out)):
        (now,) = found.module(1, now, *at_token(t, operands, found))
        out[t] = now
    return out


def token_loop_back(
    grad: Tensor, before: Tensor, operands: list[Tensor], function: str, state: Tensor | None
) -> Tensor:
    """Compute the gradient that each token t gives to the state before it, ``before[t]``.

    grad   of the state after each token, without the part that later tokens give, ``[T, size]``
    state  the part that the token behind the last gives, ``[1, size]``
    """
    found, out = FUNCTIONS[f"{function}_back"], states_meta(operands, function, state)
    grad, before = grad.to(out.dtype), before.to(out.dtype)
    later = first_state(out, state)
    for t in reversed(range(len(out))):
        (later,) = found.module(1, grad[t] + later, before[t], *at_token(t, operands, found))
        out[t] = later
    return out


def at_token(t: int, operands: list[Tensor], found: MappedFunction) -> list[Tensor]:
    """Return the operands of one step, in their own dtypes: a chunk may come in a wider one."""
    given = [x[t] if how.dims else x for x, how in zip(operands, found.operands)]
    return [x.to(how.dtype) for x, how in zip(given, found.operands)]


def first_state(out: Tensor, state: Tensor | None) -> Tensor:
    return out.new_zeros(out.shape[1:]) if state is None else state[0].to(out.dtype)


def states_meta(operands: list[Tensor], function: str, state: Tensor | None) -> Tensor:
    return blank(operands[0], FUNCTIONS[function].results[0])


# Two names for one kernel: results that have a row per token, and results that are sums over tokens.
SCHEMA = "(Tensor[] operands, str function) -> Tensor[]"
for _name in ("picked_rows", "picked_sums"):
    define(f"{_name}{SCHEMA}", over_picked, over_picked_meta, composed=False, scratch=scratch)
define(
    "token_loop(Tensor[] operands, str function, Tensor? state) -> Tensor",
    token_loop,
    states_meta,
    composed=False,
)
define(
    "token_loop_back(Tensor grad, Tensor before, Tensor[] operands, str function, Tensor? state) -> Tensor",
    token_loop_back,
    lambda grad, before, operands, function, state: states_meta(operands, function, state),
    composed=False,
)

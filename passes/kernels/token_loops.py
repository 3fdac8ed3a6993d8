"""Loops over the tokens of a sequence: each state depends on the token's rows and the state before.

A `TokenFunction` is one step. The operator ``streambp::token_loop`` computes the states of all tokens,
and continues from the state before a chunk. ``streambp::token_loop_back`` runs backwards: a row of its
result is the gradient that a token gives to the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from .operators import define


@dataclass(frozen=True)
class TokenFunction:
    """One step of a loop over tokens. States and their gradients are vectors.

    step    ``(state, *rows, *wholes) → state``
    back    ``(gradient of the new state, state, *rows, *wholes) → gradient of the state``
    size    numbers in a state
    dtypes  of rows, then of wholes: a chunk may come in a wider one
    wanted  whether rows and wholes want gradients
    """

    step: GraphModule
    back: GraphModule
    size: int
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[bool, ...]


TOKEN_FUNCTIONS: dict[str, TokenFunction] = {}
"""Functions by the name that calls of ``token_loop`` give, a hash of their contents. Compiled bodies call
them by that name, so none is replaced or removed while the process lives."""


def token_loop(rows: list[Tensor], wholes: list[Tensor], function: str, state: Tensor | None) -> Tensor:
    """Compute the states after each token, ``[T, size]``. ``state`` is the one before the first, ``[1,
    size]``; None stands for zeros."""
    found, out, given = prepared(rows, wholes, function)
    now = out.new_zeros(found.size) if state is None else state[0].to(found.dtype)
    for t in range(len(out)):
        now = found.step(now, *(x[t] for x in given[: len(rows)]), *given[len(rows) :])
        out[t] = now
    return out


def token_loop_back(
    grad: Tensor,
    before: Tensor,
    rows: list[Tensor],
    wholes: list[Tensor],
    function: str,
    state: Tensor | None,
) -> Tensor:
    """Compute the gradient that each token t gives to the state before it, ``before[t]``.

    grad   of the state after each token, without the part that later tokens give, ``[T, size]``
    state  the part that the token behind the last gives, ``[1, size]``
    """
    found, out, given = prepared(rows, wholes, function)
    grad, before = grad.to(found.dtype), before.to(found.dtype)
    later = out.new_zeros(found.size) if state is None else state[0].to(found.dtype)
    for t in reversed(range(len(out))):
        at_token = (x[t] for x in given[: len(rows)])
        later = found.back(grad[t] + later, before[t], *at_token, *given[len(rows) :])
        out[t] = later
    return out


def prepared(
    rows: list[Tensor], wholes: list[Tensor], function: str
) -> tuple[TokenFunction, Tensor, list[Tensor]]:
    """Return the function of a name, memory for its states, and its operands in their own dtypes."""
    found = TOKEN_FUNCTIONS[function]
    given = [x.to(dtype) for x, dtype in zip([*rows, *wholes], found.dtypes)]
    return found, rows[0].new_empty((rows[0].shape[0], found.size), dtype=found.dtype), given


def states_meta(rows: list[Tensor], wholes: list[Tensor], function: str, state: Tensor | None) -> Tensor:
    found = TOKEN_FUNCTIONS[function]
    return rows[0].new_empty((rows[0].shape[0], found.size), dtype=found.dtype)


define(
    "token_loop(Tensor[] rows, Tensor[] wholes, str function, Tensor? state) -> Tensor",
    token_loop,
    states_meta,
    composed=False,
)
define(
    "token_loop_back(Tensor grad, Tensor before, Tensor[] rows, Tensor[] wholes, str function, "
    "Tensor? state) -> Tensor",
    token_loop_back,
    lambda grad, before, rows, wholes, function, state: states_meta(rows, wholes, function, state),
    composed=False,
)

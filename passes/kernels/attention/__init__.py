"""The streaming attention operators, whose kernel is chosen by name.

``attention`` is one step of a sweep, ``attention_backward_`` its gradient with accumulators for keys and
values; ``attention_backward`` is the gradient of all rows at once, as joint graphs have it.

ranges  ``[slots, B, C, 2]`` (B and C may be 1), on the host, in place of a mask: the keys that each row
        sees (`ranges`)
slot    which of these belong to this call
kernel  the kernel (`selection.choose` picks it when a chunk body is written); without a name, a kernel runs
        that every device of that type has
uneven  the kernel for calls whose rows and keys the ranges decide
"""

from __future__ import annotations

import torch

from ..operators import define, nothing
from .layout import heads_last
from .selection import STAND_INS, Attention, KernelChoice, Target, choose, in_one_call, scratch_of
from .streaming import attention_backward, attention_backward_, attention_forward, backward_meta, forward_meta

__all__ = ["STAND_INS", "Attention", "KernelChoice", "Target", "choose", "in_one_call", "scratch_of"]


def join_triton_(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    from .join_triton import join_ as launch

    launch(out, lse, more, more_lse)


OPERANDS = "Tensor query, Tensor key, Tensor value"
OPTIONS = "Tensor? mask, bool causal, float scale"
BY_RANGES = "Tensor? ranges=None, int slot=0, str kernel='', str uneven=''"
define(
    f"attention({OPERANDS}, {OPTIONS}, SymInt start, {BY_RANGES}) -> (Tensor, Tensor)",
    attention_forward,
    forward_meta,
)
define(
    f"attention_backward(Tensor grad, {OPERANDS}, Tensor out, Tensor lse, {OPTIONS}, {BY_RANGES})"
    " -> (Tensor, Tensor, Tensor)",
    attention_backward,
    lambda grad, q, k, v, *_: (heads_last(q.shape, q), torch.empty_like(k), torch.empty_like(v)),
)
define(
    "join_triton_(Tensor(a!) out, Tensor(b!) lse, Tensor more, Tensor more_lse) -> ()",
    join_triton_,
    nothing,
    composed=False,
)
define(
    f"attention_backward_(Tensor grad, {OPERANDS}, Tensor out, Tensor lse, {OPTIONS}, SymInt start,"
    f" Tensor(a!) key_grad, Tensor(b!) value_grad, {BY_RANGES}) -> Tensor",
    attention_backward_,
    backward_meta,
)

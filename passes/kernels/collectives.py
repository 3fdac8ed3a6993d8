"""Gathering and scattering along any dimension, and exchanges of parts that are waited for at once.

Torch's collectives gather and scatter along the first dimension alone. These operators move the parts of
the processes before or after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .operators import define


def gathered(part: Tensor, dim: int, processes: int, group: str) -> Tensor:
    """Concatenate the parts of all processes of a group along ``dim``."""
    ops = torch.ops._c10d_functional
    parts = ops.wait_tensor(ops.all_gather_into_tensor(part.contiguous(), processes, group))
    return parts.view(processes, *part.shape).movedim(0, dim).flatten(dim, dim + 1)


def scattered(whole: Tensor, dim: int, reduction: str, processes: int, group: str) -> Tensor:
    """Reduce a value over all processes of a group, and return this process's part along ``dim``."""
    ops = torch.ops._c10d_functional
    parts = whole.unflatten(dim, (processes, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    own = ops.wait_tensor(ops.reduce_scatter_tensor(parts, reduction, processes, group))
    return own.view([*whole.shape[:dim], whole.shape[dim] // processes, *whole.shape[dim + 1 :]])


def exchanged(parts: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Send ``sent[i]`` rows to each process i of a group, and concatenate the rows that all processes send.
    Rows run along the first dimension; ``received[i]`` of them come from process i."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(parts.contiguous(), received, sent, group))


define(
    "gathered(Tensor part, int dim, int processes, str group) -> Tensor",
    gathered,
    lambda part, dim, processes, group: part.new_empty(
        [*part.shape[:dim], part.shape[dim] * processes, *part.shape[dim + 1 :]]
    ),
)
define(
    "scattered(Tensor whole, int dim, str reduction, int processes, str group) -> Tensor",
    scattered,
    lambda whole, dim, reduction, processes, group: whole.new_empty(
        [*whole.shape[:dim], whole.shape[dim] // processes, *whole.shape[dim + 1 :]]
    ),
)
define(
    "exchanged(Tensor parts, SymInt[] received, SymInt[] sent, str group) -> Tensor",
    exchanged,
    lambda parts, received, sent, group: parts.new_empty([sum(received), *parts.shape[1:]]),
)

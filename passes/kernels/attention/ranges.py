"""Ranges of keys in place of a mask: each row sees all keys from its first to its last.

Padding and packed documents show a row such keys. Where rows follow one another, so that their ranges
begin at the same key and end at the same key or one key later each, they are one *run*, and a kernel
attends without a mask. Keys that no row of a run sees are not read.

Ranges lie in the memory of the host, ``[B, C, 2]``: for each row its first key, and the key behind its
last one. A row without keys has two zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive rows, which see the keys from ``first`` to before ``stop``.

    stop   of the first row
    grows  does each further row see one key more?
    """

    rows: slice
    first: int
    stop: int
    grows: bool

    @property
    def keys(self) -> int:
        """The number of keys that the last row sees."""
        return self.stop - self.first + self.grows * (self.rows.stop - self.rows.start - 1)

    @property
    def diagonal(self) -> int | None:
        """Row i sees none of the run's own keys behind ``diagonal + i``; None: it sees all of them."""
        return self.stop - self.first - 1 if self.grows else None


def runs(ranges: Tensor) -> Iterator[Run]:
    """Yield the runs of one sequence's rows, ``[C, 2]``, in order."""
    first, stop = ranges.unbind(-1)
    step = stop.diff()
    follows = (first.diff() == 0) & ((step == 0) | (step == 1))
    turns = follows[1:] & follows[:-1] & (step[1:] != step[:-1])
    begins = torch.ones(len(ranges), dtype=torch.bool)
    begins[1:] = ~follows
    begins[2:] |= turns
    starts = begins.nonzero().flatten().tolist()
    for start, end in zip(starts, [*starts[1:], len(ranges)]):
        grows = end - start > 1 and bool(step[start])
        yield Run(slice(start, end), int(first[start]), int(stop[start]), grows)


def hides_nothing(ranges: Tensor, keys: int, causal: bool, start: int) -> bool:
    """Do all rows of a chunk see all keys, or all up to their own?"""
    rows = ranges.shape[-2]
    last = torch.arange(start + 1, start + rows + 1) if causal else torch.full((rows,), keys)
    usual = (ranges[..., 0] == 0) & (ranges[..., 1] == last)
    return bool(usual.all().item())  # a simulation, whose tensors hold no numbers, reads one for any item


def sequences(ranges: Tensor) -> list[slice]:
    """Group sequences that are attended to in one call: all of them, if their ranges are equal."""
    count = len(ranges)
    if bool((ranges == ranges[:1]).all()):
        return [slice(0, count)]
    return [slice(i, i + 1) for i in range(count)]

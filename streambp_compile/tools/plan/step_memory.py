"""The memory of a step of a few layers, and that of the same step with more of them.

Equal layers take equal bytes. From the forward of the first layer to the backward of the first, a deeper
model also holds the saved inputs of its further layers; all other memory is the same at every depth.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from dataclasses import dataclass

import torch

from ...runtime.memory_simulation import Ledger


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step above weights and gradients.

    peak     the most at any time
    growing  the most while saved inputs of layers wait
    saved    bytes that wait between forward and backward
    """

    peak: int
    growing: int
    saved: int

    def deeper(self, saved: float) -> StepMemory:
        """Compute the memory of the same step of a model that saves ``saved`` bytes more."""
        growing = self.growing + round(saved)
        return StepMemory(max(self.peak, growing), growing, self.saved + round(saved))


class StepLedger(Ledger):
    """Counts a step, and notes while the saved inputs of layers wait. Saved inputs are those storages of one
    size that make up most of the memory that outlives the forward."""

    def __init__(self, device: str = "cpu"):
        super().__init__(device)
        self.numbers = itertools.count()
        self.alive: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.saved, self.growing = 0, None

    def count(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        before = self.held
        super().count(value)
        if self.held > before:
            number = next(self.numbers)
            self.alive[number] = self.held - before
            weakref.finalize(storage, self.gone, number)

    def gone(self, number: int) -> None:
        self.alive.pop(number)
        self.waiting.discard(number)
        if self.saved and self.growing is None and not self.waiting:
            self.growing = self.peak

    def forward_ended(self) -> None:
        self.saved = sum(self.alive.values())
        sizes = Counter(self.alive.values())
        size, times = max(sizes.items(), key=lambda s: s[0] * s[1] * (s[1] > 1), default=(0, 0))
        if times > 1:
            self.waiting = {n for n, taken in self.alive.items() if taken == size}

    def memory(self) -> StepMemory:
        return StepMemory(self.peak, self.peak if self.growing is None else self.growing, self.saved)

"""Memory that a training step on a GPU may take beyond its default plan, where the user states no budget.

Not all memory that is free when a step begins may be used for its activations. Gradients and optimizer
states may not exist yet, and others (a second call, another model, buckets of an engine) allocate
between its forward and its backward. So the first steps run by the default plan. The allocator's peak
counter, which is read and never reset, then shows how much others took meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import internals

MARGIN = 0.05  # share of the device's memory, never spent: for fragments and memory that no simulation sees
UNSEEN = 2  # steps that must end before their measurements are used


@dataclass(frozen=True)
class Memory:
    """The counters of a GPU, in bytes.

    total      of the device
    free       now, the allocator's unused memory included
    allocated  now
    peak       the most that was allocated, since the program began or since the last reset of the
               counter
    to_come    of gradients that the leaves among some values do not have yet
    """

    total: int
    free: Callable[[], int]
    allocated: Callable[[], int]
    peak: Callable[[], int]
    to_come: Callable[[Sequence[object]], int]


@dataclass(frozen=True)
class Start:
    """A step that begins: bytes allocated, the peak so far, and the bytes that the step takes by itself."""

    allocated: int
    peak: int
    own: int


class SpareMemory:
    """Memory that steps of one compiled function may take, learnt from its first steps.

    failed  a backward did not end: steps take no more than the default plan from then on
    """

    def __init__(self, memory: Memory):
        self.memory = memory
        self.ended = 0
        self.certain: list[int] = []  # bytes that others took during a step that moved the peak counter
        self.at_most: list[int] = []  # an upper bound of them for a step that did not
        self.failed = self.is_under_way = False

    @property
    def is_learnt(self) -> bool:
        return self.ended >= UNSEEN

    @property
    def others(self) -> int:
        """Bytes that others take during a step."""
        return max(self.certain) if self.certain else min(self.at_most, default=0)

    def room(self, values: Sequence[object]) -> int:
        """Compute the bytes above weights and gradients that a step on these values may take now."""
        memory = self.memory
        return memory.free() - memory.to_come(values) - self.others - int(MARGIN * memory.total)

    def start(self, values: Sequence[object], needed: int) -> Start:
        """Record the allocated memory when a step begins.

        needed  bytes that the step takes above weights and gradients, by its simulation
        """
        if self.is_under_way and not internals.in_backward():
            self.failed, self.is_under_way = True, False
        memory = self.memory
        return Start(memory.allocated(), memory.peak(), needed + memory.to_come(values))

    def watch(self, results: Sequence[object], start: Start) -> None:
        """Register hooks that note when the backward of these results begins and ends."""
        begun: list[bool] = []

        def begin(_gradient: torch.Tensor) -> None:
            if not begun:
                begun.append(True)
                self.is_under_way = True
                internals.when_backward_ends(lambda: self.end(start))

        for value in results:
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                value.register_hook(begin)

    def end(self, start: Start) -> None:
        """Record that a backward has ended, and how much others took beside this step."""
        self.is_under_way = False
        self.ended += 1
        if self.ended > UNSEEN:
            return
        peak = self.memory.peak()
        known = self.at_most if peak == start.peak else self.certain
        known.append(max(0, peak - start.allocated - start.own))

"""Limits of a step's memory, and the plan within each: the user's budget, or a GPU's free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ..internals import log
from .chain_plan import ChainPlan, Costs, NoPlan, estimated, find_plan

Lengths = tuple[int, ...]
CERTAIN = 0.7  # share of free memory: a step that is estimated to take less is not simulated
SPARE = 0.02  # share of a budget left for memory inside kernels, such as copies that oneDNN makes in bfloat16


class OverBudget(ValueError):
    """No plan fits into ``memory_budget``. The text names the smallest budget and the longest sequence that
    fit."""


class Limit(Protocol):
    """A limit of a step's memory.

    spends  may a plan take more than the default one, to be faster?
    """

    @property
    def spends(self) -> bool: ...

    def find(
        self, costs: Sequence[Costs], lengths: Lengths, peak_of: Callable[[ChainPlan], int]
    ) -> ChainPlan:
        """Find the plan for a chain of these costs, for sequences of these lengths."""


@dataclass(frozen=True)
class Budget:
    """A budget that the user states: the fastest plan that is predicted to fit with a little to spare.

    bytes  above weights and their gradients
    lossy  may a plan be taken by which gradients are not exact?
    """

    bytes: int
    may_offload: bool = True
    lossy: bool = False
    spends = True

    def find(
        self, costs: Sequence[Costs], lengths: Lengths, peak_of: Callable[[ChainPlan], int]
    ) -> ChainPlan:
        """Find the fastest plan that fits into the budget. Raises `OverBudget`."""
        room = int(self.bytes * (1 - SPARE))
        try:
            return find_plan(costs, room, peak_of, self.may_offload, self.lossy)
        except NoPlan as error:
            least = math.ceil(error.least / (1 - SPARE))
            refuse_budget(self.bytes, least, lengths, max(c.totals for c in costs))


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of a GPU, where the user states no budget: the default plan, unless it would not fit.

    bytes  returns the bytes that are free now
    tell   receives a text about any plan other than the default one
    """

    bytes: Callable[[], int]
    tell: Callable[[str], None]
    spends = False

    def find(
        self, costs: Sequence[Costs], lengths: Lengths, peak_of: Callable[[ChainPlan], int]
    ) -> ChainPlan:
        default, free = ChainPlan.default(len(costs)), self.bytes()
        if estimated(costs) <= CERTAIN * free:
            return default
        try:
            plan = find_plan(costs, free, peak_of, spend=self.spends)
        except NoPlan as error:
            plan = error.leanest
        except Exception:  # an operator without a fake form: the user asked for no plan
            log.debug("simulating a step failed", exc_info=True)
            plan = default
        if plan != default:
            self.tell(
                f"A step on {' and '.join(map(str, lengths))} tokens would not fit into the "
                f"{free / 2**20:.1f} MiB that are free on the GPU, so it runs by a leaner plan: {plan}. Set "
                "memory_budget to choose by yourself"
            )
        return plan


def refuse_budget(budget: int, least: int, lengths: Lengths, fixed: int) -> NoReturn:
    """Raise the error where no plan fits.

    fixed  bytes that do not grow with the sequence; all other bytes of the leanest plan do
    """
    share = max(0, budget - fixed) / max(1, least - fixed)
    fit = " and ".join(str(int(length * share)) for length in lengths)
    raise OverBudget(
        f"memory_budget allows {budget / 2**20:.1f} MiB, and the leanest plan for "
        f"{' and '.join(map(str, lengths))} tokens needs {least / 2**20:.1f} MiB above weights and their "
        f"gradients. The budget is enough for about {fit} tokens"
    ) from None

"""Values worth keeping for the backward, level by level: each is one value of all equal layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...memory.chain_plan import Costs


@dataclass(frozen=True)
class Level:
    """One more kept value of every region that has it.

    bytes  of the value in one region
    """

    regions: frozenset[int]
    bytes: int

    def bytes_in(self, regions: Iterable[int]) -> int:
        """Count the bytes of the value in these regions."""
        return self.bytes * sum(r in self.regions for r in regions)


def levels_of(costs: Sequence[Costs]) -> list[Level]:
    """List all levels, by seconds saved per byte. Those of one region come in the order in which it keeps
    them."""
    found: dict[tuple, set[int]] = {}
    for index, region in enumerate(costs):
        rate = float("inf")
        for nth, value in enumerate(region.worth_keeping):
            rate = min(rate, value.seconds / value.bytes)
            found.setdefault((-rate, nth, value.bytes), set()).add(index)
    return [Level(frozenset(found[key]), key[2]) for key in sorted(found)]

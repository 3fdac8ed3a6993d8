"""Every allocation of a simulated step: its bytes, its lifetime, and the place in the step.

The simulation is that of `memory_simulation`; only its ledger keeps a record here, and drivers report
the places that they enter (`places`). So the record adds up to the predicted peak.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .. import internals
from .memory_simulation import Ledger, simulate
from .places import InBackward, InLink, InRegion, InSweep, watched


@dataclass(frozen=True)
class Allocation:
    """Memory that a step takes once.

    bytes   as the allocator of the device counts them
    start   the first moment at which it is held; moments count allocations and releases
    end     the first moment at which it is not held any more
    places  the place in the step, from the outermost to the innermost (`places`)
    link    index of the region in the chain, if the step was in one
    op      the operator that returned it; ``empty_strided`` in code of Inductor
    shape, dtype  of the first value in it
    line    file and line of Inductor's code, if that took it
    scratch  an operator held it only while it ran
    """

    bytes: int
    start: int
    end: int
    places: tuple[object, ...]
    link: int | None
    op: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: tuple[str, int] | None = None
    scratch: bool = False


@dataclass(frozen=True)
class Visit:
    """The moments from ``start`` up to ``end`` at which a step was in a region or sweep."""

    place: InLink | InRegion | InSweep | InBackward
    link: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The memory of one step above weights, their gradients and the inputs of the function.

    allocations  in the order in which they were made
    visits       of regions and sweeps, in the order in which they ended
    end          the number of moments
    device       the device type whose memory it is
    """

    allocations: tuple[Allocation, ...]
    visits: tuple[Visit, ...]
    end: int
    device: str

    def held(self) -> list[int]:
        """Compute the bytes held at every moment."""
        change = [0] * (self.end + 1)
        for a in self.allocations:
            change[a.start] += a.bytes
            change[a.end] -= a.bytes
        return list(itertools.accumulate(change[: self.end]))

    @property
    def peak(self) -> int:
        """The first moment at which the most bytes are held."""
        held = self.held()
        return max(range(self.end), key=held.__getitem__)

    def alive(self, moment: int) -> list[Allocation]:
        """List the allocations held at a moment."""
        return [a for a in self.allocations if a.start <= moment < a.end]


class Recorder(Ledger):
    """A ledger that records every allocation with its place in the step."""

    def __init__(self, device: str = "cpu"):
        super().__init__(device)
        self.moment = 0
        self.allocations: list[Allocation] = []
        self.ends: dict[int, int] = {}
        self.places: list[tuple[object, int | None, int]] = []
        self.visits: list[Visit] = []
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)

    def enter(self, place: object) -> None:
        self.places.append((place, self.link_of(place), self.moment))

    def link_of(self, place: object) -> int | None:
        """Find the region of the chain that a place is in. Backwards come in the opposite order of
        forwards."""
        if isinstance(place, InLink):
            self.waiting[id(place.region)].append(place.index)
            return place.index
        if isinstance(place, InRegion) and place.direction != "forward":
            waiting = self.waiting[id(place.region)]
            return waiting.pop() if waiting else None
        return self.places[-1][1] if self.places else None

    def leave(self) -> None:
        place, link, start = self.places.pop()
        if isinstance(place, (InLink, InRegion, InSweep, InBackward)):
            self.visits.append(Visit(place, link, start, self.moment))

    def noted(self, value: torch.Tensor, size: int) -> int:
        shape, dtype = tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch.")
        line = internals.generated_line()
        self.add(Allocation(size, self.moment, -1, *self.here(), str(self.running), shape, dtype, line))
        return len(self.allocations) - 1

    def here(self) -> tuple[tuple[object, ...], int | None]:
        return tuple(place for place, _, _ in self.places), self.places[-1][1] if self.places else None

    def add(self, allocation: Allocation) -> None:
        self.allocations.append(allocation)
        self.moment += 1

    def release(self, size: int, noted: int) -> None:
        super().release(size, noted)
        self.ends[noted] = self.moment
        self.moment += 1

    def use(self, scratch: int) -> None:
        super().use(scratch)
        if scratch:
            self.ends[len(self.allocations)] = self.moment + 1
            line = internals.generated_line()
            kernel = str(self.running)
            self.add(Allocation(scratch, self.moment, -1, *self.here(), kernel, line=line, scratch=True))
            self.moment += 1

    def timeline(self) -> Timeline:
        allocations = (replace(a, end=self.ends.get(i, self.moment)) for i, a in enumerate(self.allocations))
        return Timeline(tuple(allocations), tuple(self.visits), self.moment, self.device)


def record(call: Callable, fakes: Sequence[object]) -> Timeline:
    """Record the memory of one step of a compiled chain; the arguments are those of `simulate`."""
    recorders: list[Recorder] = []

    def recorder_of(device: str) -> Recorder:
        recorders.append(Recorder(device))
        return recorders[-1]

    class Now:
        """Tells the recorder of this simulation, once there is one."""

        def enter(self, place: object) -> None:
            recorders[-1].enter(place)

        def leave(self) -> None:
            recorders[-1].leave()

    with watched(Now()):
        simulate(call, fakes, counting=recorder_of)
    return recorders[-1].timeline()

"""The fastest plan for a chain of regions whose peak memory fits into a budget.

A plan says for every region which values its forward keeps, how long its chunks are, and whether its
inputs wait for the backward in host memory, or in 8 bits a number. Plans lie on one path, from the least
memory to the most:

1. shorter chunks,
2. layer inputs on the host,
3. layer inputs in 8 bits (only where the user allows plans that are not exact),
4. layer inputs only (the default),
5. longer chunks of more sequences of the batch at a time, and more and more kept values, ordered by seconds
   saved per byte.

The peak grows along the path, so the search finds the last plan that fits. It is greedy, and at most one
step short of the best: every step is small beside a budget, and saves its seconds independently of the
others (the fractional knapsack). Steps that together save less than ``WORTH`` of a step's time are left
out, because trying a plan compiles regions. Every plan that is returned was simulated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..passes.planning.choices import DEFAULT, Choices
from ..passes.planning.kept_values import KeptValue, joined

ROUNDS = 4  # plans simulated after the first; estimates between two plans miss the memory inside kernels
WORTH = 0.003  # share of a step's time that another plan must save
DIFFER = 0.01  # share of a step's time that must be saved before equal regions may differ
ONE_SLACK = 0.01  # the only slack for longer chunks where regions should be compiled in few ways
SHORTER = (2, 4, 8, 16)  # divisors of the default bytes at the widest moment of a chunk


class NoPlan(Exception):
    """No plan fits.

    least    bytes of the plan that takes the fewest
    leanest  that plan
    """

    def __init__(self, least: int, leanest: ChainPlan):
        super().__init__(least)
        self.least, self.leanest = least, leanest


@dataclass(frozen=True)
class ChainPlan:
    """Choices for every region of a chain, in order of execution.

    offloaded   indices of regions whose inputs wait for the backward in host memory
    compressed  indices of regions whose inputs wait in 8 bits a number: gradients are not exact
    """

    choices: tuple[Choices, ...]
    offloaded: frozenset[int] = frozenset()
    compressed: frozenset[int] = frozenset()

    @staticmethod
    def default(count: int) -> ChainPlan:
        return ChainPlan((DEFAULT,) * count)

    def keeping(self, counts: Sequence[int]) -> ChainPlan:
        """Set how many values each region keeps."""
        return replace(self, choices=tuple(replace(c, keep=k) for c, k in zip(self.choices, counts)))

    def taking(self, steps: Sequence[Step]) -> ChainPlan:
        """Set kept values and longer chunks to those of the given steps."""
        counts: Counter = Counter()
        for step in steps:
            counts[step.region] += step.values
        slack = min((step.slack for step in steps if step.slack is not None), default=None)
        choices = (replace(c, keep=counts[i], slack=slack) for i, c in enumerate(self.choices))
        return replace(self, choices=tuple(choices))

    def with_chunks(self, most_bytes: int) -> ChainPlan:
        """Limit the bytes of every chunk to ``most_bytes``."""
        return replace(self, choices=tuple(replace(c, chunk_bytes=most_bytes) for c in self.choices))

    def offloading(self, regions: Sequence[int]) -> ChainPlan:
        return replace(self, offloaded=frozenset(regions))

    def compressing(self, regions: Sequence[int]) -> ChainPlan:
        return replace(self, compressed=frozenset(regions))

    def __str__(self) -> str:
        kept, away, rounded = sum(c.keep for c in self.choices), len(self.offloaded), len(self.compressed)
        capped = next((c.chunk_bytes for c in self.choices if c.chunk_bytes is not None), None)
        slack = next((c.slack for c in self.choices if c.slack is not None), None)
        parts = [
            f"longer chunks (at most {slack:.1%} slower than the best)" if slack is not None else "",
            f"{kept} kept values in {sum(c.keep > 0 for c in self.choices)} regions" if kept else "",
            f"inputs of {away} regions in host memory" if away else "",
            f"inputs of {rounded} regions in 8 bits (gradients are not exact)" if rounded else "",
            f"chunks of at most {capped / 2**20:.1f} MiB" if capped is not None else "",
        ]
        return ", ".join(filter(None, parts)) or "layer inputs only"


@dataclass(frozen=True)
class Longer:
    """Longer chunks of a region, of more sequences of the batch at a time, compared with the default.

    slack    the share of time still spent on shorter chunks and fewer sequences (`Choices.slack`)
    bytes    additional bytes at the widest moment of a chunk, with values between the sweeps of a turn
    seconds  that a step saves
    """

    slack: float
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of the choices of a region.

    worth_keeping  values that the forward can keep, best first
    handed_on      bytes of the inputs that wait for its backward, as far as they may wait elsewhere
    rounded_away   bytes of them that are saved by 8 bits a number
    widest         bytes of the widest moment of a chunk
    totals         bytes of sums over tokens, such as gradients of weights: they do not grow with the
                   sequence
    streamed       bytes that the region takes beside its inputs, as the cost model estimates them
    seconds        of a step by the default plan
    longer         longer and longer chunks, the same slacks for all regions of a chain
    """

    worth_keeping: tuple[KeptValue, ...] = ()
    handed_on: int = 0
    rounded_away: int = 0
    widest: int = 0
    totals: int = 0
    streamed: int = 0
    seconds: float = 0.0
    longer: tuple[Longer, ...] = ()

    def in_grades(self) -> Costs:
        """Reduce the choices to a few, so that a region is compiled in few ways. A region keeps nothing, its
        best value, or all values worth keeping. Chunks are the default ones or the longest."""
        first, rest = self.worth_keeping[:1], self.worth_keeping[1:]
        return replace(
            self,
            worth_keeping=(*first, joined(rest)) if rest else first,
            longer=tuple(c for c in self.longer if c.slack == ONE_SLACK),
        )


@dataclass(frozen=True)
class Step:
    """One more kept value of one region, or longer chunks of all regions.

    region  index of the region; None: all regions
    slack   of longer chunks
    values  operations of the region whose outputs are kept
    """

    region: int | None
    bytes: int
    seconds: float = 0.0
    slack: float | None = None
    values: int = 1


def steps_of(costs: Sequence[Costs]) -> list[Step]:
    """List all steps beyond the default plan, by seconds saved per byte. Values of one region stay in the
    order in which it keeps them, and chunks go from shorter to longer."""
    ways = [keeping(i, region) for i, region in enumerate(costs)]
    rated = []
    for way, steps in enumerate([longer_chunks(costs), *ways]):
        rate = float("inf")
        for nth, step in enumerate(steps):
            rate = min(rate, step.seconds / max(1, step.bytes))
            rated.append((-rate, nth, way, step))
    return [step for *_, step in sorted(rated, key=lambda r: r[:3])]


def keeping(index: int, region: Costs) -> list[Step]:
    return [Step(index, v.bytes, v.seconds, values=v.count) for v in region.worth_keeping]


def longer_chunks(costs: Sequence[Costs]) -> list[Step]:
    """List steps to longer and longer chunks of all regions. A step takes the most bytes that any region
    takes, because chunks of two regions never exist at the same time. It saves the sum of all regions'
    seconds."""
    steps, taken, saved = [], 0, 0.0
    for same in zip(*(region.longer for region in costs if region.longer)):
        most, seconds = max(c.bytes for c in same), sum(c.seconds for c in same)
        if seconds > saved:
            steps.append(Step(None, max(0, most - taken), seconds - saved, same[0].slack))
            taken, saved = max(most, taken), seconds
    return steps


def fitting(steps: Sequence[Step], room: int) -> int:
    """Count the first steps that fit into ``room`` bytes together."""
    return sum(1 for total in itertools.accumulate(s.bytes for s in steps) if total <= room)


def share_saved(plan: ChainPlan, costs: Sequence[Costs]) -> float:
    """Estimate by the cost model which share of the default plan's time a plan saves."""
    slack = next((c.slack for c in plan.choices if c.slack is not None), None)
    saved = sum(
        value.seconds
        for region, choices in zip(costs, plan.choices)
        for value in within_count(region.worth_keeping, choices.keep)
    )
    saved += sum(c.seconds for region in costs for c in region.longer if c.slack == slack)
    return saved / max(sum(region.seconds for region in costs), 1e-12)


def within_count(values: Iterable[KeptValue], keep: int) -> Iterable[KeptValue]:
    """Yield the first values, whose operations are at most ``keep`` in all."""
    return (v for v, total in zip(values, itertools.accumulate(v.count for v in values)) if total <= keep)


def saved_by(steps: Iterable[Step]) -> float:
    return sum(step.seconds for step in steps)


def even(steps: Sequence[Step], count: int, least: float) -> int:
    """Reduce a number of steps so that equal regions stay equal, if that costs little. The last steps are
    dropped where they save less than ``least`` seconds and would only make regions differ that are equal
    so far, because each kind of region is compiled."""
    alike = [i for i in range(count, 0, -1) if is_another(steps[i - 1], steps[i : i + 1])]
    whole = next(iter(alike), 0)
    return whole if saved_by(steps[whole:count]) < least else count


def is_another(step: Step, following: Sequence[Step]) -> bool:
    """Does the next step keep anything but the same value of the next region?"""
    return (
        not following
        or step.region is None
        or (step.bytes, step.seconds)
        != (
            following[0].bytes,
            following[0].seconds,
        )
    )


def find_plan(
    costs: Sequence[Costs],
    budget: int,
    peak_of: Callable[[ChainPlan], int],
    may_offload: bool = True,
    lossy: bool = False,
    spend: bool = True,
) -> ChainPlan:
    """Find the fastest plan whose simulated peak is within a budget, in bytes.

    peak_of  simulates a plan
    lossy    may a plan be taken by which gradients are not exact?
    spend    may a plan take more than the default one, to be faster?

    Raises `NoPlan`.
    """
    default = ChainPlan.default(len(costs))
    peak = peak_of(default)
    if peak <= budget and not spend:
        return default
    if peak <= budget:
        return with_more(default, costs, budget - peak, lambda plan: budget - peak_of(plan))
    return with_less(default, peak, costs, budget, peak_of, may_offload, lossy)


def with_more(
    default: ChainPlan,
    costs: Sequence[Costs],
    room: int,
    room_of: Callable[[ChainPlan], int],
    worth: float = WORTH,
) -> ChainPlan:
    """Add the steps that the room allows, simulate, and correct by the bytes left or missing.

    worth  the share of a step's time that another plan must save to be tried
    """
    steps, taken, best = steps_of(costs), 0, default
    seconds = sum(region.seconds for region in costs)
    count = even(steps, fitting(steps, room), DIFFER * seconds)
    for _ in range(ROUNDS):
        if count <= taken or saved_by(steps[taken:count]) < worth * seconds:
            break
        plan = default.taking(steps[:count])
        left = room_of(plan)
        if left >= 0:
            taken, best = count, plan
            count = even(steps, count + fitting(steps[count:], left), DIFFER * seconds)
        else:
            given_back = itertools.accumulate(s.bytes for s in reversed(steps[taken:count]))
            count -= next((i for i, total in enumerate(given_back, 1) if total >= -left), count - taken)
            count = max(taken, even(steps, count, DIFFER * seconds))
    return best


def estimated(costs: Sequence[Costs]) -> int:
    """Estimate the bytes of a step by the default plan, without simulating it. The estimate is all layer
    inputs, plus the region that takes most."""
    return sum(c.handed_on for c in costs) + max((c.streamed for c in costs), default=0)


def may_leave(costs: Sequence[Costs]) -> tuple[int, ...]:
    """List the regions whose inputs may wait on the host, by index. The last region is never among them,
    because the backward reads its inputs at once."""
    return tuple(i for i, region in enumerate(costs[:-1]) if region.handed_on)


def with_less(
    default: ChainPlan,
    least: int,
    costs: Sequence[Costs],
    budget: int,
    peak_of: Callable[[ChainPlan], int],
    may_offload: bool,
    lossy: bool,
) -> ChainPlan:
    """Find a plan that takes less than the default one.

    It tries in order: inputs in 8 bits (if ``lossy``), inputs on the host (if ``may_offload``), shorter
    chunks. In the first two, the inputs of the last layers stay in place where they fit.

    least  the peak of the default plan

    Raises `NoPlan`.
    """
    away, leanest = may_leave(costs), default
    ways = [(default.compressing, [c.rounded_away for c in costs])] if lossy else []
    ways += [(default.offloading, [c.handed_on for c in costs])] if may_offload else []
    lean = default
    for way, freed in ways if away else []:
        lean = way(away)
        peak = peak_of(lean)
        if peak <= budget:
            return of_fewer(way, away, freed, budget - peak, lambda plan: budget - peak_of(plan))
        least, leanest = (peak, lean) if peak < least else (least, leanest)
    widest = max((region.widest for region in costs), default=0)
    for part in SHORTER:
        plan = lean.with_chunks(max(1, widest // part))
        peak = peak_of(plan)
        if peak <= budget:
            return plan
        least, leanest = (peak, plan) if peak < least else (least, leanest)
    raise NoPlan(least, leanest)


def of_fewer(
    way: Callable[[Sequence[int]], ChainPlan],
    regions: Sequence[int],
    freed: Sequence[int],
    room: int,
    room_of: Callable[[ChainPlan], int],
) -> ChainPlan:
    """Leave as many inputs of the last layers in place as fit, because the backward reads them first.

    way    builds the plan for the inputs of some regions
    freed  bytes that it frees in each region
    """
    best = way(regions)
    for _ in range(ROUNDS):
        stay = fitting([Step(i, freed[i]) for i in reversed(regions)], room)
        plan = way(regions[: len(regions) - stay])
        if plan == best or room_of(plan) >= 0:
            return plan
        room -= 1 + freed[regions[len(regions) - stay]]
    return best

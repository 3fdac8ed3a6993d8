"""A chain of regions that runs by a plan for the length of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from .. import internals
from ..dynamo.reading.token_axes import Axis, batch_sizes
from ..dynamo.reading.values import fake_of
from ..passes.ir import Size, bytes_of, hint, is_row_wise, is_tensor, value_of
from ..passes.planning.choices import DEFAULT, Choices
from ..passes.planning.chunk_length import LONGER, sequences_at_once, sweep_work, time_and_width
from ..passes.split import Region
from ..pipeline import StreamedRegion
from ..regions.batch_parts import bytes_between_sweeps
from ..regions.compiled_region import CompiledRegion
from ..reporting.notices import mebibytes
from ..reporting.region_report import streamed_bytes
from ..runtime.memory_simulation import simulate
from ..runtime.sizes import Sizes
from .chain_plan import ChainPlan, Costs, Longer, share_saved, steps_of, with_more
from .memory_limits import Lengths, Limit
from .spare_memory import UNSEEN, SpareMemory

Links = Sequence[tuple[CompiledRegion, Region]]
MOST = 12  # most searches for a faster plan per chain: each simulates some steps
LEAST = 0.02  # share of a step's time that a faster plan must save, where the user states no budget
NEAR = 0.875  # a plan for a longer sequence is taken for one of at least this share of its length


class PlannedChain:
    """Runs a chain by the plan that a memory limit allows, and plans again for each new length.

    links   the chain, by the default plan
    link    builds a chain by a plan, as a function of the graph's inputs
    """

    def __init__(
        self,
        links: Links,
        link: Callable[[Links, ChainPlan], Callable],
        limit: Limit,
        axes: Sequence[Axis],
        placeholders: Sequence[Node],
    ):
        self.links, self.link, self.limit = links, link, limit
        lengths, batch = [a.length for a in axes], batch_sizes(axes)
        # What a step takes grows with its tokens, with those of one sequence, or with the sequences.
        self.lengths: list[Size] = [*lengths, *(n * size for n in lengths for size in batch), *batch]
        self.axes, self.placeholders = len(axes), placeholders
        self.costs = [costs_of(compiled) for compiled, _ in links]
        self.plans: dict[Lengths, ChainPlan] = {}
        self.calls: dict[ChainPlan, Callable] = {}
        self.longer: dict[CompiledRegion, tuple[float, tuple[Longer, ...]]] = {}

    @property
    def expected(self) -> Lengths:
        """The lengths for which the graph was traced."""
        return tuple(map(hint, self.lengths))

    def by(self, plan: ChainPlan) -> Links:
        """Build the chain by a plan; regions are compiled for choices that are new."""
        return [(c.chosen(choices), region) for (c, region), choices in zip(self.links, plan.choices)]

    def call_by(self, plan: ChainPlan) -> Callable:
        if plan not in self.calls:
            with internals.OneAtATime():
                self.calls[plan] = self.link(self.by(plan), plan)
        return self.calls[plan]

    @internals.OneAtATime()
    def plan(self, inputs: Sequence[object], lengths: Lengths) -> ChainPlan:
        """Find the plan for inputs (fake or real) of these lengths. Raises `OverBudget`."""
        near = [known for known in self.plans if is_near(lengths, known)]
        if near:
            return self.plans[min(near)]
        costs = self.costs_at(lengths, self.limit.spends)
        found = self.limit.find(costs, lengths[: self.axes], functools.partial(self.peak_of, inputs))
        self.plans[lengths] = found
        return found

    def peak_of(self, inputs: Sequence[object], plan: ChainPlan) -> int:
        """Simulate a step by a plan, and return its peak bytes above weights and gradients."""
        return simulate(self.call_by(plan), inputs, any_output=True).bytes

    def costs_at(self, lengths: Lengths, spends: bool) -> list[Costs]:
        """Compute the costs of choices at these lengths.

        spends  include the costs of choices beyond the default plan
        """
        share = max((new / old for new, old in zip(lengths, self.expected)), default=1.0)
        regions = [compiled for compiled, _ in self.links]
        costs = map(self.with_longer, self.costs, regions) if spends else self.costs
        return [scaled(c, share) for c in costs]

    def lengths_of(self, args: Sequence[object]) -> Lengths:
        """Compute the lengths of the sequences of a call; where the batch may change, its sizes as well."""
        if not any(isinstance(length, torch.SymInt) for length in self.lengths):
            return tuple(self.lengths)
        sizes = Sizes(dict(zip(self.placeholders, args)), fake_of)
        return tuple(map(sizes, self.lengths))

    def with_longer(self, costs: Costs, compiled: CompiledRegion) -> Costs:
        """Add the seconds of a region, and its longer chunks unless the user sets the chunk length."""
        if compiled.streamed is None:
            return costs
        if compiled not in self.longer:
            self.longer[compiled] = longer_of(compiled.streamed)
        seconds, longer = self.longer[compiled]
        return replace(costs, seconds=seconds, longer=longer if compiled.config.chunk_size is None else ())

    def __call__(self, *args):
        return self.call_by(self.plan(args, self.lengths_of(args)))(*args)


@dataclass(frozen=True)
class Spent:
    """A plan that takes more than the default one, to be faster.

    lengths  at which it was simulated
    bytes    that a step takes above weights and gradients
    all      does it keep all that is worth keeping?
    share    of the time of a step by the default plan that it saves, by the cost model
    """

    lengths: Lengths
    plan: ChainPlan
    bytes: int
    all: bool
    share: float

    def at(self, lengths: Lengths) -> int:
        """Bound the bytes at other lengths from above. A longer step takes less than in proportion to its
        length."""
        return int(self.bytes * max((1.0, *(new / old for new, old in zip(lengths, self.lengths)))))


class SpendingChain(PlannedChain):
    """Runs a chain by the fastest plan within the free memory of a GPU, where the user states no budget.

    The first steps run by the default plan, and `SpareMemory` learns from them. After that, every step
    reads the free memory; where it is short, the default plan runs. A forward that runs out of memory
    nevertheless is run again by the default plan.

    repeatable  does a call change nothing that it reads?
    tell        receives a text about each plan that is found
    """

    def __init__(self, *parts, spare: SpareMemory, repeatable: bool, tell: Callable[[str], None]):
        super().__init__(*parts)
        self.spare, self.repeatable, self.tell = spare, repeatable, tell
        self.default = ChainPlan.default(len(self.links))
        self.now: dict[Lengths, ChainPlan] = {}
        self.simulated: dict[Lengths, dict[ChainPlan, int]] = {}
        self.found: list[Spent] = []
        self.searched: set[Lengths] = set()

    def __call__(self, *args):
        lengths = self.lengths_of(args)
        lean = self.plan(args, lengths)
        if any(map(internals.is_fake, args)):  # a simulation of the plan that steps run by now
            return self.call_by(self.now.get(lengths, lean))(*args)
        if lean != self.default or not torch.is_grad_enabled() or internals.are_saved_tensors_packed():
            return self.call_by(lean)(*args)
        spent = self.spend(args, lengths)
        if spent is None:
            return self.call_by(lean)(*args)
        start = self.spare.start(args, spent.at(lengths))
        if self.spare.failed:
            return self.call_by(lean)(*args)
        try:
            results = self.call_by(spent.plan)(*args)
        except torch.OutOfMemoryError:
            if spent.plan == lean or not self.repeatable:
                raise
            self.spare.failed, results = True, None
        if results is None:  # the failed call's memory is free only after its exception is handled
            torch.cuda.empty_cache()
            return self.call_by(lean)(*args)
        self.spare.watch(results, start)
        return results

    @internals.OneAtATime()
    def spend(self, inputs: Sequence[object], lengths: Lengths) -> Spent | None:
        """Choose the fastest plan for the memory that is free now; None if steps run by the lean plan."""
        if self.spare.failed:
            return None
        try:
            best = self.fastest(inputs, lengths) if self.spare.is_learnt else self.lean(inputs, lengths)
        except Exception:  # an operator without a fake form: the user asked for no plan
            internals.log.debug("simulating a step failed", exc_info=True)
            self.spare.failed = True
            return None
        self.now[lengths] = best.plan
        return best

    def fastest(self, inputs: Sequence[object], lengths: Lengths) -> Spent:
        """Choose the fastest known plan that fits into free memory; search where a faster one may fit."""
        room = self.spare.room(inputs)
        best = self.best(lengths, room)
        known = any(is_near(lengths, at) for at in self.searched)
        if not known and not (best and best.all) and len(self.searched) < MOST:
            self.searched.add(lengths)
            self.found.append(self.search(inputs, lengths, room))
            best = self.best(lengths, room)
        return best or self.lean(inputs, lengths)

    def best(self, lengths: Lengths, room: int) -> Spent | None:
        """Return the fastest known plan that fits."""
        fitting = [s for s in self.found if s.at(lengths) <= room]
        return max(fitting, key=lambda s: s.share, default=None)

    def lean(self, inputs: Sequence[object], lengths: Lengths) -> Spent:
        """Return the default plan, with its bytes at these lengths or at slightly longer known ones."""
        near = [at for at, peaks in self.simulated.items() if is_near(lengths, at) and self.default in peaks]
        at = min(near, default=lengths)
        return Spent(at, self.default, self.peak_at(inputs, at, self.default), all=False, share=0.0)

    def peak_at(self, inputs: Sequence[object], lengths: Lengths, plan: ChainPlan) -> int:
        """Return the peak bytes of a step by a plan, simulated once per length."""
        peaks = self.simulated.setdefault(lengths, {})
        if plan not in peaks:
            peaks[plan] = self.peak_of(inputs, plan)
        return peaks[plan]

    def search(self, inputs: Sequence[object], lengths: Lengths, room: int) -> Spent:
        """Find the fastest plan whose simulated peak fits, among few ways to compile a region."""
        lean, costs = self.lean(inputs, lengths), self.in_grades(lengths)

        def room_of(plan: ChainPlan) -> int:
            return room - self.peak_at(inputs, lengths, plan)

        left = room - lean.bytes
        plan = with_more(self.default, costs, left, room_of, LEAST / 2) if left > 0 else self.default
        share = share_saved(plan, costs)
        if share < LEAST:
            return replace(lean, lengths=lengths)
        taken = self.peak_at(inputs, lengths, plan)
        tokens = " and ".join(map(str, lengths[: self.axes]))
        self.tell(
            f"{mebibytes(room)} of the GPU are free for a step on {tokens} "
            f"tokens. It takes {mebibytes(taken)} instead of {mebibytes(lean.bytes)}: {plan}. By the cost "
            f"model that saves {share:.0%} of its time"
        )
        return Spent(lengths, plan, taken, plan == self.default.taking(steps_of(costs)), share)

    def in_grades(self, lengths: Lengths) -> list[Costs]:
        return [c.in_grades() for c in self.costs_at(lengths, spends=True)]

    def tell_most(self) -> None:
        """Tell the user, when the graph is compiled, how much memory later steps may take."""
        costs = self.in_grades(self.expected)
        steps = steps_of(costs)
        share = share_saved(self.default.taking(steps), costs)
        if share >= LEAST:
            self.tell(
                f"After {UNSEEN} steps, a step takes up to {mebibytes(sum(s.bytes for s in steps))} more of "
                f"what is free on the GPU. By the cost model that saves up to {share:.0%} of its time"
            )


def is_near(lengths: Lengths, known: Lengths) -> bool:
    """Does a plan for known lengths fit these, which are not much shorter?"""
    return all(NEAR * longer <= new <= longer for new, longer in zip(lengths, known))


def scaled(costs: Costs, share: float) -> Costs:
    """Scale the costs of a region to another length."""
    worth = tuple(
        replace(v, bytes=int(v.bytes * share), seconds=v.seconds * share) for v in costs.worth_keeping
    )
    longer = tuple(replace(c, seconds=c.seconds * share) for c in costs.longer)
    return replace(
        costs,
        worth_keeping=worth,
        handed_on=int(costs.handed_on * share),
        rounded_away=int(costs.rounded_away * share),
        streamed=int(costs.streamed * share),
        seconds=costs.seconds * share,
        longer=longer,
    )


def costs_of(compiled: CompiledRegion) -> Costs:
    """Compute the costs of a compiled region's choices; none if it runs unchunked."""
    region = compiled.streamed
    if region is None:
        return Costs()
    sweeps = [
        (sweep, chunk)
        for schedule in (region.forward, region.backward)
        if schedule is not None
        for sweep, chunk in zip(schedule.program.sweeps, schedule.chunks)
    ]
    widest = max((sweep_work(sweep, region.analysis).widest * chunk for sweep, chunk in sweeps), default=0)
    totals = max((sum(map(total_bytes, sweep.sums)) for sweep, _ in sweeps), default=0)
    handed_on = [
        n
        for n in region.saved
        if is_tensor(n)
        and is_row_wise(region.analysis.facts[n])
        and value_of(n).dtype.is_floating_point
        and not compiled.is_graph_input(n)
    ]
    sizes = [(bytes_of(v) * region.turns, hint(v.numel()) * region.turns) for v in map(value_of, handed_on)]
    size, in_8_bits = (sum(each) for each in zip(*sizes)) if sizes else (0, 0)
    schedules = [s for s in (region.forward, region.backward) if s is not None]
    streamed = max(streamed_bytes(schedule, region.analysis) for schedule in schedules)
    return Costs(region.worth_keeping, size, size - in_8_bits, widest, totals, streamed)


def total_bytes(node: Node) -> int:
    return bytes_of(value_of(node)) if is_tensor(node) else 0


def longer_of(region: StreamedRegion) -> tuple[float, tuple[Longer, ...]]:
    """Compute the default seconds of a region, and the bytes and savings of longer chunks. Longer chunks take
    more and more sequences of the batch at a time."""
    weighed = functools.partial(seconds_and_bytes, region)
    usual, least = weighed(DEFAULT)
    by_slack = [(slack, *weighed(Choices(slack=slack))) for slack in LONGER]
    return usual, tuple(Longer(slack, size - least, usual - seconds) for slack, seconds, size in by_slack)


def seconds_and_bytes(region: StreamedRegion, choices: Choices) -> tuple[float, int]:
    """Estimate the seconds and bytes of a region by some choices. The bytes are those of the widest moment of
    a chunk, and of the values that its turns hold between their sweeps."""
    programs = [s.program for s in (region.forward, region.backward) if s is not None]
    how, batch = (region.analysis, choices, region.device), region.batch
    share = turns = 1.0
    if batch is not None:
        at_once = sequences_at_once(programs, *how, batch.count, batch.at_once)
        share, turns = at_once / batch.at_once, batch.count / at_once
    seconds, widths = zip(*(time_and_width(program, *how, share) for program in programs))
    held = 0 if batch is None else max(map(bytes_between_sweeps, programs))
    return turns * sum(seconds), max(widths) + int(held * share)

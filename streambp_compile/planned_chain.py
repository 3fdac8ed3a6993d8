"""A chain of regions that runs by a plan for the length of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from . import internals
from .batch_parts import bytes_between_sweeps
from .chain_plan import ChainPlan, Costs, Longer, share_saved, steps_of, with_more
from .compiled_region import CompiledRegion
from .dynamo.token_axes import Axis
from .dynamo.values import fake_of
from .memory_limits import Lengths, Limit
from .notices import mebibytes
from .passes.ir import bytes_of, hint, is_row_wise, is_tensor, value_of
from .passes.planning.choices import DEFAULT, Choices
from .passes.planning.chunk_length import LONGER, sequences_at_once, sweep_work, time_and_width
from .passes.split import Region
from .pipeline import StreamedRegion
from .region_report import streamed_bytes
from .runtime.memory_simulation import simulate
from .runtime.sizes import Sizes
from .spare_memory import UNSEEN, SpareMemory

Links = Sequence[tuple[CompiledRegion, Region]]
MOST = 12  # searches for a faster plan in the life of a chain: each simulates some steps
LEAST = 0.02  # of the time of a step, that a faster plan must save to be taken unasked
NEAR = 0.875  # a plan for a longer sequence is taken for one of at least this share of its length


class PlannedChain:
    """Runs a chain by the plan that a limit of memory allows, and plans again for a length that none is known
    for.

    links   the chain, by the default plan
    link    a chain by a plan, as a function of the graph's inputs
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
        self.lengths, self.placeholders = [a.length for a in axes], placeholders
        self.costs = [costs_of(compiled) for compiled, _ in links]
        self.plans: dict[Lengths, ChainPlan] = {}
        self.calls: dict[ChainPlan, Callable] = {}
        self.longer: dict[CompiledRegion, tuple[float, tuple[Longer, ...]]] = {}

    def by(self, plan: ChainPlan) -> Links:
        """The chain by a plan; regions are compiled for choices that are new."""
        return [(c.chosen(choices), region) for (c, region), choices in zip(self.links, plan.choices)]

    def call_by(self, plan: ChainPlan) -> Callable:
        if plan not in self.calls:
            with internals.OneAtATime():
                self.calls[plan] = self.link(self.by(plan), plan)
        return self.calls[plan]

    @internals.OneAtATime()
    def plan(self, inputs: Sequence[object], lengths: Lengths) -> ChainPlan:
        """The plan for inputs (fake or real) of these lengths.

        Raises `OverBudget`.
        """
        near = [known for known in self.plans if is_near(lengths, known)]
        if near:
            return self.plans[min(near)]
        costs = self.costs_at(lengths, self.limit.spends)
        found = self.limit.find(costs, lengths, functools.partial(self.peak_of, inputs))
        self.plans[lengths] = found
        return found

    def peak_of(self, inputs: Sequence[object], plan: ChainPlan) -> int:
        """Bytes that a step takes by a plan above weights and gradients, by its simulation."""
        return simulate(self.call_by(plan), inputs, any_output=True).bytes

    def costs_at(self, lengths: Lengths, spends: bool) -> list[Costs]:
        """What choices cost at these lengths.

        spends  with what may be taken beyond the default plan
        """
        expected = [hint(length) for length in self.lengths]
        share = max((new / old for new, old in zip(lengths, expected)), default=1.0)
        regions = [compiled for compiled, _ in self.links]
        costs = map(self.with_longer, self.costs, regions) if spends else self.costs
        return [scaled(c, share) for c in costs]

    def lengths_of(self, args: Sequence[object]) -> Lengths:
        """The lengths of the sequences of a call."""
        if not any(isinstance(length, torch.SymInt) for length in self.lengths):
            return tuple(self.lengths)
        sizes = Sizes(dict(zip(self.placeholders, args)), fake_of)
        return tuple(map(sizes, self.lengths))

    def with_longer(self, costs: Costs, compiled: CompiledRegion) -> Costs:
        """The same costs with seconds, and with those of longer chunks unless the user says how long chunks
        are."""
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
        """Bytes at other lengths, at most: a longer step takes less than in proportion."""
        return int(self.bytes * max((1.0, *(new / old for new, old in zip(lengths, self.lengths)))))


class SpendingChain(PlannedChain):
    """Runs a chain by the fastest plan that what is free on a GPU allows, where the user states no budget.

    The first steps run by the default plan, and `SpareMemory` learns from them. Then it asks in every step
    what is free; where that is short, the default plan runs. A forward that runs out of memory all the same
    is run again by the default plan.

    repeatable  does a call change nothing that it reads?
    tell        is told of plans that are found
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
        if any(map(internals.is_fake, args)):  # a simulation: of the plan that is taken now
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
        if results is None:  # what the failed call held is free only here
            torch.cuda.empty_cache()
            return self.call_by(lean)(*args)
        self.spare.watch(results, start)
        return results

    @internals.OneAtATime()
    def spend(self, inputs: Sequence[object], lengths: Lengths) -> Spent | None:
        """The fastest plan for what is free now; None if steps run lean."""
        if self.spare.failed:
            return None
        try:
            best = self.fastest(inputs, lengths) if self.spare.is_learnt else self.lean(inputs, lengths)
        except Exception:  # an operator that has no fake form: nobody asked for a plan
            internals.log.debug("simulating a step failed", exc_info=True)
            self.spare.failed = True
            return None
        self.now[lengths] = best.plan
        return best

    def fastest(self, inputs: Sequence[object], lengths: Lengths) -> Spent:
        """The fastest known plan that fits what is free now; where more may fit, one is looked for."""
        room = self.spare.room(inputs)
        best = self.best(lengths, room)
        known = any(is_near(lengths, at) for at in self.searched)
        if not known and not (best and best.all) and len(self.searched) < MOST:
            self.searched.add(lengths)
            self.found.append(self.search(inputs, lengths, room))
            best = self.best(lengths, room)
        return best or self.lean(inputs, lengths)

    def best(self, lengths: Lengths, room: int) -> Spent | None:
        """The fastest known plan that fits."""
        fitting = [s for s in self.found if s.at(lengths) <= room]
        return max(fitting, key=lambda s: s.share, default=None)

    def lean(self, inputs: Sequence[object], lengths: Lengths) -> Spent:
        """The default plan, and what it takes at these lengths or at longer ones near by."""
        near = [at for at, peaks in self.simulated.items() if is_near(lengths, at) and self.default in peaks]
        at = min(near, default=lengths)
        return Spent(at, self.default, self.peak_at(inputs, at, self.default), all=False, share=0.0)

    def peak_at(self, inputs: Sequence[object], lengths: Lengths, plan: ChainPlan) -> int:
        """The peak of a step by a plan; it is simulated once for a length."""
        peaks = self.simulated.setdefault(lengths, {})
        if plan not in peaks:
            peaks[plan] = self.peak_of(inputs, plan)
        return peaks[plan]

    def search(self, inputs: Sequence[object], lengths: Lengths, room: int) -> Spent:
        """Find the fastest plan that is simulated to fit, among few ways to compile a region."""
        lean, costs = self.lean(inputs, lengths), self.in_grades(lengths)

        def room_of(plan: ChainPlan) -> int:
            return room - self.peak_at(inputs, lengths, plan)

        left = room - lean.bytes
        plan = with_more(self.default, costs, left, room_of, LEAST / 2) if left > 0 else self.default
        share = share_saved(plan, costs)
        if share < LEAST:
            return replace(lean, lengths=lengths)
        taken = self.peak_at(inputs, lengths, plan)
        self.tell(
            f"{mebibytes(room)} of the GPU are free for a step on {' and '.join(map(str, lengths))} "
            f"tokens. It takes {mebibytes(taken)} instead of {mebibytes(lean.bytes)}: {plan}. By the cost "
            f"model that saves {share:.0%} of its time"
        )
        return Spent(lengths, plan, taken, plan == self.default.taking(steps_of(costs)), share)

    def in_grades(self, lengths: Lengths) -> list[Costs]:
        return [c.in_grades() for c in self.costs_at(lengths, spends=True)]

    def tell_most(self) -> None:
        """Tell, when the graph is compiled, what later steps may take."""
        costs = self.in_grades(tuple(map(hint, self.lengths)))
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
    """The costs of a region at another length."""
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
    """What the choices of a compiled region cost; nothing if it runs unchunked, or in the forward alone."""
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
    """Seconds of a region by default, and what longer and longer chunks, of more and more sequences of the
    batch at a time, take and save."""
    weighed = functools.partial(seconds_and_bytes, region)
    usual, least = weighed(DEFAULT)
    by_slack = [(slack, *weighed(Choices(slack=slack))) for slack in LONGER]
    return usual, tuple(Longer(slack, size - least, usual - seconds) for slack, seconds, size in by_slack)


def seconds_and_bytes(region: StreamedRegion, choices: Choices) -> tuple[float, int]:
    """Seconds of a region by some choices; bytes of the widest moment of a chunk, and of what its turns hold
    between their sweeps."""
    programs = [s.program for s in (region.forward, region.backward) if s is not None]
    how, batch = (region.analysis, choices, region.device), region.batch
    share = turns = 1.0
    if batch is not None:
        at_once = sequences_at_once(programs, *how, batch.count, batch.at_once)
        share, turns = at_once / batch.at_once, batch.count / at_once
    seconds, widths = zip(*(time_and_width(program, *how, share) for program in programs))
    held = 0 if batch is None else max(map(bytes_between_sweeps, programs))
    return turns * sum(seconds), max(widths) + int(held * share)

"""A chain of regions that runs by a plan for the length of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from . import internals
from .batch_parts import bytes_between_sweeps
from .chain_plan import ChainPlan, Costs, Longer
from .compiled_region import CompiledRegion
from .dynamo.token_axes import Axis
from .dynamo.values import fake_of
from .memory_limits import Lengths, Limit
from .passes.ir import bytes_of, hint, is_row_wise, is_tensor, value_of
from .passes.planning.choices import DEFAULT, Choices
from .passes.planning.chunk_length import LONGER, sequences_at_once, sweep_work, time_and_width
from .passes.split import Region
from .pipeline import StreamedRegion
from .region_report import streamed_bytes
from .runtime.memory_simulation import simulate
from .runtime.sizes import Sizes

Links = Sequence[tuple[CompiledRegion, Region]]
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
        expected = [hint(length) for length in self.lengths]
        share = max((new / old for new, old in zip(lengths, expected)), default=1.0)
        costs = [
            scaled(self.with_longer(c, compiled), share) for c, (compiled, _) in zip(self.costs, self.links)
        ]
        found = self.limit.find(
            costs, lengths, lambda plan: simulate(self.call_by(plan), inputs, any_output=True).bytes
        )
        self.plans[lengths] = found
        return found

    def with_longer(self, costs: Costs, compiled: CompiledRegion) -> Costs:
        """The same costs with those of longer chunks, unless the user says how long chunks are."""
        if compiled.config.chunk_size is not None or compiled.streamed is None or not self.limit.spends:
            return costs
        if compiled not in self.longer:
            self.longer[compiled] = longer_of(compiled.streamed)
        seconds, longer = self.longer[compiled]
        return replace(costs, seconds=seconds, longer=longer)

    def __call__(self, *args):
        if not any(isinstance(length, torch.SymInt) for length in self.lengths):
            return self.call_by(next(iter(self.plans.values())))(*args)
        sizes = Sizes(dict(zip(self.placeholders, args)), fake_of)
        return self.call_by(self.plan(args, tuple(map(sizes, self.lengths))))(*args)


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

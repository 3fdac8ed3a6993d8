"""The search for a plan, on regions whose costs are stated."""

from dataclasses import dataclass, replace

import pytest

from streambp_compile.memory.chain_plan import (
    ChainPlan,
    Costs,
    Longer,
    NoPlan,
    find_plan,
    may_leave,
    steps_of,
)
from streambp_compile.passes.planning.kept_values import KeptValue

LEVELS = (Longer(0.02, 6, 0.5), Longer(0.01, 14, 0.75))
ATTENTION, PRODUCT = KeptValue((), 10, 5.0), KeptValue((), 20, 1.0)
LAYER = Costs((ATTENTION, PRODUCT), handed_on=8, widest=16)
HEAD = Costs(widest=16)
CHAIN = (LAYER, LAYER, LAYER, HEAD)
FLOOR = 30


@dataclass
class Machine:
    """Simulates plans by stated rules: a floor, inputs on the device, the widest chunk, kept values.

    hidden  the share of kept bytes that the estimate does not know
    """

    costs: tuple[Costs, ...] = CHAIN  # of layers and a head
    hidden: float = 0.0
    asked: int = 0

    def peak(self, plan: ChainPlan) -> int:
        self.asked += 1
        inputs = sum(c.handed_on for i, c in enumerate(self.costs) if i not in plan.offloaded)
        inputs -= sum(c.rounded_away for i, c in enumerate(self.costs) if i in plan.compressed)
        kept = sum(
            v.bytes for c, choice in zip(self.costs, plan.choices) for v in c.worth_keeping[: choice.keep]
        )
        caps = [
            c.widest if p.chunk_bytes is None else min(c.widest, p.chunk_bytes)
            for c, p in zip(self.costs, plan.choices)
        ]
        longer = [
            next((level.bytes for level in c.longer if level.slack == choice.slack), 0)
            for c, choice in zip(self.costs, plan.choices)
        ]
        return int(FLOOR + inputs + max(map(sum, zip(caps, longer))) + kept * (1 + self.hidden))


DEFAULT = Machine().peak(ChainPlan.default(4))


def counts(plan: ChainPlan) -> list[int]:
    return [c.keep for c in plan.choices]


def test_steps_go_by_seconds_per_byte_and_keep_the_order_of_a_region():
    assert [(s.region, s.bytes) for s in steps_of(CHAIN)] == [
        (0, 10),
        (1, 10),
        (2, 10),
        (0, 20),
        (1, 20),
        (2, 20),
    ]
    rising = Costs((PRODUCT, ATTENTION))  # the second is worth more once the first is kept
    assert [s.bytes for s in steps_of([rising])] == [20, 10]


@pytest.mark.parametrize(
    "room, kept", [(0, [0, 0, 0, 0]), (25, [1, 1, 0, 0]), (50, [2, 1, 1, 0]), (1000, [2, 2, 2, 0])]
)
def test_what_fits_is_kept(room, kept):
    machine = Machine()
    assert counts(find_plan(CHAIN, DEFAULT + room, machine.peak)) == kept
    assert machine.asked <= 6


@pytest.mark.parametrize("hidden", [-0.5, 0.3, 1.0])
@pytest.mark.parametrize("room", range(0, 120, 7))
def test_a_wrong_estimate_is_corrected_and_never_exceeds_the_budget(room, hidden):
    machine = Machine(hidden=hidden)
    plan = find_plan(CHAIN, DEFAULT + room, machine.peak)
    assert machine.peak(plan) <= DEFAULT + room


def test_more_budget_never_keeps_less():
    kept = [sum(counts(find_plan(CHAIN, DEFAULT + room, Machine().peak))) for room in range(0, 100, 3)]
    assert kept == sorted(kept) and kept[-1] == 6


@pytest.mark.parametrize("missing, away", [(1, {0}), (8, {0}), (9, {0, 1}), (16, {0, 1}), (17, {0, 1, 2})])
def test_first_layers_go_to_the_host_first(missing, away):
    plan = find_plan(CHAIN, DEFAULT - missing, Machine().peak)
    assert plan.offloaded == away
    assert all(c.chunk_bytes is None for c in plan.choices)


def test_inputs_that_are_read_at_once_stay():
    assert may_leave(CHAIN) == (0, 1, 2)
    assert may_leave((LAYER, LAYER)) == (0,)


def test_chunks_are_cut_when_all_inputs_are_away():
    plan = find_plan(CHAIN, DEFAULT - 24 - 10, Machine().peak)
    assert plan.offloaded == {0, 1, 2}
    assert {c.chunk_bytes for c in plan.choices} == {4}
    alone = find_plan(CHAIN, DEFAULT - 10, Machine().peak, may_offload=False)
    assert alone.offloaded == set() and {c.chunk_bytes for c in alone.choices} == {4}


ROUNDED = tuple(replace(c, rounded_away=c.handed_on * 3 // 4) for c in CHAIN)


@pytest.mark.parametrize(
    "missing, rounded, away", [(0, 0, 0), (6, 1, 0), (7, 2, 0), (18, 3, 0), (19, 0, 3), (24, 0, 3)]
)
def test_inputs_are_rounded_before_they_leave_if_that_is_allowed(missing, rounded, away):
    plan = find_plan(ROUNDED, DEFAULT - missing, Machine(ROUNDED).peak, lossy=True)
    assert (plan.compressed, plan.offloaded) == (set(range(rounded)), set(range(away)))
    assert find_plan(ROUNDED, DEFAULT - missing, Machine(ROUNDED).peak).compressed == set()


def test_a_budget_that_cannot_be_met_names_the_least_that_can():
    with pytest.raises(NoPlan, match="31"):
        find_plan(CHAIN, FLOOR, Machine().peak)


TIMED = tuple(replace(c, seconds=10.0, longer=LEVELS) for c in (LAYER, LAYER, LAYER)) + (
    Costs(widest=16, seconds=10.0),
)


def slack_of(plan: ChainPlan) -> float | None:
    (slack,) = {c.slack for c in plan.choices}
    return slack


@pytest.mark.parametrize(
    "room, kept, slack",
    [(5, 0, None), (10, 1, None), (30, 3, None), (36, 3, 0.02), (44, 3, 0.01), (104, 6, 0.01)],
)
def test_chunks_grow_where_that_saves_most_per_byte(room, kept, slack):
    plan = find_plan(TIMED, DEFAULT + room, Machine(TIMED).peak)
    assert (sum(counts(plan)), slack_of(plan)) == (kept, slack)


def test_a_plan_that_saves_next_to_nothing_is_not_tried():
    machine = Machine(TIMED)
    slow = tuple(replace(c, seconds=1000.0) for c in TIMED)
    assert find_plan(slow, DEFAULT + 10, machine.peak) == ChainPlan.default(4)
    assert machine.asked == 1


def test_equal_regions_differ_only_where_that_saves_something():
    slow = tuple(replace(c, seconds=300.0, longer=()) for c in TIMED)
    assert counts(find_plan(slow, DEFAULT + 20, Machine(slow).peak)) == [0, 0, 0, 0]
    assert counts(find_plan(slow, DEFAULT + 30, Machine(slow).peak)) == [1, 1, 1, 0]
    assert counts(find_plan(TIMED, DEFAULT + 20, Machine(TIMED).peak)) == [1, 1, 0, 0]

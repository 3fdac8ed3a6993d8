"""What is free on a GPU bounds a step where the user states no budget. Tensors of the CPU stand in for a
GPU's, and free memory is what a test says."""

import pytest
import torch
from models import Plain, ids_of

from streambp_compile import StreamHint, backend, internals
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.device import target_device
from streambp_compile.memory import planned_chain
from streambp_compile.memory.chain_plan import ChainPlan, Costs, Longer, estimated, share_saved, steps_of
from streambp_compile.memory.memory_limits import CERTAIN, FreeMemory
from streambp_compile.memory.spare_memory import Memory, SpareMemory
from streambp_compile.passes.planning.kept_values import KeptValue
from streambp_compile.reporting.report import Report

LENGTH = 600
pytestmark = pytest.mark.usefixtures("interpreted")
CHAIN = (*[Costs(handed_on=8, widest=16, streamed=20)] * 3, Costs(widest=16, streamed=40))


def free(size, told=None):
    return FreeMemory(lambda: size, (told if told is not None else []).append)


def test_a_step_that_surely_fits_is_not_simulated():
    assert estimated(CHAIN) == 64
    assert free(64 / CERTAIN).find(CHAIN, (5,), lambda plan: 1 / 0) == ChainPlan.default(4)


def test_what_fits_never_takes_more_than_the_default():
    assert free(80).find(CHAIN, (5,), lambda plan: 70) == ChainPlan.default(4)


def test_what_does_not_fit_leaves_for_the_host_and_is_told():
    told = []
    plan = free(60, told).find(CHAIN, (5,), lambda plan: 64 - 8 * len(plan.offloaded))
    assert plan.offloaded and "would not fit" in told[0] and "host memory" in told[0]


def test_the_leanest_plan_is_tried_where_none_fits():
    sizes = []
    plan = free(10).find(CHAIN, (5,), lambda plan: sizes.append(plan) or 64 - 8 * len(plan.offloaded))
    assert plan.offloaded == {0, 1, 2} and len(sizes) > 2


def test_a_step_that_cannot_be_simulated_runs_by_the_default_plan():
    def fails(plan):
        raise NotImplementedError("an operator without a fake form")

    assert free(10).find(CHAIN, (5,), fails) == ChainPlan.default(4)


def test_gradients_that_do_not_exist_yet_are_no_free_memory(monkeypatch):
    monkeypatch.setattr(target_device, "index_of_gpu", lambda values: 0)
    monkeypatch.setattr(target_device, "free_on_gpu", lambda index: 1000)
    weight, known = torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(7))
    known.grad = torch.zeros(7)
    assert target_device.free_memory(None, [weight, known, torch.ones(3), 5]) == 1000 - 40


def test_memory_that_the_allocator_holds_unused_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 900))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 20)
    monkeypatch.setattr(target_device, "allowed_on_gpu", lambda index: 900)
    assert target_device.free_on_gpu(0) == 130
    monkeypatch.setattr(target_device, "allowed_on_gpu", lambda index: 120)  # a share that the user set
    assert target_device.free_on_gpu(0) == 100


def step(model, ids):
    return model(ids, ids)


@pytest.mark.long
def test_layer_inputs_leave_for_the_host_where_they_would_not_fit(monkeypatch):
    simulated, simulate = [], planned_chain.simulate

    def noted(*args, **kwargs):
        simulated.append(simulate(*args, **kwargs))
        return simulated[-1]

    monkeypatch.setattr(planned_chain, "simulate", noted)
    monkeypatch.setattr(backend, "is_on_gpu", lambda name, values: True)
    monkeypatch.setattr(backend, "free_memory", lambda name, values: room[0])
    monkeypatch.setattr(backend, "memory_of_gpu", lambda values: Counters(free=0).memory())
    model, room = Plain(256, 64, 4, 3).double(), [1 << 40]
    compiled = torch.compile(step, backend="streambp", options={"chunk_size": 100})
    ids = ids_of(1, LENGTH)
    step(model, ids).backward()
    expected = [p.grad.clone() for p in model.parameters()]

    def gradients():
        model.zero_grad()
        compiled(model, ids).backward()
        return [p.grad for p in model.parameters()]

    for found, wanted in zip(gradients(), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch._dynamo.reset()
    simulated.clear()
    room[0] = 1
    with pytest.warns(StreamHint, match="would not fit into the .* runs by a leaner plan: inputs of"):
        found = gradients()
    assert min(s.bytes for s in simulated) < simulated[0].bytes
    for ours, wanted in zip(found, expected):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"memory_budget": 1 << 40}, marks=pytest.mark.slow)],
    ids=["free memory", "a budget"],
)
def test_a_third_length_is_traced_no_more(options, monkeypatch):
    """What a plan weighs are numbers: a symbol among them would bind the graph to one length."""
    monkeypatch.setattr(backend, "is_on_gpu", lambda name, values: True)
    monkeypatch.setattr(backend, "free_memory", lambda name, values: 1 << 40)
    monkeypatch.setattr(backend, "memory_of_gpu", lambda values: Counters(free=1 << 40).memory())
    torch._dynamo.reset()
    report, traced = Report(), []

    def noted(graph, inputs):
        traced.append(graph)
        return Chain(graph, inputs, Config.of(None, {"chunk_size": 100, **options}), report).compiled()

    model = Plain(256, 64, 4, 3).double()
    compiled = torch.compile(step, backend=noted)
    for length in (LENGTH, LENGTH // 2, LENGTH + 131, 2 * LENGTH):
        compiled(model, ids_of(1, length)).backward()
    assert len(traced) == 2


# What is free is spent


class Counters:
    """A GPU's memory as a test says."""

    def __init__(self, total=1 << 30, free=1 << 30, allocated=1 << 20, peak=1 << 20):
        self.total, self.free, self.allocated, self.peak = total, free, allocated, peak

    def memory(self, to_come=lambda values: 0):
        counters = (lambda: self.free, lambda: self.allocated, lambda: self.peak)
        return Memory(self.total, *counters, to_come)


@pytest.fixture
def counters(monkeypatch):
    """A GPU whose memory a test says, the tensors of a CPU on it."""
    found = Counters()
    monkeypatch.setattr(backend, "is_on_gpu", lambda name, values: True)
    monkeypatch.setattr(backend, "free_memory", lambda name, values: 1 << 40)
    monkeypatch.setattr(backend, "memory_of_gpu", lambda values: found.memory())
    torch._dynamo.reset()
    return found


class Trained:
    """A small model whose steps are compiled."""

    def __init__(self):
        self.model, self.ids, self.report = Plain(256, 64, 4, 3).double(), ids_of(1, LENGTH), Report()
        self.compiled = torch.compile(step, backend=self.backend)

    def backend(self, graph, inputs):
        return Chain(graph, inputs, Config(), self.report).compiled()

    def check(self, length=None):
        """Take a step; its gradients are eager's."""
        ids = self.ids if length is None else ids_of(1, length)
        found = []
        for function in (step, self.compiled):
            self.model.zero_grad()
            function(self.model, ids).backward()
            found.append([p.grad for p in self.model.parameters()])
        for ours, wanted in zip(*found):
            torch.testing.assert_close(wanted, ours, rtol=1e-10, atol=1e-12)


@pytest.fixture
def plans(monkeypatch):
    """The plans that calls run by."""
    taken, call_by = [], planned_chain.PlannedChain.call_by

    def noted(self, plan):
        call = call_by(self, plan)

        def run(*args):
            if not any(map(internals.is_fake, args)):
                taken.append(plan)
            return call(*args)

        return run

    monkeypatch.setattr(planned_chain.PlannedChain, "call_by", noted)
    return taken


def kept(plan):
    return sum(c.keep for c in plan.choices)


@pytest.mark.long
def test_steps_keep_what_the_free_memory_allows(counters, plans):
    counters.free = 62 << 20
    trained = Trained()
    for _ in range(4):
        trained.check()
    assert [kept(plan) > 0 for plan in plans] == [False, False, True, True] and plans[3] == plans[2]
    assert "After 2 steps, a step takes up to" in trained.report.notes[0]
    assert "of the GPU are free for a step on 600 tokens" in "".join(trained.report.notes)
    counters.free = 56 << 20  # somebody else came
    trained.check()
    assert kept(plans[-1]) == 0


@pytest.mark.long
def test_a_shorter_sequence_runs_by_the_plan_that_keeps_all(counters, plans, monkeypatch):
    searched, search = [], planned_chain.SpendingChain.search
    monkeypatch.setattr(
        planned_chain.SpendingChain, "search", lambda self, *a: searched.append(a[1]) or search(self, *a)
    )
    trained = Trained()
    for length in (LENGTH, LENGTH // 2, LENGTH // 2, LENGTH // 3, LENGTH // 2, LENGTH // 4):
        trained.check(length)
    assert len(set(plans[3:])) == 1 and kept(plans[3]) > 0
    assert len(searched) == 1


@pytest.mark.long
def test_a_forward_that_runs_out_of_memory_is_run_again_by_the_default_plan(counters, plans, monkeypatch):
    trained = Trained()
    for _ in range(3):
        trained.check()
    assert kept(plans[-1]) > 0
    call_by = planned_chain.PlannedChain.call_by

    def full(self, plan):
        def fails(*args):
            raise torch.OutOfMemoryError("none is left")

        return fails if kept(plan) else call_by(self, plan)

    monkeypatch.setattr(planned_chain.PlannedChain, "call_by", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for _ in range(2):
        trained.check()
        assert kept(plans[-1]) == 0


@pytest.mark.long
def test_after_a_backward_that_failed_steps_run_by_the_default_plan(counters, plans):
    trained = Trained()
    for _ in range(2):
        trained.check()
    loss = trained.compiled(trained.model, trained.ids)

    def fails(gradient):
        raise torch.OutOfMemoryError("none is left")

    handle = trained.model.embed.weight.register_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    handle.remove()
    assert kept(plans[-1]) > 0
    trained.check()
    assert kept(plans[-1]) == 0


def test_hidden_states_that_leave_the_graph_keep_steps_lean(counters, plans):
    """What follows outside takes memory between forward and backward that nobody knows."""

    def hidden(model, ids):
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(x)
        return x

    trained = Trained()
    compiled = torch.compile(hidden, backend=trained.backend)
    for _ in range(3):
        compiled(trained.model, trained.ids).square().mean().backward()
    assert plans and kept(plans[-1]) == 0


def test_what_others_take_during_a_step_is_left_to_them():
    counters = Counters(total=1000, free=900, allocated=100, peak=100)
    spare = SpareMemory(counters.memory(to_come=lambda values: 40))
    for took in (30, 70):
        assert not spare.is_learnt
        start = spare.start([], needed=200)
        counters.peak = 100 + 200 + 40 + took
        spare.end(start)
    assert spare.is_learnt and spare.others == 70 and spare.room([]) == 900 - 40 - 70 - 50


def test_a_peak_from_before_bounds_what_others_take():
    counters = Counters(total=1000, free=900, allocated=100, peak=500)
    spare = SpareMemory(counters.memory(to_come=lambda values: 40))
    spare.end(spare.start([], needed=200))
    counters.allocated = 180
    spare.end(spare.start([], needed=200))
    assert spare.others == 500 - 180 - 240


def test_a_region_is_compiled_in_few_ways():
    values = tuple(KeptValue((), size, seconds) for size, seconds in ((5, 10.0), (7, 3.0), (9, 2.0)))
    longer = tuple(Longer(slack, 4, 1.0) for slack in (0.03, 0.01))
    costs = Costs(worth_keeping=values, longer=longer, seconds=100.0).in_grades()
    assert [(v.bytes, v.seconds, v.count) for v in costs.worth_keeping] == [(5, 10.0, 1), (16, 5.0, 2)]
    assert [c.slack for c in costs.longer] == [0.01]
    plan = ChainPlan.default(1).taking(steps_of([costs]))
    assert plan.choices[0].keep == 3 and share_saved(plan, [costs]) == pytest.approx(0.16)


def two_calls(model, ids, function):
    """Two calls of one compiled function before one backward, as for preferences."""
    return -torch.nn.functional.logsigmoid(function(model, ids) - 2 * function(model, ids.flip(1)))


def kept_graph(model, ids, function):
    """Two backwards of one forward."""
    loss = function(model, ids)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.long
@pytest.mark.parametrize("of", [two_calls, kept_graph])
def test_kept_values_are_read_as_often_as_backwards_want(of, counters, plans):
    trained = Trained()
    for _ in range(3):
        found = []
        for function in (step, trained.compiled):
            trained.model.zero_grad()
            of(trained.model, trained.ids, function).backward()
            found.append([p.grad for p in trained.model.parameters()])
        for wanted, ours in zip(*found):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    assert kept(plans[-1]) > 0


@pytest.mark.long
def test_a_forward_that_changes_weights_is_not_run_again(counters, plans, monkeypatch):
    """The change would be made twice."""

    def shrinking(model, ids):
        model.embed.weight.data.mul_(0.5)
        return model(ids, ids)

    trained = Trained()
    compiled = torch.compile(shrinking, backend=trained.backend)
    for _ in range(3):
        compiled(trained.model, trained.ids).backward()
    assert kept(plans[-1]) > 0

    def fails(*args):
        raise torch.OutOfMemoryError("none is left")

    call_by = planned_chain.PlannedChain.call_by
    monkeypatch.setattr(
        planned_chain.PlannedChain, "call_by", lambda self, plan: fails if kept(plan) else call_by(self, plan)
    )
    with pytest.raises(torch.OutOfMemoryError):
        compiled(trained.model, trained.ids)

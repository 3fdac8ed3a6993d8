"""What is free on a GPU bounds a step where the user states no budget. Tensors of the CPU stand in for a
GPU's, and free memory is what a test says."""

import pytest
import torch
from models import Plain, ids_of

from streambp_compile import StreamHint, backend, planned_chain, target_device
from streambp_compile.backend import Chain
from streambp_compile.chain_plan import ChainPlan, Costs, estimated
from streambp_compile.config import Config
from streambp_compile.memory_limits import CERTAIN, FreeMemory
from streambp_compile.report import Report

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


def test_layer_inputs_leave_for_the_host_where_they_would_not_fit(monkeypatch):
    simulated, simulate = [], planned_chain.simulate

    def noted(*args, **kwargs):
        simulated.append(simulate(*args, **kwargs))
        return simulated[-1]

    monkeypatch.setattr(planned_chain, "simulate", noted)
    monkeypatch.setattr(backend, "is_on_gpu", lambda name, values: True)
    monkeypatch.setattr(backend, "free_memory", lambda name, values: room[0])
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
    assert not simulated
    torch._dynamo.reset()
    room[0] = 1
    with pytest.warns(StreamHint, match="would not fit into the .* runs by a leaner plan: inputs of"):
        found = gradients()
    assert min(s.bytes for s in simulated) < simulated[0].bytes
    for ours, wanted in zip(found, expected):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"memory_budget": 1 << 40}, marks=pytest.mark.slow)],
    ids=["free memory", "a budget"],
)
def test_a_third_length_is_traced_no_more(options, monkeypatch):
    """What a plan weighs are numbers: a symbol among them would bind the graph to one length."""
    monkeypatch.setattr(backend, "is_on_gpu", lambda name, values: True)
    monkeypatch.setattr(backend, "free_memory", lambda name, values: 1 << 40)
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

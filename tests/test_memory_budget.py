"""``options={"memory_budget": …}``: the plan that is found fits and keeps gradients exact; layer inputs come
back from the host as they left."""

import math

import pytest
import torch
from models import Plain, ids_of

from benchmarks.memory import peak
from streambp_compile import explain
from streambp_compile.config import Config, budget_of
from streambp_compile.internals import FakeTensorMode, is_fake
from streambp_compile.memory.memory_limits import SPARE, OverBudget
from streambp_compile.runtime.compression import Compressed
from streambp_compile.runtime.memory_simulation import Ledger
from streambp_compile.runtime.offload import AHEAD, Offloading

WIDTH, LENGTH = 64, 600
pytestmark = pytest.mark.usefixtures("interpreted")


def loss_of(model, ids):
    return model(ids, ids)


@pytest.fixture
def model():
    return Plain(256, WIDTH, 4, 4).double()


def gradients(model, loss):
    model.zero_grad(set_to_none=False)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_exact(model, compiled, ids):
    expected = gradients(model, loss_of(model, ids))
    for ours, theirs in zip(gradients(model, compiled(model, ids)), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def compiled_for(**options):
    return torch.compile(loss_of, backend="streambp", options={"chunk_size": 100, **options})


def predicted(model, ids, **options):
    report = explain(loss_of, model, ids, streambp_options={"chunk_size": 100, **options})
    torch._dynamo.reset()
    return report


@pytest.mark.parametrize("extra", [pytest.param(extra, marks=pytest.mark.slow) for extra in (0.3, 3.0)])
def test_kept_values_fill_a_budget_and_never_exceed_it(model, extra):
    ids = ids_of(1, LENGTH)
    least = predicted(model, ids).peak.bytes
    budget = int(least * (1 + extra))
    report = predicted(model, ids, memory_budget=budget)
    assert any("kept values" in note for note in report.notes)
    assert least < report.peak.bytes <= budget
    compiled = compiled_for(memory_budget=budget)
    assert_exact(model, compiled, ids)
    measured = peak(lambda: compiled(model, ids).backward())
    assert abs(measured - report.peak.bytes) <= 0.02 * measured
    assert measured <= budget


@pytest.mark.slow
def test_a_budget_says_how_many_sequences_run_at_a_time():
    """Few of them save memory and take time: fewer than by default in a small budget, more in a large one."""
    model, ids = Plain(256, 2 * WIDTH, 4, 2).double(), ids_of(4, 2 * LENGTH)
    reports = [explain(loss_of, model, ids)]
    for share in (0.6, 4):
        torch._dynamo.reset()
        options = dict(memory_budget=int(share * reports[0].peak.bytes))
        reports.append(explain(loss_of, model, ids, streambp_options=options))
        torch._dynamo.reset()
        compiled = torch.compile(loss_of, backend="streambp", options=options)
        assert_exact(model, compiled, ids)
        measured = peak(lambda: compiled(model, ids).backward())
        assert abs(measured - reports[-1].peak.bytes) <= 0.02 * measured
        assert measured <= options["memory_budget"]
    usual, few, many = map(sequences_at_once, reports)
    assert few < usual < many == 4


def sequences_at_once(report) -> int:
    """The fewest, of four, that a region of a report runs for."""
    layers = [r.streamed for r in report.regions if r.streamed is not None and r.streamed.backward]
    return min(4 if layer.batch is None else layer.batch.at_once for layer in layers)


@pytest.mark.slow
def test_layer_inputs_leave_for_a_smaller_budget(model):
    ids = ids_of(1, LENGTH)
    default = predicted(model, ids).peak.bytes
    budget = int((default - 2 * LENGTH * WIDTH * 8 + 1000) / (1 - SPARE))
    report = predicted(model, ids, memory_budget=budget)
    assert any("host memory" in note for note in report.notes)
    assert report.peak.bytes <= budget
    compiled = compiled_for(memory_budget=budget)
    assert_exact(model, compiled, ids)
    assert peak(lambda: compiled(model, ids).backward()) <= budget


@pytest.mark.slow
def test_the_backward_of_a_kept_graph_brings_inputs_back_twice(model):
    ids = ids_of(1, LENGTH)
    expected = gradients(model, loss_of(model, ids))
    model.zero_grad(set_to_none=False)
    loss = compiled_for(offload=True)(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()
    for p, g in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, 2 * g, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_another_length_has_a_plan_of_its_own(model):
    report = predicted(model, ids_of(1, LENGTH))
    budget = int(report.peak.bytes * 1.6)
    compiled = compiled_for(memory_budget=budget)
    for length in (LENGTH, LENGTH // 2, LENGTH + 131, LENGTH):
        ids = ids_of(1, length)
        assert_exact(model, compiled, ids)
        assert peak(lambda: compiled(model, ids).backward()) <= budget


@pytest.mark.slow
def test_a_budget_below_all_plans_is_an_error_that_names_the_least(model):
    with pytest.raises(
        Exception, match="memory_budget allows .* and the leanest plan for 600 tokens needs"
    ) as caught:
        compiled_for(memory_budget=10_000)(model, ids_of(1, LENGTH))
    assert isinstance(caught.value.inner_exception, OverBudget)


@pytest.mark.parametrize(
    "given, found",
    [
        (4096, 4096),
        ("60GiB", 60 * 2**30),
        ("400 MiB", 400 * 2**20),
        ("1.5GB", 1_500_000_000),
        (0.5, 0.5),
        ("0.5", 0.5),
    ],
)
def test_ways_to_say_a_budget(given, found):
    assert budget_of(given) == found


@pytest.mark.parametrize(
    "given", ["much", "5 parsec", "80%", "60 GiB/s", -1, 0, True, [], "", 0.0, float("inf")]
)
def test_what_is_no_budget(given):
    with pytest.raises(ValueError, match="memory_budget must be"):
        Config.of(None, {"memory_budget": given})


def test_a_share_is_of_the_free_memory_of_the_device():
    config = Config.of(None, {"memory_budget": 0.5, "device": "H200"})
    assert config.budget([]) == int(0.5 * 140.4 * 2**30)


@pytest.mark.parametrize("device, alive", [("cpu", 1), ("cuda", 1 + AHEAD)])
def test_a_simulation_counts_what_comes_back_ahead(device, alive):
    size = 1 << 18
    with FakeTensorMode(), Ledger(device) as ledger:
        offloading = Offloading((), is_fake)
        away = [offloading.leave(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(5)]
        assert ledger.held == 0
        back = away[-1].restored()
        assert ledger.held == alive * size and back.device.type == device


@pytest.mark.slow
def test_layer_inputs_in_8_bits_take_a_quarter_and_say_so(model):
    model, ids = model.float(), ids_of(1, LENGTH)
    default = predicted(model, ids)
    report = predicted(model, ids, lossy=True)
    assert any("gradients are not exact" in note for note in report.notes)
    # Embeddings are computed again, and the input of the layer that runs is back at its own size.
    inputs = 2 * ids.numel() * WIDTH * 4
    assert default.peak.bytes - report.peak.bytes > 0.7 * inputs
    compiled = compiled_for(lossy=True)
    expected = gradients(model, loss_of(model, ids))
    found = gradients(model, compiled(model, ids))
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)]
    assert 1e-5 < max(errors) < 0.05
    again = gradients(model, compiled(model, ids))
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    assert abs(peak(lambda: compiled(model, ids).backward()) - report.peak.bytes) <= 0.02 * report.peak.bytes


@pytest.mark.slow
def test_layer_inputs_are_rounded_only_where_a_budget_asks_for_it(model):
    model, ids = model.float(), ids_of(1, LENGTH)
    default = predicted(model, ids).peak.bytes
    report = predicted(model, ids, lossy=True, memory_budget=math.ceil(default / (1 - SPARE)))
    assert not any("8 bits" in note for note in report.notes)
    budget = int((default - ids.numel() * WIDTH * 2) / (1 - SPARE))  # one layer's input in 8 bits frees more
    report = predicted(model, ids, lossy=True, memory_budget=budget)
    assert any("in 8 bits" in note for note in report.notes)
    assert report.peak.bytes <= budget
    exact = predicted(model, ids, memory_budget=budget)
    assert any("host memory" in note for note in exact.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_rounded_to_a_127th_of_their_largest_number(dtype):
    value = torch.randn(3, 700, 96, dtype=dtype) * torch.logspace(-3, 3, 700)[:, None].to(dtype)
    value[1, 5] = 0
    back = Compressed(value).restored()
    largest = value.double().abs().amax(-1, keepdim=True)
    slack = largest * (torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5)
    assert back.dtype == dtype and back.stride() == value.stride()
    assert ((back.double() - value.double()).abs() <= largest / 254 + slack).all()

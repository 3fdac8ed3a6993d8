"""Devices in the table and out of it, the model of a sweep's cost, and the chunk lengths that follow."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import LlamaLike
from torch._subclasses.fake_tensor import FakeTensorMode

from streambp_compile import explain, internals
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.device.target_device import planned_for, target_of
from streambp_compile.memory.planned_chain import longer_of
from streambp_compile.passes.ir import EVERYWHERE, FUTURE, PAST, Reach
from streambp_compile.passes.planning import chunk_length, cost_model
from streambp_compile.passes.planning.choices import DEFAULT, Choices
from streambp_compile.passes.planning.cost_model import Cost, Work
from streambp_compile.passes.planning.devices import KNOWN, REFERENCE_CPU, derived, known, named
from streambp_compile.passes.planning.shorter_chunks import shorter_chunks
from streambp_compile.regions.batch_parts import bytes_between_sweeps
from streambp_compile.reporting.report import Report
from streambp_compile.runtime.memory_simulation import Ledger, main_device
from streambp_compile.tools.plan.fake_steps import on_device

GIB = 2**30
REPORTED = (  # what drivers say, and the row that it means
    ("NVIDIA H200", 140, "H200"),
    ("NVIDIA H100 80GB HBM3", 80, "H100"),
    ("NVIDIA H100 PCIe", 80, "H100 PCIe"),
    ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
    ("NVIDIA A100-SXM4-40GB", 40, "A100-40"),
    ("NVIDIA A100-PCIE-40GB", 40, "A100-40"),
    ("NVIDIA A100 80GB PCIe", 80, "A100 80GB PCIe"),
    ("NVIDIA A800-SXM4-80GB", 80, "A800"),
    ("NVIDIA L4", 22, "L4"),
    ("NVIDIA L40S", 45, "L40S"),
    ("NVIDIA GeForce RTX 4090", 24, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
    ("NVIDIA RTX 6000 Ada Generation", 48, "RTX 6000 Ada"),
    ("Tesla V100-SXM2-16GB", 16, "V100-16"),
    ("Tesla T4", 15, "T4"),
    ("NVIDIA A10G", 22, None),
    ("Radeon", 16, None),
)


@pytest.mark.parametrize(("name", "gib", "row"), REPORTED)
def test_a_driver_s_name_means_a_row(name, gib, row):
    found = known(name, gib * GIB)
    assert (found and found.name) == row


def test_every_row_is_found_by_its_own_name():
    assert [named(row.name) for row in KNOWN] == [*KNOWN]
    assert named("cpu") is REFERENCE_CPU


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.name)
def test_every_row_is_a_device_that_could_be(row):
    assert 10 * row.bandwidth < row.half < 600 * row.bandwidth and row.single <= row.half
    assert row.free == row.memory > 10 * GIB and row.cache < 1 << 28 and row.tile == 128
    assert all(backward < forward < row.half * 1.1 for _, (forward, backward) in row.attention)


DRIVERS = (  # name, capability, multiprocessors, clock, memory clock, bus bits
    ("A100-80", (8, 0), 108, 1.41e9, 1.593e9, 5120),
    ("H100", (9, 0), 132, 1.83e9, 2.619e9, 5120),
    ("RTX 4090", (8, 9), 128, 2.52e9, 10.501e9, 384),
    ("V100-16", (7, 0), 80, 1.53e9, 0.877e9, 4096),
)


@pytest.mark.parametrize(("name", "capability", "processors", "clock", "memory_clock", "bus"), DRIVERS)
def test_a_device_derived_from_its_driver_s_figures_is_the_table_s(
    name, capability, processors, clock, memory_clock, bus
):
    row = named(name)
    found = derived("unknown", capability, row.memory, processors, clock, memory_clock, bus, row.cache)
    for mine, stated in (
        (found.half, row.half),
        (found.single, row.single),
        (found.bandwidth, row.bandwidth),
    ):
        assert abs(mine / stated - 1) < 0.1
    silent = derived("unknown", capability, row.memory, processors, 0, 0, 0, row.cache)
    assert 0.5 < silent.half / row.half < 1.3 and 0.3 < silent.bandwidth / row.bandwidth < 3
    assert "driver" in str(silent)


def test_which_device_a_region_is_planned_for():
    assert planned_for(None, [torch.ones(1), 3]) is REFERENCE_CPU
    assert planned_for("A100-40", [torch.ones(1)]).name == "A100-40"
    with pytest.raises(ValueError, match="Unknown device 'H1000'; known devices are CPU, B200"):
        Config(device="H1000")


def test_how_many_keys_a_chunk_reaches():
    assert cost_model.reached(EVERYWHERE, 8, 64) == 1
    assert cost_model.reached(PAST, 8, 64) == cost_model.reached(FUTURE, 8, 64) == 72 / 128
    assert cost_model.reached(Reach(-15, 0), 8, 64) == 23 / 64
    assert cost_model.reached(Reach(-15, 0), 64, 64) == 1


ROUND = replace(
    REFERENCE_CPU,
    bandwidth=100.0,
    half=1000.0,
    single=1000.0,
    cache=100,
    launch=0.5,
    tile=2,
    processors=10,
    attention=(),
    extra_rows=0.0,
)
WORK = Work(
    tokens=64,
    products=((torch.float32, 4000.0, 5),),
    attention=((torch.float32, True, 2000.0, 2),),
    traffic=6400,
    weights=50,
    totals=100,
    prefix=800,
    keys=PAST,
    kernels=3,
    widest=25,
)


def test_seconds_term_by_term():
    """Eight chunks of eight tokens: four seconds at the full rate, half of the traffic in the cache."""
    found = WORK.cost(8, ROUND)
    assert found == Cost(
        products=4.0,
        attention=4.0 * (1 + 20 / 32),
        traffic=32.0,
        tails=8 * 10 * 4 * 5 / 1000,
        weights=4.0,
        totals=8.0,
        prefix=8 * 800 * (72 / 128) / 100,
        launches=12.0,
    )
    assert found.efficiency == 4.0 / (4.0 + 1.6 + 4.0 + 8.0)
    assert (found + found).seconds == (found * 2).seconds == 2 * found.seconds
    assert WORK.cost(8, replace(ROUND, extra_rows=40)).attention == 4.0 * (1 + 40 / 8)


def test_lengths_are_multiples_of_a_tile():
    assert [*chunk_length.lengths_up_to(100, 16)] == [32, 48, 64, 80, 96]
    assert [*chunk_length.lengths_up_to(10, 128)] == [128]
    long = [*chunk_length.lengths_up_to(1 << 20, 128)]
    assert len(long) < 300 and all(c % 128 == 0 for c in long)


def planned(
    width: int, heads: int, kv_heads: int, tokens: int, dtype: torch.dtype, batch: int = 1, **options
) -> Report:
    """The plan of a step of one layer and its head, on fake tensors; nothing is run."""
    mode, report = internals.FakeTensorMode(allow_non_fake_inputs=True), Report()

    def backend(module, inputs):
        Chain(module, inputs, Config(**options), report).compiled()
        return module.forward

    with torch.device("meta"):
        model = LlamaLike(width, heads, kv_heads, layers=1).to(dtype)
    model = on_device(model, mode, "cpu")
    with mode:
        ids = torch.empty((batch, tokens), dtype=torch.int64)
        torch.compile(lambda i: model(i, i), backend=backend)(ids)
    return report


def chunks_of(report: Report) -> list[int]:
    return [c for r in report.regions for s in (r.forward, r.backward) if s is not None for c in s.chunks]


def test_chunks_are_as_long_as_a_device_wants_them(interpreted):
    """Thousands of rows on a large GPU, so that products run at nine tenths of their rate; fewer where memory
    is small."""
    report = planned(4096, 32, 8, 32768, torch.bfloat16, device="H200")
    assert "planned for H200 (sm_90): 140.4 GiB" in str(report)
    layer, head = report.regions
    for device in map(named, ("H200", "A100-80", "T4")):
        for region, schedule in ((layer, layer.forward), (layer, layer.backward), (head, head.forward)):
            chunks = chunk_length.chunk_lengths(schedule.program, region.analysis, DEFAULT, device)
            assert device.name != "H200" or chunks == schedule.chunks
            costs = chunk_length.program_cost(schedule.program, region.analysis, chunks, device)
            for sweep, chunk, found in zip(schedule.program.sweeps, chunks, costs):
                assert chunk % 128 == 0 and chunk <= 8192
                assert (
                    chunk * chunk_length.sweep_work(sweep, region.analysis).widest
                    <= device.memory // chunk_length.SHARE
                )
                few = (
                    schedule is layer.backward and not sweep.sums
                )  # keys and values are made again: few products
                assert device.name == "T4" or chunk >= 2048 and (few or found.efficiency > chunk_length.FULL)


@pytest.mark.parametrize(("tokens", "longest"), (pytest.param(512, 256, marks=pytest.mark.slow), (2048, 512)))
def test_a_sequence_is_cut_in_four_unless_it_is_short(tokens, longest, interpreted):
    found = chunks_of(planned(64, 4, 2, tokens, torch.float32))
    assert all(c <= longest for c in found) and all(c % 16 == 0 for c in found)
    assert {*chunks_of(planned(64, 4, 2, tokens, torch.float32, chunk_size=100))} == {100}


@pytest.mark.parametrize("tokens", (1024, 8192))
def test_a_chunk_of_logits_is_a_small_part_of_them(tokens, interpreted):
    """Even of a short sequence, and with several tensors as wide as logits."""
    weight, other = torch.nn.Parameter(torch.randn(4096, 64)), torch.nn.Parameter(torch.randn(4096, 64))

    def distilled(h):
        ours, theirs = (h @ weight.T).log_softmax(-1), (h @ other.T).log_softmax(-1)
        middle = (ours.exp() + theirs.exp()).log()
        return (ours.exp() * (ours - middle) + theirs.exp() * (theirs - middle)).sum()

    (region,) = explain(distilled, torch.randn(2, tokens, 64, requires_grad=True)).regions
    found = region.streamed.forward
    sweep, chunk = found.program.sweeps[-1], found.chunks[-1]
    work = chunk_length.sweep_work(sweep, region.streamed.analysis)
    assert work.single >= 2 * 4096 * 4 and work.widest >= 2 * work.single
    assert 32 <= chunk <= tokens * work.single / (chunk_length.PART * work.widest)


@pytest.fixture(scope="module")
def heads_that_agree(interpreted_together):
    """Three heads of one hidden state, two of which are compared; the report at the default chunk length."""

    def loss(h, *weights):
        first, second, third = ((h @ weight.T).log_softmax(-1) for weight in weights)
        return ((first.exp() - second.exp()) * (first - second)).sum() - third[..., 0].sum()

    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(4096, 256)) for _ in range(3)]
        return explain(loss, torch.empty(2, 2048, 256, requires_grad=True), *weights)


def test_heads_and_their_gradients_take_less_than_half_of_the_logits(heads_that_agree):
    """Bodies that run node by node hold more than the model of what is fused says, as some kernels do."""
    (region,) = heads_that_agree.regions
    modelled = chunk_length.chunk_lengths(
        region.forward.program, region.analysis, DEFAULT, region.streamed.device
    )
    assert region.forward.chunks < modelled
    assert heads_that_agree.peak.bytes < 2 * 2048 * 4096 * 4 / 2


@pytest.mark.parametrize(
    "held, chosen, found",
    [
        (1 << 10, {}, 96),
        (1 << 18, {}, 48),
        (1 << 24, {}, 16),  # no fewer rows than the shortest chunk of one sequence has
        (1 << 24, {"chunk_size": 96}, 96),
        (1 << 24, {"chunk_bytes": 1 << 20}, 96),
    ],
)
def test_a_chunk_is_as_short_as_its_compiled_body_asks_for(held, chosen, found, heads_that_agree):
    (region,) = heads_that_agree.regions
    program, device = region.forward.program, region.streamed.device
    chunks = shorter_chunks(
        program, region.analysis, Choices(**chosen), device, (96,), lambda at, tokens: tokens * held
    )
    assert chunks == (found,)


def test_chunks_on_a_cpu_stay_in_its_cache(interpreted):
    """The same on every machine."""
    report = planned(512, 8, 4, 8192, torch.float32)
    layer, _ = report.regions
    for schedule in (layer.forward, layer.backward):
        for sweep, chunk in zip(schedule.program.sweeps, schedule.chunks):
            assert (
                160 <= chunk <= 1024
                and chunk * chunk_length.sweep_work(sweep, layer.analysis).widest < REFERENCE_CPU.cache
            )


def test_memory_to_spare_makes_chunks_longer(interpreted):
    """None is longer than a quarter of the sequence, or makes a value so large that it is mapped afresh."""
    for region in filter(None, (r.streamed for r in planned(512, 8, 4, 8192, torch.float32).regions)):
        for schedule in filter(None, (region.forward, region.backward)):
            args = (schedule.program, region.analysis)
            slacks = (None, *chunk_length.LONGER)
            found = [chunk_length.chunk_lengths(*args, Choices(slack=s), region.device) for s in slacks]
            for sweep, chunks in zip(schedule.program.sweeps, zip(*found)):
                single = chunk_length.sweep_work(sweep, region.analysis).single
                assert list(chunks) == sorted(chunks) and chunks[-1] <= 2048
                assert chunks[-1] == chunks[0] or chunks[-1] * single < region.device.mapped
            weighed = [chunk_length.time_and_width(*args, Choices(slack=s), region.device) for s in slacks]
            seconds, widths = zip(*weighed)
            assert list(seconds) == sorted(seconds, reverse=True) and list(widths) == sorted(widths)
    costs = longer_of(region)
    assert costs[0] > 0 and len(costs[1]) == len(chunk_length.LONGER)


def test_memory_to_spare_makes_more_sequences_run_at_a_time(interpreted):
    """And one does where it is short."""
    layer = planned(128, 4, 2, 1024, torch.float32, batch=8).regions[0].streamed
    programs, batch = [layer.forward.program, layer.backward.program], layer.batch

    def at_once(**choices) -> int:
        how = (layer.analysis, Choices(**choices), layer.device)
        return chunk_length.sequences_at_once(programs, *how, batch.count, batch.at_once)

    found = [at_once(slack=slack) for slack in chunk_length.LONGER]
    assert 1 == at_once(chunk_bytes=1) < at_once() == batch.at_once < found[-1] and found == sorted(found)
    seconds, longer = longer_of(layer)
    saved, more = [c.seconds for c in longer], [c.bytes for c in longer]
    assert saved == sorted(saved) and more == sorted(more) and 0 < saved[-1] < 0.06 * seconds
    assert more[-1] >= bytes_between_sweeps(programs[0]) * (found[-1] / batch.at_once - 1)


@pytest.mark.slow
def test_fake_arguments_are_explained_without_being_computed(interpreted):
    mode = internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = LlamaLike(layers=2)
    model = on_device(model, mode, "cpu")
    with mode:
        ids = torch.empty((1, 4096), dtype=torch.int64)
        report = explain(lambda i: model(i, i), ids, streambp_options={"device": "RTX 3090"})
    assert report.peak.backward and 0 < report.peak.bytes < 1 << 30
    assert "planned for RTX 3090 (sm_86): 23.7 GiB" in str(report)


@pytest.mark.parametrize("batch", ((), (3,)))
def test_products_that_widen_are_counted_where_torch_has_no_fake_form(batch):
    """Half-precision operands summed in float32: 2.11 has them on CUDA alone."""
    aten = torch.ops.aten
    adding, product = (aten.baddbmm, aten.bmm) if batch else (aten.addmm, aten.mm)
    with internals.FakeTensorMode():
        left, right = (
            torch.empty(*batch, 4, 8, dtype=torch.bfloat16),
            torch.empty(*batch, 8, 16, dtype=torch.bfloat16),
        )
        total = torch.empty(*batch, 4, 16)
        with Ledger() as ledger:
            added = adding.dtype(total, left, right, torch.float32)
            made = product.dtype(left, right, torch.float32)
            into = adding.dtype_out(total, left, right, torch.float32, out=added)
        assert (
            added.shape == made.shape == total.shape
            and added.dtype == made.dtype == torch.float32
            and into is added
        )
        assert ledger.held == 2 * total.numel() * 4


def test_the_generated_wrapper_is_found_behind_what_lies_around_it():
    names = {"assert_size_stride": None}
    exec("class Wrapper:\n    def call(self, args):\n        return args", names)
    call = names["Wrapper"]().call

    def closed(function):
        return lambda args: function(args)

    assert internals.generated(call) is internals.generated(closed(call))
    assert internals.generated(closed(functools.partial(closed(call)))).__self__ is call.__self__
    with pytest.raises(TypeError, match="Nothing that Inductor wrote"):
        internals.generated(closed(len))


def test_the_allocator_s_blocks_are_counted_on_cuda():
    ledger = Ledger("cuda")
    assert (ledger.device, ledger.block) == ("cuda", 512) and Ledger().block == 1
    assert (
        main_device([torch.ones(1, device="meta"), torch.ones(1)]) == "meta"
        and main_device([1, torch.ones(1)]) == "cpu"
    )


def test_conditions_on_sizes_that_tracing_found_equal():
    """A symbol that was replaced by an equal one is still named by earlier conditions."""
    inputs = internals.BodyInputs(SimpleNamespace(bindings=()), 16)
    rows, length = inputs.symbol("rows", 48), inputs.symbol("length", 48)
    assert 3 * rows < 1000 and 5 * length > 7 and rows == length
    inputs.values = [rows, inputs.empty([length], [1], torch.float32, torch.device("cpu"))]
    holds = internals.guard_of(internals.conditions_of(inputs))
    assert holds([48, torch.empty(48)]) and not holds([400, torch.empty(400)])


def test_a_kernel_must_run_on_the_gpu_that_is_there_whichever_is_planned_for(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for here, planned, chosen in (((7, 0), (9, 0), (7, 0)), ((9, 0), (8, 0), (8, 0)), ((9, 0), None, (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=here: here)
        assert target_of(gpu, planned).capability == chosen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert target_of(gpu, (8, 0)).capability == (8, 0)


def test_kernels_are_deterministic_where_the_user_asks_for_it():
    gpu = torch.device("cuda")
    assert "cudnn" not in target_of(gpu, (9, 0)).disabled
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert "cudnn" in target_of(gpu, (9, 0)).disabled
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "cudnn" not in target_of(gpu, (9, 0)).disabled
    finally:
        torch.use_deterministic_algorithms(before)

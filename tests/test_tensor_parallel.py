"""Layers that compute with DTensors: gradients of the model that is not split, and the collectives of eager
code, on groups of processes."""

import functools
from multiprocessing import get_context

import pytest
import torch
from selection import representatives
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.memory import peak
from benchmarks.setups import tensor_parallel
from benchmarks.setups.measurement import Row, Way, measured
from benchmarks.zoo import interpret_bodies
from streambp_compile import internals
from streambp_compile.passes.normalization.normalize import normalize
from streambp_compile.passes.rules import along_of

c10d, streambp = torch.ops._c10d_functional, torch.ops.streambp
CHUNKS, LENGTH = 4, 64  # of 16 tokens each
BY_TOKENS = "Tensor, sequence and loss parallel"
ON_MESH = f"{BY_TOKENS}, FSDP2 on a 2-D mesh"
AS_DTENSORS = f"{BY_TOKENS}, hidden states as DTensors"
CHOSEN = {AS_DTENSORS}


def row_of(name: str, length: int = LENGTH) -> Row:
    """In a process of the group."""
    interpret_bodies()
    setup = tensor_parallel.SETUPS[name]
    kept = {k: v for k, v in setup.keywords.items() if k in ("tied", "sharded")}
    return measured(setup, (length,), truth=functools.partial(tensor_parallel.unparallel, **kept))


def check(rows: list[Row]) -> None:
    for row in rows:
        assert row.error < 1e-12
        assert row.layers and row.head and row.notes == ()
        assert row.collectives == rows[0].collectives
        assert row.collectives.get("reduce-scatter") == row.expected.get("reduce-scatter")


@pytest.mark.long
@pytest.mark.parametrize("name", representatives([s for s in tensor_parallel.SETUPS if s != ON_MESH], CHOSEN))
def test_gradients_are_those_of_the_model_that_is_not_split(name, ranks):
    check(ranks.run(row_of, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", tensor_parallel.SETUPS)
def test_on_four_processes(name, four_ranks):
    check(four_ranks.run(row_of, name))


@pytest.mark.slow
def test_a_chunk_reduces_its_rows_and_one_reduction_per_layer_is_repeated(ranks):
    """Which is that behind attention, as with checkpointing."""
    for row in ranks.run(row_of, "Tensor parallel by features"):
        repeated = tensor_parallel.LAYERS
        assert row.collectives["all-reduce"] == CHUNKS * (row.expected["all-reduce"] + repeated)


@pytest.mark.slow
def test_uneven_parts_run_unchunked(ranks):
    """Hidden states that are plain tensors have to be even in eager code, too."""
    for row in ranks.run(row_of, AS_DTENSORS, LENGTH - 1):
        assert row.error < 1e-12
        assert row.collectives == row.expected
        assert any("does not divide evenly among the processes" in note for note in row.notes)


def peaks(name: str, processes: int, tokens: int) -> tuple[int, int]:
    """Bytes of a streamed step and of a checkpointed one, in a group whose other processes are not there:
    gloo frees what it sends in threads that the profiler does not see."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    interpret_bodies()
    found = []
    for way in (Way.STREAMED, Way.CHECKPOINTED):
        job = tensor_parallel.SETUPS[name](way)
        job.step(tokens)
        found.append(peak(functools.partial(job.step, tokens)))
    return found[0], found[1]


@pytest.mark.slow
def test_peak_of_a_process_under_sequence_and_loss_parallel():
    with get_context("spawn").Pool(1) as pool:
        streamed, checkpointed = pool.apply(peaks, (BY_TOKENS, 4, 256))
    assert streamed < 0.4 * checkpointed


def both_ways() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """In a process of the group: gathered and scattered values, and what they should be."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = torch.distributed.group.WORLD.group_name
    parts = [torch.arange(16.0).view(2, 4, 2) + 100 * r for r in range(world)]
    found = []
    for dim in range(3):
        made = streambp.gathered(parts[rank], dim, world, group)
        found.append((made, torch.cat(parts, dim)))
        own = streambp.scattered(made + rank, dim, "sum", world, group)
        total = sum(torch.cat(parts, dim) + r for r in range(world))
        found.append((own, total.chunk(world, dim)[rank]))
    return found


def test_gathering_and_scattering_along_any_dimension(ranks):
    for pairs in ranks.run(both_ways):
        for made, truth in pairs:
            assert torch.equal(made, truth)
            assert made.is_contiguous()


def uneven_ones() -> list[bool]:
    """In a process of the group: of an even and of an uneven DTensor."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = tensor_parallel.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    values = (distribute_tensor(torch.zeros(3, n), mesh, [Shard(1)]) for n in (4, 5))
    return [internals.is_uneven(v) for v in values]


def test_every_process_knows_an_uneven_dtensor(ranks):
    assert ranks.run(uneven_ones) == [[False, True]] * 2


def compared(*plans: str) -> list[list[int]]:
    """In a process of the group, which has the first of two plans if it is the first process."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD.group_name
    before = internals.others_with_another("equal", group, "same")
    torch.distributed.barrier()
    return [before, internals.others_with_another(f"differ {plans}", group, plans[rank])]


def test_processes_see_another_plan_without_waiting(ranks):
    (same_0, first), (same_1, second) = ranks.run(compared, "by 16", "by 32")
    assert same_0 == same_1 == []
    assert first == [1] or second == [0]  # the later one sees it, or both do


def traced(function, *shapes):
    with internals.FakeTensorMode():
        trace = make_fx(function, decomposition_table=internals.decompositions())
        return normalize(trace(*map(torch.empty, shapes)))


@pytest.mark.parametrize("batch", [1, 2])
def test_gathers_and_scatters_name_their_dimension(batch):
    def there_and_back(part):
        parts = c10d.wait_tensor(c10d.all_gather_into_tensor(part, 2, "0"))
        whole = parts.view(1, 16, 4) if batch == 1 else torch.cat(parts.split(batch), 1)
        scattered = torch.cat((whole * 2).split(8, 1))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(scattered, "sum", 2, "0"))

    graph = traced(there_and_back, (batch, 8, 4)).graph
    named = [n for n in graph.nodes if along_of(n) is not None]
    assert [n.target for n in named] == [streambp.gathered.default, streambp.scattered.default]
    assert [along_of(n) for n in named] == [1, 1]
    assert [tuple(n.meta["val"].shape) for n in named] == [(batch, 16, 4), (batch, 8, 4)]


def test_parts_in_another_order_are_gathered_along_the_first_dimension():
    def swapped(part):
        first, second = c10d.wait_tensor(c10d.all_gather_into_tensor(part, 2, "0")).split(2)
        return torch.cat([second, first], 1)

    graph = traced(swapped, (2, 8, 4)).graph
    assert [along_of(n) for n in graph.nodes if along_of(n) is not None] == [0]

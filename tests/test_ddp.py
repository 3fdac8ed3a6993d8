"""DistributedDataParallel as it comes: two processes on gloo, several buckets, Dynamo's DDP optimizer at its
default."""

import pytest
import torch
import torch.distributed as dist
from selection import representatives

from benchmarks.setups import ddp
from benchmarks.setups.measurement import Way, measured
from benchmarks.zoo import interpret_bodies

CHOSEN: set[str] = set()  # each starts two processes
PIECES = "DDP, a backend that calls ours"


def row_of(name: str):
    """In a process of the group."""
    interpret_bodies()
    return measured(ddp.SETUPS[name])


@pytest.mark.parametrize("name", representatives([n for n in ddp.SETUPS if n != PIECES], CHOSEN))
def test_all_regions_stream_with_the_collectives_of_eager(name, ranks):
    for row in ranks.run(row_of, name):
        assert row.error < 1e-12
        assert (row.layers, row.head, row.graphs) == (True, True, 1)
        assert row.collectives == row.expected
        assert row.notes == ()


@pytest.mark.slow
def test_pieces_of_a_graph_are_exact_and_hinted_at(ranks):
    for row in ranks.run(row_of, PIECES):
        assert row.error < 1e-12
        assert any("gradient buckets" in note for note in row.notes)


def events_of_a_step() -> list[str]:
    """Gradients and reduced buckets in the order in which the backward makes them."""
    interpret_bodies()
    events = []

    def reduced(state, bucket):
        events.append(f"bucket {bucket.index()}")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    job = ddp.ddp(Way.STREAMED, hook=reduced, watch=events.append)
    job.step(97)  # after which DDP orders its buckets as gradients came
    events.clear()
    job.step(97)
    return events


@pytest.mark.long
def test_buckets_are_reduced_while_the_backward_goes_on(ranks):
    for events in ranks.run(events_of_a_step):
        layers = [e.split(".")[1] for e in events if e.startswith("layers.")]
        assert layers == sorted(layers, reverse=True)
        assert events.index("bucket 0") < events.index("layers.2.qkv.weight")
        assert events.index("bucket 1") < events.index("layers.1.qkv.weight")


@pytest.mark.usefixtures("interpreted")
def test_other_backends_are_still_cut_into_buckets(monkeypatch):
    from streambp_compile import internals

    seen = []

    def compile_fn(optimizer, module, inputs, **options):
        seen.append(module)
        return module

    monkeypatch.setattr(internals.distributed.DDPOptimizer, "compile_fn", compile_fn)
    internals.keep_ddp_graphs_whole("streambp_compile")
    optimizer = internals.distributed.DDPOptimizer(2**30, torch.compile, 2**20)
    optimizer.compile_fn("a graph", [])
    assert seen == ["a graph"]

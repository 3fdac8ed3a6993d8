"""FSDP2 on two processes: what streams, which collectives run, and which weights lazy logits may read."""

import pytest
import torch
from selection import representatives

from benchmarks.setups import fsdp2
from benchmarks.setups.decoder import ids_of
from benchmarks.setups.measurement import Way, measured
from benchmarks.zoo import interpret_bodies

CHOSEN = {"FSDP2, compiled after sharding"}
HEAD_APART = {
    "FSDP2, head in a group of its own",
    "FSDP2, head in a group of its own, loss outside",
    "FSDP2, head in a group that is kept",
}
WITHOUT_HEAD = HEAD_APART | {"FSDP2, layers compiled one by one", "FSDP2, loss outside, all resharded"}


IN_FLOAT32 = "FSDP2, mixed precision"  # of a model in float64


def row_of(name: str):
    """In a process of the group."""
    interpret_bodies()
    return measured(fsdp2.SETUPS[name])


@pytest.mark.parametrize("name", representatives(fsdp2.SETUPS, CHOSEN))
def test_layers_stream_with_the_collectives_of_eager(name, ranks):
    for row in ranks.run(row_of, name):
        assert row.error < (1e-5 if name == IN_FLOAT32 else 1e-12)
        assert row.layers and (row.head or name in WITHOUT_HEAD)
        assert row.collectives == row.expected
        assert any("head in a group of its own" in note for note in row.notes) is (name in HEAD_APART)


def logits_read_late() -> tuple[float, list[str]]:
    """The logits of a model all of whose weights are freed when its forward ends."""
    import warnings

    interpret_bodies()
    ids, found = ids_of(40), []
    for way in (Way.EAGER, Way.STREAMED):
        job = fsdp2.fsdp2(way, loss="outside", root=fsdp2.RESHARDED)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(job.run(ids).float())
    return (found[0] - found[1]).abs().max().item(), [str(w.message) for w in caught]


@pytest.mark.slow
def test_logits_never_read_a_weight_that_was_freed(ranks):
    for error, hints in ranks.run(logits_read_late):
        assert error < 1e-5
        assert any("FSDP2 frees the weight of the head" in hint for hint in hints)


@pytest.mark.quick
def test_only_hooks_of_fsdp_are_recognised():
    from streambp_compile import internals

    assert not internals.is_fsdp_hook(lambda gradient: None)
    assert internals.freed_by(torch.nn.Parameter(torch.ones(2))) is None

"""Layers split over two processes: what streams."""

import pytest
import torch
from selection import representatives

from benchmarks.setups import parallel
from benchmarks.setups.measurement import measured
from benchmarks.zoo import interpret_bodies

CHOSEN = {"FSDP2, head gathered by full_tensor()"}
EAGER_LAYERS = {"Tensor parallel, head and loss compiled"}
# Each chunk has collectives of its own (test_tensor_parallel.py), or the backward gathers the weight again.
MORE = {"Tensor parallel", "FSDP2, head gathered inside"}


def row_of(name: str):
    """In a process of the group."""
    interpret_bodies()
    return measured(parallel.SETUPS[name], lengths=(64,))


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(parallel.SETUPS, CHOSEN))
def test_collectives_and_gradients_are_those_of_eager(name, ranks):
    rows = ranks.run(row_of, name)
    for row in rows:
        assert row.error < 1e-12
        assert row.collectives == row.expected or name in MORE
        assert row.notes == ()
        assert row.layers or name in EAGER_LAYERS
    assert rows[-1].head  # of a pipeline, the last stage has it


def notes_of_an_error() -> str:
    """In a process of the group: what is added to the error of an id that the embedding does not have."""
    interpret_bodies()
    module = parallel.decoder()
    loss = torch.compile(module, backend="streambp", options={"chunk_size": 16})
    ids = parallel.ids_of(64)
    loss(ids).backward()
    try:
        loss(ids + 10**6)
    except IndexError as error:
        return "\n".join((str(error), *getattr(error, "__notes__", ())))
    return "no error"


def test_an_error_names_the_process_and_the_region(ranks):
    for rank, notes in enumerate(ranks.run(notes_of_an_error)):
        assert f" on rank {rank} " in notes
        assert "in the forward of" in notes

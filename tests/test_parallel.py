"""Layers split over two processes: what streams, and what is refused by name."""

import pytest
from selection import representatives

from benchmarks.setups import parallel
from benchmarks.setups.measurement import measured
from benchmarks.zoo import interpret_bodies

CHOSEN = {"FSDP2, head gathered by full_tensor()"}
WITH_DTENSORS = {"Tensor parallel", "FSDP2, head gathered inside"}
EAGER_LAYERS = {"Tensor parallel, head and loss compiled"}


def row_of(name: str):
    """In a process of the group."""
    interpret_bodies()
    return measured(parallel.SETUPS[name], lengths=(64,))


@pytest.mark.parametrize("name", representatives(parallel.SETUPS, CHOSEN))
def test_collectives_and_gradients_are_those_of_eager(name, ranks):
    rows = ranks.run(row_of, name)
    for row in rows:
        assert row.error < 1e-12
        assert row.collectives == row.expected
        if name in WITH_DTENSORS:
            assert any("computes with DTensors" in note for note in row.notes)
        else:
            assert row.notes == ()
            assert row.layers or name in EAGER_LAYERS
    assert rows[-1].head or name in WITH_DTENSORS  # of a pipeline, the last stage has it

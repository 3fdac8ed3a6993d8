"""Layers split over two processes: what streams."""

import pytest
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


@pytest.mark.parametrize("name", representatives(parallel.SETUPS, CHOSEN))
def test_collectives_and_gradients_are_those_of_eager(name, ranks):
    rows = ranks.run(row_of, name)
    for row in rows:
        assert row.error < 1e-12
        assert row.collectives == row.expected or name in MORE
        assert row.notes == ()
        assert row.layers or name in EAGER_LAYERS
    assert rows[-1].head  # of a pipeline, the last stage has it

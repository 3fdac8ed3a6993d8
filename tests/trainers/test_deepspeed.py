"""DeepSpeed's own engine on two processes. It builds an operator of its own for collectives on a CPU."""

import pytest

pytest.importorskip("deepspeed")
from benchmarks.setups import deepspeed_zero
from benchmarks.setups.measurement import measured
from benchmarks.zoo import interpret_bodies

FRAGMENTS = {"DeepSpeed, ZeRO-3"}  # which breaks the graph at every module that holds weights
REDUCED = "all-reduce"


def row_of(name: str):
    """In a process of the group."""
    interpret_bodies()
    return measured(deepspeed_zero.SETUPS[name])


@pytest.mark.parametrize("name", deepspeed_zero.SETUPS)
def test_layers_stream_with_the_collectives_of_eager(name, ranks):
    for row in ranks.run(row_of, name):
        assert row.error < 1e-6  # ZeRO reduces gradients in float32
        if name in FRAGMENTS:
            assert any("ZeRO-3 frees the weight of the head" in note for note in row.notes)
            continue
        assert row.layers and row.head
        assert row.notes == ()
        assert row.peak < row.checkpointed
        # Gradients of a layer arrive together, so that a bucket may be full at another one of them.
        assert row.collectives.pop(REDUCED) <= row.expected.pop(REDUCED) + 2
        assert row.collectives == row.expected

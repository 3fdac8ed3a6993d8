"""Does a step synchronise with its GPU? Tensors of the CPU stand in for a GPU's; tests/cuda has those."""

import pytest
from synchronisation import Attending, Synchronises, operators, simulated

from streambp_compile.passes.kernels import grouped, products
from streambp_compile.regions import region_drivers


@pytest.fixture
def as_on_gpu(monkeypatch, interpreted):
    """All tensors count as a GPU's."""
    monkeypatch.setattr(grouped, "on_cuda", lambda value: True)
    monkeypatch.setattr(grouped, "capability", lambda device: (8, 0))
    monkeypatch.setattr(grouped, "has_triton", lambda: True)
    monkeypatch.setattr(products, "mixes_dtypes", lambda operand, total: operand.dtype != total.dtype)
    monkeypatch.setattr(region_drivers, "is_on_host", lambda value: False)


def test_a_step(as_on_gpu, monkeypatch):
    called = operators(simulated("cpu", monkeypatch))
    assert {"streambp.grouped_mm.default", "streambp.add_grouped_outer_.default"} <= called


@pytest.mark.long
def test_a_step_whose_sequences_take_turns(as_on_gpu, take_turns, monkeypatch):
    take_turns(1)
    report = simulated("cpu", monkeypatch, Attending, sequences=2)
    assert any(region.streamed.batch is not None for region in report.regions)


def test_what_synchronises_is_seen(interpreted, monkeypatch):
    with pytest.raises(Synchronises, match="aten.item|_local_scalar_dense"):
        simulated("cpu", monkeypatch)

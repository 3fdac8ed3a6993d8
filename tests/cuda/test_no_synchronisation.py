"""A step on a GPU that is not there: nothing in it synchronises."""

import pretend_gpu  # noqa: F401  (before anything is built)
import pytest
import torch
from synchronisation import Attending, Watching, operators, simulated

from streambp_compile import internals
from streambp_compile.passes.kernels import grouped, products

streambp = torch.ops.streambp


def test_a_step(monkeypatch, interpreted):
    called = operators(simulated("cuda", monkeypatch))
    assert {"streambp.grouped_mm.default", "streambp.add_grouped_outer_.default"} <= called


def test_a_step_whose_sequences_take_turns(take_turns, monkeypatch, interpreted):
    take_turns(1)
    report = simulated("cuda", monkeypatch, Attending, sequences=2)
    assert any(region.streamed.batch is not None for region in report.regions)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_operators(capability, monkeypatch):
    monkeypatch.setattr(grouped, "capability", lambda device: capability)
    with internals.FakeTensorMode(), torch.device("cuda"), Watching():
        rows, weight = torch.empty(20, 8).bfloat16(), torch.empty(4, 8, 16).bfloat16()
        of_row = torch.empty(20, dtype=torch.int64)
        made = streambp.grouped_mm(rows, weight, of_row)
        streambp.add_grouped_outer_(rows, made, of_row, torch.empty(4, 8, 16))
        streambp.add_product_(rows.t(), made, torch.empty(8, 16))
        streambp.add_rows_(of_row, rows, 3, torch.empty(10, 8))
        products.scale_(rows, torch.empty(()))
        drawn = streambp.uniform(streambp.seed(torch.device("cuda")), [3, 4], 0, torch.float32)
        assert drawn.device.type == "cuda"

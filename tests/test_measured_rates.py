"""Rates of a device, measured on the CPU of this machine in place of a GPU."""

import json
from dataclasses import replace

import pytest
import torch

from streambp_compile.device import measured_rates, target_device
from streambp_compile.device.measured_rates import (
    Rates,
    known_rates,
    measured,
    path_of_rates,
    seconds,
    with_measured,
)
from streambp_compile.passes.planning.devices import REFERENCE_CPU, named

CPU = torch.device("cpu")
RATES = Rates(2e14, 5e13, 1e12, 4e-6, {"flash": (1e14, 9e13)})


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Sizes that a CPU computes in no time, and a file of this test's own."""
    for name, value in (("SIDE", 64), ("COPIED", 1 << 20), ("LEAST", 1e-3), ("PLAUSIBLE", 1e6)):
        monkeypatch.setattr(measured_rates, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_rates_of_a_cpu_are_measured_once(monkeypatch):
    found = with_measured(REFERENCE_CPU, CPU)
    assert found.source == "measured on this machine" and found.cache == REFERENCE_CPU.cache
    assert min(found.half, found.single, found.bandwidth) > 1e6 and 0 < found.launch < 1e-2
    monkeypatch.setattr(measured_rates, "measured", lambda *args: pytest.fail("measured twice"))
    assert with_measured(REFERENCE_CPU, CPU) == found


def test_attention_forward_and_backward_are_measured(monkeypatch):
    monkeypatch.setattr(measured_rates, "sdpa_kernel", measured_rates.contextlib.nullcontext)
    rates = measured(replace(REFERENCE_CPU, attention=(("flash", (1.0, 1.0)),)), CPU)
    assert min(rates.attention["flash"]) > 1e6


def test_another_precision_of_float32_is_another_entry():
    measured_rates.remember(REFERENCE_CPU, RATES)
    assert known_rates(REFERENCE_CPU) == replace(RATES, attention={"flash": [1e14, 9e13]})
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert known_rates(REFERENCE_CPU) is None
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_table_holds_for_a_kernel_that_was_not_measured():
    device = named("H200")
    measured_rates.remember(device, RATES)
    found = with_measured(device, CPU)
    assert dict(found.attention)["flash"] == (1e14, 9e13)
    assert dict(found.attention)["cudnn"] == dict(device.attention)["cudnn"]
    assert (found.half, found.launch, found.memory) == (2e14, 4e-6, device.memory)


def test_times_that_cannot_be_true_leave_the_table(monkeypatch):
    monkeypatch.setattr(measured_rates, "PLAUSIBLE", 1.0 + 1e-9)
    assert with_measured(REFERENCE_CPU, CPU) is REFERENCE_CPU and not path_of_rates().exists()


def test_a_kernel_that_fails_leaves_the_table(monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(measured_rates, "products", fails)
    assert with_measured(REFERENCE_CPU, CPU) is REFERENCE_CPU


def test_a_device_that_runs_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(measured_rates.time, "perf_counter", lambda: 0.0)
    with pytest.raises(measured_rates.NothingRuns):
        seconds(lambda: None, CPU)


@pytest.mark.parametrize("text", ["", "[1]", '{"CPU": 3}', "{"])
def test_a_file_that_cannot_be_read_is_written_anew(text):
    path_of_rates().parent.mkdir(parents=True)
    path_of_rates().write_text(text)
    with_measured(REFERENCE_CPU, CPU)
    assert any(key.startswith("CPU, torch") for key in json.loads(path_of_rates().read_text()))


def test_a_gpu_is_measured_where_seconds_are_weighed_or_no_table_has_it(monkeypatch):
    device = named("H200")
    monkeypatch.setattr(target_device, "index_of_gpu", lambda values: 0)
    monkeypatch.setattr(target_device, "described", lambda index: device)
    monkeypatch.setattr(target_device, "measured_here", lambda index: "measured")
    assert target_device.planned_for(None, []) is device
    assert target_device.planned_for(None, [], weighs=True) == "measured"
    device = replace(device, name="another")
    assert target_device.planned_for(None, []) == "measured"

"""The pretend GPU answers as the device that was asked for, and gives no values."""

import os
import subprocess
import sys

import pytest
import torch

DEVICES = {
    "h200": ("NVIDIA H200", (9, 0), 132, 140),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 79),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79),
}


def test_it_has_the_properties_of_the_device_asked_for():
    name, capability, multiprocessors, gibibytes = DEVICES[os.environ["PRETEND_GPU"]]
    found = torch.cuda.get_device_properties(0)
    assert found.name == name and (found.major, found.minor) == capability
    assert found.multi_processor_count == multiprocessors
    assert round(found.total_memory / 2**30) == gibibytes
    assert 0 < torch.cuda.mem_get_info()[0] < found.total_memory


def test_an_unknown_device_is_named_beside_the_valid_ones():
    environment = {**os.environ, "PRETEND_GPU": "b200"}
    command = [sys.executable, "-c", "import torch; torch.cuda.mem_get_info()"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 2 and "PRETEND_GPU=b200 is unknown; valid are: h200 h100 a100" in found.stderr


USES = {"run": lambda: torch.ones(3, device="cuda"), "read": lambda: torch.empty(3, device="cuda").tolist()}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_runs_and_nothing_is_read(use):
    with pytest.raises(RuntimeError, match="CUDA error"):
        use()

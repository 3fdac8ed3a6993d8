"""Every part of benchmarks/gpu.py is compiled for the pretend GPU before it costs time on a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.parametrize("part", ["duel", "correctness", "memory", "time", "profile", "attention"])
def test_a_dry_run(part, tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, SCRIPT, part, "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "0 findings failed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / f"gpu-{part}.md").read_text().startswith("`python benchmarks/gpu.py")

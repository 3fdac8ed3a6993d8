"""`make test-cuda` begins with reports of a CPU: its script runs, for one small architecture."""

import sys
from pathlib import Path

import torch

CUDA = Path(__file__).parent / "cuda"


def test_structures_of_a_cpu_are_written(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(CUDA))
    import architectures

    one = {"hand-written": architectures.ARCHITECTURES["hand-written"]}
    monkeypatch.setattr(architectures, "ARCHITECTURES", one)
    monkeypatch.setattr(architectures.internals, "compile_body", None)  # both are undone afterwards
    monkeypatch.setattr(architectures.flex_attention, "_validate_device", None)
    architectures.main(tmp_path)
    written = (tmp_path / torch.__version__ / "hand-written.txt").read_text()
    assert " whole: " not in written and written.count("backward") >= 2
    assert "keys [-inf,0]" in written
    sys.modules.pop("architectures"), sys.modules.pop("pretend_gpu")

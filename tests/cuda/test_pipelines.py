"""Ten architectures on a GPU that is not there: the program of a CPU, and Triton compiles all of it."""

import os
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, QWEN3_8B, kernels, key_ranges, not_run, report_of, structure
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from streambp_compile import internals

STRUCTURES = Path(os.environ.get("STREAMBP_STRUCTURES", "out/structures"))  # architectures.py writes them
each = pytest.mark.parametrize("name", ARCHITECTURES)


@each
def test_the_report_is_that_of_a_cpu(name, compiled):
    """Same regions, sweeps, directions, roles, proofs and kept values, whichever torch the CPU has."""
    found = structure(compiled(name).report).splitlines()
    written = sorted(STRUCTURES.glob(f"*/{name}.txt"))
    assert written, f"nothing to compare with: run tests/cuda/architectures.py {STRUCTURES} first"
    for path in written:
        assert found == path.read_text().splitlines(), path


@each
def test_all_regions_stream(name, compiled):
    assert not [str(r.refusal) for r in compiled(name).report.regions if r.refusal is not None]


@each
def test_keys_are_proved(name, compiled):
    assert key_ranges(compiled(name).report) == ARCHITECTURES[name].keys


@each
def test_the_kernels_that_attend(name, compiled, capability):
    assert kernels(compiled(name).report) == ARCHITECTURES[name].kernels_on(capability)


def test_chunks_of_a_large_model_are_long(monkeypatch):
    """Qwen3-8B at 32768 tokens: a chunk's products run at the device's rate. Bodies are not compiled."""
    monkeypatch.setattr(internals, "compile_body", lambda *_, **__: not_run)
    layer = report_of(QWEN3_8B, "cuda", 32768).regions[1]
    assert len(layer.backward.chunks) == 2
    assert min(*layer.forward.chunks, *layer.backward.chunks) >= 2048


@each
def test_triton_compiled_every_body(name, compiled, capability):
    """Every kernel that a body launches has a binary, and it is for this device."""
    made = compiled(name)
    assert 0 < made.bodies <= len(made.wrappers)
    kernels = [k for m in made.wrappers for k in vars(m).values() if isinstance(k, CachingAutotuner)]
    assert kernels and all(k.compile_results for k in kernels)
    assert {r.compile_meta["cc"] for k in kernels for r in k.compile_results} == {capability}

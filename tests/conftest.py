"""Every test starts from the same seed, with nothing compiled before it; all workers together have two
threads."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

collect_ignore = (
    [] if os.environ.get("PRETEND_GPU") else ["cuda"]
)  # which want a CUDA build of torch: make test-cuda


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    torch.set_num_threads(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before; what is compiled here is forgotten after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(monkeypatch, fresh_dynamo):
    """Chunk bodies run node by node, not compiled: for what is about their analysis."""
    from benchmarks import zoo
    from streambp_compile import internals

    monkeypatch.setattr(internals, "compile_fx_inner", internals.compile_fx_inner)
    zoo.interpret_bodies()
    yield
    internals.COMPILED.clear()

"""TRL's trainers, unchanged, each a row of benchmarks/engines.py."""

import importlib
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("trl")
from benchmarks.setups import trl_trainers  # noqa: E402
from benchmarks.setups.measurement import measured  # noqa: E402
from streambp_compile.tools.tiled_heads import HEADS, known  # noqa: E402

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SINGLE = 1e-5  # models of Hugging Face compute norms and losses in float32


@pytest.mark.parametrize("name", trl_trainers.SETUPS)
def test_trainers(name):
    row = measured(trl_trainers.SETUPS[name], lengths=(64,))
    assert row.error < SINGLE
    assert row.layers
    assert row.head == (name not in trl_trainers.REASONS)
    assert row.notes == ()


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_tiled_heads_of_this_version_compute_their_formulas(head):
    module, _, name = head.name.rpartition(".")
    assert known(getattr(importlib.import_module(module), name)) is head

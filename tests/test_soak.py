"""The generator of random models, a few of its seeds, and how the soak reads its answers."""

import warnings

import pytest
import torch
from selection import representatives

from benchmarks import soak
from benchmarks.random_models import trial
from benchmarks.random_models.model import example


@pytest.mark.quick
def test_a_seed_determines_a_model():
    assert example(7) == example(7) != example(8)


@pytest.mark.quick
@pytest.mark.parametrize("kind", soak.KINDS)
def test_every_weight_and_input_is_read(kind):
    for seed in range(200):
        source = example(seed, kind).source
        compile(source, "model", "exec")
        declared, forward = source.split("def forward")
        for line in declared.split("super().__init__()")[1].splitlines():
            name = line.strip().split(" =")[0]
            assert name.startswith("self.register_buffer") or name in forward


FOUND = (141, 336, 7014, 7028, 8035)  # seeds that crashed, or met an internal error, once


@pytest.mark.parametrize("seed", representatives([26, *range(12), *FOUND], {26}))
def test_a_seed_is_exact(seed, interpreted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trial.attempt(seed)["failures"] == []


FOUND_SEVERAL = (4, 72, 186, 228, 500)  # wrong gradients, crashes and internal errors, once


@pytest.mark.long
@pytest.mark.parametrize("seed", representatives([*range(3), *FOUND_SEVERAL], {4}))
def test_a_seed_of_several_sequences_is_exact(seed, interpreted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trial.attempt(seed, "several")["failures"] == []


FOUND_OPERATORS = (32, 85, 187)  # wrong gradients, and a crash, once


@pytest.mark.long
@pytest.mark.parametrize("seed", representatives([*range(3), *FOUND_OPERATORS], {32}))
def test_a_seed_of_any_operators_is_exact(seed, interpreted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trial.attempt(seed, "operators")["failures"] == []


def test_a_wrong_gradient_and_a_crash_are_found(interpreted, monkeypatch):
    monkeypatch.setattr(trial, "EXACT", -1.0)
    assert any(text.startswith("wrong: ") for text in trial.attempt(26)["failures"])
    monkeypatch.setattr(trial.Trial, "run", lambda _: 1 / 0)
    assert trial.attempt(26)["failures"][0].startswith("crash: ZeroDivisionError")


@pytest.mark.quick
def test_the_summary_counts_messages_without_their_places():
    refusal = (
        "streambp cannot stream a region: aten.x at /a/b.py:3: y = f(x): no rule for {} rows. The region runs"
    )
    results = [
        dict(seed=1, failures=[], refusals=[refusal.format(3)] * 2, streamed=2, refused=1, seconds=1.0),
        dict(
            seed=2, failures=["wrong: 1e-2"], refusals=[refusal.format(5)], streamed=1, refused=1, seconds=3.0
        ),
    ]
    text = soak.summary(results, 3)
    assert text.startswith("2 of 3 models, 1 failed; 3 regions streamed, 2 refused; 2.0 seconds a model")
    assert "- seed 2: wrong: 1e-2" in text
    assert "| 2 | aten.x: no rule for N rows | 1, 2 |" in text


@pytest.mark.quick
def test_total_error_is_relative_to_all_gradients():
    truth = [torch.zeros(()), torch.tensor([3.0]).double(), torch.tensor([4.0]).double()]
    assert trial.total_error([truth[0], truth[1], truth[2] + 0.5], truth) == pytest.approx(0.1)

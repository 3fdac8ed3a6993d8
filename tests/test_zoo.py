"""The zoo's own reading of its answers, and a few of its rows, chunk bodies interpreted."""

import argparse

import pytest
from selection import representatives

from benchmarks import zoo
from benchmarks.architectures import ARCHITECTURES

EXACT = dict(
    error=1e-12, streamed=3, regions=3, keys=["causal, proved"], reasons=[], note="", peak=1, eager=4
)
PLAIN = ("nanogpt", "packed", "value residual", "one-hot experts", "relative shift")


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(PLAIN, {"nanogpt"}))
def test_own_rows_are_exact_and_proved(name, interpreted):
    answer = zoo.measure(name, tokens=0)
    assert zoo.is_exact(name, answer)
    assert zoo.is_proved(answer), answer


@pytest.mark.long
@pytest.mark.parametrize(
    "name", representatives(("stored mask", "sorted experts", "in place"), {"stored mask"})
)
def test_hard_rows_are_exact(name, interpreted):
    assert zoo.is_exact(name, zoo.measure(name, tokens=0))


@pytest.mark.parametrize("name", representatives(("qwen3", "BERT"), ()))
def test_hugging_face_rows_are_exact_and_streamed(name, interpreted):
    answer = zoo.measure(name, tokens=0)
    assert zoo.is_exact(name, answer)
    assert answer["streamed"] == answer["regions"] > 0


def test_every_own_architecture_has_a_row():
    assert {name for name, row in zoo.ROWS.items() if row.kind == "own"} == set(ARCHITECTURES)


def test_a_gradient_that_is_zero_counts_by_the_size_of_the_others():
    import torch

    ours, truth = (
        [torch.tensor([1.0, 0.0]), torch.tensor([1e-20])],
        [torch.tensor([1.0, 0.0]), torch.tensor([-3e-20])],
    )
    assert zoo.largest_error(ours, truth) < 1e-13
    assert zoo.largest_error([torch.tensor([1.0, 0.1]), truth[1]], truth) == pytest.approx(0.1)


def test_rows_over_their_bound_fail():
    answers = {
        "nanogpt": EXACT,
        "llama": dict(EXACT, error=0.1),
        "packed": dict(EXACT, peak=2),
        "flex": dict(missing="does not run"),
        "window": dict(failed="no process"),
    }
    assert zoo.failures(answers) == [
        "llama: an error of 1e-01",
        "packed: 0.50 of checkpointing's peak",
        "window: no process",
    ]


def test_the_table_says_what_is_missing():
    answers = {
        "nanogpt": EXACT,
        "llama": dict(
            EXACT,
            error=0.1,
            keys=["not proved, all keys are read", "window of 8, proved"],
            streamed=1,
            reasons=[
                "streambp cannot stream a region: aten.x at /a/b/model.py:3: y = f(x): no rule. Do. The "
                "region runs unchunked, and its largest value takes 1 MiB; gradients stay exact."
            ],
        ),
        "flex": dict(missing="does not run: NotImplementedError: no"),
        "gated delta": dict(failed="more than 240 seconds"),
    }
    nanogpt, llama, flex, delta = zoo.table(answers).splitlines()[2:]
    assert "| yes | 3/3 | causal: proved |" in nanogpt and "| 0.25 |" in nanogpt
    assert (
        "| **no** | 1/3 | not proved, all keys are read, window 8: proved |" in llama
        and "model.py:3 `y = f(x)`: no rule" in llama
    )
    assert "/a/b" not in llama
    assert "does not run" in flex and "| – | – |" in flex
    assert "**no**" in delta and "more than 240 seconds" in delta


@pytest.mark.quick
def test_the_summary_counts_by_kind():
    text = zoo.summary(
        {
            "nanogpt": EXACT,
            "packed": dict(EXACT, keys=["not proved, all keys are read"], eager=1.5),
            "flex": dict(missing="no"),
        }
    )
    assert (
        text
        == "- own: 2 rows, 2 exact, 2 with all regions streamed, 1 of them with keys proved, 1 of 2 under "
        "half of checkpointing's peak"
    )


def test_a_refusal_is_shortened():
    text = "streambp cannot stream a region: " + "x" * 400
    assert len(zoo.shortened(text)) == 240


def test_a_peak_that_is_too_high_is_measured_compiled(monkeypatch):
    """An interpreted peak is an upper bound: it is enough where it is within the bound."""
    peaks = {True: 60, False: 40}
    asked = []

    def answered(command, limit):
        asked.append("--interpret" in command)
        return dict(error=0.0, peak=peaks[asked[-1]], eager=100, note="")

    monkeypatch.setattr(zoo, "last_answer", answered)
    chosen = argparse.Namespace(tokens=64, interpret=True, limit=1.0)
    answer = zoo.run("llama", chosen)
    assert (answer["peak"], answer["note"], asked) == (40, "compiled", [True, False])
    peaks[True], asked[:] = 45, []
    answer = zoo.run("llama", chosen)
    assert (answer["peak"], answer["note"], asked) == (45, "", [True])

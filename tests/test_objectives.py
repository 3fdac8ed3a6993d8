"""Objectives behind a real layer: exact to 1e-9, streamed, in no more sweeps than they need; forward alone
too."""

import pytest
import torch
from models import VOCABULARY, LlamaLike, ids_of, worst_error
from selection import representatives
from torch import nn

from benchmarks.losses import OBJECTIVES, Batch, Heads
from benchmarks.memory import peak
from benchmarks.objectives import failures
from streambp_compile import explain

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("error::streambp_compile.NotStreamed"),
]
WIDTH, LENGTH = 64, 53


class Trained(nn.Module):
    """A trunk of one layer, and the heads; a frozen trunk makes the teacher's hidden states where a batch has
    ids for it."""

    def __init__(self, name: str):
        super().__init__()
        self.trunk, self.heads, self.objective = (
            LlamaLike(layers=1),
            Heads(WIDTH, VOCABULARY),
            OBJECTIVES[name],
        )
        self.trunk.head = None

    def forward(self, ids, batch):
        return self.objective.loss(self.heads, self.trunk.hidden(ids), batch)


def gradients(model, step) -> dict:
    model.zero_grad()
    step().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


CHOSEN = {  # one of each kind of graph
    "cross-entropy, padded labels (Hugging Face)",
    "[B, V, T], padded labels",
    "teacher inside, top-k",
    "metrics beside the loss",
    "GRPO",
    "PPO, value head, entropy",
    "DPO",
    "distillation, JSD",
    "multi-token prediction heads",
    "residual heads with one vocabulary (Medusa)",
    "reward model, last token",
    "discounted returns, summed from the end",
    "actor and critic, one-step advantages",
}


@pytest.mark.parametrize("name", representatives(OBJECTIVES, CHOSEN))
def test_objective(name):
    torch.manual_seed(0)
    model, ids, batch = Trained(name).double(), ids_of(4, LENGTH), Batch(4, LENGTH, WIDTH, VOCABULARY)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    truth = {
        n: g for n, g in gradients(model, lambda: model(ids, batch)).items() if g.norm() > 1e-12
    }  # a bias may cancel out
    found = gradients(model, lambda: step(ids, batch))
    assert worst_error({n: found[n] for n in truth}, truth) < 1e-9
    with torch.no_grad():
        torch.testing.assert_close(step(ids, batch), model(ids, batch), rtol=1e-10, atol=1e-12)


STREAMED = [name for name, objective in OBJECTIVES.items() if objective.sweeps]


@pytest.mark.parametrize("name", representatives(STREAMED, CHOSEN & set(STREAMED)))
def test_sweeps(name):
    model, batch = Heads(WIDTH, VOCABULARY).double(), Batch(4, LENGTH, WIDTH, VOCABULARY)
    hidden = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    report = explain(
        lambda h: OBJECTIVES[name].loss(model, h, batch), hidden, streambp_options={"chunk_size": 16}
    )
    assert report.regions and all(region.streamed for region in report.regions)
    for region in report.regions:
        both = len(region.forward.program.sweeps) + (
            len(region.backward.program.sweeps) if region.backward else 0
        )
        assert both <= OBJECTIVES[name].sweeps


NARROW = {"[B, V, T], padded labels"}


@pytest.mark.parametrize("name", representatives(OBJECTIVES, NARROW))
def test_no_logits_at_full_length(name):
    """The predicted peak above the heads' gradients is under half of one logits tensor."""
    tokens, width, vocabulary = 2048, 32, 4096
    model, batch = Heads(width, vocabulary), Batch(2, tokens, width, vocabulary, torch.float32)
    hidden = torch.randn(2, tokens, width).requires_grad_()
    report = explain(
        lambda h: OBJECTIVES[name].loss(model, h, batch), hidden, streambp_options={"chunk_size": 32}
    )
    gradients = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    assert report.peak is not None and report.peak.backward
    assert report.peak.bytes - gradients < 2 * tokens * vocabulary * 4 / 2


def test_rows_over_their_bound_fail():
    good = dict(error=1e-15, sweeps=1, peak=dict(streambp=99 * 2**20), errors={})
    answers = {
        "good": good,
        "wide": dict(good, peak=dict(streambp=150 * 2**20)),
        "wrong": dict(good, error=float("nan")),
        "crashed": dict(failed="status 1"),
        "failed": dict(good, errors=dict(streambp="KeyError: mm")),
    }
    assert failures(answers, logits=200.0) == [
        "wide: a peak of 150 MiB, 0.75 of its logits",
        "wrong: an error of nan",
        "crashed: status 1",
        "failed: KeyError: mm",
    ]


HEADS = ["cross-entropy, padded labels (Hugging Face)", "GRPO", "DPO", "distillation, forward KL"]


@pytest.mark.parametrize("name", representatives(HEADS, {"DPO"}))
@pytest.mark.inductor
@pytest.mark.slow
def test_peak_of_a_head(name):
    """Far under one logits tensor; at most six chunks of it at the default chunk length."""
    tokens, width, vocabulary = 2048, 128, 32768
    model, batch = Heads(width, vocabulary), Batch(2, tokens // 2, width, vocabulary, torch.float32)
    hidden = torch.randn(2, tokens // 2, width).requires_grad_()
    for tensor in (hidden, *(p for p in model.parameters() if p.requires_grad)):
        tensor.grad = torch.zeros_like(tensor)

    def loss(h):
        return OBJECTIVES[name].loss(model, h, batch)

    step = torch.compile(loss, backend="streambp")
    step(hidden).backward()
    measured = peak(lambda: step(hidden).backward())
    chunk = explain(loss, hidden).regions[-1].forward.chunks[-1]
    assert measured < tokens * vocabulary * 4 / 2
    assert measured <= 6 * 2 * chunk * vocabulary * 4

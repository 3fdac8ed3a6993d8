"""Logits that leave the compiled function: what is done to them outside is exact, and small results stream."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from memory import peak
from models import Plain, ids_of, worst_error
from torch import nn
from torch._dynamo.utils import counters

from streambp_compile.deferred import Deferred

EXACT = 1e-10
VOCABULARY = 2048


class Head(nn.Module):
    """One attention layer's worth of hidden states and a head; returns logits alone."""

    def __init__(self, vocabulary: int = VOCABULARY):
        super().__init__()
        self.body = Plain(vocabulary, width=16, heads=2, layers=1)

    def forward(self, ids):
        return self.body.head(self.body.norm(self.body.layers[0](self.body.embed(ids))))


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = Head().double()
    made.step = torch.compile(made.forward, backend="streambp", options={"chunk_size": 8})
    yield made
    torch._dynamo.reset()


IDS = torch.randint(0, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(0))
TARGETS = IDS.roll(-1, 1)
WEIGHTS = torch.linspace(0.1, 1, 3 * 41, dtype=torch.float64).view(3, 41)
MASK = WEIGHTS > 0.4


def rows_one_by_one(logits):
    """TRL's `selective_log_softmax` for half precision."""
    return torch.stack([F.log_softmax(row, -1).gather(-1, i) for row, i in zip(logits, TARGETS.unsqueeze(-1))]).squeeze(-1)


def selected(logits):
    """TRL's `selective_log_softmax` for single precision."""
    index = TARGETS.unsqueeze(-1)
    return torch.gather(logits, -1, index).squeeze(-1) - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def entropy_in_parts(logits):
    """TRL's `entropy_from_logits`."""
    parts = []
    for part in logits.reshape(-1, logits.shape[-1]).split(32, dim=0):
        logps = F.log_softmax(part, dim=-1)
        parts.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def changed_in_place(logits):
    logits.div_(0.7)
    logits *= 0.5
    logits += 1
    return logits.log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0]


def temperature(logits):
    return F.cross_entropy((logits / WEIGHTS.unsqueeze(-1)).flatten(0, 1), TARGETS.flatten())


def labels_changed_later(logits):
    labels = TARGETS.clone()
    scaled = logits.masked_fill(labels[..., None] == 3, 0.5)
    labels.fill_(3)
    return scaled.logsumexp(-1)


def of_the_detached(logits):
    with torch.no_grad():
        p = logits.softmax(-1)
    return -(p * logits.log_softmax(-1)).sum(-1) * WEIGHTS


SMALL = {
    "gather": lambda x: x.log_softmax(-1).gather(-1, TARGETS[..., None]).squeeze(-1),
    "shifted": lambda x: torch.gather(x[:, :-1].log_softmax(-1), 2, TARGETS[:, :-1, None]),
    "last rows": lambda x: x[:, -20:].float().logsumexp(-1),
    "logsumexp": lambda x: torch.logsumexp(x / 0.7, dim=-1) * WEIGHTS,
    "entropy": lambda x: -(x.softmax(-1) * F.log_softmax(x, -1)).sum(-1) * WEIGHTS,
    "cross-entropy": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), TARGETS.view(-1)),
    "cross-entropy of shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, VOCABULARY), IDS[..., 1:].reshape(-1)),
    "loss module": lambda x: nn.CrossEntropyLoss(reduction="none")(x.transpose(1, 2), TARGETS),
    "temperature per row": temperature,
    "max": lambda x: x.max(-1).values * WEIGHTS,
    "topk": lambda x: x.topk(3, -1).values.sum(),
    "mean of squares": lambda x: x.pow(2).mean(),
    "mean": lambda x: x.float().mean(-1),
    "other way round": lambda x: (1 - x).mean(-1) + (2 / (3 + x.sigmoid())).sum(-1),
    "rows one by one": rows_one_by_one,
    "stacked": selected,
    "in parts": entropy_in_parts,
    "in place": changed_in_place,
    "labels changed later": labels_changed_later,
    "of the detached": of_the_detached,
    "twice": lambda x: (x.log_softmax(-1) * x.softmax(-1)).sum(-1) + (x * x).sum(-1),
    "half of the batch": lambda x: x[:2].logsumexp(-1).sum() + x[2:, :5].logsumexp(-1).sum(),
    "last token": lambda x: x[:, -1].logsumexp(-1),
    "where": lambda x: torch.where(MASK[..., None], x, x * 2).logsumexp(-1),
}
WHOLE = {
    "read": lambda x: x * WEIGHTS[..., None],
    "one row": lambda x: x[1].logsumexp(-1),
    "rows of a mask": lambda x: x[MASK].logsumexp(-1),
    "over the tokens": lambda x: x.cumsum(1).tanh(),
    "written into": lambda x: (x.__setitem__((slice(None), 0), 0.0), x.logsumexp(-1))[1],
    "a view changed": lambda x: (x[:, :-1].mul_(2), x.logsumexp(-1))[1],
    "changed after a view": lambda x: (lambda view: (x.div_(3), view.logsumexp(-1))[1])(x[:, 1:]),
    "changed after something was made of it": lambda x: (lambda p: (x.clamp_(0, 1), x.__setitem__(0, 1.0), (p * x).sum(-1))[2])(x.softmax(-1)),
    "to the end": lambda x: sum(F.cross_entropy(row, i) for row, i in zip(x, TARGETS)),
    "parts of a loop out of order": lambda x: torch.stack([x[i].logsumexp(-1) for i in (1, 0, 2)]) * WEIGHTS,
    "one part left out": lambda x: torch.cat([p.sum(-1) for p in x.split(1)[:2]]),
    "sums along the rows of parts": lambda x: torch.stack([row.logsumexp(0) for row in x]),
}


def outcome(model, logits_of, then):
    """Value and gradients of something made of logits."""
    model.zero_grad()
    value = then(logits_of(IDS))
    value.backward(torch.ones_like(value) / 7)
    return value.detach().clone(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", [*SMALL, *WHOLE])
def test_equals_eager(model, name):
    then = {**SMALL, **WHOLE}[name]
    assert isinstance(model.step(IDS), Deferred)
    (value, gradients), (truth, true_gradients) = outcome(model, model.step, then), outcome(model, model, then)
    torch.testing.assert_close(value, truth, rtol=1e-6 if value.dtype == torch.float32 else EXACT, atol=1e-12)
    assert worst_error(gradients, true_gradients) < (1e-5 if value.dtype == torch.float32 else EXACT)


@pytest.mark.parametrize("name", SMALL)
def test_small_results_stream(model, name):
    """Forward and backward, without gradients, and for the second time: nothing new is compiled."""
    def step():
        value = SMALL[name](model.step(IDS))
        value.sum().backward()

    step()
    before = counters["streambp"]["bodies"]
    one = 3 * 41 * VOCABULARY * 8
    assert peak(step) < one
    assert counters["streambp"]["bodies"] == before
    with torch.no_grad():
        SMALL[name](model.step(IDS))
        assert peak(lambda: SMALL[name](model.step(IDS))) < 0.6 * one



"""A value that one region alone reads is handed over to it, and its gradient is written over it."""

import pytest
import torch
import torch.nn.functional as F
from models import Plain, gradients, ids_of, worst_error
from torch import nn

from streambp_compile.runtime.gradient_ownership import is_handed_over
from streambp_compile.runtime.runner import Runner

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10


class Returning(Plain):
    """Returns the hidden states beside the loss."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, labels) + 0 * x[0, 0, 0], x


class TwoHeads(Plain):
    """Both heads read the same hidden states."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.second = nn.Linear(64, 256)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        ahead = self.second(x)[:, :-2].flatten(0, 1)
        return self.loss(x, labels) + F.cross_entropy(ahead, labels[:, 2:].flatten())


class Residual(Plain):
    """The last region reads what its predecessor gave, and the embedding that an earlier one read."""

    def forward(self, ids, labels):
        embedded = self.embed(ids)
        return self.loss(self.layers[0](embedded) + embedded, labels)


class Embedded(Plain):
    """No layer stands between embedding and head: the backward recomputes the embedding."""

    def forward(self, ids, labels):
        return self.loss(self.embed(ids), labels)


class Logits(Plain):
    """Returns logits, which compute themselves from the hidden states when they are read."""

    def forward(self, ids, labels):
        x = self.layers[0](self.embed(ids))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.fixture
def taken(monkeypatch):
    """How often a region wrote over an input of its forward."""
    found = []

    def take_over(self, sweep, call, original=Runner.take_over):
        found.extend(s for _, s in sweep.in_place if is_handed_over(call.values[s]) and s in call.owned)
        original(self, sweep, call)

    monkeypatch.setattr(Runner, "take_over", take_over)
    return found


def total(result):
    return result if isinstance(result, torch.Tensor) else result[0] + result[1].pow(2).mean()


@pytest.mark.parametrize(
    "kind, times", [(Plain, 1), (Returning, 0), (TwoHeads, 1), (Residual, 1), (Embedded, 0), (Logits, 0)]
)
def test_gradients_are_written_over_what_nobody_else_reads(kind, times, taken):
    model, ids = kind(layers=1).double(), ids_of()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32})
    ours = gradients(model, lambda: total(step(ids, ids)))
    truth = gradients(model, lambda: total(model(ids, ids)))
    assert len(taken) == times
    assert worst_error(ours, truth) < EXACT


@pytest.mark.long
def test_a_kept_graph_goes_back_twice():
    model, ids = Plain(layers=1).double(), ids_of()
    loss = torch.compile(model, backend="streambp", options={"chunk_size": 32})(ids, ids)
    once = gradients(model, lambda: loss.backward(retain_graph=True))
    assert worst_error(gradients(model, lambda: loss), once) == 0

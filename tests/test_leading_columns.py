"""Columns in front of attention scores, such as sinks: the layer streams, and reads only the keys up to its
own token."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import nn

from streambp_compile import NotStreamed, explain
from streambp_compile.passes.ir import PAST

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, VOCABULARY = 1e-10, 8, 19
INF = float("-inf")
aten = torch.ops.aten


def later(scores):
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def zero_logit(layer, scores):
    return F.pad(scores.masked_fill(later(scores), INF), (1, 0)).softmax(-1)[..., 1:]


def one_learned(layer, scores):
    sinks = layer.sinks.expand(*scores.shape[:-1], -1)
    return torch.cat([sinks, scores.masked_fill(later(scores), INF)], -1).softmax(-1)[:, :, 1:]


def masked_behind(layer, scores):
    """The mask has a column for the sink as well."""
    both = torch.cat([layer.sinks.expand(*scores.shape[:-1], -1), scores], -1)
    return both.masked_fill(F.pad(later(scores), (1, 0)), INF).softmax(-1)[..., 1:]


def masked_by_position(layer, scores):
    both = torch.cat([layer.sinks.expand(*scores.shape[:-1], -1), scores], -1)
    key, row = torch.arange(both.shape[-1]), torch.arange(scores.shape[-2])
    return both.masked_fill(key > row[:, None] + 1, INF).softmax(-1)[..., 1:]


def by_hand(layer, scores):
    """Softmax in steps, and the share of the sink is used."""
    both = torch.cat([layer.sinks.expand(*scores.shape[:-1], -1), scores + 0.0], -1)
    both = torch.where(F.pad(later(scores), (1, 0)), INF, both)
    shares = (both - both.amax(-1, keepdim=True)).exp()
    shares = shares / shares.sum(-1, keepdim=True)
    return shares[..., 1:] * (1 + shares[..., 0]).unsqueeze(-1)


WITHOUT_CAUSALITY = ("by_hand",)  # a softmax in steps might divide by a row of zeros
SINKS = {f.__name__: f for f in (zero_logit, one_learned, masked_behind, masked_by_position, by_hand)}


class Layer(nn.Module):
    def __init__(self, shares):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.sinks = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(1))
        self.shares = shares

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.shares(self, q @ k.transpose(1, 2)) @ v
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(SINKS, ["masked_behind", "zero_logit"]))
def test_sinks_in_front(name):
    model, options = Layer(SINKS[name]).double(), {"chunk_size": 8}
    step = torch.compile(model, backend="streambp", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        report = explain(model, torch.randint(VOCABULARY, (2, 35)), streambp_options=options)
        for length in (21, 32, 35):
            ids = torch.randint(VOCABULARY, (2, length))
            found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
            assert worst_error(found, truth) < EXACT
    reaches = {
        reach
        for region in report.regions
        for node, reach in region.streamed.analysis.reaches.items()
        if node.target is aten.bmm.default
    }
    assert name in WITHOUT_CAUSALITY or reaches == {PAST}


def counted(layer, scores):
    """A cumulative sum depends on the order of columns."""
    both = F.pad(scores.masked_fill(later(scores), 0), (1, 0), value=1.0)
    return both.cumsum(-1).sigmoid()[..., 1:]


def another_part(layer, scores):
    """The slice takes a sink and leaves out the last key."""
    return F.pad(scores.masked_fill(later(scores), INF), (1, 0)).softmax(-1)[..., :-1]


def largest(layer, scores):
    """The place of the largest share counts the sink. Equal tokens have no equal shares."""
    scores = scores + 0.01 * torch.arange(scores.shape[-1])
    both = F.pad(scores.masked_fill(later(scores), INF), (1, 0)).softmax(-1)
    return both[..., 1:] * both.argmax(-1, keepdim=True)


@pytest.mark.parametrize("shares", [counted, pytest.param(another_part, marks=pytest.mark.slow), largest])
def test_columns_whose_order_matters_stay(shares):
    model, ids = Layer(shares).double(), torch.randint(VOCABULARY, (2, 21))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT

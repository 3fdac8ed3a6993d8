"""Attention that is written out over the sequence's keys and a few more: its mask has more columns than the
sequence has tokens, is made in chunks of rows, and the layer streams."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import nn

from streambp_compile import NotStreamed, explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, VOCABULARY, MORE = 1e-10, 8, 19, 3
INF = float("-inf")


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def padded(ids):
    return F.pad(causal(ids.shape[1]), (MORE, 0), value=True)


def padded_behind(ids):
    return F.pad(causal(ids.shape[1]), (0, MORE), value=True)


def joined(ids):
    length = ids.shape[1]
    return torch.cat([torch.ones(length, MORE, dtype=torch.bool), causal(length)], 1)


def without_itself(ids):
    """A token sees those before it and what is shared."""
    length = ids.shape[1]
    return F.pad(causal(length) & ~torch.eye(length, dtype=torch.bool), (MORE, 0), value=True)


def by_position(ids):
    at = torch.arange(ids.shape[1])
    return F.pad(at <= at[:, None], (MORE, 0), value=True)


def documents(ids):
    """Documents end at token 0; every document sees what is shared."""
    document = (ids == 0).cumsum(1)
    return F.pad((document[:, :, None] == document[:, None]) & causal(ids.shape[1]), (MORE, 0), value=True)


def windows(ids):
    ones = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
    return F.pad(ones.tril() & ones.triu(-4), (MORE, 0), value=True)


MASKS = {f.__name__: f for f in (padded, padded_behind, joined, without_itself, by_position)}
MASKS |= {f.__name__: f for f in (documents, windows)}


class Layer(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.more = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(2, MORE, WIDTH))
        self.mask, self.behind = mask, mask is padded_behind

    def forward(self, ids):
        x = self.table(ids)
        q, *own = self.qkv(x).chunk(3, -1)
        more = self.more.unsqueeze(1).expand(-1, len(ids), -1, -1)
        k, v = (torch.cat((t, m) if self.behind else (m, t), 1) for t, m in zip(own, more))
        scores = (q @ k.transpose(1, 2)) / math.sqrt(WIDTH)
        x = x + scores.masked_fill(~self.mask(ids), INF).softmax(-1) @ v
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(MASKS, ["documents"]))
def test_masks_with_more_columns(name):
    """Exact at other lengths too, and the attention is computed in chunks."""
    model = Layer(MASKS[name]).double()
    options = {"chunk_size": 8}
    step = torch.compile(model, backend="streambp", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        for length in (33, 40, 50):
            ids = torch.randint(VOCABULARY, (2, length))
            found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
            assert worst_error(found, truth) < EXACT
        report = explain(model, ids, streambp_options=options)
    streamed = [r.streamed.analysis.facts for r in report.regions if r.streamed is not None]
    assert any(node.target is torch.ops.aten._softmax.default for facts in streamed for node in facts)

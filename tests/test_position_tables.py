"""Weights with an entry for each pair of positions (a learned bias of scores, spatial gating, token mixing):
chunks read their rows and columns, and write their gradients so."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import nn

from benchmarks.memory import peak
from streambp_compile import NotStreamed, explain
from streambp_compile.passes.ir import EVERYWHERE, PAST, Reach

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS, VOCABULARY, LONGEST = 1e-10, 8, 2, 19, 53
INF = float("-inf")


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def split(x):
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def scores(q, k, table):
    return split(q) @ split(k).mT / math.sqrt(WIDTH // HEADS) + table


def bias(q, k, v, table):
    """A learned bias of attention scores."""
    shown = scores(q, k, table).masked_fill(~causal(q.shape[1]), INF)
    return joined(shown.softmax(-1) @ split(v))


def bias_of_all(q, k, v, table):
    return joined(scores(q, k, table).softmax(-1) @ split(v))


def synthesizer(q, k, v, table):
    """Attention whose scores are the table."""
    return joined(table.masked_fill(~causal(q.shape[1]), INF).softmax(-1) @ split(v)) + q * k


def gating(q, k, v, table):
    """gMLP's spatial gating."""
    return k * torch.einsum("ts,bsd->btd", table.tril(), v) + q


def gating_of_all(q, k, v, table):
    return k * torch.einsum("ts,bsd->btd", table, v) + q


def window(q, k, v, table):
    return k * (table.tril().triu(-4) @ v) + q


def ahead(q, k, v, table):
    return k * (table.triu() @ v) + q


def penalised(q, k, v, table):
    """The gradient of the table is not zero where the mask hides keys."""
    return gating(q, k, v, table) + table.square().mean()


def attention_free(q, k, v, table):
    """AFT."""
    weights, keys = table.exp().tril(), k.exp()
    return q.sigmoid() * (weights @ (keys * v)) / (weights @ keys)


def mixing(q, k, v, table):
    """A linear layer over transposed tokens."""
    return F.linear(v.mT, table).mT + q * k


# what it makes → the keys that are read for it
MIXERS = {
    bias: PAST,
    bias_of_all: EVERYWHERE,
    synthesizer: PAST,
    gating: PAST,
    gating_of_all: EVERYWHERE,
    window: Reach(-4, 0),
    ahead: Reach(0, math.inf),
    penalised: EVERYWHERE,
    attention_free: PAST,
    mixing: EVERYWHERE,
}
PER_HEAD = (bias, bias_of_all, synthesizer)


def cut(table, length):
    return table[..., :length, :length]


def narrowed(table, length):
    return table.narrow(-2, 0, length).narrow(-1, 0, length)


def turned(table, length):
    return table.mT[..., :length, :length]


class Layer(nn.Module):
    def __init__(self, mixer, table, part):
        super().__init__()
        self.mixer, self.table, self.part = mixer, table, part
        self.norm, self.into, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        table = self.table if self.part is None else self.part(self.table, x.shape[1])
        return x + self.out(self.mixer(*self.into(self.norm(x)).chunk(3, -1), table))


class Model(nn.Module):
    """Two layers; ``shared``: with one table."""

    def __init__(self, mixer, positions=LONGEST, part=cut, shared=False, layers=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        shape = (HEADS,) * (mixer in PER_HEAD) + (positions, positions)
        tables = [nn.Parameter(torch.randn(shape) / 4) for _ in range(1 if shared else layers)]
        self.layers = nn.Sequential(*(Layer(mixer, tables[i % len(tables)], part) for i in range(layers)))

    def forward(self, ids):
        logits = self.head(self.layers(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def compiled(model, chunk=8):
    return torch.compile(model, backend="streambp", options={"chunk_size": chunk})


def check(model, lengths, batch=2):
    """Every region streams, and gradients are exact, at all lengths. Returns a report of the last one."""
    model, step = model.double(), compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        for length in lengths:
            ids = torch.randint(VOCABULARY, (batch, length))
            found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
            assert worst_error(found, truth) < EXACT
        return explain(model, ids, streambp_options={"chunk_size": 8})


def written_for(region):
    """The keys that the sweeps of a region read where they write a matrix."""
    sweeps = region.backward.program.sweeps if region.backward is not None else ()
    return {s.keys for s in sweeps if any(region.analysis.fact(n).keys is not None for n in s.writes)}


def keys_read(report):
    return {keys for region in report.regions for keys in written_for(region)}


SHARED = (bias, mixing, penalised)


@pytest.mark.parametrize("mixer", representatives(MIXERS, [bias]))
def test_tables_longer_than_the_text(mixer):
    """The mask of the scores says which keys are read; what is written is as wide."""
    shared = mixer in SHARED
    report = check(Model(mixer, shared=shared), (33, 41), batch=1 + shared)
    assert keys_read(report) == {MIXERS[mixer]}


@pytest.mark.parametrize("mixer", representatives(MIXERS, [gating]))
def test_tables_as_long_as_the_text(mixer):
    report = check(Model(mixer, 33, part=None), (33,))
    assert keys_read(report) == {MIXERS[mixer]}


@pytest.mark.parametrize("part", [narrowed, turned])
def test_parts_of_tables(part):
    check(Model(gating, part=part), (33,))


def test_layers_are_compiled_once():
    report = check(Model(gating), (33,))
    assert [region.times for region in report.regions if written_for(region)] == [2]


def test_a_table_as_wide_as_the_features():
    """As many tokens as features: the table is no weight of features."""
    check(Model(gating, positions=WIDTH, part=None), (WIDTH,))


@pytest.mark.long
def test_frozen_tables():
    model = Model(gating)
    for layer in model.layers:
        layer.table.requires_grad_(False)
    check(model, (33, 41))


def detached(table, length):
    with torch.no_grad():
        return cut(table, length)


def test_parts_without_gradients():
    """A part that is taken under ``no_grad`` has none."""
    check(Model(gating, part=detached), (33,))


def test_masks_that_are_passed_in():
    """The gradient of a table is zero where a mask hides keys, which is checked in each call."""

    class Masked(Model):
        def forward(self, ids, mask):
            self.layers[0].mixer = lambda q, k, v, table: joined(
                scores(q, k, table).masked_fill(~mask, INF).softmax(-1) @ split(v)
            )
            return super().forward(ids)

    model = Masked(bias, layers=1).double()
    step = compiled(model)
    ids, everything = torch.randint(VOCABULARY, (2, 33)), torch.ones(33, 33, dtype=torch.bool)
    for mask in (causal(33), everything, causal(33)):
        found, truth = (gradients(model, lambda: f(ids, mask)) for f in (step, model))
        assert worst_error(found, truth) < EXACT


def test_memory():
    """A training step holds the gradient of a table, and no other matrix."""
    length = 512
    model, ids = Model(gating, length, part=None, layers=1), torch.randint(VOCABULARY, (1, length))
    step, matrix = compiled(model, 32), length * length * 4
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    step(ids).backward()
    assert matrix < peak(lambda: step(ids).backward()) < 1.6 * matrix


def test_parts_are_not_copied():
    length = 512
    model, ids = Model(gating, length + 9, layers=1), torch.randint(VOCABULARY, (1, length))
    step = compiled(model, 32)
    with torch.no_grad():
        step(ids)
        assert peak(lambda: step(ids)) < length * length * 4 / 2


FLAT = {
    "rows of a table": lambda table, pairs: (
        table.mT[pairs.flatten()].view(*pairs.shape, HEADS).permute(2, 0, 1)
    ),
    "columns of a table": lambda table, pairs: table[:, pairs.view(-1)].view(HEADS, *pairs.shape),
    "columns, selected": lambda table, pairs: table.index_select(1, pairs.flatten()).view(-1, *pairs.shape),
}


class FlatLookUps(nn.Module):
    """A bias by distance, looked up for all pairs in one row, and shared by all layers."""

    def __init__(self, look_up):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.mix = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.table, self.look_up = nn.Parameter(torch.randn(HEADS, 9)), look_up

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        distance = (places[:, None] - places).clamp(-4, 4) + 4
        x, bias = self.embed(ids), self.look_up(self.table, distance)
        for mix in self.mix:
            q, k, v = map(split, mix(x).chunk(3, -1))
            x = x + joined((q @ k.mT + bias).softmax(-1) @ v)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("name", FLAT)
def test_pairs_that_are_looked_up_in_one_row(name):
    model, ids = FlatLookUps(FLAT[name]).double(), torch.randint(VOCABULARY, (2, 45))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT

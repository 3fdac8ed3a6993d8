"""Rows of stored masks that are taken after dimensions were added: the layer streams, at every length."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from test_aten import graph_of
from torch import nn

from streambp_compile import NotStreamed, explain
from streambp_compile.dynamo.reading.aten import to_aten
from streambp_compile.dynamo.reading.values import fake_of
from streambp_compile.dynamo.rows.table_rows import take_table_rows_first
from streambp_compile.passes.ir import PAST
from streambp_compile.passes.rules.forward import slice_of

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, VOCABULARY, LONGEST = 1e-10, 8, 19, 53

PARTS = {
    "from the start": lambda table, n: table[None, None, :n, :n],
    "from the end": lambda table, n: table[None, None, -n:, -n:],
    "from within": lambda table, n: table[None, 5 : 5 + n, 5 : 5 + n],
    "rows, then dimensions, then columns": lambda table, n: table[:n].unsqueeze(0)[..., :n],
    "narrowed": lambda table, n: table.unsqueeze(0).narrow(1, 0, n).narrow(-1, 0, n),
}


class Model(nn.Module):
    """A layer that attends where a stored table says so. ``learned``: its scores have a learned bias."""

    def __init__(self, part, learned=False, changes=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.into, self.part, self.changes = nn.Linear(WIDTH, 3 * WIDTH), part, changes
        self.register_buffer("table", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())
        self.bias = nn.Parameter(torch.randn(LONGEST, LONGEST)) if learned else None

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (p.unsqueeze(1) for p in self.into(x).chunk(3, -1))
        scores, length = q @ k.mT, ids.shape[1]
        if self.changes is not None:
            self.changes(self.table)
        if self.bias is not None:
            scores = scores + self.bias[None, None, :length, :length]
        scores = scores.masked_fill(~self.part(self.table, length), float("-inf"))
        logits = self.head(x + (scores.softmax(-1) @ v).squeeze(1))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def check_gradients(model, lengths):
    """Gradients are exact at all lengths. Returns the report of the last one."""
    options = {"chunk_size": 8}
    model = model.double()
    step = torch.compile(model, backend="streambp", options=options)
    for length in lengths:
        ids = torch.randint(VOCABULARY, (2, length))
        found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
        assert worst_error(found, truth) < EXACT
    return explain(model, ids, streambp_options=options)


def check(model):
    """Every region streams besides."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        return check_gradients(model, (33, 41, 29))


def keys_of(report):
    backward = [region.backward for region in report.regions if region.backward is not None]
    return {sweep.keys for region in backward for sweep in region.program.sweeps}


@pytest.mark.long
@pytest.mark.parametrize("spelling", representatives(PARTS, ["from the end", "narrowed"]))
def test_stored_masks(spelling):
    assert PAST in keys_of(check(Model(PARTS[spelling])))


@pytest.mark.long
def test_a_learned_bias_beside_the_mask():
    check(Model(PARTS["from the start"], learned=True))


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")
def test_a_table_that_is_written_into():
    """The rows are those of after the write."""

    def hide(table):
        table[:, 3] = False
        table[3, 3] = True

    check_gradients(Model(PARTS["from the start"], changes=hide), (33,))


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")
def test_a_dimension_that_was_split():
    """It is no dimension of the table, and is cut where it comes to be."""

    model = Model(lambda table, n: table.unflatten(0, (4, LONGEST))[:3, :n, :n].any(0))
    model.register_buffer("table", torch.ones(4 * LONGEST, LONGEST, dtype=torch.bool).tril())
    check_gradients(model, (33,))


# Tables that are made of ranges and constants


def rewritten(function, *given):
    """The graph of a function, and what it computes of these inputs."""
    module = take_table_rows_first(to_aten(graph_of(function, *given)))
    module.recompile()
    return module.graph, module(*given)


def slices_in(graph):
    return [n for n in graph.nodes if n.args and slice_of(n, 2) is not None]


@pytest.mark.parametrize(
    "table",
    [
        lambda: (torch.arange(-39, 1).view(1, 1, 40) * torch.tensor(0.5))[:, :, -6:],
        lambda: (torch.arange(40)[:, None] - torch.arange(40))[-6:, -6:] * 0.5,
        lambda: torch.outer(torch.arange(40).float(), 1 / torch.arange(1, 7)).cos().t()[:, 3:9],
        lambda: (
            torch.full((2, 40), 3.0).squeeze(0)[:, :6].unsqueeze(0).expand(2, 2, 6) + torch.arange(5, 40)[2:8]
        ),
        lambda: torch.ones(40, 40).tril(2)[5:11, 3:9] + torch.full((40, 40), 2.0).triu(1)[-6:, :6],
    ],
    ids=range(5),
)
def test_tables_are_made_as_short_as_they_are_read(table):
    graph, found = rewritten(lambda x: x.sum() * 0 + table(), torch.randn(3, dtype=torch.float64))
    torch.testing.assert_close(found[0], 0.0 + table(), rtol=0, atol=0, check_dtype=False)
    assert not slices_in(graph)
    made = [fake_of(n) for n in graph.nodes if n.op == "call_function"]
    assert all(max(fake.shape, default=0) < 35 for fake in made if isinstance(fake, torch.Tensor))


def test_what_is_more_than_ranges_is_cut_where_it_was():
    def cut(x):
        return (
            (x + torch.arange(40))[-6:],
            torch.arange(40).cumsum(0)[3:],
            (torch.arange(40) * torch.rand(40))[3:],
        )

    graph, found = rewritten(cut, torch.randn(40))
    assert len(slices_in(graph)) == 3 and found[1][0] == 6


def test_what_is_written_by_its_place_is_cut_where_it_was():
    def cut(x):
        return (
            torch.select_scatter(torch.zeros(4, 6), x, 0, 3)[1:],
            torch.slice_scatter(torch.zeros(4, 6), x[None], 0, 3, 4)[2:],
            torch.zeros(9, 6).index_add(0, torch.tensor([3, 5]), torch.stack([x, x]))[3:],
        )

    x = torch.randn(6)
    for found, truth in zip(rewritten(cut, x)[1], cut(x), strict=True):
        torch.testing.assert_close(found, truth, rtol=0, atol=0)

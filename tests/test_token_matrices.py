"""What is done to attention scores, and to other matrices of tokens by tokens: linear maps over heads, reads
by rows and by columns, diagonals, masks that are repeated for all rows."""

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
from streambp_compile.passes.ir import PAST
from streambp_compile.passes.normalization.diagonals import diagonal, diagonal_backward, diagonal_scatter

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS, VOCABULARY, BUCKETS = 1e-10, 12, 3, 19, 8
INF = float("-inf")
aten, streambp = torch.ops.aten, torch.ops.streambp


def causal(scores):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), INF)


def of_heads(layer, scores, *_):
    """``nn.Linear`` over ``[b, q, k, h]``."""
    mixed = layer.first(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return layer.second(causal(mixed).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def by_einsum(layer, scores, *_):
    mixed = torch.einsum("bhqk,gh->bgqk", scores, layer.first.weight)
    return torch.einsum("bhqk,gh->bgqk", causal(mixed).softmax(-1), layer.second.weight)


def by_filter(layer, scores, *_):
    """A filter of one place, causal, and one with a bias, which shows every key a little."""
    return layer.filter(F.conv2d(scores, layer.first.weight[:, :, None, None]).softmax(-1))


def looked_up(layer, scores, q, k):
    """Scores of queries, and of keys, that one matrix of distances looks up (DeBERTa)."""
    tokens = torch.arange(scores.shape[-1])
    near = tokens[:, None] - tokens
    of_queries, of_keys = layer.distances(q), layer.distances(k)
    of_queries = of_queries.gather(-1, (near + 4).clamp(0, BUCKETS - 1).expand(scores.shape))
    of_keys = of_keys.gather(-1, (4 - near).clamp(0, BUCKETS - 1).expand(scores.shape)).mT
    return (scores + of_queries + of_keys).softmax(-1)


def diagonals(layer, scores, *_):
    """The diagonal is read, replaced, and added to."""
    own = scores.diagonal(dim1=-2, dim2=-1)
    found = scores.clone()
    found.diagonal(dim1=-2, dim2=-1).fill_(-3.0)
    return (found + torch.diag_embed(own.tanh())).softmax(-1)


WAYS = {f.__name__: f for f in (of_heads, by_einsum, by_filter, looked_up, diagonals)}


class Layer(nn.Module):
    def __init__(self, shares):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.distances = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH // HEADS, BUCKETS)
        self.first, self.second = nn.Linear(HEADS, HEADS, bias=False), nn.Linear(HEADS, HEADS, bias=False)
        self.filter, self.shares = nn.Conv2d(HEADS, HEADS, 1), shares

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        shares = self.shares(self, q @ k.mT / math.sqrt(WIDTH // HEADS), q, k)
        x = x + (shares @ v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Contrast(Layer):
    """Rows are to find their own columns, and columns their own rows."""

    def forward(self, ids):
        x = self.table(ids)
        scores, own = x @ self.qkv(x)[..., :WIDTH].mT, torch.arange(ids.shape[1]).repeat(len(ids))
        rows = F.cross_entropy(scores.flatten(0, 1), own)
        columns = scores.log_softmax(1).diagonal(dim1=1, dim2=2).mean()
        return rows + F.cross_entropy(scores.mT.flatten(0, 1), own) - columns


def check(model, lengths=(21, 35)):
    """Gradients are exact at several lengths of one compiled function, and nothing runs unchunked."""
    options = {"chunk_size": 8}
    step = torch.compile(model, backend="streambp", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        for length in lengths:
            ids = torch.randint(VOCABULARY, (2, length))
            found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
            assert worst_error(found, truth) < EXACT
    torch._dynamo.reset()
    return explain(model, torch.randint(VOCABULARY, (2, 35)), streambp_options=options)


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(WAYS, ["of_heads", "looked_up"]))
def test_scores(name):
    report = check(Layer(WAYS[name]).double())
    reaches = {r for region in report.regions for r in region.streamed.analysis.reaches.values()}
    assert name not in ("of_heads", "by_einsum") or reaches == {PAST}


@pytest.mark.long
def test_a_wide_look_up_of_keys_adds_its_gradient_to_the_sum_itself():
    """So that no chunk makes another value so wide, and no zeros so wide are kept."""
    report = check(Layer(looked_up).double())
    regions = [r.streamed for r in report.regions if r.streamed]
    schedules = [s for r in regions for s in (r.forward, r.backward) if s is not None]
    sweeps = [s for schedule in schedules for s in schedule.program.sweeps]
    bodies = [body.graph.graph for schedule in schedules for body in schedule.bodies]
    added = [n for b in bodies for n in b.find_nodes(op="call_function", target=streambp.add_at_.default)]
    assert len(added) == sum(n.target == streambp.sum_at.default for s in sweeps for n in s.keysums) == 1
    assert not any(n.target == aten.full.default for s in sweeps for n in s.writes)


@pytest.mark.long
def test_contrast_of_rows_and_of_columns():
    check(Contrast(None).double())


def test_a_padding_mask_is_no_matrix():
    """Of one row for all queries, it is not repeated for each of them before a chunk reads it."""

    class Padded(Layer):
        def forward(self, ids):
            x = self.table(ids)
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mask = (ids != 0)[:, None, None, :].expand(-1, HEADS, ids.shape[1], -1)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    model, ids = Padded(None), torch.randint(VOCABULARY, (1, 1024))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 64})
    step(ids).backward()
    limit = HEADS * 1024 * 1024  # a byte for each entry; a number takes four
    assert peak(lambda: step(ids).backward()) < limit


MOVED = {
    "rolled": lambda scores, places: scores.roll(1, 2),
    "looked up": lambda scores, places: scores[:, :, places],
    "written": lambda scores, places: torch.zeros_like(scores).index_copy(2, places, scores),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_rows_of_a_matrix_run_unchunked(name):
    """A chunk has the rows of its own queries alone."""
    model = Layer(
        lambda _, scores, *__: MOVED[name](scores, torch.arange(scores.shape[2]).flip(0)).softmax(-1)
    )
    model, ids = model.double(), torch.randint(VOCABULARY, (2, 21))
    with pytest.warns(NotStreamed, match="moves rows of a|looks up rows"):
        step = torch.compile(model, backend="streambp", options={"chunk_size": 8})
        found = gradients(model, lambda: step(ids))
    assert worst_error(found, gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.parametrize("offset", [-2, 0, 1])
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (-1, -2)])
def test_diagonals_are_those_of_torch(offset, dims):
    x = torch.randn([5 if d in {i % 3 for i in dims} else 3 for d in range(3)])
    own = x.diagonal(offset, *dims)
    assert torch.equal(diagonal(x, offset, *dims), own)
    others = torch.randn(own.shape)
    assert torch.equal(diagonal_scatter(x, others, offset, *dims), x.diagonal_scatter(others, offset, *dims))
    back = aten.diagonal_backward(others, x.shape, offset, *dims)
    assert torch.equal(diagonal_backward(others, x.shape, offset, *dims), back)

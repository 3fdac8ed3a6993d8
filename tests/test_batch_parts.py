"""Regions run for some sequences of a batch at a time where sequences do not meet, and only there."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, total_error, worst_error
from selection import representatives
from torch import Tensor, nn

import streambp_compile.regions.batch_parts as batch_parts
from benchmarks.memory import peak
from benchmarks.random_models.trial import attempt
from streambp_compile import NotStreamed, explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS, BATCH = 1e-10, 16, 2, 4


@pytest.fixture(params=representatives([1, 2], {1}))
def at_once(request, take_turns) -> int:
    """So many sequences at a time wherever that is possible."""
    take_turns(request.param)
    return request.param


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def everywhere(q, k, v, words):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v, words):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def padded(q, k, v, words):
    return F.scaled_dot_product_attention(q, k, v, words[:, None, None])


def looked_up(q, k, v, words):
    """A mask written by the places of rows, keys and sequences, as transformers writes it."""
    batch, length = words.shape
    b, t = torch.arange(batch)[:, None, None, None], torch.arange(length)
    return F.scaled_dot_product_attention(q, k, v, words[b, t] & (t <= t[:, None]))


def packed(q, k, v, words):
    documents = words.logical_not().cumsum(-1)
    past = torch.ones(2 * [words.shape[1]], dtype=torch.bool).tril()
    own = documents[:, :, None] == documents[:, None]
    return F.scaled_dot_product_attention(q, k, v, (own & past)[:, None])


def written_out(q, k, v, words):
    scores = q @ k.mT / 3 + torch.where(words, 0.0, -1e9)[:, None, None]
    return scores.softmax(-1) @ v


def linear(q, k, v, words):
    """A state for each sequence, that goes from chunk to chunk."""
    return q * (F.elu(k) + 1).mul(v).cumsum(-2)


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.norm = attend, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        mixed = self.attend(*map(heads, self.qkv(self.norm(x)).chunk(3, -1)), words)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, attend, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([Layer(attend) for _ in range(layers)])

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, words)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.roll(-1, 1).flatten())


def batch_of(length: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(length)
    words = torch.rand(batch, length, generator=make) > 0.1
    words[:, 0] = True
    return torch.randint(50, (batch, length), generator=make), words


def error(model: nn.Module, compiled, batch: tuple) -> float:
    return worst_error(gradients(model, lambda: compiled(*batch)), gradients(model, lambda: model(*batch)))


def parts(report) -> list[tuple[int, int]]:
    found = (r.streamed.batch for r in report.regions if r.streamed is not None)
    return [(batch.at_once, batch.count) for batch in found if batch is not None]


# Distinct regions that run in turns: layers that are alike are one, and the first one makes masks of inputs.
DISTINCT = {everywhere: 1, causal: 1, padded: 2, looked_up: 2, packed: 2, written_out: 2, linear: 1}


@pytest.mark.long
@pytest.mark.parametrize("attend", representatives(DISTINCT, {causal, padded, looked_up, written_out}))
def test_gradients_are_those_of_the_whole_batch(attend, at_once):
    torch.manual_seed(0)
    model = Model(attend).double()
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    for length in (45, 61):
        batch = batch_of(length)
        assert error(model, compiled, batch) < EXACT
    assert parts(explain(model, *batch_of(45))) == DISTINCT[attend] * [(at_once, BATCH)]


@pytest.mark.parametrize("attend", (looked_up, packed))
def test_keys_are_pruned_as_for_the_whole_batch(attend, at_once):
    """And what they rest on is checked in every call, for all sequences."""
    torch.manual_seed(0)
    model, batch = Model(attend, 1).double(), batch_of(45)
    report = explain(model, *batch, streambp_options=dict(chunk_size=16))
    assert parts(report) and "causal, proved" in str(report)


@pytest.mark.long
def test_sums_over_the_batch_stay_wide(at_once):
    """Gradients of weights in half precision are rounded once, not for each sequence."""
    torch.manual_seed(0)
    model, batch = Model(causal).bfloat16(), batch_of(64, 16)
    truth = gradients(model.double(), lambda: model(*batch))
    model.bfloat16()
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    assert parts(explain(model, *batch)) == [(at_once, 16)]
    eager = total_error(gradients(model, lambda: model(*batch)), truth)
    assert total_error(gradients(model, lambda: compiled(*batch)), truth) < 1.1 * eager


def test_a_second_backward_and_a_frozen_layer(at_once):
    torch.manual_seed(0)
    model, batch = Model(padded).double(), batch_of(45)
    model.layers[0].requires_grad_(False)
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    assert error(model, compiled, batch) < EXACT
    truth = gradients(model, lambda: model(*batch))
    loss = compiled(*batch)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert worst_error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, truth) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("attend", representatives((causal, looked_up), {looked_up}))
def test_dynamic_lengths(attend, at_once):
    torch.manual_seed(0)
    model = Model(attend).double()
    compiled = torch.compile(model, backend="streambp", dynamic=True, options=dict(chunk_size=16))
    for length in (45, 61, 33):
        assert error(model, compiled, batch_of(length)) < EXACT
    batch = batch_of(45)
    for value in batch:
        torch._dynamo.mark_dynamic(value, 1)
    report = explain(model, *batch)
    assert isinstance(report.lengths[0], torch.SymInt) and parts(report) == DISTINCT[attend] * [
        (at_once, BATCH)
    ]


def best_keys(q, k, v, words):
    """Of which there are at most three: a number that follows from the length."""
    scores = q @ k.mT
    best = scores.detach().topk(min(3, k.shape[-2]), -1).indices
    shown = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return scores.masked_fill(~shown, float("-inf")).softmax(-1) @ v


@pytest.mark.long
def test_nothing_is_assumed_of_lengths(at_once):
    """Where the part of a graph cannot be written for all lengths, the whole streams as it would."""
    torch.manual_seed(0)
    model = Model(best_keys).double()
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    for length in (23, 29, 41):
        assert error(model, compiled, batch_of(length)) < EXACT


def test_sequence_first(at_once):
    """Where the batch is not the outermost dimension, parts of it are copied."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, activation="gelu").double()
    x = torch.randn(45, BATCH, WIDTH, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return layer(layer(x)).square().mean()

    compiled = torch.compile(loss, backend="streambp", options=dict(chunk_size=16))
    assert worst_error(gradients(layer, lambda: compiled(x)), gradients(layer, lambda: loss(x))) < EXACT
    assert parts(explain(loss, x)) == 2 * [(at_once, BATCH)]


def test_memory_between_sweeps_is_that_of_a_part():
    """By default, where it costs little time: keys, values and their gradients of one sequence."""
    torch.manual_seed(0)
    model, batch = Model(everywhere, 1), batch_of(2048)

    def took() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="streambp")
        compiled(*batch).backward()
        return peak(lambda: compiled(*batch).backward())

    in_turns = took()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_parts, "sequences_at_once", lambda *given: given[-1])
        together = took()
    rows = BATCH * 2048 * WIDTH * 4
    assert together - in_turns > 3 * (1 - 1 / BATCH) * rows  # of four values


def mean_of_batch(q, k, v, words):
    return everywhere(q, k, v - v.mean(0), words)


def next_sequence(q, k, v, words):
    return everywhere(q, k, v + v.roll(1, 0), words)


def by_place(q, k, v, words):
    return everywhere(q, k, v * torch.arange(len(v), dtype=v.dtype)[:, None, None, None], words)


def by_halves(q, k, v, words):
    return everywhere(q, k, v.unflatten(0, (2, -1)).flip(0).flatten(0, 1), words)


def best_of_batch(q, k, v, words):
    return everywhere(q, k - k.amax(0), v, words)


def normalised_over_batch(q, k, v, words):
    return everywhere(q, k.softmax(0), v, words)


def keys_of_all(q, k, v, words):
    """Each sequence attends to all."""
    joined = [t.transpose(0, 1).flatten(1, 2).expand(len(q), -1, -1, -1) for t in (k, v)]
    return everywhere(q, *joined, words)


def keys_of_all_written_out(q, k, v, words):
    k, v = (t.transpose(0, 1).flatten(1, 2) for t in (k, v))
    return (q @ k.mT / 3).softmax(-1) @ v


def keys_of_all_heads(q, k, v, words):
    k, v = (t.flatten(1, 2)[:, None] for t in (k, v))
    return (q @ k.mT / 3).softmax(-1) @ v


def as_one_sequence(q, k, v, words):
    """All tokens of the batch attend to one another."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (q, k, v))
    mixed = everywhere(q, k, v, words)[0].transpose(0, 1)
    return mixed.unflatten(0, words.shape).transpose(1, 2)


MEETING = (
    mean_of_batch,
    next_sequence,
    by_place,
    by_halves,
    best_of_batch,
    normalised_over_batch,
)
SEVERAL = (keys_of_all, keys_of_all_written_out, keys_of_all_heads, as_one_sequence)


@pytest.mark.parametrize("attend", MEETING)
def test_sequences_that_meet_run_together(attend, at_once):
    torch.manual_seed(0)
    model, batch = Model(attend).double(), batch_of(45)
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    assert error(model, compiled, batch) < EXACT
    assert not parts(explain(model, *batch))


def test_an_input_that_is_only_handed_on_is_no_batch(at_once):
    """Every turn would compute the whole, over the gradients of the turn before."""
    torch.manual_seed(0)
    wide = nn.Parameter(torch.randn(BATCH, 45, 4 * WIDTH, dtype=torch.float64))
    model, batch = Model(everywhere, 3).double(), batch_of(45)

    def loss(ids: Tensor, words: Tensor) -> Tensor:
        x, kept = model.embed(ids), wide * 2
        for layer in model.layers:
            x = layer(x, words)
        return (x * kept[..., :WIDTH].tanh()).square().mean()

    compiled = torch.compile(loss, backend="streambp", options=dict(chunk_size=16))
    found, truth = (gradients(model, lambda: f(*batch)) for f in (compiled, loss))
    assert worst_error(found, truth) < EXACT


@pytest.mark.parametrize("attend", SEVERAL)
def test_keys_of_several_sequences_along_one_dimension(attend):
    """Each chunk would read those of the first sequence alone."""
    torch.manual_seed(0)
    model, batch = Model(attend).double(), batch_of(45)
    compiled = torch.compile(model, backend="streambp", options=dict(chunk_size=16))
    with pytest.warns(NotStreamed, match="Several sequences along one dimension read one another"):
        assert error(model, compiled, batch) < EXACT


def test_random_numbers_are_drawn_for_all_at_once(at_once):
    """Another order of drawing would be another model."""
    torch.manual_seed(0)
    model = Model(lambda q, k, v, words: everywhere(q, k, F.dropout(v, 0.5), words))
    assert not parts(explain(model, *batch_of(45)))


@pytest.mark.long
def test_sizes_are_told_by_inputs_of_the_whole_batch(take_turns):
    """One with batch and tokens in one dimension has a row per token in a turn of one sequence; its rows of
    all sequences were taken for the tokens (found by random models)."""
    take_turns(1)
    found = attempt(8051)
    assert found["in_turns"] and found["failures"] == []

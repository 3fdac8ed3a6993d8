"""Attention over a sequence's keys and a few more: memory tokens, learned and zero keys, prefixes, the states
of an earlier segment. Each streams, and reads of the sequence only the keys that its mask shows."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from torch import nn

from streambp_compile import NotStreamed, explain
from streambp_compile.dynamo.rows.row_slices import origin_of_rows, same_rows
from streambp_compile.passes.ir import PAST, shape_of

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS, VOCABULARY, MORE = 1e-10, 16, 2, 29, 3
INF = float("-inf")


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """A residual around attention that is written in different ways, a table and a head."""

    def __init__(self, attention):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Parameter(torch.randn(1, MORE, WIDTH)) for _ in range(2))
        self.attention = attention

    def forward(self, ids, *memory):
        x = self.table(ids)
        x = x + self.out(self.attention(self, x, *memory))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def with_memory(layer, x, behind=False):
    """Queries, and keys and values with a few learned ones before or behind."""
    q, k, v = layer.qkv(x).chunk(3, -1)
    more = [p.expand(x.shape[0], -1, -1) for p in (layer.key, layer.value)]
    pairs = [(t, m) if behind else (m, t) for t, m in zip((k, v), more)]
    return map(heads, (q, *(torch.cat(pair, 1) for pair in pairs)))


def memory_keys(layer, x):
    length = x.shape[1]
    own = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat([torch.ones(length, MORE, dtype=torch.bool), own], 1)
    return merged(F.scaled_dot_product_attention(*with_memory(layer, x), mask))


def memory_before_positions(layer, x):
    rows, keys = torch.arange(x.shape[1]) + MORE, torch.arange(x.shape[1] + MORE)
    return merged(F.scaled_dot_product_attention(*with_memory(layer, x), keys <= rows[:, None]))


def memory_behind(layer, x):
    length = x.shape[1]
    own = torch.full((length, length), INF, dtype=x.dtype).triu(1)
    mask = torch.cat([own, torch.zeros(length, MORE, dtype=x.dtype)], 1)
    return merged(F.scaled_dot_product_attention(*with_memory(layer, x, behind=True), mask))


def memory_without_a_mask(layer, x):
    return merged(F.scaled_dot_product_attention(*with_memory(layer, x)))


def memory_that_is_projected(layer, x):
    """Tokens that only serve as keys go through the same projection; then keys are turned by position."""
    q = layer.qkv(x)[..., :WIDTH]
    both = torch.cat([layer.key.expand(x.shape[0], -1, -1), x], 1)
    k, v = layer.qkv(F.layer_norm(both, (WIDTH,)))[..., WIDTH:].chunk(2, -1)
    turns = 1 / torch.arange(1, WIDTH + 1, dtype=x.dtype)
    rows, keys = torch.arange(x.shape[1]) + MORE, torch.arange(both.shape[1])
    q, k = q * (rows[:, None] * turns).cos(), k * (keys[:, None] * turns).cos()
    mask = torch.ones(x.shape[1], both.shape[1], dtype=torch.bool).tril(MORE)
    return merged(F.scaled_dot_product_attention(*map(heads, (q, k, v)), mask))


def zero_key(layer, x):
    q, k, v = map(heads, layer.qkv(x).chunk(3, -1))
    mask = F.pad(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), (1, 0), value=True)
    return merged(F.scaled_dot_product_attention(q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), mask))


def grouped_heads(layer, x):
    q, k, v = with_memory(layer, x)
    mask = torch.ones(x.shape[1], x.shape[1] + MORE, dtype=torch.bool).tril(MORE)
    return merged(F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], mask, enable_gqa=True))


def earlier_segment(layer, x, memory):
    both = torch.cat([memory, x], 1)
    q = layer.qkv(x)[..., :WIDTH]
    k, v = layer.qkv(both)[..., WIDTH:].chunk(2, -1)
    mask = torch.ones(x.shape[1], both.shape[1], dtype=torch.bool).tril(memory.shape[1])
    return merged(F.scaled_dot_product_attention(*map(heads, (q, k, v)), mask))


def two_layers(layer, x, prefix, behind=False):
    """The queries of the second layer are made of the first one's prefix as well."""
    for _ in range(2):
        q, k, v = map(heads, layer.qkv(x).chunk(3, -1))
        pairs = [(t, heads(prefix)) if behind else (heads(prefix), t) for t in (k, v)]
        own = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = F.pad(own, (0, prefix.shape[1]) if behind else (prefix.shape[1], 0), value=True)
        a = F.scaled_dot_product_attention(q, *(torch.cat(pair, 2) for pair in pairs), mask)
        x = x + layer.out(merged(a))
    return x


def prefix_of_two_layers(layer, x, prefix):
    return two_layers(layer, x, prefix)


def prefix_behind_two_layers(layer, x, prefix):
    return two_layers(layer, x, prefix, behind=True)


def hidden_memory(layer, x):
    """Rows that see nothing of the memory, and a first row that sees nothing at all."""
    length = x.shape[1]
    rows = torch.arange(length)[:, None]
    mask = torch.cat([(rows > 2).expand(length, MORE), torch.arange(length) < rows], 1)
    return merged(F.scaled_dot_product_attention(*with_memory(layer, x), mask))


def keys_of_the_row_before(layer, x):
    """Every row sees all of the other keys: their gradients are final later than those of its own keys."""
    before, length = F.pad(x, (0, 0, 1, -1)), x.shape[1]
    q = layer.qkv(x)[..., :WIDTH]
    keys, values = (torch.cat([layer.qkv(y).chunk(3, -1)[i] for y in (x, before)], 1) for i in (1, 2))
    own = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat([own, torch.ones_like(own)], 1)
    return merged(F.scaled_dot_product_attention(*map(heads, (q, keys, values)), mask))


def without_heads(layer, x):
    q, k, v = layer.qkv(x).chunk(3, -1)
    more = [p.expand(x.shape[0], -1, -1) for p in (layer.key, layer.value)]
    keys, values = (torch.cat(pair, 1) for pair in zip(more, (k, v)))
    own = torch.ones(x.shape[1], x.shape[1] + MORE, dtype=torch.bool).tril(MORE)
    return F.scaled_dot_product_attention(q, keys, values, own)


def one_piece(layer, x):
    """Nothing is put before the sequence's own keys."""
    q, k, v = map(heads, layer.qkv(x).chunk(3, -1))
    own = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    keys, values = torch.cat([k], 2), torch.cat([v], 2)
    return merged(F.scaled_dot_product_attention(q, keys, values, own))


CASES = {f.__name__: f for f in (memory_keys, memory_before_positions, memory_behind, memory_without_a_mask)}
CASES |= {f.__name__: f for f in (memory_that_is_projected, zero_key, grouped_heads, earlier_segment)}
CASES |= {f.__name__: f for f in (hidden_memory, one_piece, without_heads, keys_of_the_row_before)}
CASES |= {f.__name__: f for f in (prefix_of_two_layers, prefix_behind_two_layers)}
WITH_INPUT = (earlier_segment, prefix_of_two_layers, prefix_behind_two_layers)

WITHOUT_CAUSALITY = ("memory_without_a_mask", "hidden_memory", "keys_of_the_row_before")


QUICK = ("zero_key", "keys_of_the_row_before")


def quick_of(names, quick=QUICK):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


def check(model, *arguments_of_lengths, chunk):
    step = torch.compile(model, backend="streambp", options={"chunk_size": chunk})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        for given in arguments_of_lengths:
            found, truth = (gradients(model, lambda: f(*given)) for f in (step, model))
            assert worst_error(found, truth) < EXACT
            with torch.no_grad():
                torch.testing.assert_close(step(*given), model(*given), rtol=EXACT, atol=0)


def given(attention, length):
    memory = (torch.randn(2, 4, WIDTH, dtype=torch.float64),) if attention in WITH_INPUT else ()
    return torch.randint(VOCABULARY, (2, length)), *memory


@pytest.mark.long
@pytest.mark.parametrize("name", quick_of(CASES))
def test_more_keys(name):
    check(Layer(CASES[name]).double(), given(CASES[name], 17), given(CASES[name], 20), chunk=7)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 17])
@pytest.mark.parametrize("name", CASES)
def test_more_keys_in_other_chunks(name, chunk):
    check(Layer(CASES[name]).double(), given(CASES[name], 17), chunk=chunk)


@pytest.mark.long
@pytest.mark.parametrize("behind", quick_of((False, True), quick=(True,)))
def test_other_keys_of_any_number(behind):
    """An encoder's rows are keys beside the decoder's own (T5Gemma 2), as many as these or more."""
    model = Layer(partial(two_layers, behind=behind)).double()
    lengths = ((33, 33), (41, 60), (70, 20))
    others = [torch.randn(2, n, WIDTH, dtype=torch.float64) for _, n in lengths]
    ids = [torch.randint(VOCABULARY, (2, n)) for n, _ in lengths]
    check(model, *zip(ids, others), chunk=16)


@pytest.mark.long
@pytest.mark.parametrize("name", quick_of([n for n in CASES if n not in WITHOUT_CAUSALITY]))
def test_only_visible_keys_are_read(name):
    report = explain(Layer(CASES[name]).double(), *given(CASES[name], 17), streambp_options={"chunk_size": 7})
    reaches = {
        reach
        for region in report.regions
        for node, reach in region.streamed.analysis.reaches.items()
        if node.target is torch.ops.streambp.attention.default
        and shape_of(node.args[0])[-2] == shape_of(node.args[1])[-2]  # keys of the sequence itself
    }
    assert reaches == {PAST}


class Torch(nn.Module):
    """Torch's own layer, with keys that it adds."""

    def __init__(self, **more):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **more)

    def forward(self, ids):
        x = self.table(ids)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
def test_keys_that_torch_adds(more):
    check(Torch(**more).double(), *((torch.randint(VOCABULARY, (2, n)),) for n in (17, 20)), chunk=7)


@pytest.mark.long
def test_half_precision_is_no_worse_than_eager():
    model, ids = Layer(memory_keys).double(), given(memory_keys, 33)
    truth = gradients(model, lambda: model(*ids))
    model.bfloat16()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 7})
    ours, eager = (gradients(model, lambda: f(*ids)) for f in (step, model))
    errors = [worst_error({n: g.double() for n, g in found.items()}, truth) for found in (ours, eager)]
    assert errors[0] < 1.2 * errors[1] and not math.isnan(errors[0])


def memory_of_another_dtype(layer, x):
    """`cat` gives the wider dtype to all of its parts."""
    q, k, v = layer.qkv(x).chunk(3, -1)
    pairs = ((layer.key.float(), k), (layer.value, v.float()))
    return merged(
        F.scaled_dot_product_attention(
            *map(heads, (q, *(torch.cat([m.expand(x.shape[0], -1, -1), t], 1) for m, t in pairs)))
        )
    )


def memory_behind_nothing(layer, x):
    """Empty values of one dimension are left out by `cat`, whatever they are put beside."""
    q, k, v = layer.qkv(x).chunk(3, -1)
    pairs = [(m.expand(x.shape[0], -1, -1), t) for m, t in ((layer.key, k), (layer.value, v))]
    joined = (torch.cat([torch.empty(0, dtype=x.dtype), *pair], 1) for pair in pairs)
    return merged(F.scaled_dot_product_attention(*map(heads, (q, *joined))))


@pytest.mark.parametrize("attention", (memory_of_another_dtype, memory_behind_nothing))
def test_keys_are_what_cat_makes_of_them(attention):
    model, ids = Layer(attention).double(), torch.randint(VOCABULARY, (2, 33))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 7, "strict": True})
    # the gradient of the memory is rounded to float32, after sums in another order
    exact = 1e-6 if attention is memory_of_another_dtype else EXACT
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < exact


def test_a_deep_residual_stream_is_followed_once():
    """Each sum doubles the paths to the first layer."""
    graph, aten = torch.fx.Graph(), torch.ops.aten

    def given(node):
        node.meta["example_value"] = torch.empty(2, 5, 3)
        return node

    x = given(graph.placeholder("x"))
    for _ in range(200):
        y = given(graph.call_function(aten.tanh.default, (x,)))
        x = given(graph.call_function(aten.add.Tensor, (x, y)))
    known: set = set()
    assert origin_of_rows(x, 1, known) is None and {at for at, _ in known} == set(graph.nodes)
    assert list(same_rows(x, 1, known)) == [], "nor is it followed again"

"""Which dimension of the inputs carries the tokens."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import Mixing, MixingLayer, Plain, gradients, ids_of, worst_error
from torch import nn

from streambp_compile import NotStreamed, Report, explain
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.dynamo.reading import capture, token_axes

WIDTH, VOCABULARY = 32, 11
EXACT = 1e-12


class Layer(nn.Module):
    """Attention on hidden states, with square weights."""

    def __init__(self):
        super().__init__()
        self.into, self.out, self.up = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, labels):
        q = (x @ self.into).view(*x.shape[:2], 4, -1).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + a.transpose(1, 2).flatten(2) @ self.out
        x = x + x.tanh() @ self.up
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tokens", [24, pytest.param(WIDTH, marks=pytest.mark.slow)])
def test_square_weights_do_not_make_tokens_of_features(tokens, interpreted):
    report = Report()

    def backend(graph, inputs):
        return Chain(graph, inputs, Config(chunk_size=5, strict=True), report).compiled()

    x, labels = torch.randn(2, tokens, WIDTH), torch.randint(VOCABULARY, (2, tokens))
    torch.compile(Layer(), backend=backend)(x, labels)
    assert {region.analysis.length for region in report.regions} == {tokens}


def test_square_weights_of_heads_do_not_make_a_second_sequence_of_features(interpreted):
    """A head behind a residual block has no attention that could tell features from tokens."""
    report, square = Report(), torch.randn(40, WIDTH, requires_grad=True)
    table = torch.randn(VOCABULARY, WIDTH, requires_grad=True)

    def loss(x, labels):
        moved = x + F.silu(x @ square[:WIDTH])
        first, second = (F.cross_entropy((h @ table.T).flatten(0, 1), labels) for h in (x, moved))
        return first + second

    def backend(graph, inputs):
        return Chain(graph, inputs, Config(chunk_size=5, strict=True), report).compiled()

    x = torch.randn(2, 24, WIDTH, requires_grad=True)
    torch.compile(loss, backend=backend)(x, torch.randint(VOCABULARY, (48,)))
    assert [region.analysis.length for region in report.regions] == [24]


TABLE_LENGTH = 64


class Positions(nn.Module):
    """Learned positions, and a table, both for the longest sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Parameter(torch.randn(1, TABLE_LENGTH, 16))
        self.register_buffer("angles", torch.randn(TABLE_LENGTH, 16))

    def forward(self, ids):
        x = self.embedding(ids) + self.places[:, : ids.shape[1]]
        q = (x * self.angles[: ids.shape[1]]).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), ids.flatten())


def test_tables_for_the_longest_sequence_stream_at_lengths_that_change(interpreted):
    model = Positions().double()
    step = torch.compile(model, backend="streambp", dynamic=True, options={"chunk_size": 5, "strict": True})
    for length in (24, 17):
        ids = torch.randint(VOCABULARY, (2, length))
        truth = torch.autograd.grad(model(ids), list(model.parameters()))
        found = torch.autograd.grad(step(ids), list(model.parameters()))
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def long_convolution(x: torch.Tensor) -> torch.Tensor:
    """Every token with all before it, by complex numbers."""
    size = 2 * x.shape[1]
    filters = torch.exp(-torch.arange(x.shape[1], dtype=x.dtype))[:, None]
    product = torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(filters, n=size, dim=0)
    return torch.fft.irfft(product, n=size, dim=1)[:, : x.shape[1]]


def test_an_unknown_mixer_of_complex_numbers_is_cut_off(interpreted):
    """A transform of all tokens runs unchunked, a layer at a time; the head behind it streams."""
    report = Report()

    def backend(graph, inputs):
        return Chain(graph, inputs, Config(chunk_size=5), report).compiled()

    model = Mixing(16, *(MixingLayer(long_convolution, 16, parts=1) for _ in range(2))).double()
    step, ids = torch.compile(model, backend=backend), ids_of(2, 24)
    truth = gradients(model, lambda: model(ids))
    with pytest.warns(NotStreamed, match="_fft_r2c"):
        found = gradients(model, lambda: step(ids))
    assert worst_error(found, truth) < 1e-10
    whole = [report.regions[i].refusal is not None for i in report.order]
    assert whole.count(True) == 2 and not whole[-1]


def wasserstein(hidden, weight, teacher):
    p = F.linear(hidden, weight).softmax(-1)
    return (p.cumsum(-1) - teacher.softmax(-1).cumsum(-1)).abs().sum(-1).mean()


def ordinal(hidden, weight, teacher):
    return (F.linear(hidden.cumsum(-1), weight) - teacher).square().mean()


@pytest.mark.parametrize("loss", [wasserstein, pytest.param(ordinal, marks=pytest.mark.slow)])
def test_scans_over_classes_or_features_do_not_make_tokens_of_them(loss, interpreted):
    """A head by itself has no attention that would show the tokens."""
    tokens, classes = 24, 91
    hidden = torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(classes, WIDTH, dtype=torch.float64))
    teacher = torch.randn(2, tokens, classes, dtype=torch.float64)
    report = Report()

    def backend(graph, inputs):
        return Chain(graph, inputs, Config(chunk_size=5, strict=True), report).compiled()

    step = torch.compile(loss, backend=backend)
    truth, found = (torch.autograd.grad(f(hidden, weight, teacher), (hidden, weight)) for f in (loss, step))
    assert {region.analysis.length for region in report.regions} == {tokens}
    for ours, theirs in zip(found, truth):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Heads(nn.Module):
    """Products with weights, whose features are parted into heads."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(mixed).square().mean()


def test_a_graph_that_no_rewrite_changes_is_captured_once(interpreted, monkeypatch):
    """Features that are parted into heads are no tokens parted into blocks, which ask for a capture of their
    own."""
    captured = []
    monkeypatch.setattr(
        token_axes, "Captured", lambda *given: captured.append(given) or capture.Captured(*given)
    )
    model, x = Heads(), torch.randn(2, 40, 32)
    torch.compile(model, backend="streambp", options={"strict": True})(x).backward()
    assert len(captured) == 1


def test_a_capture_is_made_again_after_a_change():
    def capture_twice(change):
        module = torch.fx.symbolic_trace(lambda x: (x * 2).relu())
        with token_axes.capturing_once():
            first = token_axes.traced(module, fakes)
            change(module.graph)
            return first, token_axes.traced(module, fakes)

    def rewritten(graph):
        product = next(n for n in graph.nodes if n.op == "call_function")
        product.args = (product.args[0], 3)

    fakes = [torch.randn(2, 8)]
    first, again = capture_twice(lambda graph: None)
    assert first is again
    first, again = capture_twice(rewritten)
    assert first is not again


@pytest.mark.long
def test_a_batch_that_changes_is_a_number_though_no_input_has_tokens(interpreted, fresh_dynamo):
    """An image has none, and the first value that has is a weight."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=2, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = transformers.ViTForImageClassification(config).double()
    step = torch.compile(lambda **batch: model(**batch).loss, backend="streambp", options={"chunk_size": 16})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 3, 5):
            images = torch.randn(size, 3, 16, 16, dtype=torch.float64)
            batch = dict(pixel_values=images, labels=torch.arange(size) % 2)
            truth = gradients(model, lambda: model(**batch).loss)
            found = gradients(model, lambda: step(**batch))
            torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)  # those of keys' biases are zero
    assert not [w for w in caught if "internal error" in str(w.message)]


class Taught(Plain):
    def loss(self, x, labels):
        candidates, teacher = labels
        chosen = self.head(self.norm(x)).log_softmax(-1).gather(-1, candidates)
        return -(chosen * teacher).sum(-1).mean()


@pytest.mark.long
def test_an_index_beside_the_text_has_its_rows(interpreted):
    """Candidates of a teacher, as many rows as the text, picked from the student's logits at any length."""
    model = Taught(vocabulary=500).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 8, "strict": True})
    for length in (30, 47):
        candidates, teacher = torch.randint(0, 500, (2, length, 3)), torch.rand(2, length, 3).double()
        ids = ids_of(2, length)
        for given in (ids, candidates, teacher):
            torch._dynamo.mark_dynamic(given, 1)
        found, truth = (gradients(model, lambda f=f: f(ids, (candidates, teacher))) for f in (step, model))
        assert worst_error(found, truth) < EXACT
    assert not explain(model, ids, (candidates, teacher)).notes

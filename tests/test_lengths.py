"""Every small model of the tests, compiled at one length, is exact at three others, and at other batches.

From the second length on, the number of tokens is a symbol, and from the second batch on that of sequences:
whatever reads a size must be handed that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import test_blocks
import test_key_places
import test_position_tables
import test_scans
import test_shifted_rows
import test_strict_causality
import test_windows
import torch
import torch.nn.functional as F
from models import (
    VOCABULARY,
    Layer,
    LlamaLike,
    Mixing,
    MixingLayer,
    Plain,
    gradients,
    hugging_face,
    ids_of,
    worst_error,
)
from selection import representatives
from test_objectives import WIDTH, Trained
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from benchmarks.losses import OBJECTIVES, Batch
from benchmarks.memory import peak
from benchmarks.zoo import OWN, ROWS
from streambp_compile.backend import Chain

LENGTHS = (43, 61, 24, 40)
WHOLE_BLOCKS = (40, 64, 24, 48)
EXACT = 1e-9


@dataclass(frozen=True)
class Model:
    """A model, and how to give it a batch.

    build  the model
    batch  length in tokens, and number of sequences → its arguments
    exact  the largest error that passes
    lengths  at which it is tried
    """

    build: Callable[[], nn.Module]
    batch: Callable[..., tuple]
    exact: float = EXACT
    lengths: tuple[int, ...] = LENGTHS


class Distilled(nn.Module):
    """Features of a frozen teacher beside the loss: what a mean divides by is a number of the length."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Plain(width=32), Plain(width=32)
        self.map = nn.Linear(32, 32)
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x, y = self.student.embed(ids), self.teacher.embed(ids)
        apart = 0.0
        for layer, other in zip(self.student.layers, self.teacher.layers):
            x, y = layer(x), other(y)
            apart = apart + F.mse_loss(self.map(x), y)
        return self.student.loss(x, ids) + apart


class Folded(nn.Module):
    """A layer whose rows are all tokens of the batch, twice each: no size of its input is the length."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCABULARY, 32), Layer(32, 2), nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.layer(self.embed(torch.cat((ids, ids), 1))).flatten(0, 1)
        places = torch.arange(rows.shape[0], dtype=rows.dtype) / rows.shape[0]
        return (self.head(rows).logsumexp(-1) * places).mean()


class Causal(nn.Module):
    """A mixer of hidden states between two projections."""

    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), mix

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).tanh()
        return F.cross_entropy(self.head(h + self.mix(h)).flatten(0, 1), ids.flatten())


class Row(nn.Module):
    """A model of the zoo, of its own batches."""

    def __init__(self, name: str):
        super().__init__()
        self.model, _, self.loss = ROWS[name].build(max(LENGTHS))

    def forward(self, batch: dict) -> Tensor:
        return self.loss(self.model, **batch)


class Labelled(nn.Module):
    """A model of Hugging Face under its own loss."""

    def __init__(self, name: str, **options):
        super().__init__()
        self.model = hugging_face(name, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def one(length: int, size: int = 2) -> tuple:
    return (ids_of(size, length),)


def few(length: int, size: int = 2) -> tuple:
    """Of the smallest vocabulary that these models have."""
    return (ids_of(size, length) % min(test_key_places.VOCABULARY, test_position_tables.VOCABULARY),)


def two(length: int, size: int = 2) -> tuple:
    return ids_of(size, length), ids_of(size, length)


def widened(batch: dict) -> dict:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def of_objective(name: str) -> Model:
    return Model(partial(Trained, name), lambda n, b=4: (ids_of(b, n), Batch(b, n, WIDTH, VOCABULARY)))


def of_zoo(name: str) -> Model:
    return Model(partial(Row, name), lambda n: (widened(ROWS[name].build(n)[1]),))


def mixing(width: int) -> Callable[[Callable], nn.Module]:
    return lambda mix: Mixing(width, MixingLayer(mix, width, weight=(2,)))


def with_table(mixer: Callable) -> nn.Module:
    return test_position_tables.Model(mixer, max(LENGTHS))


MIXERS = {  # kind → its mixers, and a model of one
    "scan": (test_scans.MIXERS, test_scans.Scanned),
    "blocks": (test_blocks.MIXERS, mixing(test_blocks.WIDTH)),
    "windows": (test_windows.MIXERS, mixing(test_windows.WIDTH)),
    "keys": (test_key_places.MIXERS, test_key_places.Model),
    "shift": (test_shifted_rows.MIXERS, test_shifted_rows.Mixed),
    "strict": (test_strict_causality.MIXERS, Causal),
    "table": ({m.__name__: m for m in test_position_tables.MIXERS}, with_table),
}
FAMILIES = ("Llama", "Qwen3", "Mistral", "GPT2", "Gemma2")
MODELS = {
    "plain": Model(Plain, two),
    "llama-like": Model(LlamaLike, two),
    "distilled": Model(Distilled, one),
    "folded": Model(Folded, one),
    **{name: Model(partial(Labelled, name), one, 1e-5) for name in FAMILIES},
    **{f"zoo: {name}": of_zoo(name) for name in OWN if name != "flex"},  # which has no backward on a CPU
    **{f"loss: {name}": of_objective(name) for name in OBJECTIVES},
    **{
        f"{kind}: {name}": Model(
            partial(build, mix),
            few if kind in ("keys", "table") else one,
            lengths=WHOLE_BLOCKS if kind == "blocks" or mix is test_key_places.blocks_by_index else LENGTHS,
        )
        for kind, (mixers, build) in MIXERS.items()
        for name, mix in mixers.items()
    },
}
CHOSEN = {"distilled", "folded", "zoo: packed"}


def error_of(step: Callable, model: nn.Module, batch: tuple) -> float:
    """The largest error of a gradient: relative, or absolute where the true gradient is zero (a bias that
    cancels out, a policy that is clipped)."""
    found, truth = (gradients(model, lambda f=f: f(*batch)) for f in (step, model))
    zero = [n for n, g in truth.items() if g.norm() < 1e-12]
    errors = [found.pop(n).norm().item() for n in zero if truth.pop(n) is not None]
    return max([*errors, *([worst_error(found, truth)] if truth else ())])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp", r"error:[\s\S]*internal error")
@pytest.mark.parametrize("name", representatives(MODELS, CHOSEN))
def test_three_other_lengths_are_exact(name, interpreted):
    given = MODELS[name]
    model = given.build().double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in given.lengths:
        batch = given.batch(length)
        assert error_of(step, model, batch) < given.exact, f"{length} tokens"


@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_a_second_length_needs_no_other_bodies(family, interpreted):
    """Heads of keys that are repeated for attention stay few where lengths are symbols, too."""
    torch._dynamo.reset()
    model = hugging_face(family)
    step = torch.compile(
        lambda ids: model(ids, labels=ids).loss, backend="streambp", options={"chunk_size": 16}
    )
    step(ids_of(1, 64)).backward()
    before = counters["streambp"]["bodies"]
    step(ids_of(1, 47)).backward()
    assert counters["streambp"]["bodies"] == before


SIZED = {name: model for name, model in MODELS.items() if not name.startswith("zoo")}
BATCHES = ((2, 0), (4, 1), (6, 2), (10, 0))  # sequences, and which of the lengths
# A third batch has a graph of its own in these: a guard on the number of sequences stands in their graphs.
OF_ONE_BATCH = {
    "blocks": (
        "attention_of_blocks",
        "back_to_rows",
        "fused_keys_of_blocks",
        "gated_linear_attention",
        "linear_attention",
        "retention",
        "state_space",
        "two_blocks",
    ),
    "keys": ("straight through",),
    "table": (
        "ahead",
        "attention_free",
        "bias",
        "bias_of_all",
        "gating",
        "gating_of_all",
        "mixing",
        "penalised",
        "synthesizer",
        "window",
    ),
    "windows": ("depthwise", "filters", "maxima", "means", "overlapping", "overlapping means", "unfold"),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp", r"error:[\s\S]*internal error")
@pytest.mark.parametrize(
    "name", representatives(SIZED, {"llama-like", "folded", "loss: cross-entropy, rolled labels"})
)
def test_other_batches_are_exact(name, interpreted):
    torch._dynamo.reset()
    given = SIZED[name]
    model = given.build().double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    counters.clear()
    for size, at in BATCHES:
        batch = given.batch(given.lengths[at], 2 * size)  # preferences come in pairs
        assert error_of(step, model, batch) < given.exact, f"{size} sequences"
    kind, _, own = name.partition(": ")
    if own not in OF_ONE_BATCH.get(kind, ()):
        assert counters["stats"]["unique_graphs"] == 2, "a third batch was compiled"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp", r"error:[\s\S]*internal error")
@pytest.mark.parametrize("name", representatives(SIZED, {"windows: overlapping", "folded"}))
def test_rewrites_write_no_number_of_sequences(name, interpreted, monkeypatch):
    """The graph that is cut into regions is the same text, whatever the batch at which it was traced."""
    given, texts, rewritten = SIZED[name], [], Chain.rewritten

    def noted(chain: Chain) -> torch.fx.GraphModule:
        module = rewritten(chain)
        nodes = [n for n in module.graph.nodes if n.op != "placeholder"]
        texts[-1] += [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in nodes]
        return module

    monkeypatch.setattr(Chain, "rewritten", noted)
    model = given.build().double()
    for sequences in (6, 10):
        torch._dynamo.reset()
        texts.append([])
        batch = given.batch(given.lengths[0], sequences)
        for tensor in tree_leaves([v if isinstance(v, Tensor) else vars(v) for v in batch]):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] % sequences == 0:
                torch._dynamo.mark_dynamic(tensor, 0)
        torch.compile(model, backend="streambp", options={"chunk_size": 16})(*batch)
    assert texts[0] == texts[1] != []


@pytest.mark.long
def test_a_batch_may_be_marked(interpreted):
    """Sizes that the user marks are symbols from the first call on; far more sequences are compiled anew."""
    torch._dynamo.reset()
    model = LlamaLike().double()
    step = torch.compile(model, backend="streambp")
    graphs = []
    for size in (2, 3, 8, 9, 30):
        batch = two(1024 // size, size)
        for value in batch:
            torch._dynamo.mark_dynamic(value, (0, 1))
        counters.clear()
        found, truth = (gradients(model, lambda f=f: f(*batch)) for f in (step, model))
        assert worst_error(found, truth) < EXACT
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 0, 0, 1, 0]


@pytest.mark.long
def test_chunks_shrink_where_the_batch_grows():
    """A chunk holds as many numbers as planned: the peak does not grow with the number of sequences."""
    model = LlamaLike()
    step = torch.compile(model, backend="streambp")

    def peak_of(size: int) -> int:
        batch = two(1024 // size, size)
        step(*batch).backward()
        return peak(lambda: step(*batch).backward())

    _, second, *others = (peak_of(size) for size in (2, 4, 8, 16))
    assert max(others) < 1.1 * second


def test_rows_that_labels_keep_are_no_other_sequence(interpreted):
    """Each input has a symbol for its length: where both are one number, the logits do not exist either."""
    heads = nn.ModuleList(nn.Linear(16, VOCABULARY) for _ in range(2)).double()

    def loss(h: Tensor, labels: Tensor) -> Tensor:
        logits = torch.stack([head(h) for head in heads], 1)[:, :, -labels.shape[1] :]
        parts = zip(logits.unbind(1), labels.unbind(-1))
        return torch.stack([F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in parts]).sum()

    step = torch.compile(loss, backend="streambp", options={"chunk_size": 8, "strict": True})
    for length, kept in ((128, 128), (192, 192), (192, 150)):
        h = torch.randn(2, length, 16, dtype=torch.float64)
        labels = torch.stack([ids_of(2, kept)] * 2, -1)
        found, truth = (gradients(heads, lambda f=f: f(h, labels)) for f in (step, loss))
        assert worst_error(found, truth) < EXACT
        if kept == length:
            logits = 2 * h.element_size() * 2 * length * VOCABULARY
            assert peak(lambda: step(h, labels).backward()) < 0.5 * logits


def test_rows_kept_of_prompts_of_any_length_need_one_graph(interpreted):
    """Ids of prompt and completion are cut to the completion beside its logits, as GRPO does: no number of
    tokens in front of it is guarded."""
    torch._dynamo.reset()
    model = LlamaLike().double()

    def loss(ids: Tensor, completion: Tensor) -> Tensor:
        kept = completion.shape[1]
        logits = model.head(model.hidden(ids)[:, -kept - 1 :])[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, -kept:, None]).squeeze(-1)
        return -(chosen * completion).mean()

    step = torch.compile(loss, backend="streambp", options={"chunk_size": 16, "strict": True})
    counters.clear()
    for length, kept in ((64, 32), (80, 48), (96, 44), (104, 60), (90, 30)):
        given = ids_of(2, length), torch.rand(2, kept, dtype=torch.float64)
        found, truth = (gradients(model, lambda f=f: f(*given)) for f in (step, loss))
        assert worst_error(found, truth) < EXACT
    assert counters["stats"]["unique_graphs"] == 2


def test_a_length_in_the_size_of_an_input_alone_is_handed_in(interpreted):
    """Is a length handed to a backward that reads only how many blocks of `math.ceil` it has?"""

    def in_blocks(h: Tensor) -> Tensor:
        size, length, width = h.shape
        missing = math.ceil(length / 64) * 64 - length
        whole = torch.cat([h, h.new_zeros(size, missing, width)], 1).view(size, -1, 64, width)
        return whole.cumsum(2).tanh().reshape(size, -1, width)[:, :length]

    model = Causal(in_blocks).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for size, length in ((2, 48), (3, 40)):
        ids = ids_of(size, length)
        found, truth = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(found, truth) < EXACT, (size, length)


class Spectral(nn.Module):
    """Layers that mix tokens by a Fourier transform, which has no rule."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("ignore:streambp")
def test_a_backward_that_is_compiled_later_fixes_no_size(interpreted):
    """Dynamo's guards exist by then, so that another batch would run code for the first one."""
    model = Spectral().double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for size, length in ((2, 40), (2, 61), (3, 24), (5, 43)):
        ids = ids_of(size, length)
        found, truth = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(found, truth) < EXACT, (size, length)

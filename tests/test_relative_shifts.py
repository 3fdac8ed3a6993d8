"""Relative shifts of attention scores ("skewing") by reshapes, in the spellings of models."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Mixing, MixingLayer, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor

import streambp_compile.backend  # noqa: F401  registers the gradient of the operator
from streambp_compile import explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS = 1e-10, 16, 2
INF = float("-inf")
skewed = torch.ops.streambp.skewed


# Spellings: scores ``[B, H, T, R]`` of relative positions → ``[B, H, T, T]``


def transformer_xl(x: Tensor) -> Tensor:
    zero_pad = torch.zeros((*x.shape[:3], 1), dtype=x.dtype)
    padded = torch.cat([zero_pad, x], dim=-1).view(*x.shape[:2], x.size(3) + 1, x.size(2))
    return padded[:, :, 1:].view_as(x)[..., : x.size(2)]


def tokens_first(x: Tensor) -> Tensor:
    """The first code of Transformer-XL: ``[T, R, B, H]``."""
    x = x.permute(2, 3, 0, 1)
    padded = torch.cat([torch.zeros_like(x[:, :1]), x], dim=1)
    padded = padded.view(x.size(1) + 1, x.size(0), *x.shape[2:])
    return padded[1:].view_as(x).permute(2, 3, 0, 1)


def music_transformer(x: Tensor) -> Tensor:
    batch, count, rows, columns = x.shape
    return F.pad(x, (1, 0)).reshape(batch, count, columns + 1, rows)[:, :, 1:, :]


def nemo(x: Tensor) -> Tensor:
    batch, count, rows, columns = x.shape
    x = F.pad(x, pad=(1, 0)).view(batch, count, -1, rows)
    return x[:, :, 1:].view(batch, count, rows, columns)[:, :, :, :rows]


def narrowed(x: Tensor) -> Tensor:
    batch, count, rows, columns = x.shape
    x = torch.cat([x.new_zeros(batch, count, rows, 1), x], -1)
    x = x.flatten(2).narrow(-1, rows, rows * columns).unflatten(-1, (rows, columns))
    return x.narrow(-1, 0, rows)


def vits(x: Tensor) -> Tensor:
    batch, count, rows, columns = x.shape
    flat = F.pad(x.flatten(0, 1), [0, 1]).view(batch * count, rows * 2 * rows)
    padded = F.pad(flat, [0, rows - 1]).view(batch * count, rows + 1, columns)
    return padded[:, :rows, rows - 1 :].view(batch, count, rows, rows)


def xlnet(x: Tensor) -> Tensor:
    batch, count, rows, columns = x.shape
    x = x.reshape(batch, count, columns, rows)[:, :, 1:, :].reshape(batch, count, rows, columns - 1)
    return torch.index_select(x, 3, torch.arange(rows))


CAUSAL = (music_transformer, tokens_first)  # with as many relative positions as tokens
SHIFTS = {f.__name__: f for f in (transformer_xl, nemo, narrowed, vits, xlnet, *CAUSAL)}


def positions(shift, rows: int, dtype: torch.dtype) -> Tensor:
    """How far behind a query is the key, for each relative position."""
    first, last = rows if shift is xlnet else rows - 1, 0 if shift in CAUSAL else 1 - rows
    return torch.arange(first, last - 1, -1, dtype=dtype)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def relative(shift, hide=None):
    """Attention of two heads with a relative shift, causal where it has no later positions."""

    def mix(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        rows = q.shape[1]
        far = positions(shift, rows, q.dtype)[:, None] * torch.linspace(0.01, 1, WIDTH, dtype=q.dtype)
        r = (far.sin() @ weight).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        q, k, v = map(split, (q, k, v))
        scores = q @ k.mT + shift((q + weight.mean()) @ r.mT)
        if hide is not None:
            scores = hide(scores)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return mix


def later(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


HIDDEN = {
    "filled": lambda s: s.masked_fill(later(s), INF),
    "filled with the lowest": lambda s: s.masked_fill(later(s), torch.finfo(s.dtype).min),
    "added": lambda s: s + torch.full(s.shape[-2:], INF, dtype=s.dtype).triu(1),
    "chosen by place": lambda s: torch.where(
        torch.arange(s.shape[-1]) <= torch.arange(s.shape[-2])[:, None], s * 0.5, INF
    ),
}


def model_of(mix) -> torch.nn.Module:
    return Mixing(WIDTH, *(MixingLayer(mix, WIDTH, weight=(WIDTH, WIDTH)) for _ in range(2))).double()


def assert_exact(model, step) -> None:
    for length in (43, 40):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(SHIFTS, {"music_transformer"}))
def test_relative_shifts_stream(name):
    """All of it, at lengths that change: a warning is an error here."""
    shift = SHIFTS[name]
    model = model_of(relative(shift, HIDDEN["filled"] if shift in CAUSAL else None))
    assert_exact(model, torch.compile(model, backend="streambp", options={"chunk_size": 16}))


@pytest.mark.slow
@pytest.mark.inductor
def test_relative_shifts_compile():
    model = model_of(relative(nemo))
    assert_exact(model, torch.compile(model, backend="streambp", options={"chunk_size": 16}))


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(HIDDEN, {"filled"}))
def test_entries_of_the_next_row_are_left_out_where_a_mask_hides_them(name):
    model = model_of(relative(music_transformer, HIDDEN[name]))
    assert_exact(model, torch.compile(model, backend="streambp", options={"chunk_size": 16}))
    report = explain(model, ids_of(2, 43), streambp_options={"chunk_size": 16})
    assert "causal, proved" in str(report)


@pytest.mark.long
def test_entries_of_the_next_row_count_where_nothing_hides_them():
    model = model_of(relative(music_transformer))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_exact(model, torch.compile(model, backend="streambp", options={"chunk_size": 16}))
    assert any("shifts the rows or columns" in str(w.message) for w in seen)


# The operator


@pytest.mark.quick
@pytest.mark.parametrize("rows,columns", [(5, 5), (5, 9), (4, 10), (7, 8)])
def test_two_shifts_are_the_view(rows, columns):
    """The row's own entries, and those of the row behind, are all that the reshapes give; and so are their
    gradients."""
    x = torch.randn(2, 3, rows, columns, dtype=torch.float64, requires_grad=True)
    expected = F.pad(x, (1, 0)).view(2, 3, columns + 1, rows)[:, :, 1:].view(2, 3, rows, columns)
    own = skewed(x, 2, columns, rows - 1, -1, 0)
    made = own + skewed(x, 2, columns, rows - columns - 2, -1, 1)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    grad = torch.randn_like(made)
    found, wanted = (torch.autograd.grad(y, x, grad)[0] for y in (made, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("step,offset,rows", [(-1, 3, 0), (1, -2, 0), (-1, -1, 1), (1, 2, -1)])
def test_gradients_of_a_shift(step, offset, rows):
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: skewed(x, 1, 6, offset, step, rows), (x,))


def shared_positions(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """The same numbers count tokens for the mask, and relative positions."""
    at = torch.arange(q.shape[1])
    r = ((q.shape[1] - 1 - at)[:, None] * torch.linspace(0.01, 1, WIDTH, dtype=q.dtype)).sin() @ weight
    scores = q @ k.mT + music_transformer((q @ r.mT).unsqueeze(1)).squeeze(1)
    return torch.where(at <= at[:, None], scores, INF).softmax(-1) @ v


@pytest.mark.long
def test_relative_positions_are_no_keys_though_counted_with_them():
    model = model_of(shared_positions)
    assert_exact(model, torch.compile(model, backend="streambp", options={"chunk_size": 16}))


class Conformer(torch.nn.Module):
    """The encoder of Wav2Vec2-Conformer, relative positions and gated convolutions and all."""

    def __init__(self):
        super().__init__()
        models = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
        sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32)
        dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "conformer_conv_dropout")
        config = models.Wav2Vec2ConformerConfig(
            **sizes,
            **dict.fromkeys((*dropouts, "layerdrop"), 0.0),
            position_embeddings_type="relative",
            conv_depthwise_kernel_size=7,
            max_source_positions=64,
        )
        self.embed, self.head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
        self.encoder = models.Wav2Vec2ConformerEncoder(config)

    def forward(self, ids):
        hidden = self.encoder(self.embed(ids)).last_hidden_state
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


@pytest.mark.slow
def test_conformers_of_hugging_face_stream():
    model, ids = Conformer().double(), ids_of(2, 43)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    wanted, found = (gradients(model, lambda f=f: f(ids)) for f in (model, step))
    moving = {name for name, grad in wanted.items() if grad.norm() > 1e-12}  # biases of keys have none
    assert worst_error(*({n: g[n] for n in moving} for g in (found, wanted))) < EXACT

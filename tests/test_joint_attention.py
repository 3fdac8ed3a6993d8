"""Attention over image and text tokens together, each stream with weights of its own."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile import explain
from streambp_compile.passes.ir import hint

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, HEADS, TEXT, BATCH = 1e-10, 16, 2, 11, 2


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, of pairs of neighbours and of halves."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 7
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    x = x * angles.cos() + torch.stack([-second, first], -1).flatten(-2) * angles.sin()
    left, right = x.chunk(2, -1)
    return x * angles.sin() + torch.cat([-right, left], -1) * angles.cos()


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def behind(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


class Pair(nn.Module):
    """A layer of two streams (arXiv 2403.03206). ``part`` parts what attention gives them together."""

    def __init__(self, part, text_first: bool, turned: bool):
        super().__init__()
        self.part, self.text_first, self.turned = part, text_first, turned
        self.image, self.text = Stream(), Stream()

    def forward(self, x: Tensor, c: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        streams = ((self.text, c), (self.image, x)) if self.text_first else ((self.image, x), (self.text, c))
        parts = zip(*(s.qkv(F.layer_norm(t, (WIDTH,))).chunk(3, -1) for s, t in streams))
        q, k, v = (torch.cat([heads(t) for t in part], 2) for part in parts)
        if self.turned:
            q, k = rotated(q), rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        first, second = self.part(mixed, streams[0][1].shape[1], streams[1][1].shape[1])
        x_part, c_part = (second, first) if self.text_first else (first, second)
        x = self.image.behind(x, self.image.out(x_part))
        return x, self.text.behind(c, self.text.out(c_part))


class Pairs(nn.Module):
    def __init__(self, part, text_first: bool, turned: bool = False):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList([Pair(part, text_first, turned) for _ in range(2)])

    def forward(self, image: Tensor, text: Tensor, words: Tensor | None = None) -> Tensor:
        """``words``: which tokens of the text are no padding; the text comes first."""
        x, c, seen = self.inner(image), self.table(text), None
        if words is not None:
            seen = torch.cat([words, words.new_ones(image.shape[:2])], 1)[:, None, None]
        for layer in self.layers:
            x, c = layer(x, c, seen)
        return (self.head(x) - image).square().mean() + c.square().mean()


def by_slices(mixed: Tensor, first: int, second: int):
    return mixed[:, :first], mixed[:, first:]


def by_slices_from_behind(mixed: Tensor, first: int, second: int):
    return mixed[:, :-second], mixed[:, -second:]


def by_split(mixed: Tensor, first: int, second: int):
    return mixed.split([first, second], 1)


PARTINGS = (by_slices, by_slices_from_behind, by_split)


def batch(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, length, 4, dtype=dtype), torch.randint(0, 20, (BATCH, TEXT))


@pytest.mark.long
@pytest.mark.parametrize("text_first", (False, True))
@pytest.mark.parametrize("part", representatives(PARTINGS, {by_slices_from_behind}))
def test_both_streams_are_exact_at_two_lengths(part, text_first):
    model = Pairs(part, text_first, turned=part is by_slices).double()
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=16, strict=True))
    for length in (61, 45):
        given = batch(length)
        found, expected = (gradients(model, lambda f=f: f(*given)) for f in (step, model))
        assert worst_error(found, expected) < EXACT


@pytest.mark.long
def test_padding_of_the_text_is_masked():
    model = Pairs(by_slices, True).double()
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=16, strict=True))
    given = *batch(50), torch.arange(TEXT) < torch.tensor([[4], [9]])
    found, expected = (gradients(model, lambda f=f: f(*given)) for f in (step, model))
    assert worst_error(found, expected) < EXACT


@pytest.mark.long
def test_all_regions_stream_along_the_image():
    model, given = Pairs(by_slices, False), batch(2048, torch.float32)
    report = explain(model, *given)
    assert {hint(r.analysis.length) for r in report.regions} == {2048}, report
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch._dynamo.reset()
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=128))
    step(*given).backward()
    ours, eager = (peak(lambda f=f: f(*given).backward()) for f in (step, model))
    assert ours < 0.5 * eager

"""Stacks of strided convolutions in front of the tokens, as of speech encoders."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile.backend import Reporting
from streambp_compile.config import Config
from streambp_compile.dynamo.blocks.row_maps import RowMap
from streambp_compile.reporting.report import Report

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH, WORDS = 16, 24
CONVOLVED = torch.ops.streambp.convolved.default


def plain(model: nn.Module, i: int, h: Tensor) -> Tensor:
    return F.gelu(h)


class Encoder(nn.Module):
    """Convolutions with strides, one layer of attention, and a loss of each row.

    filters  size, stride, padding and dilation of each convolution
    between  what is applied behind each of them
    """

    def __init__(self, *filters, between=plain, channels: int = 1, groups: int = 1):
        super().__init__()
        sizes = [channels] + [WIDTH] * len(filters)
        self.filters, self.between = filters, between
        self.convolutions = nn.ModuleList(
            nn.Conv1d(given, WIDTH, size, stride, padding, dilation, groups=groups if i else 1)
            for i, (given, (size, stride, padding, dilation)) in enumerate(zip(sizes, filters))
        )
        self.norm = nn.GroupNorm(4, WIDTH)
        self.rows = nn.LayerNorm(WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def features(self, x: Tensor) -> Tensor:
        h = x[:, None] if x.dim() == 2 else x
        h = h * self.rows.weight[:1, None] + self.rows.bias[:1, None] if self.between is with_skip else h
        for i, convolution in enumerate(self.convolutions):
            h = self.between(self, i, convolution(h))
        return h.transpose(1, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layer(self.features(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def norm_of_first(model: Encoder, i: int, h: Tensor) -> Tensor:
    return F.gelu(model.norm(h) if i == 0 else h)


def norm_of_all(model: Encoder, i: int, h: Tensor) -> Tensor:
    return F.gelu(model.norm(h))


def norm_of_rows(model: Encoder, i: int, h: Tensor) -> Tensor:
    return F.gelu(model.rows(h.transpose(1, 2)).transpose(1, 2))


def padded(model: Encoder, i: int, h: Tensor) -> Tensor:
    return F.pad(h.tanh(), (3, 0))


def with_skip(model: Encoder, i: int, h: Tensor) -> Tensor:
    return h + F.gelu(h) * model.rows.weight[:, None]


WAVE = (10, 5, 0, 1), (3, 2, 0, 1), (2, 2, 0, 1)


def masked(model: Encoder, i: int, h: Tensor) -> Tensor:
    """The second sequence ends before the first one."""
    ends = torch.tensor([h.shape[-1], h.shape[-1] - 3])
    return F.gelu(h) * (torch.arange(h.shape[-1]) < ends[:, None])[:, None].to(h.dtype)


ENCODERS = {
    "wave": lambda: Encoder(*WAVE),
    "one filter": lambda: Encoder((7, 3, 0, 1)),
    "padding": lambda: Encoder((3, 1, 1, 1), (3, 2, 1, 1)),
    "more padding than a step": lambda: Encoder((9, 2, 7, 1), (5, 2, 4, 1)),
    "dilation": lambda: Encoder((3, 2, 2, 2), (3, 2, 0, 3)),
    "groups": lambda: Encoder((4, 2, 0, 1), (5, 3, 1, 1), groups=4),
    "norm of channels": lambda: Encoder(*WAVE, between=norm_of_first),
    "norms of channels": lambda: Encoder((10, 5, 2, 1), (3, 2, 1, 1), between=norm_of_all),
    "norm of rows": lambda: Encoder(*WAVE, between=norm_of_rows),
    "padded by itself": lambda: Encoder((8, 4, 0, 1), (4, 2, 0, 1), between=padded),
    "branches": lambda: Encoder((4, 2, 1, 1), (3, 1, 1, 1), (4, 2, 1, 1), between=with_skip),
    "masks": lambda: Encoder((8, 4, 2, 1), (3, 2, 1, 1), between=masked),
    "frames": lambda: Encoder((3, 1, 1, 1), (3, 2, 1, 1), channels=8),
}
LENGTHS = 211, 190, 257


def test_receptive_fields_of_wav2vec2():
    """A token reads 400 samples, every 320 (arXiv 2006.11477, section 4.2). What is computed for two tokens
    adds between a sixth and a fifth to the work of the filters, 512 channels wide. Of eight tokens together,
    what is computed twice adds less than a fortieth."""
    rows, made = read_by_wav2vec2(1)
    assert rows == RowMap(320, 0, 400)
    assert 1 + 1 / 6 < made < 1 + 1 / 5
    rows, made = read_by_wav2vec2(8)
    assert rows == RowMap(8 * 320, 0, 7 * 320 + 400)
    assert 1 < made < 1 + 1 / 40


def read_by_wav2vec2(together: int) -> tuple[RowMap, float]:
    """Return the samples that some tokens read, and the work of the filters, 1 for what is computed once."""
    rows, work = RowMap(together, 0, together), []
    for size, stride in reversed(list(zip((10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)))):
        channels = 1 if size == 10 else 512
        work.append((size * channels * rows.count, size * channels * rows.scale))
        rows = rows.of(RowMap(stride, 0, size))
    made, whole = (sum(parts) for parts in zip(*work))
    return rows, made / whole


def test_maps_compose():
    """The rows that a map makes of those of another are the rows that their product makes, at any length."""
    inner, outer = RowMap(5, -2, 10, 3), RowMap(2, -1, 3, 2)
    both = outer.of(inner)
    for rows in range(20, 60):
        made = [(r + number[0]) // number[1] + 1 for r, number in ((rows, inner.number), (rows, both.number))]
        assert (made[0] + outer.number[0]) // outer.number[1] + 1 == made[1]
    first, *_, last = (inner.scale * (outer.start + k) + inner.start + j for k in range(3) for j in range(10))
    assert (both.start, both.start + both.count - 1) == (first, last)


QUICK = {"norm of channels"}


@pytest.mark.parametrize("name", representatives(ENCODERS, QUICK))
def test_stacks_of_strided_filters_stream_at_any_length(name):
    torch.manual_seed(0)
    model, report = ENCODERS[name]().double(), Report()
    compiled = torch.compile(model, backend=Reporting(Config(chunk_size=8), report))
    channels = model.convolutions[0].in_channels
    for length in LENGTHS:
        shape = (2, length) if channels == 1 else (2, channels, length)
        wave = torch.randn(shape, dtype=torch.float64)
        given = wave, torch.randint(WORDS, model.features(wave).shape[:2])
        truth = gradients(model, lambda: model(*given))
        assert worst_error(gradients(model, lambda: compiled(*given)), truth) < EXACT, length
        assert is_front_streamed(report), length


def is_front_streamed(report: Report) -> bool:
    """Is a convolution of receptive fields in a streamed region of the graph that was compiled last?"""
    streamed = [r.streamed.joint.graph for r in report.regions if r.streamed]
    return any(g.find_nodes(op="call_function", target=CONVOLVED) for g in streamed)


class Planes(Encoder):
    """Frames of a spectrogram, filtered along time and frequency."""

    def __init__(self):
        super().__init__((3, 2, 1, 1), channels=8)
        self.planes = nn.Conv2d(1, WIDTH, (5, 3), (2, 2), (2, 1))
        self.narrow = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1, groups=WIDTH)
        self.joined = nn.Linear(2 * WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        h = self.narrow(self.planes(x.transpose(1, 2)[:, None]).relu())
        return self.joined(h.transpose(1, 2).flatten(2))


def scaled_by_all(model: Encoder, i: int, h: Tensor) -> Tensor:
    return F.gelu(h) * h.mean(-1, keepdim=True).sigmoid()


def read_twice(model: Encoder, i: int, h: Tensor) -> Tensor:
    model.read = h.square().mean()
    return F.gelu(h)


class Read(Encoder):
    """Its loss reads a value inside the stack."""

    def __init__(self):
        super().__init__(*WAVE, between=read_twice)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(x, labels)
        return loss + self.read


def frozen() -> Encoder:
    model = Encoder(*WAVE, between=norm_of_rows)
    model.convolutions[0].requires_grad_(False)
    return model


OTHERS = {
    "planes": Planes,
    "frozen filter": frozen,
    "a scale from all rows": lambda: Encoder(*WAVE, between=scaled_by_all),
    "a value read elsewhere": Read,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")
def test_other_stacks_are_exact(name):
    """Whether they can be written as functions of receptive fields or not, at other lengths and batches."""
    torch.manual_seed(0)
    model = OTHERS[name]().double()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    for batch, length in ((2, 211), (2, 190), (3, 257), (1, 230)):
        shape = (batch, 8, length) if name == "planes" else (batch, length)
        wave = torch.randn(shape, dtype=torch.float64)
        given = wave, torch.randint(WORDS, model.features(wave).shape[:2])
        truth = gradients(model, lambda: model(*given))
        assert worst_error(gradients(model, lambda: compiled(*given)), truth) < EXACT, (batch, length)

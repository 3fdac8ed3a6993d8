"""Stacks of strided convolutions in front of the tokens, as of speech encoders."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile.backend import Reporting
from streambp_compile.config import Config
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
    "frames": lambda: Encoder((3, 1, 1, 1), (3, 2, 1, 1), channels=8),
}
LENGTHS = 211, 190, 257


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

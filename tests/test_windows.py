"""Windows of consecutive tokens, as pooling, strided filters and ``unfold`` make them."""

import pytest
import torch
import torch.nn.functional as F
from models import Layer, Mixing, MixingLayer, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn
from torch.fx import GraphModule

from streambp_compile.backend import Reporting
from streambp_compile.config import Config
from streambp_compile.dynamo.blocks.strided_reads import write_strided_reads
from streambp_compile.dynamo.blocks.windows import (
    filter_of_windows,
    maximum_of_windows,
    mean_of_windows,
    windows,
)
from streambp_compile.dynamo.reading.aten import to_aten
from streambp_compile.dynamo.reading.values import fake_of
from streambp_compile.passes.ir import CannotStream, copied
from streambp_compile.reporting.report import Report

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH, SIZE, STEP = 16, 8, 4


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def read_keys(made, step: int = SIZE):
    """Attention of all rows to what is made of windows of keys, and of values, that end before them."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        keys, values = (made(x, scale) for x in (k, v))
        ends = torch.arange(keys.shape[1]) * step + SIZE
        hidden = ends > torch.arange(q.shape[1])[:, None]
        scores = (q @ turned(keys) * scale[0]).masked_fill(hidden, -1e9)
        return scores.softmax(-1) @ values + v

    return mix


def over_neighbours(pad):
    """Attention of each row to itself and the three before it."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        k, v = (pad(x).unfold(1, 4, 1) for x in (k, v))
        scores = torch.einsum("btd,btdw->btw", q, k) * scale[0]
        return torch.einsum("btw,btdw->btd", scores.softmax(-1), v)

    return mix


def span_filter(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """A filter of its own for each row (ConvBERT, arXiv 2008.02496), by torch's unfold of planes."""
    planes = F.unfold(turned(v)[..., None], [5, 1], padding=[2, 0])
    taps = turned(planes).unflatten(-1, (WIDTH, 5))
    return torch.einsum("btwk,btk->btw", taps, (q * k)[..., :5].softmax(-1)) * scale[0]


def filters(channels: int, scale: Tensor) -> Tensor:
    count = WIDTH * channels * SIZE
    return torch.linspace(-1, 1, count, dtype=scale.dtype).view(WIDTH, channels, SIZE).sin() * scale[0] / 4


MIXERS = {
    "means": read_keys(lambda x, scale: turned(F.avg_pool1d(turned(x), SIZE))),
    "maxima": read_keys(lambda x, scale: turned(F.max_pool1d(turned(x).relu(), SIZE))),
    "filters": read_keys(lambda x, scale: turned(F.conv1d(turned(x), filters(WIDTH, scale), stride=SIZE))),
    "depthwise": read_keys(
        lambda x, scale: turned(
            F.conv1d(turned(x), filters(1, scale), scale[:1].expand(WIDTH), stride=SIZE, groups=WIDTH)
        )
    ),
    "unfold": read_keys(lambda x, scale: x.unfold(1, SIZE, SIZE).mean(-1)),
    "overlapping": read_keys(lambda x, scale: x.unfold(1, SIZE, STEP).amax(-1), STEP),
    "overlapping means": read_keys(lambda x, scale: turned(F.avg_pool1d(turned(x), SIZE, STEP)), STEP),
    "neighbours": over_neighbours(lambda x: F.pad(x, (0, 0, 3, 0))),
    "neighbours in all of the padded rows": over_neighbours(
        lambda x: F.pad(x, (0, 0, 3, 0))[:, -(x.shape[1] + 3) :]
    ),
    "neighbours behind joined zeros": over_neighbours(
        lambda x: torch.cat((torch.zeros_like(x[:, :3]), x), 1)
    ),
    "unfold of planes": span_filter,
    "smoothed": lambda q, k, v, scale: q * turned(F.avg_pool1d(turned(v), 3, 1, 1)) * scale[0] + k,
}


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(43, 40), (40, 48)], ids=["other rows", "whole windows"])
@pytest.mark.parametrize(
    "name", representatives(MIXERS, {"filters", "unfold of planes", "neighbours in all of the padded rows"})
)
def test_windows_stream(name, lengths):
    """All of it, for lengths that are whole windows and others: a warning is an error here."""
    model = Mixing(WIDTH, MixingLayer(MIXERS[name], WIDTH, weight=(2,))).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in lengths:
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def around_blocks(folded: bool):
    """Attention of the rows of a block to those of its neighbours as well (arXiv 2004.05150)."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        heads = [(x * scale[0]).unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v)]
        q, k, v = (x.flatten(0, 1) if folded else x for x in heads)
        own = q.unflatten(-2, (-1, SIZE))
        keys, values = (F.pad(x, (0, 0, SIZE, SIZE)).unfold(-2, 3 * SIZE, SIZE) for x in (k, v))
        made = ((own @ keys).softmax(-1) @ values.mT).flatten(-3, -2)
        return made.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) if folded else turned(made).flatten(2)

    return mix


@pytest.mark.long
@pytest.mark.parametrize("folded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_windows_of_padded_rows_stream(folded):
    model = Mixing(WIDTH, MixingLayer(around_blocks(folded), WIDTH, weight=(2,))).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in (40, 64):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def back_to_rows(made: Tensor, back) -> Tensor:
    """What is made of windows attends, and comes back to the rows of the windows behind."""
    mixed = turned(F.scaled_dot_product_attention(made, made, made, is_causal=True))
    return turned(back(F.pad(mixed, (1, -1))))


@pytest.mark.long
@pytest.mark.parametrize(
    "back",
    [
        lambda x: F.interpolate(x, scale_factor=SIZE),
        pytest.param(
            lambda x: F.interpolate(x, scale_factor=SIZE, mode="nearest-exact"), marks=pytest.mark.slow
        ),
    ],
)
def test_nearest_neighbours_are_the_way_back(back):
    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return k + q * scale[0] * back_to_rows(turned(F.avg_pool1d(turned(v), SIZE)), back)

    model = Mixing(WIDTH, MixingLayer(mix, WIDTH, weight=(2,))).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in (40, 96):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.parametrize("dim, size, step", [(1, 8, 8), (1, 8, 4), (2, 9, 3), (1, 3, 1), (2, 4, 2)])
def test_windows_are_those_of_unfold(dim, size, step):
    x = torch.randn(2, 27, 13)
    torch.testing.assert_close(windows(x, dim, size, step), x.unfold(dim, size, step), rtol=0, atol=0)


@pytest.mark.parametrize("before, behind", [(1, 1), (2, 0), (0, 3)])
def test_blocks_of_zeros_around_windows(before, behind):
    x = torch.randn(2, 24, 3)
    rows = F.pad(x, (0, 0, 4 * before, 4 * behind))
    found = windows(x, 1, 8, 4, before, behind)
    torch.testing.assert_close(found, rows.unfold(1, 8, 4), rtol=0, atol=0)


def test_what_is_made_of_windows_is_what_torch_makes():
    x, dense, single = torch.randn(2, 6, 29), torch.randn(4, 6, 8), torch.randn(6, 1, 8)
    rows, bias = windows(x, 2, 8, 4), torch.randn(4)
    torch.testing.assert_close(mean_of_windows(rows), F.avg_pool1d(x, 8, 4))
    torch.testing.assert_close(maximum_of_windows(rows), F.max_pool1d(x, 8, 4))
    torch.testing.assert_close(
        filter_of_windows(rows, dense, bias, x.dtype), F.conv1d(x, dense, bias, stride=4)
    )
    torch.testing.assert_close(
        filter_of_windows(rows, single, None, x.dtype),
        F.conv1d(x, single, stride=4, groups=6),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool1d(x, 4, ceil_mode=True),
        lambda x: F.avg_pool1d(x, 4, padding=2),
        lambda x: F.avg_pool1d(x, 3, 1, 1, count_include_pad=False)[..., ::4],
        lambda x: F.max_pool1d(x, 4, padding=1),
        lambda x: F.max_pool1d(x, 4, dilation=2),
        lambda x: F.max_pool1d(x, 5, 3),
    ],
)
def test_other_pooling_is_left_alone_and_exact(pool):
    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return q * pool(turned(v)).mean(-1)[:, None] * scale[0] + k

    model, ids = Mixing(WIDTH, MixingLayer(mix, WIDTH, weight=(2,))).double(), ids_of(2, 40)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def written_windows(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    v = v * 1
    windows = v.unfold(1, SIZE, SIZE)
    windows.mul_(scale[0])
    return v + q * windows.mean(-1)[:, :1] + k


def written_rows(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    v = v * 1
    windows = v.unfold(1, 4, 1)
    v.mul_(scale[0])
    return v + q * windows.mean(-1)[:, :1] + k


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("mix", [written_windows, written_rows])
def test_windows_share_memory_with_rows_that_are_written(mix):
    model, ids = Mixing(WIDTH, MixingLayer(mix, WIDTH, weight=(2,))).double(), ids_of(2, 40)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def overlapping(x: Tensor) -> Tensor:
    """Blocks of eight rows, four rows behind one another, of values that lie in memory as ``[T, B, d]``."""
    blocks, strides = x.unflatten(1, (-1, 8)), x.unflatten(1, (-1, 8)).stride()
    sizes = (x.shape[0], 2 * blocks.shape[1] - 1, 8, x.shape[2])
    return blocks.as_strided(sizes, (strides[0], strides[1] // 2, *strides[2:]))


STRIDED = {
    "overlapping blocks": (overlapping, 0),
    "every third row": (lambda x: x.as_strided((8, 3, 5), (3 * 15, 5, 1), 15), 0),
    "one row": (lambda x: x.as_strided((3, 5), (5, 1), 2 * 15), 0),
    "one column, repeated": (lambda x: x.as_strided((24, 2, 1, 3), (15, 0, 7, 5), 4), 0),
    "all dimensions as one": (lambda x: x.as_strided((72, 5), (5, 1)), 0),
    "a diagonal": (lambda x: x.as_strided((22, 4), (16, 1)), 0),
    "windows in steps": (lambda x: x.as_strided((5, 4, 15), (30, 30, 1)), 1),
    "the start of a row": (lambda x: x.as_strided((23, 16), (15, 1)), 0),
}


def other_layout(module: GraphModule) -> GraphModule:
    """Lay the first transposed value out in another way, as rewrites do."""
    node = next(n for n in module.graph.nodes if "transpose" in str(n.target))
    with module.graph.inserting_after(node):
        new = module.graph.call_method("contiguous", (node,))
    node.replace_all_uses_with(new, lambda user: user is not new)
    module.recompile()
    return module


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_reads_do_not_depend_on_layouts(name, dynamic):
    """What is left of ``as_strided`` reads a value of one dimension, which has one layout."""
    made, left = STRIDED[name]
    found = []

    def backend(module, inputs):
        found.append(write_strided_reads(to_aten(module)))
        return other_layout(found[0]).forward

    def read(rows: Tensor) -> Tensor:
        return made(rows.exp().transpose(0, 1))

    torch._dynamo.reset()
    rows = torch.randn(24, 3, 5)
    given = torch.compile(read, backend=backend, dynamic=dynamic, fullgraph=True)(rows)
    torch.testing.assert_close(given, read(rows), rtol=0, atol=0)
    reads = [n for n in found[0].graph.nodes if n.target is torch.ops.aten.as_strided.default]
    assert [fake_of(n.args[0]).dim() for n in reads] == [1] * left


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("lengths", [(40, 64), (48, 24, 40)])
def test_overlapping_blocks_of_rows_in_another_layout(lengths):
    """The layout of Longformer's blocks (arXiv 2004.05150), which a rewrite to whole blocks changes."""

    def mix(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        keys, values = (
            overlapping((x * scale[0]).transpose(0, 1).contiguous().transpose(0, 1)) for x in (k, v)
        )
        read = (keys.softmax(-1) * values).mean(2)
        return q + read.mean(1, keepdim=True)

    model = Mixing(WIDTH, MixingLayer(mix, WIDTH, weight=(2,))).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in lengths:
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_strided_reads_of_values_reshaped_without_gradients():
    def read(rows: Tensor) -> Tensor:
        rows = rows.tanh()
        with torch.no_grad():
            blocks = rows.view(3, 8, 5)
        return (blocks.as_strided((5, 8, 5), (20, 5, 1)).exp().sum() * rows).sum()

    torch._dynamo.reset()
    rows = torch.randn(24, 5, requires_grad=True)
    step = torch.compile(read, backend="streambp")
    (found,), (truth,) = (torch.autograd.grad(f(rows), rows) for f in (step, read))
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize(
    "read",
    [lambda x: x[:, 1:].as_strided((3, 5), (5, 1)), lambda x: x.as_strided_scatter(x[0], (3, 5), (5, 1))],
)
def test_memory_of_a_part_of_a_value(read):
    def backend(module, inputs):
        with pytest.raises(CannotStream, match="as_strided"):
            write_strided_reads(to_aten(copied(module)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(read, backend=backend, fullgraph=True)(torch.randn(24, 3, 5)[:3].clone())


@pytest.mark.parametrize("channels, groups", [(32, 1), (1, 32)])
def test_filters_under_autocast(channels, groups):
    """In the dtype of autocast, no worse than eager; errors are those against float32."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 40)
    weight, bias = torch.randn(32, channels, 8) / 8, torch.randn(32)
    truth = F.conv1d(x, weight, bias, stride=8, groups=groups)
    with torch.autocast("cpu", torch.bfloat16):
        eager = F.conv1d(x, weight, bias, stride=8, groups=groups)
        made = filter_of_windows(windows(x, 2, 8, 8), weight, bias, eager.dtype)
    assert made.dtype is torch.bfloat16
    error, usual = ((y - truth).abs().max() for y in (made, eager))
    assert error < 1.5 * usual


class Strided(nn.Module):
    """Features of speech, half as many rows of hidden states, and as many labels."""

    def __init__(self):
        super().__init__()
        self.filter, self.layer = nn.Conv1d(5, WIDTH, 3, stride=2, padding=1), Layer(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = self.layer(F.gelu(self.filter(x)).transpose(1, 2))
        return F.cross_entropy(self.head(rows).flatten(0, 1), labels.flatten())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_labels_of_strided_features_at_other_lengths():
    """The tokens have two names then: half the features, and the labels."""
    model, report = Strided().double(), Report()
    step = torch.compile(model, backend=Reporting(Config(chunk_size=16), report))
    for length in (37, 51, 40):
        given = torch.randn(2, 5, 2 * length).double(), torch.randint(0, 64, (2, length))
        truth = gradients(model, lambda given=given: model(*given))
        assert worst_error(gradients(model, lambda given=given: step(*given)), truth) < EXACT
    head = report.regions[-1].streamed
    assert not any(s.program.too_wide for s in (head.forward, head.backward) if s is not None)

"""Rows that are picked by an index made in the graph, worked on, and put back: what is before the pick
streams along all tokens, what follows along those that were picked."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, Layer, gradients, ids_of, worst_error
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.passes.moved_rows import parts_between
from streambp_compile.reporting.report import Report

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH, LENGTH, PICKED = 32, 29, 12


class Model(nn.Module):
    """An embedding and a layer, what is done with its rows, and a head."""

    def __init__(self, after, vocabulary: int = VOCABULARY):
        super().__init__()
        self.after = after
        self.embed, self.layer, self.inner = nn.Embedding(vocabulary, WIDTH), layer(), layer()
        self.router, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, vocabulary)
        self.prompt = nn.Parameter(torch.randn(1, 7, WIDTH))

    def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
        return self.after(self, self.layer(self.embed(ids)), ids, *more)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How much, and which tokens: the router's, in order."""
        weights, places = self.router(x).squeeze(-1).topk(PICKED, dim=1)
        places, order = places.sort(1)
        return weights.gather(1, order).sigmoid()[..., None], places


def layer() -> Layer:
    return Layer(WIDTH, 4)


def wide(places: Tensor) -> Tensor:
    return places.unsqueeze(-1).expand(-1, -1, WIDTH)


def batch_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0])[:, None]


# Losses of some tokens


def by_flat_index(m, x, ids, index):
    return m.loss(F.gelu(m.embed.weight[0] * x.flatten(0, 1)[index]), ids.flatten()[index])


def by_gather(m, x, ids, places):
    return m.loss(x.gather(1, places[..., None].repeat(1, 1, WIDTH)), ids.gather(1, places))


def by_pairs(m, x, ids, rows, places):
    return m.loss(x[rows, places], ids[rows, places])


def of_masked_tokens(m, x, ids):
    index = torch.nonzero_static((ids % 3 == 0).flatten(), size=20, fill_value=0)[:, 0]
    return m.loss(x.flatten(0, 1)[index], ids.flatten()[index])


def every_second_logit(m, x, ids):
    return F.cross_entropy(m.head(x)[:, ::2].flatten(0, 1), ids[:, ::2].flatten())


def of_the_best(m, x, ids):
    scores = m.router(x).squeeze(-1)
    places = scores.argsort(dim=1, descending=True)[:, :PICKED]
    best = torch.take_along_dim(x, places[..., None], 1) * scores.gather(1, places)[..., None]
    return m.loss(best, ids.gather(1, places))


# Tokens that go through a block and come back


def mixture_of_depths(m, x, ids):
    weights, places = m.chosen(x)
    some = m.inner(x.gather(1, wide(places))) * weights
    return m.loss(m.layer(x.scatter_add(1, wide(places), some)), ids)


def put_in_place(m, x, ids):
    weights, places = m.chosen(x)
    y = x.clone()
    y[batch_of(ids), places] = m.inner(x[batch_of(ids), places]) * weights
    return m.loss(m.layer(y), ids)


def added_by_index(m, x, ids, index):
    return m.loss(x.index_add(1, index, m.inner(x[:, index])), ids)


def in_every_layer(m, x, ids):
    for block in (m.layer, m.inner):
        weights, places = m.chosen(x)
        rows = batch_of(ids).expand_as(places)
        x = x.index_put((rows, places), block(x[rows, places]) * weights, accumulate=True)
    return m.loss(x, ids)


def without_labels(m, x, ids):
    """Nothing but the rows written into tells which dimension of the result carries tokens."""
    weights, places = m.chosen(x)
    x = x.scatter(1, wide(places), m.inner(x.gather(1, wide(places))) * weights)
    return m.head(m.layer(x)).logsumexp(-1).mean()


# Sequences of other lengths, or in another order


def shuffled(m, x, ids, order):
    return m.loss(m.layer(m.inner(x[:, order])[:, order.argsort()]), ids)


def hourglass(m, x, ids):
    y = m.inner(x[:, ::2])
    inner, outer = torch.zeros_like(y), torch.zeros_like(x)
    inner[:, 1::2] = m.inner(y[:, 1::2].contiguous())
    outer[:, ::2] = y + inner
    return m.loss(m.layer(x + outer), ids)


def prompted(m, x, ids):
    x = torch.cat([m.prompt.expand(len(ids), -1, -1), m.layer(x)], 1)
    return m.loss(m.inner(x)[:, 7:], ids)


def between_images(m, x, ids, image):
    x = torch.cat([F.gelu(image * m.prompt[0, 0]), x, m.prompt.expand(len(ids), -1, -1)], 1)
    return m.loss(m.inner(m.layer(x))[:, 9:], torch.cat([ids, ids[:, :7]], 1))


CASES = {
    by_flat_index: (lambda: (torch.arange(0, 2 * LENGTH, 3),), {LENGTH, 20}),
    by_gather: (
        lambda: (torch.stack([torch.randperm(LENGTH)[:PICKED] for _ in range(2)]),),
        {LENGTH, PICKED},
    ),
    by_pairs: (lambda: (torch.randint(2, (15,)), torch.randint(LENGTH, (15,))), {LENGTH, 15}),
    of_masked_tokens: (tuple, {LENGTH, 20}),
    every_second_logit: (tuple, {LENGTH, 15}),
    of_the_best: (tuple, {LENGTH, PICKED}),
    mixture_of_depths: (tuple, {LENGTH, PICKED}),
    added_by_index: (lambda: (torch.randperm(LENGTH)[:PICKED],), {LENGTH, PICKED}),
    in_every_layer: (tuple, {LENGTH, PICKED}),
    without_labels: (tuple, {LENGTH, PICKED}),
    shuffled: (lambda: (torch.randperm(LENGTH),), {LENGTH}),
    hourglass: (tuple, {LENGTH, 15}),
    prompted: (tuple, {LENGTH, LENGTH + 7}),
    between_images: (lambda: (torch.randn(2, 9, WIDTH).double(),), {LENGTH, LENGTH + 16}),
}
ALSO_UNCHUNKED = {  # an inverted permutation; a copy of zeros; an image, and its gating
    shuffled: ("This region creates its tokens",),
    hourglass: ("This region has no token dimension",),
    between_images: ("This region creates its tokens", "This region has no token dimension"),
}
QUICKER = (by_gather, of_masked_tokens, every_second_logit, prompted)


def compiled(model: nn.Module, chunk: int = 7) -> tuple:
    report = Report()

    def backend(graph, inputs):
        return Chain(graph, inputs, Config(chunk_size=chunk, strict=True), report).compiled()

    return torch.compile(model, backend=backend), report


@pytest.mark.parametrize(
    "after",
    [f if f in QUICKER else pytest.param(f, marks=pytest.mark.slow) for f in CASES],
    ids=lambda f: f.__name__,
)
def test_both_sides_stream(after):
    """All but what moves the rows does: anything else is an error under ``strict``."""
    given, lengths = CASES[after]
    model, batch = Model(after).double(), (ids_of(2, LENGTH), *given())
    step, report = compiled(model)
    assert (
        worst_error(gradients(model, lambda: step(*batch)), gradients(model, lambda: model(*batch))) < EXACT
    )
    assert {r.analysis.length for r in report.regions if r.streamed} == lengths
    unchunked = [r for r in report.regions if not r.streamed]
    reasons = ("This region moves rows", *ALSO_UNCHUNKED.get(after, ()))
    assert unchunked and all(r.refusal.reason.startswith(reasons) for r in unchunked)
    picked = [r for r in report.regions if r.streamed and r.analysis.length == min(lengths)]
    assert all(r.forward.program.sweeps for r in picked)


def test_rows_added_where_an_index_of_each_token_says():
    """A chunk of the sums reads all rows, though it has some of them itself."""

    def grouped(m, x, ids):
        y = F.gelu(m.embed(ids))
        return m.loss(y + torch.zeros_like(y).index_add(1, ids[0] % y.shape[1], y), ids)

    model, ids = Model(grouped).double(), ids_of(2, LENGTH)
    step, _ = compiled(model)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def bucketed(m, x, ids):
    """Attention in blocks of tokens of like content, and the block before (Reformer, arXiv 2001.04451)."""
    for turn in (x, x.flip(-1)):
        buckets = torch.cat((turn[..., :4], -turn[..., :4]), -1).detach().argmax(-1)
        order = (buckets * x.shape[1] + torch.arange(x.shape[1])).argsort(-1)
        sorted_ = m.inner.norm1(x).gather(1, wide(order)).unflatten(1, (-1, 8))
        keys = torch.cat((sorted_.roll(1, 1), sorted_), 2)
        y = ((sorted_ @ keys.mT).softmax(-1) @ keys).flatten(1, 2)
        x = x + m.inner.down(F.gelu(m.inner.up(y.gather(1, wide(order.argsort(-1))))))
    return m.loss(x, ids)


@pytest.mark.long
def test_blocks_of_sorted_tokens_stream():
    """Nothing else mixes tokens: rows picked by an index part the layers, and these from the head."""
    model, (step, report) = (made := Model(bucketed).double()), compiled(made)
    for length in (40, 56):
        ids = ids_of(2, length)
        found, truth = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(found, truth) < EXACT
    assert len(report.regions) > 2 and all(r.streamed for r in report.regions)


@pytest.mark.slow
def test_rows_written_into_a_copy_are_exact():
    model, ids = Model(put_in_place).double(), ids_of(2, LENGTH)
    step, _ = compiled(model)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("after", [every_second_logit, mixture_of_depths, prompted], ids=lambda f: f.__name__)
def test_lengths_that_change(after):
    model = Model(after).double()
    step, _ = compiled(model)
    for length in (LENGTH, 40, 34):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT
    with torch.no_grad():
        torch.testing.assert_close(step(ids), model(ids), rtol=1e-12, atol=0)


def test_no_logits_of_all_picked_rows_exist():
    """A third of the tokens, with a wide vocabulary."""
    words, index = 2048, torch.arange(0, 512, 3)
    model, ids = Model(by_flat_index, words), torch.randint(words, (2, 256))
    step, _ = compiled(model, chunk=16)

    def run() -> None:
        step(ids, index).backward()

    run()
    logits = len(index) * words * 4
    assert peak(run) < logits < peak(lambda: model(ids, index).backward()) / 2


@pytest.mark.quick
def test_what_moves_rows_is_a_part_of_its_own():
    """Views and indices right before it go along, and so does what no cut can part from it."""
    assert parts_between([4], 8, (), ()) == [(0, 3, False), (4, 4, True), (5, 7, False)]
    assert parts_between([4], 8, (), (2, 3)) == [(0, 1, False), (2, 4, True), (5, 7, False)]
    assert parts_between([4], 8, (3, 4), ()) == [(0, 2, False), (3, 5, True), (6, 7, False)]
    assert parts_between([0, 1], 2, (), ()) == [(0, 0, True), (1, 1, True)]
    assert parts_between([2], 3, (2,), ()) == [(0, 2, False)]

"""Losses that are written piece by piece, to save memory: what all pieces go through is done once, and
streams."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, Layer, counted, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import peak
from streambp_compile.dynamo.loops import unrolled_losses

EXACT = 1e-10
WIDTH, LENGTH = 32, 61


class Model(nn.Module):
    """A layer, and a loss of its hidden states and the labels."""

    def __init__(self, loss, vocabulary: int = VOCABULARY):
        super().__init__()
        self.loss = loss
        self.embed, self.layer, self.head = (
            nn.Embedding(vocabulary, WIDTH),
            Layer(WIDTH, 4),
            nn.Linear(WIDTH, vocabulary, bias=False),
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head, self.layer(self.embed(ids)), labels)


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.roll(-1, 1)
    labels[:, :5] = -100
    return labels


def entropy(head, h, y, **kwargs):
    return F.cross_entropy(head(h).flatten(0, -2), y.flatten(), **kwargs)


def chunked(head, h, y):
    total = 0.0
    for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
        total = total + entropy(head, a, b, reduction="sum")
    return total / (y != -100).sum()


def under_checkpointing(head, h, y):
    pieces = zip(h.chunk(4, 1), y.chunk(4, 1))
    return (
        sum(
            checkpoint(lambda a, b: entropy(head, a, b, reduction="sum"), a, b, use_reentrant=False)
            for a, b in pieces
        )
        / y.numel()
    )


def sliced(head, h, y):
    total = h.new_zeros(())
    for start in range(0, LENGTH, 16):
        total += F.cross_entropy(
            head(h[:, start : start + 16]).view(-1, VOCABULARY),
            y[:, start : start + 16].reshape(-1),
            reduction="sum",
        )
    return total / LENGTH


def means(head, h, y):
    """Of each piece, smoothed, some pieces of more labels than others."""
    losses = [
        entropy(head, a, b, label_smoothing=0.1)
        for a, b in zip(torch.split(h, 20, 1), torch.split(y, 20, dim=1))
    ]
    return torch.stack(losses).mean()


def flat(head, h, y):
    """Pieces of the rows of all texts together."""
    pieces = zip(h.flatten(0, 1).chunk(5), y.flatten().chunk(5))
    return sum(entropy(head, a, b, reduction="sum") for a, b in pieces) / y.numel()


def joined(head, h, y):
    """Losses of all rows, text by text in each piece, added up together."""
    pieces = zip(h.split(16, 1), y.split(16, 1))
    return torch.cat([entropy(head, a, b, reduction="none") for a, b in pieces]).sum() / y.numel()


def log_probabilities(head, h, y):
    def piece(a, b):
        return head(a).log_softmax(-1).gather(-1, b.clamp(0)[..., None]).squeeze(-1)

    made = torch.cat([piece(a, b) for a, b in zip(h.chunk(3, 1), y.chunk(3, 1))], 1)
    return -F.logsigmoid(made.sum(1)).mean()


def distilled(head, h, y):
    teacher = (h.detach() * 1.5).tanh()
    return (
        sum(
            F.kl_div(head(a).log_softmax(-1), head(b).detach().softmax(-1), reduction="sum")
            for a, b in zip(h.split(16, 1), teacher.split(16, 1))
        )
        / y.numel()
    )


def squared(head, h, y):
    """A loss of numbers, its mean taken of each piece, and more done to that than adding."""
    losses = [
        F.mse_loss(head(a).float().logsumexp(-1).to(a.dtype), b.to(a.dtype))
        for a, b in zip(h.chunk(2, 1), y.chunk(2, 1))
    ]
    return losses[0].sqrt() + losses[1].log1p() + head(h).mean()


def two_heads(head, h, y):
    """Chosen and rejected, halves of a batch."""
    chosen, rejected = (
        head(a).log_softmax(-1).gather(-1, b.clamp(0)[..., None]).squeeze(-1).sum(1)
        for a, b in zip(h.chunk(2, 0), y.chunk(2, 0))
    )
    return -F.logsigmoid(chosen - rejected).mean()


class ChosenLogProbabilities(torch.autograd.Function):
    """Keeps the logits, and takes their softmax again in the backward, in pieces (as in NeMo-RL)."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        pieces = zip(logits.split(16, 1), targets.split(16, 1))
        return torch.cat([a.log_softmax(-1).gather(-1, b[..., None])[..., 0] for a, b in pieces], 1)

    @staticmethod
    def backward(ctx, gradient):
        pieces = zip(*(value.split(16, 1) for value in (*ctx.saved_tensors, gradient)))
        given = [(F.one_hot(b, a.shape[-1]) - a.softmax(-1)) * g[..., None] for a, b, g in pieces]
        return torch.cat(given, 1), None


def own_backward(head, h, y):
    return -ChosenLogProbabilities.apply(head(h), y.clamp(0)).mean()


def logits_in_pieces(head, h, y):
    """The loss is in pieces, the head is not."""
    logits = head(h)
    pieces = zip(logits.split(16, 1), y.split(16, 1))
    return sum(F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in pieces) / y.numel()


def logits_by_slices(head, h, y):
    """The last slice ends behind the last row."""
    logits, targets = head(h)[:, :-1], y[:, 1:].clamp(0)
    starts = range(0, logits.shape[1], 16)
    logs = [logits[:, i : i + 16].log_softmax(-1).gather(-1, targets[:, i : i + 16, None]) for i in starts]
    return -F.logsigmoid(torch.cat(logs, 1).sum((1, 2))).mean()


ROLLED = (chunked, under_checkpointing, sliced, means, flat, joined, log_probabilities, distilled, squared)
ROLLED += (two_heads, own_backward, logits_in_pieces, logits_by_slices)


def step(model: nn.Module):
    return torch.compile(model, backend="streambp", options={"chunk_size": 7})


def what_is_merged(monkeypatch) -> list[dict]:
    merged: list[dict] = []
    monkeypatch.setattr(
        unrolled_losses,
        "row_by_row",
        lambda pieces, of=unrolled_losses.row_by_row: merged.append(of(pieces)) or merged[-1],
    )
    return merged


@pytest.mark.long
@pytest.mark.parametrize(
    "loss",
    representatives(
        ROLLED,
        {chunked, under_checkpointing, means, joined, log_probabilities, two_heads, own_backward},
    ),
)
def test_pieces_stream_as_one(loss, interpreted, monkeypatch):
    """All of it: a region that is compiled whole warns, and a warning is an error here."""
    merged = what_is_merged(monkeypatch)
    model, ids = Model(loss).double(), ids_of(2, LENGTH)
    labels = labels_of(ids)
    streamed = step(model)
    assert (
        worst_error(
            gradients(model, lambda: streamed(ids, labels)), gradients(model, lambda: model(ids, labels))
        )
        < EXACT
    )
    assert any(merged)


def by_sixteen(head, h, y):
    return (
        sum(entropy(head, a, b, reduction="sum") for a, b in zip(h.split(16, 1), y.split(16, 1))) / y.numel()
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "loss",
    representatives(
        (chunked, means, joined, log_probabilities, by_sixteen, own_backward, logits_by_slices),
        {chunked, joined, logits_by_slices},
    ),
)
def test_lengths_share_a_graph(loss, interpreted):
    """Four chunks of any length are one graph; pieces of sixteen rows are as many as there are."""
    model = Model(loss).double()
    streamed, graphs = counted(model, 7)
    for length in (LENGTH, 50, 57, 43):
        ids = ids_of(2, length)
        labels = labels_of(ids)
        assert (
            worst_error(
                gradients(model, lambda: streamed(ids, labels)), gradients(model, lambda: model(ids, labels))
            )
            < EXACT
        )
    assert len(graphs) <= (2 if loss in (chunked, log_probabilities) else 4)


def counted_in_each(head, h, y):
    """Rows that know their place in the piece."""
    total = 0.0
    for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
        place = torch.arange(a.shape[1], dtype=a.dtype)[:, None]
        total = total + entropy(head, a * (1 + place / 10), b, reduction="sum")
    return total / y.numel()


def attending_in_each(head, h, y):
    total = 0.0
    for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
        total = total + entropy(head, a + F.scaled_dot_product_attention(a, a, a), b, reduction="sum")
    return total / y.numel()


def written_in_place(head, h, y):
    total = 0.0
    for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
        logits = head(a)
        logits.mul_(0.5)
        logits /= 1.5
        total = total + F.cross_entropy(logits.flatten(0, 1), b.flatten(), reduction="sum")
    return total / y.numel()


def written_through_a_view(head, h, y):
    total = 0.0
    for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
        logits = head(a)
        flat = logits.flatten(0, 1)
        logits.mul_(0.5)
        total = total + F.cross_entropy(flat, b.flatten(), reduction="sum")
    return total / y.numel()


def weighted(head, h, y):
    """Each piece otherwise, after the head."""
    pieces = zip(range(4), h.chunk(4, 1), y.chunk(4, 1))
    return sum((i + 1) * entropy(head, a, b, reduction="sum") / (1 + a.abs().sum()) for i, a, b in pieces)


def with_a_share_of_its_own(head, h, y):
    """Every piece adds a row of a table of its own."""
    return (
        sum(
            entropy(head, a + head.weight[i], b, reduction="sum")
            for i, (a, b) in enumerate(zip(h.chunk(4, 1), y.chunk(4, 1)))
        )
        / y.numel()
    )


@pytest.mark.parametrize(
    "loss, merges",
    [
        (counted_in_each, False),
        (attending_in_each, False),
        (written_in_place, True),
        (written_through_a_view, True),
        (weighted, True),
        (with_a_share_of_its_own, False),
    ],
)
@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_only_what_is_alike_is_merged(loss, merges, interpreted, monkeypatch):
    merged = what_is_merged(monkeypatch)
    model, ids = Model(loss).double(), ids_of(2, LENGTH)
    labels = labels_of(ids)
    streamed = step(model)
    assert (
        worst_error(
            gradients(model, lambda: streamed(ids, labels)), gradients(model, lambda: model(ids, labels))
        )
        < EXACT
    )
    assert any(merged) == merges


@pytest.mark.slow
def test_a_loss_in_pieces_takes_no_more_than_under_checkpointing(fresh_dynamo):
    model, ids = Model(under_checkpointing, 8192), ids_of(2, 2048)
    streamed = torch.compile(model, backend="streambp")

    def measured(f) -> int:
        f(ids, ids).backward()
        return peak(lambda: f(ids, ids).backward())

    assert measured(streamed) < measured(model) < 2 * 2048 * 8192 * 4


@pytest.mark.quick
def test_pieces_of_pieces(interpreted):
    """What the pieces were cut from may itself be a piece, or what became of one."""

    def loss(head, h, y):
        total = 0.0
        for a, b in zip(h.chunk(2, 1), y.chunk(2, 1)):
            for c, d in zip(a.split(13, 1), b.split(13, 1)):
                total = total + entropy(head, c, d, reduction="sum")
        return total / y.numel()

    model, ids = Model(loss).double(), ids_of(2, 52)
    streamed = torch.compile(model, backend="streambp", options={"chunk_size": 7})
    assert (
        worst_error(gradients(model, lambda: streamed(ids, ids)), gradients(model, lambda: model(ids, ids)))
        < EXACT
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_hooks_of_pieces_see_pieces(interpreted, monkeypatch):
    def loss(head, h, y):
        total = 0.0
        for a, b in zip(h.chunk(4, 1), y.chunk(4, 1)):
            logits = head(a)
            logits.register_hook(lambda grad: grad / grad.norm())
            total = total + F.cross_entropy(logits.flatten(0, 1), b.flatten(), reduction="sum")
        return total / y.numel()

    model, ids = Model(loss).double(), ids_of(2, 52)
    streamed = torch.compile(model, backend="streambp", options={"chunk_size": 7})
    assert (
        worst_error(gradients(model, lambda: streamed(ids, ids)), gradients(model, lambda: model(ids, ids)))
        < EXACT
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "joined", [lambda x: torch.cat(x.split(16, 1), 1).sum(), lambda x: torch.cat(tensors=[x, x + 1]).mean()]
)
def test_sums_of_joined_values(joined, interpreted):
    """The values may be the result of one call, and given by name."""
    model, ids = Model(lambda head, h, y: joined(head(h).logsumexp(-1))).double(), ids_of(2, LENGTH)
    streamed = step(model)
    truth = gradients(model, lambda: model(ids, ids))
    assert worst_error(gradients(model, lambda: streamed(ids, ids)), truth) < EXACT

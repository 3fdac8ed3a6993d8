"""Reductions over tokens whose results merge: maxima, softmax, log-sum-exp, moments, and their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from graphs import run_region, streamed
from models import VOCABULARY, Layer, gradients, ids_of
from torch import Tensor, nn

from benchmarks.memory import peak

BATCH, LENGTH, WIDTH = 2, 13, 4
EXACT = dict(rtol=1e-10, atol=1e-10)


def soft_mixture(x: Tensor, w: Tensor) -> Tensor:
    """Every slot is a mean of all tokens, and every token a mean of all slots (arXiv 2308.00951)."""
    scores = x @ w
    slots = torch.einsum("btd,bts->bsd", x, scores.softmax(1)).tanh()
    return torch.einsum("bsd,bts->btd", slots, scores.softmax(-1))


def late_interaction(x: Tensor, w: Tensor) -> Tensor:
    """Every query row meets the document row that it fits best (arXiv 2004.12832)."""
    return torch.einsum("qd,btd->bqt", w, x).amax(-1).sum(-1)


def activations(x: Tensor, w: Tensor) -> Tensor:
    """The strongest activation of every word (arXiv 2107.05720)."""
    return (x @ w).relu().log1p().max(1).values


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm((x @ w).transpose(1, 2), None, None, training=True).transpose(1, 2) * x


def around_attention(x: Tensor, w: Tensor) -> Tensor:
    """Norms over tokens before attention, and behind it: five sweeps forward."""
    y = normalized(x, w)[:, None]
    return normalized(x + F.scaled_dot_product_attention(y, y, y)[:, 0], w)


def masked(x: Tensor, w: Tensor) -> Tensor:
    late = torch.arange(x.shape[1]) > x.shape[1] - 4
    return ((x @ w).masked_fill(late[:, None], -math.inf).softmax(1) * x).sum(1)


def contrast_of_rows(x: Tensor, w: Tensor) -> Tensor:
    """Each row is to be told from all others of its sequence (arXiv 1807.03748)."""
    scores, rows = (x @ w) @ x.mT, torch.arange(x.shape[1]).repeat(len(x))
    return F.cross_entropy(scores.flatten(0, 1), rows, reduction="none").view(x.shape[:2]) + x.sum(-1)


def contrast_within_a_band(x: Tensor, w: Tensor) -> Tensor:
    """The row two places before is to be told from its neighbours: keys are cut, and counted."""
    places = torch.arange(x.shape[1])
    far = (places[:, None] - places > 4) | (places[:, None] < places)
    scores = ((x @ w) @ x.mT).masked_fill(far, -math.inf).flatten(0, 1)
    wanted = (places - 2).clamp(min=0).repeat(len(x))
    return F.cross_entropy(scores, wanted, reduction="none").view(x.shape[:2])


REDUCTIONS = {
    "amax": lambda x, w: (x @ w).amax(1),
    "amin of all but features": lambda x, w: (x @ w).amin((0, 1)),
    "largest of all": lambda x, w: x / (x @ w).abs().max(),
    "ties": lambda x, w: (x @ w).clamp(max=0).amax(1) + (x @ w).clamp(min=0).amin(1),
    "max": activations,
    "min, broadcast back": lambda x, w: x * (x @ w).min(1, keepdim=True).values,
    "flattened": lambda x, w: (x @ w).flatten(0, 1).max(0).values,
    "softmax": lambda x, w: (x @ w).softmax(1) * x,
    "masked softmax": masked,
    "log_softmax": lambda x, w: (x @ w).log_softmax(1) * x,
    "logsumexp": lambda x, w: (x @ w).logsumexp(1),
    "soft mixture": soft_mixture,
    "late interaction": late_interaction,
    "batch norm": normalized,
    "batch norms around attention": around_attention,
    "deviation": lambda x, w: x / (x @ w).std(1, keepdim=True),
    "any": lambda x, w: torch.where((x > 1).any(1, keepdim=True), x, x @ w),
    "all": lambda x, w: torch.where((x < 2).all(1, keepdim=True), x, x @ w),
    "contrast of rows": contrast_of_rows,
    "contrast within a band": contrast_within_a_band,
    "group norm of rows": lambda x, w: F.group_norm((x @ w).flatten(0, 1), 2).view_as(x),  # RetNet, RWKV
    "rows cut off": lambda x, w: (x @ w)[:, 2:-3].max(1).values + (x @ w)[:, 1:].logsumexp(1),
    "softmax of rows cut off": lambda x, w: ((x @ w)[:, 2:].softmax(1) * x[:, 2:]).sum(1),
}


def assert_equal_to_eager(function, *shape: int, chunk: int) -> None:
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (WIDTH, WIDTH)))
    region = streamed(function, (x, w), {0: 1}, shape[1], chunk)
    whole = function(x, w)
    tangent = torch.randn_like(whole)
    expected = (whole, *torch.autograd.grad(whole, (x, w), tangent))
    for ours, theirs in zip(run_region(region, (x, w), (tangent,)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("chunk", [1, 5, pytest.param(LENGTH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.quick
def test_reductions_merge(name, chunk):
    assert_equal_to_eager(REDUCTIONS[name], BATCH, LENGTH, WIDTH, chunk=chunk)


def test_a_maximum_is_found_with_its_place_in_one_sweep_each_way():
    """Nothing is kept for its gradient but values and places, and no row is compared with the maximum."""
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 13, 4), (4, 64)))
    region = streamed(activations, (x, w), {0: 1}, 13)
    assert len(region.forward.program.sweeps) == len(region.backward.program.sweeps) == 1
    assert not region.forward.program.kept and not region.backward.program.kept


@pytest.mark.parametrize("largest", [True, False])
def test_the_first_of_equal_rows_is_chosen_whatever_the_chunks(largest):
    x = torch.randint(0, 3, (4, 31, 6)).double().requires_grad_()

    def chosen(x):
        return (x.max if largest else x.min)(1).values * 2

    (expected,) = torch.autograd.grad(chosen(x).sum(), x)
    for chunk in (1, 4, 31):
        region = streamed(chosen, (x,), {0: 1}, 31, chunk)
        _, found = run_region(region, (x,), (torch.ones(4, 6, dtype=torch.float64),))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["amax", "max", "softmax", "logsumexp", "batch norm"])
def test_half_precision_is_no_less_exact_than_eager(name):
    x, w = torch.randn(2, 200, WIDTH), torch.randn(WIDTH, WIDTH)
    tangent = torch.randn_like(REDUCTIONS[name](x, w))
    function, results = REDUCTIONS[name], {}
    half = [v.bfloat16() for v in (x, w, tangent)]
    for kind, dtype in (("truth", torch.float64), ("eager", torch.bfloat16)):
        leaves = [v.to(dtype).requires_grad_() for v in half[:2]]
        whole = function(*leaves)
        results[kind] = (whole, *torch.autograd.grad(whole, leaves, half[2].to(dtype)))
    leaves = [v.clone().requires_grad_() for v in half[:2]]
    region = streamed(function, leaves, {0: 1}, 200, 32)
    results["ours"] = run_region(region, leaves, (half[2],))

    def error(kind: str) -> float:
        pairs = zip(results[kind], results["truth"], strict=True)
        return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)

    assert error("ours") <= 1.1 * error("eager")


class Retriever(nn.Module):
    """Texts as their strongest words: logits of all tokens, of which the largest remain."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 32):
        super().__init__()
        self.embed, self.layer = nn.Embedding(vocabulary, width), Layer(width, 4)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embed(ids)))
        padding = (ids == 0)[..., None]
        words = logits.relu().log1p().masked_fill(padding, 0).amax(1)
        return F.cross_entropy(words @ words.mT, torch.arange(len(ids)))


def test_texts_as_their_strongest_words(interpreted):
    model, ids = Retriever().double(), ids_of(4, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 7})
    found, truth = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, **EXACT)


@pytest.mark.parametrize("name", ["max", "amax", "logsumexp"])
def test_logits_that_are_reduced_never_exist(name):
    x, w = torch.randn(2, 512, 16, requires_grad=True), torch.randn(16, 2000, requires_grad=True)
    region = streamed(REDUCTIONS[name], (x, w), {0: 1}, 512, 64)
    tangent = torch.randn(2, 2000)
    assert peak(lambda: run_region(region, (x, w), (tangent,))) < 2 * 512 * 2000 * 4

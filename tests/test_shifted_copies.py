"""Rows that meet their neighbours: whole values stay in place, wide ones have copies at their shift."""

import pytest
import torch
import torch.nn.functional as F
from graphs import run_region, streamed
from torch import Tensor

from benchmarks.memory import peak

LENGTH, WIDTH, VOCABULARY = 13, 4, 32
EXACT = dict(rtol=1e-10, atol=1e-10)


def divergence(x: Tensor, w: Tensor) -> Tensor:
    """Between the predictions of neighbours."""
    logs = (x @ w).log_softmax(-1)
    return F.kl_div(logs[:, 1:], logs[:, :-1], log_target=True, reduction="batchmean")


def three_rows(x: Tensor, w: Tensor) -> Tensor:
    logs = (x @ w).log_softmax(-1)
    late, middle, early = logs[:, 2:], logs[:, 1:-1], logs[:, :-2]
    return (late.exp() * (late - middle) + middle.exp() * (middle - early)).sum(-1).mean()


def without_an_epsilon(x: Tensor, w: Tensor) -> Tensor:
    """Rows that are there for one chunk alone, and not in the sequence, are zeros divided by zero."""
    y = x @ w
    late, early = (part / part.norm(dim=-1, keepdim=True) for part in (y[:, 1:], y[:, :-1]))
    return (late * early).sum(-1).tanh().mean() + (late.mT @ early).square().mean()


def next_latent(x: Tensor, w: Tensor) -> Tensor:
    return F.smooth_l1_loss((x[:, :-1] @ w).tanh() @ w.mT, x[:, 1:])


def padded_again(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return F.pad(y[:, 1:] - y[:, :-1], (0, 0, 1, 0)) * y


NEIGHBOURS = {
    "difference": lambda x, w: ((x @ w)[:, 1:] - (x @ w)[:, :-1]).square().mean(),
    "cosine": lambda x, w: F.cosine_similarity((x @ w)[:, 2:], (x @ w)[:, :-2], dim=-1),
    "divergence": divergence,
    "three rows": three_rows,
    "no epsilon": without_an_epsilon,
    "next latent": next_latent,
    "padded again": padded_again,
    "zeros in front": lambda x, w: (x @ w).cos() - F.pad((x @ w).cos(), (0, 0, 1, -1)),
    "first row repeated": lambda x, w: torch.cat((x[:, :1], x[:, :-1]), 1) @ w - x @ w,
    "last row repeated": lambda x, w: torch.cat(((x @ w)[:, 1:], (x @ w)[:, -1:]), 1).tanh() * (x @ w),
}


@pytest.mark.parametrize("chunk", [1, 5, LENGTH])
@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.quick
def test_neighbours_meet(name, chunk):
    x, w = torch.randn(2, LENGTH, WIDTH).double(), torch.randn(WIDTH, VOCABULARY).double()
    x.requires_grad_()
    w.requires_grad_()
    region = streamed(NEIGHBOURS[name], (x, w), {0: 1}, LENGTH, chunk)
    whole = NEIGHBOURS[name](x, w)
    tangent = torch.randn_like(whole)
    expected = (whole, *torch.autograd.grad(whole, (x, w), tangent))
    for ours, theirs in zip(run_region(region, (x, w), (tangent,)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("name", ["difference", "divergence", "three rows"])
def test_wide_neighbours_never_exist_at_full_length(name):
    x, w = torch.randn(1, 512, 16, requires_grad=True), torch.randn(16, 1000, requires_grad=True)
    region = streamed(NEIGHBOURS[name], (x, w), {0: 1}, 512, 32)
    programs = [s.program for s in (region.forward, region.backward) if s is not None]
    assert not any(n.meta["val"].numel() >= 500 * 1000 for p in programs for n in p.kept)
    assert peak(lambda: run_region(region, (x, w), (torch.ones(()),))) < 512 * 1000 * 4

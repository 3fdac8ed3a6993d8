"""Rows that meet their neighbours: whole values stay in place, wide ones are carried from chunk to
chunk, or have copies at their shift."""

import pytest
import torch
import torch.nn.functional as F
from graphs import run_region, streamed
from torch import Tensor

from benchmarks.memory import peak
from streambp_compile.passes.ir import BindingRole, value_of
from streambp_compile.passes.rules import is_product

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


def moved(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (0, 0, by, -by))


def short_filter(x: Tensor, w: Tensor) -> Tensor:
    """Causal, over four rows: longer than the shortest chunks."""
    y = x @ w
    return sum(moved(y, k) * (k + 1) for k in range(4)).tanh() @ w.mT


def filter_of_a_filter(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w + moved(x @ w, 2)).sin() @ w.mT @ w
    return y.tanh() - moved(y.tanh(), 1)


def both_ways(x: Tensor, w: Tensor) -> Tensor:
    """Its sweeps cannot all go one way."""
    y = (x @ w).cos()
    return (moved(y, 3) * y + moved(y, -2)).sin() @ w.mT


def of_attention(x: Tensor, w: Tensor) -> Tensor:
    """The copies end at what attention returns, which is one of its results."""
    mixed = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
    wide = (mixed @ w).log_softmax(-1)
    return (wide[:, 1:] - wide[:, :-1]).square().mean()


NEIGHBOURS = {
    "of attention": of_attention,
    "short filter": short_filter,
    "filter of a filter": filter_of_a_filter,
    "both ways": both_ways,
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


def test_rows_that_cost_a_product_are_computed_once_and_carried():
    x, w = torch.randn(2, 64, WIDTH), torch.randn(WIDTH, VOCABULARY)
    region = streamed(short_filter, (x.requires_grad_(), w.requires_grad_()), {0: 1}, 64, 16)
    sweep, body = region.forward.program.sweeps[0], region.forward.bodies[0]
    assert [n.args[2] for n in sweep.scans] == [1, 2, 3]
    assert [b.state_rows for b in body.bindings if b.role is BindingRole.CARRY] == [1, 2, 3]
    assert not region.forward.program.kept and len(region.forward.program.sweeps) == 1
    assert len([n for n in sweep.nodes if is_product(n)]) == 2
    wide = [
        n for s in region.backward.program.sweeps for n in s.writes if value_of(n).shape[-1] == VOCABULARY
    ]
    assert not wide


@pytest.mark.parametrize("name", ["difference", "divergence", "three rows"])
def test_wide_neighbours_never_exist_at_full_length(name):
    x, w = torch.randn(1, 512, 16, requires_grad=True), torch.randn(16, 1000, requires_grad=True)
    region = streamed(NEIGHBOURS[name], (x, w), {0: 1}, 512, 32)
    programs = [s.program for s in (region.forward, region.backward) if s is not None]
    assert not any(n.meta["val"].numel() >= 500 * 1000 for p in programs for n in p.kept)
    assert peak(lambda: run_region(region, (x, w), (torch.ones(()),))) < 512 * 1000 * 4

"""Sorts that are undone again: where they go, that nothing changes, and what keeps them."""

import pytest
import torch
import torch.nn.functional as F
from graphs import joint_of, run_region, streamed

from streambp_compile.passes.ir import CannotStream
from streambp_compile.passes.normalization.normalize import normalize
from streambp_compile.passes.normalization.sorted_rows import undo_sorts

TOKENS, WIDTH, EXPERTS, CHOSEN = 13, 8, 4, 2


def given() -> list[torch.Tensor]:
    """Rows of tokens, scores of experts, and weights of experts."""
    shapes = (TOKENS, WIDTH), (TOKENS, EXPERTS), (EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def routed(scores):
    weights, chosen = scores.softmax(-1).topk(CHOSEN, -1)
    return weights.reshape(-1), chosen.reshape(-1)


def per_row(rows, up, bias, expert):
    """A weight and a bias looked up for every row."""
    return F.silu(torch.bmm(rows.unsqueeze(1), up[expert]).squeeze(1)) + bias[expert]


def back_by_places(x, scores, up, bias):
    weights, expert = routed(scores)
    ordered, order = expert.sort()
    made = per_row(x[order // CHOSEN], up, bias, ordered) * weights[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    return made[places].view(-1, CHOSEN, WIDTH).sum(1)


def back_by_sorting_the_order(x, scores, up, bias):
    weights, expert = routed(scores)
    order = expert.argsort(stable=True)
    made = per_row(x[order // CHOSEN], up, bias, expert[order]) * weights[order].unsqueeze(-1)
    return made[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1)


def back_by_adding(x, scores, up, bias):
    weights, expert = routed(scores)
    order = expert.argsort(descending=True)
    tokens = order // CHOSEN
    made = per_row(x[tokens], up, bias, expert[order]) * weights[order, None]
    return torch.zeros_like(x).index_add(0, tokens, made)


def mixed_with_rows_in_place(x, scores, up, bias):
    weights, expert = routed(scores)
    order = expert.argsort(stable=True)
    made = per_row(x[order // CHOSEN], up, bias, expert[order]) + weights.unsqueeze(
        -1
    )  # weights of other rows
    return torch.zeros_like(x).index_add(0, order // CHOSEN, made)


def scanned(x, scores, up, bias):
    _, expert = routed(scores)
    order = expert.argsort(stable=True)
    made = per_row(x[order // CHOSEN], up, bias, expert[order]).cumsum(0)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, made)


def left_sorted(x, scores, up, bias):
    _, expert = routed(scores)
    order = expert.argsort(stable=True)
    return per_row(x[order // CHOSEN], up, bias, expert[order])


def with_capacity(x, scores, up, bias):
    _, expert = routed(scores)
    order = expert.argsort(stable=True)[:TOKENS]
    return torch.zeros_like(x).index_add(
        0, order // CHOSEN, per_row(x[order // CHOSEN], up, bias, expert[order])
    )


UNDONE = (back_by_places, back_by_sorting_the_order, back_by_adding)
KEPT = (mixed_with_rows_in_place, scanned, left_sorted, with_capacity)


def sorts(function, inputs) -> int:
    graph = undo_sorts(normalize(joint_of(function, *inputs)[0])).graph
    return sum("sort" in str(n.target) for n in graph.nodes)


def gradients_by(inputs, out, tangent):
    return torch.autograd.grad(out, inputs, tangent, allow_unused=True)


@pytest.mark.parametrize("function", UNDONE)
@pytest.mark.parametrize("chunk", (1, 4, TOKENS))
def test_a_sort_that_is_undone_disappears_and_the_rest_streams(function, chunk):
    inputs = given()
    assert sorts(function, inputs) == 0
    check(function, inputs, streamed(function, inputs, {0: 0, 1: 0}, TOKENS, chunk))


def check(function, inputs, region):
    truth = function(*inputs)
    tangent = torch.randn_like(truth)
    found, *gradients = run_region(region, inputs, [tangent])
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, gradients_by(inputs, truth, tangent)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", KEPT)
def test_a_sort_whose_order_matters_stays_and_its_rows_are_sorted_all_at_once_or_refused(function):
    inputs = given()
    assert sorts(function, inputs) > 0
    try:
        region = streamed(function, inputs, {0: 0, 1: 0}, TOKENS, 4)
    except CannotStream:
        return
    assert any("sort" in str(n.target) for nodes in region.forward.program.full_length for n in nodes)
    check(function, inputs, region)


def grouped(x, scores, up, bias, descending=False):
    weights, expert = routed(scores)
    ordered, order = expert.sort(descending=descending)
    ends = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = F.silu(F.grouped_mm(x[order // CHOSEN], up, offs=ends)) + bias[ordered]
    made = F.grouped_mm(made, up.transpose(1, 2), offs=ends) * weights[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    return made[places].view(-1, CHOSEN, WIDTH).sum(1)


def test_a_grouped_product_sorts_the_rows_of_its_chunk():
    inputs = [t.detach().bfloat16().requires_grad_() for t in given()]
    assert sorts(grouped, inputs) == 0
    truth = grouped(*(wide := [t.detach().float().requires_grad_() for t in inputs]))
    tangent = torch.randn(truth.shape).bfloat16()
    eager = grouped(*inputs)
    found, *gradients = run_region(streamed(grouped, inputs, {0: 0, 1: 0}, TOKENS, 4), inputs, [tangent])
    for ours, theirs, exact in zip(
        (found, *gradients),
        (eager, *gradients_by(inputs, eager, tangent)),
        (truth, *gradients_by(wide, truth, tangent.float())),
    ):
        assert (ours.float() - exact).norm() <= 1.05 * (theirs.float() - exact).norm() + 1e-3 * exact.norm()


def test_groups_that_are_not_those_of_the_sort_are_left_alone():
    inputs = [t.detach().bfloat16().requires_grad_() for t in given()]
    assert sorts(lambda *a: grouped(*a, descending=True), inputs) > 0

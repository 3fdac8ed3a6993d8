"""Branches on whether a mask picks a row: experts that are skipped where nobody chose them."""

import warnings

import pytest
import torch
from models import Layer, gradients, ids_of, worst_error
from selection import representatives
from test_picked_rows import EXACT, EXPERTS, WIDTH, Experts, Mixture, Residual, error_of
from torch import nn

from streambp_compile import explain

pytestmark = pytest.mark.usefixtures("interpreted")


def if_any(x, gates, chosen, e, f, out):
    mask = (chosen == e).any(-1)
    if mask.any():
        out[mask] += f(x[mask]) * (gates * (chosen == e)).sum(-1)[mask][:, None]


def unless_none(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if not torch.sum(mask) == 0:
        out[mask] = f(x[mask]) * gates[mask, 0, None]


def returning_early(x, gates, chosen, e, f, out):
    rows, slot = torch.where(chosen == e)
    if rows.numel() == 0:
        return
    out.index_add_(0, rows, f(x[rows]) * gates[rows, slot, None])


def returning_what_was_given(x, gates, chosen, e, f, out):
    rows, slot = torch.where(chosen == e)
    if not len(rows):
        return out
    return out.index_add(0, rows, f(x[rows]) * gates[rows, slot, None])


def new_value(x, gates, chosen, e, f, out):
    rows, slot = torch.where(chosen == e)
    if rows.shape[0] > 0:
        made = f(x[rows]) * gates[rows, slot, None]
        out = out + torch.zeros_like(x).index_add(0, rows, made)
    return out


def two_questions(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if mask.any():
        rows = mask.nonzero().squeeze(-1)
        if rows.size(0) != 0:
            out[rows] = f(x[rows])


def of_all_experts(x, gates, chosen, e, f, out):
    masks = chosen[:, :1] == torch.arange(EXPERTS)
    if masks[:, e].any():
        out[masks[:, e]] = f(x[masks[:, e]])


SPELLINGS = {
    f.__name__: f
    for f in (
        if_any,
        unless_none,
        returning_early,
        returning_what_was_given,
        new_value,
        two_questions,
        of_all_experts,
    )
}


class Continuing(Experts):
    """Experts in a loop that goes on with the next one where nobody chose one."""

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, WIDTH)
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if not mask.any():
                continue
            rows, slot = torch.where(mask)
            current = expert(x[rows])
            out[rows] += current * gates[rows, slot, None]
        return out.view(shape)


def continuing() -> Mixture:
    model = Mixture(None)
    model.layers = nn.ModuleList(nn.Sequential(Layer(WIDTH, 4), Residual(Continuing(None))) for _ in range(2))
    return model


def streams_whole(model: nn.Module) -> bool:
    """All of it in one graph?"""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = ids_of(2, 64)
    report = explain(model, ids, ids)
    assert "predicted" in str(report)
    return all(r.streamed for r in report.regions) and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(SPELLINGS, {"returning_early"}))
def test_a_branch_breaks_no_graph(name):
    model = Mixture(SPELLINGS[name]).double()
    assert error_of(model, 43, 40) < EXACT
    assert streams_whole(model)


@pytest.mark.long
def test_all_sizes_symbolic_from_the_start():
    model = Mixture(if_any).double()
    step = torch.compile(model, backend="streambp", dynamic=True, options={"chunk_size": 16})
    for length in (43, 40):
        ids = ids_of(2, length)
        expected = gradients(model, lambda: model(ids, ids))
        assert worst_error(gradients(model, lambda: step(ids, ids)), expected) < EXACT


@pytest.mark.long
def test_a_loop_goes_on():
    model = continuing().double()
    assert error_of(model, 43) < EXACT
    assert streams_whole(model)


def error_where_one_is_not_chosen(model) -> float:
    """The error of a mixture of experts of which one has no token."""
    with torch.no_grad():
        for _, experts in model.layers:
            experts.inner.gate.weight[0] = 0
            experts.inner.gate.weight[1:] *= 100
            experts.inner.gate.weight[2] = experts.inner.gate.weight[1]
    return error_of(model, 43)


@pytest.mark.parametrize("name", representatives(SPELLINGS, {"returning_what_was_given"}))
def test_an_expert_that_nobody_chooses(name):
    assert error_where_one_is_not_chosen(Mixture(SPELLINGS[name]).double()) < EXACT


def doing_otherwise(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if mask.any():
        out[mask] = f(x[mask])
    else:
        out += 1.0


def doing_more(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if mask.any():
        out[mask] = f(x[mask])
        out = out + 0.1 * x
    return out


def of_another_dtype(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)  # nowhere
    if mask.any():
        out = out.float().index_put((mask,), f(x[mask]).float())
    return out * 1.1


def of_several_rows(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (torch.arange(len(x)) < 3)
    if mask.sum() > 5:
        out[mask] = f(x[mask])


def of_another_mask(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if (mask & (x[:, 0] > 1e9)).any():
        out[mask] = f(x[mask])


def of_every_other_row(x, gates, chosen, e, f, out):
    """Rows 0, 43 and 85 of 86, the first, the middle and the last, are among those that are asked for."""
    place = torch.arange(len(x)).view(2, -1) % (len(x) // 2)
    mask = (chosen[:, 0] == e) & (place.flatten() % 2 == 1)
    if mask.view(2, -1)[:, ::2].any():
        out[mask] = f(x[mask])


def of_all_rows(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    if mask.all():
        out[mask] = f(x[mask])


CALLS: list[int] = []


def counting(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)
    if mask.any():
        CALLS.append(e)
        out[mask] = f(x[mask])


def keeping_in_a_closure(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)
    made = []

    def keep(value):
        made.append(value)

    if mask.any():
        keep(e)
        out[mask] = f(x[mask])
    out += len(made)


def of_the_mask_before(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)
    some = mask.any()
    mask[3] = True
    if some:
        out[mask] = f(x[mask])


def raising(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)
    if mask.any():
        raise ValueError("never")
    out.add_(f(x))


def raising_at_last(x, gates, chosen, e, f, out):
    out.add_(f(x))
    if not (~(x[:, 0] > 1e9)).all():
        raise ValueError("never")


def averaging(x, gates, chosen, e, f, out):
    mask = (chosen[:, 0] == e) & (x[:, 0] > 1e9)
    if mask.any():
        out = out + f(x[mask]).mean(0)
    return out + f(x)


OTHERS = {
    f.__name__: f
    for f in (
        doing_otherwise,
        doing_more,
        of_another_dtype,
        of_several_rows,
        of_another_mask,
        of_every_other_row,
        of_all_rows,
        counting,
        keeping_in_a_closure,
        of_the_mask_before,
        raising,
        raising_at_last,
        averaging,
    )
}


@pytest.mark.parametrize("name", representatives(OTHERS, {"doing_more", "of_every_other_row"}))
def test_a_branch_that_does_something_else_stays_exact(name):
    """The graph breaks there, as it does by default."""
    CALLS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error_of(Mixture(OTHERS[name]).double(), 43) < EXACT
    assert not CALLS

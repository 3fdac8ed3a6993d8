"""Experts with a capacity, experts that choose their tokens, and loops over the experts that have some."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients, ids_of, worst_error
from selection import representatives
from test_picked_branches import error_where_one_is_not_chosen, streams_whole
from test_picked_rows import EXACT, EXPERTS, WIDTH, Mixture, error_of
from torch import nn

pytestmark = pytest.mark.usefixtures("interpreted")


# Loops over experts, whose conditions are computed of the choices


def counted(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    for e, f in enumerate(experts):
        if counts[e] == 0:
            continue
        rows, slot = torch.where(chosen == e)
        out[rows] += f(x[rows]) * gates[rows, slot, None]


def counted_one_hot(x, gates, chosen, out, experts):
    hot = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    counts = hot.sum((1, 2))
    for e, f in enumerate(experts):
        if counts[e] > 0:
            slot, rows = torch.where(hot[e])
            out.index_add_(0, rows, f(x[rows]) * gates[rows, slot, None])


def over_hits(x, gates, chosen, out, experts):
    with torch.no_grad():
        hot = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        hits = torch.greater(hot.sum(dim=(-1, -2)), 0).nonzero()
    for e in hits:
        e = e[0]
        if e == EXPERTS:
            continue
        slot, rows = torch.where(hot[e])
        out.index_add_(0, rows, (experts[e](x[rows]) * gates[rows, slot, None]).to(out.dtype))


def over_unique(x, gates, chosen, out, experts):
    for e in torch.unique(chosen):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[e](x[rows]) * gates[rows, slot, None])


LOOPS = {f.__name__: f for f in (counted, counted_one_hot, over_hits, over_unique)}

# Experts of which each has so many places, or takes so many tokens


def capacity_of(x, factor: float = 1.25) -> int:
    return int(factor * x.shape[0] / EXPERTS)


def switch(x, gates, chosen, out, experts):
    hot = F.one_hot(chosen[:, 0], EXPERTS).to(x.dtype)
    place, capacity = hot.cumsum(0) * hot - hot, capacity_of(x)
    kept = hot * (place < capacity)
    slots = F.one_hot((place * kept).sum(-1).long(), capacity).to(x.dtype)
    combine = gates[:, :1, None] * kept[..., None] * slots[:, None]
    inputs = torch.einsum("sec,sd->ecd", (combine > 0).to(x.dtype), x)
    made = torch.stack([f(rows) for f, rows in zip(experts, inputs)])
    out += torch.einsum("sec,ecd->sd", combine, made)


def two_choices(x, gates, chosen, out, experts):
    capacity, before, combine = 2 * math.ceil(x.shape[0] / EXPERTS), 0, 0.0
    for k in range(2):
        hot = F.one_hot(chosen[:, k], EXPERTS)
        place = hot.cumsum(0) - 1 + before
        before = before + hot.sum(0, keepdim=True)
        hot = hot * (place < capacity)
        slots = F.one_hot((place * hot).sum(-1), capacity).to(x.dtype)
        combine = combine + torch.einsum("s,se,sc->sec", gates[:, k], hot.to(x.dtype), slots)
    inputs = torch.einsum("sec,sd->ecd", combine.bool().to(x.dtype), x)
    made = torch.stack([f(rows) for f, rows in zip(experts, inputs)])
    out += torch.einsum("sec,ecd->sd", combine, made)


def in_slots(x, gates, chosen, out, experts):
    """What is over the capacity goes to a place in front of all others, which is dropped."""
    hot, capacity = F.one_hot(chosen[:, 0], EXPERTS), capacity_of(x)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    slot = torch.where(place < capacity, 1 + chosen[:, 0] * capacity + place, 0)
    inputs = x.new_zeros(1 + EXPERTS * capacity, WIDTH).index_add(0, slot, x)[1:]
    made = torch.cat([f(rows) for f, rows in zip(experts, inputs.chunk(EXPERTS))])
    made = torch.cat([made.new_zeros(1, WIDTH), made])
    out += made[slot] * gates[:, :1]


def choosing_tokens(x, gates, chosen, out, experts):
    scores, rows = gates.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, gates).t().topk(capacity_of(x), -1)
    for e, f in enumerate(experts):
        out.index_add_(0, rows[e], f(x[rows[e]]) * scores[e, :, None])


WITH_PLACES = {f.__name__: f for f in (switch, two_choices, in_slots, choosing_tokens)}


class Routed(nn.Module):
    """A gate, experts, and what sends rows to them."""

    def __init__(self, route):
        super().__init__()
        self.route = route
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, WIDTH)
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        self.route(x, gates, chosen, out, self.experts)
        return out.view(shape)


def model_of(route) -> Mixture:
    model = Mixture(None)
    model.layers = model.layers[:1]
    model.layers[0][1].inner = Routed(route)
    return model.double()


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(LOOPS, {"over_hits"}))
def test_a_loop_breaks_no_graph(name):
    model = model_of(LOOPS[name])
    assert error_of(model, 43, 40) < EXACT
    assert streams_whole(model)


@pytest.mark.parametrize("name", representatives(LOOPS, {"over_hits"}))
def test_an_expert_that_nobody_chooses(name):
    model, ids = model_of(LOOPS[name]), ids_of(2, 43)
    with torch.no_grad():
        for _, experts in model.layers:
            weight = experts.inner.gate.weight
            weight[0] = 0
            weight[1:] *= 100
            weight[2] = weight[1]
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    expected = gradients(model, lambda: model(ids, ids))
    assert worst_error(gradients(model, lambda: step(ids, ids)), expected) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(WITH_PLACES, {"choosing_tokens"}))
def test_experts_with_places_stream(name):
    """Also at a second length, of which the number of places is a fraction."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error_of(model_of(WITH_PLACES[name]), 43, 58, 71) < EXACT


# What else such loops do


def others_too(x, gates, chosen, out, experts):
    """A mask of another expert."""
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    for e, f in enumerate(experts):
        if counts[e] == 0:
            continue
        mask = (chosen == (e + 1) % EXPERTS).any(-1)
        out[mask] += f(x[mask])


def at_least_two(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    for e, f in enumerate(experts):
        if counts[e] > 1 + len(x) // 2:
            rows, slot = torch.where(chosen == e)
            out.index_add_(0, rows, f(x[rows]))


def listed(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        rows, slot = torch.where(chosen == e)
        out[rows] += experts[e](x[rows]) * gates[rows, slot, None]


def one_number(x, gates, chosen, out, experts):
    for e, f in enumerate(experts):
        mask = (chosen == e).any(-1)
        if mask.sum().item() > 0:
            out[mask] += f(x[mask]) * (gates * (chosen == e)).sum(-1)[mask][:, None]


def over_listed(x, gates, chosen, out, experts):
    for e in chosen.unique().tolist():
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[e](x[rows]) * gates[rows, slot, None])


def numbers_read(x, gates, chosen, out, experts):
    """Numbers that are no condition."""
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e, f in enumerate(experts):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, f(x[rows]) / (1 + counts[e]))


def rounds_counted(x, gates, chosen, out, experts):
    seen = 0
    for e in torch.unique(chosen):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[e](x[rows]))
        seen += 1
    out *= seen


def first_alone(x, gates, chosen, out, experts):
    for e in torch.unique(chosen):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[e](x[rows]))
        break


def read_behind(x, gates, chosen, out, experts):
    for e in torch.unique(chosen):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[e](x[rows]))
    out *= e


def written_between(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    counts[1:] = 0
    for e, f in enumerate(experts):
        if counts[e] > 0:
            rows, slot = torch.where(chosen == e)
            out.index_add_(0, rows, f(x[rows]))


def chosen_again(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    chosen[:, 0] = 1
    for e, f in enumerate(experts):
        if counts[e] > 0:
            rows, slot = torch.where(chosen == e)
            out.index_add_(0, rows, f(x[rows]))


def places_written(x, gates, chosen, out, experts):
    chosen.mul_(EXPERTS)
    for e in torch.unique(chosen.int()):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, experts[int(e) // EXPERTS](x[rows]))


def types_asked(x, gates, chosen, out, experts):
    """What is true of a number, and not of a tensor."""
    for e, f in enumerate(experts):
        mask = (chosen == e).any(-1)
        count = mask.sum().item()
        if isinstance(count, int) and count:
            out[mask] += f(x[mask])


def looked_up(x, gates, chosen, out, experts):
    for e, f in enumerate(experts):
        mask = (chosen == e).any(-1)
        count = mask.sum().item()
        out[mask] += f(x[mask]) * {0: 0.0, len(x): 3.0}.get(count, 2.0)


def is_among(x, gates, chosen, out, experts):
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    if 0 in counts:
        out += 3 * x
    for e, f in enumerate(experts):
        mask = (chosen == e).any(-1)
        if mask.any().item() is True:
            out[mask] += f(x[mask])


OTHERS = {
    f.__name__: f
    for f in (
        listed,
        one_number,
        over_listed,
        places_written,
        types_asked,
        looked_up,
        is_among,
        others_too,
        at_least_two,
        numbers_read,
        rounds_counted,
        first_alone,
        read_behind,
        written_between,
        chosen_again,
    )
}


@pytest.mark.parametrize("name", representatives(OTHERS, {"rounds_counted", "is_among"}))
@pytest.mark.filterwarnings("ignore")
def test_a_loop_that_does_something_else(name):
    """Its graph breaks, as by default, where some expert has no token."""
    assert error_where_one_is_not_chosen(model_of(OTHERS[name])) < EXACT

"""Values whose size only the data tells, where no gradient is wanted, cost no streaming: counters of loads,
metrics."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Mixing, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile.backend import NotStreamed
from streambp_compile.dynamo.user_code.unknown_sizes import counts

WIDTH, EXPERTS, EXACT = 8, 4, 1e-10


def counted(layer, chosen, scores):
    """The buffer says how many counts there are."""
    with torch.no_grad():
        layer.load += torch.bincount(chosen.flatten(), minlength=EXPERTS).to(layer.load.dtype)


def balanced(layer, chosen, scores):
    """The counts meet something that has a gradient."""
    parts = chosen.reshape(-1).bincount(minlength=EXPERTS) / chosen.numel()
    return (parts * scores.mean((0, 1))).sum()


def deviating(layer, chosen, scores):
    """Only the choices say how many counts there are."""
    with torch.no_grad():
        layer.load.fill_(torch.bincount(chosen.flatten(), minlength=EXPERTS).double().std())


def weighted(layer, chosen, scores):
    with torch.no_grad():
        layer.load += torch.bincount(chosen.flatten(), scores.gather(-1, chosen).flatten(), EXPERTS)


def unbounded(layer, chosen, scores):
    """More counts than the least number of them."""
    with torch.no_grad():
        layer.load += torch.bincount((chosen * chosen).flatten(), minlength=2).sum()


def different(layer, chosen, scores):
    with torch.no_grad():
        layer.load += torch.unique(chosen * 3).sum()


def places(layer, chosen, scores):
    with torch.no_grad():
        layer.load += (scores > 0.5).nonzero().sum(0).double().mean()


def read_next(layer, chosen, scores):
    """What has been counted is read before the regions have all run: the graph breaks there."""
    with torch.no_grad():
        layer.load += torch.unique(chosen * 3).sum()
    return (layer.load * scores).mean()


CASES = {
    f.__name__: f for f in (counted, balanced, deviating, weighted, unbounded, different, places, read_next)
}


class Routed(nn.Module):
    def __init__(self, measure):
        super().__init__()
        self.measure, self.router = measure, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = scores.detach().topk(2, -1).indices
        gates = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        y = sum(gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        loss = self.measure(self, chosen, scores)
        return x + y.tanh() + (0 if loss is None else loss)


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(CASES, {"counted", "deviating", "different", "read_next"}))
@pytest.mark.filterwarnings("ignore")
def test_what_is_counted_costs_no_streaming(name, interpreted, fresh_dynamo):
    """At two lengths, gradients and buffers, which hold the counts of both calls."""
    model = Mixing(WIDTH, Routed(CASES[name])).double()
    twin, strict = copy.deepcopy(model), name != "read_next"
    step = torch.compile(
        twin, backend="streambp", options={"chunk_size": 16, "strict": strict}, fullgraph=strict
    )
    for length in (40, 77):
        ids = ids_of(2, length)
        truth = gradients(model, lambda: model(ids))
        assert worst_error(gradients(twin, lambda: step(ids)), truth) < EXACT
        for found, expected in zip(twin.buffers(), model.buffers()):
            torch.testing.assert_close(found, expected)


def test_a_number_beyond_the_asserted_counts_is_an_error(interpreted, fresh_dynamo):
    def step(ids: Tensor, total: Tensor) -> Tensor:
        total += torch.bincount(ids.flatten(), minlength=EXPERTS)
        return (ids.double() * total.sum()).mean()

    compiled = torch.compile(step, backend="streambp")
    few = torch.arange(40).view(1, 40) % EXPERTS
    compiled(few, total := torch.zeros(EXPERTS, dtype=torch.int64))
    assert total.tolist() == [10] * EXPERTS
    with pytest.raises(RuntimeError):
        compiled(few + 1, total)


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64, torch.int64])
def test_counts_are_those_of_bincount(weights):
    x = torch.randint(0, EXPERTS, (50,), dtype=torch.int32)
    weights = None if weights is None else torch.randn(50).to(weights)
    torch.testing.assert_close(counts(x, weights, EXPERTS + 2), torch.bincount(x, weights, EXPERTS + 2))


def test_a_nested_tensor_runs_unchunked(interpreted, fresh_dynamo):
    """Each of its sequences has a length of its own."""
    model = Mixing(WIDTH).double()

    def step(nested):
        return model(nested.to_padded_tensor(0))

    nested = torch.nested.nested_tensor([ids_of(1, n)[0] for n in (33, 30)], layout=torch.jagged)
    with pytest.warns(NotStreamed, match="nested"):
        found = gradients(model, lambda: torch.compile(step, backend="streambp")(nested))
    assert worst_error(found, gradients(model, lambda: step(nested))) < EXACT

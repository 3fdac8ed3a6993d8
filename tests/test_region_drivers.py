"""A fused head's backward: gradients of a unit tangent, scaled."""

import pytest
import torch
from torch.fx import Graph

from streambp_compile import internals
from streambp_compile.regions import region_drivers
from streambp_compile.regions.region_drivers import apart, run_scaled, storages


@pytest.fixture
def scaled(monkeypatch):
    """The gradient as a function of a saved value, a tangent on a GPU, and whether the graph is kept."""
    monkeypatch.setattr(region_drivers, "is_on_host", lambda value: False)
    graph = Graph()
    saved, tangent = graph.placeholder("saved"), graph.placeholder("tangent")
    driver = run_scaled([saved], [saved, None], tangent)

    def run(value, tangent, kept):
        monkeypatch.setattr(internals, "graph_is_kept", lambda: kept)
        gradient, nothing = driver.take([value, tangent])
        assert nothing is None
        return gradient

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_scaled_in_place_unless_the_graph_is_kept(scaled, dtype):
    value, third = torch.randn(6, 5).to(dtype), torch.tensor(1 / 3)
    once, before = (value.double() * third.double()).to(dtype), value.clone()
    kept = scaled(value, third, True)
    assert torch.equal(kept, once) and torch.equal(value, before)
    gradient = scaled(value, third, False)
    assert torch.equal(gradient, once) and gradient.data_ptr() == value.data_ptr()


def test_what_is_scaled_in_place_has_memory_of_its_own():
    mine, given = torch.randn(4, 6), torch.randn(4, 6)
    found = apart([mine, mine.t(), given[1], torch.ones(1).expand(3)], storages([given]))
    assert (
        found[0].data_ptr() == mine.data_ptr()
        and len({f.untyped_storage().data_ptr() for f in (*found, given)}) == 5
    )
    for a, b in zip(found, [mine, mine.t(), given[1], torch.ones(3)]):
        assert torch.equal(a, b)

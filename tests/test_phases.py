"""How long an analysis may take, and that its cost grows as its graph does."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from graphs import traced

from streambp_compile import NotStreamed, StreamHint
from streambp_compile.dynamo.loops import unrolled_losses
from streambp_compile.passes import phases, token_propagation
from streambp_compile.passes.ir import Mark
from streambp_compile.passes.token_propagation import TokenPropagation


def layer(x, weight):
    q, k, v = (x @ weight).chunk(3, -1)
    return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]


def loss_of(x, weight):
    return layer(layer(x, weight), weight).square().sum()


def compiled_step(function, *inputs, **options) -> list[warnings.WarningMessage]:
    wanted = torch.autograd.grad(function(*inputs), inputs[-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(function, backend="streambp", options=options)
        found = torch.autograd.grad(compiled(*inputs), inputs[-1])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    return caught


def inputs():
    weight = torch.randn(8, 24, dtype=torch.float64, requires_grad=True)
    return torch.randn(2, 16, 8, dtype=torch.float64), weight


def refusals(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]


@pytest.mark.usefixtures("interpreted")
def test_a_graph_that_takes_too_long_is_compiled_whole(monkeypatch):
    monkeypatch.setattr(phases, "BETWEEN_CHECKS", 0)
    (text,) = refusals(compiled_step(loss_of, *inputs(), analysis_seconds=1e-9))
    assert "limit of 1e-09 seconds while reading numbers that change" in text
    assert "analysis_seconds" in text


@pytest.mark.usefixtures("interpreted")
@pytest.mark.quick
def test_a_region_that_takes_too_long_is_compiled_whole(monkeypatch):
    from streambp_compile.regions import compiled_region

    monkeypatch.setattr(phases, "BETWEEN_CHECKS", 0)
    limited = compiled_region.time_limit
    monkeypatch.setattr(compiled_region, "time_limit", lambda limit, tell: limited(1e-9, tell))
    texts = refusals(compiled_step(loss_of, *inputs()))
    assert texts
    assert all("the joint graph" in text and "test_phases.py" in text for text in texts)


@pytest.mark.usefixtures("interpreted")
def test_slow_analysis_is_told_once_for_each_graph(monkeypatch):
    monkeypatch.setattr(phases, "SLOW", 0.0)
    texts = [str(w.message) for w in compiled_step(loss_of, *inputs()) if issubclass(w.category, StreamHint)]
    assert sum("is still" in text for text in texts) == len(texts) >= 2
    assert any("The region begins at" in text and "test_phases.py" in text for text in texts)


def test_time_that_is_no_analysis_does_not_count(monkeypatch):
    now = [0.0]
    for clock in ("thread_time", "monotonic"):
        monkeypatch.setattr(phases.time, clock, lambda: now[0])
    with phases.time_limit(5, lambda text: None), phases.phase("counting"):
        with phases.untimed():
            now[0] = 100.0
            phases.check_time()
        phases.check_time()
        now[0] = 106.0
        with pytest.raises(phases.Abandoned, match="limit of 5 seconds while counting"):
            phases.check_time()


@pytest.mark.parametrize("seconds", [0, -1.0, "long", True, None])
def test_a_limit_that_is_no_time_is_refused(seconds):
    from streambp_compile.config import Config

    with pytest.raises(ValueError, match="analysis_seconds must be a positive number of seconds"):
        Config.of(None, {"analysis_seconds": seconds})


def visits(monkeypatch, depth: int) -> int:
    """How many nodes are looked at for the marks of a deep chain of products, transposes and scores."""

    def chain(x, w):
        for _ in range(depth):
            x = (x @ x.mT).tanh() @ (x.transpose(0, 1) @ w).transpose(0, 1)
        return x

    graph = traced(chain, torch.randn(2, 5, 4), torch.randn(4, 4)).graph
    count = [0]
    monkeypatch.setattr(token_propagation, "check_time", lambda: count.__setitem__(0, count[0] + 1))
    TokenPropagation(graph, {next(iter(graph.nodes)): (Mark(1),)})
    return count[0]


def test_marks_cost_as_much_as_the_graph_is_long(monkeypatch):
    assert visits(monkeypatch, 24) <= 5 * visits(monkeypatch, 6)


@pytest.mark.usefixtures("interpreted")
def test_deep_pieces_are_compared_in_linear_time(monkeypatch):
    """The texts of classes once held those of their operands, and doubled with each residual layer."""
    longest = [0]

    described = unrolled_losses.Pieces.text

    def measured(node, found):
        text = described(node, found)
        longest[0] = max(longest[0], len(text or ""))
        return text

    def function(x, weight):
        parts = []
        for part in x.chunk(4, 1):
            for _ in range(24):
                part = part + torch.tanh(part @ weight[:, :8])
            parts.append(part)
        return torch.cat(parts, 1).square().sum()

    monkeypatch.setattr(unrolled_losses.Pieces, "text", staticmethod(measured))
    compiled_step(function, *inputs())
    assert 0 < longest[0] < 200

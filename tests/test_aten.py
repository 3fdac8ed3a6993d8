"""Dynamo's graph in ATen before autograd: every spelling of a thing is one operator. All that Dynamo knew of
a node stays known."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streambp_compile import internals
from streambp_compile.dynamo.reading import aten
from streambp_compile.dynamo.reading.aten import to_aten
from streambp_compile.dynamo.reading.values import fake_of, storage_of
from streambp_compile.passes.ir import copied, where_of

X = torch.randn(2, 12, 8)


def graph_of(function, *args, dynamic=False):
    """What Dynamo hands to a backend."""
    found = []

    def backend(module, inputs):
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    torch._dynamo.reset()
    return found[0]


def operators_of(module):
    return [str(n.target) for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def written(x, in_place):
    y = x.clone()
    in_place(y)
    return y


def first_assigned(y):
    y[:, 0] = y[:, 1]


def number_assigned(y):
    y[0, 1:3] = 1.0


SPELLINGS = {
    "cross-entropy": (
        [
            lambda x: F.cross_entropy(x.flatten(0, 1), x[0].softmax(-1).repeat(2, 1)),
            lambda x: nn.CrossEntropyLoss()(torch.flatten(x, 0, 1), x[0].softmax(-1).repeat(2, 1)),
        ],
        [
            "aten.flatten.using_ints",
            "aten.select.int",
            "aten.softmax.int",
            "aten.repeat.default",
            "aten.cross_entropy_loss.default",
        ],
    ),
    "chunks": ([lambda x: x.chunk(3, 1), lambda x: torch.chunk(x, 3, dim=1)], ["aten.chunk.default"]),
    "split": ([lambda x: x.split(4, 1), lambda x: torch.split(x, 4, 1)], ["aten.split.Tensor"]),
    "slice": ([lambda x: x[:, 2:5], lambda x: x[..., 2:5, :]], ["aten.slice.Tensor"]),
    "product": (
        [lambda x: x @ x.mT, lambda x: torch.matmul(x, x.mT), lambda x: x.matmul(x.mT)],
        ["aten.mT.default", "aten.matmul.default"],
    ),
    "mean of squares": (
        [lambda x: F.mse_loss(x, x.exp()), lambda x: nn.MSELoss()(x, torch.exp(x))],
        ["aten.exp.default", "aten.mse_loss.default"],
    ),
    "written in place": (
        [
            lambda x: written(x, lambda y: operator.iadd(y, 2)),
            lambda x: written(x, lambda y: y.add_(2)),
        ],
        ["aten.clone.default", "aten.add_.Tensor"],
    ),
    "in place by a flag": (
        [lambda x: F.relu(x.clone(), inplace=True), lambda x: x.clone().relu_()],
        ["aten.clone.default", "aten.relu_.default"],
    ),
    "assigned": (
        [lambda x: written(x, first_assigned)],
        ["aten.clone.default", "aten.select.int", "aten.select.int", "aten.copy_.default"],
    ),
    "contiguous already": ([lambda x: x.contiguous() * 2], ["aten.contiguous.default", "aten.mul.Tensor"]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_thing_has_one_spelling(name):
    spellings, wanted = SPELLINGS[name]
    for function in spellings:
        module = graph_of(function, X)
        result = to_aten(copied(module))
        assert operators_of(result) == wanted
        torch.testing.assert_close(result(X)[0], module(X)[0], rtol=0, atol=0)


def test_what_dynamo_knows_stays_known():
    def function(x):
        part = x[:, 1:].transpose(1, 2)
        return part.mul(2).softmax(-1)

    module = graph_of(function, X)
    before = {n.name: fake_of(n) for n in module.graph.nodes if n.op.startswith("call")}
    nodes = {n.name: n for n in to_aten(module).graph.nodes}
    assert before and all(fake_of(nodes[name]) is fake for name, fake in before.items())
    called = [n for n in nodes.values() if n.op == "call_function"]
    assert all(
        "function" in where_of(n) or "return part" in where_of(n) or "part =" in where_of(n) for n in called
    )
    placeholder = next(n for n in nodes.values() if n.op == "placeholder")
    views = [n for n in called if storage_of(n) == storage_of(placeholder)]
    assert [str(n.target) for n in views] == ["aten.slice.Tensor", "aten.transpose.int"]


def test_several_operators_for_one_call_share_its_memory():
    """What is between them is a view of Dynamo's own value, so that a write through it is seen."""
    module = to_aten(graph_of(lambda x: written(x, number_assigned), X))
    writer = next(n for n in module.graph.nodes if str(n.target).startswith("aten.fill_"))
    clone = next(n for n in module.graph.nodes if n.target is torch.ops.aten.clone.default)
    assert storage_of(writer.args[0]) == storage_of(clone)


def test_no_size_is_fixed():
    def function(x):
        parts = x.view(x.shape[0], -1, 2, 4).chunk(2, 1)
        return torch.cat([p.flatten(2) for p in parts], 1)[:, : x.shape[1] - 1].sum(-1)

    module = graph_of(function, X, dynamic=True)
    tensor = next(
        n for n in module.graph.find_nodes(op="placeholder") if isinstance(fake_of(n), torch.Tensor)
    )
    env = fake_of(tensor).fake_mode.shape_env
    guards = len(env.guards)
    result = to_aten(module)
    assert len(env.guards) == guards
    assert isinstance(fake_of(tensor).shape[1], torch.SymInt)
    assert {"aten.chunk.default", "aten.cat.default", "aten.slice.Tensor"} <= set(operators_of(result))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def test_functions_with_a_backward_of_their_own_stay():
    module = to_aten(graph_of(lambda x: Doubled.apply(x.exp()).sum(), X.clone().requires_grad_()))
    kept = [n for n in module.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    assert len(kept) == 1 and operators_of(module) == ["aten.exp.default", "aten.sum.default"]


def test_modes_are_followed():
    """Values between the operators of one call have the dtype that autocast gives them."""

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, x[0])
        with torch.no_grad():
            z = y.exp()
        return y, z

    module = to_aten(graph_of(function, X.clone().requires_grad_()))
    fakes = {
        str(n.target): fake_of(n) for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
    }
    assert fakes["aten.linear.default"].dtype == torch.bfloat16
    assert fakes["aten.select.int"].requires_grad and not fakes["aten.exp.default"].requires_grad
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_equal_calls_are_traced_once(monkeypatch):
    traced = []
    original = internals.before_autograd
    monkeypatch.setattr(internals, "before_autograd", lambda *args: traced.append(args) or original(*args))

    def function(x):
        for _ in range(5):
            x = F.silu(x) * 3
        return x

    module = to_aten(graph_of(function, X))
    assert operators_of(module) == ["aten.silu.default", "aten.mul.Tensor"] * 5
    assert len(traced) == 2


def test_equal_calls_of_several_graphs_are_traced_once(monkeypatch):
    """But for calls with symbols: those of another graph may have the same names and other ranges."""
    traced = []
    before = aten.spelled
    monkeypatch.setattr(aten, "spelled", lambda *given: traced.append(given[0].name) or before(*given))
    monkeypatch.setattr(aten.Spellings, "everywhere", {})

    def calls_traced(dynamic):
        traced.clear()
        to_aten(graph_of(lambda x: F.softplus(x).tanh().sum(), torch.randn(2, 24, 8), dynamic=dynamic))
        return len(traced)

    first = calls_traced(dynamic=False)
    assert first > 0 and calls_traced(dynamic=False) == 0
    assert [calls_traced(dynamic=True) for _ in range(2)] == [first, first]

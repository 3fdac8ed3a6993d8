"""Gradients of a head may be computed for a tangent of one and scaled only where its backward is linear."""

import pytest
import torch
import torch.nn.functional as F
from graphs import traced
from models import VOCABULARY, Layer, gradients, ids_of, total_error, truth_of, worst_error
from torch import nn

from streambp_compile.passes.ir import outputs_of
from streambp_compile.passes.linearity import is_linear
from streambp_compile.passes.normalization.normalize import normalize

GIVEN = (torch.randn(3, 4), torch.randn(4, 5), torch.tensor([[0, 2], [1, 1], [3, 0]]))

LINEAR = {
    "scaled": lambda g, x, w, i: g * x * 2.0 / (x.exp() + 1),
    "product": lambda g, x, w, i: (g * x) @ w,
    "sums": lambda g, x, w, i: (g * x).sum(1) - (g * 3 * x).mean(1),
    "chosen": lambda g, x, w, i: torch.where(x > 0, g * x, 0.0),
    "filled": lambda g, x, w, i: (g * x).masked_fill(x < 0, 0.0),
    "view": lambda g, x, w, i: g.expand(3, 4).t().reshape(12),
    "put": lambda g, x, w, i: torch.zeros(3, 4).scatter_add(1, i, (g * x)[:, :2]),
    "put once": lambda g, x, w, i: torch.zeros(3, 4).scatter(1, i[:, :1], (g * x)[:, :1]),
    "looked up": lambda g, x, w, i: (g * x).gather(1, i),
    "joined": lambda g, x, w, i: torch.cat([g * x, torch.zeros(3, 1), -(g * x)], 1),
    "padded": lambda g, x, w, i: F.pad(g * x, (1, 1)),
    "softmax": lambda g, x, w, i: torch.ops.aten._log_softmax_backward_data(
        g * x, x.log_softmax(1), 1, torch.float32
    ),
    "added to zero": lambda g, x, w, i: torch.zeros(3, 4) + g * x + 0.0,
    "nothing": lambda g, x, w, i: torch.zeros(3, 4),
    "scanned back": lambda g, x, w, i: (g * x).flip(0).cumsum(0).flip(0),
}
OTHERWISE = {
    "clipped": lambda g, x, w, i: (g * x).clamp(-1, 1),
    "squared": lambda g, x, w, i: g * (g * x),
    "moved": lambda g, x, w, i: g * x + 1,
    "filled": lambda g, x, w, i: (g * x).masked_fill(x < 0, 1.0),
    "sign": lambda g, x, w, i: (g * x).sign(),
    "chosen by itself": lambda g, x, w, i: torch.where(g * x > 0, x, 0.0),
    "beside another": lambda g, x, w, i: torch.where(x > 0, g * x, x),
    "divisor": lambda g, x, w, i: x / g,
    "both factors": lambda g, x, w, i: (g * x) @ (g * w),
    "rounded": lambda g, x, w, i: (g * x * 10).to(torch.int32).to(torch.float32),
    "in steps": lambda g, x, w, i: torch.div(g * x, 0.5, rounding_mode="floor"),
    "padded with ones": lambda g, x, w, i: F.pad(g * x, (1, 1), value=1.0),
    "norm": lambda g, x, w, i: (g * x) / (g * x).norm(),
    "of no tangent": lambda g, x, w, i: x * 2,
    "put into others": lambda g, x, w, i: x.scatter_add(1, i, (g * x)[:, :2]),
    "range of half precision": lambda g, x, w, i: (g * x).half().float(),
    "largest": lambda g, x, w, i: (g * x).amax(1),
    "scanned": lambda g, x, w, i: (g * x).logcumsumexp(0),
}


def linear(function) -> bool:
    module = normalize(traced(function, torch.ones(()), *GIVEN))
    return is_linear(
        module.graph, next(n for n in module.graph.nodes if n.op == "placeholder"), outputs_of(module)
    )


@pytest.mark.parametrize("function", LINEAR.values(), ids=LINEAR)
def test_linear(function):
    assert linear(lambda *given: (function(*given),))
    g = torch.tensor(0.7)
    torch.testing.assert_close(function(g * -3, *GIVEN), function(g, *GIVEN) * -3)


@pytest.mark.parametrize("function", OTHERWISE.values(), ids=OTHERWISE)
def test_not_linear(function):
    assert not linear(lambda *given: (function(*given),))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-4, 1e-4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(VOCABULARY, 32),
            Layer(32, 4),
            nn.Linear(32, VOCABULARY, bias=False),
        )

    def forward(self, ids):
        return F.cross_entropy(
            Clipped.apply(self.head(self.layer(self.embed(ids)))).flatten(0, 1), ids.flatten()
        )


@pytest.mark.parametrize("scale", [1.0, 64.0, pytest.param(0.01, marks=pytest.mark.slow)])
def test_a_gradient_clipped_by_a_function_is_clipped_at_its_own_size(scale, interpreted):
    model, ids = Model().double(), ids_of(2, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert (
        worst_error(gradients(model, lambda: step(ids) * scale), gradients(model, lambda: model(ids) * scale))
        < 1e-10
    )


class Plain(Model):
    def forward(self, ids):
        return F.cross_entropy(self.head(self.layer(self.embed(ids))).float().flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("autocast", [False, True])
def test_a_scaled_loss_keeps_what_float16_would_lose(autocast, interpreted):
    """Probabilities over so many tokens are below its smallest numbers, unless the loss is scaled as a
    gradient scaler does."""
    model, ids = Plain(), ids_of(8, 256)
    truth = truth_of(model, lambda m: m(ids) * 65536)
    model = model if autocast else model.half()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 64})

    def error(f) -> float:
        def loss():
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                made = f(ids)
            return made * 65536

        return total_error(gradients(model, loss), truth)

    assert error(step) <= 1.05 * error(model)

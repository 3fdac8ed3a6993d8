"""Associative scans (``torch._higher_order_ops.associative_scan``) stream in blocks of tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Mixing, MixingLayer, gradients, ids_of, worst_error
from torch import Tensor
from torch._dynamo.utils import counters
from torch._higher_order_ops.associative_scan import associative_scan

from streambp_compile import NotStreamed

WIDTH, EXACT = 8, 1e-10


def recurrence(x: Tensor) -> Tensor:
    """A gated linear recurrence, as in state-space layers."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    gates, values = x.sigmoid(), x.tanh()
    return associative_scan(combine, (gates, values), dim=1, combine_mode="generic")[1]


def matrices(x: Tensor) -> Tensor:
    """Products of matrices: what is joined does not commute, and is no pointwise function."""
    made = x.unflatten(-1, (2, 2, 2)).tanh() * 0.5 + torch.eye(2, dtype=x.dtype)
    return associative_scan(torch.matmul, made, dim=1, combine_mode="generic").flatten(2)


def states_behind_rows(x: Tensor) -> Tensor:
    """The states of Mamba: tokens are a dimension in the middle, and each has several numbers per feature."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    steps, inputs = F.softplus(x).transpose(1, 2), x.transpose(1, 2)
    rates = torch.arange(1, 4, dtype=x.dtype)
    gates = torch.exp(-steps[..., None] * rates)
    values = steps[..., None] * inputs[..., None] * rates
    _, states = associative_scan(combine, (gates, values), dim=2, combine_mode="generic")
    return (states * inputs[..., None]).sum(-1).transpose(1, 2)


def softmax_sums(x: Tensor) -> Tensor:
    """Online softmax: a running maximum, and a sum scaled by it."""

    def combine(left, right):
        top = torch.maximum(left[0], right[0])
        return top, left[1] * (left[0] - top).exp() + right[1] * (right[0] - top).exp()

    top, total = associative_scan(combine, (x, torch.ones_like(x)), dim=1, combine_mode="generic")
    return top + total.log()


def backwards(x: Tensor) -> Tensor:
    """From the last row to the first."""
    return associative_scan(torch.add, x, dim=1, reverse=True, combine_mode="generic")


def twice(x: Tensor) -> Tensor:
    return recurrence(recurrence(x) * 0.5)


def check(mix, length: int, strict: bool = True) -> None:
    """Gradients are eager's, and with ``strict`` every region streams."""
    model, ids = Mixing(WIDTH, MixingLayer(mix, WIDTH, parts=1)).double(), ids_of(2, length)
    truth = gradients(model, lambda: model(ids))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": strict})
    assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT


@pytest.mark.long
@pytest.mark.parametrize(
    "mix, length",
    [
        (recurrence, 20),
        pytest.param(recurrence, 40, marks=pytest.mark.slow),
        pytest.param(recurrence, 150, marks=pytest.mark.slow),
        pytest.param(matrices, 40, marks=pytest.mark.slow),
        pytest.param(states_behind_rows, 40, marks=pytest.mark.slow),
        pytest.param(softmax_sums, 40, marks=pytest.mark.slow),
        pytest.param(twice, 40, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_scans_stream(mix, length, interpreted):
    check(mix, length)


@pytest.mark.slow
def test_other_lengths_stream(interpreted):
    """Sizes that are symbols are simplified at once, while Dynamo traces and afterwards. A length of whole
    blocks is no special case, so that its graph serves other lengths."""
    model = Mixing(WIDTH, MixingLayer(recurrence, WIDTH, parts=1)).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    graphs = []
    for length in (40, 192, 210):
        ids = ids_of(2, length)
        found, expected = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(found, expected) < EXACT
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]


@pytest.mark.parametrize(
    "mix, length", [(recurrence, 12), pytest.param(backwards, 20, marks=pytest.mark.slow)]
)
def test_gradients_of_other_scans_are_exact(mix, length, interpreted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        check(mix, length, strict=False)


def test_other_backends_trace_torch_s_own_scan():
    seen = []

    def backend(module, inputs):
        seen.append(module)
        return module

    torch.compile(recurrence, backend=backend)(torch.randn(1, 150, WIDTH))
    assert not any("unflatten" in str(n.target) for n in seen[0].graph.nodes)

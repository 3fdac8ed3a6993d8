"""Gradients are written over those that come in where nobody else can read these; a hook may keep one."""

import pytest
import torch
from models import Plain
from torch import Tensor, nn

from streambp_compile.regions import region_drivers
from streambp_compile.runtime.gradient_ownership import ours_alone, plain_references

pytestmark = pytest.mark.usefixtures("interpreted")
LENGTH = 61

KEPT = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "some of its rows": lambda gradient: gradient[:, :5],
    "as NumPy's": lambda gradient: torch.from_numpy(gradient.numpy()),
}


@pytest.fixture(params=["200MiB", None], ids=["counted while compiling", "counted in a step"])
def options(request) -> dict:
    """With a budget, a step is simulated while Dynamo compiles: references are counted there first."""
    plain_references.cache_clear()
    return dict(chunk_size=16) if request.param is None else dict(chunk_size=16, memory_budget=request.param)


@pytest.fixture
def overwritten(monkeypatch) -> list[bool]:
    """For each incoming gradient, whether it was written over."""
    found: list[bool] = []

    def asked(values, node):
        found.append(ours_alone(values, node))
        return found[-1]

    monkeypatch.setattr(region_drivers, "ours_alone", asked)
    return found


def layers_of(model: nn.Module):
    def layers(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
        return x

    return layers


def kept_by_hooks(function, keep, width: int) -> list[Tensor]:
    """What hooks keep of gradients between three calls of a function, read after the backward."""
    found = []
    x = torch.randn(1, LENGTH, width, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    for _ in range(3):
        x = function(x)
        x.register_hook(lambda gradient: found.append(keep(gradient)))
    x.square().sum().backward()
    return [value.clone() for value in found]


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_a_hook_keeps_is_not_written_over(keep, options):
    torch.manual_seed(0)
    model = Plain(layers=1).double()
    layers, width = layers_of(model), model.embed.weight.shape[1]
    compiled = torch.compile(layers, backend="streambp", options=options)
    expected = kept_by_hooks(layers, keep, width)
    for _ in range(2):
        torch.testing.assert_close(kept_by_hooks(compiled, keep, width), expected, rtol=1e-10, atol=1e-12)


def test_gradients_that_nobody_keeps_are_written_over(options, overwritten):
    """In a step as in its simulation, whichever comes first."""
    torch.manual_seed(0)
    model = Plain(layers=2).double()
    compiled = torch.compile(layers_of(model), backend="streambp", options=options)
    x = torch.randn(1, LENGTH, model.embed.weight.shape[1], dtype=torch.double, requires_grad=True)
    for _ in range(2):
        compiled(x).square().sum().backward()
    steps = overwritten.count(False)  # autograd itself made the first gradient of each
    assert steps >= 2 and overwritten == steps * [False, *[True] * (len(overwritten) // steps - 1)]
    assert len(overwritten) > 2 * steps


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_gradient_that_another_backward_reads_is_not_written_over(order, options):
    """The gradient of a sum is the same tensor for both of its terms."""
    torch.manual_seed(0)
    model = Plain(layers=1).double()
    layers, width = layers_of(model), model.embed.weight.shape[1]

    def found(function) -> list[Tensor]:
        make = torch.Generator().manual_seed(1)
        x, beside = (
            torch.randn(1, LENGTH, width, dtype=torch.double, generator=make, requires_grad=True)
            for _ in range(2)
        )
        early = beside * 2 if order == "before" else None
        y = function(x)
        function(y + (beside * 2 if early is None else early)).square().sum().backward()
        return [x.grad, beside.grad]

    compiled = torch.compile(layers, backend="streambp", options=options)
    for _ in range(2):
        torch.testing.assert_close(found(compiled), found(layers), rtol=1e-10, atol=1e-12)


def filled_column(x: Tensor, column: Tensor) -> Tensor:
    x = x.clone()
    x[..., 1] = column
    return x


WRITTEN = {  # the function, and the shape of the part that it writes
    "a column": (filled_column, (3, LENGTH)),
    "an entry of the batch": (lambda x, row: torch.select_scatter(x, row, 0, 1), (LENGTH, 5)),
    "some columns": (lambda x, columns: torch.slice_scatter(x, columns, 2, 1, 3), (3, LENGTH, 2)),
}


@pytest.mark.parametrize("write, shape", WRITTEN.values(), ids=WRITTEN)
def test_a_view_of_a_gradient_is_not_lost_when_that_is_written_over(write, shape):
    """The gradient of the written part is a view of the incoming one, over which the other may be written."""
    x = torch.randn(3, LENGTH, 5, dtype=torch.double, requires_grad=True)
    part = torch.randn(shape, dtype=torch.double, requires_grad=True)
    incoming = torch.randn_like(x)
    compiled = torch.compile(write, backend="streambp", options={"chunk_size": 8})
    wanted, found = (
        torch.autograd.grad(function(x, part), (x, part), incoming.clone()) for function in (write, compiled)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)

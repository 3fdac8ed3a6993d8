"""One distinct region, compiled."""

import contextlib

import pytest
import torch
from models import Layer

from streambp_compile import NotStreamed, explain
from streambp_compile.passes.ir import CannotStream, Refusal
from streambp_compile.regions import compiled_region


@pytest.mark.parametrize("products", [0, 1, 3])
def test_a_refused_fragment_of_few_products_costs_no_warning(products, interpreted, monkeypatch):
    """As a loss behind a graph break has it: values of flat rows go back into the shape of a batch. What
    products make is kept: no more than what the fragment reads, or there is a warning."""

    def refuse(*args):
        raise CannotStream(Refusal("a region", "It is refused here", "Nothing"))

    monkeypatch.setattr(compiled_region.CompiledRegion, "stream", refuse)
    rows, mask = torch.randn(126, 4, requires_grad=True), torch.rand(2, 63, 1) > 0.5

    def fragment(rows, mask):
        for _ in range(products):
            rows = rows @ rows.new_ones(4, 4)
        return rows.view(2, 63, 4).masked_fill(~mask, 0)

    strict = torch.compile(fragment, backend="streambp", options={"strict": True})
    with pytest.raises(Exception, match="It is refused here") if products > 1 else contextlib.nullcontext():
        assert torch.equal(strict(rows, mask), fragment(rows, mask))


@pytest.mark.usefixtures("interpreted")
def test_a_filter_that_makes_patches_has_nothing_to_stream():
    """Its positions are looked up, as in CLIP, so that one of its inputs has tokens."""
    patches, places = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Embedding(64, 16)
    layers = torch.nn.ModuleList(Layer(16, 2) for _ in range(2))

    def loss(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = patches(images).flatten(2).transpose(1, 2) + places(numbers)
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    report = explain(loss, torch.randn(2, 3, 32, 32), torch.arange(64)[None])
    assert [r.streamed is not None or r.has_nothing_to_stream for r in report.regions] == [True] * 3


@pytest.mark.inductor
def test_an_unchunked_region_keeps_its_inputs_and_no_copies_of_them():
    """Inductor reads images channels last on a CPU, and returned its copy for the backward to keep."""
    torch.manual_seed(0)
    patches, layer = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Linear(16, 16)
    images, kept = torch.randn(2, 3, 64, 64), []

    @torch.compile(backend="streambp")
    def loss(x):
        return layer(patches(x).flatten(2).transpose(1, 2)).relu().square().sum()

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        step = loss(images)
    found = [value for value in kept if value.shape == images.shape]
    assert found and all(value.data_ptr() == images.data_ptr() for value in found)
    step.backward()
    ours = patches.weight.grad.clone()
    patches.zero_grad()
    loss._torchdynamo_orig_callable(images).backward()
    assert torch.allclose(ours, patches.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_running_averages_are_no_outputs_that_gradients_come_to(interpreted, stride):
    """AOTAutograd returns what batch norms write before the outputs of the region. The channels of a strided
    filter are not rows of tokens."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 64, 3, stride), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    layers.append(torch.nn.Conv2d(64, 8, 3))
    model, images = torch.nn.Sequential(*layers).double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def loss(x):
        return torch.nn.functional.cross_entropy(model(x).mean((2, 3)), torch.tensor([1, 2]))

    with pytest.warns(NotStreamed, match="No rule describes which tokens this operation reads"):
        torch.compile(loss, backend="streambp")(images).backward()
    ours = layers[0].weight.grad.clone()
    model.zero_grad()
    loss(images).backward()
    assert torch.allclose(ours, layers[0].weight.grad, rtol=1e-9)

"""What crosses from one region to the next."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Plain, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile import NotStreamed, explain

WIDTH, VOCAB, WINDOW = 16, 31, 4


class Windowed(nn.Module):
    """Its keys and values cross a cut before they are unfolded, which nobody has a rule for: a region is left
    whole between two that stream."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.part = part
        self.table, self.qkv, self.last = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        for _ in range(2):
            q, k, v = self.part(self.qkv(F.layer_norm(x, (WIDTH,))))
            k, v = (F.pad(t, (0, 0, WINDOW - 1, 0)).unfold(1, WINDOW, 1) for t in (k, v))
            x = x + torch.einsum("btw,btdw->btd", torch.einsum("btd,btdw->btw", q, k).softmax(-1), v)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(
            (self.last(x) @ self.table.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


PARTS = {
    "slices": lambda x: x.chunk(3, -1),
    "every third": lambda x: (x[..., i::3] for i in range(3)),
    "expanded": lambda x: (x[..., :1].expand(-1, -1, WIDTH), *x.chunk(3, -1)[1:]),
    "turned": lambda x: x.unflatten(-1, (3, -1)).permute(2, 0, 1, 3).contiguous().mT.mT,
}


@pytest.mark.long
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", representatives(PARTS, {"slices", "turned"}))
def test_parts_of_something_wider_cross_a_cut(part, grad, interpreted):
    model, ids = Windowed(PARTS[part]).double(), torch.randint(VOCAB, (2, 61))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("ignore", NotStreamed)
        if grad:
            assert (
                worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < 1e-10
            )
        else:
            torch.testing.assert_close(step(ids), model(ids), rtol=1e-12, atol=0)


class Stacked(nn.Module):
    """The weights of all layers in one tensor each."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = (
            nn.Parameter(torch.randn(layers, WIDTH, width) / 4) for width in (3 * WIDTH, WIDTH)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for i in range(len(self.qkv)):
            q, k, v = (x @ self.qkv[i])[:, None].chunk(3, -1)
            x = F.layer_norm(
                x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0] @ self.out[i], (WIDTH,)
            )
        return F.cross_entropy((x @ self.table.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.long
@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_whose_weights_are_one_tensor_are_equal(frozen, interpreted):
    model, ids = Stacked(5).double(), torch.randint(VOCAB, (2, 61))
    model.out.requires_grad_(not frozen)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < 1e-10
    assert [r.times for r in explain(model, ids).regions] == [1, 5, 1]


HOOKS = {"between layers": 1, "before the head": 3, "on logits": 4}


@pytest.mark.parametrize("where", HOOKS.values(), ids=HOOKS)
@pytest.mark.filterwarnings("error::streambp_compile.NotStreamed")
@pytest.mark.quick
def test_hooks_on_values_stream(where, interpreted):
    """They are a part of the graph, and so of the backward's sweeps; one that clips makes a head's backward
    nonlinear."""

    class Hooked(Plain):
        def forward(self, ids, labels):
            x = self.embed(ids)
            for i, layer in enumerate((*self.layers, nn.Identity(), self.head)):
                x = layer(x)
                if i == where:
                    x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * 2)
            return F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model, ids = Hooked().double(), ids_of(2, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert (
        worst_error(
            gradients(model, lambda: step(ids, ids) * 8), gradients(model, lambda: model(ids, ids) * 8)
        )
        < 1e-10
    )


def test_noise_on_embeddings_is_drawn_once(interpreted):
    """The embeddings would be recomputed in the backward, with other random numbers."""
    model, ids = Plain(layers=3).double(), ids_of(1, 32)

    def loss() -> Tensor:
        x = model.embed(ids)
        x = x + torch.rand_like(x)
        for layer in model.layers:
            x = layer(x)
        return model.loss(x, ids)

    step, weight = torch.compile(loss, backend="streambp"), model.layers[0].norm1.weight
    torch.manual_seed(3)
    step().backward()
    values, direction = [], torch.randn_like(weight)
    for distance in (1e-6, -1e-6):
        with torch.no_grad():
            weight.add_(direction, alpha=distance)
        torch.manual_seed(3)
        values.append(step().item())
        with torch.no_grad():
            weight.sub_(direction, alpha=distance)
    slope = (weight.grad * direction).sum().item()
    assert abs((values[0] - values[1]) / 2e-6 - slope) < 1e-6 * abs(slope)


def test_a_view_beside_its_detached_whole_streams(interpreted):
    """Hidden states that leave as ``[T, B, d]`` with a gradient, and once more without."""
    ids, model = ids_of(2, 20), Plain(width=16, heads=2, layers=1).double()

    def loss(ids):
        x = model.norm(model.layers[0](model.embed(ids)))
        entropy = F.cross_entropy(model.head(x).flatten(0, 1), ids.flatten())
        return entropy, x.transpose(0, 1), x.detach()

    def total(function):
        entropy, turned, detached = function(ids)
        weight = torch.linspace(0, 1, turned.numel(), dtype=turned.dtype).view_as(turned)
        return entropy + (turned * weight).sum() / 100 + detached.sum()

    step = torch.compile(loss, backend="streambp", options={"chunk_size": 7, "strict": True})
    truth, found = (gradients(model, lambda f=f: total(f)) for f in (loss, step))
    assert worst_error(found, truth) < 1e-10

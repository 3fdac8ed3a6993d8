"""``torch.vmap`` in a model: over heads, over tokens, in masks; alone, nested, and without any tokens.
``torch.func.grad`` in a step."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, worst_error
from torch import Tensor, nn

from streambp_compile import explain

WIDTH, HEADS, VOCAB, EXACT = 16, 2, 31, 1e-10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.inner = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

        def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax((q @ k.mT).masked_fill(~seen, -torch.inf), -1) @ v

        x = x + self.out(torch.vmap(head, in_dims=1, out_dims=2)(q, k, v).flatten(-2))
        return x + torch.vmap(torch.vmap(lambda row: torch.tanh(self.inner(row))))(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        seen = torch.vmap(lambda row: torch.vmap(lambda column: row >= column)(places))(places)
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, seen)
        return F.cross_entropy((x @ self.table.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def model(interpreted) -> Model:
    return Model().double()


@pytest.mark.slow
def test_a_model_with_maps_streams_at_all_lengths(model):
    """A region that is compiled whole warns, and a warning is an error here."""
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in (77, 61, 50):
        ids = torch.randint(VOCAB, (2, length))
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.quick
def test_equal_layers_with_maps_are_one_region(model):
    report = explain(model, torch.randint(VOCAB, (2, 77)))
    assert [r.times for r in report.regions] == [1, 3, 1]
    assert "causal, proved" in str(report)


def test_a_gradient_inside_of_a_step_streams(model):
    """One inner step of a head that learns (MAML), then the loss of the adapted head. All of it streams: a
    warning is an error here."""

    def inner(table: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy((rows @ table.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def adapted(ids: Tensor, others: Tensor) -> Tensor:
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        rows, further = (model.layers[0](model.table(x), seen) for x in (ids, others))
        learned = torch.func.grad(inner)(model.table.weight, rows.detach(), ids)
        return inner(model.table.weight - 0.1 * learned, further, others)

    step = torch.compile(adapted, backend="streambp", options={"chunk_size": 16})
    for length in (77, 61):
        batch = [torch.randint(VOCAB, (2, length)) for _ in range(2)]
        found, wanted = gradients(model, lambda: step(*batch)), gradients(model, lambda: adapted(*batch))
        assert worst_error(found, wanted) < EXACT

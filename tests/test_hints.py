"""Hints at memory that leaves the graph: given where it is memory, and not otherwise."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH = 32
pytestmark = pytest.mark.usefixtures("interpreted")


class Layer(nn.Module):
    """Causal attention that also returns something of each token."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, told):
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]), told(x, k)


@pytest.mark.parametrize(
    "told, hinted", [(lambda x, k: x.abs().amax(-1), False), (lambda x, k: k, True)], ids=["scales", "keys"]
)
def test_values_of_layers_are_told_where_they_are_as_wide_as_hidden_states(told, hinted):
    layers = nn.ModuleList([Layer() for _ in range(3)])

    def step(x):
        values = []
        for layer in layers:
            x, value = layer(x, told)
            values.append(value)
        return x.square().mean(), values

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(step, backend="streambp", options={"chunk_size": 16})
        compiled(torch.randn(2, 77, WIDTH))[0].backward()
    assert any("3 values of its layers" in str(w.message) for w in caught) == hinted

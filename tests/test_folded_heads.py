"""Products of all heads with keys that heads share: torch folds the heads into the rows of one product."""

import warnings

import pytest
import torch
from models import Mixing, MixingLayer, gradients, ids_of, worst_error
from torch import Tensor

from streambp_compile import NotStreamed, explain

WIDTH, HEADS, LAYERS = 16, 4, 2
EXACT = 1e-10

pytestmark = pytest.mark.usefixtures("interpreted")


def visible(scores: Tensor) -> Tensor:
    at = torch.arange(scores.shape[-1])
    return scores.masked_fill(at[None, :] > at[:, None], -torch.inf).softmax(-1)


def one_key_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query attention (arXiv 1911.02150)."""
    k, v = k[..., :4], v[..., :4]
    weights = visible(torch.einsum("bthd,bsd->bhts", q.unflatten(-1, (HEADS, 4)), k))
    return torch.einsum("bhts,bsd->bthd", weights, v).flatten(2)


def keys_for_groups_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped queries (arXiv 2305.13245) without repeating keys."""
    q = q.unflatten(-1, (2, 2, 4))
    k, v = (x[..., :8].unflatten(-1, (2, 4)) for x in (k, v))
    weights = visible(torch.einsum("btgrd,bsgd->bgrts", q, k))
    return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2)


def absorbed_latent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Latent attention with absorbed projections (arXiv 2405.04434): the latent is key and value, beside a
    key for positions."""
    latent, turned = k[..., :6], k[..., 6:8]
    q = q.unflatten(-1, (HEADS, 4))
    up = torch.ones(2, 6, dtype=q.dtype).tril()
    found = torch.einsum("bthc,bsc->bhts", q[..., :2] @ up, latent)
    weights = visible(found + torch.einsum("bthr,bsr->bhts", q[..., 2:], turned))
    return torch.einsum("bhts,bsc->bthc", weights, latent)[..., :4].flatten(2)


@pytest.mark.long
@pytest.mark.parametrize(
    "mix",
    [
        one_key_for_all_heads,
        pytest.param(keys_for_groups_of_heads, marks=pytest.mark.slow),
        pytest.param(absorbed_latent, marks=pytest.mark.slow),
    ],
)
def test_heads_that_share_keys_are_causal_attention(mix):
    """Each layer is a region of its own, reads the keys that it may see, and is exact for all lengths."""
    model = Mixing(WIDTH, *(MixingLayer(mix, WIDTH) for _ in range(LAYERS))).double()
    report = explain(model, ids_of(2, 24), streambp_options={"chunk_size": 7})
    layers = [r for r in report.regions if "keys [" in str(r)]
    assert sum(r.times for r in layers) == LAYERS
    assert all("causal, proved" in str(r) and "not proved" not in str(r) for r in layers)
    torch._dynamo.reset()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 7})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        for length in (24, 29):
            ids = ids_of(2, length)
            found, truth = (gradients(model, lambda f=f, ids=ids: f(ids)) for f in (step, model))
            assert worst_error(found, truth) < EXACT

"""Running products, maxima and minima: exact over tokens, where their gradients are no scans."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import Mixing, MixingLayer, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile import NotStreamed, explain

WIDTH, EXACT = 8, 1e-10


def of_products(x: Tensor) -> Tensor:
    """Some factors are zero."""
    return torch.cumprod(x.sigmoid() * 1.5 * (x > -1), 1)


def of_maxima(x: Tensor) -> Tensor:
    """Many rows are equal, and the gradient goes to the last of them."""
    return (x + ((2 * x).round() / 2 - x).detach()).cummax(1).values


def of_minima_and_places(x: Tensor) -> Tensor:
    lowest, found = x.cummin(1)
    return lowest * torch.cos(found / 10)


def of_earlier_features(x: Tensor) -> Tensor:
    """Over features these are functions of rows."""
    return x.cummax(-1).values + x.sigmoid().cumprod(-1)


CASES = {
    "products": of_products,
    "maxima": of_maxima,
    "minima and places": of_minima_and_places,
    "features": of_earlier_features,
}


@pytest.mark.parametrize(
    "case",
    representatives(
        [f"{name} {length}" for name in CASES for length in (40, 77)],
        {"products 40", "minima and places 77", "features 40"},
    ),
)
def test_running_values_are_exact(case, interpreted):
    """A region with the gradient of a maximum or minimum runs unchunked, with a message."""
    name, length = case.rsplit(" ", 1)
    model, ids = Mixing(WIDTH, MixingLayer(CASES[name], WIDTH, parts=1)).double(), ids_of(2, int(length))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    truth = gradients(model, lambda: model(ids))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotStreamed)
        assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT
    refusals = [w for w in caught if issubclass(w.category, NotStreamed)]
    assert bool(refusals) is name.startswith(("maxima", "minima"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_other_lengths_are_exact(interpreted):
    model = Mixing(WIDTH, MixingLayer(of_maxima, WIDTH, parts=1)).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in (40, 77, 90):
        ids = ids_of(2, length)
        ours, truth = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(ours, truth) < EXACT, length


class Documents(nn.Module):
    """Positions that start again with each document: the last place where one began."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(200, WIDTH)
        self.model = Mixing(WIDTH, MixingLayer(torch.tanh, WIDTH, parts=1))

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        began = torch.where(ids < 3, place, 0).cummax(1).values
        x = self.model.embed(ids) + self.places(place - began)
        return self.model.head(self.model.layers(x)).logsumexp(-1).mean()


@pytest.mark.long
def test_positions_in_documents_stream(interpreted):
    model, ids = Documents().double(), ids_of(2, 90)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    truth = gradients(model, lambda: model(ids))
    assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT
    assert all(region.streamed for region in explain(model, ids).regions)

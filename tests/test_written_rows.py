"""Rows of a value that a forward fills or changes in place, part by part."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, ids_of
from selection import representatives
from torch import nn

from streambp_compile import NotStreamed

LENGTH, CHUNK, WIDTH = 64, 16, 16
pytestmark = pytest.mark.usefixtures("interpreted")


class Mixing(nn.Module):
    """Layers around one that writes rows, with a head and its loss."""

    def __init__(self, write):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.write = write

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.one(h).tanh()
        h = h + self.one(self.write(self, h))
        h = h + self.two(h).relu()
        return F.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def first_row_and_shifted(model, h):
    y = torch.empty_like(h)
    y[:, 1:] = h[:, :-1]
    y[:, 0] = model.row
    return y


def last_row(model, h):
    y = h.clone()
    y[:, -1] = model.row
    return y


def scaled_rows(model, h):
    y = h.clone()
    y[:, 3:] *= 2
    return y


def projected_rows(model, h):
    y = h.clone()
    y[:, 5:9] = model.two(h[:, 5:9])
    return y


def rows_from_the_end(model, h):
    y = h.clone()
    y[:, -4:] = model.row
    return y


def more_rows_than_there_are(model, h):
    y = h.clone()
    y[:, -100:] *= 2
    return y


def no_rows(model, h):
    y = h.clone()
    y[:, 100:] = model.row
    return y


def rows_of_zeros(model, h):
    y = h.clone()
    y[:, :4] = 0
    return y


def two_halves(model, h):
    y, half = torch.empty_like(h), h.shape[1] // 2
    y[:, :half] = model.one(h[:, :half])
    y[:, half:] = model.two(h[:, half:])
    return y


def last_row_is_the_first(model, h):
    """The first row is picked by one chunk, and read by another."""
    y = torch.zeros_like(h)
    y[:, :-1] = h[:, 1:]
    y[:, -1] = h[:, 0]
    return y


def other_features(model, h):
    y = h.clone()
    y[..., :4] = h[..., 4:8]
    return y


WRITES = (
    first_row_and_shifted,
    last_row,
    scaled_rows,
    projected_rows,
    rows_from_the_end,
    more_rows_than_there_are,
    no_rows,
    rows_of_zeros,
    two_halves,
    last_row_is_the_first,
    other_features,
)
CHOSEN = {first_row_and_shifted, projected_rows, rows_from_the_end, no_rows, last_row_is_the_first}
ONE_LENGTH_ONLY = (projected_rows, two_halves, rows_from_the_end, more_rows_than_there_are, no_rows)


@pytest.mark.parametrize("write", representatives(WRITES, CHOSEN), ids=lambda write: write.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["one length", "any length"])
def test_rows_that_are_written_stream(write, dynamic):
    torch._dynamo.reset()
    model, ids = Mixing(write).double(), ids_of(2, LENGTH)
    expected = torch.autograd.grad(model(ids), list(model.parameters()), materialize_grads=True)
    step = torch.compile(model, backend="streambp", dynamic=dynamic, options={"chunk_size": CHUNK})
    unchunked = dynamic and write in ONE_LENGTH_ONLY  # and exact
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if unchunked else "error", NotStreamed)
        found = torch.autograd.grad(step(ids), list(model.parameters()), materialize_grads=True)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.inductor
def test_a_row_that_is_picked_has_memory_of_its_own():
    """The graph has a view of all rows there; what chunks add up has not."""
    test_rows_that_are_written_stream(last_row_is_the_first, False)

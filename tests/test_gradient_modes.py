"""What a model computes without gradients, and what rewrites make of it.

A rewrite computes values where they are read, or from what they are made of. Neither may give a gradient to
what the user computed in `torch.no_grad`, or cut off by `detach`.
"""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

EXACT, WIDTH, LENGTH, TAPS = 1e-10, 16, 48, 4
attention = F.scaled_dot_product_attention


class Stopped(nn.Module):
    """A layer around a function of hidden states, a few more rows, and a filter."""

    def __init__(self, mix):
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), mix
        self.into, self.more = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(2, 3, WIDTH))
        self.taps = nn.Parameter(torch.randn(WIDTH, WIDTH, TAPS) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(self, self.into(x))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def with_more(m: Stopped, x: Tensor) -> Tensor:
    return torch.cat([m.more, x], 1)


def beside_a_sink(m: Stopped, x: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
    return torch.cat([m.more[:1, :1, :1].expand(*x.shape[:2], 1), scores], -1)


def keys(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        k = with_more(m, x)
    return attention(x, k, with_more(m, x))


def keys_of_a_weight(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        k = m.into(with_more(m, x))
    return attention(x, k, with_more(m, x))


def values_in_inference_mode(m: Stopped, x: Tensor) -> Tensor:
    with torch.inference_mode():
        v = with_more(m, x)
    return attention(x, with_more(m, x), v.clone())


def columns(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        wide = beside_a_sink(m, x)
    return wide.softmax(-1)[..., 1:] @ x


def columns_on_their_way(m: Stopped, x: Tensor) -> Tensor:
    wide = beside_a_sink(m, x)
    with torch.no_grad():
        wide = wide * 2
    return wide.softmax(-1)[..., 1:] @ x


def columns_that_are_cut(m: Stopped, x: Tensor) -> Tensor:
    wide = beside_a_sink(m, x).softmax(-1)
    with torch.no_grad():
        own = wide[..., 1:]
    return own @ x


def padding_of_a_shift(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        wide = F.pad(x @ x.mT, (1, 0))
    return wide.reshape(x.shape[0], x.shape[1] + 1, x.shape[1])[:, 1:].softmax(-1) @ x


def rows_of_a_shift(m: Stopped, x: Tensor) -> Tensor:
    wide = F.pad(x @ x.mT, (1, 0)).detach()
    return wide.reshape(x.shape[0], x.shape[1] + 1, x.shape[1])[:, 1:].softmax(-1) @ x


def two_streams(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        both = with_more(m, x)
    return attention(both, both, with_more(m, x))[:, 3:]


def two_streams_that_are_cut(m: Stopped, x: Tensor) -> Tensor:
    both = with_more(m, x)
    made = attention(both, both, both)
    with torch.no_grad():
        own = made[:, 3:]
    return own * x


def rows_of_windows(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        wide = F.pad(x, (0, 0, TAPS - 1, 0))
    return wide.unfold(1, TAPS, 1).softmax(-1)[..., 0] * x


def rows_of_a_filter(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        wide = F.pad(x.mT, (TAPS - 1, 0))
    return F.conv1d(wide, m.taps).mT


def blocks(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        parted = x.unflatten(1, (-1, 8))
    return (parted.softmax(2) * x.unflatten(1, (-1, 8))).flatten(1, 2)


def pieces(m: Stopped, x: Tensor) -> Tensor:
    with torch.no_grad():
        parts = x.chunk(4, 1)
    return torch.cat([m.into(part) for part in parts], 1) * x


def pieces_put_together(m: Stopped, x: Tensor) -> Tensor:
    parts = [m.into(part) for part in x.chunk(4, 1)]
    with torch.no_grad():
        together = torch.cat(parts, 1)
    return together * x


def rows_of_a_loop(m: Stopped, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    with torch.no_grad():
        rows = [x[:, t] for t in range(x.shape[1])]
    for row in rows:
        state = state * 0.5 + row * m.more[0, 0]
        found.append(state)
    return torch.stack(found, 1)


def states_of_a_loop(m: Stopped, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state * 0.5 + x[:, t] * m.more[0, 0]
        found.append(state)
    with torch.no_grad():
        together = torch.stack(found, 1)
    return together * x + torch.stack(found, 1)


def a_target_of_its_own(m: Stopped, x: Tensor) -> Tensor:
    """The same layer, once as a teacher."""
    with torch.no_grad():
        target = attention(m.into(x), x, x, is_causal=True).softmax(-1)
    return attention(m.into(x), x, x, is_causal=True) * target


STOPPED = (
    keys,
    keys_of_a_weight,
    values_in_inference_mode,
    columns,
    columns_on_their_way,
    columns_that_are_cut,
    padding_of_a_shift,
    rows_of_a_shift,
    two_streams,
    two_streams_that_are_cut,
    rows_of_windows,
    rows_of_a_filter,
    blocks,
    pieces,
    pieces_put_together,
    rows_of_a_loop,
    states_of_a_loop,
    a_target_of_its_own,
)
CHOSEN = {
    keys,
    columns_on_their_way,
    rows_of_a_shift,
    two_streams_that_are_cut,
    blocks,
    pieces,
    states_of_a_loop,
}


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")  # some are exact, and run unchunked
@pytest.mark.parametrize("mix", representatives(STOPPED, CHOSEN), ids=lambda f: f.__name__)
def test_what_has_no_gradient_gets_none(mix, interpreted):
    torch.manual_seed(0)
    model, ids = Stopped(mix).double(), ids_of(2, LENGTH)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


def test_a_layer_that_is_its_own_teacher_streams(interpreted):
    model, ids = Stopped(a_target_of_its_own).double(), ids_of(2, LENGTH)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


# Autocast, which half of a layer may run under


def cast_keys(m: Stopped, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        k, q = m.into(with_more(m, x)), m.into(x)
    return attention(q, k, k).float()


def cast_streams(m: Stopped, x: Tensor) -> Tensor:
    both = with_more(m, x)
    with torch.autocast("cpu", torch.bfloat16):
        made = m.into(attention(*[m.into(both)] * 3))
    return made[:, 3:].float()


def cast_attention(m: Stopped, x: Tensor) -> Tensor:
    keys = with_more(m, x)
    with torch.autocast("cpu", torch.bfloat16):
        return attention(m.into(x), m.into(keys), m.into(keys)).float()


def keys_beside_a_cast(m: Stopped, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        k = m.into(with_more(m, x))
    return attention(x, k.float(), k.float())


@pytest.mark.parametrize(
    "mix", (cast_keys, cast_streams, cast_attention, keys_beside_a_cast), ids=lambda f: f.__name__
)
def test_what_is_computed_elsewhere_has_the_dtype_that_it_had(mix, interpreted):
    """As near to eager as half precision is; in the wrong one, or in none, operands would not fit."""
    torch.manual_seed(0)
    model, ids = Stopped(mix), ids_of(2, LENGTH)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < 2e-2

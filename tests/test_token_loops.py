"""Loops over single tokens, unrolled by Dynamo, stream as scans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import Mixing, MixingLayer, gradients, ids_of, worst_error
from samples import sample_of
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("interpreted")
WIDTH, EXACT = 8, 1e-10


class Delta(nn.Module):
    """The gated delta rule: the state is a matrix, and rows are made of it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, F.normalize(k, dim=-1), v))
        state, found = q.new_zeros(q.shape[0], 2, q.shape[3], v.shape[3]), []
        for t in range(q.shape[2]):
            state = state * 0.9
            change = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
            state = state + k[:, :, t, :, None] * change[:, :, None]
            found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
        return torch.stack(found, 2).transpose(1, 2).flatten(2)


class Cell(nn.Module):
    """A cell of torch's, with weights inside the chain of states, and a learned first state."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.cell, self.first = kind(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, found = self.first.expand(q.shape[0], -1), []
        state = (state, k[:, 0] * 0) if isinstance(self.cell, nn.LSTMCell) else state
        for row in (q * k).unbind(1):
            state = self.cell(row, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1) * v


class Written(nn.Module):
    """Rows are written into a tensor; a second state is the row before; a token may leave the state as it is;
    the last state is read after the loop."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found, state, before = torch.zeros_like(q), torch.zeros_like(q[:, 0]), torch.zeros_like(q[:, 0])
        for t in range(q.shape[1]):
            new = torch.tanh(self.mix(state) + q[:, t] + before)
            state, before = torch.where(k[:, t, :1] > 0, new, state), q[:, t]
            found[:, t] = state + v[:, t]
        return found * state.mean(-1, keepdim=True)[:, None].cos()


def check(mix: nn.Module, lengths=(11, 13), strict: bool = True) -> None:
    """Gradients are eager's at all lengths, and with ``strict`` every region streams."""
    model = Mixing(WIDTH, MixingLayer(mix, WIDTH)).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 4, "strict": strict})
    for length in lengths:
        ids = ids_of(2, length)
        truth = gradients(model, lambda ids=ids: model(ids))
        assert worst_error(gradients(model, lambda ids=ids: step(ids)), truth) < EXACT


@pytest.mark.long
@pytest.mark.parametrize(
    "mix",
    [Delta, lambda: Cell(nn.GRUCell), pytest.param(lambda: Cell(nn.LSTMCell), marks=pytest.mark.slow)],
    ids=["delta", "gru", "lstm"],
)
def test_loops_over_tokens_stream(mix):
    check(mix())


@pytest.mark.long
def test_rows_written_and_the_last_state_read():
    check(Written())


class Detached(nn.Module):
    """No gradient goes through part of the state."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, found = q.new_zeros(q.shape[0], WIDTH), []
        for t in range(q.shape[1]):
            state = torch.tanh(state.detach() * k[:, t] + q[:, t] + 0.5 * state)
            found.append(state)
        return torch.stack(found, 1) * v


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_detached_states():
    check(Detached(), lengths=(11,), strict=False)


@pytest.mark.parametrize("name", ["token_loop", "token_loop_back"])
def test_a_chunk_goes_on_from_a_state(name):
    sample = sample_of(f"streambp::{name}", 0, 0)
    op, (whole,), weight = sample.target, sample.outputs, sample.operands[-1]
    *grads, rows = sample.operands[:-1]
    parts = [slice(0, 2), slice(2, 6)] if name == "token_loop" else [slice(2, 6), slice(0, 2)]
    state = torch.zeros(1, 2, dtype=whole.dtype)
    for part in parts:
        found = op(*(g[part] for g in grads), [rows[part], weight], "sample", state)
        state = found[:1] if grads else found[-1:]
        torch.testing.assert_close(found, whole[part], rtol=EXACT, atol=EXACT)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled():
    check(Delta(), lengths=(11,))

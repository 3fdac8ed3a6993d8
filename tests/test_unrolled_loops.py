"""Loops over blocks of tokens that hand on a state, unrolled by Dynamo, stream."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from models import Mixing, MixingLayer, Plain, gradients, ids_of, worst_error
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile import NotStreamed, explain

pytestmark = pytest.mark.usefixtures("interpreted")
WIDTH, HEADS, BLOCK, EXACT = 16, 2, 16, 1e-10


def linear_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Slices of rows, results put together by `cat` (lightning attention, arXiv 2401.04658)."""
    length, found = q.shape[2], []
    state = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        rows, keys, values = (x[:, :, start:stop] for x in (q, k, v))
        inside = (rows @ keys.mT).tril() @ values
        found.append(inside + (rows * scale[:, : stop - start, None]) @ state)
        state = state * 0.9 + (keys * scale[:, : stop - start, None]).mT @ values
    return torch.cat(found, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Blocks picked one by one, results written into a tensor (arXiv 2406.06484): the state is needed for
    rows that make the next state."""
    q, k, v = (x.unflatten(2, (-1, BLOCK)) for x in (q, k, v))
    state = torch.zeros(*q.shape[:2], q.shape[4], v.shape[4], dtype=q.dtype)
    found, later = torch.zeros_like(v), torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    for i in range(q.shape[2]):
        new = v[:, :, i] - k[:, :, i] @ state
        scores = (q[:, :, i] @ k[:, :, i].mT).masked_fill_(later, 0)
        found[:, :, i] = q[:, :, i] @ state + scores @ new
        state = state * scale[:, :1, None].sigmoid() + k[:, :, i].mT @ new
    return found.flatten(2, 3)


def substituted(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The delta rule with a gate per feature (Kimi Linear, arXiv 2510.26692). The system of a block is solved
    row by row, in place, each from those above it."""
    q, k, v = (x.unflatten(2, (-1, BLOCK)) for x in (q, k, v))
    gate = (k * scale[:, None, :, None]).sigmoid().log().cumsum(3)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu()
    decay = (gate.unsqueeze(-2) - gate.unsqueeze(-3)).masked_fill(later.triu(1)[..., None], -torch.inf).exp()
    solved = -(k.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1).masked_fill(later, 0)
    for i in range(1, BLOCK):
        row, above = solved[..., i, :i].clone(), solved[..., :i, :i].clone()
        solved[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    solved = solved + torch.eye(BLOCK, dtype=q.dtype)
    new, old = solved @ v, solved @ (k * gate.exp())
    state, found = torch.zeros(*q.shape[:2], q.shape[4], v.shape[4], dtype=q.dtype), torch.zeros_like(v)
    for i in range(q.shape[2]):
        scores = (q[:, :, i].unsqueeze(-2) * k[:, :, i].unsqueeze(-3) * decay[:, :, i]).sum(-1)
        rows = new[:, :, i] - old[:, :, i] @ state
        found[:, :, i] = (q[:, :, i] * gate[:, :, i].exp()) @ state + scores.masked_fill(
            later.triu(1), 0
        ) @ rows
        left = k[:, :, i] * (gate[:, :, i, -1:] - gate[:, :, i]).exp()
        state = state * gate[:, :, i, -1].exp().unsqueeze(-1) + left.mT @ rows
    return found.flatten(2, 3)


def split_rows(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """All blocks cut at once, in front of the loop; two states."""
    found = []
    state, norm = (
        torch.zeros(*q.shape[:2], q.shape[3], v.shape[3]).to(q),
        torch.zeros(*q.shape[:2], q.shape[3]).to(q),
    )
    for rows, keys, values in zip(*(x.split(BLOCK, 2) for x in (q.exp(), k.exp(), v))):
        weights = (rows @ keys.mT).tril()
        total = weights.sum(-1) + (rows @ norm[..., None])[..., 0]
        found.append((weights @ values + rows @ state) / total[..., None])
        state, norm = state + keys.mT @ values, norm + keys.sum(2)
    return torch.cat(found, 2)


def block_before(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """What is handed on is the block before itself."""
    found, keys_before, values_before = (
        [],
        torch.zeros_like(k[:, :, :BLOCK]),
        torch.zeros_like(v[:, :, :BLOCK]),
    )
    for rows, keys, values in zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2)):
        scores = torch.cat([rows @ keys_before.mT, (rows @ keys.mT).tril()], -1) / BLOCK
        found.append(scores @ torch.cat([values_before, values], 2))
        keys_before, values_before = keys, values
    return torch.cat(found, 2)


def two_blocks_before(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """An iteration reads what the one before the last has left; the first two read zeros."""
    found, nothing = [], torch.zeros(*v.shape[:2], BLOCK, v.shape[3], dtype=v.dtype)
    last, before_last = nothing, nothing
    for rows, keys, values in zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2)):
        found.append((rows * before_last + (rows @ keys.mT).tril() @ values).tanh())
        last, before_last = found[-1], last
    return torch.cat(found, 2)


def exchanged_states(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Two states change places in every iteration."""
    found, one = [], torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    other = one
    for rows, keys, values in zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2)):
        found.append(rows @ one)
        one, other = other, one + keys.mT @ values
    return torch.cat(found, 2)


def states_out(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The last state is read after the loop, too."""
    state, found = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype), []
    for rows, keys, values in zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2)):
        found.append(rows @ state + (rows @ keys.mT).tril() @ values)
        state = state.tanh() + keys.mT @ values
    return torch.cat(found, 2) * state.mean().cos()


def detached(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """No gradient goes through the means of a block's values."""
    state, found = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype), []
    for rows, keys, values in zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2)):
        values = values * values.mean(2, keepdim=True).detach()
        found.append(rows @ state + (rows @ keys.mT).tril() @ values)
        state = state + keys.mT @ values
    return torch.cat(found, 2)


def padded(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The delta rule at any length, as Qwen3.5 has it. Texts of equally many blocks share a graph."""
    length = q.shape[2]
    whole = [F.pad(x, (0, 0, 0, (BLOCK - length % BLOCK) % BLOCK)) for x in (q, k, v)]
    return delta_rule(*whole, scale)[:, :, :length]


def fused(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Values that are split into three before a loop, which may have three blocks (Kimi Linear). Decays of
    pairs, which are wide, are made of others."""
    q, k, more = torch.cat([q, k, k * 2], -1).split(q.shape[-1], -1)
    q, k, v = (x.unflatten(2, (-1, BLOCK)) for x in (q, k + more / 10, v))
    decay = (v.unsqueeze(-2) - v.unsqueeze(-3)).square().neg().exp()
    state, found = torch.zeros(*q.shape[:2], q.shape[4], v.shape[4], dtype=q.dtype), torch.zeros_like(v)
    for i in range(q.shape[2]):
        scores = (q[:, :, i].unsqueeze(-2) * k[:, :, i].unsqueeze(-3) * decay[:, :, i]).sum(-1).tril()
        found[:, :, i] = q[:, :, i] @ state + scores @ v[:, :, i]
        state = state * 0.9 + k[:, :, i].mT @ v[:, :, i]
    return found.flatten(2, 3)


class InHeads(nn.Module):
    """``mix`` with tokens behind the heads."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q / 4, k / 4, v / 4))
        return self.mix(q, k, v, scale).transpose(1, 2).flatten(2)


def model_of(*mixers) -> Mixing:
    return Mixing(WIDTH, *(MixingLayer(InHeads(m), WIDTH, weight=(HEADS, BLOCK)) for m in mixers)).double()


def check(mix, length: int, strict: bool = True, layers: int = 1) -> None:
    """Gradients are eager's, and with ``strict`` every region streams."""
    model, ids = model_of(*[mix] * layers), ids_of(2, length)
    truth = gradients(model, lambda: model(ids))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32, "strict": strict})
    assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT


@pytest.mark.long
@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(linear_attention, marks=pytest.mark.slow),
        delta_rule,
        pytest.param(substituted, marks=pytest.mark.slow),
        pytest.param(split_rows, marks=pytest.mark.slow),
        pytest.param(states_out, marks=pytest.mark.slow),
    ],
)
def test_loops_stream(mix):
    check(mix, 4 * BLOCK, layers=2 if mix is delta_rule else 1)


@pytest.mark.long
def test_other_splits_into_as_many_are_no_blocks():
    check(fused, 3 * BLOCK, layers=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "mix, length",
    [
        pytest.param(linear_attention, 70, marks=pytest.mark.slow),
        (linear_attention, 32),
        (block_before, 64),
        (two_blocks_before, 96),
        (exchanged_states, 96),
        (detached, 64),
    ],
)
def test_gradients_of_other_loops_are_exact(mix, length):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        check(mix, length, strict=False)


@pytest.mark.long
def test_padded_blocks_stream_at_any_length():
    """From the second length on, rows are of any number, and blocks as many as the unrolled loop has."""
    model = model_of(padded)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32, "strict": True})
    for length in (70, 75, 66, 90):
        ids = ids_of(2, length)
        truth = gradients(model, lambda ids=ids: model(ids))
        assert worst_error(gradients(model, lambda ids=ids: step(ids)), truth) < EXACT


def test_iterations_that_do_different_things_stay_as_they_are():
    def mix(q, k, v, scale):
        state, found = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype), []
        for i, (rows, keys, values) in enumerate(
            zip(q.split(BLOCK, 2), k.split(BLOCK, 2), v.split(BLOCK, 2))
        ):
            found.append(rows @ (state.tanh() if i % 2 else state) + (rows @ keys.mT).tril() @ values)
            state = state + keys.mT @ values
        return torch.cat(found, 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        check(mix, 64, strict=False)


def test_what_is_written_in_part_is_a_new_value():
    """Names of one piece of memory, made before a write and read behind it; writes through names of names."""

    def mix(q, k, v, scale):
        blocks = v.unflatten(2, (-1, BLOCK))
        made = blocks * 2
        first, corner = made[..., 0, :], made[..., 1:, :][..., :2, 1:]
        made[..., 2, :] = first + made[..., 3, :]
        corner[..., 0, :] = made[..., 2, 1:] + first[..., 1:]
        first.copy_(corner[..., 0, :1].expand(first.shape))
        made[..., 4, :] = 0.5
        return (made + corner.sum((-1, -2))[..., None, None] - first.unsqueeze(-2)).flatten(2, 3)

    check(mix, 64)


@pytest.mark.long
def test_gradients_of_blocks_share_what_they_need():
    """In a body that computes several of them, the rows of a block are made once."""
    model, ids = model_of(substituted), ids_of(2, 64)
    report = explain(lambda ids: model(ids), ids, streambp_options={"chunk_size": 32})
    bodies = [body for region in report.regions if region.backward for body in region.backward.bodies]
    made = [
        Counter(
            str(n.args) for n in body.graph.graph.nodes if n.target is torch.ops.aten.constant_pad_nd.default
        )
        for body in bodies
    ]
    assert any(made) and all(count == 1 for found in made for count in found.values())


@pytest.mark.slow
def test_blocks_written_into_a_value_that_is_read_before():
    """Nothing of it may be erased or taken for a value of one time."""

    def mix(q, k, v, scale):
        v = v.unflatten(2, (-1, BLOCK))
        found = torch.ones_like(v)
        before = found.sum(3)
        for i in range(v.shape[2]):
            found[:, :, i] = v[:, :, i] * found[:, :, i - 1].mean()
        return (found * before[..., None, :]).flatten(2, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        check(mix, 64, strict=False)


class Decaying(nn.Module):
    """Linear attention with stored decays, which have a dimension for the rows of a block."""

    def __init__(self):
        super().__init__()
        self.register_buffer("decay", torch.rand(HEADS, BLOCK, 1, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return linear_attention(q, k, v, self.decay[..., 0])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.slow
def test_the_place_in_a_block_is_no_token():
    model, ids = model_of(Decaying(), softmax_attention, Decaying()), ids_of(2, 4 * BLOCK)
    truth = gradients(model, lambda: model(ids))
    report = explain(model, ids, streambp_options={"chunk_size": 32})
    assert report.lengths == [4 * BLOCK]
    torch._dynamo.reset()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32, "strict": True})
    assert worst_error(gradients(model, lambda: step(ids)), truth) < EXACT


class Segments(Plain):
    """Segments of a text one after another, which pass on memory tokens (arXiv 2207.06881)."""

    def __init__(self, inside: bool):
        super().__init__(width=16, layers=1)
        self.memory, self.inside = nn.Parameter(torch.randn(4, 16)), inside

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory = write = self.memory.expand(len(ids), -1, -1)
        found, total = [], 0.0
        for part, wanted in zip(ids.split(32, 1), labels.split(32, 1)):
            x = torch.cat((memory, self.embed(part), write), 1)
            for layer in self.layers:
                x = layer(x)
            found.append(x[:, 4:-4])
            memory = x[:, -4:]
            total = total + self.loss(found[-1], wanted) if self.inside else total
        return total if self.inside else self.loss(torch.cat(found, 1), labels)


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_segments_with_memory_tokens_stream(inside):
    """The layers stream in each segment, and the head over all of them, or in each."""
    model, ids = Segments(inside).double(), ids_of(2, 64)
    truth = gradients(model, lambda: model(ids, ids))
    options = {"chunk_size": 16, "strict": not inside}  # labels in segments are rows of no one sequence
    step = torch.compile(model, backend="streambp", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        assert worst_error(gradients(model, lambda: step(ids, ids)), truth) < EXACT
    share = 1 if inside else 1 / 2
    assert peak(lambda: step(ids, ids).backward()) < share * peak(lambda: model(ids, ids).backward())

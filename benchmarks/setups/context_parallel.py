"""Sequences split over processes: each has a part of the tokens, and attention exchanges keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

from .decoder import LAYERS, VOCABULARY, WIDTH, ids_of
from .measurement import Job, Setup, Way, gradients

HEADS = 4


def places(length: int, rank: int, world: int, zigzag: bool) -> Tensor:
    """The positions of the tokens of a process: a run of them, or one from the head and one from the tail."""
    if not zigzag:
        return torch.arange(length).chunk(world)[rank]
    parts = torch.arange(length).chunk(2 * world)
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]])


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[batch, heads, tokens, features]`` by the tokens' positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self, attend: Callable):
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q, self.k, self.v))
        a = self.attend(turned(q, positions), turned(k, positions), v, positions)
        return self.out(a.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend: Callable):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(attend)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, attend: Callable, checkpointed: bool):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([Block(attend) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, positions, use_reentrant=False)
                if self.checkpointed
                else layer(x, positions)
            )
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def whole(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention of one process that has all tokens."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def world() -> int:
    return dist.get_world_size()


def gathered(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """All keys and values at once, in the order of processes, behind a mask of positions."""
    k, v = (all_gather_tensor_autograd(t.contiguous(), 2, dist.group.WORLD) for t in (k, v))
    of_keys = all_gather_tensor_autograd(positions, 0, dist.group.WORLD)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=positions[:, None] >= of_keys)


def gathered_in_order(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """All keys and values at once, where a process has a run of tokens: the mask is that of its place."""
    k, v = (all_gather_tensor_autograd(t.contiguous(), 2, dist.group.WORLD) for t in (k, v))
    own, tokens = q.shape[2], k.shape[2]
    rows = torch.arange(own) + own * dist.get_rank()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rows[:, None] >= torch.arange(tokens))


def partial_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to some keys, and the log of the sum of its exponentials."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    return (scores - total).exp() @ v, total


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (a, s), (b, t) = one, other
    total = torch.logaddexp(s, t)
    return (s - total).exp() * a + (t - total).exp() * b, total


def sent_on(x: Tensor) -> Tensor:
    """What the process before sends, while this one sends its own to the next."""
    n, rank = world(), dist.get_rank()
    there, here = [0] * n, [0] * n
    there[(rank + 1) % n] = here[(rank - 1) % n] = x.shape[0]
    return all_to_all_single_autograd(x.contiguous(), here, there, dist.group.WORLD)


def ring(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The positions go around as well, and a mask says what is seen (any order of tokens)."""
    found = partial_attention(q, k, v, positions[:, None] >= positions)
    of_keys = positions
    for _ in range(1, world()):
        k, v, of_keys = sent_on(k), sent_on(v), sent_on(of_keys)
        seen = positions[:, None] >= of_keys
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
        total = scores.logsumexp(-1, keepdim=True)
        found = merged(found, ((scores - total).exp() @ v, total))
    return found[0]


def ring_of_halves(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Each process has one part from the head and one from the tail of the sequence: equal work for all."""
    rank, half = dist.get_rank(), q.shape[2] // 2
    causal = torch.ones(2 * half, 2 * half, dtype=torch.bool).tril()
    found = partial_attention(q, k, v, causal)
    for turn in range(1, world()):
        k, v = sent_on(k), sent_on(v)
        if turn <= rank:
            found = merged(found, partial_attention(q, k[:, :, :half], v[:, :, :half], None))
        else:
            (a, b), (s, t) = (x.split(half, 2) for x in found)
            b, t = merged((b, t), partial_attention(q[:, :, half:], k, v, None))
            found = torch.cat([a, b], 2), torch.cat([s, t], 2)
    return found[0]


def ulysses(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """All tokens of a part of the heads."""
    n = world()

    def exchange(parts: Tensor) -> Tensor:
        return all_to_all_single_autograd(parts.contiguous(), None, None, dist.group.WORLD)

    def by_heads(x: Tensor) -> Tensor:
        parts = exchange(torch.stack(x.chunk(n, 1)))  # [n, b, h/n, t/n, d]
        return torch.cat(parts.unbind(0), 2)

    def by_tokens(x: Tensor) -> Tensor:
        parts = exchange(torch.stack(x.chunk(n, 2)))
        return torch.cat(parts.unbind(0), 1)

    q, k, v = by_heads(q), by_heads(k), by_heads(v)
    return by_tokens(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def context_parallel(way: Way, attend: Callable = whole, zigzag: bool = False) -> Job:
    """Every process has the whole model and its tokens; gradients are added up."""
    split = attend is not whole
    torch.manual_seed(0)
    module = Model(attend, way is Way.CHECKPOINTED).double()
    loss = way.compile(module)

    def step(length: int) -> None:
        module.zero_grad()
        ids = ids_of(length)
        rank, parts = (dist.get_rank(), world()) if split else (0, 1)
        own = places(length, rank, parts, zigzag)
        loss(ids[:, own], ids.roll(-1, 1)[:, own], own).backward()

    return Job(step, functools.partial(total, module) if split else functools.partial(gradients, module))


def total(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of all processes together."""
    found = {name: grad.clone() for name, grad in gradients(module).items()}
    for grad in found.values():
        dist.all_reduce(grad)
    return found


unparallel = context_parallel
HALVES = "Context parallel, ring of halves from head and tail"
SETUPS: dict[str, Setup] = {
    f"Context parallel, {name}": functools.partial(context_parallel, attend=attend, zigzag=zigzag)
    for name, attend, zigzag in (
        ("keys gathered", gathered_in_order, False),
        ("keys gathered, mask of positions", gathered, False),
        ("keys gathered, head and tail", gathered, True),
        ("ring", ring, False),
        ("ring, head and tail", ring, True),
        ("ring of halves from head and tail", ring_of_halves, True),
        ("Ulysses in the graph", ulysses, False),
    )
}

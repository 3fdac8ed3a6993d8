"""Experts split over processes: tokens go to the process that has their expert, and come back."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.utils.checkpoint import checkpoint

from .decoder import LAYERS, VOCABULARY, WIDTH, Block, ids_of, next_token_loss
from .measurement import Job, Setup, Way

EXPERTS, INNER = 4, 2 * WIDTH


class Experts(nn.Module):
    """Tokens choose one expert each; this process has the experts ``first`` to ``first + own``.

    exchange  how tokens go to their experts: gets the module, the tokens, and the expert of each
    """

    def __init__(self, exchange: Callable, world: int):
        super().__init__()
        self.exchange, self.world, self.own = exchange, world, EXPERTS // world
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * INNER**-0.5)

    def part(self, rank: int) -> None:
        """Keep the experts of a process."""
        for name in ("up", "down"):
            whole = getattr(self, name).data
            setattr(self, name, nn.Parameter(whole[rank * self.own :][: self.own].clone()))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        return (weight[:, None] * self.exchange(self, flat, chosen)).view(x.shape)


def by_masks(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """All experts on this process."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        own = (F.silu(x @ experts.up[e]) @ experts.down[e]) * (chosen == e)[:, None]
        out = out + own
    return out


def grouped(experts: Experts, x: Tensor, counts: list[int]) -> Tensor:
    """Tokens sorted by expert, through their experts."""
    parts = x.split(counts)
    done = [F.silu(p @ u) @ d for p, u, d in zip(parts, experts.up, experts.down)]
    return torch.cat(done)


def by_routing(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """As torchtitan does: counts go first, then tokens in parts of so many."""
    order = chosen.argsort(stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, chosen, torch.ones_like(chosen))
    with torch.no_grad():
        theirs = all_to_all_single(counts, None, None, dist.group.WORLD).view(experts.world, experts.own)
    sent = counts.view(experts.world, -1).sum(1).tolist()
    received = theirs.sum(1).tolist()
    got = all_to_all_single_autograd(x[order], received, sent, dist.group.WORLD)
    of_expert = torch.arange(experts.own).repeat(experts.world)
    of_token = of_expert.repeat_interleave(theirs.flatten())
    again = of_token.argsort(stable=True)
    done = grouped(experts, got[again], theirs.sum(0).tolist())
    back = torch.empty_like(done).index_put((again,), done)
    out = all_to_all_single_autograd(back, sent, received, dist.group.WORLD)
    return torch.empty_like(x).index_put((order,), out)


@torch.compiler.disable
def apart(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    return by_routing(experts, x, chosen)


def by_capacity(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """As GShard does: so many places for each expert, an exchange of equal parts."""
    places = x.shape[0]
    one = F.one_hot(chosen, EXPERTS)
    place = (one.cumsum(0) * one).sum(-1) - 1
    where = (one[:, :, None] * F.one_hot(place, places)[:, None]).to(x.dtype)  # token, expert, place
    sent = torch.einsum("tec,td->ecd", where, x)
    got = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
    got = got.unflatten(0, (experts.world, experts.own))
    done = torch.einsum(
        "wech,ehd->wecd", F.silu(torch.einsum("wecd,edh->wech", got, experts.up)), experts.down
    )
    out = all_to_all_single_autograd(done.flatten(0, 1).contiguous(), None, None, dist.group.WORLD)
    return torch.einsum("tec,ecd->td", where, out)


class MoEBlock(Block):
    def __init__(self, exchange: Callable, world: int):
        super().__init__()
        self.up = self.down = None
        self.experts = Experts(exchange, world)

    def mapped(self, x: Tensor) -> Tensor:
        return self.experts(x)


class Model(nn.Module):
    def __init__(self, exchange: Callable, world: int, checkpointed: bool):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([MoEBlock(exchange, world) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return next_token_loss(self.head(self.norm(x)), ids)


def expert_parallel(way: Way, exchange: Callable = by_masks) -> Job:
    """Every process has sequences of its own, all of the attention and a part of the experts."""
    split = exchange is not by_masks
    world = dist.get_world_size()
    torch.manual_seed(0)
    module = Model(exchange, world if split else 1, way is Way.CHECKPOINTED).double()
    for layer in module.layers if split else ():
        layer.experts.part(dist.get_rank())
    loss = way.compile(module)
    ranks = [dist.get_rank()] if split else range(world)

    def step(length: int) -> None:
        module.zero_grad()
        for rank in ranks:
            loss(ids_of(length, seed=rank)).backward()

    def values() -> dict[str, Tensor]:
        found = {}
        for name, p in module.named_parameters():
            own = name.rsplit(".", 1)[-1] in ("up", "down") and "experts" in name
            grad = p.grad.clone()
            if split and own:
                parts = [torch.empty_like(grad) for _ in range(world)]
                dist.all_gather(parts, grad)
                grad = torch.cat(parts)
            elif split:
                dist.all_reduce(grad)
            found[name] = grad
        return found

    return Job(step, values)


unparallel = expert_parallel
ROUTED = "Expert parallel, split sizes from data"
SETUPS: dict[str, Setup] = {
    ROUTED: functools.partial(expert_parallel, exchange=by_routing),
    "Expert parallel, exchange not compiled": functools.partial(expert_parallel, exchange=apart),
    "Expert parallel, equal parts": functools.partial(expert_parallel, exchange=by_capacity),
}

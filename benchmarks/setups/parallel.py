"""Layers of a decoder split over processes: by features (tensor parallel), by tokens (Ulysses), by layers
(pipelining), or their head alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .decoder import LAYERS, WIDTH, Decoder, decoder, ids_of, next_token_loss
from .measurement import STREAMING, Job, Way, gradients

HEADS = 4


class ParallelBlock(nn.Module):
    """A decoder block whose heads and hidden features `parallelize_module` can split."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


SPLIT = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


def mesh_of(name: str):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def tensor_parallel(way: Way, compiled: str = "all") -> Job:
    """Megatron's split by `parallelize_module`: hidden states are plain tensors, those inside of a layer
    DTensors.

    compiled  ``"all"``, or only ``"head"`` and loss, where no DTensors are
    """
    module = decoder(checkpointed=way is Way.CHECKPOINTED)
    torch.manual_seed(0)
    module.layers = nn.ModuleList([ParallelBlock().double() for _ in range(LAYERS)])
    for layer in module.layers:
        parallelize_module(layer, mesh_of("tp"), {name: style() for name, style in SPLIT.items()})
    head = way.compile(lambda x, ids: next_token_loss(module.head(x), ids))
    loss = way.compile(module) if compiled == "all" else lambda ids: head(module.hidden(ids), ids)

    def step(length: int) -> None:
        module.zero_grad()
        loss(ids_of(length)).backward()

    return Job(step, lambda: gradients(module))


def sharded_head(way: Way, gathered: str = "outside") -> Job:
    """A head that FSDP2 has freed: its weight is a DTensor, gathered by ``full_tensor()``.

    gathered  ``"inside"`` or ``"outside"`` of the compiled function of head and loss
    """
    module = decoder(checkpointed=way is Way.CHECKPOINTED)
    module.forward = module.hidden
    for part in (*module.layers, module.head, module):
        fully_shard(part, mesh=mesh_of("dp"))
    hidden = way.compile(module)

    @way.compile
    def loss_of(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        whole = weight.full_tensor() if gathered == "inside" else weight
        return next_token_loss(F.linear(x, whole), ids)

    def step(length: int) -> None:
        module.zero_grad()
        ids = ids_of(length, seed=dist.get_rank())
        weight = module.head.weight
        loss_of(hidden(ids), weight if gathered == "inside" else weight.full_tensor(), ids).backward()

    return Job(step, lambda: gradients(module))


class UlyssesBlock(ParallelBlock):
    """Each process holds a part of the tokens, and all of them for its part of the heads in attention."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (self.by_heads(t) for t in (q, k, v))
        a = self.attend(q, k, v)
        x = x + self.out(self.by_tokens(a).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    @torch.compiler.disable
    def by_heads(self, x: Tensor) -> Tensor:
        """``[batch, own tokens, heads, features]`` to ``[batch, tokens, own heads, features]``."""
        world = dist.get_world_size()
        parts = torch.stack(x.chunk(world, 2))
        return torch.cat(exchanged(parts).unbind(0), 1)

    @torch.compiler.disable
    def by_tokens(self, x: Tensor) -> Tensor:
        """The inverse."""
        parts = torch.stack(x.chunk(dist.get_world_size(), 1))
        return torch.cat(exchanged(parts).unbind(0), 2)


def exchanged(parts: Tensor) -> Tensor:
    """Part ``i`` goes to process ``i``."""
    return all_to_all_single_autograd(parts.contiguous(), None, None, dist.group.WORLD)


def ulysses(way: Way) -> Job:
    """Sequences that are split over processes; every other layer operation is of own tokens only."""
    module = decoder(checkpointed=way is Way.CHECKPOINTED)
    torch.manual_seed(0)
    module.layers = nn.ModuleList([UlyssesBlock().double() for _ in range(LAYERS)])
    module.forward = functools.partial(loss_of_own_tokens, module)
    loss = way.compile(module)

    def step(length: int) -> None:
        module.zero_grad()
        ids = ids_of(length)
        own = length // dist.get_world_size()
        own_ids = ids[:, own * dist.get_rank() :][:, :own]
        loss(own_ids, own_ids.roll(1, 1)).backward()

    return Job(step, lambda: gradients(module))


def loss_of_own_tokens(module: Decoder, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(module.head(module.hidden(ids)).flatten(0, 1), targets.flatten(), reduction="sum")


class Stage(nn.Module):
    """Half of a decoder: its first layers behind the embedding, or its last layers with norm and head."""

    def __init__(self, module: Decoder, first: bool):
        super().__init__()
        self.embed = module.embed if first else nn.Identity()
        half = LAYERS // 2
        self.layers = module.layers[:half] if first else module.layers[half:]
        self.head = nn.Identity() if first else nn.Sequential(module.norm, module.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pipelined(way: Way, schedule: type = ScheduleGPipe) -> Job:
    """Two stages, two micro-batches; the loss is outside of the last stage."""
    rank = dist.get_rank()
    module = Stage(decoder(), first=rank == 0)
    if way is Way.STREAMED:
        module.compile(**STREAMING)

    def step(length: int) -> None:
        module.zero_grad()
        stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
        run = schedule(stage, n_microbatches=2, loss_fn=next_token_loss)
        ids = ids_of(length)
        run.step(ids) if rank == 0 else run.step(target=ids, losses=[])

    return Job(step, lambda: gradients(module))


SETUPS: dict[str, Callable[[Way], Job]] = {
    "Tensor parallel": tensor_parallel,
    "Tensor parallel, head and loss compiled": functools.partial(tensor_parallel, compiled="head"),
    "FSDP2, head gathered by full_tensor()": sharded_head,
    "FSDP2, head gathered inside": functools.partial(sharded_head, gathered="inside"),
    "Context parallel (Ulysses)": ulysses,
    "Pipelining, GPipe": pipelined,
    "Pipelining, 1F1B": functools.partial(pipelined, schedule=Schedule1F1B),
}

REASONS = {"Tensor parallel, head and loss compiled": "(the layers are not compiled)"}

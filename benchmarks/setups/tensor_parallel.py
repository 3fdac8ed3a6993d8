"""Layers of a decoder split over processes by `parallelize_module`: by features, and between layers by tokens
(sequence parallel); with the head split by its vocabulary."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from .decoder import LAYERS, VOCABULARY, WIDTH, ids_of, next_token_loss
from .measurement import Job, Setup, Way, gradients

HEADS = 4


class Attention(nn.Module):
    """Causal attention over as many heads as the process has."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Token ids in, logits out; a last norm and the head make them of hidden states."""

    def __init__(self, checkpointed: bool):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(self.head(self.norm(x)), ids)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.hidden(ids), ids)


def by_features(module: Model, mesh: DeviceMesh) -> None:
    """Megatron's split: every process has all hidden states, and a part of what is inside of a layer."""
    plan: dict = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in module.layers:
        parallelize_module(layer, mesh, plan)


def by_tokens(
    module: Model, mesh: DeviceMesh, local: bool = True, prepared: bool = True, returned: bool = False
) -> None:
    """The same, and between layers a process has a part of the tokens.

    local     hidden states are plain tensors; else DTensors
    prepared  tokens are gathered in front of attention and MLP, and scattered behind the MLP; else by their
              linear layers
    returned  they are scattered behind attention and MLP by the module, not by its last linear layer
    """
    own, everything = Shard(1), Replicate()
    row: dict = {"output_layouts": own, "use_local_output": local}
    plan: dict = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    column: dict = {} if prepared else {"input_layouts": own}
    plan |= {f"attention.{name}": ColwiseParallel(**column) for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(**row), "mlp.up": ColwiseParallel(**column)}
    plan["mlp.down"] = RowwiseParallel(**row)
    if prepared:
        for name in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(input_layouts=(own,), desired_input_layouts=(everything,))
            if returned:
                plan[name] = PrepareModuleInputOutput(
                    input_layouts=(own,),
                    desired_input_layouts=(everything,),
                    output_layouts=(Partial(),),
                    desired_output_layouts=(own,),
                )
    if returned:
        partial = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        plan |= {"attention.out": partial, "mlp.down": partial}
    for layer in module.layers:
        parallelize_module(layer, mesh, plan)
    embed = RowwiseParallel(input_layouts=everything, **row)
    parallelize_module(module, mesh, {"embed": embed, "norm": SequenceParallel()})


def with_tokens(module: Model, mesh: DeviceMesh) -> None:
    """Layers by tokens; the head makes all logits on every process."""
    by_tokens(module, mesh)
    parallelize_module(
        module, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    )


def with_vocabulary(module: Model, mesh: DeviceMesh, **options: bool) -> None:
    """Layers by tokens, and a loss of logits of which a process has a part of the vocabulary."""
    tied = module.head.weight is module.embed.weight
    by_tokens(module, mesh, **options)
    parallelize_module(
        module, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
    )
    if tied:
        module.head.weight = module.embed.weight


def tensor_parallel(
    way: Way,
    split: Callable[[Model, DeviceMesh], None] | None,
    tied: bool = False,
    by_layer: bool = False,
    sharded: bool = False,
) -> Job:
    """A model split over the processes.

    split     which layers are split, and how; None: none is, and every process trains all of it
    by_layer  each layer is compiled by itself, and so are the embedding, and head and loss
    sharded   two groups of processes split the model each, and FSDP2 shards what each process holds over them
    """
    torch.manual_seed(0)
    module = Model(way is Way.CHECKPOINTED).double()
    if tied:
        module.head.weight = module.embed.weight
    groups = 2 if sharded else 1
    mesh = init_device_mesh("cpu", (groups, dist.get_world_size() // groups), mesh_dim_names=("dp", "tp"))
    if split is not None:
        split(module, mesh["tp"])
    if sharded and split is not None:
        for part in (*module.layers, module):
            fully_shard(part, mesh=mesh["dp"])
    if by_layer:
        for layer in module.layers:
            layer.forward = way.compile(layer.forward)
        module.embedded, module.loss = way.compile(module.embedded), way.compile(module.loss)
    loss = module if by_layer else way.compile(module)
    seeds = range(groups) if split is None else [mesh.get_local_rank("dp")]

    def step(length: int) -> None:
        module.zero_grad()
        with loss_parallel() if split is not None else contextlib.nullcontext():
            for seed in seeds:
                (loss(ids_of(length, seed)) / len(seeds)).backward()

    return Job(step, lambda: gradients(module))


unparallel = functools.partial(tensor_parallel, split=None)
LOSS = with_vocabulary
SETUPS: dict[str, Setup] = {
    "Tensor parallel by features": functools.partial(tensor_parallel, split=by_features),
    "Tensor and sequence parallel": functools.partial(tensor_parallel, split=with_tokens),
    "Tensor, sequence and loss parallel": functools.partial(tensor_parallel, split=LOSS),
    "Tensor, sequence and loss parallel, gathered by each projection": functools.partial(
        tensor_parallel, split=functools.partial(LOSS, prepared=False)
    ),
    "Tensor, sequence and loss parallel, scattered by PrepareModuleOutput": functools.partial(
        tensor_parallel, split=functools.partial(LOSS, returned=True)
    ),
    "Tensor, sequence and loss parallel, hidden states as DTensors": functools.partial(
        tensor_parallel, split=functools.partial(LOSS, local=False)
    ),
    "Tensor, sequence and loss parallel, tied embeddings": functools.partial(
        tensor_parallel, split=LOSS, tied=True
    ),
    "Tensor, sequence and loss parallel, compiled layer by layer": functools.partial(
        tensor_parallel, split=LOSS, by_layer=True
    ),
    "Tensor, sequence and loss parallel, FSDP2 on a 2-D mesh": functools.partial(
        tensor_parallel, split=LOSS, sharded=True
    ),
}

"""FSDP2 (`fully_shard`) on gloo: per layer and for the whole, as its documentation does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from .decoder import Decoder, decoder, ids_of, next_token_loss
from .measurement import STREAMING, Job, Way, gradients, streamed


def fsdp2(
    way: Way,
    compiled: str = "after",
    loss: str = "inside",
    micro_batches: int = 1,
    root: dict[str, object] | None = None,
    head: dict[str, object] | None = None,
    model: dict[str, bool] | None = None,
    traced: bool = False,
    **options: object,
) -> Job:
    """A decoder whose layers, and the rest of it, are sharded.

    compiled       the model ``"after"`` or ``"before"`` sharding, its ``"layers"`` alone, or a ``"function"``
    loss           ``"inside"`` the model, or ``"outside"`` of it, from the logits that it returns
    micro_batches  the gradients of all but the last are not reduced
    root           options of `fully_shard` for what is no layer, beside ``options``
    head           options of `fully_shard` for norm and head, as a group of their own
    traced         the head's forward is compiled by itself, because Dynamo does not trace it in that group
    """
    module = decoder(checkpointed=way is Way.CHECKPOINTED, **(model or {}))
    if loss == "outside":
        module.forward = functools.partial(logits_of, module)
    if compiled == "before" and way is Way.STREAMED:
        module.compile(**STREAMING)
    if traced and way is Way.STREAMED:
        module.head.forward = torch.compile(module.head.forward, **STREAMING)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head is not None:
        fully_shard([module.norm, module.head], mesh=mesh, **{**options, **head})
    fully_shard(module, mesh=mesh, **{**options, **(root or {})})
    run = COMPILE[compiled](module) if way is Way.STREAMED else module

    def step(length: int) -> None:
        module.zero_grad()
        for i in range(micro_batches):
            module.set_requires_gradient_sync(i == micro_batches - 1)
            ids = ids_of(length, seed=10 * i + dist.get_rank())
            out = run(ids)
            (out if loss == "inside" else next_token_loss(out, ids)).backward()

    return Job(step, lambda: gradients(module), run)


def logits_of(module: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return module.head(module.hidden(ids))


def layers_alone(module: Decoder) -> Callable:
    for layer in module.layers:
        layer.compile(**STREAMING)
    return module


COMPILE: dict[str, Callable] = {
    "before": lambda module: module,
    "after": streamed,
    "function": lambda module: streamed(lambda ids: module(ids)),
    "layers": layers_alone,
}

RESHARDED = {"reshard_after_forward": True}
KEPT = {"reshard_after_forward": False}
SETUPS = {
    "FSDP2, compiled after sharding": fsdp2,
    "FSDP2, compiled before sharding": functools.partial(fsdp2, compiled="before"),
    "FSDP2, called by a compiled function": functools.partial(fsdp2, compiled="function"),
    "FSDP2, layers compiled one by one": functools.partial(fsdp2, compiled="layers"),
    "FSDP2, loss outside": functools.partial(fsdp2, loss="outside"),
    "FSDP2, loss outside, all resharded": functools.partial(fsdp2, loss="outside", root=RESHARDED),
    "FSDP2, nothing resharded": functools.partial(fsdp2, **KEPT),
    "FSDP2, all resharded": functools.partial(fsdp2, root=RESHARDED),
    "FSDP2, head in a group of its own": functools.partial(fsdp2, head={}),
    "FSDP2, head in a group that is kept": functools.partial(fsdp2, head=KEPT),
    "FSDP2, head in a group that is kept, forward compiled": functools.partial(fsdp2, head=KEPT, traced=True),
    "FSDP2, head in a group of its own, loss outside": functools.partial(fsdp2, head={}, loss="outside"),
    "FSDP2, head with its loss in a group of its own": functools.partial(
        fsdp2, head={}, model={"joined": True}
    ),
    "FSDP2, mixed precision": functools.partial(fsdp2, mp_policy=MixedPrecisionPolicy(torch.float32)),
    "FSDP2, CPU offload": functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, gradient accumulation": functools.partial(fsdp2, micro_batches=2),
    "FSDP2, tied weights": functools.partial(fsdp2, model={"tied": True}),
}

REASONS = {
    "FSDP2, layers compiled one by one": "(head and loss are not compiled: compile them as one function "
    "more, docs/trainers.md)"
}

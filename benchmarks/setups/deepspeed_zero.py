"""DeepSpeed's ZeRO on gloo; what must agree are weights after a step of SGD."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules

from .decoder import Block, HeadAndLoss, decoder, ids_of
from .measurement import STREAMING, Job, Way

BATCH = 2
BUCKET = 2**15  # numbers
SMALL = {
    "reduce_bucket_size": BUCKET,
    "allgather_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    "stage3_param_persistence_threshold": 0,
}


def configuration(stage: int, micro_batches: int, **zero: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage, **SMALL, **zero},
        "zero_allow_untested_optimizer": True,
    }


def name_process() -> None:
    """As DeepSpeed's launcher does."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))


def zero(
    way: Way,
    stage: int,
    compiled: str = "engine",
    leaves: bool = False,
    micro_batches: int = 1,
    **zero: object,
) -> Job:
    """A decoder in a DeepSpeed engine.

    stage          of ZeRO
    compiled       ``"engine"``: by ``engine.compile``; ``"before"``: the model, before ``initialize``
    leaves         layers, and a module of head and loss, are leaves, whose parameters are gathered together
    micro_batches  whose gradients are accumulated
    zero           further options of ``zero_optimization``
    """
    name_process()
    module = decoder(checkpointed=way is Way.CHECKPOINTED, joined=leaves)
    if leaves:
        set_z3_leaf_modules(module, [Block, HeadAndLoss])
    if way is Way.STREAMED and compiled == "before":
        module.compile(**STREAMING)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config=configuration(stage, micro_batches, **zero),
        dist_init_required=False,
    )
    if way is Way.STREAMED and compiled == "engine":
        engine.compile(backend="streambp", compile_kwargs={"options": STREAMING["options"]})

    def step(length: int) -> None:
        for i in range(micro_batches):
            engine.backward(engine(ids_of(length, seed=10 * i + dist.get_rank(), batch=BATCH)))
            engine.step()

    def values() -> dict[str, torch.Tensor]:
        return {n: safe_get_full_fp32_param(p) - before[n] for n, p in module.named_parameters()}

    return Job(step, values)


def of(stage: int, **options: object) -> Callable[[Way], Job]:
    return functools.partial(zero, stage=stage, **options)


SETUPS = {
    "DeepSpeed, ZeRO-1": of(1),
    "DeepSpeed, ZeRO-2": of(2),
    "DeepSpeed, ZeRO-2, compiled before": of(2, compiled="before"),
    "DeepSpeed, ZeRO-2, accumulated": of(2, micro_batches=2),
    "DeepSpeed, ZeRO-3": of(3),
    "DeepSpeed, ZeRO-3, leaf modules": of(3, leaves=True),
    "DeepSpeed, ZeRO-3, leaf modules, compiled before": of(3, leaves=True, compiled="before"),
}

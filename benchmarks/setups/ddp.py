"""DistributedDataParallel on gloo, its optimizer of Dynamo graphs at its default, with several buckets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .decoder import decoder, ids_of
from .measurement import STREAMING, Job, Way, gradients, streamed

BUCKET = 0.25  # MiB; a layer takes 0.2


def ddp(
    way: Way,
    compiled: str = "after",
    model: dict[str, bool] | None = None,
    micro_batches: int = 1,
    hook: Callable | None = None,
    watch: Callable[[str], object] | None = None,
    **options: object,
) -> Job:
    """A decoder under DistributedDataParallel.

    compiled       what is compiled: the model ``"before"`` wrapping or ``"in place"``, the wrapped one
                   ``"after"``, a ``"function"`` that calls it; ``"wrapped"``: by a backend that calls ours
    micro_batches  the gradients of all but the last are not reduced (``no_sync``)
    hook           reduces a bucket in place of DDP
    watch          is called with the name of each parameter when its gradient is there
    """
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**16
    module = decoder(checkpointed=way is Way.CHECKPOINTED, **(model or {}))
    wrap = functools.partial(DistributedDataParallel, bucket_cap_mb=BUCKET, **options)
    if way is Way.STREAMED and compiled == "in place":
        module.compile(**STREAMING)
    wrapped = wrap(way.compile(module)) if compiled == "before" else wrap(module)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    for name, parameter in module.named_parameters() if watch is not None else ():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: watch(name))
    loss = COMPILE[compiled](wrapped) if way is Way.STREAMED else wrapped

    def step(length: int) -> None:
        module.zero_grad(set_to_none=not options.get("gradient_as_bucket_view", False))
        for i in range(micro_batches):
            last = i == micro_batches - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss(ids_of(length, seed=10 * i + dist.get_rank())).backward()

    return Job(step, lambda: gradients(module))


def through_another(wrapped: DistributedDataParallel) -> Callable:
    """Compiled by a backend that is not of this package, and calls ours."""
    from streambp_compile.backend import streambp

    return torch.compile(
        wrapped, backend=lambda graph, inputs: streambp(graph, inputs, options=STREAMING["options"])
    )


COMPILE: dict[str, Callable] = {
    "before": lambda wrapped: wrapped,
    "in place": lambda wrapped: wrapped,
    "after": streamed,
    "function": lambda wrapped: streamed(lambda ids: wrapped(ids)),
    "wrapped": through_another,
}

SETUPS = {
    "DDP, compiled after wrapping": ddp,
    "DDP, compiled before wrapping": functools.partial(ddp, compiled="before"),
    "DDP, model.compile()": functools.partial(ddp, compiled="in place"),
    "DDP, called by a compiled function": functools.partial(ddp, compiled="function"),
    "DDP, no_sync": functools.partial(ddp, micro_batches=3),
    "DDP, static_graph": functools.partial(ddp, static_graph=True),
    "DDP, unused parameters": functools.partial(ddp, model={"unused": True}, find_unused_parameters=True),
    "DDP, tied weights": functools.partial(ddp, model={"tied": True}),
    "DDP, gradient_as_bucket_view": functools.partial(ddp, gradient_as_bucket_view=True),
    "DDP, a backend that calls ours": functools.partial(ddp, compiled="wrapped"),
}

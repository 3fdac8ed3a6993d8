"""Ways to compile and to call: dynamic shapes, one graph, marked dimensions, functional calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .decoder import Decoder, decoder, ids_of
from .measurement import Job, Way, gradients, streamed


def compiled(way: Way, prepare: Callable[[Decoder], Callable]) -> Job:
    """A decoder, and how it is compiled."""
    model = decoder(checkpointed=way is Way.CHECKPOINTED)
    loss = prepare(model) if way is Way.STREAMED else model

    def step(length: int) -> None:
        model.zero_grad()
        loss(ids_of(length)).backward()

    return Job(step, lambda: gradients(model))


def marked(model: Decoder) -> Callable:
    run = streamed(model)

    def call(ids: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(ids, 1)
        return run(ids)

    return call


def functional(model: Decoder) -> Callable:
    parameters = dict(model.named_parameters())
    return streamed(lambda ids: torch.func.functional_call(model, parameters, (ids,)))


def in_place(model: Decoder) -> Callable:
    from streambp_compile.trainer import enable

    return enable(model, chunk_size=16)


PREPARED: dict[str, Callable] = {
    "torch.compile": streamed,
    "dynamic=True": functools.partial(streamed, dynamic=True),
    "dynamic=False": functools.partial(streamed, dynamic=False),
    "fullgraph=True": functools.partial(streamed, fullgraph=True),
    "mark_dynamic": marked,
    "functional_call": functional,
    "trainer.enable": in_place,
}
SETUPS = {name: functools.partial(compiled, prepare=prepare) for name, prepare in PREPARED.items()}

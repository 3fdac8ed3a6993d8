"""The device that kernels run on: a value's own, or one that a simulation without it says CPU tensors are on.

A build of torch without CUDA cannot make CUDA tensors, not even fake ones with gradients. A plan for a GPU
then runs on fake CPU tensors that stand for the GPU's, so that the GPU's kernels are chosen and counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

CAPABILITY: ContextVar[tuple[int, int] | None] = ContextVar("CAPABILITY", default=None)


@contextlib.contextmanager
def cpu_stands_for_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, kernels are chosen as if tensors on the CPU were on a GPU of this compute capability."""
    token = CAPABILITY.set(capability)
    try:
        yield
    finally:
        CAPABILITY.reset(token)


def simulated_capability() -> tuple[int, int] | None:
    """The compute capability of the GPU that CPU tensors stand for; None where they stand for none."""
    return CAPABILITY.get()


def device_type(value: torch.Tensor | torch.device) -> str:
    """``cpu``, ``cuda`` or any other device type of torch: where kernels for this value run."""
    kind = value.device.type if isinstance(value, torch.Tensor) else value.type
    return "cuda" if kind == "cpu" and CAPABILITY.get() is not None else kind

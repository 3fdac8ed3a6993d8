"""The device that kernels run on: a value's own, or a simulated one that CPU tensors stand for.

A build of torch without CUDA cannot make CUDA tensors, not even fake ones with gradients. A plan for a
GPU then runs on fake CPU tensors that stand for the GPU's, so that the GPU's kernels are chosen and
counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

CAPABILITY: ContextVar[tuple[int, int] | None] = ContextVar("CAPABILITY", default=None)


@contextlib.contextmanager
def cpu_stands_for_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Choose kernels inside as if tensors on the CPU were on a GPU of this compute capability."""
    token = CAPABILITY.set(capability)
    try:
        yield
    finally:
        CAPABILITY.reset(token)


def simulated_capability() -> tuple[int, int] | None:
    """Return the compute capability of the GPU that CPU tensors stand for, or None."""
    return CAPABILITY.get()


def device_type(value: torch.Tensor | torch.device) -> str:
    """Return the type of the device on which kernels for this value run. It is ``cpu``, ``cuda`` or any other
    device type of torch."""
    kind = value.device.type if isinstance(value, torch.Tensor) else value.type
    return "cuda" if kind == "cpu" and CAPABILITY.get() is not None else kind

"""Which device a region is planned for: asked of torch, or named by the user."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .passes.device import REFERENCE_CPU, Device, derived, known, named, with_memory


def planned_for(name: str | None, values: Iterable[object]) -> Device:
    """The device of that name, or else the first GPU that a tensor among ``values`` is on, or else the stated CPU.

    Raises ValueError for a name that is not known.
    """
    if name is not None:
        return named(name)
    gpus = (v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    found = next(gpus, None)
    return REFERENCE_CPU if found is None else described(found.index or 0)


@functools.cache
def described(index: int) -> Device:
    """A GPU of this machine: the row of its name, or what its driver says of it; its memory as its driver says."""
    try:
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError):  # fake tensors on a machine without CUDA: the name is all there can be
        raise ValueError("tensors are on CUDA and this machine has none: name the device to plan for, "
                         "options={'device': 'H100'}") from None
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # no context can be made here
        free = None
    found = known(properties.name, properties.total_memory)
    if found is not None:
        return with_memory(found, properties.total_memory, free)
    made = derived(properties.name, (properties.major, properties.minor), properties.total_memory, properties.multi_processor_count,
                   getattr(properties, "clock_rate", 0) * 1e3, getattr(properties, "memory_clock_rate", 0) * 1e3,
                   getattr(properties, "memory_bus_width", 0), properties.L2_cache_size)
    return with_memory(made, properties.total_memory, free)

"""The device that a region is compiled for, as planning and the choice of kernels need it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import torch

from .passes.kernels.attention import Target
from .passes.kernels.simulated_device import device_type, simulated_capability
from .passes.planning.devices import REFERENCE_CPU, Device, derived, known, named, with_memory

SWITCHES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}


def planned_for(name: str | None, values: Iterable[object]) -> Device:
    """The device of that name; else the GPU of the first tensor on one; else the stated CPU.

    Raises ValueError for an unknown name.
    """
    if name is not None:
        return named(name)
    gpus = (v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    found = next(gpus, None)
    return REFERENCE_CPU if found is None else described(found.index or 0)


def free_memory(name: str | None, values: Iterable[object]) -> int:
    """Bytes that are free on the device that is planned for: as its driver says, as the system says of a CPU,
    or all of a device that is not there."""
    device = planned_for(name, values)
    if name is None and device.kind == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return device.free


@functools.cache
def described(index: int) -> Device:
    """A GPU of this machine: from the table of known devices, or else from what its driver reports."""
    try:
        properties = torch.cuda.get_device_properties(index)
    except (
        RuntimeError,
        AssertionError,
    ):  # fake tensors on a machine without CUDA: the name is all there can be
        raise ValueError(
            "The tensors are on CUDA, and this machine has no GPU; name the device to plan for, "
            "for example options={'device': 'H100'}"
        ) from None
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # no context can be made here
        free = None
    found = known(properties.name, properties.total_memory)
    if found is not None:
        return with_memory(found, properties.total_memory, free)
    made = derived(
        properties.name,
        (properties.major, properties.minor),
        properties.total_memory,
        properties.multi_processor_count,
        getattr(properties, "clock_rate", 0) * 1e3,
        getattr(properties, "memory_clock_rate", 0) * 1e3,
        getattr(properties, "memory_bus_width", 0),
        properties.L2_cache_size,
    )
    return with_memory(made, properties.total_memory, free)


def target_of(device: torch.device, capability: tuple[int, int] | None) -> Target:
    """What the choice of kernels depends on.

    capability  of the CUDA device that is planned for, which need not be there. If another one is, kernels
                must run on both
    """
    kind = device_type(device)
    if kind != "cuda":
        return Target(kind)
    simulated = simulated_capability()
    if simulated is not None:
        return Target("cuda", simulated)
    if torch.version.hip:
        return Target("hip")
    if torch.cuda.is_available():
        here = torch.cuda.get_device_capability(device)
        capability = here if capability is None else min(here, capability)
    disabled = frozenset(name for name, is_on in SWITCHES.items() if not is_on())
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return Target("cuda", capability, disabled, active or "")

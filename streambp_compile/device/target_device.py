"""The device that a region is compiled for, as planning and the choice of kernels need it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence

import torch

from ..memory.spare_memory import Memory
from ..passes.ir import bytes_of
from ..passes.kernels.attention import Target
from ..passes.kernels.simulated_device import device_type, simulated_capability
from ..passes.planning.devices import REFERENCE_CPU, Device, derived, known, named, with_memory
from .measured_rates import with_measured


def may_use_cudnn() -> bool:
    """May cuDNN run attention? Not where gradients must be the same bits each time, as in torch's own choice
    (sdp_utils.cpp, check_cudnn_deterministic)."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled() and (warns or not strict)


SWITCHES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": may_use_cudnn,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}


def planned_for(
    name: str | None, values: Iterable[object], weighs: bool = False, alike: bool = False
) -> Device:
    """Choose the device of that name; else the GPU of the first tensor on one; else the reference CPU.

    weighs  does the plan weigh seconds against bytes? Then a GPU's own rates count, not its data sheet's
    alike   must other processes plan alike? Then nothing is measured

    Raises ValueError for an unknown name.
    """
    if name is not None:
        return named(name)
    index = index_of_gpu(values)
    if index is None:
        return REFERENCE_CPU
    device = described(index)
    in_table = known(device.name, device.memory) is not None
    return device if alike or in_table and not weighs else measured_here(index)


def is_on_gpu(name: str | None, values: Iterable[object]) -> bool:
    """Does the step run on a GPU of this machine, with no other device named?"""
    return name is None and torch.cuda.is_available() and index_of_gpu(values) is not None


def index_of_gpu(values: Iterable[object]) -> int | None:
    """Find the index of the first tensor's GPU; None where no tensor is on one."""
    gpus = (v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    found = next(gpus, None)
    return None if found is None else found.index or 0


def free_memory(name: str | None, values: Sequence[object]) -> int:
    """Compute the bytes above weights and gradients that a step on these values can take. They are the bytes
    that are free now, without those of gradients that do not exist yet; for a named device, which is not
    there, all of its memory."""
    if name is not None:
        return named(name).free
    index = index_of_gpu(values)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if index is None else free_on_gpu(index)
    return max(0, free - bytes_to_come(values))


def memory_of_gpu(values: Iterable[object]) -> Memory:
    """Return the counters of the GPU of the first tensor on one."""
    index = index_of_gpu(values)
    return Memory(
        allowed_on_gpu(index),
        functools.partial(free_on_gpu, index),
        functools.partial(torch.cuda.memory_allocated, index),
        functools.partial(torch.cuda.max_memory_allocated, index),
        bytes_to_come,
    )


def free_on_gpu(index: int) -> int:
    """Count the bytes that torch can still take. They are free according to the driver and within the share
    of the device that the process may use, or torch's allocator holds them unused."""
    reserved = torch.cuda.memory_reserved(index)
    to_take = min(torch.cuda.mem_get_info(index)[0], allowed_on_gpu(index) - reserved)
    return to_take + reserved - torch.cuda.memory_allocated(index)


def allowed_on_gpu(index: int) -> int:
    """Compute the bytes of a GPU that this process may use
    (``torch.cuda.set_per_process_memory_fraction``)."""
    share = torch.cuda.get_per_process_memory_fraction(index)
    return int(share * torch.cuda.get_device_properties(index).total_memory)


def bytes_to_come(values: Iterable[object]) -> int:
    """Count the bytes of gradients that a backward will create, for leaves that have none yet."""
    leaves = (v for v in values if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf)
    return sum(bytes_of(v) for v in leaves if v.grad is None)


@functools.cache
def measured_here(index: int) -> Device:
    return with_measured(described(index), torch.device("cuda", index))


@functools.cache
def described(index: int) -> Device:
    """Describe a GPU of this machine by the table of known devices, or else by its driver's properties."""
    try:
        properties = torch.cuda.get_device_properties(index)
    except (
        RuntimeError,
        AssertionError,
    ):  # fake tensors on a machine without CUDA: only a name can choose the device
        raise ValueError(
            "The tensors are on CUDA, and this machine has no GPU; name the device to plan for, "
            "for example options={'device': 'H100'}"
        ) from None
    try:
        memory = allowed_on_gpu(index)
        free = min(torch.cuda.mem_get_info(index)[0], memory)
    except RuntimeError:  # no context can be made here
        free, memory = None, properties.total_memory
    found = known(properties.name, properties.total_memory)
    if found is not None:
        return with_memory(found, memory, free)
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
    return with_memory(made, memory, free)


def target_of(device: torch.device, capability: tuple[int, int] | None) -> Target:
    """Return the target on which the choice of kernels depends.

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

"""Live memory of a computation, from the events of torch's allocators.

Every allocation and release is an event of the profiler (``profile_memory=True``), including those of
compiled kernels' buffers. Their running sum starts at zero, so memory that was held before (weights,
allocated gradients) does not count. On a CPU the result is the same to the byte in every run. Memory
that a library takes outside torch's allocator (scratch space inside a matrix product) is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # otherwise the profiler announces its start and stop on stderr


def live_memory(function: Callable[[], object], device: str = "cpu") -> list[tuple[float, int]]:
    """Record the memory held on a device while a function runs, above that held before it.

    function  called once, without arguments; run it once before, so that compilation and lazy buffers are
              over
    device    the device type whose allocator is watched, ``"cpu"`` or ``"cuda"``

    Returns a list of (seconds since the start, bytes), one entry per allocation or release, in order of
    time.
    """
    return held_in(profiled(function, device), device)


def profiled(function: Callable[[], object], device: str = "cpu"):
    """Record all events of the profiler while a function runs, including those of its allocators."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = function()
        if device == "cuda":
            torch.cuda.synchronize()
    del result
    return profile.kineto_results


def held_in(results, device: str = "cpu") -> list[tuple[float, int]]:
    """Compute the result of `live_memory` from that of `profiled`."""
    start = results.trace_start_ns()
    events = [
        e for e in results.events() if e.name() == "[memory]" and e.device_type().name.lower() == device
    ]
    events.sort(key=lambda e: e.start_ns())
    curve, held = [(0.0, 0)], 0
    for event in events:
        held += event.nbytes()
        curve.append(((event.start_ns() - start) * 1e-9, held))
    return curve


def peak(function: Callable[[], object], device: str = "cpu") -> int:
    """Measure the bytes at the highest point of `live_memory`."""
    return max(held for _, held in live_memory(function, device))


def peak_on_gpu(function: Callable[[], object]) -> int:
    """Measure the peak memory of a function by the counters of the GPU's allocator, without overhead."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - held

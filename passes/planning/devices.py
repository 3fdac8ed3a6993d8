"""Devices as plain numbers, which are also known for a device that is not there.

``KNOWN`` holds GPUs by their makers' figures, ``REFERENCE_CPU`` a stated CPU. `derived` describes a GPU that
is in no table. Nothing here asks torch which device is present, as streambp_compile does, so that a plan for
an H200 can be made on a laptop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

GIB = 2**30
PRODUCTS, BANDWIDTH = 0.75, 0.85
"""Shares of the dense product rate and of the bandwidth of a data sheet that large kernels sustain. In
bfloat16, cuBLAS reaches about 0.7 of the rate on an H100, which hits its power limit, and 0.85 on an A100.
Copies reach 0.8 to 0.93 of the bandwidth."""
ATTENTION = {  # in the order in which streambp prefers them (`attention.selection`)
    "cudnn": {9: (0.60, 0.53)},
    "flash": {8: (0.60, 0.50), 9: (0.35, 0.31)},
}
"""Shares of the dense half-precision rate that attention kernels sustain, forward and backward, causal, heads
of 128, by major compute capability. 9: measured on an H100, chunks of 4096 rows against 32768 keys
(benchmarks/results/gpu-attention.md). 8: FlashAttention-2 (arXiv 2307.08691,
section 4.1: up to 73 % forward and 63 % backward on an A100, less with a causal mask)."""
APART = 0.89  # share of the rate of attention's backward that is left with one call for each grouped head
OTHER_ATTENTION = (
    0.5,
    0.4,
)  # for capabilities without a row: FlashAttention-2 where it was not tuned
LAUNCH = 5e-6  # seconds from one kernel to the next in a stream; the Python around it is partly hidden


@dataclass(frozen=True)
class Device:
    """A device as plans see it.

    name        the driver's or the table's name
    kind        torch's device type, ``"cuda"`` or ``"cpu"``
    capability  CUDA's compute capability, None elsewhere
    memory      bytes in all
    free        bytes free when it was described
    bandwidth   bytes per second between the memory and the chip, sustained
    half        products in float16 and bfloat16, FLOP per second, sustained
    single      products in float32
    attention   kernel → FLOP per second of half-precision attention, forward and backward, sustained; the
                kernel that streambp prefers comes first
    cache       bytes of the last cache before the memory
    launch      seconds per kernel launched
    tile        rows and columns that one processor makes at once: chunk lengths are multiples of it
    processors  multiprocessors or cores, each of which takes a tile
    source      where the figures come from
    extra_rows  extra rows whose time a call of attention takes beyond its own; 0: as many as tiles and
                processors suggest
    mapped      bytes from which an allocator takes every value from the system afresh, page by page
    fewest      the least number of chunks of a sequence, where memory is to spare
    """

    name: str
    kind: str
    capability: tuple[int, int] | None
    memory: int
    free: int
    bandwidth: float
    half: float
    single: float
    attention: tuple[tuple[str, tuple[float, float]], ...]
    cache: int
    launch: float
    tile: int
    processors: int
    source: str
    extra_rows: float = 0.0
    mapped: float = math.inf
    fewest: int = 1

    def rate(self, dtype: torch.dtype) -> float:
        """Return the FLOP per second of matrix products in a dtype. Double precision runs at half the rate of
        single, where a device has units for it at all."""
        if dtype.itemsize <= 2:
            return self.half
        return self.single if dtype.itemsize == 4 else self.single / 2

    def attention_rate(
        self, dtype: torch.dtype, backward: bool, kernel: str | None = None, apart: bool = False
    ) -> float:
        """Return the FLOP per second of a fused attention kernel.

        It is half the rate of products for a dtype wider than 16 bits, which uses no tensor cores, and
        for a kernel without a rate.

        kernel  None: the first of the device's table
        apart   the backward is called for one query head of each key head at a time
        """
        rates = dict(self.attention)
        kernel = kernel or next(iter(rates), None)
        if dtype.itemsize > 2 or kernel not in rates:
            return self.rate(dtype) / 2
        return rates[kernel][backward] * (APART if backward and apart else 1)

    def __str__(self) -> str:
        capability = "" if self.capability is None else f" (sm_{self.capability[0]}{self.capability[1]})"
        free = "" if self.free == self.memory else f", {self.free / GIB:.1f} GiB of it free"
        return (
            f"{self.name}{capability}: {self.memory / GIB:.1f} GiB{free}, {self.bandwidth / 1e9:.0f} GB/s, "
            f"products {self.half / 1e12:.3g} TFLOP/s in half precision and {self.single / 1e12:.3g} in "
            f"single, cache {self.cache / 2**20:.0f} MiB; {self.source}"
        )


def gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    gigabytes: float,
    half: float,
    single: float,
    cache: float,
    processors: int,
    source: str,
) -> Device:
    """Describe a GPU by its data sheet.

    gib, gigabytes  memory in GiB, and bandwidth in GB/s
    half, single    dense TFLOP/s in half precision (summed in float32), and in float32
    cache           L2 cache in MiB
    """
    shares = {kernel: by_major.get(capability[0]) for kernel, by_major in ATTENTION.items()}
    shares["flash"] = shares["flash"] or OTHER_ATTENTION
    attention = tuple(
        (k, (half * 1e12 * s[0], half * 1e12 * s[1])) for k, s in shares.items() if s is not None
    )
    return Device(
        name,
        "cuda",
        capability,
        int(gib * GIB),
        int(gib * GIB),
        gigabytes * 1e9 * BANDWIDTH,
        half * 1e12 * PRODUCTS,
        single * 1e12 * PRODUCTS,
        attention,
        int(cache * 2**20),
        LAUNCH,
        128,
        processors,
        source,
    )


NVIDIA = "NVIDIA's data sheet, sustained shares as stated in passes/planning/devices.py"
KNOWN = (  # float32 figures are those of plain float32 units, as torch uses them unless TF32 is allowed
    gpu("B200", (10, 0), 178, 7700, 2250, 75, 126, 148, NVIDIA),
    gpu("GH200", (9, 0), 94.5, 4000, 989, 67, 50, 132, NVIDIA),
    gpu("H200", (9, 0), 140.4, 4800, 989, 67, 50, 132, NVIDIA),
    gpu("H20", (9, 0), 95, 4000, 148, 44, 60, 78, NVIDIA),
    gpu("H100 NVL", (9, 0), 93.1, 3900, 835, 60, 50, 132, NVIDIA),
    gpu("H100 PCIe", (9, 0), 79.6, 2000, 756, 51, 50, 114, NVIDIA),
    gpu("H100", (9, 0), 79.6, 3350, 989, 67, 50, 132, NVIDIA),
    gpu("H800", (9, 0), 79.6, 3350, 989, 67, 50, 132, NVIDIA),
    gpu("A100 80GB PCIe", (8, 0), 79.3, 1935, 312, 19.5, 40, 108, NVIDIA),
    gpu("A100-80", (8, 0), 79.3, 2039, 312, 19.5, 40, 108, NVIDIA),
    gpu("A100-40", (8, 0), 39.5, 1555, 312, 19.5, 40, 108, NVIDIA),
    gpu("A800", (8, 0), 79.3, 2039, 312, 19.5, 40, 108, NVIDIA),
    gpu("A40", (8, 6), 44.5, 696, 150, 37.4, 6, 84, NVIDIA),
    gpu("A10", (8, 6), 22.2, 600, 125, 31.2, 6, 72, NVIDIA),
    gpu("RTX A6000", (8, 6), 47.5, 768, 155, 38.7, 6, 84, NVIDIA),
    gpu("RTX 3090", (8, 6), 23.7, 936, 71, 35.6, 6, 82, NVIDIA),
    gpu("L40S", (8, 9), 44.5, 864, 362, 91.6, 96, 142, NVIDIA),
    gpu("L4", (8, 9), 22.0, 300, 121, 30.3, 48, 58, NVIDIA),
    gpu("RTX 6000 Ada", (8, 9), 47.5, 960, 364, 91.1, 96, 142, NVIDIA),
    gpu("RTX 4090", (8, 9), 23.6, 1008, 165, 82.6, 72, 128, NVIDIA),
    gpu("RTX 5090", (12, 0), 31.4, 1792, 209, 104.8, 96, 170, NVIDIA),
    gpu("V100-32", (7, 0), 31.7, 900, 125, 15.7, 6, 80, NVIDIA),
    gpu("V100-16", (7, 0), 15.8, 900, 125, 15.7, 6, 80, NVIDIA),
    gpu("T4", (7, 5), 14.6, 320, 65, 8.1, 4, 40, NVIDIA),
)

REFERENCE_CPU = Device(
    "CPU",
    "cpu",
    None,
    16 * GIB,
    16 * GIB,
    bandwidth=34e9,
    half=80e9,
    single=240e9,
    attention=(),
    cache=32 << 20,
    launch=10e-6,
    tile=16,
    processors=2,
    source="a stated CPU, so that chunk lengths are the same on every machine",
    extra_rows=40,
    mapped=32 << 20,
    fewest=4,
)
"""Two cores with 512-bit vectors.

Chunk lengths follow from the ratio of product rate to bandwidth (here 7 FLOP per byte; both grow with the
number of cores) and from the last cache (16 to 64 MiB on most CPUs). Most CPUs emulate half precision.

The attention kernel takes 32, 64 or 256 queries at a time, more in longer calls (FlashAttentionKernel.cpp).
It reads and packs all keys for each group: calls of 192 of 8192 rows, with 8 heads of 64, took 1.17 times as
long as calls of 2048 rows. glibc maps memory of 32 MiB and more anew (M_MMAP_THRESHOLD); filling new pages
took 14 times as long as filling old ones."""

PER_CLOCK = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 7): (1024, 256),
    (8, 9): (512, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (10, 3): (8192, 256),
    (12, 0): (512, 256),
    (12, 1): (512, 256),
}
"""Dense FLOP per multiprocessor and clock, in half precision (summed in float32) and in single precision.
Sources: the CUDA C++ programming guide (arithmetic instructions) and the white papers of the architectures.
8.6 to 12.1 have the figures of consumer cards, which are the lower ones."""
CLOCK = 1.5e9  # hertz, where a driver tells none
# half-precision FLOP per byte of bandwidth, where a driver tells no memory clock; data sheets lie between 70
# and 300
BALANCE = 150


def derived(
    name: str,
    capability: tuple[int, int],
    memory: int,
    multiprocessors: int,
    clock: float,
    memory_clock: float,
    bus_bits: int,
    cache: int,
) -> Device:
    """Describe a GPU that no table has, by its driver's figures in bytes, hertz and bits. A figure that the
    driver does not report is zero."""
    nearest = max((c for c in PER_CLOCK if c <= capability), default=(7, 0))
    half, single = (f * multiprocessors * (clock or CLOCK) / 1e12 for f in PER_CLOCK[nearest])
    bandwidth = 2 * memory_clock * bus_bits / 8 / 1e9 if memory_clock and bus_bits else half * 1e3 / BALANCE
    return gpu(
        name,
        capability,
        memory / GIB,
        bandwidth,
        half,
        single,
        cache / 2**20,
        multiprocessors,
        "derived from the driver's figures (multiprocessors, clocks, bus width)",
    )


def known(name: str, memory: int | None = None) -> Device | None:
    """Find the row of ``KNOWN`` whose words a name contains. If several rows match, the most words count
    first, then a memory size in the name, then the nearest memory. None if no row matches."""
    words = name.lower().replace("-", " ").split()

    def misfit(row: Device) -> tuple[int, bool, int]:
        model, _, size = row.name.lower().partition("-")
        return -len(model.split()), size not in words, abs(row.memory - (memory or row.memory))

    rows = [
        row
        for row in KNOWN
        if {*row.name.lower().partition("-")[0].split()} <= {*words} and "laptop" not in words
    ]
    return min(rows, key=misfit, default=None)


def named(name: object) -> Device:
    """Find the device of that name. Raises ValueError, which lists the names there are."""
    found = None
    if isinstance(name, str):
        found = REFERENCE_CPU if name.lower() == "cpu" else known(name)
    if found is None:
        raise ValueError(
            f"Unknown device {name!r}; known devices are CPU, {', '.join(row.name for row in KNOWN)}"
        )
    return found


def with_memory(device: Device, memory: int, free: int | None = None) -> Device:
    """Replace a device's total memory by the bytes that its driver reports or that a limit leaves.

    free  bytes that are free; None: all
    """
    return replace(device, memory=memory, free=memory if free is None else free)

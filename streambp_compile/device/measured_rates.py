"""Rates that a GPU's kernels reach, in place of shares of its data sheet.

They are measured once, in about a second, and kept in a file. Two cases need them: a plan within a
memory budget, which weighs seconds against bytes, and a GPU that is in no table, whose rates would be
guesses. All other chunk lengths follow from the table alone, so that they are the same on every machine
with that GPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import internals
from ..passes.planning.cost_model import BACKWARD
from ..passes.planning.devices import Device

SIDE = 4096  # of square matrices, and tokens of an attention
HEADS, WIDTH = 16, 128  # of an attention
COPIED = 128 << 20  # bytes: more than any cache of `passes/planning/devices.py`
SMALL = 256  # kernels in a row, to measure the time of one launch
LEAST, RUNS = 0.02, 3  # the least seconds of a run; the number of runs, of which the fastest counts
PLAUSIBLE = 10.0  # largest factor between measurement and table: beyond it, the measurement is wrong
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class NothingRuns(Exception):
    """Kernels take no time, because the device is simulated."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device.

    half, single  FLOP per second of products in half and in single precision
    bandwidth     bytes per second of copies
    launch        seconds per launch
    attention     for each attention kernel, FLOP per second forward and backward
    """

    half: float
    single: float
    bandwidth: float
    launch: float
    attention: dict[str, tuple[float, float]]


def with_measured(device: Device, place: torch.device) -> Device:
    """Replace a device's rates by measured ones; keep it where they are missing or implausible."""
    rates = known_rates(device)
    if rates is None:
        with internals.disable_current_modes():
            rates = measured(device, place)
        if rates is not None:
            remember(device, rates)
    if rates is None:
        return device
    return replace(
        device,
        half=rates.half,
        single=rates.single,
        bandwidth=rates.bandwidth,
        launch=rates.launch,
        attention=tuple((k, tuple(rates.attention.get(k, table))) for k, table in device.attention),
        source="measured on this machine",
    )


def measured(device: Device, place: torch.device) -> Rates | None:
    """Measure all rates; None where a kernel fails or a rate is implausible, as on a simulated device."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rates = Rates(
                half=products(torch.float16, place),
                single=products(torch.float32, place),
                bandwidth=copies(place),
                launch=launches(place),
                attention=attentions(device, place),
            )
    except (RuntimeError, NotImplementedError, NothingRuns):
        internals.log.debug("measuring %s failed", device.name, exc_info=True)
        return None
    pairs = [(rates.half, device.half), (rates.single, device.single), (rates.bandwidth, device.bandwidth)]
    return rates if all(1 / PLAUSIBLE < ours / table < PLAUSIBLE for ours, table in pairs) else None


def products(dtype: torch.dtype, place: torch.device) -> float:
    a, b = (torch.randn(SIDE, SIDE, device=place, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * SIDE**3 / seconds(lambda: torch.mm(a, b, out=out), place)


def copies(place: torch.device) -> float:
    """Measure the bytes read and written per second."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source), place)


def launches(place: torch.device) -> float:
    value = torch.zeros(1, device=place)

    def many() -> None:
        for _ in range(SMALL):
            value.add_(1)

    return seconds(many, place) / SMALL


def attentions(device: Device, place: torch.device) -> dict[str, tuple[float, float]]:
    """Measure each kernel that is in the device's table and that torch can run."""
    found = {}
    for kernel in dict(device.attention):
        with contextlib.suppress(RuntimeError), sdpa_kernel(KERNELS[kernel]):
            found[kernel] = attention(place)
    return found


def attention(place: torch.device) -> tuple[float, float]:
    q, k, v = (
        torch.randn(1, HEADS, SIDE, WIDTH, device=place, dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    flop = 2 * HEADS * SIDE**2 * WIDTH  # two products over half of all pairs

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    gradient = torch.ones_like(out)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), place)
    return flop / seconds(forward, place), BACKWARD * flop / backward


def seconds(work: Callable[[], object], place: torch.device) -> float:
    """Measure the seconds of one call, as the fastest of several runs."""
    count, best = 1, math.inf
    run(work, 1, place)
    while (taken := run(work, count, place)) < LEAST:
        count = max(2 * count, math.ceil(count * LEAST / max(taken, 1e-6)))
        if count > 1 << 20:
            raise NothingRuns
    for _ in range(RUNS):
        best = min(best, run(work, count, place) / count)
    return best


def run(work: Callable[[], object], count: int, place: torch.device) -> float:
    wait(place)
    start = time.perf_counter()
    for _ in range(count):
        work()
    wait(place)
    return time.perf_counter() - start


def wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


# The file


def path_of_rates() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "streambp_compile" / "measured-rates.json"


def key_of(device: Device) -> str:
    """Build the key of stored rates: the device, torch's version and its precision of float32 products."""
    precision = torch.get_float32_matmul_precision()
    return f"{device.name}, torch {version('torch')}, {precision} float32 products"


def stored() -> dict[str, dict]:
    try:
        found = json.loads(path_of_rates().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def known_rates(device: Device) -> Rates | None:
    """Load the rates of an earlier measurement; None if there are none."""
    try:
        return Rates(**stored()[key_of(device)])
    except (KeyError, TypeError):
        return None


def remember(device: Device, rates: Rates) -> None:
    """Write the file as a whole, so that processes which measure at the same time never read half of it."""
    path = path_of_rates()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({**stored(), key_of(device): asdict(rates)}, file, indent=1)
        os.replace(file.name, path)

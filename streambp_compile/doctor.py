"""``python -m streambp_compile.doctor``: does it work here, and what does it save?

Checks the installation, then trains a small model for one step: eager, with gradient checkpointing, and
streamed. Prints a block for bug reports. The exit status is 1 where something does not work.
"""

from __future__ import annotations

import copy
import itertools
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import internals
from .backend import Reporting
from .config import Config
from .device.target_device import target_of
from .passes.kernels.attention import Attention, choose
from .passes.phases import summary
from .reporting.report import Report, predict
from .supported import NEWEST, OLDEST, dotted, numbers
from .tools.live_memory import peak, peak_on_gpu

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 4096, 256, 4, 3, 2048
WORSE = 4.0  # most error of streamed gradients, relative to eager's: sums in another order
CUT = "-" * 16
EXPECT = (
    "What to expect: the first step compiles each kind of layer once, however many layers there are.\n"
    "Later steps take about as long as with checkpointing. Longer sequences save a larger share.\n"
    "For a model of yours: streambp_compile.explain, or python -m streambp_compile.plan --help"
)


class NotWorking(Exception):
    """A fault of the installation, as a sentence, with its remedy."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A causal decoder; returns the loss of token ids, ``[1, tokens]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Measured:
    """Measurements of one method's steps.

    first, later  seconds of the first step, which compiles, and of one after it
    peak          bytes held at once above weights and their gradients
    error         of all gradients together, relative to those in float64
    """

    first: float
    later: float
    peak: int
    error: float


def main() -> int:
    """Print all findings. Returns the exit status."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(f"{CUT} for a bug report, copy from here {CUT}", flush=True)
    try:
        for line in itertools.chain(installation(device, dtype), trial(device, dtype)):
            print(line, flush=True)
        found = "Everything works: gradients are exact, and the step takes less memory than eager."
    except NotWorking as error:
        found = f"This does not work: {error}"
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        found = f"The small model could not be trained here ({summary(error)}). Please report this block"
    print(f"{found}\n{CUT} to here {CUT}")
    return 0 if found.startswith("Everything") else 1


def installation(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield lines that describe the installation. Raises `NotWorking`."""
    on_gpu, newer = device.type == "cuda", numbers(torch.version.__version__) > NEWEST
    tested = f"tested with {dotted(OLDEST)} to {dotted(NEWEST)}{', older than this one' * newer}"
    yield f"streambp_compile  {metadata.version('streambp-compile')}"
    yield f"torch             {torch.version.__version__}, {tested}"
    yield f"Python            {platform.python_version()}, {platform.platform()}"
    name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    yield f"device            {device.type}: {name}, {torch.get_num_threads()} threads"
    compiler = internals.cpp_compiler()
    yield f"C++ compiler      {compiler or 'none'}"
    if compiler is None:
        raise NotWorking("torch.compile finds no C++ compiler. Install g++ or clang, or set CXX")
    if on_gpu:
        yield f"Triton            {metadata.version('triton') if find_spec('triton') else 'none'}"
        if find_spec("triton") is None:
            raise NotWorking("torch.compile needs Triton on a GPU. Install it: pip install triton")
    if "streambp" not in torch.compiler.list_backends():
        raise NotWorking("torch does not find the backend by its name. Install this package again")
    choice = choose(Attention(dtype, WIDTH // HEADS, WIDTH // HEADS), target_of(device, None))
    yield f"attention kernel  {choice}"


def trial(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Run steps of the small model by each method, and yield lines of results. Raises `NotWorking`."""
    model, report = Model().to(device, dtype), Report()
    ids = torch.randint(VOCABULARY, (1, TOKENS), device=device)
    exact = copy.deepcopy(model).double()
    exact(ids).backward()
    wanted = gradients(exact)
    del exact
    yield (
        f"\n{LAYERS} layers, width {WIDTH}, {VOCABULARY} words, {TOKENS} tokens, {str(dtype).split('.')[1]}\n"
        f"{'':16}{'peak MiB':>10}{'of eager':>10}{'first step, s':>16}{'later, s':>10}{'error':>10}"
    )
    # offload=False: otherwise a step on a GPU takes free memory to be faster
    streamed = torch.compile(model, backend=Reporting(Config(offload=False), report))
    methods = {"eager": model, "checkpointing": lambda ids: model(ids, True), "streambp": streamed}
    found: dict[str, Measured] = {}
    with warnings.catch_warnings(record=True) as told:
        for name, method in methods.items():
            one = found[name] = measured(model, lambda: method(ids), wanted)
            yield (
                f"{name:16}{one.peak / 2**20:10.1f}{one.peak / found['eager'].peak:10.2f}{one.first:16.2f}"
                f"{one.later:10.2f}{one.error:10.1e}"
            )
        predict(report)
    regions = sum(r.times for r in report.regions if r.streamed is not None)
    yield f"\n{regions} of {len(report.order)} regions streamed. {report.peak or ''}"
    yield from (f"warning: {w.message}" for w in told)
    check(found["streambp"], found["eager"], regions)
    yield EXPECT


def measured(model: Model, loss_of: Callable[[], Tensor], wanted: Tensor) -> Measured:
    """Measure steps: the first, the faster of two later ones, and the peak memory of another."""

    def step() -> float:
        model.zero_grad(set_to_none=False)
        begun = time.perf_counter()
        loss_of().backward()
        if wanted.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    model.zero_grad()
    first, later = step(), min(step(), step())
    most = peak_on_gpu(step) if wanted.is_cuda else peak(step)
    return Measured(first, later, most, ((gradients(model) - wanted).norm() / wanted.norm()).item())


def gradients(model: Model) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def check(streamed: Measured, eager: Measured, regions: int) -> None:
    """Raise `NotWorking` where streamed steps are not exact, save no memory, or do not stream."""
    if not regions:
        raise NotWorking("No part of the small model streams. Please report this block")
    if not streamed.error <= WORSE * eager.error:
        raise NotWorking("The gradients are less exact than those of eager. Please report this block")
    if streamed.peak >= eager.peak:
        raise NotWorking("The streamed step takes no less memory than eager. Please report this block")


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to run layers for one sequence of a batch at a time, and what it saves.

    python -m benchmarks.batches           # prints the table
    python -m benchmarks.batches --save    # and writes results/batches.md

Two layers, width 512, float32. Peak: allocator events of one step above weights and their gradients. Time:
ratio of medians, the contenders in turn; nothing else may run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_compile.backend import streambp
from streambp_compile.regions import batch_parts

from .memory import peak
from .tables import MIB, markdown, processor

WIDTH, HEADS, ROUNDS = 512, 8, 7
SHAPES = ((True, 4, 2048), (False, 4, 2048), (False, 2, 4096), (False, 8, 512))
RESULTS = Path(__file__).parent / "results" / "batches.md"
COLUMNS = (
    "attention",
    "sequences",
    "tokens",
    "at a time",
    "MiB",
    "all at once, MiB",
    "time of all at once's",
)


class Layer(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.causal, self.norm, self.norm2 = causal, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def step(model: nn.Module, x: Tensor, together: bool, chosen: list[int]) -> Callable[[], None]:
    """A compiled step; with ``together`` its layers run for the whole batch at once.

    chosen  gets how many sequences each region was to run for
    """
    choose = batch_parts.sequences_at_once

    def noted(*given) -> int:
        chosen.append(given[-1] if together else choose(*given))
        return chosen[-1]

    backend = functools.partial(streambp)  # of its own: Dynamo would find the other step's code
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    with mock.patch.object(batch_parts, "sequences_at_once", noted):
        compiled(x).backward()
    return lambda: compiled(x).backward()


def row(causal: bool, batch: int, tokens: int) -> list[str]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(causal), Layer(causal)), torch.randn(batch, tokens, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    at_once: list[int] = []
    peaks: list[int] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    steps = [step(model, x, False, at_once), step(model, x, True, [])]
    for run in steps:
        run()
        peaks.append(peak(run))
    for _ in range(ROUNDS):
        for taken, run in zip(seconds, steps):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    ratio = statistics.median(seconds[0]) / statistics.median(seconds[1])
    numbers = (batch, tokens, at_once[0], *(f"{p / MIB:.1f}" for p in peaks), f"{ratio:.2f}")
    return ["causal" if causal else "all keys", *map(str, numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    table = markdown(COLUMNS, [row(*shape) for shape in SHAPES])
    machine = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    text = f"`python -m benchmarks.batches --save`\n\n{machine}\n\n{table}\n"
    print(text)
    if save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()

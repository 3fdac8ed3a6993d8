"""The longest sequence of which a training step fits into 80 GiB: weights and gradients alone, bfloat16, one
sequence.

    python benchmarks/longest.py --save longest80
    python benchmarks/longest.py --models Qwen3-8B --methods streambp

Nothing is computed: steps run on fake CUDA tensors, and every allocation is counted, the caching allocator's
blocks of 512 bytes included. Needs a CUDA build of torch with a pretended GPU
(docs/testing-without-a-gpu.md); streambp plans for an A800-80GB, on which the paper measured. For streambp
the drivers, artifacts and autograd nodes of the step run without kernels
(`streambp_compile/runtime/memory_simulation.py`); for checkpointing, the eager model of Hugging Face with its
checkpoints, its loss in float32 over all logits, and all that autograd keeps.

Models of a few layers are simulated, until one more adds its saved input to the peak: from then on the peak
is at the loss or in the last layer, where the saved inputs of all layers are alive, and equal layers add
equal bytes. The whole model's peak follows exactly. The length in the table is simulated itself, and takes
between 79.2 and 80 GiB. Not counted: the CUDA context and the libraries' own workspaces (about 1 GiB
together), and memory that fragments.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.fakes import SHAPES, Shape, fake_model, pretend, weights_and_gradients

RESULTS = Path(__file__).resolve().parent / "results"
GIB, ROUND = 2**30, 256  # lengths are multiples of so many tokens, and within a hundredth of the budget
METHODS = ("checkpointing", "streambp")
START = {
    "checkpointing": 0.25,
    "streambp": 0.85,
}  # of the tokens whose saved inputs alone would fill the memory
PAPER = {"Qwen3-8B": (20_000, 110_000), "Qwen3-14B": (9_000, 40_000), "Qwen3-32B LoRA": (5_700, 16_000)}


@dataclass(frozen=True)
class Taken:
    """Bytes of a step of the whole model: weights and gradients, and what the step takes above them."""

    held: int
    peak: int

    @property
    def total(self) -> int:
        return self.held + self.peak


@cache
def peak_of(method: str, shape: Shape, layers: int, tokens: int) -> Taken:
    """A model of so many layers."""
    torch._dynamo.reset()
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(mode, shape, layers, checkpointed=method == "checkpointing")
    with mode:
        ids = torch.empty((1, tokens), dtype=torch.int64, device="cuda")
        peak = PEAKS[method](model, ids)
    return Taken(weights_and_gradients(model), peak)


def streamed_peak(model, ids) -> int:
    from streambp_compile.backend import Chain
    from streambp_compile.config import Config
    from streambp_compile.report import Report
    from streambp_compile.runtime.memory_simulation import simulate

    report = Report()

    def backend(module, inputs):  # as `streambp_compile.explain`, without its own run of the forward
        Chain(module, inputs, Config(device="A800", strict=True), report).compiled()
        return lambda *_: (ids.new_zeros(()),)

    torch.compile(lambda i: model(input_ids=i, labels=i).loss, backend=backend, fullgraph=True)(ids)
    return simulate(*report.steps[0]).bytes


def checkpointed_peak(model, ids) -> int:
    from streambp_compile.runtime.memory_simulation import Ledger

    ledger = Ledger("cuda")
    for parameter in model.parameters():
        ledger.know(parameter)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            ledger.know(parameter.grad)
    for value in (ids, *model.buffers()):
        ledger.know(value)
    with ledger:
        model(input_ids=ids, labels=ids).loss.backward()
    return ledger.peak


PEAKS = {"checkpointing": checkpointed_peak, "streambp": streamed_peak}


def taken(method: str, shape: Shape, tokens: int) -> Taken:
    """The whole model, by the first two numbers of layers of which the larger adds a saved input to the
    peak."""
    for layers in range(2, shape.layers):
        less, more = (peak_of(method, shape, n, tokens) for n in (layers, layers + 1))
        if more.peak - less.peak >= tokens * shape.width * 2:
            further = shape.layers - layers
            return Taken(
                less.held + further * (more.held - less.held), less.peak + further * (more.peak - less.peak)
            )
    return peak_of(method, shape, shape.layers, tokens)


def whole_weights(shape: Shape) -> int:
    """Bytes of all weights and gradients."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    one, two = (weights_and_gradients(fake_model(mode, shape, layers)) for layers in (1, 2))
    return one + (shape.layers - 1) * (two - one)


def longest(method: str, shape: Shape, budget: int) -> tuple[int, Taken]:
    """A sequence within a hundredth of the longest that the budget allows, and what it takes."""
    free = budget - whole_weights(shape)
    tokens, before = int(START[method] * free / (shape.layers * shape.width * 2)) // ROUND * ROUND, None
    while True:
        found = taken(method, shape, tokens)
        left = budget - found.total
        print(f"{shape.title}, {method}, {tokens} tokens: {found.total / GIB:.2f} GiB", flush=True)
        if 0 <= left < budget / 100:
            return tokens, found
        slope = found.peak / tokens if before is None else (found.total - before[1]) / (tokens - before[0])
        before = tokens, found.total
        tokens = int(tokens + (left - budget / 500) / slope) // ROUND * ROUND


def table(shapes: list[Shape], methods: list[str], budget: int) -> str:
    lines = [
        "| model | weights and gradients GiB | method | longest | above weights and gradients GiB | × "
        "checkpointing | paper, measured |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for shape in shapes:
        base = None
        for method in methods:
            tokens, found = longest(method, shape, budget)
            base = tokens if method == "checkpointing" else base
            times = f"{tokens / base:.1f}" if base and method != "checkpointing" else "–"
            paper = PAPER.get(shape.title)
            told = f"{paper[METHODS.index(method)]:,}" if paper else "–"
            lines.append(
                f"| {shape.title} | {found.held / GIB:.1f} | {method} | {tokens:,} | "
                f"{found.peak / GIB:.1f} | {times} | {told} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="names, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--gib", type=float, default=80, help="the memory that a step may take")
    parser.add_argument("--save", help="a name in benchmarks/results")
    chosen = parser.parse_args()
    pretend()
    text = table(
        [SHAPES[name] for name in chosen.models.split(",")], chosen.methods.split(","), int(chosen.gib * GIB)
    )
    print(f"\n{text}")
    if chosen.save:
        command = " ".join(["python benchmarks/longest.py", *sys.argv[1:]])
        note = (
            f"Predicted for {chosen.gib:g} GiB without a GPU, torch {torch.__version__}; the paper's "
            "figures were measured on an A800-80GB."
        )
        (RESULTS / f"{chosen.save}.md").write_text(
            f"`{command}`\n\n{note}\n{__doc__.partition(chr(10) * 2)[2].partition('Nothing')[1]}"
            f"{__doc__.partition('Nothing')[2].rstrip()}\n\n{text}\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()

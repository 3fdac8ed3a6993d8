"""The longest sequence of which a training step fits into 80 GiB: weights and gradients alone, bfloat16, one
sequence.

    python benchmarks/longest.py --save longest80
    python benchmarks/longest.py --models Qwen3-8B --methods streambp
    python benchmarks/longest.py --models Llama-3.1-8B --methods streambp,offload --gib 139 --gpu H200

It asks the planner (docs/plan.md), which computes nothing: steps run on fake tensors, and every allocation is
counted, the caching allocator's blocks of 512 bytes included. No GPU and no CUDA build of torch are needed.
streambp plans for an A800-80GB, on which the paper measured, or for another GPU (``--gpu``). Its drivers,
artifacts and autograd nodes run without kernels (`streambp_compile/runtime/memory_simulation.py`). For
checkpointing it is the eager model of Hugging Face with its layers checkpointed, its loss in float32 over all
logits, and all that autograd keeps. With ``offload``, streambp's layer inputs wait in host memory.

Models of a few layers are simulated: equal layers add equal bytes, so the whole model's peak follows
(`streambp_compile/tools/plan/step_memory.py`). The length in the table is simulated itself, and takes all but
a hundredth of what weights and gradients leave. Not counted: the CUDA context and the libraries' own
workspaces (about 1 GiB together), and memory that fragments.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.fakes import SHAPES, Shape
from streambp_compile.passes.planning.devices import named
from streambp_compile.reporting.progress import Progress
from streambp_compile.tools.plan.commands import longest_by
from streambp_compile.tools.plan.fake_steps import simulating
from streambp_compile.tools.plan.whole_model import Prediction, Setting, Streaming, checkpointing

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30
PAPERS_GPU = "A800"
PAPERS = ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B LoRA")
METHODS = ("checkpointing", "streambp", "offload")
# of the tokens whose saved inputs alone would fill the memory, tried first
START = {"checkpointing": 0.25, "streambp": 0.87, "offload": 6.5}
PAPER = {
    ("Qwen3-8B", "checkpointing"): 20_000,
    ("Qwen3-8B", "streambp"): 110_000,
    ("Qwen3-14B", "checkpointing"): 9_000,
    ("Qwen3-14B", "streambp"): 40_000,
    ("Qwen3-32B LoRA", "checkpointing"): 5_700,
    ("Qwen3-32B LoRA", "streambp"): 16_000,
}


def longest(method: str, shape: Shape, budget: int, gpu: str) -> tuple[Setting, int, Prediction]:
    """The longest sequence that the budget allows, and what a step of it takes."""
    setting = Setting(shape.source(), named(gpu), 1, trained=shape.trained, optimizer="none")
    room = budget - setting.state.bytes
    first = int(START[method] * room / (shape.layers * shape.width * 2))
    progress = Progress(8)
    ways: dict[str, Callable[[Setting], Prediction]] = {
        "checkpointing": lambda s: checkpointing(s, progress),
        "streambp": lambda s: Streaming(s, progress).default,
        "offload": lambda s: Streaming(s, progress).offloaded,
    }
    with simulating(setting.device):
        found = longest_by(ways[method], replace(setting, tokens=first), room)
    progress.close()
    if found is None:
        sys.exit(f"{shape.title}: weights and gradients alone take {setting.state.bytes / GIB:.1f} GiB")
    return setting, *found


def table(shapes: list[Shape], methods: list[str], budget: int, gpu: str) -> str:
    lines = [
        "| model | weights and gradients GiB | method | longest | above weights and gradients GiB | in host "
        "memory GiB | seconds, estimated | × the first | paper, measured |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for shape in shapes:
        base = None
        for method in methods:
            setting, tokens, found = longest(method, shape, budget, gpu)
            base = base or tokens
            paper = PAPER.get((shape.title, method))
            told = f"{paper:,}" if paper and gpu == PAPERS_GPU else "–"
            lines.append(
                f"| {shape.title} | {setting.state.bytes / GIB:.1f} | {method} | {tokens:,} | "
                f"{found.peak / GIB:.1f} | {found.host / GIB:.0f} | {found.seconds:,.0f} | "
                f"{tokens / base:.1f} | {told} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(PAPERS), help="names, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS[:2]), help=", ".join(METHODS))
    parser.add_argument("--gpu", default=PAPERS_GPU, help="a device of passes/planning/devices.py")
    parser.add_argument("--gib", type=float, default=80, help="the memory that a step may take")
    parser.add_argument("--save", help="a name in benchmarks/results")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    shapes = [SHAPES[name] for name in chosen.models.split(",")]
    text = table(shapes, chosen.methods.split(","), int(chosen.gib * GIB), chosen.gpu)
    if chosen.save:
        command = " ".join(["python benchmarks/longest.py", *sys.argv[1:]])
        note = (
            f"Predicted for {chosen.gib:g} GiB of an {named(chosen.gpu).name} without a GPU, torch "
            f"{torch.__version__}; the paper's figures were measured on an A800-80GB."
        )
        told = "It asks" + __doc__.partition("It asks")[2].rstrip()
        (RESULTS / f"{chosen.save}.md").write_text(
            f"`{command}`\n\n{note}\n\n{told}\n\n{text}\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

"""Seconds of a step of Qwen3-8B by the cost model, term by term: streambp against eager checkpointing. A
prediction, not a measurement.

    python benchmarks/steptime.py --tokens 32768 --save model32k

Both steps are read off fake tensors by the planner (docs/plan.md): streambp's from the schedules of its
regions, at the chunk lengths that it chose for the device; checkpointing's from every operator that eager
autograd calls, recomputation included. Both go through the same model (`passes/planning/cost_model.py`):
products and attention at the sustained rates of `passes/planning/devices.py`, all bytes that kernels read and
write at its bandwidth, half a wave of idle processors per product and attention, 5 microseconds a launch.
Models of one and of two layers are read; their difference counts for each further layer. Gradients are
accumulated into existing ones. The optimizer is left out.

streambp attends with the kernel that it chooses for the device, cuDNN's on sm_90 and else FlashAttention-2;
checkpointing is shown with each that the device has.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fakes import SHAPES, Shape
from streambp_compile.config import Config
from streambp_compile.passes.ir import op_name
from streambp_compile.passes.planning.chunk_length import program_cost
from streambp_compile.passes.planning.cost_model import Cost, Work
from streambp_compile.passes.planning.devices import Device, named
from streambp_compile.tools.plan.fake_steps import StreamedStep, counted_step, simulating
from streambp_compile.tools.plan.whole_model import Setting, plan_of

RESULTS = Path(__file__).resolve().parent / "results"
DEVICES = ("H200", "A100-80")


def checkpointed(shape: Shape, layers: int, tokens: int, device: Device) -> Work:
    with simulating(device):
        return counted_step(Setting(shape.source(), device, tokens).step(layers, checkpoint=True))[1]


def streamed(shape: Shape, layers: int, tokens: int, device: Device) -> tuple[Cost, list[str]]:
    """Seconds of a step, and a line for every sweep of its layer and of its head."""
    with simulating(device):
        step = StreamedStep(Setting(shape.source(), device, tokens).step(layers), Config(device=device.name))
    lines = []
    for region in step.report.regions:
        for direction, schedule in (("forward", region.forward), ("backward", region.backward)):
            if schedule is None:
                continue
            costs = program_cost(schedule.program, region.analysis, schedule.chunks, device)
            for sweep, chunk, cost in zip(schedule.program.sweeps, schedule.chunks, costs):
                attends = any("attention" in op_name(n) for n in sweep.nodes)
                lines.append(
                    f"| {region.name}, {direction}, {sweep.direction}{', attends' * attends} | {chunk} | "
                    f"{cost.efficiency:.0%} | {1e3 * cost.seconds:.1f} |"
                )
    return sum((forward + backward for forward, backward in step.costs(plan_of(step))), Cost()), lines


def whole(one: Cost, two: Cost, layers: int) -> Cost:
    """The model of so many layers, by those of one and of two."""
    return one + (two + one * -1) * (layers - 1)


def table(columns: Mapping[str, Cost]) -> str:
    lines = [f"| seconds | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name, terms in zip((f.name for f in fields(Cost)), zip(*map(astuple, columns.values()))):
        lines.append(f"| {name} | {' | '.join(f'{t:.3f}' for t in terms)} |")
    return "\n".join(
        [*lines, f"| **sum** | {' | '.join(f'**{c.seconds:.2f}**' for c in columns.values())} |"]
    )


def section(shape: Shape, tokens: int, device: Device) -> str:
    """The table of one device, its chunk lengths, and the ratios."""
    eager = tuple(checkpointed(shape, layers, tokens, device) for layers in (1, 2))
    (one, lines), (two, _) = (streamed(shape, layers, tokens, device) for layers in (1, 2))
    kernels = list(dict(device.attention))
    columns = {f"streambp, {kernels[0]}": whole(one, two, shape.layers)}
    for kernel in kernels:
        columns[f"checkpointing, {kernel}"] = whole(
            *(w.cost(tokens, device, kernel) for w in eager), shape.layers
        )
    ours, *theirs = columns.values()
    ratios = ", ".join(
        f"{ours.seconds / t.seconds:.2f} of {name}" for t, name in zip(theirs, list(columns)[1:])
    )
    return "\n".join(
        [
            f"## {device.name}\n",
            f"{device}\n",
            table(columns),
            f"\nstreambp takes {ratios}.\n",
            "| sweep of a model of one layer | rows a chunk | products at | ms |",
            "| --- | ---: | ---: | ---: |",
            *lines,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--model", default="Qwen3-8B", choices=list(SHAPES))
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--save", help="a name in benchmarks/results")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    text = "\n\n".join(
        section(SHAPES[chosen.model], chosen.tokens, named(d)) for d in chosen.devices.split(",")
    )
    print(text)
    if chosen.save:
        command = " ".join(["python benchmarks/steptime.py", *sys.argv[1:]])
        told = (
            __doc__.partition("\n\n    ")[0]
            + "\n\n"
            + __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()
        )
        (RESULTS / f"{chosen.save}.md").write_text(f"`{command}`\n\n{told}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

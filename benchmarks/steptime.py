"""Seconds of a step of Qwen3-8B by the cost model, term by term: streambp against eager checkpointing. A
prediction, not a measurement.

    python benchmarks/steptime.py --tokens 32768 --save model32k

Both steps are read off fake CUDA tensors: streambp's from the schedules that `streambp_compile.explain`
reports, at the chunk lengths that it chose for the device; checkpointing's from every operator that eager
autograd calls, recomputation included. Both go through the same model (`passes/planning/cost_model.py`):
products and attention at the sustained rates of `passes/planning/devices.py`, all bytes that kernels read and
write at its bandwidth, half a wave of idle processors per product and attention, 5 microseconds a launch.
Models of one and of two layers are read; their difference counts for each further layer. Gradients are
accumulated into existing ones. The optimizer is left out.

streambp attends with FlashAttention-2; checkpointing is shown with the same kernel, and with cuDNN's, which
torch takes on sm_90.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fakes import SHAPES, Shape, fake_model, pretend
from streambp_compile.passes.ir import EVERYWHERE, bytes_of, is_tensor, op_name, value_of
from streambp_compile.passes.planning.chunk_length import program_cost
from streambp_compile.passes.planning.cost_model import BACKWARD, Cost, Work
from streambp_compile.passes.planning.devices import Device, named

RESULTS = Path(__file__).resolve().parent / "results"
DEVICES = ("H200", "A100-80")
# bytes for an element of a float32 total: made zero, read and cast to bfloat16, added to the gradient there
# is
HANDED = 16
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Counting(TorchDispatchMode):
    """The work of every operator that is called, as one sweep of one chunk."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.products, self.attention, self.traffic, self.kernels = tokens, [], [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim":
            return out
        name = func.overloadpacket.__name__
        values = [
            v for v in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(v, torch.Tensor)
        ]
        if name in PRODUCTS:
            left, right = values[-3], values[-2]
            depth = left.shape[-1]
            flop = 2.0 * left.numel() * right.shape[-1]
            self.products.append((left.dtype, flop, 0 if depth >= self.tokens else depth))
        elif "attention" in name:
            self.attend(name, args)
        if not name.startswith(("empty", "new_empty")):
            self.kernels += 1
            self.traffic += sum(map(bytes_of, values))
        return out

    def attend(self, name: str, args: tuple) -> None:
        backward = name.endswith("_backward")
        query, key, value = args[1:4] if backward else args[:3]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2
        flop = 2.0 * pairs * (query.shape[3] + value.shape[3]) * (BACKWARD if backward else 1)
        self.attention.append((query.dtype, backward, flop, query.shape[0] * query.shape[1]))

    def work(self) -> Work:
        return Work(
            self.tokens,
            tuple(self.products),
            tuple(self.attention),
            self.traffic,
            0,
            0,
            0,
            EVERYWHERE,
            self.kernels,
            widest=1 << 40,
        )  # nothing stays in a cache


def fake_ids(tokens: int) -> torch.Tensor:
    return torch.empty((1, tokens), dtype=torch.int64, device="cuda")


def checkpointed(shape: Shape, layers: int, tokens: int) -> Work:
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(mode, shape, layers, checkpointed=True)
    with mode:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = fake_ids(tokens)
        with Counting(tokens) as counting:
            model(input_ids=ids, labels=ids).loss.backward()
    return counting.work()


def streamed(shape: Shape, layers: int, tokens: int, device: Device) -> tuple[Cost, list[str]]:
    """Seconds of a step, and a line for every sweep of its layer and of its head."""
    from streambp_compile import explain

    torch._dynamo.reset()
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(mode, shape, layers)
    with mode:
        report = explain(
            lambda i: model(input_ids=i, labels=i).loss,
            fake_ids(tokens),
            streambp_options={"device": device.name},
        )
    total, lines = Cost(), []
    for region in report.regions:
        for direction, schedule in (("forward", region.forward), ("backward", region.backward)):
            if schedule is None:
                continue
            costs = program_cost(schedule.program, region.analysis, schedule.chunks, device)
            handed = HANDED * sum(
                value_of(n).numel() for s in schedule.program.sweeps for n in s.sums if is_tensor(n)
            )
            total += (sum(costs, Cost()) + Cost(totals=handed / device.bandwidth)) * region.times
            for sweep, chunk, cost in zip(schedule.program.sweeps, schedule.chunks, costs):
                attends = any("attention" in op_name(n) for n in sweep.nodes)
                lines.append(
                    f"| {region.name}, {direction}, {sweep.direction}{', attends' * attends} | {chunk} | "
                    f"{cost.efficiency:.0%} | {1e3 * cost.seconds:.1f} |"
                )
    return total, lines


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


def section(shape: Shape, tokens: int, device: Device, eager: tuple[Work, Work]) -> str:
    """The table of one device, its chunk lengths, and the ratios."""
    (one, lines), (two, _) = (streamed(shape, layers, tokens, device) for layers in (1, 2))
    columns = {"streambp, flash": whole(one, two, shape.layers)}
    for kernel in dict(device.attention):
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
    pretend()
    shape = SHAPES[chosen.model]
    eager = tuple(checkpointed(shape, layers, chosen.tokens) for layers in (1, 2))
    text = "\n\n".join(section(shape, chosen.tokens, named(d), eager) for d in chosen.devices.split(","))
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

"""One distinct region and how it runs, as text and as graphs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from ..passes.ir import (
    READS_KEYS,
    Analysis,
    BindingRole,
    Refusal,
    Tokens,
    bytes_of,
    hint,
    is_tensor,
    rank_of,
    total_dtype,
    value_of,
)
from ..passes.planning.chunk_length import program_cost, sweep_work
from ..pipeline import Schedule, StreamedRegion
from .notices import mebibytes


@dataclass
class RegionReport:
    """One distinct region: its graphs, and how it is streamed or why not.

    split     its part of the model's graph, in torch functions
    joint     its joint forward-backward graph (forward alone under ``no_grad``), in ATen operations
    streamed  analysis and schedules, or None with a ``refusal``
    costs_nothing  it runs unchunked, but holds no more than its inputs and outputs
    at_full_length  bytes that a part of a streamed region holds, which runs at full length; 0 where that is
                    little beside the region's inputs and outputs
    widest_part     the user's line of the largest value of that part
    times     number of its occurrences in the model
    recomputable  its outputs are recomputed in the backward of the next region, not kept
    """

    split: GraphModule
    name: str = ""
    times: int = 1
    recomputable: bool = False
    joint: GraphModule | None = None
    streamed: StreamedRegion | None = None
    refusal: Refusal | None = None
    costs_nothing: bool = False
    at_full_length: int = 0
    widest_part: str = ""

    @property
    def has_nothing_to_stream(self) -> bool:
        """True if it holds, unchunked, no more than its inputs and outputs, or computes nothing."""
        return self.streamed is None and (self.costs_nothing or self.joint is None and self.refusal is None)

    @property
    def bytes(self) -> int:
        """Bytes that it holds: the larger of its two directions by the cost model, or its widest value
        unchunked."""
        if self.streamed is not None:
            directions = filter(None, (self.forward, self.backward))
            held = (streamed_bytes(d, self.streamed.analysis) for d in directions)
            return max(self.at_full_length, *held) * self.streamed.turns
        nodes = () if self.joint is None else self.joint.graph.nodes
        return max((bytes_of(value_of(n)) for n in nodes if is_tensor(n)), default=0)

    @property
    def analysis(self) -> Analysis | None:
        return self.streamed.analysis if self.streamed else None

    @property
    def forward(self) -> Schedule | None:
        return self.streamed.forward if self.streamed else None

    @property
    def backward(self) -> Schedule | None:
        return self.streamed.backward if self.streamed else None

    def artifacts(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield every graph of this region and its facts: a name, and a function that builds the text."""
        graphs = {"split": self.split, "joint": self.joint}
        if self.streamed is not None:
            graphs["normalized"] = self.streamed.joint
            yield self.artifact("facts"), self.streamed.analysis.table
        for direction in ("forward", "backward"):
            schedule = getattr(self, direction)
            if schedule is not None:
                yield self.artifact(direction), schedule.program.__str__
                graphs.update({f"{direction}_body_{i}": body.graph for i, body in enumerate(schedule.bodies)})
        for name, graph in graphs.items():
            if graph is not None:
                yield self.artifact(name), functools.partial(graph.print_readable, print_output=False)

    def artifact(self, name: str) -> str:
        return f"streambp_{self.name.replace(' ', '_')}_{name}"

    def __str__(self) -> str:
        lines = [f"{self.name}  ×{self.times}{', recomputed in the backward' * self.recomputable}"]
        if self.refusal is not None:
            kind = "has nothing to stream" if self.costs_nothing else "runs unchunked"
            return "\n".join([*lines, f"  {kind}: {self.refusal}"])
        if self.streamed is None:
            return "\n".join([*lines, "  nothing to run"])
        if self.streamed.batch is not None:
            lines.append(f"  runs for {self.streamed.batch}; sizes are those of one turn")
        forward = "forward and gradients together" if self.streamed.fused else "forward"
        lines += describe(forward, self.streamed.forward, self.streamed)
        if self.backward is not None:
            lines += describe("backward", self.backward, self.streamed)
        if self.at_full_length:
            lines += [
                f"  a part runs at full length, and holds {mebibytes(self.at_full_length)} at a time; its "
                f"largest value: {self.widest_part}"
            ]
        lines += [
            f"  checked in every call: {condition}; where it fails, the region is compiled again without it"
            for condition in self.streamed.analysis.checked
        ]
        return "\n".join(lines)


def describe(title: str, schedule: Schedule, region: StreamedRegion) -> list[str]:
    """Describe the schedule of one direction: a line for each value that crosses the boundary of a sweep."""
    lines = [f"  {title}: {len(schedule.program.sweeps)} sweep{'s' * (len(schedule.program.sweeps) != 1)}"]
    analysis, length = region.analysis, hint(region.analysis.length)
    costs = program_cost(schedule.program, analysis, schedule.chunks, region.device)
    for sweep, body, chunk, cost in zip(schedule.program.sweeps, schedule.bodies, schedule.chunks, costs):
        keys = ""
        if any(b.role in READS_KEYS for b in body.bindings):
            keys = f", keys {sweep.keys}: {proof(sweep.keys)}"
        lines.append(
            f"    {sweep.direction}, {math.ceil(length / chunk)} chunks of {chunk} tokens, "
            f"{len(sweep.nodes)} ops{keys}"
            + (f", matrix products at {cost.efficiency:.0%} of the device's rate" if cost.products else "")
        )
        lines += [f"      attention kernel: {choice}" for choice in body.kernels]
        in_place = {source: out for out, source in sweep.in_place}
        for binding in body.bindings:
            if binding.source is None or not is_tensor(binding.source) or binding.role is BindingRole.WHOLE:
                continue
            value = value_of(binding.source)
            size = bytes_of(value)
            if binding.role is BindingRole.CARRY:
                size = size // length * binding.state_rows
            fact = analysis.fact(binding.source)
            taken = f", overwritten by {in_place[binding.source].name}" if binding.source in in_place else ""
            lines.append(
                f"      {ROLES[binding.role]:<12} {binding.name:<26} "
                f"{fact.pattern(rank_of(binding.source)):<22} {mebibytes(size)}{taken}"
            )
    lines += [
        f"      too wide     {node.name:<26} {mebibytes(bytes_of(value_of(node)))} at full length"
        for node in schedule.program.too_wide
    ]
    lines.append(
        f"    predicted memory: {mebibytes(streamed_bytes(schedule, analysis))} streamed, "
        f"{mebibytes(whole_bytes(schedule, analysis))} unchunked"
    )
    return lines


ROLES = {
    BindingRole.ROWS: "reads rows",
    BindingRole.KEYS: "reads prefix",
    BindingRole.WRITE: "writes rows",
    BindingRole.APPEND: "keeps prefix",
    BindingRole.TOTAL: "accumulates",
    BindingRole.KEYTOTAL: "sums per key",
    BindingRole.CARRY: "carries",
}


def proof(keys) -> str:
    if (keys.lo, keys.hi) == (-math.inf, 0):
        return "causal, proved"
    if keys.hi == 0:
        return f"window of {int(1 - keys.lo)}, proved"
    return "not proved, all keys are read" if keys.hi == math.inf else "bounded range, proved"


def streamed_bytes(schedule: Schedule, analysis: Analysis) -> int:
    """Count the bytes of buffers between sweeps, accumulators, and the widest moment of one chunk."""
    kept = sum(bytes_of(value_of(n)) for n in schedule.program.kept)
    added = sum(
        bytes_of(value_of(n)) // value_of(n).dtype.itemsize * total_dtype(value_of(n).dtype).itemsize
        for s in schedule.program.sweeps
        for n in (*s.sums, *s.keysums)
        if is_tensor(n)
    )
    states = sum(
        bytes_of(value_of(n)) // c
        for s, c in zip(schedule.program.sweeps, schedule.chunks)
        for n in s.saved_states
    )
    chunk = max(
        (sweep_work(s, analysis).widest * c for s, c in zip(schedule.program.sweeps, schedule.chunks)),
        default=0,
    )
    return kept + added + states + chunk


def whole_bytes(schedule: Schedule, analysis: Analysis) -> int:
    """Count the bytes of the same values at full length, as autograd keeps them until the backward."""
    nodes = {n for s in schedule.program.sweeps for n in s.nodes}
    return sum(
        bytes_of(value_of(n))
        for n in nodes
        if is_tensor(n)
        and isinstance(analysis.facts[n], Tokens)
        and isinstance(n.target, torch._ops.OpOverload)
        and not n.target.is_view
    )

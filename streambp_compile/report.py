"""What became of each region: a value that prints itself and leads to the graphs."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import GraphModule

from .passes.ir import (
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
from .passes.planning.chunk_length import program_cost, sweep_work
from .pipeline import Schedule, StreamedRegion
from .runtime.memory_simulation import Peak
from .runtime.memory_timeline import Timeline, record


class NotStreamed(UserWarning, RuntimeError):
    """A region runs unchunked. The text says why, what it costs, and what to do; under ``strict`` it is an
    error."""


class StreamHint(UserWarning):
    """Memory or time that the user can save outside this package; the text says how."""


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def warn_refused(refusal: Refusal, cost: int | None) -> None:
    price = f", and its largest value takes {mebibytes(cost)} at full length" if cost else ""
    warnings.warn(
        f"streambp cannot stream a region: {refusal}. The region runs unchunked{price}; "
        "gradients stay exact.",
        NotStreamed,
        stacklevel=2,
    )


@dataclass
class RegionReport:
    """One distinct region: its graphs, and how it is streamed or why not.

    split     its part of the model's graph, in torch functions
    joint     its joint forward-backward graph (forward alone under ``no_grad``), in ATen operations
    streamed  analysis and schedules, or None with a ``refusal``
    costs_nothing  it runs unchunked, but holds no more than what enters and leaves it
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

    @property
    def has_nothing_to_stream(self) -> bool:
        """Does it hold no more, unchunked, than what enters and leaves it, or compute nothing at all?"""
        return self.streamed is None and (self.costs_nothing or self.joint is None and self.refusal is None)

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
        """Every graph of this region and its facts, by name; each text is made when it is wanted."""
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
        forward = "forward and gradients together" if self.streamed.fused else "forward"
        lines += describe(forward, self.streamed.forward, self.streamed)
        if self.backward is not None:
            lines += describe("backward", self.backward, self.streamed)
        lines += [
            f"  checked in every call: {condition}; where it fails, all keys are read"
            for condition in self.streamed.analysis.conditions
        ]
        return "\n".join(lines)


def describe(title: str, schedule: Schedule, region: StreamedRegion) -> list[str]:
    """The schedule of one direction: a line for each value that crosses the boundary of a sweep."""
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
    """Bytes of buffers between sweeps, of accumulators, and of the widest moment of one chunk."""
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
    """The same values at full length, as autograd keeps them from the forward to the backward."""
    nodes = {n for s in schedule.program.sweeps for n in s.nodes}
    return sum(
        bytes_of(value_of(n))
        for n in nodes
        if is_tensor(n)
        and isinstance(analysis.facts[n], Tokens)
        and isinstance(n.target, torch._ops.OpOverload)
        and not n.target.is_view
    )


@dataclass
class Report:
    """All regions of a compiled function, in order of execution; ``print`` it.

    regions  the distinct regions
    order    for every region of the model in turn, its index in ``regions``
    split    one graph module per Dynamo graph (several where the function has graph breaks)
    steps    per Dynamo graph, the compiled function and the fake inputs that it was compiled for
    notes    hints about memory
    lengths  number of tokens of each sequence that streams, the main one first
    peak     predicted peak memory of a step, if it was simulated
    """

    regions: list[RegionReport] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    split: list[GraphModule] = field(default_factory=list)
    steps: list[tuple[Callable, Sequence[object]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lengths: Sequence[object] = ()
    peak: Peak | None = None

    def add(
        self,
        module: GraphModule,
        links: list[RegionReport],
        lengths: Sequence[object],
        call: Callable,
        fakes: Sequence[object],
    ) -> None:
        """Record the regions of one Dynamo graph."""
        self.split.append(module)
        self.steps.append((call, fakes))
        self.lengths = self.lengths or lengths
        for region in links:
            known = next((i for i, r in enumerate(self.regions) if r is region), None)
            if known is None:
                known = len(self.regions)
                region.name, region.times = f"region {known}", 0
                self.regions.append(region)
            self.regions[known].times += 1
            self.order.append(known)

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        """Every allocation of a simulated step; None if its peak was not predicted."""
        return None if self.peak is None else record(*self.steps[0])

    def save(
        self, path: str | Path, beside: Report | None = None, names: tuple[str, str] = ("this", "beside")
    ) -> None:
        """Write a file of the kind that its name says.

        path    ``.html``: a page to look at, one file that loads nothing; ``.json``: the same data for
                scripts; ``.pickle``: the memory of the step as a snapshot for
                https://pytorch.org/memory_viz
        beside  another report, to compare with
        names   of the two reports on a page that compares them

        Raises ValueError for any other name, and for a snapshot where the peak of the step was not predicted.
        """
        from .page.files import save  # which knows reports

        save([self] if beside is None else [self, beside], names, Path(path))

    def __str__(self) -> str:
        streamed = sum(r.times for r in self.regions if r.streamed is not None)
        total = sum(r.times for r in self.regions)
        idle = sum(r.times for r in self.regions if r.has_nothing_to_stream)
        others = f", {idle} with nothing to stream" if idle else ""
        head = (
            f"streambp: {streamed} of {total} regions streamed{others}, {len(self.regions)} distinct, "
            f"{' and '.join(map(str, self.lengths)) or 'no'} tokens, in {len(self.split)} "
            f"graph{'s' * (len(self.split) != 1)}"
        )
        devices = dict.fromkeys(str(r.streamed.device) for r in self.regions if r.streamed is not None)
        head = "\n".join([head, *(f"planned for {device}" for device in devices)])
        return "\n\n".join(
            [head, *map(str, self.regions), *([str(self.peak)] if self.peak else []), *self.notes]
        )

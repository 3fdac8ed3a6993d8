"""The report of all regions, which prints itself and gives access to the graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from torch.fx import GraphModule

from .. import internals
from ..passes.phases import summary
from ..runtime.memory_simulation import Peak, simulate
from ..runtime.memory_timeline import Timeline, record
from .region_report import RegionReport


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
    seconds  of compilation, by stage
    """

    regions: list[RegionReport] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    split: list[GraphModule] = field(default_factory=list)
    steps: list[tuple[Callable, Sequence[object]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lengths: Sequence[object] = ()
    peak: Peak | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        module: GraphModule,
        links: list[RegionReport],
        lengths: Sequence[object],
        call: Callable,
        fakes: Sequence[object],
    ) -> None:
        """Add the regions of one Dynamo graph."""
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
        """Write a file of the kind that its suffix names.

        path    ``.html``: a page to look at, one file that loads nothing; ``.json``: the same data for
                scripts; ``.pickle``: the memory of the step as a snapshot for
                https://pytorch.org/memory_viz
        beside  another report, to compare with
        names   of the two reports on a page that compares them

        Raises ValueError for any other name, and for a snapshot where the peak of the step was not
        predicted.
        """
        page().save([self] if beside is None else [self, beside], names, Path(path))

    @property
    def headline(self) -> str:
        """Number of regions that stream, in one line."""
        streamed = sum(r.times for r in self.regions if r.streamed is not None)
        idle = sum(r.times for r in self.regions if r.has_nothing_to_stream)
        others = f", {idle} with nothing to stream" if idle else ""
        return f"streambp: {streamed} of {len(self.order)} regions streamed{others}"

    @property
    def summary(self) -> str:
        """The headline, the predicted peak, refusals, and the seconds of stages, in one line."""
        lost = [r for r in self.regions if r.streamed is None and not r.has_nothing_to_stream]
        reasons = [f"not streamed: {r.refusal}" for r in lost]
        peak = str(self.peak) if self.peak else ""
        return "; ".join(filter(None, [self.headline, peak, *reasons, self.timing]))

    @property
    def timing(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"compiled in {sum(self.seconds.values()):.1f} s: {stages}" if stages else ""

    def __str__(self) -> str:
        """Describe the regions that hold most first; those with nothing to stream share a line."""
        head = (
            f"{self.headline}, {len(self.regions)} distinct, "
            f"{' and '.join(map(str, self.lengths)) or 'no'} tokens, in {len(self.split)} "
            f"graph{'s' * (len(self.split) != 1)}"
        )
        devices = dict.fromkeys(str(r.streamed.device) for r in self.regions if r.streamed is not None)
        head = "\n".join([head, *(f"planned for {device}" for device in devices)])
        shown = sorted((r for r in self.regions if not r.has_nothing_to_stream), key=lambda r: -r.bytes)
        idle = ", ".join(f"{r.name} ×{r.times}" for r in self.regions if r.has_nothing_to_stream)
        tail = [f"nothing to stream in {idle}"] if idle else []
        tail += [str(part) for part in (self.peak, self.timing) if part]
        return "\n\n".join([head, *map(str, shown), *tail, *self.notes])


def page() -> ModuleType:
    """Import the page of a report: the one accessory that the backend opens, and only when asked for it."""
    from ..tools.page import files

    return files


def predict(report: Report) -> None:
    """Simulate the step if it is one graph; between several graphs, unknown code of the user runs."""
    if len(report.steps) != 1 or report.peak is not None:
        return
    try:
        report.peak = simulate(*report.steps[0])
    except Exception as error:  # an operator without a fake form: the rest of the report is still valid
        internals.log.debug("simulating a step failed", exc_info=True)
        report.notes.append(
            f"note: The peak memory of a step could not be predicted ({summary(error)}); the rest of this "
            "report is complete."
        )

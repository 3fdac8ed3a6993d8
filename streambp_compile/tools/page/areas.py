"""The holder of each allocation of a simulated step, derived from its place in the step, not from shapes."""

from __future__ import annotations

import enum
import linecache
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from torch.fx import Graph, Node

from ...passes.ir import Binding, BindingRole, Summed, ancestors, op_name, rank_of, where_of
from ...pipeline import Schedule, StreamedRegion
from ...regions.joint_regions import is_one_number
from ...reporting.region_report import RegionReport
from ...runtime.compression import Compressed
from ...runtime.memory_timeline import Allocation
from ...runtime.offload import Offloaded
from ...runtime.places import InBackward, InLink, InRegion, InSweep
from ...runtime.runner import Chunk


class Area(enum.Enum):
    """Purpose of memory; the order is that of the stacked areas of the page, from below."""

    INPUTS = "saved layer inputs"
    KEPT = "values kept between sweeps"
    KEYS = "keys and values"
    KEY_GRADIENTS = "gradients of keys and values"
    HIDDEN_GRADIENTS = "gradients of hidden states"
    SUMS = "weight gradients (sums over chunks)"
    FULL = "computed at full length"
    PLAIN = "unchunked regions and autograd"
    CHUNK = "one chunk of a layer"
    HEAD = "one chunk of the head and its loss"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Holder:
    """The value or operator that holds an allocation.

    name        of the value, or of the operator that made it
    pattern     of a value of the joint graph, such as ``b [t] d``
    where       the user's line, if one is known
    stage       direction, sweep and chunk, in words
    recomputed  made by a forward that ran again in the backward
    """

    area: Area
    name: str
    pattern: str = ""
    where: str = ""
    stage: str = ""
    recomputed: bool = False


Place = TypeVar("Place")


@dataclass(frozen=True)
class Position:
    """The places of an allocation, accessible by their kind."""

    places: tuple[object, ...]

    def last(self, kind: type[Place]) -> Place | None:
        return next((p for p in reversed(self.places) if isinstance(p, kind)), None)

    @property
    def in_backward(self) -> bool:
        return self.last(InBackward) is not None

    @property
    def report(self) -> RegionReport | None:
        place = self.last(InRegion) or self.last(InLink)
        return place.region if place and isinstance(place.region, RegionReport) else None

    @property
    def region(self) -> StreamedRegion | None:
        return self.report.streamed if self.report and self.last(InRegion) else None

    @property
    def graph(self) -> Graph | None:
        """The graph that runs: a chunk body, or an unchunked region's joint graph."""
        schedule, sweep = self.schedule, self.last(InSweep)
        if schedule is not None and sweep is not None:
            return schedule.bodies[sweep.step].graph.graph
        joint = self.report.joint if self.report is not None and self.region is None else None
        return None if joint is None else joint.graph

    @property
    def direction(self) -> str:
        driver = self.last(InRegion)
        return driver.direction if driver else ""

    @property
    def schedule(self) -> Schedule | None:
        region, sweep = self.region, self.last(InSweep)
        if region is None or sweep is None:
            return None
        schedules = (s for s in (region.forward, region.backward) if s is not None)
        return next((s for s in schedules if s.program is sweep.program), None)

    @property
    def stage(self) -> str:
        """``backward, sweep 2 of 2, tokens 720 to 959``."""
        parts = [self.direction] if self.direction else ["backward" if self.in_backward else "forward"]
        sweep, chunk = self.last(InSweep), self.last(Chunk)
        if sweep is not None:
            parts.append(f"sweep {sweep.step + 1} of {len(sweep.program.sweeps)}")
        if chunk is not None:
            parts.append(f"tokens {chunk.start} to {chunk.stop - 1}")
        return ", ".join(parts)


class Holders:
    """Finds the holder of an allocation; equal places are looked at once."""

    def __init__(self) -> None:
        self.found: dict[object, Holder] = {}
        self.lines: dict[tuple[int, str], str] = {}

    def of(self, allocation: Allocation) -> Holder:
        key = (*map(id, allocation.places), allocation.op, allocation.line, allocation.scratch)
        if key not in self.found:
            self.found[key] = self.holder_of(allocation)
        return self.found[key]

    def holder_of(self, allocation: Allocation) -> Holder:
        at = Position(allocation.places)
        again = at.in_backward and at.direction == "forward"
        binding, node = at.last(Binding), at.last(Node)
        if binding is not None and binding.source is not None:
            return of_value(area_of_binding(binding, at), binding.source, binding.output, at, again)
        if node is not None:
            return of_value(area_at_full_length(node, at), node, None, at, again)
        area = area_of_chunk(at) if at.last(Chunk) is not None else area_of_rest(at)
        where = self.line_of(operator_text(allocation), at.graph)
        return Holder(area, name_of(allocation), "", where, at.stage, again)

    def line_of(self, operator: str, graph: Graph | None) -> str:
        """Return the user's line of an operator, if all its calls in a graph have the same."""
        if graph is None:
            return ""
        key = (id(graph), operator)
        if key not in self.lines:
            lines = {where_of(n) for n in graph.nodes if op_name(n) == operator}
            self.lines[key] = lines.pop() if len(lines) == 1 else ""
        return self.lines[key]


def of_value(area: Area, node: Node, output: int | None, at: Position, again: bool) -> Holder:
    facts = at.region.analysis.facts.get(node) if at.region is not None else None
    fact = facts[output] if isinstance(facts, tuple) and output is not None else facts
    pattern = "" if fact is None or isinstance(fact, tuple) else fact.pattern(rank_of(node, output))
    return Holder(area, node.name, pattern, where_of(node), at.stage, again)


def area_of_binding(binding: Binding, at: Position) -> Area:
    """Classify an allocation that a driver makes for an input of chunk bodies."""
    if binding.role in OF_ROLES:
        return OF_ROLES[binding.role]
    if binding.role is BindingRole.WRITE and at.schedule is not None and at.region is not None:
        return area_written(binding.node, at.schedule, at.region, at.direction)
    return area_of_chunk(at)  # a copy in the layout that the body expects


OF_ROLES: Mapping[BindingRole, Area] = {
    BindingRole.APPEND: Area.KEYS,
    BindingRole.KEYTOTAL: Area.KEY_GRADIENTS,
    BindingRole.TOTAL: Area.SUMS,
    BindingRole.CARRY: Area.KEPT,
}


def area_written(node: Node, schedule: Schedule, region: StreamedRegion, direction: str) -> Area:
    """Classify rows that a sweep writes at full length."""
    if node not in schedule.program.outputs:
        read_as_keys = (
            b.node is node for body in schedule.bodies for b in body.bindings if b.role is BindingRole.KEYS
        )
        return Area.KEYS if any(read_as_keys) else Area.KEPT
    if direction == "backward" or not ancestors([node]).isdisjoint(region.tangents):
        return Area.HIDDEN_GRADIENTS
    return Area.KEPT if node in region.saved else Area.INPUTS


def area_at_full_length(node: Node, at: Position) -> Area:
    fact = at.region.analysis.facts.get(node) if at.region is not None else None
    return Area.SUMS if isinstance(fact, Summed) else Area.FULL


def area_of_chunk(at: Position) -> Area:
    """Classify a chunk's own memory: in the region whose backward starts from the loss, or in any other."""
    return Area.HEAD if at.region is not None and is_one_number(at.region.tangents) else Area.CHUNK


def area_of_rest(at: Position) -> Area:
    if at.last(Offloaded) is not None or at.last(Compressed) is not None:
        return Area.INPUTS
    if at.region is None:
        return Area.PLAIN
    return Area.HIDDEN_GRADIENTS if at.direction == "backward" else Area.FULL


def name_of(allocation: Allocation) -> str:
    """Name the operator that made a buffer, or the kernel that takes it while it runs."""
    if not allocation.scratch:
        return operator_text(allocation)
    kernel = op_text(allocation.op).removeprefix("_scaled_dot_product_")
    return f"{kernel} (inside the kernel)"


def operator_text(allocation: Allocation) -> str:
    """Return the operator's name, such as ``mm``; in code of Inductor, the first that writes the buffer."""
    return op_text(allocation.op) if allocation.line is None else written_by(*allocation.line)


def op_text(op: str) -> str:
    """Return ``mm`` for ``aten.mm.default``."""
    return op.split(".")[1] if "." in op else op


CALLED = re.compile(
    r"extern_kernels\.(\w+)\(|torch\.ops\.\w+\.(\w+)|((?:cpp|triton)\w+?)(?:_\d+)?(?:\.run)?\("
)
FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_?(\w*)")
VIEW = re.compile(r"\s*(\w+) = (.*)")
TAKEN = re.compile(r"\s*(\w+) = empty_strided_\w+\(")


@lru_cache(1 << 14)
def written_by(file: str, line: int) -> str:
    """Find the operator of one line of Inductor's code. For a line that only allocates memory, it is the
    first operator that gets the memory or a view of it."""
    text = linecache.getline(file, line)
    taken = TAKEN.match(text)
    names = {taken[1]} if taken else set()
    while taken and text and not (CALLED.search(text) and reads(text, names)):
        line += 1
        text = linecache.getline(file, line)
        view = VIEW.match(text)
        if view and reads(view[2], names):
            names.add(view[1])
    call = CALLED.search(text)
    name = next(filter(None, call.groups())) if call else "buffer"
    fused = FUSED.match(name)
    return f"fused {fused[1].replace('_', ' ')}".strip() if fused else name


def reads(text: str, names: Container[str]) -> bool:
    return any(word in names for word in re.findall(r"\w+", text))

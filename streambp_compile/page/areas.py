"""What holds each allocation of a simulated step: read from where the step was, never from shapes."""

from __future__ import annotations

import enum
import linecache
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from torch.fx import Node

from ..passes.ir import Binding, BindingRole, Body, Summed, ancestors, op_name, rank_of, where_of
from ..pipeline import Schedule, StreamedRegion, is_one_number
from ..report import RegionReport
from ..runtime.memory_timeline import Allocation
from ..runtime.offload import Offloaded
from ..runtime.places import InBackward, InRegion, InSweep
from ..runtime.runner import Chunk


class Area(enum.Enum):
    """What memory is held for; the order is that of the stacked areas of the page, from below."""

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
    """What holds an allocation.

    name     of the value, or of the operator that made it
    pattern  of a value of the joint graph, such as ``b [t] d``
    where    the user's line, if one is known
    stage    direction, sweep and chunk, in words
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
    """The places of an allocation, each by its kind."""

    places: tuple[object, ...]

    def last(self, kind: type[Place]) -> Place | None:
        return next((p for p in reversed(self.places) if isinstance(p, kind)), None)

    @property
    def in_backward(self) -> bool:
        return self.last(InBackward) is not None

    @property
    def region(self) -> StreamedRegion | None:
        driver = self.last(InRegion)
        return driver.region.streamed if driver and isinstance(driver.region, RegionReport) else None

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


@dataclass
class Holders:
    """Finds what holds an allocation; equal places are looked at once."""

    found: dict[object, Holder] = field(default_factory=dict)

    def of(self, allocation: Allocation) -> Holder:
        key = (*map(id, allocation.places), allocation.op, allocation.line, allocation.scratch)
        if key not in self.found:
            self.found[key] = holder_of(allocation)
        return self.found[key]


def holder_of(allocation: Allocation) -> Holder:
    at = Position(allocation.places)
    again = at.in_backward and at.direction == "forward"
    binding, node = at.last(Binding), at.last(Node)
    if binding is not None and binding.source is not None:
        return of_value(area_of_binding(binding, at), binding.source, binding.output, at, again)
    if node is not None:
        return of_value(area_at_full_length(node, at), node, None, at, again)
    if at.last(Chunk) is not None:
        return in_chunk(allocation, at, again)
    return Holder(area_of_rest(at), operator_text(allocation), stage=at.stage, recomputed=again)


def of_value(area: Area, node: Node, output: int | None, at: Position, again: bool) -> Holder:
    facts = at.region.analysis.facts.get(node) if at.region is not None else None
    fact = facts[output] if isinstance(facts, tuple) and output is not None else facts
    pattern = "" if fact is None or isinstance(fact, tuple) else fact.pattern(rank_of(node, output))
    return Holder(area, node.name, pattern, where_of(node), at.stage, again)


def area_of_binding(binding: Binding, at: Position) -> Area:
    """What a driver allocates for an input of chunk bodies."""
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
    """What rows are that a sweep writes at full length."""
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
    """A chunk's own memory: in the region whose backward starts from the loss, or in any other."""
    return Area.HEAD if at.region is not None and is_one_number(at.region.tangents) else Area.CHUNK


def area_of_rest(at: Position) -> Area:
    if at.last(Offloaded) is not None:
        return Area.INPUTS
    if at.last(InRegion) is None:
        return Area.PLAIN
    return Area.HIDDEN_GRADIENTS if at.direction == "backward" else Area.FULL


def in_chunk(allocation: Allocation, at: Position, again: bool) -> Holder:
    """What a chunk body allocates by itself, with the user's line where its operator stands on one alone."""
    name = operator_text(allocation)
    sweep, schedule = at.last(InSweep), at.schedule
    where = line_of(name, schedule.bodies[sweep.step]) if sweep and schedule else ""
    text = f"{name} (inside the kernel)" if allocation.scratch else name
    return Holder(area_of_chunk(at), text, "", where, at.stage, again)


def line_of(operator: str, body: Body) -> str:
    """The user's line of an operator, if all its calls in a body are of the same."""
    lines = {where_of(n) for n in body.graph.graph.nodes if op_name(n) == operator}
    return lines.pop() if len(lines) == 1 else ""


def operator_text(allocation: Allocation) -> str:
    """``mm``; in code of Inductor, what first writes the buffer."""
    if allocation.line is not None:
        return written_by(*allocation.line)
    return allocation.op.split(".")[1] if "." in allocation.op else allocation.op


CALLED = re.compile(
    r"extern_kernels\.(\w+)\(|torch\.ops\.\w+\.(\w+)|((?:cpp|triton)\w+?)(?:_\d+)?(?:\.run)?\("
)
FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_?(\w*)")
VIEW = re.compile(r"\s*(\w+) = (.*)")
TAKEN = re.compile(r"\s*(\w+) = empty_strided_\w+\(")


@lru_cache(1 << 14)
def written_by(file: str, line: int) -> str:
    """The operator of one line of Inductor's code; of a line that only takes memory, the first that gets it
    or a view of it."""
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

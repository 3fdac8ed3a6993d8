"""The timeline of a step in the format of ``torch.cuda.memory._snapshot``.

The memory viewer of PyTorch (https://pytorch.org/memory_viz) opens it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.memory_timeline import Allocation, Timeline
from .areas import Holder, Holders


class Addresses:
    """A heap that returns the lowest free address with enough room."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # address and size, sorted; adjacent ones are merged
        self.end = 0

    def take(self, size: int) -> int:
        for i, (address, room) in enumerate(self.free):
            if room >= size:
                self.free[i : i + 1] = [(address + size, room - size)] if room > size else []
                return address
        address, self.end = self.end, self.end + size
        return address

    def give(self, address: int, size: int) -> None:
        i = bisect.bisect(self.free, (address, 0))
        if i < len(self.free) and self.free[i][0] == address + size:
            size += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == address:
            i -= 1
            address, before = self.free.pop(i)
            size += before
        self.free.insert(i, (address, size))


Event = dict[str, Any]


def snapshot_of(timelines: Sequence[Timeline]) -> Mapping[str, object]:
    """Build a snapshot with one device for each step, each with one segment. Times are moments of the
    timeline, in microseconds. Each allocation has a category, by which viewers colour it, and the user's
    line as its innermost frame."""
    traces, segments = zip(*(trace_of(timeline, i) for i, timeline in enumerate(timelines)))
    return {"segments": list(segments), "device_traces": list(traces), "allocator_settings": {}}


def trace_of(timeline: Timeline, device: int) -> tuple[list[Event], Event]:
    """List the events of one step, and build the segment that they allocate from."""
    events = [unknown()]
    heap, holders, places = Addresses(), Holders(), dict[int, int]()
    known: dict[object, list[Event]] = {}  # equal stacks are written once
    for moment, index, begins in changes(timeline):
        allocation = timeline.allocations[index]
        holder = holders.of(allocation)
        if begins:
            places[index] = heap.take(allocation.bytes)
        event = {"addr": places[index], "size": allocation.bytes, "stream": 0, "time_us": moment}
        stack = (holder, allocation.link, allocation.shape, allocation.dtype)
        known.setdefault(stack, frames(allocation, holder))
        event |= {"category": str(holder.area), "frames": known[stack]}
        for action in ("alloc",) if begins else ("free_requested", "free_completed"):
            events.append({"action": action, **event})
        if not begins:
            heap.give(places[index], allocation.bytes)
    return events, segment(device, heap.end)


def changes(timeline: Timeline) -> list[tuple[int, int, bool]]:
    """List the moments at which an allocation (by its index) begins or ends. An allocation that lives to the
    end is not released."""
    begins = [(a.start, i, True) for i, a in enumerate(timeline.allocations)]
    ends = [(a.end, i, False) for i, a in enumerate(timeline.allocations) if a.end < timeline.end]
    return sorted(begins + ends)


def unknown() -> Event:
    """Build an event of the unknown category, which viewers expect wherever there are others."""
    nothing = {"addr": 0, "size": 0, "stream": 0, "time_us": 0}
    return {"action": "alloc", **nothing, "category": "unknown", "frames": []}


def segment(device: int, size: int) -> Event:
    """Build the segment of all memory of the step, free at its end."""
    block = {"size": size, "requested_size": size, "state": "inactive", "address": 0, "frames": []}
    return {
        "device": device,
        "address": 0,
        "total_size": size,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def frames(allocation: Allocation, holder: Holder) -> list[Event]:
    """List the frames that the viewer shows for an allocation. The value with the user's line comes first,
    then the place in the step."""
    file, line, code = parsed(holder.where)
    shape = f"{'×'.join(map(str, allocation.shape))} {allocation.dtype}".strip()
    value = " ".join(filter(None, (holder.name, holder.pattern, shape)))
    region = "" if allocation.link is None else f"region {allocation.link} of the chain, "
    return [
        {"filename": str(holder.area), "line": 0, "name": value},
        *([{"filename": file, "line": line, "name": code}] if file else []),
        {"filename": "streambp_compile", "line": 0, "name": f"{region}{holder.stage}"},
    ]


def parsed(where: str) -> tuple[str, int, str]:
    """Split ``file:line: code`` into three."""
    file, _, rest = where.partition(":")
    line, _, code = rest.partition(":")
    return (file, int(line), code.strip()) if line.strip().isdigit() else ("", 0, "")

"""The memory of a step for the page: areas at as many moments as can be drawn, and buffers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from ...runtime.memory_timeline import Timeline
from ...runtime.places import InBackward, InLink, InRegion
from .areas import Area, Holder, Holders
from .shown import Shown

MOMENTS = 900  # about as many as a chart has pixels
AREAS = tuple(Area)


def memory_of(report: Shown) -> dict[str, Any] | None:
    """Compute the data that the page draws; None if the peak of the step was not predicted.

    moments  at which the areas are given, the peak among them
    peak     index of the peak in ``moments``
    held     per area its bytes at each of these moments; their sum over the areas is the memory held
    stages   per moment the region of the chain (or -1) and the place in it, as an index into ``texts``
    holders  holder of a buffer: area, name, pattern, user's line, recomputed
    buffers  held at one of the moments: bytes, first moment, end, region, holder, stage, shape
    visits   of regions: name, index in the chain, direction, first moment, end
    """
    timeline = report.timeline
    if timeline is None:
        return None
    moments = chosen(timeline.held(), MOMENTS)
    holders, texts = Holders(), Numbered()
    alive = [a for a in timeline.allocations if is_alive(a.start, a.end, moments)]
    numbered, buffers = Numbered(), []
    for a in alive:
        holder = holders.of(a)
        shape = f"{'×'.join(map(str, a.shape))} {a.dtype}".strip()
        stage = texts.of(holder.stage)
        buffers.append([a.bytes, a.start, a.end, -1 if a.link is None else a.link])
        buffers[-1] += [numbered.of(without_stage(holder)), stage, texts.of(shape)]
    return {
        "areas": [str(area) for area in AREAS],
        "bytes": max(timeline.held()),
        "backward": report.peak is not None and report.peak.backward,
        "end": timeline.end,
        "moments": moments,
        "peak": moments.index(timeline.peak),
        "held": by_area(alive, holders, moments),
        "holders": list(numbered.known),
        "buffers": buffers,
        "texts": list(texts.known),
        "visits": visits(timeline, report),
    }


class Numbered:
    """Objects numbered in the order in which they are first met."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, thing: object) -> int:
        return self.known.setdefault(thing, len(self.known))


def without_stage(holder: Holder) -> tuple[int, str, str, str, bool]:
    return AREAS.index(holder.area), holder.name, holder.pattern, holder.where, holder.recomputed


def chosen(held: Sequence[int], count: int) -> list[int]:
    """Choose at most ``count`` moments, one per stretch. Each is the moment of its stretch at which the most
    is held, so that no peak is lost."""
    width = max(1, -(-len(held) // count))
    return [
        max(range(i, min(i + width, len(held))), key=held.__getitem__) for i in range(0, len(held), width)
    ]


def is_alive(start: int, end: int, moments: Sequence[int]) -> bool:
    """Is memory held at one of the moments?"""
    i = bisect.bisect_left(moments, start)
    return i < len(moments) and moments[i] < end


def by_area(alive, holders: Holders, moments: Sequence[int]) -> list[list[int]]:
    """Sum the bytes of each area at each moment."""
    held = [[0] * (len(moments) + 1) for _ in AREAS]
    for a in alive:
        line = held[AREAS.index(holders.of(a).area)]
        line[bisect.bisect_left(moments, a.start)] += a.bytes
        line[bisect.bisect_left(moments, a.end)] -= a.bytes
    for line in held:
        for i in range(1, len(line)):
            line[i] += line[i - 1]
    return [line[:-1] for line in held]


def visits(timeline: Timeline, report: Shown) -> list[list[Any]]:
    """List the visits to regions of the chain in order; the backward as a whole comes first."""
    found = []
    for visit in timeline.visits:
        if isinstance(visit.place, InBackward):
            found.append(["backward", -1, "backward", visit.start, visit.end])
        elif isinstance(visit.place, InLink) and visit.link is not None:
            name = report.regions[report.order[visit.link]].name
            found.append([name, visit.link, "forward", visit.start, visit.end])
        elif isinstance(visit.place, InRegion) and visit.place.direction != "forward":
            link = -1 if visit.link is None else visit.link
            name = report.regions[report.order[link]].name if link >= 0 else "a region"
            found.append([name, link, "backward", visit.start, visit.end])
    return sorted(found, key=lambda v: (v[3], v[1]))

"""The fastest plan within a budget, and the longest sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ...memory.chain_plan import SHORTER
from .whole_model import Prediction, Streaming

CLOSE = 0.01  # share of the budget that the longest sequence may leave unused
TRIES = 12  # the most lengths that are tried
MOST = 8  # the largest factor from a length that fits to the next one
GIB = 2**30


def all_plans(streaming: Streaming) -> Iterator[Prediction]:
    """Yield all plans, from the least memory to the most."""
    for part in reversed(SHORTER):
        yield streaming.shorter(part)
    yield streaming.offloaded
    yield streaming.default
    for count in range(1, len(streaming.levels) + 1):
        yield streaming.keeping(count)


def frontier(plans: list[Prediction]) -> list[Prediction]:
    """List the plans that no other beats in both peak and seconds, by ascending peak."""
    found: list[Prediction] = []
    for plan in sorted(plans, key=lambda p: (p.peak, p.seconds)):
        if not found or (plan.seconds or 0) < (found[-1].seconds or 0):
            found.append(plan)
    return found


def fastest_within(streaming: Streaming, room: int) -> Prediction | None:
    """Find the fastest plan that takes at most ``room`` bytes above weights and gradients, or None. Between
    two plans for all layers, the part of the layers that has the second is interpolated."""
    if streaming.default.peak <= room:
        return with_budget(fattest_within(streaming, room), room)
    if streaming.offloaded.peak <= room:
        return with_budget(between(streaming.offloaded, streaming.default, room), room)
    shorter = (streaming.shorter(part) for part in SHORTER)
    return next((with_budget(plan, room) for plan in shorter if plan.peak <= room), None)


def fattest_within(streaming: Streaming, room: int) -> Prediction:
    """Find the most values that fit, by bisection: the peak grows with every level."""
    fits, over, last = 0, len(streaming.levels) + 1, streaming.default
    beyond: Prediction | None = None
    while over - fits > 1:
        middle = (fits + over) // 2
        plan = streaming.keeping(middle)
        if plan.peak <= room:
            fits, last = middle, plan
        else:
            over, beyond = middle, plan
    return last if beyond is None else between(last, beyond, room)


def between(lean: Prediction, fat: Prediction, room: int) -> Prediction:
    """Combine two plans: as many layers as fit take the second. Peak and seconds are interpolated."""
    share = (room - lean.peak) / max(1, fat.peak - lean.peak)
    if lean.seconds is None or fat.seconds is None or not 0 < share < 1:
        return lean
    return Prediction(
        f"{share:.0%} of the way from {lean.name} to {fat.name}",
        room,
        lean.seconds + share * (fat.seconds - lean.seconds),
    )


def with_budget(plan: Prediction, room: int) -> Prediction:
    return replace(plan, options=(("memory_budget", f"{room / GIB:.2f}GiB"),))


def longest(peak_of: Callable[[int], int], room: int, first: int, step: int) -> int:
    """Find the longest sequence whose peak fits, within a hundredth; 0 if none does.

    The length is a multiple of ``step``.

    peak_of  tokens → bytes, ascending
    room     bytes
    first    the length that is tried first
    """
    known: dict[int, int] = {}
    tokens = max(step, first // step * step)
    for _ in range(TRIES):
        known[tokens] = peak_of(tokens)
        if (1 - CLOSE) * room <= known[tokens] <= room:
            return tokens
        tokens = next_length(known, room) // step * step
        if tokens in known or tokens < step:
            break
    return max((t for t, peak in known.items() if peak <= room), default=0)


def next_length(known: Mapping[int, int], room: int) -> int:
    """Choose a length that should leave half of the allowed rest unused. It is on the line through the two
    nearest lengths, or half way between one that fits and one that does not."""
    aim = (1 - CLOSE / 2) * room
    fits = max((t for t, peak in known.items() if peak <= room), default=0)
    over = min((t for t, peak in known.items() if peak > room), default=MOST * max(fits, 1))
    (near, peak), *others = sorted(known.items(), key=lambda point: abs(point[1] - aim))
    far, other = others[0] if others else (0, 0)
    found = near + (aim - peak) * (near - far) / (peak - other) if peak != other else over
    return int(found) if fits < found < over else (fits + over) // 2

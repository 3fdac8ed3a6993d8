"""What the analysis of a region takes for granted of the masks of a call, checked when it is called."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .passes.ir import Condition, HidesOutside, Reach, Restarts, Seen, ancestors

BLOCK = 1 << 20  # entries of a stored mask that are looked at together


class Guard:
    """Do the inputs of a call keep the conditions?

    Costs a few operations on ``[B, T]`` values, one pass over a stored mask, and one synchronisation with the device; nothing for inputs that
    were checked before, so that all layers of a step share one check, and all steps that of a stored mask.
    """

    def __init__(self, placeholders: Sequence[Node], conditions: Sequence[Condition]):
        self.checks = [Check(placeholders, c) for c in conditions]

    def broken(self, inputs: Sequence[object]) -> Condition | None:
        """The first condition that the inputs do not keep, if any."""
        return next((check.condition for check in self.checks if not check(inputs)), None)


class Check:
    """One condition, and of which inputs that are alive it was found to be kept."""

    def __init__(self, placeholders: Sequence[Node], condition: Condition):
        self.condition = condition
        self.masks, self.reads = masks_of(placeholders, condition.nodes)
        self.known: dict[tuple, tuple[tuple, bool]] = {}

    def __call__(self, inputs: Sequence[object]) -> bool:
        given = [inputs[i] for i in self.reads]
        key = tuple(id(v) if isinstance(v, torch.Tensor) else v for v in given)
        if key not in self.known or not all(map(same, self.known[key][0], given)):
            with torch.no_grad():
                kept = holds(self.condition, self.masks(*given))
            self.known = {k: found for k, found in self.known.items() if all(map(is_alive, found[0]))}
            self.known[key] = tuple(map(remembered, given)), kept
        return self.known[key][1]


def masks_of(placeholders: Sequence[Node], masks: Sequence[Node]) -> tuple[GraphModule, list[int]]:
    """A graph that computes the masks alone, and the positions of the inputs that it reads."""
    needed = ancestors(masks)
    graph, values = Graph(), {}
    for node in masks[0].graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[n] for n in masks))
    return GraphModule(masks[0].graph.owning_module, graph), [i for i, n in enumerate(placeholders) if n in needed]


def holds(condition: Condition, masks: Sequence[torch.Tensor]) -> bool:
    """Do the masks of a call keep a condition?"""
    if isinstance(condition, Restarts):
        return grow(masks[: 2 * len(condition.alike.same)], masks[2 * len(condition.alike.same):])
    masks = [ordered(mask, seen) for mask, seen in zip(masks, condition.seen)]
    if isinstance(condition, HidesOutside):
        return all((allowed | ~visible(part, condition.seen[0].hides)).all() for (part,), allowed in blocks(masks, condition.band))
    if any(seen.hides is None and not (mask < far(mask)).all() for mask, seen in zip(masks, condition.seen)):
        return False  # numbers so large that lowest ones may not vanish beside them
    if len(masks) == 1 and masks[0].shape[1] == 1:
        return every_row_sees(visible(masks[0], condition.seen[0].hides), condition.band)
    for parts, allowed in blocks(masks, condition.band):
        for part, seen in zip(parts, condition.seen):
            allowed = allowed & visible(part, seen.hides)
        if not allowed.any(-1).all():
            return False
    return True


def grow(same: Sequence[torch.Tensor], upto: Sequence[torch.Tensor]) -> bool:
    """Does one of the values ``upto`` grow with every token over which those of ``same`` stay, and do those never return?

    Each comes twice: for the rows ``[.., T, 1]``, and for the keys ``[.., 1, T]`` or ``[T]``.
    """
    pairs = [(rows.squeeze(-1), keys if keys.dim() == 1 else keys.squeeze(-2)) for rows, keys in zip((*same, *upto)[::2], (*same, *upto)[1::2])]
    alike = torch.stack([(rows == keys).all() for rows, keys in pairs]).all()
    steps = [keys.diff() for _, keys in pairs]
    held, growing = steps[: len(same) // 2], steps[len(same) // 2:]
    restarts = functools.reduce(torch.logical_or, [step > 0 for step in held], torch.zeros((), dtype=torch.bool, device=alike.device))
    never_back = [(step >= 0).all() for step in held]
    grows = torch.stack([((step > 0) | restarts).all() for step in growing]).any()
    return bool(torch.stack([alike, grows, *never_back]).all())


def ordered(mask: torch.Tensor, seen: Seen) -> torch.Tensor:
    """A mask as ``[masks, rows or 1, keys]``."""
    mask = mask.movedim(seen.key, -1).unsqueeze(-2) if seen.row is None else mask.movedim((seen.row, seen.key), (-2, -1))
    return mask.flatten(0, -3) if mask.dim() > 2 else mask[None]


def blocks(masks: Sequence[torch.Tensor], band: Reach) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Masks a few rows at a time, and which of those rows' keys a band allows."""
    keys = torch.arange(masks[0].shape[-1], device=masks[0].device)
    rows = max(mask.shape[1] for mask in masks)
    step = max(1, BLOCK // max(math.prod((mask.shape[0], mask.shape[2])) for mask in masks))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        distance = keys - torch.arange(start, start + count, device=keys.device)[:, None]
        yield [m if m.shape[1] == 1 else m.narrow(1, start, count) for m in masks], (distance >= band.lo) & (distance <= band.hi)


def every_row_sees(keys: torch.Tensor, band: Reach) -> bool:
    """Is one of the keys that the band allows visible, for each row? ``keys``: ``[masks, 1, keys]``, alike for all rows."""
    count, length = torch.nn.functional.pad(keys.cumsum(-1), (1, 0)), keys.shape[-1]
    rows = torch.arange(length, device=keys.device)
    first = (rows + max(band.lo, -length)).clamp(0, length).long()
    last = (rows + min(band.hi, length) + 1).clamp(0, length).long()
    return bool((count[..., last] > count[..., first]).all())


def visible(mask: torch.Tensor, hides: bool | None) -> torch.Tensor:
    """Where a mask leaves a key. Numbers added to scores do where they are not nearly the lowest."""
    return mask != hides if hides is not None else ~(mask <= -far(mask))


def far(mask: torch.Tensor) -> float:
    return torch.finfo(mask.dtype).max / 4


def is_alive(old: object) -> bool:
    return old is not None and (not isinstance(old, tuple) or old[0]() is not None)


def remembered(value: object) -> object:
    """What to compare the inputs of the next call with: a number, or a tensor and the count of its changes."""
    if not isinstance(value, torch.Tensor):
        return value
    return None if value.is_inference() else (weakref.ref(value), value._version)


def same(old: object, new: object) -> bool:
    if not isinstance(new, torch.Tensor):
        return old == new
    return old is not None and old[0]() is new and old[1] == new._version

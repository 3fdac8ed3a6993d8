"""What the analysis of a region assumes of the masks of a call, checked at every call.

Nothing is remembered from one call to the next. A mask's memory can be rewritten without its version counter
noticing: through numpy, ``.data``, a loader's shared buffer, or a custom kernel. Within one call of the
compiled function, equal questions are asked once.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..passes.ir import Condition, KeyMask, MaskHidesOutside, PositionsRestart, Reach, ancestors, value_of
from ..report import StreamHint


class Guard:
    """Do the inputs of a call satisfy the conditions of a region?

    Cost of a call: a stored mask ``[.., T, T]`` is read once, by one compiled reduction that allocates
    nothing of its size (0.2 ms for a boolean mask of 32768 tokens at 5 TB/s). Padding masks and position ids
    ``[B, T]`` take a dozen small operations. Reading the answer synchronises with the device once per call of
    the compiled function, for all its regions together (`answered`); without conditions there is no guard and
    no synchronisation.

    placeholders  of the region's graph
    conditions    what the region's key ranges rest on
    positions     of which input of a call each placeholder is; without it, its own
    """

    def __init__(
        self,
        placeholders: Sequence[Node],
        conditions: Sequence[Condition],
        positions: Sequence[int] | None = None,
    ):
        self.conditions = tuple(conditions)
        counts = [len(c.nodes) for c in conditions]
        masks, read = masks_of(placeholders, [n for c in conditions for n in c.nodes])
        self.reads = [i if positions is None else positions[i] for i in read]
        self.text = f"{text_of(masks)} {[describe(c) for c in conditions]}"

        def answers(*given: object) -> Tensor:
            parts = list(masks(*given))
            return torch.stack(
                [
                    kept(condition, [parts.pop(0) for _ in range(count)])
                    for condition, count in zip(self.conditions, counts)
                ]
            )

        self.answers_of = answers
        if any(s.row is not None for c in conditions if not isinstance(c, PositionsRestart) for s in c.seen):
            self.answers_of = compiled(answers, [value_of(placeholders[i]) for i in read])

    def answers(self, given: Sequence[object]) -> Tensor:
        """Does each condition hold for the inputs at ``reads``: ``[conditions]`` booleans on their device.

        Does not synchronise.
        """
        device = next(v.device.type for v in given if isinstance(v, Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self.answers_of(*given)

    def broken(self, inputs: Sequence[object]) -> Condition | None:
        """The first condition that the inputs of a call do not satisfy, if any. Synchronises."""
        question = Question(self, tuple(self.reads), 0)
        return answered([question], inputs)[question.key]


def compiled(function: Callable, examples: Sequence[object]) -> Callable:
    """One pass over a stored mask instead of a temporary of its size for every operation."""
    try:
        return internals.compile_function(function, examples)
    except Exception as error:  # slower and larger, and as right
        internals.log.debug("compiling a check of masks failed", exc_info=True)
        warnings.warn(
            "streambp: the check of a stored attention mask could not be compiled "
            f"({type(error).__name__}). It runs uncompiled at every call and takes several times the "
            "mask's memory for a moment. Build the mask inside the compiled function, or pass "
            "is_causal=True, and no check is needed.",
            StreamHint,
            stacklevel=2,
        )
        return function


def masks_of(placeholders: Sequence[Node], masks: Sequence[Node]) -> tuple[GraphModule, list[int]]:
    """A graph that computes the masks alone, and the positions of the inputs that it reads."""
    needed = ancestors(masks)
    graph, values = Graph(), {}
    for node in masks[0].graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[n] for n in masks))
    reads = [i for i, n in enumerate(placeholders) if n in needed]
    return GraphModule(masks[0].graph.owning_module, graph), reads


def text_of(module: GraphModule) -> str:
    """A graph without the names of its nodes. Constants are known by the module that holds them."""
    index: dict[Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        index[node] = f"%{len(index)}"
        if node.op == "placeholder":
            continue
        target = f"{node.target} of {id(module)}" if node.op == "get_attr" else node.target
        lines.append(f"{target} {torch.fx.node.map_arg((node.args, node.kwargs), lambda n: index[n])}")
    return "\n".join(lines)


def describe(condition: Condition) -> str:
    """A condition without the names of its nodes."""
    if isinstance(condition, PositionsRestart):
        return f"Restarts {len(condition.alike.same)} {len(condition.alike.upto)}"
    return f"{type(condition).__name__} {[(s.row, s.key, s.hides) for s in condition.seen]} {condition.band}"


# One call of a chain of regions


@dataclass(frozen=True)
class Question:
    """A guard asked of certain values.

    values      what names them: nodes of the chain's graph, or positions
    generation  how many regions that write into inputs ran before: after each, values may differ
    """

    guard: Guard
    values: tuple
    generation: int

    @property
    def key(self) -> tuple:
        """Equal for regions that need not ask twice."""
        return self.guard.text, self.values, self.generation


def rounds(questions: Sequence[Question | None], made: Mapping[Node, int]) -> list[tuple[Question, ...]]:
    """Which questions to answer before each region: at the first that has one, all whose values exist.

    questions  one of each region in order, or None
    made       value → the region that makes it; inputs of the graph are not in it
    """
    known: set[tuple] = set()
    found: list[tuple[Question, ...]] = []
    for i, first in enumerate(questions):
        asked = {}
        if first is not None and first.key not in known:
            asked = {
                q.key: q
                for q in questions[i:]
                if q is not None
                and q.key not in known
                and q.generation == first.generation
                and all(made.get(v, -1) < i for v in q.values)
            }
        known |= asked.keys()
        found.append(tuple(asked.values()))
    return found


def answered(questions: Sequence[Question], values: Mapping | Sequence) -> dict[tuple, Condition | None]:
    """The first broken condition of every question, by its key. Synchronises once a device."""
    found = [q.guard.answers([values[v] for v in q.values]) for q in questions]
    by_device: dict[torch.device, list[Tensor]] = {}
    for answers in found:
        by_device.setdefault(answers.device, []).append(answers)
    read = {device: iter(torch.cat(answers).cpu()) for device, answers in by_device.items()}
    result: dict[tuple, Condition | None] = {}
    for question, answers in zip(questions, found):
        held = [bool(next(read[answers.device])) for _ in question.guard.conditions]
        broken = (c for c, holds in zip(question.guard.conditions, held) if not holds)
        result[question.key] = next(broken, None)
    return result


# Conditions as expressions on the device


def kept(condition: Condition, masks: Sequence[Tensor]) -> Tensor:
    """Do the masks of a call satisfy a condition? A boolean on their device."""
    if isinstance(condition, PositionsRestart):
        return grow(masks[: 2 * len(condition.alike.same)], masks[2 * len(condition.alike.same) :])
    masks = [ordered(mask, seen) for mask, seen in zip(masks, condition.seen)]
    shown = [visible(mask, seen.hides) for mask, seen in zip(masks, condition.seen)]
    if isinstance(condition, MaskHidesOutside):
        return (allowed(shown[0], condition.band) | ~shown[0]).all()
    # numbers so large that lowest ones may not vanish beside them do not count
    found = [(mask < far(mask)).all() for mask, seen in zip(masks, condition.seen) if seen.hides is None]
    both = functools.reduce(together, shown)
    if all(seen.row is None for seen in condition.seen):
        found.append(every_row_sees(both, condition.band))
    else:
        found.append((allowed(both, condition.band) & both).any(-1).all())
    return torch.stack(found).all()


def grow(same: Sequence[Tensor], upto: Sequence[Tensor]) -> Tensor:
    """Does one of the values ``upto`` grow with every token over which those of ``same`` stay?

    And do those never return? Each comes twice: for the rows ``[.., T, 1]``, and for the keys ``[.., 1, T]``,
    ``[T]``.
    """
    given = (*same, *upto)
    pairs = [
        (rows.squeeze(-1), keys if keys.dim() == 1 else keys.squeeze(-2))
        for rows, keys in zip(given[::2], given[1::2])
    ]
    alike = torch.stack([(rows == keys).all() for rows, keys in pairs]).all()
    steps = [keys.diff() for _, keys in pairs]
    held, growing = steps[: len(same) // 2], steps[len(same) // 2 :]
    never = torch.zeros((), dtype=torch.bool, device=alike.device)
    restarts = functools.reduce(torch.logical_or, [step > 0 for step in held], never)
    never_back = [(step >= 0).all() for step in held]
    grows = torch.stack([((step > 0) | restarts).all() for step in growing]).any()
    return torch.stack([alike, grows, *never_back]).all()


def ordered(mask: Tensor, seen: KeyMask) -> Tensor:
    """A mask as ``[masks, rows or 1, keys]``."""
    if seen.row is None:
        mask = mask.movedim(seen.key, -1).unsqueeze(-2)
    else:
        mask = mask.movedim((seen.row, seen.key), (-2, -1))
    return mask.flatten(0, -3) if mask.dim() > 2 else mask[None]


def together(a: Tensor, b: Tensor) -> Tensor:
    """Keys that both leave visible, mask by mask; each with each where their numbers differ."""
    alike = a.shape[0] == b.shape[0] or 1 in (a.shape[0], b.shape[0])
    return a & b if alike else (a[:, None] & b).flatten(0, 1)


def allowed(shown: Tensor, band: Reach) -> Tensor:
    """``[rows, keys]``: which keys a band leaves to each row."""
    rows, keys = (torch.arange(shown.shape[d], device=shown.device) for d in (-2, -1))
    distance = keys - rows[:, None]
    inside = [distance >= band.lo] * (band.lo != -math.inf) + [distance <= band.hi] * (band.hi != math.inf)
    return functools.reduce(torch.logical_and, inside, torch.ones((), dtype=torch.bool, device=shown.device))


def every_row_sees(keys: Tensor, band: Reach) -> Tensor:
    """Is one of the keys that the band allows visible, for each row? ``keys``: ``[masks, 1, keys]``."""
    count, length = torch.nn.functional.pad(keys.cumsum(-1), (1, 0)), keys.shape[-1]
    rows = torch.arange(length, device=keys.device)
    first = (rows + max(band.lo, -length)).clamp(0, length).long()
    last = (rows + min(band.hi, length) + 1).clamp(0, length).long()
    return (count[..., last] > count[..., first]).all()


def visible(mask: Tensor, hides: bool | None) -> Tensor:
    """Where a mask leaves a key. Numbers added to scores do where they are not nearly the lowest."""
    return mask != hides if hides is not None else ~(mask <= -far(mask))


def far(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).max / 4

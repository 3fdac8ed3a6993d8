"""Checks, in every call, of the analysis's assumptions about masks.

No answer is kept from one call to the next. A mask's memory can be rewritten without its version counter
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
from ..passes.ir import (
    Condition,
    DocumentMask,
    EveryRowHasVisibleKey,
    KeyMask,
    PositionsIncrease,
    Reach,
    ancestors,
    value_of,
)
from ..reporting.notices import StreamHint


class Guard:
    """A check whether the inputs of a call satisfy the conditions of a region.

    Cost of a call: a stored mask ``[.., T, T]`` is read once, by one compiled reduction that allocates
    nothing of its size (0.2 ms for a boolean mask of 32768 tokens at 5 TB/s). Padding masks and position
    ids ``[B, T]`` take a dozen small operations. Reading the answer synchronises with the device once
    per call of the compiled function, for all its regions together (`answered`); without conditions
    there is no guard and no synchronisation.

    placeholders  of the region's graph
    conditions    the assumptions of the region's key ranges
    positions     for each placeholder, the index of a call's input that it belongs to; None: its own
                  index
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
                    holds(condition, [parts.pop(0) for _ in range(count)])
                    for condition, count in zip(self.conditions, counts)
                ]
            )

        self.answers_of = answers
        if any(reads_stored_mask(c) for c in conditions):
            self.answers_of = compiled(answers, [value_of(placeholders[i]) for i in read])

    def answers(self, given: Sequence[object]) -> Tensor:
        """Evaluate each condition for the inputs at ``reads``: ``[conditions]`` booleans on their device.
        Does not synchronise."""
        device = next(v.device.type for v in given if isinstance(v, Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self.answers_of(*given)

    def broken(self, inputs: Sequence[object]) -> Condition | None:
        """Find the first condition that the inputs of a call do not satisfy, if any. Synchronises."""
        question = Question(self, tuple(self.reads), 0)
        return answered([question], inputs)[question.key]


def reads_stored_mask(condition: Condition) -> bool:
    """Does a condition read a mask with a row and a column per token?"""
    masks = () if isinstance(condition, PositionsIncrease) else condition.key_masks
    return any(isinstance(mask, KeyMask) and mask.by_row for mask in masks)


def compiled(function: Callable, examples: Sequence[object]) -> Callable:
    """Compile a check to one pass over a stored mask, without temporaries of its size. The function is
    returned as it is where compiling fails."""
    try:
        return internals.compile_function(function, examples)
    except Exception as error:  # uncompiled, it is slower and larger, but as correct
        internals.log.debug("compiling a check of masks failed", exc_info=True)
        warnings.warn(
            f"streambp: The check of a stored attention mask could not be compiled ({type(error).__name__}). "
            "It runs uncompiled in every call, and temporarily takes several times the memory of the mask. "
            "Build the mask inside the compiled function or pass is_causal=True, so that no check is needed.",
            StreamHint,
            stacklevel=2,
        )
        return function


def masks_of(placeholders: Sequence[Node], masks: Sequence[Node]) -> tuple[GraphModule, list[int]]:
    """Extract a graph that computes only the masks, and the positions of the inputs that it reads."""
    needed = ancestors(masks)
    graph, values = Graph(), {}
    for node in masks[0].graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[n] for n in masks))
    reads = [i for i, n in enumerate(placeholders) if n in needed]
    return GraphModule(masks[0].graph.owning_module, graph), reads


def text_of(module: GraphModule) -> str:
    """Write a graph as text without the names of its nodes. Constants are named by the module that holds
    them."""
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
    """Describe a condition without the names of its nodes."""
    if isinstance(condition, PositionsIncrease):
        return f"{type(condition).__name__} {describe_mask(condition.document_mask)}"
    key_masks = [describe_mask(mask) for mask in condition.key_masks]
    return f"{type(condition).__name__} {key_masks} {condition.band}"


def describe_mask(mask: KeyMask | DocumentMask) -> tuple:
    if isinstance(mask, DocumentMask):
        return len(mask.equal), len(mask.ordered)
    return mask.row, mask.key, mask.masked_value


# One call of a chain of regions


@dataclass(frozen=True)
class Question:
    """A guard applied to certain values.

    values      names of the values: nodes of the chain's graph, or positions
    generation  how many regions that write into inputs ran before: after each, values may differ
    """

    guard: Guard
    values: tuple
    generation: int

    @property
    def key(self) -> tuple:
        """Key that is equal for questions with the same answer."""
        return self.guard.text, self.values, self.generation


def rounds(questions: Sequence[Question | None], region_of: Mapping[Node, int]) -> list[tuple[Question, ...]]:
    """Choose the questions to answer before each region.

    At the first region with an unanswered question, all questions are answered whose values exist by then.

    questions  of each region in order, or None
    region_of  value → the region that computes it; inputs of the graph are not in it
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
                and all(region_of.get(v, -1) < i for v in q.values)
            }
        known |= asked.keys()
        found.append(tuple(asked.values()))
    return found


def answered(questions: Sequence[Question], values: Mapping | Sequence) -> dict[tuple, Condition | None]:
    """Find the first broken condition of every question, by its key. Synchronises once per device."""
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


def holds(condition: Condition, masks: Sequence[Tensor]) -> Tensor:
    """Do the masks of a call satisfy a condition? The answer is a boolean on their device."""
    if isinstance(condition, PositionsIncrease):
        equal = 2 * len(condition.document_mask.equal)
        return positions_increase(masks[:equal], masks[equal:])
    if isinstance(condition, EveryRowHasVisibleKey):
        return every_row_has_visible_key(condition, masks)
    (stored,) = condition.key_masks
    shown = visible(by_query(masks[0], stored), stored.masked_value)
    return (allowed(shown, condition.band) | ~shown).all()


def every_row_has_visible_key(condition: EveryRowHasVisibleKey, values: Sequence[Tensor]) -> Tensor:
    """Do masks leave every row a visible key inside a band? With document masks, the key must be in the run
    of tokens that ends with the row: a search of whole documents would take an entry for every row and
    key."""
    given, found, keys_seen, runs = iter(values), [], [], []
    for mask in condition.key_masks:
        own = [next(given) for _ in mask.nodes]
        if isinstance(mask, DocumentMask):
            starts, same_values = starts_of_runs(mask, own)
            runs.append(starts)
            found.append(same_values)
            continue
        entries = by_query(own[0], mask)
        keys_seen.append(visible(entries, mask.masked_value))
        if mask.masked_value is None:  # an entry this large may outweigh the lowest number
            found.append((entries < far(entries)).all())
        elif entries.dtype is not torch.bool:
            found.append(((entries == 0) | (entries == 1)).all())
    band, first = condition.band, None
    if runs:
        band, first = Reach(band.lo, min(band.hi, 0)), functools.reduce(torch.maximum, runs)
        keys_seen = keys_seen or [torch.ones_like(first, dtype=torch.bool)[:, None]]
    joint = functools.reduce(both_visible, keys_seen)
    if any(mask.by_row for mask in condition.key_masks if isinstance(mask, KeyMask)):
        inside = allowed(joint, band) & joint
        if first is not None:
            inside = inside & (torch.arange(joint.shape[-1], device=joint.device) >= first[..., None])
        found.append(inside.any(-1).all())
    else:
        found.append(every_row_sees(joint, band, first))
    return torch.stack(found).all()


def starts_of_runs(mask: DocumentMask, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Find the start of the run of tokens that ends with each row, ``[masks, rows]``. A row sees all keys of
    its run. Also returns whether rows and keys have the same values, without overflow."""
    pairs = pairs_of(values)
    count = len(mask.equal)
    ends = [keys[..., 1:] != keys[..., :-1] for _, keys in pairs[:count]]
    ends += [keys[..., 1:] < keys[..., :-1] for _, keys in pairs[count:]]
    starts = torch.nn.functional.pad(functools.reduce(torch.logical_or, ends), (1, 0))
    index = torch.arange(starts.shape[-1], device=starts.device)
    first = torch.where(starts, index, 0).cummax(-1).values
    return first.reshape(-1, first.shape[-1]), torch.stack(consistent(pairs, count)).all()


LARGEST_POSITION = 2**62  # differences of 64-bit positions below it do not overflow


def positions_increase(equal: Sequence[Tensor], ordered: Sequence[Tensor]) -> Tensor:
    """Does one of the values ``ordered`` increase with every token while those of ``equal`` stay the same?
    Those of ``equal`` must never return to a value that they left. Each value comes twice: for the rows
    ``[.., T, 1]``, and for the keys ``[.., 1, T]`` or ``[T]``."""
    pairs = pairs_of((*equal, *ordered))
    # compare neighbours: differences of unsigned or boolean values would wrap
    steps = [(keys[..., :-1], keys[..., 1:]) for _, keys in pairs]
    documents, positions = steps[: len(equal) // 2], steps[len(equal) // 2 :]
    no_start = torch.zeros((), dtype=torch.bool, device=pairs[0][0].device)
    starts = functools.reduce(torch.logical_or, [after > before for before, after in documents], no_start)
    never_return = [(after >= before).all() for before, after in documents]
    increase = torch.stack([((after > before) | starts).all() for before, after in positions]).any()
    return torch.stack([increase, *never_return, *consistent(pairs, len(documents))]).all()


def pairs_of(values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Reshape values of rows ``[.., T, 1]`` and keys ``[.., 1, T]`` or ``[T]`` to ``[.., T]`` each."""
    return [
        (rows.squeeze(-1), keys if keys.dim() == 1 else keys.squeeze(-2))
        for rows, keys in zip(values[::2], values[1::2])
    ]


def consistent(pairs: Sequence[tuple[Tensor, Tensor]], documents: int) -> list[Tensor]:
    """Check that values of rows equal those of keys, and that differences of positions fit 64 bits.

    documents  how many pairs come before those of positions
    """
    found = [(rows == keys).all() for rows, keys in pairs]
    for _, keys in pairs[documents:]:
        if may_overflow(keys):
            found.append(((keys > -LARGEST_POSITION) & (keys < LARGEST_POSITION)).all())
    return found


def may_overflow(positions: Tensor) -> bool:
    """Must differences of these positions be checked for overflow? Only int64 needs it: differences in other
    dtypes may wrap in every call, and are not taken for an order."""
    return positions.dtype is torch.int64


def by_query(mask: Tensor, key_mask: KeyMask) -> Tensor:
    """Reshape a mask to ``[masks, rows or 1, keys]``."""
    if key_mask.row is None:
        mask = mask.movedim(key_mask.key, -1).unsqueeze(-2)
    else:
        mask = mask.movedim((key_mask.row, key_mask.key), (-2, -1))
    return mask.flatten(0, -3) if mask.dim() > 2 else mask[None]


def both_visible(a: Tensor, b: Tensor) -> Tensor:
    """Combine the keys that both masks leave visible, mask by mask. Where the numbers of masks differ, every
    pair is combined."""
    paired = a.shape[0] == b.shape[0] or 1 in (a.shape[0], b.shape[0])
    return a & b if paired else (a[:, None] & b).flatten(0, 1)


def allowed(like: Tensor, band: Reach) -> Tensor:
    """Compute the keys that a band allows each row, ``[rows, keys]``."""
    rows, keys = (torch.arange(like.shape[d], device=like.device) for d in (-2, -1))
    distance = keys - rows[:, None]
    inside = [distance >= band.lo] * (band.lo != -math.inf) + [distance <= band.hi] * (band.hi != math.inf)
    return functools.reduce(torch.logical_and, inside, torch.ones((), dtype=torch.bool, device=like.device))


def every_row_sees(keys: Tensor, band: Reach, start: Tensor | None) -> Tensor:
    """Is at least one of the keys that the band allows visible, for each row?

    keys   ``[masks, 1, keys]``
    start  ``[masks, rows]``: the first key that counts, by which the band is narrowed; None: all do
    """
    count, length = torch.nn.functional.pad(keys.cumsum(-1), (1, 0)), keys.shape[-1]
    rows = torch.arange(length, device=keys.device)
    first = (rows + max(band.lo, -length)).clamp(0, length).long()
    last = (rows + min(band.hi, length) + 1).clamp(0, length).long()
    if start is None:
        return (count[..., last] > count[..., first]).all()
    first = torch.maximum(first, start)
    shape = (max(len(keys), len(start)), length)
    count = count.squeeze(1).expand(shape[0], -1)
    return (count.gather(1, last.expand(shape)) > count.gather(1, first.expand(shape))).all()


def visible(mask: Tensor, masked_value: bool | None) -> Tensor:
    """Find the keys that a mask leaves visible. An additive mask does so where its numbers are not close to
    the lowest."""
    return mask != masked_value if masked_value is not None else ~(mask <= -far(mask))


def far(mask: Tensor) -> float:
    """Return a quarter of the largest number, the bound of entries that mask a key additively."""
    return torch.finfo(mask.dtype).max / 4

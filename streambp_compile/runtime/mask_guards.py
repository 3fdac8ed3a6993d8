"""Checks, in every call, of the analysis's assumptions about masks.

No answer is kept from one call to the next. A mask's memory can be rewritten without its version counter
noticing: through numpy, ``.data``, a loader's shared buffer, or a custom kernel. Within one call of the
compiled function, equal questions are asked once.
"""

from __future__ import annotations

import functools
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
    KeyMask,
    PositionsIncrease,
    VisibleRanges,
    ancestors,
    value_of,
)
from ..reporting.notices import StreamHint
from .mask_conditions import holds
from .visible_keys import ranges_of


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
        self.conditions = tuple(sorted(conditions, key=lambda c: isinstance(c, VisibleRanges)))
        nodes = [n for c in self.conditions for n in c.nodes]
        masks, read = masks_of(placeholders, nodes)
        self.reads = [i if positions is None else positions[i] for i in read]
        self.text = f"{text_of(masks)} {[describe(c) for c in self.conditions]}"
        self.answers_of = functools.partial(answers, masks, self.conditions)
        if any(reads_stored_mask(c) for c in conditions):
            self.answers_of = compiled(self.answers_of, [value_of(placeholders[i]) for i in read])

    def answers(self, given: Sequence[object]) -> tuple[Tensor, ...]:
        """Evaluate each condition for the inputs at ``reads``. Returns ``[conditions]`` booleans on their
        device, and the ranges of visible keys that conditions speak of. Does not synchronise."""
        device = next(v.device.type for v in given if isinstance(v, Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self.answers_of(*given)

    def answer(self, inputs: Sequence[object]) -> CallAnswer:
        """Answer for the inputs of a call. Synchronises."""
        question = Question(self, tuple(self.reads), 0)
        return answered([question], inputs)[question.key]


def answers(masks: Callable, conditions: Sequence[Condition], *given: object) -> tuple[Tensor, ...]:
    """Evaluate conditions: booleans, and the ranges of those that are about ranges.

    masks  computes the nodes of all conditions
    """
    parts, held, ranges = iter(masks(*given)), [], []
    for condition in conditions:
        own = [next(parts) for _ in condition.nodes]
        if isinstance(condition, VisibleRanges):
            found, keys = ranges_of(condition, own)
            ranges.append(keys)
        else:
            found = holds(condition, own)
        held.append(found)
    return torch.stack(held), *ranges


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
    if isinstance(condition, VisibleRanges):
        return f"{type(condition).__name__} {key_masks} {condition.ahead} {condition.all_rows}"
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


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a question.

    broken  the first condition that does not hold, or None
    ranges  on the host, ``[slots, masks, rows, 2]``: the keys that masks show each row (`VisibleRanges`)
    """

    broken: Condition | None = None
    ranges: Tensor | None = None


def answered(questions: Sequence[Question], values: Mapping | Sequence) -> dict[tuple, CallAnswer]:
    """Answer questions, by their keys. Synchronises once per device."""
    found = [q.guard.answers([values[v] for v in q.values]) for q in questions]
    by_device: dict[torch.device, list[Tensor]] = {}
    for held, *_ in found:
        by_device.setdefault(held.device, []).append(held)
    read = {device: iter(torch.cat(held).cpu()) for device, held in by_device.items()}
    result: dict[tuple, CallAnswer] = {}
    for question, (held, *ranges) in zip(questions, found):
        holding = [bool(next(read[held.device])) for _ in question.guard.conditions]
        broken = next((c for c, holds in zip(question.guard.conditions, holding) if not holds), None)
        result[question.key] = CallAnswer(broken, on_host(ranges))
    return result


def on_host(ranges: Sequence[Tensor]) -> Tensor | None:
    """Stack the ranges of several masks, of which some may be the same for all sequences, or all rows."""
    if not ranges:
        return None
    masks, rows = (max(r.shape[d] for r in ranges) for d in (0, 1))
    return torch.stack([r.expand(masks, rows, -1) for r in ranges]).cpu()

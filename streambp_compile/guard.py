"""What the analysis of a region assumes of the masks of each call, checked when it is called."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .passes.ir import Condition, Seen


class Guard:
    """Do the inputs of a call keep the conditions?

    Costs a few operations on ``[B, T]`` values and one synchronisation with the device; nothing for inputs that were just checked,
    so that all layers of a step share one check.
    """

    def __init__(self, placeholders: Sequence[Node], conditions: Sequence[Condition]):
        self.conditions = conditions
        self.paddings, self.reads = paddings_of(placeholders, [c.seen.node for c in conditions])
        self.checked: tuple[tuple, bool] | None = None

    def __call__(self, inputs: Sequence[object]) -> bool:
        given = [inputs[i] for i in self.reads]
        if self.checked is not None and all(same(old, new) for old, new in zip(self.checked[0], given)):
            return self.checked[1]
        with torch.no_grad():
            values = self.paddings(*given)
            kept = bool(torch.stack([every_row_sees(value, c) for value, c in zip(values, self.conditions)]).all())
        self.checked = tuple(remembered(v) for v in given), kept
        return kept


def paddings_of(placeholders: Sequence[Node], paddings: Sequence[Node]) -> tuple[GraphModule, list[int]]:
    """A graph that computes the paddings alone, and the positions of the inputs that it reads."""
    needed, stack = set(), list(paddings)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    graph, values = Graph(), {}
    for node in paddings[0].graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[n] for n in paddings))
    return GraphModule(paddings[0].graph.owning_module, graph), [i for i, n in enumerate(placeholders) if n in needed]


def every_row_sees(padding: torch.Tensor, condition: Condition) -> torch.Tensor:
    """Is a visible key among those that the band allows, for each row? One boolean."""
    keys = visible(padding, condition.seen).movedim(condition.seen.key, -1)
    count, length = torch.nn.functional.pad(keys.cumsum(-1), (1, 0)), keys.shape[-1]
    rows = torch.arange(length, device=keys.device)
    band = condition.band
    first = (rows + max(band.lo, -length)).clamp(0, length).long()
    last = (rows + min(band.hi, length) + 1).clamp(0, length).long()
    return (count[..., last] > count[..., first]).all()


def visible(padding: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Where a padding leaves a key. Numbers added to scores: nowhere, unless all are far below the largest that there are."""
    if seen.hides is not None:
        return padding != seen.hides
    far = torch.finfo(padding.dtype).max / 4
    return (padding > -far) & (padding < far).all()


def remembered(value: object) -> object:
    """What to compare the inputs of the next call with: a number, or a tensor and the count of its changes."""
    if not isinstance(value, torch.Tensor):
        return value
    return None if value.is_inference() else (weakref.ref(value), value._version)


def same(old: object, new: object) -> bool:
    if not isinstance(new, torch.Tensor):
        return old == new
    return old is not None and old[0]() is new and old[1] == new._version

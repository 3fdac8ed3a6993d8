"""Hints at memory that the user can save.

They concern logits and layer values that leave the graph, graph breaks inside layers, and heads that an
engine hides from Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from .. import internals
from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, own_of
from ..passes.ir import bytes_of, where_of
from ..passes.split import Region
from ..regions.cuts import WIDER, wide_between, widest_input
from .notices import mebibytes

Tell = Callable[[str], None]  # shows the user a hint


def hint_at_outputs(
    tell: Tell,
    returned: frozenset[Node],
    regions: Sequence[Region],
    axis: Axis,
    broken: internals.GraphBreak | None,
) -> None:
    """Warn about outputs of layers that stay in memory at full length, with their cost and a remedy.

    returned  the outputs of the graph
    broken    the graph break that ended it, if one did
    """
    kept = [n for r in regions[:-1] for n in r.outputs if n in returned and n in axis.marks]
    widest = widest_input(regions[-1], axis)
    last = [n for n in regions[-1].outputs if n in axis.marks]
    logits = [n for n in last if bytes_of(own_of(n)) >= WIDER * widest]
    told = hint_at_break_inside(tell, returned.intersection(axis.marks).difference(logits), broken)
    wide = sum(map(bytes_of, map(own_of, kept))) > widest  # a few numbers per token cost nothing
    if len(kept) > 1 and wide and not told:
        tell(
            f"The compiled function returns {len(kept)} values of its layers, which keep {size_of(kept)} "
            "alive. Pass use_cache=False if they are a KV cache, output_hidden_states=False if they are "
            "hidden states"
        )
    for node in wide_between(regions, axis):
        tell(
            f"The value made at {where_of(node) or node.name} is much wider than the hidden states, and "
            f"takes {size_of([node])} at full length because a later layer or loss reads it. Compute it "
            "where it is read"
        )
    if logits:
        hint_at_logits(tell, size_of(logits), broken)


def size_of(values: Iterable[Node]) -> str:
    return mebibytes(sum(bytes_of(own_of(n)) for n in values))


def hint_at_logits(tell: Tell, size: str, broken: internals.GraphBreak | None) -> None:
    """Warn about logits that leave the graph."""
    if broken is None:
        tell(
            f"The logits leave the compiled function and take {size} at full length. Compute the loss inside "
            "the function, so that the head streams with it"
        )
        return
    tell(
        f"The graph breaks at {broken.where} ({broken.reason}), and the logits take {size} at full length "
        "because they leave it there. Remove the break, so that the head streams with its loss. "
        f"{advice(broken)}"
    )


def hint_at_break_inside(tell: Tell, rows: Iterable[Node], broken: internals.GraphBreak | None) -> bool:
    """Warn about values that a break inside a layer keeps until the backward. These are two or more values of
    its tokens, where an unbroken layer keeps only its input. Returns whether it warned."""
    handed = [n for n in rows if fake_of(n).requires_grad]
    if broken is None or len(handed) < 2 or internals.are_saved_tensors_packed():
        return False
    tell(
        f"The graph breaks at {broken.where} ({broken.reason}) inside a layer, which hands over "
        f"{len(handed)} values of its tokens there. They take {size_of(handed)} and stay until the backward. "
        f"Remove the break, or turn on gradient checkpointing for the layers. {advice(broken)}"
    )
    return True


def watched(tell: Tell, call: Callable, inputs: Sequence[object]) -> Callable:
    """Wrap a call to warn about heads that FSDP2 hides from Dynamo. The warning comes with the first gradient
    of hidden states, because only then is it known whether the head's own forward was called."""
    heads = [h for h in internals.heads_apart(inputs) if h.makes >= WIDER * h.takes]
    if not heads:
        return call

    def at_first(gradient: torch.Tensor) -> None:
        for head in [h for h in heads if h.is_differentiated() and h.takes == gradient.shape[-1]]:
            heads.clear()
            hint_at_head_apart(tell, head, bytes_of(gradient) * head.makes // head.takes)

    def run(*args: object) -> Sequence[object]:
        results = call(*args)
        for value in results if heads else ():
            if isinstance(value, torch.Tensor) and value.requires_grad and value.ndim > 1:
                value.register_hook(at_first)
        return results

    return run


def hint_at_head_apart(tell: Tell, head: internals.HeadApart, cost: int) -> None:
    kept = "" if head.kept else " and pass reshard_after_forward=False to fully_shard for that group"
    tell(
        "FSDP2 gathers the weight of the head in a group of its own, where Dynamo does not trace the "
        f"forward of a torch.nn module, so that the logits take {mebibytes(cost)} at full length. Write "
        f'head.forward = torch.compile(head.forward, backend="streambp"){kept}'
    )


def hint_at_freed_weights(tell: Tell, cost: int, engine: internals.Engine) -> None:
    """Warn that an engine frees the weights, so that logits are computed at once and not when they are
    read."""
    remedy = (
        "Pass reshard_after_forward=False to fully_shard for the module that holds the head, or compute "
        "the loss inside of that module"
    )
    if engine is internals.Engine.ZERO3:
        remedy = (
            "Pass the class of your layers, and that of a module which computes logits and loss, to "
            "deepspeed.utils.set_z3_leaf_modules"
        )
    tell(
        f"{engine.value} frees the weight of the head when its forward ends, so the logits are computed "
        f"at once and take {mebibytes(cost)} at full length. {remedy}"
    )


def advice(broken: internals.GraphBreak) -> str:
    """Return advice on a graph break: torch's own, except for picked rows, which graphs can keep."""
    if broken.is_of_unknown_size:
        return "Let the loss ignore labels, or multiply by the mask, in place of picking rows by it"
    return f"Torch's advice for this break: {broken.remedy.rstrip('.') or 'none'}"

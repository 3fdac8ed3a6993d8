"""Values that are computed of choices (the experts of each token, as `topk` picks them), and what they say of
one choice: whether it is among them.

This is told from examples: what a graph computes of the choices is computed for some that were drawn.

Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from ..passes.rules.forward import mutated
from ..passes.rules.named_calls import is_random, places_along

LONGEST = 64  # nodes between choices and what is computed of them
DRAWN = 16  # examples with a choice and without it
MOST = 1024  # choices to choose from


class CannotCompute(Exception):
    """A value is computed of more than choices, or by something that examples do not tell of."""


@dataclass(frozen=True)
class Choices:
    """A tensor of whole numbers, each of them the place of one choice among so many."""

    node: Node
    among: int

    @property
    def size(self) -> list[int]:
        return [hint_of(s) for s in value_of(self.node).shape]


def value_of(node: Node) -> object:
    return node.meta.get("example_value")


def hint_of(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint


def storage_of(node: Node) -> int | None:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def choices_at(node: Node) -> Choices | None:
    """The choices that a value is, if it is that."""
    value, found = value_of(node), places_along(node)
    if found is None or not isinstance(value, torch.Tensor) or value.dtype is not torch.int64:
        return None
    of, dim = value_of(found[0]), found[1]
    if not isinstance(of, torch.Tensor) or not of.dim() or free_unbacked_symbols(value):
        return None
    among = of.shape[dim]
    return Choices(node, among) if isinstance(among, int) and 1 < among <= MOST else None


def computed_of(node: Node) -> tuple[Choices, list[Node]]:
    """The choices of which a value is computed, and the nodes that compute it, in order.

    Raises `CannotCompute` where it is computed of anything else.
    """
    found: dict[Node, None] = {}
    choices: dict[Node, Choices] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        if each in found or each in choices or isinstance(value_of(each), torch.SymInt):
            continue
        if (chosen := choices_at(each)) is not None:
            choices[each] = chosen
            continue
        calls = each.op in ("call_function", "call_method") and not is_random(each)
        if not calls or len(found) == LONGEST:
            raise CannotCompute(each)
        found[each] = None
        stack += each.all_input_nodes
    if len(choices) != 1:
        raise CannotCompute(node)
    return next(iter(choices.values())), sorted(found)


class Computed:
    """A value that is computed of choices alone. Raises `CannotCompute` of any other."""

    def __init__(self, node: Node):
        self.node = node
        self.choices, self.nodes = computed_of(node)

    def of(self, example: torch.Tensor) -> torch.Tensor:
        """The value for some choices."""
        values: dict[Node, object] = {self.choices.node: example}

        def read(node: Node) -> object:
            if node not in values and isinstance(number := value_of(node), torch.SymInt):
                if free_unbacked_symbols(number):
                    raise CannotCompute(node)
                return hint_of(number)
            return values[node]

        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), read)
            if node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)
        return values[self.node]

    def is_written(self) -> bool:
        """Does anything write into the choices, or into what is computed of them on the way?"""
        memory = {storage_of(n) for n in (self.choices.node, *self.nodes)} - {None}
        node = self.choices.node
        while node.op != "root":
            written = mutated(node)
            if written is not None and storage_of(written) in memory:
                return True
            node = node.next
        return False

    def is_true(self, example: torch.Tensor) -> bool:
        return bool(torch.as_tensor(self.of(example)).any())


def without(choices: Choices, value: int, drawn: torch.Generator) -> Iterator[torch.Tensor]:
    """Examples in which nobody has chosen a value."""
    others = [v for v in range(choices.among) if v != value]
    yield torch.full(choices.size, others[0])
    yield torch.full(choices.size, others[-1])
    for _ in range(DRAWN):
        yield torch.tensor(others)[torch.randint(len(others), choices.size, generator=drawn)]


def with_one(choices: Choices, value: int, drawn: torch.Generator) -> Iterator[torch.Tensor]:
    """Examples in which a value is chosen: once, at neighbouring and at random places, and everywhere."""
    yield torch.full(choices.size, value)
    for at, example in enumerate(without(choices, value, drawn)):
        last = example.numel() - 1
        place = (0, last, 1, last - 1)[at] if at < 4 else int(torch.randint(last + 1, (), generator=drawn))
        example.view(-1)[max(0, min(place, last))] = value
        yield example


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), unset_fake_temporarily(), torch.no_grad():
        yield


def choice_asked_for(condition: Node) -> tuple[Choices, int, bool] | None:
    """The choices of which a condition tells whether a value is among them, that value, and what the
    condition is if it is not."""
    try:
        computed = Computed(condition)
        if computed.is_written():
            return None
        with on_real_tensors():
            return asked_for(computed)
    except Exception:  # whatever the user's condition needs that drawn choices have not
        return None


def asked_for(computed: Computed) -> tuple[Choices, int, bool] | None:
    choices, drawn = computed.choices, torch.Generator().manual_seed(0)
    answers = [computed.is_true(torch.full(choices.size, v)) for v in range(choices.among)]
    for if_none in (False, True):
        if answers.count(not if_none) == 1 and (choices.among > 2 or if_none is False):
            value = answers.index(not if_none)
            if tells(computed, value, if_none, drawn):
                return choices, value, if_none
    return None


def tells(computed: Computed, value: int, if_none: bool, drawn: torch.Generator) -> bool:
    absent = (computed.is_true(e) is if_none for e in without(computed.choices, value, drawn))
    present = (computed.is_true(e) is not if_none for e in with_one(computed.choices, value, drawn))
    return all(absent) and all(present)


def count_of_numbers(node: Node) -> int | None:
    """How many numbers a value has that is computed of choices, if that does not depend on which they are."""
    try:
        computed = Computed(node)
        with on_real_tensors():
            drawn = torch.Generator().manual_seed(0)
            examples = of_few(computed.choices, drawn)
            counts = {torch.as_tensor(computed.of(example)).numel() for example in examples}
    except Exception:  # as above
        return None
    return counts.pop() if len(counts) == 1 else None


def made_choices(node: Node) -> Choices | None:
    """The choices, if a value lists those that have been made, each once, in order."""
    try:
        computed = Computed(node)
        if computed.is_written():
            return None
        with on_real_tensors():
            drawn = torch.Generator().manual_seed(0)
            found = all(lists_made(computed, example) for example in of_few(computed.choices, drawn))
    except Exception:  # as above
        return None
    return computed.choices if found else None


def lists_made(computed: Computed, example: torch.Tensor) -> bool:
    listed, made = computed.of(example), example.unique()
    return listed.shape in (made.shape, (*made.shape, 1)) and torch.equal(listed.flatten(), made)


def of_few(choices: Choices, drawn: torch.Generator) -> Iterator[torch.Tensor]:
    """Examples in which any choices, one alone, all but one, and a few are made."""
    for value in {0, 1, choices.among - 1}:
        yield torch.full(choices.size, value)
        yield from without(choices, value, drawn)
    for _ in range(DRAWN):
        few = torch.randint(choices.among, (3,), generator=drawn)
        yield few[torch.randint(3, choices.size, generator=drawn)]


def is_zero_without(node: Node, choices: Node, value: int) -> bool:
    """Is a value zero, or false, wherever some choice is not among the choices that it is computed of?"""
    try:
        computed = Computed(node)
        if computed.choices.node is not choices or computed.is_written():
            return False
        with on_real_tensors():
            drawn = torch.Generator().manual_seed(0)
            return not any(map(computed.is_true, without(computed.choices, value, drawn)))
    except Exception:  # as above
        return False

"""Tracing of loops over the choices that occur, by Dynamo.

An example is ``for expert in hits:``, with ``hits`` from ``nonzero`` or ``unique``. The number of rounds
depends on the data, so Dynamo ends its graph there by default. Here such a loop runs over all possible
choices in order, and each round is a branch (internals/branch_tracing.py), which does something only
where the choice occurs.

Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..passes.rules.named_calls import REARRANGING, lists_places, name_of, places_along
from ..passes.zero_values import Entries, are_written, value_of, zeros_of
from .branch_tracing import begun, branches_of


@dataclass(frozen=True)
class Listed:
    """Places that a value lists, each once, in order.

    They are places where another value is not zero, or the numbers that it contains.

    among    how many places there are
    entries  the entries that are zero where a place is not listed
    """

    among: int
    entries: Callable[[int], Entries]


@dataclass
class ListedLoop:
    """A loop over listed places: its iterator, and the number of its next round."""

    listed: Listed
    iterator: VariableTracker
    next_round: int = 0


@contextlib.contextmanager
def in_loops(
    frame: InstructionTranslatorBase, here: Instruction, give_up: Callable[[object], None]
) -> Iterator[None]:
    """Begin or continue a loop over listed places, around one instruction."""
    loops = vars(frame.output).setdefault("loops", {})
    if here.opname == "GET_ITER":
        listed = looped_over(frame)
        if listed is not None:
            frame.output.took_branch = True
            pairs = frame.stack[-1].as_proxy().node.meta["example_value"].dim() == 2
            frame.stack[-1] = as_list(listed.among, pairs)
        yield
        if listed is not None:
            if isinstance(frame.stack[-1], ListVariable) or not hasattr(frame.stack[-1], "next_variable"):
                give_up(frame.output)
            loops[id(frame.stack[-1])] = ListedLoop(listed, frame.stack[-1])
        return
    loop = loops.get(id(frame.stack[-1])) if here.opname == "FOR_ITER" else None
    if loop is None or loop.next_round == loop.listed.among:
        yield
        return
    entries = loop.listed.entries(loop.next_round)
    loop.next_round += 1
    branch = begun(frame, here, entries.mask())
    yield
    branches_of(frame.output).append(branch)


def looped_over(frame: InstructionTranslatorBase) -> Listed | None:
    """Find the places that a loop which begins here runs over; None for any other loop."""
    value = frame.stack[-1]
    if not isinstance(value, TensorVariable):
        return None
    node = value.as_proxy().node
    fake = node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or not free_unbacked_symbols(fake) or fake.dim() not in (1, 2):
        return None
    if fake.dim() == 2 and not takes_number_first(frame):
        return None
    return listed_by(node)


def listed_by(node: Node) -> Listed | None:
    """Find the places that a value lists, if it and the values that it is computed from are never
    overwritten."""
    way = [node]
    while name_of(node) in ("getitem", "flatten", "squeeze") and isinstance(node.args[0], Node):
        if name_of(node) == "getitem" and node.args[1] not in (0, (slice(None), 0)):
            return None
        node = node.args[0]
        way.append(node)
    source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    value = None if source is None else value_of(source)
    if not isinstance(value, torch.Tensor):
        return None
    if lists_places(node) and value.dim() == 1:
        return listed(way, value.shape[0], lambda place: Entries(source, (0, place)))
    if name_of(node) in UNIQUE and not node.kwargs and len(node.args) == 1:
        of = choices_of(source)
        among = value_of(of[-1]).shape[places_along(of[-2])[1]] if of else None
        return listed([*way, *of], among, lambda place: Entries(source, number=place))
    return None


UNIQUE = ("unique", "_return_output")
MOST = 1024  # places in a list


def choices_of(node: Node) -> list[Node]:
    """List the values from the places that ``topk`` chooses back to the value that it chooses from. The list
    is empty for other nodes."""
    way = [node]
    while (found := places_along(node)) is None:
        if name_of(node) not in REARRANGING or not isinstance(node.args[0], Node):
            return []
        node = node.args[0]
        way.append(node)
    return [*way, found[0]]


def listed(way: Sequence[Node], among: object, entries: Callable[[int], Entries]) -> Listed | None:
    """Build the list of ``among`` places that these values compute; None where a value is overwritten."""
    if not isinstance(among, int) or not 1 < among <= MOST:
        return None
    way = [*way, *zeros_of(entries(0))[1]]
    return None if are_written(way, way[0].graph.nodes) else Listed(among, lambda i: zeros_of(entries(i))[0])


def takes_number_first(frame: InstructionTranslatorBase) -> bool:
    """Does each round of the loop only take the number out of its row (``e = e[0]``)? A list of one number
    compares differently from a tensor, so the row must have no other use."""
    body = frame.instructions[frame.instruction_pointer :][:16]
    calls = [call for inst in body if inst.opname not in SKIPPED for call in single_calls(inst)]
    if len(calls) < 7:
        return False
    stored, loaded, zero, taken, kept = calls[2:7]
    names = {stored[1], loaded[1], kept[1]}
    return (
        [stored[0], loaded[0][:9], kept[0]] == ["STORE_FAST", "LOAD_FAST", "STORE_FAST"]
        and len(names) == 1
        and zero in (("LOAD_CONST", 0), ("LOAD_SMALL_INT", 0))
        and (taken[0] == "BINARY_SUBSCR" or taken == ("BINARY_OP", SUBSCRIPT))
    )


SKIPPED = ("CACHE", "NOP", "EXTENDED_ARG")
SUBSCRIPT = 26  # of BINARY_OP, from Python 3.14 on


def single_calls(inst: Instruction) -> list[tuple[str, object]]:
    """Split an instruction into the two that Python 3.13 may have joined in it, each with its argument."""
    if inst.opname == "STORE_FAST_LOAD_FAST":
        return list(zip(("STORE_FAST", "LOAD_FAST"), inst.argval))
    return [(inst.opname, inst.arg if inst.opname == "BINARY_OP" else inst.argval)]


def as_list(among: int, pairs: bool) -> ListVariable:
    """Build a list of all places; with ``pairs``, each is a list of one number."""
    numbers: list[VariableTracker] = [ConstantVariable.create(i) for i in range(among)]
    if pairs:
        numbers = [ListVariable([n], mutation_type=ValueMutationNew()) for n in numbers]
    return ListVariable(numbers, mutation_type=ValueMutationNew())

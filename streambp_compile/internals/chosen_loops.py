"""Loops over the choices that have been made (``for expert in hits:``, of ``nonzero`` or ``unique``), while
Dynamo traces.

How many there are depends on the data, so that Dynamo ends its graph there by default. Here such a loop goes
over all choices, in order, and each round is a branch (internals/picked_branches.py), which does something
only where the choice was made.

Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .chosen_values import Choices, made_choices
from .picked_branches import begun, branches_of, chosen_somewhere


@dataclass
class Loop:
    """A loop over choices: its iterator, and which round is next."""

    choices: Choices
    iterator: VariableTracker
    next_round: int = 0


@contextlib.contextmanager
def in_loops(
    frame: InstructionTranslatorBase, here: Instruction, give_up: Callable[[object], None]
) -> Iterator[None]:
    """Around one instruction: a loop over choices that have been made begins there, or goes on."""
    loops = vars(frame.output).setdefault("loops", {})
    if here.opname == "GET_ITER":
        choices = looped_over(frame)
        if choices is not None:
            frame.output.took_branch = True
            pairs = frame.stack[-1].as_proxy().node.meta["example_value"].dim() == 2
            frame.stack[-1] = as_list(choices, pairs)
        yield
        if choices is not None:
            if isinstance(frame.stack[-1], ListVariable) or not hasattr(frame.stack[-1], "next_variable"):
                give_up(frame.output)
            loops[id(frame.stack[-1])] = Loop(choices, frame.stack[-1])
        return
    loop = loops.get(id(frame.stack[-1])) if here.opname == "FOR_ITER" else None
    if loop is None or loop.next_round == loop.choices.among:
        yield
        return
    mask = chosen_somewhere(loop.choices, loop.next_round)
    loop.next_round += 1
    branch = begun(frame, here, [mask])
    yield
    branches_of(frame.output).append(branch)


def looped_over(frame: InstructionTranslatorBase) -> Choices | None:
    """The choices, if a loop that begins here goes over those that have been made, each once, in order."""
    value = frame.stack[-1]
    if not isinstance(value, TensorVariable):
        return None
    node = value.as_proxy().node
    fake = node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or not free_unbacked_symbols(fake) or fake.dim() not in (1, 2):
        return None
    if fake.dim() == 2 and not takes_number_first(frame):
        return None
    return made_choices(node)


def takes_number_first(frame: InstructionTranslatorBase) -> bool:
    """Does each round of the loop that begins here take the number out of its row (``e = e[0]``), and do
    nothing else with the row? A list of one number is compared otherwise than a tensor."""
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
    """An instruction, or the two that Python 3.13 has joined in it, with what they are of."""
    if inst.opname == "STORE_FAST_LOAD_FAST":
        return list(zip(("STORE_FAST", "LOAD_FAST"), inst.argval))
    return [(inst.opname, inst.arg if inst.opname == "BINARY_OP" else inst.argval)]


def as_list(choices: Choices, pairs: bool) -> ListVariable:
    """All choices as a list; of lists with one number, where each is a row."""
    numbers: list[VariableTracker] = [ConstantVariable.create(i) for i in range(choices.among)]
    if pairs:
        numbers = [ListVariable([n], mutation_type=ValueMutationNew()) for n in numbers]
    return ListVariable(numbers, mutation_type=ValueMutationNew())

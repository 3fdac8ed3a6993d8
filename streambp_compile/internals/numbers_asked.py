"""Numbers that Python reads of masks and choices (``mask.sum().item() > 0``, ``counts.tolist()``), while
Dynamo traces.

Dynamo ends its graph there by default. Where code does nothing with such a number but to branch on it, the
number need not be known: the branch is one on whether rows are picked (internals/picked_branches.py). The
backend sees whether anything in the graph reads it, and has Dynamo trace again with a break.

Tested with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import Node

from .chosen_values import MOST, count_of_numbers, made_choices
from .picked_branches import masks_behind


def number_read(value: torch.Tensor) -> torch.Tensor:
    """In a graph: what Python reads as a number, or as a list of numbers."""
    return value


def read_numbers_later(may: Callable[[object], bool]) -> None:
    """Have Dynamo go on with tensors where code reads numbers of masks and choices.

    may  whether it should, for an `OutputGraph`
    """
    if not hasattr(TensorVariable.method_item, "__wrapped__"):
        TensorVariable.method_item = instead(TensorVariable.method_item, may, one_number)
        TensorVariable.method_tolist = instead(TensorVariable.method_tolist, may, all_numbers)


# What code may do with such a number: compare it with numbers, branch, and keep it in a local variable.
# Dynamo takes it for a tensor, and would say of its type, of its place in a dictionary, or of whether it is
# ``None`` what is true of a tensor. So anything else has Dynamo trace again with a break.

MOVING = tuple(
    "LOAD_FAST STORE_FAST DELETE_FAST LOAD_CONST LOAD_SMALL_INT LOAD_GLOBAL LOAD_NAME LOAD_DEREF COPY SWAP "
    "DUP_TOP ROT_ POP_TOP POP_JUMP JUMP_ UNARY_NOT TO_BOOL NOP NOT_TAKEN CACHE EXTENDED_ARG PUSH_NULL RESUME "
    "PRECALL END_FOR POP_ITER".split()
)
"""Beginnings of the names of instructions that move values, or branch on them."""
TAKING = {"LOAD_ATTR": 1, "LOAD_METHOD": 1, "BINARY_SUBSCR": 2, "COMPARE_OP": 2}
"""Instructions that take so many values from the stack, whatever lies below."""
GOING_OVER = ("GET_ITER", "FOR_ITER", "BINARY_SUBSCR", "UNPACK_SEQUENCE")
"""Instructions that take the elements of a list, one by one."""
LISTING = (enumerate, zip, len, list, tuple, reversed)
"""Functions that do so."""


def uses_as_no_number(frame: InstructionTranslatorBase, here: Instruction) -> bool:
    """Does an instruction do with a number that is read later, or with a list of such numbers, what only
    Python can?"""
    if not getattr(frame.output, "read_numbers", False) or here.opname.startswith(MOVING):
        return False
    stack = frame.stack[-TAKING[here.opname] :] if here.opname in TAKING else frame.stack
    if any(map(is_number, stack)):
        return here.opname != "COMPARE_OP" or not all(is_number(v) or is_plain_number(v) for v in stack)
    if not any(map(holds_number, stack)) or here.opname in GOING_OVER:
        return False
    listed = any(isinstance(v, BuiltinVariable) and v.fn in LISTING for v in stack)
    return not (here.opname.startswith("CALL") and listed)


def is_plain_number(value: VariableTracker) -> bool:
    return isinstance(value, ConstantVariable) and isinstance(value.value, (int, float))


def is_number(value: object) -> bool:
    """Is a value a number for Python: read of a mask or of choices, or computed of such alone?"""
    return isinstance(value, TensorVariable) and is_read(value.as_proxy().node)


def is_read(node: Node) -> bool:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dim():
        return False
    return node.target is number_read or any(map(is_read, node.all_input_nodes))


def holds_number(value: object) -> bool:
    """Is a value a list of such numbers, or an iterator over one?"""
    if isinstance(value, (list, tuple)):
        return any(is_number(v) or holds_number(v) for v in value)
    if not isinstance(value, (BaseListVariable, IteratorVariable)):
        return False
    return any(holds_number(getattr(value, name, ())) for name in PARTS)


PARTS = ("items", "iterable", "iterables", "iterator")  # attributes of Dynamo's lists and iterators


def instead(before: Callable, may: Callable[[object], bool], read: Callable) -> Callable:
    @functools.wraps(before)
    def method(self: TensorVariable, tx: InstructionTranslatorBase, *args: object, **kwargs: object):
        if may(tx.output) and not (args or kwargs or dynamo_config.capture_scalar_outputs):
            found = read(self, tx)
            if found is not None:
                tx.output.read_numbers = True
                return found
        return before(self, tx, *args, **kwargs)

    return method


def as_tensor(tx: InstructionTranslatorBase, value: object) -> VariableTracker:
    proxy = tx.output.create_proxy("call_function", number_read, (value,), {})
    return wrap_fx_proxy(tx, proxy)


def one_number(value: TensorVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    proxy = value.as_proxy()
    node: Node = proxy.node
    fake = node.meta["example_value"]
    if fake.dim() or fake.is_floating_point():  # which Python may round before it asks
        return None
    if not masks_behind(node) and not count_of_numbers(node):
        return None
    return as_tensor(tx, proxy)


def all_numbers(value: TensorVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    proxy = value.as_proxy()
    node: Node = proxy.node
    fake = node.meta["example_value"]
    if fake.dim() != 1 or fake.is_floating_point():
        return None
    if made_choices(node) is not None:
        return as_tensor(tx, proxy)
    count = count_of_numbers(node)
    if count is None or count > MOST:
        return None
    return ListVariable([as_tensor(tx, proxy[i]) for i in range(count)], mutation_type=ValueMutationNew())

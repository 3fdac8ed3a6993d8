"""Numbers that Python reads of masks and choices (``mask.sum().item() > 0``, ``counts.tolist()``), while
Dynamo traces.

Dynamo ends its graph there by default. Where code does nothing with such a number but to branch on it, the
number need not be known: the branch is one on whether rows are picked (internals/picked_branches.py). The
backend sees whether anything else reads it, and has Dynamo trace again with a break.

Tested with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import ListVariable
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

"""``torch._check_tensor_all``, which Dynamo traces as a read of a value, and so breaks the graph.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable, VariableTracker

from .distributed import defined_in

Handler = Callable[..., VariableTracker | None]
VALUE_CHECKS = {
    torch._check_tensor_all: 0,
    torch._check_tensor_all_with: 1,
}  # position of the tensor among the arguments


def trace_value_checks_as_assertions(package: str) -> None:
    """Make Dynamo trace checks of a tensor's values as assertions on it, for the backends of a package. An
    assertion is a node of the graph, so that nothing breaks. It raises RuntimeError, whatever error the
    check names."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for check, position in VALUE_CHECKS.items():
        before = handlers.get(check)
        if getattr(before, "package", None) != package:
            handlers[check] = asserted(before, position, package)


def asserted(before: Handler | None, position: int, package: str) -> Handler:
    """Build Dynamo's handler of a check: an assertion for this package's backends, ``before`` for others."""

    def handle(
        variable: TorchInGraphFunctionVariable,
        tx: InstructionTranslatorBase,
        *args: VariableTracker,
        **kwargs: VariableTracker,
    ) -> VariableTracker | None:
        condition = args[position] if len(args) > position else kwargs.get("cond")
        if condition is None or not defined_in(tx.output.compiler_fn, package):
            return None if before is None else before(variable, tx, *args, **kwargs)
        met = condition.call_method(tx, "all", [], {})
        message = ConstantVariable.create(f"{variable.value.__name__}: not all values are true")
        return TorchInGraphFunctionVariable(torch._assert_async).call_function(tx, [met, message], {})

    handle.package = package  # recognised when this module is loaded again
    return handle

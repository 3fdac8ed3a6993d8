"""Rows that a mask picks, in Dynamo's graphs: their number depends on the data.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import CodeType

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslator, tls
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .aten_graphs import decompositions
from .branch_tracing import branches_of, take_branches
from .chosen_loops import in_loops
from .distributed import defined_in
from .dynamo import OneAtATime
from .fake_tensors import stand_in

BROKEN_THERE: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Functions that pick rows in a way that this backend cannot represent in a graph. Dynamo breaks their
graphs, as it does by default."""

BRANCHING_THERE: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Functions with a branch that depends on whether a mask picks a row, and that has other effects as well.
Dynamo breaks their graphs there."""


def capture_picked_rows(package: str) -> None:
    """Make Dynamo keep ``torch.where(mask)`` and ``x[mask]`` in its graphs, for the backends of a package."""
    before = OutputGraph.__init__
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def init(self, code_options, compiler_fn, *args, f_code: CodeType, **kwargs) -> None:
        given = functools.partial(before, self, code_options, compiler_fn, *args, f_code=f_code, **kwargs)
        captured = defined_in(compiler_fn, package) and written_by_user(f_code) not in BROKEN_THERE
        if not captured or dynamo_config.capture_dynamic_output_shape_ops:
            return given()
        with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
            given()
        self.picking_rows = written_by_user(f_code)

    OutputGraph.__init__ = init
    OutputGraph.compile_subgraph = outside_of_branches(OutputGraph.compile_subgraph)
    InstructionTranslator.run = traced_again_where_it_failed(InstructionTranslator.run)
    take_branches(may_take_branches, trace_again, in_loops)


def may_take_branches(output: OutputGraph) -> bool:
    function = getattr(output, "picking_rows", None)
    return function is not None and function not in BRANCHING_THERE


def took_branch(output: OutputGraph) -> bool:
    return getattr(output, "took_branch", False)


def trace_again(output: OutputGraph) -> None:
    """Make Dynamo trace a function again with a graph break. The break is where the function branches on
    picked rows, if it does, or else where it picks rows. Raises Dynamo's restart."""
    branches = took_branch(output) and may_take_branches(output)
    (BRANCHING_THERE if branches else BROKEN_THERE).add(output.picking_rows)
    raise TensorifyScalarRestartAnalysis from None


def outside_of_branches(before: Callable) -> Callable:
    """Wrap Dynamo's function that ends a graph, to trace again where it would end inside a branch."""

    @functools.wraps(before)
    def compile_subgraph(self: OutputGraph, *args, **kwargs):
        if branches_of(self):
            trace_again(self)
        return before(self, *args, **kwargs)

    return compile_subgraph


def traced_again_where_it_failed(before: Callable[[InstructionTranslator], None]) -> Callable:
    """Wrap Dynamo's tracing function, to trace again after an error, with a graph break at picked rows. Code
    behind picked rows may need their number (a loop over it, a comparison), which no graph knows. By
    default Dynamo runs such code between two graphs. An error of another cause is raised again."""

    @functools.wraps(before)
    def run(self: InstructionTranslator) -> None:
        try:
            before(self)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception:
            function = getattr(self.output, "picking_rows", None)
            picked = self.output.shape_env.unbacked_symint_counter or took_branch(self.output)
            if function is None or not picked:
                raise
            trace_again(self.output)

    return run


def written_by_user(code: CodeType) -> CodeType:
    """Return the user's function that a code object is, or continues after a graph break."""
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def break_at_picked_rows() -> None:
    """Make Dynamo trace this function again, with a graph break where a mask picks rows. Does nothing where
    Dynamo is not tracing, or keeps such rows at the user's request. Raises Dynamo's restart."""
    output = getattr(getattr(tls, "current_tx", None), "output", None)
    if getattr(output, "picking_rows", None) is not None:
        trace_again(output)


@OneAtATime()
def capture_with_picked_rows(
    function: Callable, fakes: Sequence[object], *, as_written: bool = False
) -> GraphModule:
    """Trace a function in which masks pick rows to an ATen graph, with losses decomposed.

    All sizes are numbers, except the counts of picked rows.

    as_written  above autograd and autocast, with losses and other compositions as the user called them
    """
    environment = ShapeEnv(allow_dynamic_output_shape_ops=True)
    with (
        torch.no_grad(),
        unset_fake_temporarily(),
        FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True),
    ):
        numbers = [stand_in(value) for value in fakes]
        if as_written:
            return make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*numbers)
        return make_fx(function, written_out(), tracing_mode="fake", _allow_non_fake_inputs=True)(*numbers)


def masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


@functools.cache
def written_out() -> dict:
    """Return decompositions of losses that reduce to one number, and of `masked_select`."""
    losses = {
        op: written
        for op, written in decompositions().items()
        if isinstance(op, torch._ops.OpOverload)
        and any(argument.name == "reduction" for argument in op._schema.arguments)
    }
    return {**losses, torch.ops.aten.masked_select.default: masked_select}

"""Write each sweep's chunk body as an FX graph: the same nodes at length C.

Nothing is decided here: roles, directions, ranges and kernels are read from the analysis, the program and the
plan. A body's inputs are `Binding`s, which say how a driver cuts each one for a chunk; its size arguments are
symbols, so that one compiled body serves every chunk, the short last one, every prefix and every sequence
length.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..ir import Analysis, Body, Plan, Program, Sweep
from .reading import Draft
from .writer import Writer


def lower(program: Program, analysis: Analysis, plan: Plan) -> tuple[Body, ...]:
    """One body per sweep."""
    return tuple(body_of(sweep, analysis, plan) for sweep in program.sweeps)


def body_of(sweep: Sweep, analysis: Analysis, plan: Plan) -> Body:
    """The chunk body of one sweep."""
    draft = Draft(sweep, analysis, plan.kernels)
    for name in ("rows", "length"):  # strides of row views are written in them
        draft.scalar(name)
    for node in sweep.nodes:
        Writer(draft, node).write()
    for node in sweep.writes:
        if node not in sweep.appended:
            Writer(draft, node).store()
    draft.graph.output(())
    bindings = tuple(binding for binding, _ in draft.bindings.values())
    return Body(GraphModule({}, draft.graph), bindings, tuple(draft.used))

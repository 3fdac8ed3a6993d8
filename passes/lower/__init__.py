"""Write each sweep's chunk body as an FX graph: the same nodes at length C.

Nothing is decided here: roles, directions, ranges and kernels are read from the analysis, the program and the
plan. A body's inputs are `Binding`s, which say how a driver cuts each one for a chunk; its size arguments are
symbols, so that one compiled body serves every chunk, the short last one, every prefix and every sequence
length.
"""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from ..ir import Analysis, Body, Plan, Program, Sweep, origin_metadata
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
        last = next(reversed(draft.graph.nodes))
        Writer(draft, node).write()
        note_origin(draft.graph, last, node)
    for node in sweep.writes:
        if node not in sweep.appended:
            last = next(reversed(draft.graph.nodes))
            Writer(draft, node).store()
            note_origin(draft.graph, last, node)
    draft.graph.output(())
    bindings = tuple(binding for binding, _ in draft.bindings.values())
    return Body(GraphModule({}, draft.graph), bindings, tuple(draft.used))


def note_origin(graph: Graph, last: Node, node: Node) -> None:
    """Nodes of a body behind the last known one were written for a node of the joint graph."""
    for new in reversed(graph.nodes):
        if new is last:
            return
        new.meta.update(origin_metadata(node))

"""Write each sweep's chunk body as an FX graph: the same nodes at length C.

Lowering decides nothing. It reads roles, directions, ranges and kernels from the analysis, the program and
the plan. A body's inputs are `Binding`s, which say how a driver slices each input for a chunk. Its size
arguments are symbols, so that one compiled body serves every chunk, the short last one, every prefix and
every sequence length.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..ir import (
    Analysis,
    Binding,
    BindingRole,
    Body,
    Fusion,
    Plan,
    Program,
    Sweep,
    is_tensor,
    is_view,
    origin_metadata,
    value_of,
    viewed,
)
from ..rules import for_any_layout
from .reading import Draft, Inputs
from .writer import Writer


def lower(program: Program, analysis: Analysis, plan: Plan) -> tuple[Body, ...]:
    """Lower each sweep to a chunk body."""
    return tuple(body_of(sweep, analysis, plan) for sweep in program.sweeps)


def lower_fusions(plan: Plan) -> dict[Fusion, Body]:
    """Lower each of a plan's fusions to a body."""
    return {fusion: fused_body(fusion) for fusion in plan.fusions}


def body_of(sweep: Sweep, analysis: Analysis, plan: Plan) -> Body:
    """Write the chunk body of one sweep."""
    draft = Draft(sweep, analysis, plan.kernels)
    draft.counts(1)
    for node in sweep.nodes:
        last = next(iter(reversed(draft.graph.nodes)))
        Writer(draft, node).write()
        note_origin(draft.graph, last, node)
    stored = [n for n in sweep.writes if n not in sweep.appended]
    copy_what_is_overwritten(draft, stored)
    for node in stored:
        last = next(iter(reversed(draft.graph.nodes)))
        Writer(draft, node).store()
        note_origin(draft.graph, last, node)
    return draft.body(draft.used)


def copy_what_is_overwritten(draft: Draft, stored: Sequence[Node]) -> None:
    """Copy each result that is rows of a value whose memory another result takes over. Results are stored one
    after another, so the other one may be stored there first.

    stored  the results, in the order in which they are stored
    """
    over = dict(draft.sweep.in_place)
    sources = {given: binding.source for binding, given in draft.bindings.values()}
    for node in stored:
        value = draft.values[node]
        memory = memory_of(value)
        source = sources.get(memory)
        stays = value is memory and source is over.get(node)
        if source in over.values() and not stays:
            draft.values[node] = draft.graph.call_function(torch.ops.aten.clone.default, (value,))
            draft.values[node].meta.update(origin_metadata(node))


def memory_of(node: Node) -> Node:
    """Find the value whose memory a value has, through views and the items of views."""
    node = viewed(node)
    while node.target is operator.getitem:
        node = viewed(node.all_input_nodes[0])
    return node


def fused_body(fusion: Fusion) -> Body:
    """Write the nodes of a fusion at full length. The results are copied into memory that the caller passes
    in."""
    inputs, values = Inputs(), dict[Node, Node]()

    def read(node: Node) -> Any:
        if isinstance(value_of(node), (int, float)):
            return value_of(node)
        if node not in values and is_view(node) and viewed(node) in values:
            write(node)
        role = BindingRole.WHOLE if is_tensor(node) else BindingRole.SCALAR
        return values[node] if node in values else inputs.bind(Binding(role, node, node.name))

    def write(node: Node) -> None:
        args: Any = map_arg(node.args, read)
        kwargs: Any = map_arg(node.kwargs, read)
        values[node] = inputs.graph.call_function(for_any_layout(node.target), args, kwargs)
        values[node].meta.update(origin_metadata(node))

    for node in fusion.nodes:
        write(node)
    for node in fusion.results:
        memory = inputs.bind(Binding(BindingRole.RESULT, node, node.name))
        inputs.graph.call_function(torch.ops.aten.copy_.default, (memory, values[node]))
    return inputs.body()


def note_origin(graph: Graph, last: Node, node: Node) -> None:
    """Mark the body's nodes after ``last`` with the origin of the node that they were written for.

    node  of the joint graph
    """
    for new in reversed(graph.nodes):
        if new is last:
            return
        new.meta.update(origin_metadata(node))

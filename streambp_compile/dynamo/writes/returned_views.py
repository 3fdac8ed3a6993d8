"""Outputs of a graph that are views of its inputs or of other outputs.

A region returns values in memory of their own, because each gets a gradient of its own. But code behind
the graph may write into an output, and then all that shares its memory has to change. So such views are
taken when all regions have run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...passes.ir import is_view, outputs_of
from ..reading.values import storage_of, wants_gradient


def part_returned_views(module: GraphModule) -> dict[int, tuple[Node, ...]]:
    """Remove views that have gradients from a graph's outputs. Returns the place of each among the outputs →
    the views that lead to it from an input or an output that stays."""
    returned = outputs_of(module)
    kept = {n for n in returned if isinstance(n, Node)}
    found: dict[Node, tuple[Node, ...]] = {}
    for node in sorted(kept):
        steps = views_from(node, kept) if wants_gradient(node) else ()
        if steps:
            found[node] = steps
            kept.discard(node)
    if found:
        (output,) = module.graph.find_nodes(op="output")
        output.args = (tuple(n for n in returned if n not in found),)
        module.recompile()
    return {i: found[n] for i, n in enumerate(returned) if isinstance(n, Node) and n in found}


def views_from(node: Node, kept: set[Node]) -> tuple[Node, ...]:
    """List the views that lead to a node from an input or another output. The list is empty if another
    operation is on the way."""
    steps: list[Node] = []
    at = node
    while not steps or at.op != "placeholder" and at not in kept:
        sizes = at.all_input_nodes[1:]
        plain = at.op == "call_function" and is_view(at) and all(n.op == "placeholder" for n in sizes)
        if not plain or not wants_gradient(at) or storage_of(at) != storage_of(node):
            return ()
        steps.insert(0, at)
        at = at.args[0]
    return tuple(steps) if wants_gradient(at) and storage_of(at) == storage_of(node) else ()


def with_returned_views(
    call: Callable,
    views: Mapping[int, tuple[Node, ...]],
    placeholders: Sequence[Node],
    outputs: Sequence[object],
) -> Callable:
    """Wrap a call so that it returns the views too.

    outputs  the nodes that the call returns without them
    """
    if not views:
        return call

    def run(*args: object) -> tuple:
        results = list(call(*args))
        values = dict(zip(placeholders, args))
        values.update((n, value) for n, value in zip(outputs, results) if isinstance(n, Node))
        for place, steps in views.items():  # in the order of the outputs
            for step in steps:
                given = map_arg((step.args, step.kwargs), values.__getitem__)
                values[step] = step.target(*given[0], **given[1])
            results.insert(place, values[steps[-1]])
        return tuple(results)

    return run

"""The user's assertions (``assert x.isfinite().all()``), which Dynamo keeps in its graph.

An assertion has no result, and a graph that is cut into regions only computes values. So the asserted
condition becomes an output of the graph, and is checked after all regions have run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import outputs_of


def part_assertions(module: GraphModule) -> list[Node]:
    """Remove assertions from a graph, and append their conditions to its outputs. Returns the removed
    nodes."""
    found = [
        n for n in module.graph.nodes if n.target in internals.ASSERTIONS and isinstance(n.args[0], Node)
    ]
    if found:
        (output,) = module.graph.find_nodes(op="output")
        output.args = ((*outputs_of(module), *(n.args[0] for n in found)),)
        for node in found:
            module.graph.erase_node(node)
        module.recompile()
    return found


def with_assertions(call: Callable, assertions: Sequence[Node]) -> Callable:
    """Wrap a call so that it checks its last results as assertions, and returns the others. The wrapped
    call raises what the assertions raise."""
    if not assertions:
        return call

    def run(*args: object) -> tuple:
        results = tuple(call(*args))
        asserted = results[-len(assertions) :]
        for node, value in zip(assertions, asserted):
            node.target(value, *node.args[1:], **node.kwargs)
        return results[: -len(assertions)]

    return run

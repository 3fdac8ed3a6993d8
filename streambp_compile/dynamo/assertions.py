"""The user's assertions (``assert x.isfinite().all()``), which Dynamo keeps in its graph.

No value comes of them, and a graph that is cut into regions computes values alone. So what they assert is an
output of the graph, and is asserted when all regions have run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from .. import internals
from ..passes.ir import outputs_of


def part_assertions(module: GraphModule) -> list[Node]:
    """Take assertions from a graph, and return what they assert after its other outputs."""
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
    """A call that asserts its last results, and returns the others. Raises what the assertions raise."""
    if not assertions:
        return call

    def run(*args: object) -> tuple:
        results = tuple(call(*args))
        asserted = results[-len(assertions) :]
        for node, value in zip(assertions, asserted):
            node.target(value, *node.args[1:], **node.kwargs)
        return results[: -len(assertions)]

    return run

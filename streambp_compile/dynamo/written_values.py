"""Values that are written into after they were made: ``mask = zeros(...); mask[rows, ends] = 1``.

Python reads such a value by its first name, whoever wrote into it since. Here later readers read the writer's
result, which is the same memory, so that the order of writes and reads is seen in the graph.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..passes.rules.forward import mutated
from .values import fake_of, storage_of
from .written_inputs import same_layout


def read_from_writers(module: GraphModule) -> GraphModule:
    """Have what reads a value after a write into it read the result of that write."""
    place = {n: i for i, n in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = mutated(node)
        if target is not None and target.op == "call_function" and is_result(node, target):
            target.replace_all_uses_with(node, lambda user, at=place[node]: place[user] > at)
    return module


def is_result(node: Node, target: Node) -> bool:
    """Does a write return what it has written into?"""
    made, written = fake_of(node), fake_of(target)
    same = storage_of(node) is not None and storage_of(node) == storage_of(target)
    return same and same_layout(made, written)

"""Sums of transposed products, written as sums of products that are transposed once.

Where several layers share a weight, autograd transposes the gradient of each and adds up the results. If
they are added first, the products can share one accumulator (`passes/partition/shared_totals.py`).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..ir import rank_of, value_of
from ..rules import is_product
from .writing import Writing

aten = torch.ops.aten


def add_before_transposing(graph: Graph) -> None:
    """Rewrite ``a.T + b.T`` as ``(a + b).T``, where a and b are products, or sums of them."""
    sums: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Node) for a in node.args):
            continue
        (left, dims), (right, other) = map(untransposed, node.args)
        if not all(is_product(n) or n in sums for n in (left, right)):
            continue
        same = value_of(left).shape == value_of(right).shape and value_of(left).dtype == value_of(right).dtype
        if dims != other or not same:
            continue
        sums.add(node)
        if (left, right) == node.args:
            continue
        write = Writing(graph, node)
        total = write(aten.add.Tensor, left, right)
        sums.add(total)
        straight = dims == list(range(len(dims)))
        node.replace_all_uses_with(total if straight else write(aten.permute.default, total, dims))
        graph.erase_node(node)


def untransposed(node: Node) -> tuple[Node, list[int]]:
    """Find the value that a node is a permutation of, and the order of its dimensions. Views on the way have
    one reader each."""
    dims = list(range(rank_of(node)))
    while node.target is aten.permute.default and len(node.users) == 1:
        inner = [d % len(dims) for d in node.args[1]]
        dims = [inner[d] for d in dims]
        node = node.args[0]
    return node, dims

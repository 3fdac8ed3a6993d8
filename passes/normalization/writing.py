"""Calls written in front of a node, with their fake values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from ..ir import metadata_for, rank_of, total_dtype, value_of
from .size_nodes import SizeNodes

aten, prims = torch.ops.aten, torch.ops.prims


class Writing:
    """A writer of calls in front of a node, with their fake values."""

    def __init__(self, graph: Graph, node: Node):
        self.graph, self.node, self.sizes = graph, node, SizeNodes(graph)

    def __call__(self, target: Callable, *args, value: object = None) -> Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args)
        if value is None:
            value = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        new.meta = metadata_for(self.node, value)
        return new

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if value_of(x).dtype is dtype else self(prims.convert_element_type.default, x, dtype)

    def wide(self, x: Node) -> Node:
        """Cast a value to the dtype of its sums."""
        return self.cast(x, total_dtype(value_of(x).dtype))

    def number(self, number: float, like: Node) -> Node:
        value = value_of(like)
        new = self(aten.full.default, [], number, value=value.new_empty(()))
        new.kwargs = dict(dtype=value.dtype, device=value.device)
        return new

    def places(self, x: Node, dim: int) -> Node | None:
        """Write the numbers ``0, 1, …`` along a dimension of a value, to broadcast against it. Returns None
        if the size of the dimension cannot be read from inputs."""
        value = value_of(x)
        size = self.sizes.written(value.shape[dim], self.node)
        if size is None:
            return None
        place = self(prims.iota.default, size, value=value.new_empty(value.shape[dim], dtype=torch.int64))
        place.kwargs = dict(start=0, step=1, dtype=torch.int64, device=value.device, requires_grad=False)
        for _ in range(rank_of(x) - 1 - dim):
            place = self(aten.unsqueeze.default, place, -1)
        return place

"""Values made from ranges and constants alone, computed only as long as they are read.

Position tables are often made for the longest sequence and sliced (``bias[:, -length:]``). Their rows
are then no rows of this sequence, and a slice that starts late shifts them against it. Made short, they
are as long as the values that they meet.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import (
    CannotStream,
    Mark,
    Signature,
    arguments,
    hint,
    metadata_for,
    shape_of,
    tensor_operands,
    value_of,
)
from ..phases import check_time
from ..rules import form_of, rule_of
from ..rules.facets import Form
from ..token_propagation import reshaped
from .size_nodes import SizeNodes


@dataclass(frozen=True)
class SliceBounds:
    """``start`` and ``count`` of a slice: numbers, or nodes where they depend on sizes."""

    start: int | Node
    count: int | Node


def shorten_constants(graph: Graph) -> None:
    """Move slices through the ops before them, up to ranges and constants. A slice is moved only if its
    operand is made of nothing else."""
    sizes, hopeless = SizeNodes(graph), set[tuple[Node, int]]()
    for node in [n for n in graph.nodes if form_of(n) is Form.SLICE]:
        source = node.args[0]
        dim, part = part_of(node, sizes)
        if part is None or shape_of(source) == shape_of(node):
            continue
        short = Shortened(graph, node, part, sizes, hopeless).shortened(source, dim)
        if short is not None:
            node.replace_all_uses_with(short)


def part_of(node: Node, sizes: SizeNodes) -> tuple[int, SliceBounds | None]:
    given = arguments(node)
    dim, start = given["dim"] % len(shape_of(node)), given["start"] or 0
    whole = sizes.written(value_of(given["self"]).shape[dim], node)
    if given["step"] != 1 or whole is None:
        return dim, None
    if (hint(value_of(start)) if isinstance(start, Node) else start) < 0:  # counted from the end
        start = sizes.sum(start, whole, node)
    count = sizes.written(value_of(node).shape[dim], node)
    if count is None and given["end"] == sys.maxsize:
        count = sizes.sum(whole, sizes.product(start, -1, node), node)
    return dim, None if count is None else SliceBounds(start, count)


class Shortened:
    """Copies of nodes with one dimension sliced.

    hopeless  nodes and dimensions that are made of more than ranges and constants, whatever part is
              asked for
    """

    def __init__(
        self,
        graph: Graph,
        before: Node,
        part: SliceBounds,
        sizes: SizeNodes,
        hopeless: set[tuple[Node, int]],
    ):
        self.graph, self.before, self.part, self.sizes, self.hopeless = graph, before, part, sizes, hopeless
        self.known: dict[tuple[Node, int], Node | None] = {}

    def shortened(self, node: Node, dim: int) -> Node | None:
        """Rebuild a part of a value along one of its dimensions. Returns None if the value is made of
        anything but ranges and constants."""
        check_time()
        if (node, dim) in self.hopeless:
            return None
        if (node, dim) not in self.known:
            self.known[node, dim] = self.copied(node, dim) if node.op == "call_function" else None
            if self.known[node, dim] is None:
                self.hopeless.add((node, dim))
        return self.known[node, dim]

    def copied(self, node: Node, dim: int) -> Node | None:
        if form_of(node) is Form.RANGE:
            start = self.sizes.sum(
                node.kwargs["start"],
                self.sizes.product(self.part.start, node.kwargs["step"], self.before),
                self.before,
            )
            return self.emit(node, dim, (self.part.count,), {**node.kwargs, "start": start})
        if form_of(node) is Form.FULL:
            return self.emit(node, dim, (self.resized(node.args[0], dim), *node.args[1:]), node.kwargs)
        try:
            rule = rule_of(node)
            signature = rule.signature(node)
        except CannotStream:
            return None
        if signature.reshape and rule.shape_arg is None or rule.writes is not None:
            return None  # an index that rows are written by counts from the first row of all
        found = self.before_reshape(node, dim) if signature.reshape else self.operands(node, dim, signature)
        short = {a: self.shortened(a, place) for a, place in found.items()}
        if not short or None in short.values():
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda a: short.get(a, a))
        if rule.shape_arg is not None:
            args = tuple(self.resized(a, dim) if i == rule.shape_arg else a for i, a in enumerate(args))
        return self.emit(node, dim, args, kwargs)

    def before_reshape(self, node: Node, dim: int) -> dict[Node, int]:
        """Find the operand of a view, and its dimension that equals a dimension of the view."""
        old = shape_of(node.args[0])
        mark = reshaped(Mark(dim), shape_of(node), old)
        if mark is None or (mark.outer, mark.inner) != (1, 1) or old[mark.dim] != shape_of(node)[dim]:
            return {}
        return {node.args[0]: mark.dim}

    def operands(self, node: Node, dim: int, signature: Signature) -> dict[Node, int]:
        """Map the operands that have a dimension of the node to its place in them. There are none if rows
        along it do more than meet the rows beside them."""
        label = signature.outputs[0][dim]
        if label is None or label in signature.offsets or signature.mixes(label):
            return {}
        places = dict(zip(tensor_operands(node), signature.operands))
        if any(places[a] != labels for a, labels in zip(tensor_operands(node), signature.operands)):
            return {}  # a product with itself
        return {a: labels.index(label) for a, labels in places.items() if label in labels}

    def resized(self, shape: list, dim: int) -> list:
        return [self.part.count if i == dim else size for i, size in enumerate(shape)]

    def emit(self, node: Node, dim: int, args: tuple, kwargs: dict | None = None) -> Node:
        with self.graph.inserting_before(self.before):
            new = self.graph.call_function(node.target, args, kwargs or {})
        value, count = value_of(node), self.part.count
        shape = [
            (value_of(count) if isinstance(count, Node) else count) if i == dim else size
            for i, size in enumerate(value.shape)
        ]
        new.meta = metadata_for(node, value.new_empty(shape))
        return new

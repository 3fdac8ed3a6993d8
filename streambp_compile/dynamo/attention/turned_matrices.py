"""Matrices of tokens by tokens that are read both by rows and by columns: computed once for each.

A contrastive loss takes a softmax over the rows of a similarity matrix and one over its columns; DeBERTa
looks up scores of queries, and scores of keys, by one matrix of distances. A chunk holds some rows of a
matrix, so one matrix cannot serve both. Where the readers of a matrix disagree, it is computed a second
time, together with its operands up to values with one row per token. The rewrite is done in Dynamo's
graph, so that autograd keeps both apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from ...passes.ir import (
    Contraction,
    Signature,
    arguments,
    hint,
    is_equal,
    origin_of,
    shape_of,
    tensor_operands,
)
from ...passes.rules.forward import Part, mutated, part_of
from ...passes.token_propagation import TokenPropagation, reshaped, slot_of
from ..reading.token_axes import SHORTEST_STREAMED, Trace, axes_of, traced
from ..reading.values import fake_of, storage_of
from ..rows.row_slices import may_be_repeated
from .relative_shifts import mutated_storages

aten = torch.ops.aten
Demands = dict[Node, set[int]]  # a matrix → the dimensions that its readers treat as keys


def part_turned_matrices(module: GraphModule) -> GraphModule:
    """Compute matrices once for readers of their rows, and once for readers of their columns."""
    if not any(map(turns_square, module.graph.nodes)):
        return module
    fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
    trace = traced(module, fakes)
    for axis in axes_of(trace, fakes):
        marks = {
            v: axis.marks[n] for n, v in trace.values.items() if n.op == "placeholder" and n in axis.marks
        }
        readings = Readings(trace, TokenPropagation(trace.graph, marks, trace.known))
        part_matrices(module.graph, readings)
    return module


def turns_square(node: Node) -> bool:
    """Does a node move, or normalise over, a dimension before the last, where two dimensions have one size?
    These may be tokens."""
    if part_of(node) is Part.ALONG:
        dims, rank = arguments(node).get("dim"), fake_of(node.args[0]).dim()
        first = next(iter(dims), None) if isinstance(dims, (list, tuple)) else dims
        if first is None or first in (-1, rank - 1):
            return False
    elif part_of(node) not in (Part.MOVE, Part.TRANSPOSE):
        return False
    long = [s for s in fake_of(node.args[0]).shape if hint(s) >= SHORTEST_STREAMED]
    return any(is_equal(a, b) for i, a in enumerate(long) for b in long[i + 1 :])


class Readings:
    """The dimensions that readers treat as the keys of a matrix, by the operators that they become."""

    def __init__(self, trace: Trace, propagation: TokenPropagation):
        self.trace, self.propagation = trace, propagation
        self.own: dict[Node, list[Node]] = {}
        owners = {name: n for n, names in trace.captured_for.items() for name in names}
        for node in trace.graph.nodes:
            owner = owners.get(origin_of(node), owners.get(node.name))
            if owner is not None:
                self.own.setdefault(owner, []).append(node)

    def of(self, reader: Node, dim: int | None) -> Mapping[Node, set[int]]:
        """Find the dimensions that a node of Dynamo's graph treats as keys in each of its operands.

        dim  the dimension that its own readers treat as the keys of its result
        """
        own, found = self.own.get(reader, []), Demands()
        result = self.trace.values.get(reader)
        if own and result not in own:  # a value that is written into is that of its last writer
            result = own[-1]
        if result is not None and dim is not None:
            found[result] = {dim}
        for node in reversed(own):
            self.demand(node, found)
        values = {self.trace.values.get(n): n for n in reader.all_input_nodes}
        given = {n: found[v] for v, n in values.items() if v in found and (v is not result or not own)}
        written = mutated(reader)
        return given if written is None or dim is None else {**given, written: {dim}}

    def is_matrix(self, node: Node) -> bool:
        return self.propagation.pairs(slot_of(node))

    def demand(self, node: Node, found: Demands) -> None:
        """Add the dimensions that an operator treats as keys of its operands."""
        signature = self.propagation.signatures.get(node)
        if node.target is operator.getitem and node in found:
            found.setdefault(node.args[0], set()).update(found[node])
        if signature is None:
            return
        if signature.reshape:
            return self.demand_of_reshape(node, found)
        labels = {labels[d] for labels in signature.outputs for d in found.get(node, ()) if d < len(labels)}
        for operand, names in zip(tensor_operands(node), signature.operands):
            if self.is_matrix(operand):
                keys = labels | {signature.keys} | taken_at_once(signature)
                marks = self.propagation.of(operand)
                found.setdefault(operand, set()).update(d for d in marks if names[d] in keys - {None})

    def demand_of_reshape(self, node: Node, found: Demands) -> None:
        operand = tensor_operands(node)[0]
        for dim, mark in self.propagation.of(operand).items() if self.is_matrix(operand) else ():
            moved = reshaped(mark, shape_of(operand), shape_of(node))
            if moved is not None and moved.dim in found.get(node, ()):
                found.setdefault(operand, set()).add(dim)


def taken_at_once(signature: Signature) -> set:
    """Collect the labels of which an operator needs all entries: rows that are picked, sorted or counted."""
    if signature.contracts is Contraction.SUM:
        return set()
    read = {label for labels in signature.operands for label in labels}
    return read - {label for labels in signature.outputs for label in labels} - signature.sums


def part_matrices(graph: Graph, readings: Readings) -> None:
    """Give readers that treat another dimension as keys a copy of their matrix, from the last node to the
    first."""
    wanted: dict[Node, list[tuple[Node, set[int]]]] = {}
    written = mutated_storages(graph)
    for node in reversed(list(graph.nodes)):
        dims = {d for _, found in wanted.get(node, ()) for d in found}
        copies = {max(dims): node} if dims else {}
        parted = len(dims) == 2 and all(len(found) == 1 for _, found in wanted[node])
        if parted and may_be_repeated(node, node) and storage_of(node) not in written:
            copies[min(dims)] = copied_for(node, [r for r, found in wanted[node] if found == {min(dims)}])
        for dim, copy in copies.items() or [(None, node)]:
            for operand, found in readings.of(node, dim).items():
                if found:
                    wanted.setdefault(operand, []).append((copy, found))


def copied_for(node: Node, readers: Iterable[Node]) -> Node:
    """Copy a node for some of its readers."""
    with node.graph.inserting_after(node):
        copy = node.graph.node_copy(node)
    for reader in readers:
        reader.replace_input_with(node, copy)
    return copy

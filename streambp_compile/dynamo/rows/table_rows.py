"""Rows of a table, made or taken before the table is. A table is made of ranges and constants alone, or it
is stored, and its dimensions are only arranged.

Position tables are often made for the longest sequence and sliced (``bias[:, -length:]``). Their rows
are then no rows of this sequence, and a slice that starts late shifts them against it. Made short, they
are as long as the values that they meet. Likewise, ``mask[None, None, -rows:, -columns:]`` adds
dimensions first and then takes the rows. The value in between is as long as the stored table, which may
be longer than the text. Written as ``mask[-rows:, -columns:][None, None]``, the rows are taken from the
table itself. The rewrite is done in Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ...passes.ir import are_equal, hint, is_equal
from ...passes.rules.forward import Part, Slice, is_filled, part_of, slice_of
from ..reading.aten import erase_unread, size_as_node, sum_of
from ..reading.row_ties import operand_dims
from ..reading.values import fake_of, is_changed
from .row_slices import Known, RowRange, with_rows

ARRANGING = (Part.MERGE, Part.RESHAPE, Part.MOVE)


def take_table_rows_first(module: GraphModule) -> GraphModule:
    """Move slices of tables in front of the steps by which they are made or arranged."""
    moved, tables = [], tables_of(module.graph)
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args else None
        part = slice_of(node, fake_of(source).dim()) if source in tables else None
        if part is None or part.lost or part.dim not in tables[source]:
            continue
        if are_equal(fake_of(source).shape, fake_of(node).shape):
            continue
        with module.graph.inserting_before(node):
            rows, known = rows_taken(node, part), Known()
            value = None if rows is None else with_rows(source, part.dim, rows, node, known)
        if value is not None:
            node.replace_all_uses_with(value)
            tables[value] = tables.get(node, set())
            moved.append(node)
    erase_unread(module.graph, moved)
    return module


def tables_of(graph: Graph) -> dict[Node, set[int]]:
    """Find the tables, each with the dimensions along which rows can be made, or taken, by themselves. A
    stored table that nothing has arranged is left out: its rows are taken from it already."""
    found, stored = dict[Node, set[int]](), set[Node]()
    for node in graph.nodes:
        fake = fake_of(node)
        if not isinstance(fake, torch.Tensor) or is_changed(node):
            continue
        read = [a for a in node.all_input_nodes if isinstance(fake_of(a), torch.Tensor) and fake_of(a).dim()]
        if is_filled(node) or part_of(node) is Part.COUNT or is_stored(node):
            found[node] = set(range(fake.dim()))
            stored |= {node} if is_stored(node) else set()
        elif read and all(found.get(a) for a in read):
            arranged = stored.isdisjoint(read) or part_of(node) in ARRANGING or is_slice(node)
            dims = {d for d in range(fake.dim()) if is_row_of(node, d, found)} if arranged else set()
            found |= {node: dims} if dims else {}
            stored |= set() if stored.isdisjoint(read) else {node}
    return {n: dims for n, dims in found.items() if not is_stored(n)}


def is_stored(node: Node) -> bool:
    """Is a node an input, or a slice of one?"""
    return node.op == "placeholder" or is_slice(node) and is_stored(node.args[0])


def is_slice(node: Node) -> bool:
    return node.target in (torch.ops.aten.slice.Tensor, torch.ops.aten.narrow.default)


def is_row_of(node: Node, dim: int, tables: dict[Node, set[int]]) -> bool:
    """Is a row of a value made of the same rows of tables alone?"""
    dims = operand_dims(node, dim)
    if part_of(node) is Part.TRIANGLE:
        dims = {node.args[0]: dim}
    return bool(dims) and all(at in tables.get(a, ()) for a, at in dims.items())


class TableRows(RowRange):
    """Rows of a table. Of a stored one they are read, behind its other slices."""

    def made(self, node: Node, dim: int, like: Node) -> Node | None:
        return self.read(node, dim, like) if is_stored(node) else super().made(node, dim, like)


def rows_taken(node: Node, part: Slice) -> TableRows | None:
    """Return the rows that a slice takes, counted from the first. None where no size in the graph is their
    number."""
    source, start = node.args[0], part.start
    size, count = (fake_of(n).shape[part.dim] for n in (source, node))
    if hint(fake_of(start) if isinstance(start, Node) else start) < 0:
        start = sum_of(size_as_node(node, source, part.dim), start, node)
    rows = TableRows(start, sum_of(start, count, node) if isinstance(count, int) else part.stop)
    first, end = rows.places(size)
    return rows if is_equal(end - first, count) else None

"""Writes of rows into a value (``y[:, 0] = w``, ``x[:, 3:] *= 2``), as choices by place.

The result has the written rows at their places, and the rows of the value at all others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import arguments, is_equal, is_floating, shape_of, value_of
from ..ir.values import Size
from ..rules import is_zeros
from .shifted_rows import has_features
from .writing import Writing

aten = torch.ops.aten


def choose_by_place(graph: Graph) -> None:
    """Rewrite scatters of rows into wide values as choices by place. Row i of the result is a row of the
    value or one that is written, and its place decides which."""
    for node in list(graph.nodes):
        written = rows_written(node)
        if written is None or is_zeros(node.args[0]) or not has_features(node, written.dim):
            continue
        chosen = chosen_by_place(graph, node, written)
        if chosen is not None:
            node.replace_all_uses_with(chosen)


@dataclass(frozen=True)
class WrittenRows:
    """Rows ``[start, stop)`` of a dimension of ``size``, where ``rows`` are written. If it is ``picked``, a
    single row without that dimension is written."""

    rows: Node
    dim: int
    start: Size
    stop: Size
    size: Size
    picked: bool


def rows_written(node: Node) -> WrittenRows | None:
    """Describe the rows that a scatter writes; None for other operators, and for unknown places."""
    if node.target not in (aten.select_scatter.default, aten.slice_scatter.default) or not is_floating(node):
        return None
    given, value = arguments(node), value_of(node)
    rows, dim = given["src"], given["dim"] % value.dim()
    size, picked = value.shape[dim], node.target is aten.select_scatter.default
    start = given["index"] if picked else given["start"] or 0
    if not isinstance(start, int) or value_of(rows).dtype != value.dtype:
        return None
    if picked:
        start += 0 if start >= 0 else size
        return WrittenRows(rows, dim, start, start + 1, size, picked)
    if len(shape_of(rows)) != value.dim() or given["step"] != 1:
        return None
    count = value_of(rows).shape[dim]
    if start < 0:  # counted from the end, and cut off at the first row
        if given["end"] in (None, sys.maxsize):
            start = size - count
        elif isinstance(size, int):
            start = max(0, start + size)
        else:
            return None
    return WrittenRows(rows, dim, start, start + count, size, picked)


def chosen_by_place(graph: Graph, node: Node, written: WrittenRows) -> Node | None:
    """Write the value as a choice; None where one of its sizes cannot be read from inputs."""
    write, size, base = Writing(graph, node), written.size, node.args[0]
    if is_equal(written.start, written.stop):
        return base
    if is_equal(written.start, 0) and is_equal(written.stop, size):
        return write(aten.unsqueeze.default, written.rows, written.dim) if written.picked else written.rows
    place = write.places(node, written.dim)
    start, stop, behind = (
        write.sizes.written(s, node) for s in (written.start, written.stop, size - written.stop)
    )
    rows = put_at_place(write, node, written, start, behind)
    if place is None or start is None or stop is None or rows is None:
        return None
    if is_equal(written.stop, written.start + 1):
        return write(aten.where.self, write(aten.eq.Scalar, place, start), rows, base)
    if not is_equal(written.stop, size):
        rows = write(aten.where.self, write(aten.lt.Scalar, place, stop), rows, base)
    if not is_equal(written.start, 0):
        rows = write(aten.where.self, write(aten.ge.Scalar, place, start), rows, base)
    return rows


def put_at_place(
    write: Writing, node: Node, written: WrittenRows, start: object, behind: object
) -> Node | None:
    """Move the written rows to their places; a row that is the same for each stays as it is. Returns None if
    their places are unknown."""
    rows, dim = written.rows, written.dim
    if is_zeros(rows):
        return write.number(0, node)
    if written.picked:
        return write(aten.unsqueeze.default, rows, dim)
    if is_equal(written.stop, written.start + 1):
        return rows
    if rows.target is aten.expand.default and is_same_for_all(rows.args[0], len(shape_of(node)) - dim):
        return rows.args[0]
    if not isinstance(start, int) or behind is None:
        return None
    amounts = [0, 0] * (len(shape_of(node)) - 1 - dim) + [start, behind]
    padded = value_of(node).new_empty(value_of(node).shape)
    return write(aten.constant_pad_nd.default, rows, amounts, value=padded)


def is_same_for_all(value: Node, from_end: int) -> bool:
    """Does a value have one row, or no such dimension, along a dimension counted from the last?"""
    shape = shape_of(value)
    return len(shape) < from_end or shape[-from_end] == 1

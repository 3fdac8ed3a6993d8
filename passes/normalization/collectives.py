"""Collectives that name the dimension along which they gather or scatter.

Torch's collectives put the parts of several processes behind one another along the first dimension.
Where they belong along another one (the tokens of sequence parallel), values are split and joined around
them: ``cat(split(all_gather(x)), dim)``. Such a chain becomes one operator here, which names its
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..ir import arguments, metadata_for, shape_of, value_of
from ..rules import form_of
from ..rules.facets import Form

aten, streambp = torch.ops.aten, torch.ops.streambp
c10d = torch.ops._c10d_functional


def name_dimensions(graph: Graph) -> None:
    """Rewrite collectives, with the splits and joins around them, as operators that name their dimension.
    They become ``streambp.gathered`` and ``streambp.scattered``. Exchanges that are waited for become
    ``streambp.exchanged``."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        part, processes, group = node.args
        for waited in waits_for(node) if isinstance(group, str) else ():
            for result, dim in gathers(waited, part, processes):
                write(result, streambp.gathered.default, (part, dim, processes, group))
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        parts, reduction, processes, group = node.args
        whole, dim = scatters(parts, processes) or (parts, 0)
        for waited in waits_for(node) if isinstance(group, str) else ():
            write(waited, streambp.scattered.default, (whole, dim, reduction, processes, group))
    for node in graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
        for waited in waits_for(node) if isinstance(node.args[-1], str) else ():
            write(waited, streambp.exchanged.default, node.args)


def waits_for(node: Node) -> list[Node]:
    """List the finished results of a collective."""
    return [n for n in node.users if n.target is c10d.wait_tensor.default]


def write(node: Node, target: torch._ops.OpOverload, args: tuple) -> None:
    """Replace a node by a call, for all its readers."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    value = target(*map_arg(args, value_of))
    new.meta = metadata_for(node, value)
    node.replace_all_uses_with(new)


def gathers(waited: Node, part: Node, processes: int) -> list[tuple[Node, int]]:
    """List the values that are all parts concatenated, each with the dimension along which they are."""
    pieces = [n for n in waited.users if rows_of(n) is not None]
    joined = [n for piece in pieces for n in piece.users if is_joined(n, waited)]
    found = [
        (n, dim) for n in dict.fromkeys(joined) if shape_of(n) == longer(part, dim := dim_of(n), processes)
    ]
    for node in waited.users:
        if form_of(node) is Form.RESHAPE:
            ways = [d for d in range(len(shape_of(part))) if shape_of(node) == longer(part, d, processes)]
            found += [(node, d) for d in ways if all(s == 1 for s in shape_of(part)[:d])]
    return [*found, (waited, 0)]


def longer(part: Node, dim: int, times: int) -> tuple:
    shape = shape_of(part)
    return (*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def scatters(parts: Node, processes: int) -> tuple[Node, int] | None:
    """Find the value that was split into these parts for the processes, and the dimension, or None."""
    items: Sequence[Node] = parts.args[0] if form_of(parts) is Form.JOINED else ()
    first = rows_of(items[0]) if len(items) == processes and dim_of(parts) == 0 else None
    return (first.whole, first.dim) if first and is_split_of(items, first.whole, first.dim) else None


def is_joined(node: Node, waited: Node) -> bool:
    """Does a node concatenate all parts of a split along the first dimension, in order?"""
    return form_of(node) is Form.JOINED and is_split_of(node.args[0], waited, 0)


def is_split_of(items: Sequence[Node], whole: Node, dim: int) -> bool:
    """Are these all parts of a value that was split along a dimension, of one length and in order?"""
    length = shape_of(whole)[dim] // len(items)
    parts = [RowsOf(whole, dim, i * length, length) for i in range(len(items))]
    return length * len(items) == shape_of(whole)[dim] and list(map(rows_of, items)) == parts


@dataclass(frozen=True)
class RowsOf:
    """Rows ``start`` to ``start + length`` of a value along a dimension."""

    whole: Node
    dim: int
    start: object
    length: object


def rows_of(node: object) -> RowsOf | None:
    """Describe a slice as rows of a value; None for any other node."""
    if not isinstance(node, Node) or form_of(node) is not Form.SLICE:
        return None
    given = arguments(node)
    if given["step"] != 1:
        return None
    dim = given["dim"] % len(shape_of(node))
    return RowsOf(given["self"], dim, given["start"] or 0, shape_of(node)[dim])


def dim_of(node: Node) -> int:
    """Return the dimension along which a node joins values."""
    return arguments(node)["dim"] % len(shape_of(node))

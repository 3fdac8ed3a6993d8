"""Functions of the rows that a mask picks: row by row, whichever rows the data picks."""

from __future__ import annotations

import operator

from torch.fx import Node

from ..ir import Signature, shape_of, tensor_operands, value_of
from ..kernels.picked_rows import PICKED_FUNCTIONS, PickedFunction, most_rows
from . import rule
from .facets import CostClass


def function_of(node: Node) -> PickedFunction:
    return PICKED_FUNCTIONS[node.args[1]]


def picked(node: Node) -> Signature:
    """Build the signature: the mask's dimensions are labels; every other dimension is tied to nothing."""
    found, (mask, *operands) = function_of(node), tensor_operands(node)

    def labels(dims: tuple[int, ...], rank: int, name: object) -> tuple:
        return tuple(("mask", dims[d]) if d < len(dims) else name and (name, d) for d in range(rank))

    every = tuple(("mask", d) for d in range(len(shape_of(mask))))
    read = enumerate(zip(operands, found.operands))
    return Signature(
        (every, *(labels(how.dims, len(shape_of(x)), i + 1) for i, (x, how) in read)),
        tuple(labels(how.dims, len(how.shape), None) for how in found.results),
        contracts="all",
        sums=frozenset(every),
    )


def width(node: Node, length: int) -> int:
    """Estimate the bytes per token inside a node if every row is picked once. For a mask ``[B, T]``, there
    are B rows per token."""
    return most_rows(value_of(node.args[0][0]), function_of(node)) * function_of(node).width // length


rule("streambp::picked_rows", cost=CostClass.KERNEL, width=width)(picked)


def emit_picked_sums(body, node: Node):
    """Add the parts of the chunk's rows to the accumulators of all results that are read."""
    parts = body.copy(node, body.summands(node))
    for output in range(len(value_of(node))):
        if body.is_read(node, output):
            part = body.graph.call_function(operator.getitem, (parts, output))
            body.add(part, body.total_of(node, output, 0.0))
    return parts


rule("streambp::picked_sums", cost=CostClass.KERNEL, width=width, emit=emit_picked_sums)(picked)

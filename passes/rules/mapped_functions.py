"""Functions that are mapped over rows: over those that a mask picks, or over one token after another.

Which rows a mask picks depends on the data. In a loop over tokens, each reads the state that all tokens
before it have left.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node

from ..ir import FUTURE, PAST, Reach, Signature, arguments, shape_of, tensor_operands, value_of
from ..kernels.mapped_functions import FUNCTIONS, MappedFunction, MappedValue, most_rows
from . import rule
from .facets import CostClass, Scan


def labels(how: MappedValue, rank: int, name: object) -> tuple:
    """Label the dimensions of rows. Others are tied to no other value; those of a result have no ``name``."""
    of_rows = [("rows", d) for d in how.dims]
    return (*of_rows, *(name and (name, d) for d in range(len(of_rows), rank)))


def read(operands: Sequence[Node], ways: Sequence[MappedValue]) -> tuple:
    return tuple(labels(how, len(shape_of(x)), i + 1) for i, (x, how) in enumerate(zip(operands, ways)))


# Picked rows


def function_of(node: Node) -> MappedFunction:
    return FUNCTIONS[node.args[1]]


def picked(node: Node) -> Signature:
    """Build the signature: the mask's dimensions are those of rows."""
    found, (mask, *operands) = function_of(node), tensor_operands(node)
    every = tuple(("rows", d) for d in range(len(shape_of(mask))))
    return Signature(
        (every, *read(operands, found.operands)),
        tuple(labels(how, len(how.shape), None) for how in found.results),
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

# Loops over tokens


def looped(node: Node, own: int, reach: Reach) -> Signature:
    """Build the signature of a loop. Its first ``own`` operands have a row per token, as states have."""
    found = FUNCTIONS[arguments(node)["function"]]
    (state,) = found.results
    ways = (*[state] * own, *found.operands)
    return Signature(
        read(tensor_operands(node), ways),
        (labels(state, 2, None),),
        reach={("rows", 0): reach},
        contracts="all",
    )


@rule("streambp::token_loop", cost=CostClass.KERNEL, scan=Scan(0.0, state="state"))
def token_loop(node: Node) -> Signature:
    return looped(node, 0, PAST)


@rule("streambp::token_loop_back", cost=CostClass.KERNEL, linear="grad", scan=Scan(0.0, state="state"))
def token_loop_back(node: Node) -> Signature:
    return looped(node, 2, FUTURE)

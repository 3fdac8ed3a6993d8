"""Functions of blocks of tokens: rows and a state per block, from the rows of that block.

Chunks hold whole blocks. A state per block is added up like any sum, each chunk giving its own blocks, so
that what blocks exchange is computed at full length between sweeps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..ir import Signature, Tokens, refuse, shape_of, tensor_operands
from ..kernels.blocks import FUNCTIONS, BlockAxis, BlockFunction, Unit
from . import rule
from .facets import CostClass

streambp = torch.ops.streambp


def function_of(node: Node) -> BlockFunction:
    return FUNCTIONS[node.args[1]]


def emit_over_blocks(body, node: Node):
    """The graph of the function, for the blocks of the chunk."""
    found, call = function_of(node), body.graph.call_function
    count = body.scalar(f"blocks_{found.length}")
    first = shared(body, operator.floordiv, (body.scalar("first"), found.length))
    made = shared(body, operator.floordiv, (body.scalar("rows"), found.length)) if found.full else count
    given = []
    for edge, axis in zip(body.edges(node), found.operands):
        value = body.operand(edge)
        if axis.along is Unit.ROWS:
            check_whole(body, node, edge.operand)
            size = shared(body, operator.mul, (count, found.length))
            value = shared(body, streambp.padded_rows.default, (value, axis.dim, size, found.full))
        elif axis.along is Unit.BLOCKS:
            value = shared(body, streambp.rows_at.default, (value, axis.dim, first, made))
            if found.full:
                value = shared(body, streambp.padded_rows.default, (value, axis.dim, count))
        given.append(value)
    result = inlined(body, found, [count, *given])
    if found.result.along is Unit.ROWS:
        return call(streambp.rows_at.default, (result, found.result.dim, 0, body.scalar("rows")))
    if found.result.along is Unit.WHOLE:
        return body.added(node, result)
    if found.full:
        result = call(streambp.rows_at.default, (result, found.result.dim, 0, made))
    call(streambp.write_rows_.default, (result, found.result.dim, first, body.total(node)))
    return body.total(node)


def check_whole(body, node: Node, operand: Node) -> None:
    """Refuse rows that are not all tokens: blocks are counted from the first token."""
    fact = body.domain(operand)
    if isinstance(fact, Tokens) and (fact.lo, fact.hi) != (0, 0):
        raise refuse(
            node,
            "The blocks of tokens are counted from another token than the first",
            "Cut the whole sequence into blocks, and slice what comes after",
        )


def inlined(body, found: BlockFunction, given: list[Node]) -> Node:
    """The nodes of a function in a chunk body."""
    values = dict(zip(found.module.graph.find_nodes(op="placeholder"), given))
    for node in found.module.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = shared(body, node.target, args, kwargs)
        elif node.op == "output":
            return values[node.args[0]]
    raise AssertionError("a graph without an output")


def shared(body, target: Callable, args: tuple, kwargs: dict | None = None) -> Node:
    """A call in a chunk body; one that another function has written already is that one. Each gradient of a
    function computes what all of them need."""
    key = f"{target} {args} {kwargs or {}}"
    if key not in body.draft.inlined:
        body.draft.inlined[key] = body.graph.call_function(target, args, kwargs)
    return body.draft.inlined[key]


@rule(
    "streambp::over_blocks",
    emit=emit_over_blocks,
    cost=CostClass.KERNEL,
    block=lambda node: function_of(node).length,
    width=lambda node, length: function_of(node).width,
)
def over_blocks(node: Node) -> Signature:
    found = function_of(node)

    def labels(number: int, rank: int, axis: BlockAxis) -> tuple:
        rows = axis.dim if axis.along is Unit.ROWS else None
        return tuple("t" if d == rows else ("block", number, d) for d in range(rank))

    places = enumerate(zip(tensor_operands(node), found.operands))
    return Signature(
        tuple(labels(i, len(shape_of(a)), axis) for i, (a, axis) in places),
        (tuple(x if x == "t" else None for x in labels(0, len(found.shape), found.result)),),
        contracts="all",
        sums=frozenset("t"),
    )

"""Blocks of tokens: rows come in blocks and leave them, and blocks exchange values at full length.

Chunks hold whole blocks. An operand that reads all blocks at once is added up like any sum, to which each
chunk adds its own blocks.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..ir import Signature, Tokens, refuse, shape_of
from . import rule
from .facets import CostClass

aten, streambp = torch.ops.aten, torch.ops.streambp


def emit_regrouped(body, node: Node):
    """Write the chunk's rows padded with zeros to whole blocks, or without the rows behind its tokens."""
    x, dim, _, given, made = node.args
    call, rows = body.graph.call_function, body.read(x)
    if not body.carries_tokens(node, dim):
        return body.copy(node)
    size = body.size(body.fact(node).rows)
    if given > made:
        return call(aten.slice.Tensor, (body.zero_beyond(x, rows, x), dim, 0, size))
    check_whole(body, node, x)
    behind = call(operator.sub, (size, body.size(body.fact(x).rows)))
    pad = [0, 0] * (len(shape_of(node)) - 1 - dim) + [0, behind]
    return call(aten.constant_pad_nd.default, (rows, pad))


def check_whole(body, node: Node, operand: Node) -> None:
    """Refuse rows that are not all tokens: blocks are counted from the first token."""
    fact = body.domain(operand)
    if isinstance(fact, Tokens) and (fact.lo, fact.hi) != (0, 0):
        raise refuse(
            node,
            "The blocks of tokens are counted from another token than the first",
            "Cut the whole sequence into blocks, and slice what comes after",
        )


@rule("streambp::regrouped", emit=emit_regrouped, cost=CostClass.FUSED, linear="x", of_blocks=True)
def regrouped(node: Node) -> Signature:
    _, dim, _, given, made = node.args
    labels = tuple(range(len(shape_of(node))))
    return Signature((labels,), (labels,), contracts="all", blocks=(given, made))


def first_row(body, value: Node) -> Node:
    """Return the place of a chunk's first row among all rows of a value."""
    mark = body.fact(value).rows
    return body.graph.call_function(operator.mul, (body.scalar("first", mark.block), mark.inner))


def emit_at_once(body, node: Node):
    """Write the chunk's rows to their place among those of all chunks."""
    x, dim = node.args
    if not body.adds_up(node):
        return body.copy(node)
    call, total = body.graph.call_function, body.total(node)
    call(streambp.add_among_rows_.default, (body.read(x), dim, first_row(body, x), total))
    return total


@rule("streambp::at_once", emit=emit_at_once, cost=CostClass.KERNEL, linear="x", of_blocks=True)
def at_once(node: Node) -> Signature:
    labels, dim = tuple(range(len(shape_of(node)))), node.args[1]
    kept = tuple(None if d == dim else d for d in labels)
    return Signature((labels,), (kept,), contracts="all", sums=frozenset({dim}))


def emit_by_block(body, node: Node):
    """Read the chunk's rows of a value that exists at full length."""
    x, dim = node.args
    if not body.carries_tokens(node, dim):
        return body.copy(node)
    rows = (dim, first_row(body, node), body.size(body.fact(node).rows))
    return body.graph.call_function(streambp.rows_around.default, (body.read_whole(x), *rows))


@rule("streambp::by_block", emit=emit_by_block, cost=CostClass.KERNEL, linear="x", of_blocks=True)
def by_block(node: Node) -> Signature:
    labels, dim = tuple(range(len(shape_of(node)))), node.args[1]
    read = tuple(None if d == dim else d for d in labels)
    return Signature((read,), (labels,), contracts="all", placed=frozenset({dim}))

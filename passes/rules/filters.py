"""Convolutions along the tokens, where a row is made of the rows around it, and of receptive fields."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..ir import Edge, Label, Reach, Role, Signature, shape_of
from ..kernels import filters
from . import rule
from .facets import CostClass, Form

aten, streambp = torch.ops.aten, torch.ops.streambp
KERNEL = CostClass.KERNEL


def is_convolution(node: Node) -> bool:
    """Is a node torch's own convolution, or its gradient?"""
    return node.target in (aten.convolution.default, aten.convolution_backward.default)


def write_rows_around(body, edge: Edge, dim: int, own: Reach) -> Node:
    """Read an operand's rows at a reach around the chunk.

    own  the reach, relative to the chunk's rows
    """
    fact, call = body.fact(edge.operand), body.graph.call_function
    first, last = (int(end) for end in (own.lo - fact.lo, own.hi - fact.lo))
    block = body.domain(edge.operand).rows.block
    start = call(operator.add, (body.scalar("first", block), first))
    count = call(operator.add, (body.scalar("rows", block), last - first))
    return call(streambp.rows_around.default, (body.operand(edge), dim, start, count))


def reach_of(node: Node, weight: Node) -> Reach:
    before, dilation, _ = node.args[-3:]
    return Reach(*filters.reach(shape_of(weight)[-1], before, dilation))


def emit_filtered(body, node: Node):
    """Write the convolution of the chunk's rows and those around them, without padding."""
    _, _, _, dilation, groups = node.args
    rows, weight = body.edges(node)
    if rows.role is not Role.HALO:
        return body.copied(node)
    given = (write_rows_around(body, rows, 2, rows.reach), body.operand(weight))
    found = body.graph.call_function(
        aten.convolution.default, (*given, None, [1], [0], [dilation], False, [0], groups)
    )
    return body.graph.call_function(aten.contiguous.default, (found,))


@rule("streambp::filtered", emit=emit_filtered, cost=KERNEL, linear="x * weight", around=True)
def filtered(node: Node) -> Signature:
    return Signature(
        (("b", "given", "t"), (None, None, None)),
        (("b", None, "t"),),
        reach={"t": reach_of(node, node.args[1])},
        contracts="all",
    )


def emit_filter_grad(body, node: Node):
    """Write the part of the weight's gradient that comes from the chunk's rows of the incoming gradient. It
    reads the input's rows from which the filter computed these."""
    _, _, weight, _, dilation, groups = node.args
    rows, grad, shape = body.edges(node)
    if rows.role is not Role.HALO:
        return body.copied(node)
    shift = grad.reach.lo - reach_of(node, weight).lo
    read = write_rows_around(body, rows, 2, rows.reach)
    own = write_rows_around(body, grad, 2, Reach(shift, shift))
    given = (own, read, body.operand(shape), [1], [0], [dilation], groups)
    return body.added(node, body.graph.call_function(streambp.convolved_weight_grad.default, given))


@rule("streambp::filter_grad", emit=emit_filter_grad, cost=KERNEL, linear="x * grad", around=True)
def filter_grad(node: Node) -> Signature:
    return Signature(
        (("b", "given", "t"), ("b", "made", "t"), (None, None, None)),
        ((None, None, None),),
        reach={"t": reach_of(node, node.args[2])},
        contracts="all",
        sums=frozenset("bt"),
    )


# Convolutions of receptive fields: each entry of the batch is the rows that some tokens read


@rule("streambp::receptive_fields", linear="x", form=Form.RECEPTIVE_FIELDS)
def receptive_fields(node: Node) -> Signature:
    x, dim = node.args[:2]
    labels = tuple(range(len(shape_of(x))))
    made = (0, None, *(None if d == dim else d for d in labels[1:]))
    return Signature((labels,), (made,), contracts="all")


def entries(node: Node, operand: int) -> tuple[Label, ...]:
    """Label the entries of an operand. Its channels and spatial dimensions are needed at once."""
    rank = len(shape_of(node.args[operand]))
    return ("entry", *((operand, dim) for dim in range(1, rank)))


def untied(node: Node) -> tuple[None, ...]:
    """Label the dimensions of a convolution's weight."""
    return (None,) * len(shape_of(node.args[-5]))


def made(node: Node) -> tuple[Label, ...]:
    return ("entry", *(None,) * (len(shape_of(node)) - 1))


@rule("streambp::convolved", cost=CostClass.PRODUCT, linear="x * weight")
def convolved(node: Node) -> Signature:
    return Signature((entries(node, 0), untied(node)), (made(node),), contracts="all")


@rule("streambp::convolved_grad", cost=CostClass.PRODUCT, linear="grad * weight")
def convolved_grad(node: Node) -> Signature:
    operands = (entries(node, 0), entries(node, 1), untied(node))
    return Signature(operands, (made(node),), contracts="all")


@rule("streambp::convolved_weight_grad", cost=CostClass.PRODUCT, linear="grad * x")
def convolved_weight_grad(node: Node) -> Signature:
    operands = (entries(node, 0), entries(node, 1), untied(node))
    return Signature(operands, (untied(node),), contracts="all", sums=frozenset({"entry"}))

"""Values created without an operand; their readers decide which dimension carries tokens."""

from __future__ import annotations

from torch.fx import Node

from ..ir import Signature, refuse, shape_of, value_of
from ..kernels.operators import uniform_at
from . import rule
from .facets import CostClass, Form
from .mask_domain import creation

FREE = CostClass.FREE


def alone(node: Node, uniform: bool) -> Signature:
    return Signature((), (tuple(("made", i) for i in range(len(shape_of(node)))),), uniform=uniform)


@rule("aten::full", shape_arg=0, cost=FREE, filling="fill_value", form=Form.FULL, mask=creation.constant)
@rule("aten::zeros", shape_arg=0, cost=FREE, filling=0)
@rule("aten::ones", shape_arg=0, cost=FREE, filling=1)
@rule("aten::empty.memory_format", shape_arg=0, cost=FREE)
@rule("aten::empty_strided", shape_arg=0, cost=FREE, form=Form.CREATED)
def constant(node: Node) -> Signature:
    return alone(node, uniform=True)


@rule("aten::scalar_tensor", cost=FREE, filling="s", mask=creation.constant)
def scalar(node: Node) -> Signature:
    return alone(node, uniform=True)


@rule("aten::new_zeros", shape_arg=1, cost=FREE, filling=0, form=Form.CREATED)
@rule("aten::new_ones", shape_arg=1, cost=FREE, filling=1, form=Form.CREATED)
@rule("aten::new_full", shape_arg=1, cost=FREE, filling="fill_value", form=Form.CREATED)
@rule("aten::new_empty", "aten::new_empty_strided", shape_arg=1, cost=FREE, form=Form.CREATED)
def constant_like(node: Node) -> Signature:
    return Signature(
        ((None,) * len(shape_of(node.args[0])),), alone(node, True).outputs, contracts="all", uniform=True
    )


def emit_iota(body, node: Node):
    """Write the chunk's rows of a range, counted from the chunk's first token."""
    if not body.carries_tokens(node, 0):
        return body.copy(node)
    return body.iota(node, node.kwargs["start"], node.kwargs["step"])


@rule("prims::iota", emit=emit_iota, cost=FREE, form=Form.RANGE, mask=creation.ranged)
def iota(node: Node) -> Signature:
    return alone(node, uniform=False)


@rule("streambp::seed", cost=FREE, random=True)
def seed(node: Node) -> Signature:
    return alone(node, uniform=True)


def emit_uniform(body, node: Node):
    """Draw the chunk's random numbers, each by its place in the full value."""
    source, _, stream, dtype = node.args
    if not any(body.carries_tokens(node, d) for d in range(len(shape_of(node)))):
        return body.copy(node)
    return body.graph.call_function(
        uniform_at, (body.places(node, value_of(node).device), body.read_whole(source), stream, dtype)
    )


@rule("streambp::uniform", emit=emit_uniform, cost=CostClass.FUSED)
def uniform(node: Node) -> Signature:
    labels = alone(node, uniform=False).outputs
    return Signature(((),), labels)


@rule("aten::rand", shape_arg=0, cost=FREE, random=True, form=Form.RANDOM)
def rand(node: Node) -> Signature:
    raise refuse(
        node,
        "A chunk cannot draw the random numbers of this operation again",
        "Please report this model with the region's graph, as printed by streambp_compile.explain",
    )

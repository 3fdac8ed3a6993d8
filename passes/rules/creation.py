"""Values made from nothing. Which of their dimensions carries tokens, their readers say."""

from __future__ import annotations

from torch.fx import Node

from ..ir import Signature, shape_of, value_of
from ..kernels.operators import uniform_at
from . import rule
from .mask_domain import creation


def alone(node: Node, uniform: bool) -> Signature:
    return Signature((), (tuple(("made", i) for i in range(len(shape_of(node)))),), uniform=uniform)


@rule("aten::empty.memory_format", "aten::zeros", "aten::ones", shape_arg=0)
def constant(node: Node) -> Signature:
    return alone(node, uniform=True)


rule("aten::full", shape_arg=0, mask=creation.constant)(constant)


@rule("aten::scalar_tensor", mask=creation.constant)
def scalar(node: Node) -> Signature:
    return alone(node, uniform=True)


@rule("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty", shape_arg=1)
def constant_like(node: Node) -> Signature:
    return Signature(
        ((None,) * len(shape_of(node.args[0])),), alone(node, True).outputs, contracts="all", uniform=True
    )


def emit_iota(body, node: Node):
    """Row t of the whole range: count from the first token of the chunk."""
    if not body.carries_tokens(node, 0):
        return body.copy(node)
    return body.iota(node, node.kwargs["start"], node.kwargs["step"])


@rule("prims::iota", emit=emit_iota, mask=creation.ranged)
def iota(node: Node) -> Signature:
    return alone(node, uniform=False)


@rule("streambp::seed")
def seed(node: Node) -> Signature:
    return alone(node, uniform=True)


def emit_uniform(body, node: Node):
    """The place of every number of the chunk, counted as in the full value."""
    source, _, stream, dtype = node.args
    if not any(body.carries_tokens(node, d) for d in range(len(shape_of(node)))):
        return body.copy(node)
    return body.graph.call_function(
        uniform_at, (body.places(node, value_of(node).device), body.read_whole(source), stream, dtype)
    )


@rule("streambp::uniform", emit=emit_uniform)
def uniform(node: Node) -> Signature:
    labels = alone(node, uniform=False).outputs
    return Signature(((),), labels)

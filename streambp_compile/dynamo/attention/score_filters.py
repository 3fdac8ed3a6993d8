"""Filters of one place over attention scores, written as linear maps of their heads.

``nn.Conv2d(heads, heads, 1)`` over ``[B, H, Q, K]`` mixes heads as talking heads do (arXiv 2003.02436).
As a contraction of heads it is a product, which chunks can compute; a filter has no rule for two
dimensions of tokens. The rewrite is done in Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, is_equal
from ...passes.rules.forward import Part, part_of
from ..reading.aten import inserted
from ..reading.token_axes import Axis, axes_of, traced
from ..reading.values import fake_of


def write_score_filters(module: GraphModule) -> GraphModule:
    """Write filters of one place over matrices of tokens by tokens as contractions of their heads."""
    found = [n for n in module.graph.nodes if part_of(n) is Part.FILTER_OF_PLANES and maps_places(n)]
    fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
    while found:
        axes = axes_of(traced(module, fakes), fakes)
        known = [n for n in found if any(is_matrix(arguments(n)["input"], axis) for axis in axes)]
        if not known:
            break  # else follow the tokens again, now through the replaced filters
        for node in known:
            given = arguments(node)
            with module.graph.inserting_before(node):
                args = (given["input"], given["weight"], given.get("bias"), fake_of(node).dtype)
                node.replace_all_uses_with(inserted(node, map_of_heads, args))
            module.graph.erase_node(node)
        found = [n for n in found if n not in known]
    return module


def is_matrix(node: Node, axis: Axis) -> bool:
    return {2, 3} <= {m.dim for m in axis.marks.get(node, ())}


def maps_places(node: Node) -> bool:
    """Does a filter map the channels of each place by itself, over a square of places?"""
    given = arguments(node)
    weight, fake = fake_of(given["weight"]), fake_of(given["input"])
    alone = all(size == 1 for size in weight.shape[2:]) and given.get("groups", 1) == 1
    padding = given.get("padding", 0)
    unpadded = padding in ("valid", "same") or set(as_list(padding)) == {0}
    plain = unpadded and set(as_list(given.get("stride", 1))) == {1}
    return alone and plain and fake.dim() == 4 and is_equal(fake.shape[2], fake.shape[3])


def as_list(value: object) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def map_of_heads(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Apply a filter of ``[O, C, 1, 1]`` to ``[B, C, Q, K]``, as a contraction of channels."""
    made = torch.ops.streambp.contracted(x.to(dtype), weight.flatten(1).to(dtype), "bcqk,oc->boqk")
    return made if bias is None else made + bias.to(dtype)[:, None, None]


# The gradient


def keep_operands(ctx, inputs: tuple, output: torch.Tensor) -> None:
    left, right, ctx.equation = inputs
    ctx.save_for_backward(left, right)


def contracted_back(ctx, grad: torch.Tensor):
    """Compute the gradients of an equation in which no label occurs in one operand alone."""
    operands, _, made = ctx.equation.partition("->")
    (left, right), (first, second) = ctx.saved_tensors, operands.split(",")
    to_left = torch.ops.streambp.contracted(grad, right, f"{made},{second}->{first}")
    to_right = torch.ops.streambp.contracted(grad, left, f"{made},{first}->{second}")
    return to_left, to_right, None


torch.library.register_autograd("streambp::contracted", contracted_back, setup_context=keep_operands)

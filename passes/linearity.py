"""Is a backward linear in its incoming gradient? Autograd's own is; that of a custom function (a clipped or
quantised gradient) need not be.

Only of a linear one may the gradients be computed for a tangent of one and scaled when the real one is known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from .ir import arguments, is_tensor, is_view, is_zeros, op_name, value_of

aten = torch.ops.aten

ALONE = {  # linear in their first operand, and what else they read does not depend on the tangent
    "neg",
    "clone",
    "alias",
    "detach",
    "convert_element_type",
    "_to_copy",
    "sum",
    "mean",
    "div",
    "index",
    "_unsafe_index",
    "gather",
    "index_select",
    "select_backward",
    "slice_backward",
    "embedding_dense_backward",
    "flip",
    "rev",
    "roll",
    "cumsum",
    "repeat",
    "shifted",
    "squeeze",
    "view",
    "reshape",
    "_unsafe_view",
    "_reshape_copy",
    "tril",
    "triu",
    "split",
    "split_with_sizes",
    "to_extreme",
    "panels_mm",
    "unfold",
    "view_as_real",
    "view_as_complex",
}
ONE_OF = {"mul", "mm", "bmm", "grouped_mm", "grouped_outer"}  # linear in either factor, not in both
ALL_OF = {
    "add",
    "sub",
    "slice_scatter",
    "select_scatter",
    "scatter_add",
    "index_add",
    "index_put",
    "_unsafe_index_put",
    "copy",
}  # linear in all that they add up, each of which depends on the tangent or is zero


def is_linear(graph: Graph, tangent: Node, outputs: Iterable[object]) -> bool:
    """Is every output zero for a tangent of zero, and twice as large for twice the tangent, as far as its ops
    tell?"""
    linear, zero = {tangent}, set[Node]()

    def fits(x: object) -> bool:
        return x in linear or is_nothing(x)

    def is_nothing(x: object) -> bool:
        return x in zero if isinstance(x, Node) else isinstance(x, (int, float)) and x == 0

    for node in graph.nodes:
        if is_zero(node, zero):
            zero.add(node)
        if linear.isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        if (
            node.kwargs.get("rounding_mode")
            or is_tensor(node)
            and is_rounded(value_of(node))
            or not keeps(node, linear, fits, is_nothing)
        ):
            return False
        linear.add(node)
    return all(not isinstance(o, Node) or fits(o) for o in outputs)


def is_rounded(value: torch.Tensor) -> bool:
    """To whole numbers; or in float16, whose smallest numbers a loss is scaled to keep its gradients from."""
    return not (value.is_floating_point() or value.is_complex()) or value.dtype is torch.float16


def is_zero(node: Node, zero: set[Node]) -> bool:
    """A value of zeros, or a view of one."""
    if node.target is aten.scalar_tensor.default:
        return node.args[0] == 0
    made = is_zeros(node) or node.target in (aten.zeros.default, aten.zeros_like.default)
    return (
        made
        or bool(node.args)
        and node.args[0] in zero
        and (is_view(node) or op_name(node) in ("clone", "convert_element_type", "alias"))
    )


def keeps(node: Node, linear: set[Node], fits, is_nothing) -> bool:
    """Is a node linear in those of its operands that are?"""
    name, read = op_name(node), [a for a in node.all_input_nodes if a in linear]
    first = read == [node.args[0]]
    if node.target is operator.getitem or is_view(node) or name in ALONE or "_backward" in name:
        return first
    if name == "constant_pad_nd":
        return first and (len(node.args) < 3 or node.args[2] == 0)
    if name == "reverse_scan":
        return first and node.args[2] == "cumsum"
    if name in ONE_OF:
        factors = node.args[:2]
        return sum(f in linear for f in factors) == 1 and len(read) == 1
    if name == "where":
        return node.args[0] not in linear and all(map(fits, node.args[1:]))
    if name == "masked_fill":
        return first and is_nothing(node.args[2])
    if name == "scatter":
        given = arguments(node)
        return (
            given["index"] not in linear
            and fits(given["self"])
            and fits(given.get("src", given.get("value")))
        )
    if name in ("addmm", "baddbmm"):
        return fits(node.args[0]) and sum(f in linear for f in node.args[1:3]) == 1
    if name in ("cat", "stack"):
        return all(map(fits, node.args[0]))
    if name in ALL_OF:
        given = arguments(node)
        added = [
            given.get(key) for key in ("self", "input", "other", "src", "source", "values") if key in given
        ]
        index = given.get("index", given.get("indices"))
        read_by_index = [
            i for i in (index if isinstance(index, (list, tuple)) else [index]) if isinstance(i, Node)
        ]
        return all(map(fits, added)) and linear.isdisjoint(read_by_index)
    return False

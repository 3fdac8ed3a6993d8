"""Softmax and maxima over tokens, written with results that chunks can merge.

A softmax over tokens is the exponential of its input less the log-sum-exp. The gradient of a maximum
goes to the rows that attain it. The first of these is found by its place, because a row that is
recomputed may differ from the maximum in its last bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator

import torch
from torch.fx import Graph, Node

from ..ir import arguments, rank_of, shape_of, value_of
from ..rules import form_of
from ..rules.facets import Form
from ..token_propagation import TokenPropagation, slot_of
from .writing import Writing

aten = torch.ops.aten
SAME_VALUES = (Form.ALIAS, Form.COPY, Form.RESHAPE, Form.EXPAND, Form.UNSQUEEZE, Form.SQUEEZE)


def merge_over_tokens(graph: Graph, propagation: TokenPropagation) -> bool:
    """Rewrite softmaxes over tokens and the gradients of maxima over tokens. Returns whether there were
    any."""
    changed = False
    for node in [n for n in graph.nodes if form_of(n) in REWRITES]:
        dim = token_dim(node, propagation)
        new = None if dim is None else REWRITES[form_of(node)](Writing(graph, node), dim)
        if new is not None:
            node.replace_all_uses_with(new)
            changed = True
    graph.eliminate_dead_code()
    return changed


def dims_of(node: Node) -> tuple[int, ...]:
    """Return the dimensions that a node normalises, or reduces."""
    operand = next(a for a in node.args if isinstance(a, Node))
    given, rank = arguments(node), rank_of(operand)
    dims = given.get("dim")
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def token_dim(node: Node, propagation: TokenPropagation) -> int | None:
    """Find the dimension of rows among those that a node reduces. Returns None where there is none, or where
    rows meet keys."""
    operand = node.args[1] if form_of(node) is Form.TO_EXTREME else node.args[0]
    marks = propagation.of(operand)
    found = [d for d in dims_of(node) if d in marks]
    return found[0] if found and len(marks) == 1 and propagation.key(slot_of(operand)) is None else None


# Softmax


def sums_of_exponentials(write: Writing, dim: int) -> tuple[Node, Node]:
    x = write.wide(write.node.args[0])
    return x, write(aten.logsumexp.default, x, [dim], True)


def softmax(write: Writing, dim: int) -> Node:
    x, total = sums_of_exponentials(write, dim)
    shares = write(aten.exp.default, write(aten.sub.Tensor, x, total))
    return write.cast(shares, value_of(write.node).dtype)


def safe_softmax(write: Writing, dim: int) -> Node:
    """Write a softmax that is zero where everything is masked."""
    x, total = sums_of_exponentials(write, dim)
    shares = write(aten.exp.default, write(aten.sub.Tensor, x, total))
    empty = write(aten.eq.Scalar, total, -math.inf)
    return write.cast(
        write(aten.where.self, empty, write.number(0.0, shares), shares), value_of(write.node).dtype
    )


def log_softmax(write: Writing, dim: int) -> Node:
    return write.cast(write(aten.sub.Tensor, *sums_of_exponentials(write, dim)), value_of(write.node).dtype)


def softmax_backward(write: Writing, dim: int) -> Node:
    grad, shares = map(write.wide, write.node.args[:2])
    total = write(aten.sum.dim_IntList, write(aten.mul.Tensor, grad, shares), [dim], True)
    result = write(aten.mul.Tensor, write(aten.sub.Tensor, grad, total), shares)
    return write.cast(result, value_of(write.node).dtype)


def log_softmax_backward(write: Writing, dim: int) -> Node:
    grad, logs = map(write.wide, write.node.args[:2])
    total = write(aten.sum.dim_IntList, grad, [dim], True)
    part = write(aten.mul.Tensor, write(aten.exp.default, logs), total)
    return write.cast(write(aten.sub.Tensor, grad, part), value_of(write.node).dtype)


# Maxima


def to_extreme(write: Writing, dim: int) -> Node | None:
    """Write the gradient of a maximum that is known with its place: it goes to that place."""
    grad, x, _, largest = write.node.args
    form, place = Form.MAXIMUM if largest else Form.MINIMUM, write.places(x, dim)
    chosen = next((n for n in x.users if form_of(n) is form and dims_of(n) == (dim,)), None)
    if chosen is None or place is None:
        return None
    index = write(operator.getitem, chosen, 1)
    if rank_of(index) < rank_of(x):
        index = write(aten.unsqueeze.default, index, dim)
    return write(aten.where.self, write(aten.eq.Tensor, place, index), grad, write.number(0.0, grad))


def extreme(write: Writing, dim: int) -> Node | None:
    """Write a maximum together with its place, if all rows that attain it share its gradient."""
    node, x = write.node, write.node.args[0]
    shares, place = list(rows_that_attain(node)), write.places(x, dim)
    if not shares or place is None:
        return None
    largest = form_of(node) is Form.LARGEST
    others = [d for d in dims_of(node) if d != dim]
    narrow = write(aten.amax.default if largest else aten.amin.default, x, others, True) if others else x
    both = write(aten.max.dim if largest else aten.min.dim, narrow, dim, True)
    value, index = (write(operator.getitem, both, i) for i in (0, 1))
    first = write(aten.eq.Tensor, place, index)
    if others:
        first = write(aten.logical_and.default, first, write(aten.eq.Tensor, x, narrow))
    mask = write(aten.logical_or.default, write(aten.eq.Tensor, x, value), first)
    for share in shares:
        share.replace_all_uses_with(mask)
    kept = shape_of(node) == shape_of(value)
    return value if kept else write(aten.squeeze.dims, value, list(dims_of(node)))


def rows_that_attain(node: Node) -> Iterator[Node]:
    """Yield the comparisons of a maximum with the value that it was taken from."""
    source = behind(node.args[0], (Form.ALIAS,))
    stack: list[Node] = [node]
    while stack:
        for user in stack.pop().users:
            if form_of(user) in SAME_VALUES:
                stack.append(user)
            elif form_of(user) is Form.EQUAL and shape_of(user) == shape_of(source):
                if any(behind(a, (Form.ALIAS,)) is source for a in user.args):
                    yield user


def behind(node: Node, forms: Collection[Form | None]) -> Node:
    while form_of(node) in forms:
        node = node.args[0]
    return node


REWRITES: dict[Form | None, Callable[[Writing, int], Node | None]] = {
    Form.SOFTMAX: softmax,
    Form.SAFE_SOFTMAX: safe_softmax,
    Form.LOG_SOFTMAX: log_softmax,
    Form.SOFTMAX_BACKWARD: softmax_backward,
    Form.LOG_SOFTMAX_BACKWARD: log_softmax_backward,
    Form.TO_EXTREME: to_extreme,
    Form.LARGEST: extreme,
    Form.LEAST: extreme,
}

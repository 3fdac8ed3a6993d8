"""Attention of few queries to all tokens, written with results that chunks can merge.

Such queries are those of a pooling head, or a Perceiver's latents. The keys are rows of the sequence and
the queries are not. So the log-sum-exp is a reduction over tokens, the result is a sum, and each chunk
of keys has scores of its own: ``[latents, chunk]``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from ..ir import arguments, shape_of, value_of
from ..rules import form_of
from ..rules.facets import Form
from ..token_propagation import TokenPropagation
from .writing import Writing

aten, streambp = torch.ops.aten, torch.ops.streambp
KEYS = 2  # the dimension of keys in ``[batch, heads, keys, width]``


def attend_over_tokens(graph: Graph, propagation: TokenPropagation) -> bool:
    """Rewrite attention, and its gradients, where only the keys are tokens. Returns whether there was any."""
    changed = False
    for node in graph.nodes:
        write = REWRITES.get(form_of(node))
        if write is None or not has_tokens_as_keys(node, propagation):
            continue
        results = write(Writing(graph, node))
        for user in [u for u in node.users if u.target is operator.getitem]:
            user.replace_all_uses_with(results[user.args[1]])
            changed = True
    graph.eliminate_dead_code()
    return changed


def has_tokens_as_keys(node: Node, propagation: TokenPropagation) -> bool:
    """Are the keys of an attention tokens, but not its queries? It must not be causal, and a sequence must
    have as many queries at every length."""
    given = arguments(node)
    alone = KEYS in propagation.of(given["key"]) and not propagation.of(given["query"])
    return (
        alone and not given["causal"] and all(isinstance(s, int) for s in value_of(given["query"]).shape[1:])
    )


class Operands:
    """The operands of an attention in the dtype of its statistics, and the scores of both directions.

    Queries that share a key head have a dimension of their own.

    head  letters of the dimensions of query heads; the first is that of key heads
    """

    def __init__(self, write: Writing):
        self.write, self.given = write, arguments(write.node)
        self.shape = shape_of(self.given["query"])
        heads, key_heads = self.shape[1], shape_of(self.given["key"])[1]
        self.heads = (heads,) if heads == key_heads else (key_heads, heads // key_heads)
        self.head = "h" if heads == key_heads else "hg"

    def of_keys(self, name: str) -> Node:
        return self.write.wide(self.given[name])

    def of_queries(self, name: str) -> Node:
        """Return an operand of queries as ``[batch, *heads, queries, width]``."""
        wide = self.write.wide(self.given[name])
        return self.write(aten.view.default, wide, [-1, *self.heads, *shape_of(wide)[2:]])

    def product(self, left: Node, right: Node, equation: str) -> Node:
        """Write a contraction; ``H`` in its equation stands for all heads of queries."""
        return self.write(streambp.contracted.default, left, right, equation.replace("H", self.head))

    def scores(self) -> Node:
        write, mask = self.write, self.given["mask"]
        made = self.product(self.of_queries("query"), self.of_keys("key"), "bHqd,bhkd->bHqk")
        made = write(aten.mul.Tensor, made, self.given["scale"])
        if mask is None:
            return made
        if len(self.heads) > 1:
            mask = self.with_groups(mask)
        if value_of(mask).dtype.is_floating_point:
            return write(aten.add.Tensor, made, write.wide(mask))
        return write(aten.where.self, mask, made, write.number(-math.inf, made))

    def with_groups(self, mask: Node) -> Node:
        if shape_of(mask)[1] == 1:
            return self.write(aten.unsqueeze.default, mask, 2)
        batch, _, *rest = map(int, value_of(mask).shape)  # constants of the graph from here on
        return self.write(aten.view.default, mask, [batch, *self.heads, *rest])

    def shares(self, lse: Node) -> Node:
        """Compute the weights of the softmax; they are zero for a query that sees no key."""
        write = self.write
        shares = write(aten.exp.default, write(aten.sub.Tensor, self.scores(), lse))
        if self.given["mask"] is None:
            return shares
        empty = write(aten.eq.Scalar, lse, -math.inf)
        return write(aten.where.self, empty, write.number(0.0, shares), shares)

    def heads_last(self, made: Node) -> Node:
        """Lay ``[batch, queries, *heads, width]`` out as the kernel lays out its results."""
        width = shape_of(made)[-1]
        flat = self.write(aten.view.default, made, [-1, self.shape[2], self.shape[1], width])
        turned = self.write(aten.permute.default, flat, [0, 2, 1, 3])
        return self.write.cast(turned, value_of(self.given["query"]).dtype)

    def as_keys(self, left: Node, right: Node, equation: str, like: Node) -> Node:
        """Compute a gradient of keys or values, in the memory layout of those."""
        strides = value_of(like).stride()
        if strides[1] < strides[2]:
            made = self.product(left, right, equation.replace("->bhk", "->bkh"))
            made = self.write(aten.permute.default, made, [0, 2, 1, 3])
        else:
            made = self.product(left, right, equation)
        return self.write.cast(made, value_of(like).dtype)


def forward(write: Writing) -> tuple[Node, Node]:
    """Compute the output and the log-sum-exp."""
    operands = Operands(write)
    lse = write(aten.logsumexp.default, operands.scores(), [-1], True)
    out = operands.product(operands.shares(lse), operands.of_keys("value"), "bHqk,bhke->bqHe")
    return operands.heads_last(out), write(aten.view.default, lse, [-1, *operands.shape[1:3]])


def backward(write: Writing) -> tuple[Node, Node, Node]:
    """Compute the gradients of queries, keys and values."""
    operands, given = Operands(write), arguments(write.node)
    grad, query = operands.of_queries("grad"), operands.of_queries("query")
    lse = write(aten.unsqueeze.default, operands.of_queries("lse"), -1)
    shares = operands.shares(lse)
    total = write(aten.sum.dim_IntList, write(aten.mul.Tensor, grad, operands.of_queries("out")), [-1], True)
    inner = operands.product(grad, operands.of_keys("value"), "bHqe,bhke->bHqk")
    inner = write(aten.mul.Tensor, write(aten.sub.Tensor, inner, total), shares)
    inner = write(aten.mul.Tensor, inner, given["scale"])
    return (
        operands.heads_last(operands.product(inner, operands.of_keys("key"), "bHqk,bhkd->bqHd")),
        operands.as_keys(inner, query, "bHqk,bHqd->bhkd", given["key"]),
        operands.as_keys(shares, grad, "bHqk,bHqe->bhke", given["value"]),
    )


REWRITES: dict[Form | None, Callable[[Writing], tuple[Node, ...]]] = {
    Form.ATTENTION: forward,
    Form.ATTENTION_BACKWARD: backward,
}

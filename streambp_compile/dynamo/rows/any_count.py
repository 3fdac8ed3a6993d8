"""Graphs that hold for any number of rows.

A function is traced for three numbers of rows. Sizes that differ between the traces become expressions
of that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ... import internals
from ...passes.ir import bytes_of, is_tensor, is_view, value_of
from ...passes.rules import for_any_layout, functional
from ...passes.rules.forward import mutated

COUNTS = (3, 5, 8)  # numbers of rows that functions are traced for


class NotForAnyCount(Exception):
    """Raised where a function of rows cannot be written for an arbitrary number of them; the message says
    why."""


def check_differentiable(module: GraphModule) -> None:
    """Raise `NotForAnyCount` for an operator without a gradient, which autograd would treat as zero."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not internals.has_gradient(node.target):
            raise NotForAnyCount(f"{node.target} has no gradient")


def most_alive(nodes: Sequence[Node]) -> int:
    """Compute the peak memory of a list of nodes, in bytes. They run in this order, and a value is freed
    after its last reader. A view has the memory of its base; inputs are not counted."""
    source: dict[Node, Node] = {}  # node → the node that owns its memory
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        read = [source[a] for a in node.all_input_nodes if a in source]
        if node.op == "call_function" and is_tensor(node):
            source[node] = read[0] if is_view(node) and read else node
            read.append(source[node])
        last |= dict.fromkeys(read, i)
    ending: dict[int, int] = {}
    for node, i in last.items():
        ending[i] = ending.get(i, 0) + bytes_of(value_of(node))
    alive = most = 0
    for i, node in enumerate(nodes):
        alive += bytes_of(value_of(node)) if source.get(node) is node else 0
        most = max(most, alive)
        alive -= ending.get(i, 0)
    return most


def gradients_at(
    function: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    wanted: Sequence[int],
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Compute the gradients of a function's ``wanted`` operands, from the gradient of its result. They are
    zeros where the result does not depend on the operand."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(operands)]
        read = [given[i] for i in wanted]
        return list(torch.autograd.grad(function(*given), read, grad, materialize_grads=True))


def for_any_count(traces: Sequence[Graph]) -> GraphModule:
    """Merge traces for several numbers of rows into one graph, whose first input is that number. Raises
    `NotForAnyCount` where they differ in anything but sizes that grow linearly with it."""
    joining = Joining()
    for nodes in zip(*(t.nodes for t in traces), strict=True):
        if len({(n.op, n.target) for n in nodes}) != 1 or nodes[0].op == "get_attr":
            raise NotForAnyCount(f"{nodes[0]} is not the same for every number of rows")
        joining.add(nodes)
    return GraphModule({}, joining.graph)


class Joining:
    """Builder of the one graph that several traces are instances of, for operands of any layout."""

    def __init__(self) -> None:
        self.graph, self.values = Graph(), dict[Node, Node]()
        self.count = self.graph.placeholder("count")

    def add(self, nodes: Sequence[Node]) -> None:
        """Append the next node, given as it is in each trace."""
        node = nodes[0]
        if node.op == "output":
            self.graph.output(self.joined([n.args[0] for n in nodes]))
        elif node.op == "placeholder":
            self.values[node] = self.graph.placeholder(node.name)
        else:
            args, kwargs = self.joined([n.args for n in nodes]), self.joined([dict(n.kwargs) for n in nodes])
            target, into = for_any_layout(node.target), mutated(node)
            if into is not None:
                target = functional(target)
                if target is None or is_view(into) or any(map(is_view, into.users)):
                    raise NotForAnyCount(f"{node.target} writes into a value that others view")
            self.values[node] = self.graph.call_function(target, args, kwargs)
            if into is not None:
                self.values[into] = self.values[node]

    def joined(self, given: Sequence[Any]) -> Any:
        """Merge an argument, given as it is in each trace, into one argument of the new graph."""
        first = given[0]
        if isinstance(first, Node):
            return self.values[first]
        if isinstance(first, (list, tuple)):
            return type(first)(self.joined(items) for items in zip(*given, strict=True))
        if isinstance(first, dict):
            return {key: self.joined([g[key] for g in given]) for key in first}
        if all(g == first for g in given):
            return first
        if not all(isinstance(g, int) for g in given):
            raise NotForAnyCount(f"{given} differ with the number of rows")
        return self.size(given)

    def size(self, given: Sequence[int]) -> Node:
        factor, rest = divmod(given[1] - given[0], COUNTS[1] - COUNTS[0])
        start = given[0] - factor * COUNTS[0]
        if rest or any(g != start + factor * c for g, c in zip(given, COUNTS)):
            raise NotForAnyCount(f"sizes {given} do not grow with the number of rows")
        grown = self.graph.call_function(operator.mul, (self.count, factor))
        return self.graph.call_function(operator.add, (grown, start)) if start else grown

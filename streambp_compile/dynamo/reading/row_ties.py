"""Rows of a call's operands that a row of its result is made of, before autograd.

The table of rules answers. A call that has no row there (``linear``, ``layer_norm``) is traced by itself to
the operators that it becomes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import Mark, hint, is_equal
from ...passes.rules import find_rule
from ...passes.token_propagation import TokenPropagation
from .aten import REMEMBERED, Named
from .values import fake_of

TIES: dict[tuple, dict[int, int]] = {}  # a call in text, and a dimension → operand → its dimension


def operand_dims(node: Node, dim: int) -> dict[Node, int]:
    """Map operands to the dimension whose row i becomes row i of a dimension of the node. Operands without
    such rows are left out. The result is empty if a row is made of others, or by its place."""
    fake = fake_of(node)
    if node.op != "call_function" or not isinstance(fake, (torch.Tensor, tuple, list)):
        return {}
    if node.target is operator.getitem:  # one of the results of a call
        return {node.args[0]: dim} if isinstance(fake_of(node.args[0]), (tuple, list)) else {}
    operands = node.all_input_nodes
    key = (*text_of(node, operands), dim)
    if key not in TIES:
        if len(TIES) >= REMEMBERED:
            TIES.clear()
        TIES[key] = ties(node, operands, dim)
    found = {operands[i]: at for i, at in TIES[key].items()}
    if not found:  # also where a result does not have this dimension
        return {}
    size = (fake if isinstance(fake, torch.Tensor) else fake[0]).shape[dim]
    return found if all(is_equal(fake_of(a).shape[at], size) for a, at in found.items()) else {}


def operand_dim(node: Node, operand: Node, dim: int) -> int | None:
    """Find an operand's dimension whose row i becomes row i of the node's dimension; None if there is
    none."""
    return operand_dims(node, dim).get(operand)


def text_of(node: Node, operands: Sequence[Node]) -> tuple[object, str]:
    """Describe all that the ties of a call depend on. Sizes are those for which the graph was traced."""

    def described(operand: Node) -> Named:
        fake = fake_of(operand)
        if isinstance(fake, torch.Tensor):
            return Named(f"%{operands.index(operand)} {fake.dtype} {[hint(s) for s in fake.shape]}")
        return Named(hint(fake) if isinstance(fake, torch.SymInt) else f"%{operands.index(operand)} {fake}")

    return node.target, str(map_arg((node.args, node.kwargs), described))


def ties(node: Node, operands: Sequence[Node], dim: int) -> dict[int, int]:
    """Find the ties of a call: the places of operands, each with the dimension of rows."""
    given, results = propagated(node, {}, Mark(dim))
    if any(marks != {dim: Mark(dim)} for marks in results):
        return {}
    plain = all(len(marks) == 1 and mark.is_plain for marks in given.values() for mark in marks.values())
    return {operands.index(a): at for a, marks in given.items() for at in marks} if plain else {}


def row_mark(node: Node, known: Mapping[Node, Mark]) -> Mark | None:
    """Find where a call's result has the rows that it computes one by one from the given rows of operands.
    None if it does more than that, or if its other operands have rows as well."""
    given, results = propagated(node, known)
    alike = all(marks == ({known[a].dim: known[a]} if a in known else {}) for a, marks in given.items())
    found = [mark for marks in results for mark in marks.values()]
    return found[0] if alike and len(found) == 1 else None


Rows = dict[int, Mark]  # dimension of a value → the rows that it carries


def propagated(
    node: Node, known: Mapping[Node, Mark], result: Mark | None = None
) -> tuple[dict[Node, Rows], list[Rows]]:
    """Propagate rows through a call, from operands or from its first result. Returns those of its operands
    and of its results: none if the call does not treat each row by itself."""
    operands = node.all_input_nodes
    for written in (alone, in_operators):
        graph = written(node, operands)
        if graph is None:
            continue
        given, results = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
        seeds = {place: (known[a],) for a, place in zip(operands, given) if a in known}
        propagation = TokenPropagation(graph, seeds if result is None else {results[0]: (result,)})
        met = propagation.met()
        if any(n in propagation.missing for n in met):
            continue
        if any(propagation.loses(n) or not propagation.maps_rows(n) for n in met):
            break
        return dict(zip(operands, map(propagation.of, given))), [propagation.of(n) for n in results]
    return {}, []


def alone(node: Node, operands: Sequence[Node]) -> Graph | None:
    """Copy a call to a graph of its own. None if it has no row in the table."""
    if find_rule(node) is None:
        return None
    graph = Graph()
    given = {a: graph.placeholder(f"in_{i}") for i, a in enumerate(operands)}
    made = graph.node_copy(node, given.__getitem__)
    for old, new in (*given.items(), (node, made)):
        new.meta["val"] = fake_of(old)
    results = [made]
    if isinstance(fake_of(node), (tuple, list)):
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(len(fake_of(node)))]
        for result, fake in zip(results, fake_of(node)):
            result.meta["val"] = fake
    graph.output(tuple(results))
    return graph


def in_operators(node: Node, operands: Sequence[Node]) -> Graph | None:
    """Trace a call to the operators that it becomes. None if that fails, or if it has results that are no
    tensors."""

    def call(*values: object) -> list[object]:
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(operands, values)).__getitem__)
        made = node.target(*args, **kwargs)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    try:
        graph = internals.capture(call, [fake_of(a) for a in operands]).graph
    except Exception:
        internals.log.debug("%s is followed no further", node, exc_info=True)
        return None
    return graph if all(isinstance(r, Node) for r in graph.output_node().args[0]) else None

"""Values computed before all regions: views of inputs, and updates of weights."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ...passes.ir import differs_by_a_number, is_view
from ...passes.rules.forward import mutated, slice_of
from ..reading.modes import is_gradient_switch
from ..reading.token_axes import Axis
from ..reading.values import fake_of, is_parameter, storage_of, wants_gradient
from .written_inputs import same_layout


def early_views(graph: Graph, axis: Axis | None) -> tuple[Node, ...]:
    """List the views of inputs that are taken before the regions. There are three kinds.

    ``weight[3]``, where one tensor has the weights of all layers: regions then differ only in the weight
    that they read. ``table[:, :tokens]`` of a table that is as long as the longest sequence, or
    ``ids[:, -tokens:]`` of a sequence that has a symbol of its own for its length, where the number of
    tokens is a symbol: only this part has a row for each token. ``table[:tokens, :tokens]`` of
    a weight for each pair of positions: only this part of its gradient has a row and a column for each
    token.

    Views that are written into, or that the model takes without gradients, stay where they are. Sizes that
    the views are cut by come before them.
    """
    found: dict[Node, None] = {}
    detached, with_gradients = set[Node](), True
    for node in graph.nodes:
        if is_gradient_switch(node):
            with_gradients = bool(node.args[0])
        detached |= set() if with_gradients else {node}
        if is_item_of_weight(node) or is_part_of_table(node, axis) or is_part_of_pairs(node, axis):
            steps = steps_from_input(node)
            seen = {*steps, *(a for s in steps for a in s.all_input_nodes)}
            if detached.isdisjoint(steps) and not any(
                mutated(user) in seen for s in seen for user in s.users
            ):
                sizes = (size for step in steps for size in steps_of_sizes(step) or ())
                found.update(dict.fromkeys((*sizes, *steps)))
    return tuple(found)


def steps_from_input(node: Node) -> list[Node]:
    """List the views that lead from an input to this one, inclusive. The list is empty if another operation
    is on the way."""
    steps: list[Node] = []
    while node.op == "call_function" and is_view(node):
        steps.insert(0, node)
        if steps_of_sizes(node) is None:
            return []
        node = node.args[0]
    return steps if node.op == "placeholder" else []


def steps_of_sizes(node: Node) -> list[Node] | None:
    """List the nodes that compute the sizes that a view reads beside its source, in order. None if anything
    but sizes of inputs is read."""
    steps: dict[Node, None] = {}
    stack = node.all_input_nodes[1:]
    while stack:
        size = stack.pop()
        if size.op != "placeholder":
            if size.op != "call_function" or not isinstance(fake_of(size), int | torch.SymInt):
                return None
            steps.pop(size, None)  # what another size is computed from comes before it
            steps[size] = None
            stack += size.all_input_nodes
    return list(steps)[::-1]


def is_item_of_weight(node: Node) -> bool:
    weight = node.args[0] if node.args else None
    if not isinstance(weight, Node) or weight.op != "placeholder" or not is_parameter(fake_of(weight)):
        return False
    part = slice_of(node, fake_of(weight).dim()) if isinstance(fake_of(node), torch.Tensor) else None
    fits = part is not None and part.lost and part.dim == 0 and isinstance(part.start, int)
    return fits and fake_of(weight).requires_grad == fake_of(node).requires_grad


def is_part_of_table(node: Node, axis: Axis | None) -> bool:
    """Does a node slice tokens from a value whose number of rows changes otherwise than theirs, or never?"""
    table, marks = node.args[0] if node.args else None, axis.marks.get(node, ()) if axis else ()
    if len(marks) != 1 or not isinstance(table, Node) or not isinstance(fake_of(table), torch.Tensor):
        return False
    part = slice_of(node, fake_of(table).dim())
    if part is None or part.lost or part.dim != marks[0].dim:
        return False
    rows, tokens = (fake_of(n).shape[part.dim] for n in (table, node))
    return not differs_by_a_number(rows, tokens)


def is_part_of_pairs(node: Node, axis: Axis | None) -> bool:
    """Does a node slice the rows or the columns of tokens from a weight for each pair of positions?"""
    table, marks = node.args[0] if node.args else None, axis.marks.get(node, ()) if axis else ()
    if len(marks) != 2 or not isinstance(table, Node) or not wants_gradient(table):
        return False
    part = slice_of(node, fake_of(table).dim())
    if part is None or part.lost or part.dim not in {mark.dim for mark in marks}:
        return False
    steps = steps_from_input(node)
    return bool(steps) and is_parameter(fake_of(steps[0].args[0])) and all(map(wants_gradient, steps))


def weight_updates(graph: Graph) -> tuple[Node, ...]:
    """List writes into weights before anything reads these (``weight.data.clamp_(-1, 1)``), with the aliases
    they write through. They run once, before all regions, so that a recomputation in a region reads the
    same values as the first time."""
    found: list[Node] = []
    read: set[int | None] = set()
    for node in graph.nodes:
        target = mutated(node)
        alias = target is not None and is_alias_alone(target, node)
        weight = target.args[0] if target is not None and alias else target
        if (
            weight is not None
            and weight.op == "placeholder"
            and is_parameter(fake_of(weight))
            and not node.users
            and (places := places_of_inputs(node, target)) is not None
            and storage_of(weight) not in read
        ):
            found += [*places, target, node] if alias else [*places, node]
        elif not any(is_alias_alone(node, user) for user in node.users):
            read |= {storage_of(a) for a in node.all_input_nodes}
    return tuple(dict.fromkeys(found))


def places_of_inputs(node: Node, target: Node) -> list[Node] | None:
    """List the nodes that compute a write's operands, if these are whole numbers computed from inputs
    alone. An example is ``max_norm`` of an embedding, which reads the ids. None where the write reads
    anything else."""
    found: set[Node] = set()
    stack = [n for n in node.all_input_nodes if n is not target]
    while stack:
        each = stack.pop()
        value = fake_of(each)
        real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        if each.op == "placeholder" or each in found:
            continue
        if real or each.op != "call_function" or mutated(each) is not None:
            return None
        found.add(each)
        stack += each.all_input_nodes
    return sorted(found)


def is_alias_alone(node: Node, writer: Node) -> bool:
    """Is a value an alias of another, without its gradient, made for one writer alone (``weight.data``)?"""
    source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    if source is None or list(node.users) != [writer] or mutated(writer) is not node or node.kwargs:
        return False
    same = storage_of(node) is not None and storage_of(node) == storage_of(source)
    return same and not wants_gradient(node) and same_layout(fake_of(node), fake_of(source))

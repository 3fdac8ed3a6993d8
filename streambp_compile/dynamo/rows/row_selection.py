"""Rows that are read by index, moved in front of the head that computes them. The rewrite is done in the
Dynamo graph, before autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import arguments, differs_by_a_number, is_equal
from ...passes.rules.forward import Part, mutated, part_of, slice_of, steps_over_rows
from ..reading.aten import inserted
from ..reading.modes import is_switch
from ..reading.row_ties import operand_dims
from ..reading.values import fake_of


def select_rows_first(module: GraphModule) -> GraphModule:
    """Write ``head(x)[i]`` as ``head(x[i])``: read the rows of the hidden states instead of the head's
    results. The unread rows are then never computed, and the others have tokens of their own along which
    they stream."""
    for node in list(module.graph.nodes):
        chain = way_to_head(node) if picks_rows(node) else []
        if (
            not chain
            or fake_of(chain[-1]).numel() > fake_of(chain[0]).numel()
            or not may_move(chain[0], node)
        ):
            continue
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(selected_first(chain))
        for old in reversed(chain):
            module.graph.erase_node(old)
    return module


def selected_first(chain: Sequence[Node]) -> Node:
    """Insert the same value with its rows read first. The rows are read from the hidden states; then come
    the head and the operations on each row."""
    head, *between, picked = chain
    x, moves = head.args[0], [n for n in between if moves_rows(n)]
    for step in moves:
        merges = part_of(step) is Part.MERGE
        x = (
            inserted(step, torch.flatten, (x, 0, -2))
            if merges
            else inserted(step, step.target, (x, *step.args[1:]), step.kwargs)
        )
    value = inserted(picked, picked.target, (x, *picked.args[1:]), picked.kwargs)
    for step in (head, *(n for n in between if n not in moves)):
        args, kwargs = torch.fx.node.map_arg(
            (step.args, step.kwargs), lambda a: value if a in (*chain, head.args[0]) else a
        )
        value = inserted(step, step.target, args, kwargs)
    return value


def may_move(node: Node, to: Node) -> bool:
    """Is the graph between two nodes free of switches of modes, and of writes into values?"""
    while node is not to:
        if is_switch(node) or mutated(node) is not None:
            return False
        node = node.next
    return True


def picks_rows(node: Node) -> bool:
    """Does a node select rows, and leave the last dimension as it is? It may be ``x[i]``, ``x[i, j]`` of
    whole numbers, ``index_select``, ``x[::2]``, or a slice that drops more than a constant number of
    rows (``x[-30:]``)."""
    source = node.args[0] if node.args else None
    rank = own.dim() if isinstance(source, Node) and isinstance(own := fake_of(source), torch.Tensor) else 0
    if not rank or not isinstance(fake_of(node), torch.Tensor):
        return False
    part = slice_of(node, rank)
    if part is not None:
        return part.dim < rank - 1 and not part.lost and changes_by_more_than_a_number(node, part.dim)
    if steps_over_rows(node):
        return arguments(node)["dim"] % rank < rank - 1
    if part_of(node) is not Part.INDEX:
        return False
    given = arguments(node)
    if "dim" in given:
        return isinstance(given["dim"], int) and given["dim"] % rank < rank - 1
    chosen = [i for i in given["indices"] if i is not None]
    numbers = all(fake_of(i).dtype in (torch.int64, torch.int32) for i in chosen)
    return numbers and len(given["indices"]) < rank


def changes_by_more_than_a_number(node: Node, dim: int) -> bool:
    before, after = (fake_of(n).shape[dim] for n in (node.args[0], node))
    return not internals.is_unbacked(fake_of(node)) and not differs_by_a_number(before, after)


def way_to_head(node: Node) -> list[Node]:
    """List the nodes from the product that widens rows to the values that are read by index. Each has one
    reader, and maps the rows of the node before it. The list is empty if there is no such product."""
    way = [node]
    while True:
        before = way[0].args[0] if way[0] is node or moves_rows(way[0]) else row_by_row(way[0])
        if (
            not isinstance(before, Node)
            or len(before.users) > 1
            or not isinstance(fake_of(before), torch.Tensor)
        ):
            return []
        way.insert(0, before)
        if part_of(before) is Part.HEAD and len(before.args) > 1:
            x, weight = before.args[:2]
            is_head = isinstance(x, Node) and isinstance(weight, Node) and fake_of(weight).dim() == 2
            return way if is_head and fake_of(x).shape[-1] < fake_of(before).shape[-1] else []


def moves_rows(node: Node) -> bool:
    """Does a node merge all dimensions of rows, or slice them, and leave the last dimension as it is?"""
    fake, x = fake_of(node), fake_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(x, torch.Tensor) or not is_equal(fake.shape[-1], x.shape[-1]):
        return False
    if part_of(node) is Part.MERGE:
        return fake.dim() == 2
    part = slice_of(node, x.dim())
    return part is not None and part.dim < x.dim() - 1


def row_by_row(node: Node) -> Node | None:
    """Find the one operand of which a node maps each row by itself. None if another operand has more than one
    dimension."""
    found = [operand_dims(node, dim) for dim in range(fake_of(node).dim() - 1)]
    source = next(iter(found[0]), None) if found else None
    others = [fake_of(a) for a in node.all_input_nodes if a is not source]
    alike = all(dims == {source: dim} for dim, dims in enumerate(found))
    small = all(not isinstance(fake, torch.Tensor) or fake.dim() < 2 for fake in others)
    return source if source is not None and alike and small else None

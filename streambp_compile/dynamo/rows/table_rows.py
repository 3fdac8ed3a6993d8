"""Rows of a stored table, taken before its dimensions are arranged.

``mask[None, None, -rows:, -columns:]`` adds dimensions first and then takes the rows. The value in between
is as long as the table, which may be longer than the text. Written as
``mask[-rows:, -columns:][None, None]``, the rows are taken from the table itself. The rewrite is done in
Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import viewed
from ...passes.rules.forward import Part, part_of, slice_of, with_arguments
from ..reading.aten import erase_unread, inserted
from ..reading.row_ties import operand_dim
from ..reading.values import fake_of, is_changed

ARRANGING = (Part.RESHAPE, Part.MOVE)


def take_table_rows_first(module: GraphModule) -> GraphModule:
    """Move slices of inputs in front of the steps that only arrange their dimensions."""
    moved = []
    for node in list(module.graph.nodes):
        steps, dim = arranged_before(node)
        if not steps:
            continue
        with module.graph.inserting_before(node):
            value = inserted(node, node.target, *with_arguments(node, self=steps[0].args[0], dim=dim))
            for step in steps:
                value = inserted(step, step.target, (value, *step.args[1:]), step.kwargs)
        node.replace_all_uses_with(value)
        moved.append(node)
    erase_unread(module.graph, moved)
    return module


def arranged_before(node: Node) -> tuple[list[Node], int]:
    """List the steps between an input and a slice of it, in order. Also returns the dimension that is
    sliced in the first step's operand. The list is empty if there are no steps, or if anything writes
    into the input."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or viewed(source).op != "placeholder" or is_changed(source):
        return [], 0
    part = slice_of(node, fake_of(source).dim()) if isinstance(fake_of(source), torch.Tensor) else None
    if part is None or part.lost:
        return [], 0
    steps, dim = list[Node](), part.dim
    while part_of(source) in ARRANGING:
        at = operand_dim(source, source.args[0], dim)
        if at is None:
            break
        steps.insert(0, source)
        source, dim = source.args[0], at
    return steps, dim

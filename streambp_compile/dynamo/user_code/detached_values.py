"""Values computed without gradients (``with torch.no_grad():``), made independent of where they run.

Rewrites compute values where they are read, which may be outside of such a block. They may also read the
operands of a value in it instead of the value. So every operator in a block reads its operands without
their gradients. Then no gradient flows through it, whatever mode it runs in.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import is_view
from ...passes.rules.forward import is_detached, mutated
from ..reading.aten import inserted
from ..reading.modes import gradient_modes, is_gradient_switch, is_switch
from ..reading.values import fake_of, is_parameter, wants_gradient


def detach_operands(module: GraphModule) -> GraphModule:
    """Detach the operands of operators that run without gradients."""
    detached: dict[Node, Node] = {}
    for node, recorded in gradient_modes(module.graph).items():
        if is_gradient_switch(node):
            detached.clear()  # each block detaches values for itself
        elif not recorded and computes(node):
            operands = list(filter(wants_gradient, node.all_input_nodes))
            if is_view(node) and operands and is_parameter(fake_of(operands[0])):
                detach_result(node)  # a part of a weight is recognised by its base
                continue
            for operand in operands:
                # a weight is detached for each reader, so that none crosses regions
                if operand not in detached or is_parameter(fake_of(operand)):
                    detached[operand] = without_gradient(operand, node)
                node.replace_input_with(operand, detached[operand])
    return module


def computes(node: Node) -> bool:
    """Does a node compute new numbers, which could have gradients? A write does not: it changes a value of
    another node, and has no gradient there."""
    if node.op not in ("call_function", "call_method", "call_module") or is_switch(node):
        return False
    if node.target in (operator.getitem, getattr) or is_detached(node) or mutated(node) is not None:
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    values = fake_of(node)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def without_gradient(value: Node, reader: Node) -> Node:
    """Detach a value in front of a reader. A detached weight still counts as a parameter."""
    with reader.graph.inserting_before(reader):
        like = reader if isinstance(fake_of(reader), torch.Tensor) else value
        node = inserted(like, torch.ops.aten.detach.default, (value,))
    if is_parameter(fake_of(value)):
        fake_of(node)._is_param = True
    return node


def detach_result(node: Node) -> None:
    with node.graph.inserting_after(node):
        detached = inserted(node, torch.ops.aten.detach.default, (node,))
    node.replace_all_uses_with(detached, lambda user: user is not detached)

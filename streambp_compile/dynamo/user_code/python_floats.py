"""Python floats that change from step to step (a temperature, a coefficient), as tensors of one number.

Dynamo passes such a float as a tensor and reads it by ``item()``. Graphs of tensors cannot use the
symbolic number that this gives, so every reader gets the tensor itself. Where a reader takes numbers
only (an ``alpha=``, a dropout rate), the float becomes a constant, and Dynamo compiles again when it
changes.

With ``capture_scalar_outputs``, numbers that the graph itself computes (``loss.item()``) are read in the
same way. They have no gradient, and cannot be constants.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ..reading.aten import inserted
from ..reading.values import fake_of


def floats_as_tensors(module: GraphModule) -> list[torch.SymFloat]:
    """Give the readers of symbolic floats tensors instead. Returns the floats that must become constants,
    because a reader takes numbers only."""
    tensors: dict[Node, Node] = {}
    constants: set[Node] = set()
    for node in list(module.graph.nodes):
        if node.op == "call_method" and node.target == "item" and is_symbolic_float(node):
            tensors[node] = number = detached_number(node)
            number.meta["example_value"] = without_number(fake_of(number))
        elif not tensors.keys().isdisjoint(node.all_input_nodes):
            with module.graph.inserting_before(node):
                new = None if node.op == "output" else read_tensors(node, tensors)
            if new is None:
                constants.update(node.all_input_nodes)
            elif is_symbolic_float(node):
                tensors[node] = new
            else:
                node.replace_all_uses_with(new)
    if constants:  # Dynamo traces the graph again
        return [fake_of(n) for n in constants if n in tensors]
    for node in reversed(list(module.graph.nodes)):
        if not node.users and (node in tensors or not tensors.keys().isdisjoint(node.all_input_nodes)):
            module.graph.erase_node(node)
    return []


def reads_number(node: Node) -> bool:
    """Is it an ``item()`` of a number that the graph computes?"""
    return node.op == "call_method" and node.target == "item" and internals.is_unbacked(fake_of(node))


def is_symbolic_float(node: Node) -> bool:
    return isinstance(fake_of(node), torch.SymFloat)


def detached_number(item: Node) -> Node:
    """Return the tensor that a number is read from. It is detached if it has a gradient, because numbers
    have none."""
    tensor = item.args[0]
    if not fake_of(tensor).requires_grad:
        return tensor
    with item.graph.inserting_before(item):
        return inserted(tensor, "detach", (tensor,), as_written=True)


def without_number(fake: torch.Tensor) -> torch.Tensor:
    """Copy a fake tensor without its symbolic number. An operation that asks for the number takes no
    tensors, and fails on the copy."""
    with fake.fake_mode:
        return torch.empty_like(fake)


def read_tensors(node: Node, tensors: dict[Node, Node]) -> Node | None:
    """Insert the same operation with tensors for symbolic floats. None if it takes none, or if they change
    its result's shape or dtype."""
    expected = fake_of(node)
    if not isinstance(expected, torch.Tensor | torch.SymFloat):
        return None
    like, target = node, OF_NUMBERS.get(node.target, node.target)
    if is_symbolic_float(node):
        like = next(tensors[a] for a in node.all_input_nodes if a in tensors)
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: tensors.get(a, a))
    try:
        with internals.reading_no_numbers(fake_of(like)):
            new = inserted(like, target, args, kwargs, as_written=True)
        if isinstance(expected, torch.Tensor) and fake_of(new).dtype != expected.dtype:
            node.graph.erase_node(new)
            dtype = torch.promote_types(expected.dtype, torch.float32)  # as torch computes with numbers
            cast = {
                t: inserted(t, "to", (t, dtype), as_written=True)
                for t in dict.fromkeys(tensors[a] for a in node.all_input_nodes if a in tensors)
            }
            args, kwargs = map_arg((args, kwargs), lambda a: cast.get(a, a))
            new = inserted(like, target, args, kwargs, as_written=True)
    except Exception:  # any error of an operation that wants a number and gets a tensor
        return None
    found = fake_of(new)
    same = isinstance(found, torch.Tensor) and (
        is_symbolic_float(node) or (found.shape, found.dtype) == (expected.shape, expected.dtype)
    )
    return new if same else None


def largest(*numbers) -> torch.Tensor:
    return torch.stack([torch.as_tensor(n, dtype=torch.float64) for n in numbers]).amax()


def smallest(*numbers) -> torch.Tensor:
    return torch.stack([torch.as_tensor(n, dtype=torch.float64) for n in numbers]).amin()


def tensor_of_number(
    number: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    return number.to(device, dtype or torch.get_default_dtype(), copy=True)


# Functions of symbolic numbers that take no tensors → the same functions for tensors.
OF_NUMBERS = {
    torch.sym_max: largest,
    torch.sym_min: smallest,
    torch.sym_float: torch.clone,
    torch.scalar_tensor: tensor_of_number,
    **internals.symbolic_functions(),
}

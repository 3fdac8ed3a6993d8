"""Python floats that change from step to step (a temperature, a coefficient) as tensors of one number.

Dynamo hands such a float over as a tensor and reads it by ``item()``. The symbolic number that this gives
is of no use to graphs of tensors, so every reader is given the tensor itself. Where a reader takes numbers
only (an ``alpha=``, a dropout rate), the float becomes a constant, and Dynamo compiles again when it changes.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .. import internals
from .aten import inserted
from .token_axes import fake_of


def floats_as_tensors(module: GraphModule) -> list[torch.SymFloat]:
    """Give the readers of symbolic floats tensors in their place; returns what must be constants instead,
    because a reader takes numbers only."""
    tensors: dict[Node, Node] = {}
    constants: set[Node] = set()
    for node in list(module.graph.nodes):
        if node.op == "call_method" and node.target == "item" and is_symbolic_float(node):
            tensors[node] = number = node.args[0]
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
    if constants:
        return [fake_of(n) for n in constants if n in tensors]
    for node in reversed(list(module.graph.nodes)):
        if not node.users and (node in tensors or not tensors.keys().isdisjoint(node.all_input_nodes)):
            module.graph.erase_node(node)
    return []


def is_symbolic_float(node: Node) -> bool:
    return isinstance(fake_of(node), torch.SymFloat)


def without_number(fake: torch.Tensor) -> torch.Tensor:
    """The same fake, which does not know its symbolic number: what asks it for one takes no tensor."""
    with fake.fake_mode:
        return torch.empty_like(fake)


def read_tensors(node: Node, tensors: dict[Node, Node]) -> Node | None:
    """The same operation with tensors for symbolic floats; None if it takes none, or if they change its
    result's shape or dtype."""
    expected = fake_of(node)
    if not isinstance(expected, torch.Tensor | torch.SymFloat):
        return None
    like, target = node, node.target
    if is_symbolic_float(node):
        like = next(tensors[a] for a in node.all_input_nodes if a in tensors)
        target = OF_NUMBERS.get(target, target)
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: tensors.get(a, a))
    try:
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
    except Exception:  # whatever an operation says to a tensor where it wants a number
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


# Functions of symbolic numbers that take no tensors, and what they are for tensors.
OF_NUMBERS = {
    torch.sym_max: largest,
    torch.sym_min: smallest,
    torch.sym_float: torch.clone,
    **internals.symbolic_functions(),
}

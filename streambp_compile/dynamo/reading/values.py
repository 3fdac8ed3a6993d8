"""Properties of a node's value that are known before autograd sees the graph."""

from __future__ import annotations

import torch
from torch.fx import Node

from ... import internals
from ...passes.ir import arguments, is_view

CHANGED = "changed"  # in the meta of a node: is its memory written into after it was made?
AUTOCAST = "autocast"  # in the meta of a node: the arguments of each autocast that it runs under


def fake_of(node: Node):
    return node.meta.get("example_value", node.meta.get("val"))


def own_of(node: Node):
    """Return what this process holds of a node's value: of a DTensor, its part."""
    return internals.local_of(fake_of(node))


def storage_of(node: Node) -> int | None:
    """Identify the memory of a node's value: equal numbers mean the same memory."""
    fake = own_of(node)
    try:
        return fake.untyped_storage()._cdata if isinstance(fake, torch.Tensor) else None
    except NotImplementedError:  # the value is inside a `torch.func` transform
        return None


def is_changed(node: Node) -> bool:
    """May a value have changed by the time that it is read? It may if its memory, or that of a value it is
    a view of, is written into after it was made. Its readers must then stay where they are."""
    while not node.meta.get(CHANGED):
        if not is_view(node) or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def joined_values(node: Node) -> list[Node]:
    """List the values that ``cat`` joins. Empty ones of one dimension are left out, as torch does."""
    return [v for v in arguments(node)["tensors"] if fake_of(v).dim() == fake_of(node).dim()]


def autocast_of(node: Node) -> tuple:
    """Return the arguments of each autocast that a node runs under, the outermost first."""
    return node.meta.get(AUTOCAST, ())


def is_parameter(fake: object) -> bool:
    """Is a value a weight, declared or not? Hidden states may be leaves that want gradients too, but they
    come as ``[B, T, d]``."""
    return (
        isinstance(fake, torch.nn.Parameter)
        or getattr(fake, "_is_param", False)
        or (
            isinstance(fake, torch.Tensor)
            and fake.is_leaf
            and fake.requires_grad
            and fake.dtype.is_floating_point
            and fake.dim() != 3
        )
    )


def wants_gradient(node: Node) -> bool:
    return isinstance(fake_of(node), torch.Tensor) and fake_of(node).requires_grad

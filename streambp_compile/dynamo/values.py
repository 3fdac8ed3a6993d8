"""What is known of the value of a node before autograd sees the graph."""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import internals
from ..passes.ir import arguments, is_view

CHANGED = "changed"  # in the meta of a node: is its memory written into after it was made?
AUTOCAST = "autocast"  # in the meta of a node: the arguments of each autocast that it runs under


def fake_of(node: Node):
    return node.meta.get("example_value", node.meta.get("val"))


def own_of(node: Node):
    """What this process holds of the value of a node: of a DTensor, its part."""
    return internals.local_of(fake_of(node))


def storage_of(node: Node) -> int | None:
    """Whose memory the value of a node is; equal numbers, the same memory."""
    fake = own_of(node)
    try:
        return fake.untyped_storage()._cdata if isinstance(fake, torch.Tensor) else None
    except NotImplementedError:  # of a value inside a `torch.func` transform
        return None


def is_changed(node: Node) -> bool:
    """May a value be another one by the time that it is read: is its memory, or that of what it is a view of,
    written into after it was made? What reads it must then stay where it is."""
    while not node.meta.get(CHANGED):
        if not is_view(node) or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def joined_values(node: Node) -> list[Node]:
    """The values that ``cat`` puts together, without those that torch leaves out: empty ones of one
    dimension."""
    return [v for v in arguments(node)["tensors"] if fake_of(v).dim() == fake_of(node).dim()]


def autocast_of(node: Node) -> tuple:
    """The arguments of each autocast that a node runs under, the outermost first."""
    return node.meta.get(AUTOCAST, ())


def is_parameter(fake: object) -> bool:
    """A weight, declared or not. Hidden states may be leaves that want gradients too, but they come as ``[B,
    T, d]``."""
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

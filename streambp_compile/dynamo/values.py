"""What is known of the value of a node before autograd sees the graph."""

from __future__ import annotations

import torch
from torch.fx import Node


def fake_of(node: Node):
    return node.meta.get("example_value", node.meta.get("val"))


def storage_of(node: Node) -> int | None:
    """Whose memory the value of a node is; equal numbers, the same memory."""
    fake = fake_of(node)
    try:
        return fake.untyped_storage()._cdata if isinstance(fake, torch.Tensor) else None
    except NotImplementedError:  # of a value inside a `torch.func` transform
        return None


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

"""Graphs that only update values: optimizer steps, moving averages, gradient clipping, counters.

They have no backward, and no layers whose memory could be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import outputs_of
from ...passes.rules.forward import mutated
from ..reading.values import fake_of, is_parameter, storage_of

PRODUCTS = {
    *("matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "linear", "bilinear", "einsum"),
    *("tensordot", "inner", "chain_matmul", "multi_dot", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"),
}


def only_updates_state(module: GraphModule) -> bool:
    """Does a graph write into its inputs, compute no gradients, and hold no layers? A graph that multiplies
    matrices holds layers. The exception (Muon) writes into weights, and returns nothing else but values
    with their shapes."""
    nodes = module.graph.nodes
    calls = [n for n in nodes if n.op in ("call_function", "call_method")]
    given = {storage_of(n): n for n in nodes if n.op in ("placeholder", "get_attr")}
    given.pop(None, None)
    written = [given[s] for n in calls for s in map(storage_of, written_by(n)) if s in given]
    if not written or any(is_differentiable(fake) for n in calls for fake in tensors_of(fake_of(n))):
        return False
    if not any(map(is_product, calls)):
        return True
    weights = {fake_of(n).shape for n in written if is_parameter(fake_of(n))}
    returned = [n for n in outputs_of(module) if isinstance(n, Node) and storage_of(n) not in given]
    return bool(weights) and all(getattr(fake_of(n), "shape", None) in weights for n in returned)


def written_by(node: Node) -> list[Node]:
    """List the values that a node writes into: one, or several of a list (``torch._foreach_add_``)."""
    target = mutated(node)
    if target is not None:
        return [target]
    name = getattr(node.target, "__name__", "")
    lists = node.args if name.startswith(("_foreach_", "_fused_")) and name.endswith("_") else ()
    return [n for values in lists if isinstance(values, (list, tuple)) for n in values if isinstance(n, Node)]


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    for part in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(part, torch.Tensor):
            yield part


def is_differentiable(fake: torch.Tensor) -> bool:
    """Does a computed value have an autograd history? A weight that is written into without gradients has
    none."""
    return fake.requires_grad and not fake.is_leaf


def is_product(node: Node) -> bool:
    """Does a node multiply matrices, or hold a graph of its own that may do so?"""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return isinstance(node.target, internals.HigherOrderOperator) or name.split(".")[0] in PRODUCTS

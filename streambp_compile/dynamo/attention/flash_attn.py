"""Calls of ``flash_attn``, also by ``attn_implementation="flash_attention_2"``, as torch's own attention.

Dynamo writes the ``autograd.Function`` of flash_attn as one node with a forward and a backward inside.
Where that forward is one dense call without anything that only its kernel has (dropout, ALiBi, a cap on
scores), it becomes ``scaled_dot_product_attention`` of ``[B, T, H, D]``, with causality from the bottom
right and perhaps a window, and streams like it. Other calls reach the rule table, which says what to
choose instead. A call of packed sequences (``flash_attn_varlen_func``) becomes attention with a mask of
documents, if queries and keys are of the same ones. Parameters are those of flash_attn 2.7 and 2.8
(flash_attn/flash_attn_interface.py).
"""

from __future__ import annotations

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import is_equal, outputs_of
from ...passes.rules.attention import (
    FLASH_ATTN,
    FLASH_ATTN_FORWARD,
    FLASH_ATTN_VARLEN,
    FLASH_ATTN_VARLEN_FORWARD,
    kernel_only,
)
from ..reading.aten import functions_with_backward, inserted
from ..reading.values import fake_of

# A kernel's forward → its parameters, and its backward.
KERNELS = {
    FLASH_ATTN_FORWARD: (FLASH_ATTN, "flash_attn::_flash_attn_backward"),
    FLASH_ATTN_VARLEN_FORWARD: (FLASH_ATTN_VARLEN, "flash_attn::_flash_attn_varlen_backward"),
}
# Operations in its forward and backward beside the calls of kernels.
AROUND = {torch.empty_like, operator.getitem, internals.set_grad_enabled, *internals.PADDINGS}
METHODS = {"size", "contiguous", "stride"}


def flash_attn_as_attention(module: GraphModule) -> GraphModule:
    """Replace calls of flash_attn in a Dynamo graph by torch's attention, which can express them."""
    functions = functions_with_backward(module)
    for node, forward, backward in functions:
        call = only_call(forward, *KERNELS)
        if call is not None and only_result(node) is not None and is_plain(call, forward, backward):
            inline(node, forward, call)
    if functions:
        module.recompile()
    return module


def name_of(node: Node) -> str:
    """Return ``namespace::op`` for a call of a registered operator, and an empty text for other nodes."""
    target = node.target.default if isinstance(node.target, torch._ops.OpOverloadPacket) else node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def named(call: Node) -> dict[str, object]:
    """Map the names of the parameters of a kernel's forward to its arguments."""
    return {**dict(zip(KERNELS[name_of(call)][0], call.args)), **call.kwargs}


def only_call(module: GraphModule, *names: str) -> Node | None:
    found = [n for n in module.graph.nodes if name_of(n) in names]
    return found[0] if len(found) == 1 else None


def only_result(node: Node) -> Node | None:
    """Find the one result that is read, if it is the first."""
    users = [u for u in node.users if u.users]
    first = len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0
    return users[0] if first else None


def is_plain(call: Node, forward: GraphModule, backward: GraphModule) -> bool:
    """Can torch express this attention, and is its gradient computed by flash_attn's own backward alone?"""
    given, undone = named(call), only_call(backward, KERNELS[name_of(call)][1])
    if undone is None or kernel_only(given):
        return False
    aligned = not given["causal"] and max(windows_of(given)) < 0
    packed = "cu_seqlens_q" in given
    rows, keys = (fake_of(given[name]).shape[0 if packed else 1] for name in ("q", "k"))
    if (packed or not aligned) and not is_equal(rows, keys):
        return False
    if packed and given["cu_seqlens_q"] is not given["cu_seqlens_k"]:
        return False
    statistics = [u for u in call.users if not (u.target is operator.getitem and u.args[1] == 0)]
    if any(reader.op != "output" for value in statistics for reader in value.users):
        return False
    calls = [n for n in (*forward.graph.nodes, *backward.graph.nodes) if n not in (call, undone)]
    known = {"call_function": AROUND, "call_method": METHODS}
    return all(n.op in ("placeholder", "output") or n.target in known.get(n.op, ()) for n in calls)


def inline(node: Node, forward: GraphModule, call: Node) -> None:
    """Replace the node by its forward, with torch's attention in place of flash_attn's."""
    result = only_result(node)
    inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
    given = node.args[2:]
    values: dict[Node, object] = dict(zip(inputs[-len(given) :], given))  # older torch passes a context first
    with node.graph.inserting_before(node):
        for n in forward.graph.nodes:
            if n.op in ("call_function", "call_method") and n.target is not internals.set_grad_enabled:
                values[n] = in_place_of(n, call, result, values)
    first = outputs_of(forward)[0]
    first = first[0] if isinstance(first, (tuple, list)) else first
    result.replace_all_uses_with(values[first])
    for unread in (*node.users, node):
        node.graph.erase_node(unread)


def in_place_of(n: Node, call: Node, result: Node, values: dict[Node, object]) -> object:
    """Rewrite one node of flash_attn's forward for the outer graph; ``values`` has what earlier nodes
    became."""
    if n is call:
        arguments = torch.fx.node.map_arg(named(n), values.get)
        return attention_of(result, arguments), None, None, None
    if n.target is operator.getitem and n.args[0] is call:
        return values[call][n.args[1]]
    args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), values.get)
    return inserted(result, n.target, args, kwargs)


def windows_of(given: dict[str, object]) -> tuple[int, int]:
    """Return how many keys before and behind itself a row sees; -1: any number."""
    return given.get("window_size_left", -1), given.get("window_size_right", -1)


def attention_of(like: Node, given: dict[str, object]) -> Node:
    """Insert torch's attention for operands of ``[B, T, H, D]``, or ``[T, H, D]`` of packed sequences. The
    result has the same layout."""
    left, right = windows_of(given)
    right, packed = 0 if given["causal"] else right, given.get("cu_seqlens_q")
    operands = [given[name] for name in "qkv"]
    if packed is not None:
        operands = [inserted(like, torch.unsqueeze, (t, 0)) for t in operands]
    query, key, value = (inserted(like, torch.transpose, (t, 1, 2)) for t in operands)
    hidden = {"is_causal": given["causal"]}
    if packed is not None or left >= 0 or right > 0 or right == 0 and not given["causal"]:
        hidden = {"attn_mask": inserted(like, window, (query, left, right, packed))}
    out = inserted(
        like,
        F.scaled_dot_product_attention,
        (query, key, value),
        {**hidden, "scale": given["softmax_scale"], "enable_gqa": True},
    )
    out = inserted(like, torch.transpose, (out, 1, 2))
    return out if packed is None else inserted(like, torch.squeeze, (out, 0))


def window(query: Tensor, left: int, right: int, starts: Tensor | None) -> Tensor:
    """Build the mask of a window, ``[T, T]``, true where a query may read a key. The key lies at most
    ``left`` rows before or ``right`` rows behind the query; -1: any number.

    starts  the first rows of packed sequences, and the end of the last one; None: there is one sequence
    """
    rows = torch.arange(query.shape[2], device=query.device)
    behind, shown = rows - rows[:, None], []
    if starts is not None:
        sequence = torch.bucketize(rows, starts[1:].to(rows.dtype), right=True)
        shown.append(sequence[:, None] == sequence)
    if right >= 0:
        shown.append(behind <= right)
    if left >= 0:
        shown.append(behind >= -left)
    return functools.reduce(torch.logical_and, shown)

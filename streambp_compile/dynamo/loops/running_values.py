"""Running products, maxima and minima of tokens, as associative scans in blocks of tokens.

Torch's own gradients of them are no scans. That of a maximum goes back to places that depend on the
values. That of a product, which may hold zeros, is written out for one row after another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import arguments
from ...passes.rules import TABLE, running_of, scan_of
from ..reading.aten import inserted
from ..reading.token_axes import axes_of, traced
from ..reading.values import fake_of, wants_gradient
from .associative_scans import BLOCKS, Combine, scan_of_rows

Op = torch._ops.OpOverload


def write_running_values(module: GraphModule) -> GraphModule:
    """Write running products, maxima and minima of tokens as scans in blocks."""
    found = [n for n in module.graph.nodes if running_of(n) is not None and is_long(n) and not is_scan(n)]
    if found:
        fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
        axes = axes_of(traced(module, fakes), fakes)
        for node in found:
            marks = [m for axis in axes for m in axis.marks.get(node.args[0], ())]
            if [(m.dim, m.outer, m.inner) for m in marks] == [(dim_of(node), 1, 1)]:
                write(node)
    return module


def is_scan(node: Node) -> bool:
    """Does a node stream as it is, as a scan without a gradient?"""
    return scan_of(node) is not None and not wants_gradient(node.args[0])


def dim_of(node: Node) -> int:
    return arguments(node)["dim"] % max(1, fake_of(node.args[0]).dim())


def is_long(node: Node) -> bool:
    """Does a node have a constant number of rows, at least two blocks of them? With lengths that may
    change, the values that blocks of blocks exchange have sizes that take minutes to analyse."""
    value = fake_of(node.args[0])
    length = value.shape[dim_of(node)] if value.dim() else 0
    return isinstance(length, int) and length >= 2 * min(BLOCKS)


def write(node: Node) -> None:
    """Write a node as a scan. If the places of its values are read, another scan computes them."""
    if not isinstance(fake_of(node), (tuple, list)):
        replace(node, node, values, fake_of(node).dtype)  # a product of integers is an int64
        return
    for item in list(node.users):
        if item.target is operator.getitem:
            replace(item, node, (values, places)[item.args[1]])
    if not node.users:
        node.graph.erase_node(node)


def replace(old: Node, node: Node, made: Callable[..., Tensor], *more: object) -> None:
    with node.graph.inserting_before(node):
        new = inserted(old, made, (node.args[0], dim_of(node), node.target, *more))
    old.replace_all_uses_with(new)
    node.graph.erase_node(old)


def values(x: Tensor, dim: int, op: Op, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a running product or maximum of rows of any length."""
    rows = x.to(dtype or x.dtype).movedim(dim, 0)
    return scan_of_rows(combine_with(op), [rows])[0].movedim(0, dim)


def places(x: Tensor, dim: int, op: Op) -> Tensor:
    """Compute the indices that a running maximum returns beside its values."""
    rows = x.detach().movedim(dim, 0)
    own = torch.arange(len(rows), device=x.device).view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
    return scan_of_rows(combine_with(op), [rows, own])[1].movedim(0, dim)


def combine_with(op: Op) -> Combine:
    """Build a function that combines rows by a running operator. It works on single numbers, for any number
    of dimensions."""
    running = TABLE[op].running
    return lambda more, left, right: running(left, right)

"""Scans: row t is computed from all rows up to it, or from all rows from it on.

Over tokens, a chunk continues from the state of the rows before it: one row, whatever the length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..ir import FUTURE, PAST, Signature, shape_of
from . import TABLE, Rule, rule, scan_of
from .facets import CostClass, Form, Linear, Scan
from .mask_domain import creation
from .mask_domain.bounded import if_operands_are

aten = torch.ops.aten
KERNEL = CostClass.KERNEL


def state_of_no_rows(node: Node) -> float:
    """Return a scan's state before any row; zero for a node that is no scan, and adds up."""
    scan = scan_of(node)
    return 0.0 if scan is None else scan.identity


PICKED: dict[str, Any] = dict(cost=KERNEL, positions=(1,), picks=True, keep=True)


@rule(
    "aten::cumsum",
    cost=KERNEL,
    mask=creation.accumulated,
    bounded=if_operands_are,
    linear="self",
    scan=Scan(0.0, join=aten.add.Tensor),
    keep=True,
    form=Form.RUNNING_SUM,
)
@rule("aten::cumprod", cost=KERNEL, scan=Scan(1.0, join=aten.mul.Tensor), keep=True)
@rule("aten::logcumsumexp", cost=KERNEL, scan=Scan(-math.inf, join=aten.logaddexp.default), keep=True)
@rule("aten::cummax", **PICKED)
@rule("aten::cummin", **PICKED)
def forward(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    labels = tuple(range(rank))
    outputs = len(node.target._schema.returns)
    return Signature((labels,), (labels,) * outputs, reach={node.args[1] % max(rank, 1): PAST})


def is_reversible(node: Node) -> bool:
    """Does ``streambp.reverse_scan`` support a node's scan?"""
    found = scan_of(node)
    return found is not None and found.join is not None and node.target.namespace == "aten"


def turned(node: Node) -> torch._ops.OpOverload:
    """Return the scan that a reverse scan runs from the last row to the first."""
    return getattr(aten, node.args[2]).default


def row_of_turned(node: Node) -> Rule:
    return TABLE[turned(node)]


def linear_reverse(node: Node) -> Linear | None:
    return Linear.of("x") if row_of_turned(node).linear is not None else None


def emit_reverse(body, node: Node):
    """Write a reverse scan as a flipped scan, for which Inductor has a kernel."""

    def run(rows: Node) -> Node:
        call, dim = body.graph.call_function, node.args[1]
        flipped = call(turned(node), (call(aten.flip.default, (rows, [dim])), dim))
        return call(aten.flip.default, (flipped, [dim]))

    return body.scan(node, run)


@rule(
    "streambp::reverse_scan",
    emit=emit_reverse,
    cost=KERNEL,
    linear=linear_reverse,
    scan=lambda node: row_of_turned(node).scan,
)
def reverse(node: Node) -> Signature:
    labels = tuple(range(len(shape_of(node))))
    return Signature((labels,), (labels,), reach={node.args[1]: FUTURE})

"""Scans: row t is made of all rows up to it, or of all from it on.

Over tokens, a chunk goes on from what the rows before it came to: a state of one row, whatever the length.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ..ir import FUTURE, PAST, Signature, shape_of
from . import rule
from .mask_domain import creation
from .mask_domain.bounded import if_operands_are

aten = torch.ops.aten

JOINS = {  # scan → what joins a state to the rows behind it, and the state of no rows
    aten.cumsum.default: (aten.add.Tensor, 0.0),
    aten.cumprod.default: (aten.mul.Tensor, 1.0),
    aten.logcumsumexp.default: (aten.logaddexp.default, -math.inf),
}


def scan_of(node: Node):
    """The scan that a node is, whichever way it goes."""
    return (
        getattr(aten, node.args[2]).default
        if node.target is torch.ops.streambp.reverse_scan.default
        else node.target
    )


def state_of_no_rows(node: Node) -> float:
    """What a scan makes of nothing; zero for what is no scan, and adds up."""
    return JOINS.get(scan_of(node), (None, 0.0))[1]


def emit_forward(body, node: Node):
    return body.scan(node, node.target, node.args[1], *JOINS[node.target])


@rule("aten::logcumsumexp", "aten::cumprod", emit=emit_forward)
def forward(node: Node) -> Signature:
    rank = len(shape_of(node))
    labels = tuple(range(rank))
    return Signature((labels,), (labels,), reach={node.args[1] % max(rank, 1): PAST})


rule("aten::cumsum", emit=emit_forward, mask=creation.accumulated, bounded=if_operands_are)(forward)


def emit_reverse(body, node: Node):
    scan = scan_of(node)
    return body.scan(node, scan, node.args[1], *JOINS[scan], turned=True)


@rule("streambp::reverse_scan", emit=emit_reverse)
def reverse(node: Node) -> Signature:
    labels = tuple(range(len(shape_of(node))))
    return Signature((labels,), (labels,), reach={node.args[1]: FUTURE})

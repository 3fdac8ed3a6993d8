"""Loops over tokens: the state at a token is computed from the rows of all tokens before it."""

from __future__ import annotations

from torch.fx import Node

from ..ir import FUTURE, PAST, Signature, shape_of, tensor_operands
from . import rule
from .facets import CostClass, Scan


def labels_of(node: Node, rows: int, reach) -> Signature:
    """Build the signature in which the first ``rows`` operands have a row per token. The other operands are
    the same for all tokens."""
    ranks = [len(shape_of(a)) for a in tensor_operands(node)]
    operands = tuple(
        tuple("t" if (i < rows and not d) else ("own", i, d) for d in range(rank))
        for i, rank in enumerate(ranks)
    )
    return Signature(operands, (("t", None),), reach={"t": reach}, contracts="all")


@rule("streambp::token_loop", cost=CostClass.KERNEL, scan=Scan(0.0, state="state"))
def token_loop(node: Node) -> Signature:
    return labels_of(node, len(node.args[0]), PAST)


@rule("streambp::token_loop_back", cost=CostClass.KERNEL, linear="grad", scan=Scan(0.0, state="state"))
def token_loop_back(node: Node) -> Signature:
    return labels_of(node, 2 + len(node.args[2]), FUTURE)

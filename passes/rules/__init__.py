"""The table of operators: one op, one row.

A row says how the dimensions of an op's operands are tied to those of its outputs (a `Signature`) and, where
copying the
node at chunk length is not enough, how to write it into a chunk body (`emit`). Everything else — which
dimension
carries tokens, what is summed, what is read by keys, in which sweep a node belongs — follows from the
signature.

A third party adds a rule for an op of its own in the same way this package does::

    @streambp_compile.rule("mylib::swiglu")
    def swiglu(node):
        return equation(node, "bth,bth->bth")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir import CannotStream, Refusal, Signature, where_of
from ..kernels import attention as _attention  # noqa: F401  registers torch.ops.streambp
from ..kernels import operators as _operators  # noqa: F401  registers torch.ops.streambp
from ..mask_analysis.domains import Abstract
from ..mask_analysis.operands import Known
from .facets import CostClass, Linear, Scan
from .signatures import broadcast

MaskTransfer = Callable[[Node, Known], Abstract]  # (node, what is known so far) → its abstract value
Bounded = Callable[[Node, Container[Node]], bool]  # (node, the bounded nodes) → is it one of them?


@dataclass(frozen=True)
class Rule:
    """All that is known of one op. Only the signature must be given; an absent facet means unknown.

    signature   node → `Signature`: a label for every dimension, what is summed, how far rows reach
    shape_arg   position of the argument that holds the output's shape
    emit        writes the node into a chunk body, where copying it at chunk length is not enough
    cost        what it costs beside its neighbours; unknown counts as a kernel of its own
    linear      in which operands it is linear; unknown counts as not linear
    mask        what it does to a mask's abstract value: a function of `mask_domain`; unknown prunes nothing
    bounded     when its numbers are far from the lowest of their dtype, so that they mask no key: a function
                of `mask_domain.bounded`
    visible_only  masked scores do not count in its result (a softmax over keys)
    scan        how chunks of it join, if it is a scan
    positions   outputs that name rows or keys by their place (-1: its only output)
    random      it draws random numbers
    writes      position of the argument that it writes into
    keep        the rules know it better than its decomposition: it is decomposed in chunk bodies only
    """

    signature: Callable[[Node], Signature]
    shape_arg: int | None = None
    emit: Callable | None = None
    cost: CostClass | None = None
    linear: Linear | None = None
    mask: MaskTransfer | None = None
    bounded: Bounded | None = None
    visible_only: bool = False
    scan: Scan | None = None
    positions: tuple[int, ...] = ()
    random: bool = False
    writes: int | None = None
    keep: bool = False


TABLE: dict[torch._ops.OpOverload, Rule] = {}
POINTWISE = Rule(broadcast)  # what is known of an op by its tag alone


def overload(name: str) -> torch._ops.OpOverload:
    """``"aten::mm"`` → ``torch.ops.aten.mm.default``; ``"aten::sum.dim_IntList"`` → that overload."""
    namespace, _, rest = name.partition("::")
    packet, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def rule(*names: str, linear: str | None = None, **facets):
    """Enter a signature function into the table for the ops named (``"namespace::op.overload"``).

    linear  the terms in which the op is linear, ``"self + mat1 * mat2"``
    facets  any other field of `Rule`
    """

    def enter(signature: Callable[[Node], Signature]) -> Callable[[Node], Signature]:
        found = Rule(signature, linear=None if linear is None else Linear.of(linear), **facets)
        for name in names:
            TABLE[overload(name)] = found
        return signature

    return enter


BY_NAME: dict[str, Rule] = {}


def rule_by_name(*names: str):
    """Enter a signature function for ops that need not be registered yet: of other packages
    (``"namespace::op"``), of higher order."""

    def enter(signature: Callable[[Node], Signature]) -> Callable[[Node], Signature]:
        BY_NAME.update({name: Rule(signature) for name in names})
        return signature

    return enter


def functional(target: object) -> torch._ops.OpOverload | None:
    """The op that an in-place op (``add_``) carries out; joint graphs have none of them, graphs straight from
    a capture do."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_"):
        return None
    try:
        return overload(f"{target._schema.name[:-1]}.{target._overloadname}")
    except AttributeError:
        return None


def find_rule(node: Node) -> Rule | None:
    """The row for this node's op, or None; pointwise ops are known by their tag."""
    for target in (node.target, functional(node.target)):
        if target in TABLE:
            return TABLE[target]
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.pointwise in node.target.tags:
            return POINTWISE
        if node.target._schema.name in BY_NAME:
            return BY_NAME[node.target._schema.name]
    if (
        isinstance(node.target, torch._ops.HigherOrderOperator)
        and f"higher_order::{node.target.__name__}" in BY_NAME
    ):
        return BY_NAME[f"higher_order::{node.target.__name__}"]
    return None


def rule_of(node: Node) -> Rule:
    """The row for this node's op. No row means refuse."""
    found = find_rule(node)
    if found is not None:
        return found
    raise CannotStream(
        Refusal(
            str(node.target),
            "No rule describes which tokens this operation reads",
            "Register a rule with @streambp_compile.rule, or keep the operation out of the compiled function",
            where_of(node),
        )
    )


for _family in ("pointwise", "views", "matmul", "reductions", "scans", "indexing", "creation", "attention"):
    importlib.import_module(f"{__name__}.{_family}")

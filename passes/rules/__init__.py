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
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import (
    CannotStream,
    Refusal,
    Signature,
    Size,
    arguments,
    is_view,
    tensor_operands,
    value_of,
    where_of,
)
from ..kernels import attention as _attention  # noqa: F401  registers torch.ops.streambp
from ..kernels import blocks as _blocks  # noqa: F401  registers torch.ops.streambp
from ..kernels import collectives as _collectives  # noqa: F401  registers torch.ops.streambp
from ..kernels import operators as _operators  # noqa: F401  registers torch.ops.streambp
from ..kernels import picked_rows as _picked_rows  # noqa: F401  registers torch.ops.streambp
from ..kernels import token_loops as _token_loops  # noqa: F401  registers torch.ops.streambp
from ..mask_analysis.domains import Abstract
from ..mask_analysis.operands import Known
from .facets import CostClass, Form, Linear, Merge, Running, Scan, Windows
from .signatures import broadcast

MaskTransfer = Callable[[Node, Known], Abstract]  # (node, what is known so far) → its abstract value
Indices = dict[Node, tuple[Size, Size]]  # index operand → the least and the greatest that is allowed
Bounded = Callable[[Node, Known], bool]  # (node, what is known of those before it) → is it bounded?


@dataclass(frozen=True)
class Rule:
    """All that is known of one op. Only the signature must be given; an absent facet means unknown.

    signature   node → `Signature`: a label for every dimension, what is summed, how far rows reach
    shape_arg   position of the argument that holds the output's shape
    emit        writes the node into a chunk body, where copying it at chunk length is not enough
    cost        what it costs beside its neighbours; unknown counts as a kernel of its own
    linear      in which operands it is linear (or node → that); unknown counts as not linear
    mask        what it does to a mask's abstract value: a function of `mask_domain`; unknown prunes nothing
    bounded     when its numbers are far from the lowest of their dtype, so that they mask no key: a function
                of `mask_domain.bounded`
    nonnegative no number of its result is negative
    visible_only  masked scores do not count in its result (a softmax over keys)
    scan        how chunks of it join, if it is a scan (or node → that)
    running     of what becomes a scan in blocks before autograd: how earlier rows combine with later ones
    merge       how its results over chunks of tokens merge, if it is a reduction that does not simply add up
    by_place    it finds rows and keys by their place among all, and takes those that a chunk has not for zero
    positions   outputs that name rows or keys by their place (-1: its only output)
    picks       its numbers are some of those that it reads (a maximum)
    random      it draws random numbers
    writes      position of the argument that is its result, but for the entries that it writes or adds to
    put         of a view: the op that puts new numbers into what it views, ``put(source, new, *arguments)``
    keep        the rules know it better than its decomposition: it is decomposed in chunk bodies only
    form        what it is to a rewrite that looks for a pattern
    filling     the number that fills its result, or the argument that holds it
    windows     node → dimensions along which its rows are those of an operand, moved, and zero elsewhere
    any_layout  the op that gives the same values whatever the layout of its operand
    of_blocks   it leads rows into blocks or out of them: those of blocks are no sequence of their own
    width       node, tokens → bytes per token that are alive at the widest moment inside
    indices     node → its operands that are indices, each with the least and the greatest that is allowed
    around      its ``emit`` reads the rows around a chunk, of operands at full length
    communicates  it takes part in a collective, which all processes of a group run, in one order
    along       the dimension along which a collective gathers or scatters, or the argument that names it
    """

    signature: Callable[[Node], Signature]
    shape_arg: int | None = None
    emit: Callable | None = None
    cost: CostClass | None = None
    linear: Linear | Callable[[Node], Linear | None] | None = None
    mask: MaskTransfer | None = None
    bounded: Bounded | None = None
    nonnegative: bool = False
    visible_only: bool = False
    scan: Scan | Callable[[Node], Scan | None] | None = None
    running: Running | None = None
    merge: Merge | None = None
    by_place: bool = False
    positions: tuple[int, ...] = ()
    picks: bool = False
    random: bool = False
    writes: int | None = None
    put: torch._ops.OpOverload | None = None
    keep: bool = False
    form: Form | None = None
    filling: float | str | None = None
    windows: Callable[[Node], Windows] | None = None
    any_layout: torch._ops.OpOverload | None = None
    of_blocks: bool = False
    width: Callable[[Node, int], int] | None = None
    indices: Callable[[Node], Indices] | None = None
    around: bool = False
    communicates: bool = False
    along: str | int | None = None


TABLE: dict[torch._ops.OpOverload, Rule] = {}
BUILT_IN: list[str] = []  # the families of this package while they are read: there, one op has one row
POINTWISE = Rule(broadcast, cost=CostClass.FUSED)  # what is known of an op by its tag alone


def overload(name: str) -> torch._ops.OpOverload:
    """``"aten::mm"`` → ``torch.ops.aten.mm.default``; ``"aten::sum.dim_IntList"`` → that overload."""
    namespace, _, rest = name.partition("::")
    packet, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def rule(
    *names: str,
    linear: str | Callable[[Node], Linear | None] | None = None,
    cost: CostClass | str | None = None,
    **facets,
):
    """Enter a signature function into the table for the ops named (``"namespace::op.overload"``).

    linear  the terms in which the op is linear, ``"self + mat1 * mat2"``; or node → `Linear`, where that
            depends on its arguments
    cost    a `CostClass` or its name: ``"product"``, ``"kernel"``, ``"fused"``, …
    facets  any other field of `Rule`
    """

    def enter(signature: Callable[[Node], Signature]) -> Callable[[Node], Signature]:
        terms = Linear.of(linear) if isinstance(linear, str) else linear
        found = Rule(signature, linear=terms, cost=None if cost is None else CostClass(cost), **facets)
        for name in names:
            assert not BUILT_IN or overload(name) not in TABLE, f"{name} has two rows"
            TABLE[overload(name)] = found
        return signature

    return enter


BY_NAME: dict[str, Rule] = {}


def rule_by_name(*names: str, **facets):
    """Enter a signature function for ops that need not be registered yet: of other packages
    (``"namespace::op"``), of higher order."""

    def enter(signature: Callable[[Node], Signature]) -> Callable[[Node], Signature]:
        BY_NAME.update({name: Rule(signature, **facets) for name in names})
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


def find_rule(target: object) -> Rule | None:
    """The row of an op (or of a node's op); pointwise ops are known by their tag. None if there is none."""
    target = target.target if isinstance(target, Node) else target
    for op in (target, functional(target)):
        if isinstance(op, torch._ops.OpOverload) and op in TABLE:
            return TABLE[op]
    if isinstance(target, torch._ops.OpOverload):
        return POINTWISE if torch.Tag.pointwise in target.tags else BY_NAME.get(target._schema.name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return BY_NAME.get(f"higher_order::{target.__name__}")
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


def form_of(node: object) -> Form | None:
    """What a node is to a rewrite; None of what is no op, or has no form."""
    found = find_rule(node) if isinstance(node, Node) and node.op == "call_function" else None
    return None if found is None else found.form


def running_of(node: Node) -> Running | None:
    """How earlier rows combine with later ones along the dimension of a running product or maximum."""
    found = find_rule(node) if node.op == "call_function" else None
    return None if found is None else found.running


def linear_of(node: Node) -> Linear | None:
    """In which operands a node is linear; every view is in the value that it views."""
    found = find_rule(node)
    linear = found.linear if found is not None else None
    if linear is None and is_view(node):
        return Linear.of(node.target._schema.arguments[0].name)
    return linear(node) if callable(linear) else linear


def scan_of(node: Node) -> Scan | None:
    """How chunks of a node join, if it is a scan."""
    found = find_rule(node)
    scan = found.scan if found is not None else None
    return scan(node) if callable(scan) else scan


def state_rows(node: Node) -> int:
    """Rows of the state of a scan."""
    scan = scan_of(node)
    return 1 if scan is None else scan.rows


def merge_of(node: Node) -> Merge | None:
    """How results of a node over chunks of tokens merge, if they do other than by adding up."""
    found = find_rule(node)
    return None if found is None else found.merge


def cost_of(node: Node) -> CostClass:
    """What a node costs beside its neighbours; without a row, what is safe: a kernel of its own."""
    if node.target is operator.getitem or is_view(node):
        return CostClass.VIEW
    if node.op != "call_function" or not isinstance(value_of(node), (torch.Tensor, tuple, list)):
        return CostClass.FREE
    found = find_rule(node)
    return CostClass.KERNEL if found is None or found.cost is None else found.cost


def is_product(node: Node) -> bool:
    """Is a node a matrix product or attention?"""
    return cost_of(node) is CostClass.PRODUCT


def is_of_blocks(node: Node) -> bool:
    """Does a node lead rows into blocks of tokens, or out of them?"""
    found = find_rule(node)
    return found is not None and found.of_blocks


def inner_width(node: Node, length: int) -> int:
    """Bytes per token, of so many, that are alive at the widest moment inside a node, where that is known
    to be more than its result."""
    found = find_rule(node)
    return 0 if found is None or found.width is None else found.width(node, length)


def is_built_in(node: Node) -> bool:
    """Is a node an op of torch or of this package, whose rows are complete?"""
    return getattr(node.target, "namespace", "aten") in ("aten", "prims", "streambp")


def indices_of(node: Node) -> Indices:
    """The operands of a node that are indices, and what is allowed of each."""
    found = find_rule(node)
    return {} if found is None or found.indices is None else found.indices(node)


def is_compared(node: Node) -> bool:
    """Is it one of the numbers that it was taken from, and compared with numbers that may be these?

    What is computed twice may differ in its last bit, so that the maximum of one is in the other no longer.
    """
    seen, stack = set[Node](), [node]
    while stack:
        for user in stack.pop().users:
            if form_of(user) in (Form.EQUAL, Form.COMPARED):
                return is_picked(node)
            if user not in seen and (user.target is operator.getitem or is_view(user)):
                seen.add(user)
                stack.append(user)
    return False


def is_picked(node: Node) -> bool:
    """Are a value's numbers some of those that the op behind it has read?"""
    while node.target is operator.getitem or is_view(node):
        node = node.all_input_nodes[0]
    found = find_rule(node) if node.op == "call_function" else None
    return found is not None and found.picks


def is_random(node: Node) -> bool:
    """Does a node draw random numbers?"""
    found = find_rule(node)
    return found is not None and found.random


def communicates(node: Node) -> bool:
    """Does a node take part in a collective over several processes?"""
    found = find_rule(node) if node.op == "call_function" else None
    return found is not None and found.communicates


def along_of(node: Node) -> int | None:
    """The dimension along which a collective gathers the parts of several processes, or keeps one of
    them."""
    found = find_rule(node) if node.op == "call_function" else None
    if found is None or found.along is None:
        return None
    return found.along if isinstance(found.along, int) else arguments(node)[found.along]


def ends_along(graph: Graph) -> list[tuple[Node, int]]:
    """What collectives gather and scatter, and what they make of it, each with the dimension along which they
    do."""
    found = [(n, dim) for n in graph.nodes if (dim := along_of(n)) is not None]
    return list(dict.fromkeys((end, dim) for n, dim in found for end in (tensor_operands(n)[0], n)))


def filling_of(node: object) -> float | None:
    """The number that a value of one number is filled with; None of what is not known to be one."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    found = find_rule(node)
    if found is None or found.filling is None:
        return None
    return arguments(node)[found.filling] if isinstance(found.filling, str) else found.filling


def is_zeros(node: object) -> bool:
    """Is a value made from nothing but zeros?"""
    return isinstance(node, Node) and filling_of(node) == 0 and not tensor_operands(node)


def windows_of(node: object) -> Windows:
    """The dimensions along which a node's rows are those of an operand, moved, and zero elsewhere."""
    if isinstance(node, Node) and node.op == "call_function":
        found = find_rule(node)
        yield from () if found is None or found.windows is None else found.windows(node)


def for_any_layout(target: Callable) -> Callable:
    """The op that gives the same values whatever the layout of its operand: of a view, one that may copy."""
    found = find_rule(target)
    return target if found is None or found.any_layout is None else found.any_layout


def kept() -> tuple[torch._ops.OpOverload, ...]:
    """The ops that the rules know better than their decompositions."""
    return tuple(op for op, found in TABLE.items() if found.keep)


for _family in (
    "pointwise",
    "views",
    "matmul",
    "reductions",
    "scans",
    "indexing",
    "creation",
    "attention",
    "blocks",
    "picked_rows",
    "token_loops",
    "filters",
    "collectives",
):
    BUILT_IN.append(_family)
    importlib.import_module(f"{__name__}.{_family}")
BUILT_IN.clear()

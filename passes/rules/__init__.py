"""The table of operators: one op, one row.

A row says how the dimensions of an op's operands are tied to those of its outputs (a `Signature`). Where
copying the node at chunk length is not enough, it also says how to write the node into a chunk body
(`emit`). Everything else follows from the signature: which dimension carries tokens, which results are
sums, which operands are read by keys, and in which sweep a node runs.

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
from ..kernels import mapped_functions as _mapped_functions  # noqa: F401  registers torch.ops.streambp
from ..kernels import operators as _operators  # noqa: F401  registers torch.ops.streambp
from ..mask_analysis.domains import Abstract
from ..mask_analysis.operands import Known
from .facets import CostClass, Form, Linear, Merge, Scan, Windows
from .signatures import broadcast

MaskTransfer = Callable[[Node, Known], Abstract]  # (node, abstract values so far) → its abstract value
Indices = dict[Node, tuple[Size, Size]]  # index operand → the least and the greatest that is allowed
Bounded = Callable[[Node, Known], bool]  # (node, properties of earlier nodes) → is it bounded?


@dataclass(frozen=True)
class Rule:
    """The row of one op; only the signature must be given, and an absent facet means unknown.

    signature   node → `Signature`: a label for every dimension, contracted labels, how far rows reach
    shape_arg   position of the argument that holds the output's shape
    emit        writes the node into a chunk body, where copying it at chunk length is not enough
    cost        its `CostClass` beside its neighbours; unknown counts as a kernel of its own
    linear      the operands in which it is linear (or node → these); unknown counts as not linear
    mask        its transfer function for a mask's abstract value, of `mask_domain`; unknown prunes nothing
    bounded     when its numbers are far from the lowest of their dtype, so that they mask no key: a function
                of `mask_domain.bounded`
    nonnegative no number of its result is negative
    visible_only  masked scores do not count in its result (a softmax over keys)
    scan        how chunks of it join, if it is a scan (or node → that)
    merge       how its results over chunks of tokens merge, if it is a reduction that does not simply add up
    by_place    it finds rows and keys by their place among all, and takes those that a chunk does not have
                for zero
    positions   outputs that name rows or keys by their place (-1: its only output)
    picks       its numbers are some of those that it reads (a maximum)
    random      it draws random numbers
    writes      position of the argument that its result equals, except in entries that it writes or adds to
    put         for a view: the op that puts new numbers into the viewed value,
                ``put(source, new, *arguments)``
    keep        the rules describe it better than its decomposition: it is decomposed in chunk bodies only
    form        its `Form`, for rewrites that look for a pattern
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
"""The row of each op; a user's rules join those of this package."""
BUILT_IN: list[str] = []  # rule families of this package while they are imported: in them, one op has one row
POINTWISE = Rule(broadcast, cost=CostClass.FUSED)  # the row of an op that only has the tag


def overload(name: str) -> torch._ops.OpOverload:
    """Resolve the name of an op: ``"aten::mm"`` → ``torch.ops.aten.mm.default``.

    A name may include the overload: ``"aten::sum.dim_IntList"``.
    """
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
    """Enter a signature function for ops that need not be registered yet.

    These are ops of other packages (``"namespace::op"``) and higher-order ops (``"higher_order::op"``).
    """

    def enter(signature: Callable[[Node], Signature]) -> Callable[[Node], Signature]:
        BY_NAME.update({name: Rule(signature, **facets) for name in names})
        return signature

    return enter


def functional(target: object) -> torch._ops.OpOverload | None:
    """Find the functional op that an in-place op (``add_``) carries out, or None. Joint graphs have no
    in-place ops, but graphs straight from a capture do."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_"):
        return None
    try:
        return overload(f"{target._schema.name[:-1]}.{target._overloadname}")
    except AttributeError:
        return None


def find_rule(target: object) -> Rule | None:
    """Find the row of an op (or of a node's op), or None. Pointwise ops without a row are known by their
    tag."""
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
    """Find the row for this node's op. Raises `CannotStream` without one: no row means refuse."""
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
    """Return the form of a node's op for rewrites. None for any other value, and for an op without a form."""
    found = find_rule(node) if isinstance(node, Node) and node.op == "call_function" else None
    return None if found is None else found.form


def linear_of(node: Node) -> Linear | None:
    """Return the operands in which a node is linear, or None. Every view is linear in the value that it
    views."""
    found = find_rule(node)
    linear = found.linear if found is not None else None
    if linear is None and is_view(node):
        return Linear.of(node.target._schema.arguments[0].name)
    return linear(node) if callable(linear) else linear


def scan_of(node: Node) -> Scan | None:
    """Return how chunks of a node join, if it is a scan."""
    found = find_rule(node)
    scan = found.scan if found is not None else None
    return scan(node) if callable(scan) else scan


def state_rows(node: Node) -> int:
    """Count the rows of a scan's state."""
    scan = scan_of(node)
    return 1 if scan is None else scan.rows


def merge_of(node: Node) -> Merge | None:
    """Return how results of a node over chunks of tokens merge, unless they add up."""
    found = find_rule(node)
    return None if found is None else found.merge


def cost_of(node: Node) -> CostClass:
    """Classify a node's cost beside its neighbours. Without a row, the safe answer is a kernel of its own."""
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
    """Count the bytes per token that are alive at the widest moment inside a node.

    The answer is 0 where this is not known to be more than the node's result.

    length  tokens
    """
    found = find_rule(node)
    return 0 if found is None or found.width is None else found.width(node, length)


def is_built_in(node: Node) -> bool:
    """Is a node an op of torch or of this package, whose rows are complete?"""
    return getattr(node.target, "namespace", "aten") in ("aten", "prims", "streambp")


def indices_of(node: Node) -> Indices:
    """Find the operands of a node that are indices, each with its bounds."""
    found = find_rule(node)
    return {} if found is None or found.indices is None else found.indices(node)


def is_compared(node: Node) -> bool:
    """Is a node's result picked from the numbers that it read, and compared with numbers? Those may be the
    same numbers again. A value that is computed twice may differ in its last bit, so that a recomputed
    maximum would equal none of them."""
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
    """Return the dimension along which a collective gathers parts of processes, or keeps one part. None for
    any other node."""
    found = find_rule(node) if node.op == "call_function" else None
    if found is None or found.along is None:
        return None
    return found.along if isinstance(found.along, int) else arguments(node)[found.along]


def ends_along(graph: Graph) -> list[tuple[Node, int]]:
    """List the operands and results of collectives that gather or scatter along a dimension. Each is paired
    with that dimension."""
    found = [(n, dim) for n in graph.nodes if (dim := along_of(n)) is not None]
    return list(dict.fromkeys((end, dim) for n, dim in found for end in (tensor_operands(n)[0], n)))


def filling_of(node: object) -> float | None:
    """Return the number that fills a value, or None if it is not known to hold one number."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    found = find_rule(node)
    if found is None or found.filling is None:
        return None
    return arguments(node)[found.filling] if isinstance(found.filling, str) else found.filling


def is_zeros(node: object) -> bool:
    """Is a value made of zeros, without an operand?"""
    return isinstance(node, Node) and filling_of(node) == 0 and not tensor_operands(node)


def windows_of(node: object) -> Windows:
    """Yield the dimensions along which a node's rows are moved rows of an operand, and zero elsewhere. Each
    comes with its `Window`."""
    if isinstance(node, Node) and node.op == "call_function":
        found = find_rule(node)
        yield from () if found is None or found.windows is None else found.windows(node)


def for_any_layout(target: Callable) -> Callable:
    """Replace an op by one that gives the same values whatever the layout of its operand. For a view, this is
    an op that may copy."""
    found = find_rule(target)
    return target if found is None or found.any_layout is None else found.any_layout


def kept() -> tuple[torch._ops.OpOverload, ...]:
    """List the ops that the rules describe better than their decompositions."""
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
    "mapped_functions",
    "filters",
    "collectives",
):
    BUILT_IN.append(_family)
    importlib.import_module(f"{__name__}.{_family}")
BUILT_IN.clear()

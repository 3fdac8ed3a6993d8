"""Entries that a relative shift takes from neighbouring rows are left out where a mask hides them.

Transformer-XL's shift by reshapes puts entries of the next row where keys are later than the query. A
causal mask replaces them, and their gradient is zero: so neither is computed, if the mask is proved to
be there for every call. Otherwise they stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import Size, are_alike, arguments, is_view, value_of
from ..mask_analysis.domains import EMPTY, Abstract, Band, Indicator
from ..mask_analysis.evaluation import evaluate
from ..mask_analysis.operands import broadcast_value
from ..phases import check_time
from ..rules import find_rule, form_of
from ..rules.facets import Form
from .writing import Writing

aten = torch.ops.aten


def drop_hidden_shifts(graph: Graph) -> None:
    """Drop relative shifts of neighbouring rows if nothing reads their entries, or if these are zero."""
    shifts = [n for n in graph.nodes if form_of(n) is Form.SKEWED and arguments(n)["rows"] != 0]
    masks = evaluate(graph) if shifts else {}
    for node in shifts:
        if is_zero(node, masks) or is_hidden(node, masks):
            drop(graph, node)


@dataclass(frozen=True)
class Placed:
    """The places of some entries in an operand, for the functions that move masks."""

    operand: Node
    band: Band
    bounded: frozenset[Node] = frozenset()
    nonnegative: frozenset[Node] = frozenset()
    integral: frozenset[Node] = frozenset()

    @property
    def indicators(self) -> Mapping[Node, Indicator]:
        return {}

    def __call__(self, arg: object) -> Abstract:
        return self.band if arg is self.operand else None

    def repeated_by(self, arg: Node) -> Node:
        return arg

    def floor_division_behind(self, arg: Node) -> Node | None:
        return None


def is_zero(node: Node, masks: Mapping[Node, Abstract]) -> bool:
    """Are the values zero that a backward shift takes back to neighbouring rows, such as gradients?"""
    given = arguments(node)
    x, dim, offset = given["x"], given["dim"], given["offset"]
    if given["step"] != 1 or not isinstance(offset, int):
        return False
    low = offset - given["rows"]
    read = Band(dim, dim + 1, low, low + last_of(value_of(node).shape[dim + 1]), 0.0, ())
    return is_constant_at(read, masks.get(x), (0.0,))


def is_hidden(node: Node, masks: Mapping[Node, Abstract]) -> bool:
    """Does a mask replace the entries that are not zero, before anything depends on them?"""
    given = arguments(node)
    dim, offset = given["dim"], given["offset"]
    if given["step"] != -1 or not isinstance(offset, int):
        return False
    high = last_of(value_of(given["x"]).shape[dim + 1]) - offset
    found, stack = {node}, [(node, Band(dim, dim + 1, -offset, high, 0.0, ()))]
    while stack:
        check_time()
        value, entries = stack.pop()
        if is_constant_at(entries, masks.get(value), (0.0, -math.inf)):
            continue
        empty = is_constant_at(entries, masks.get(value), EMPTY)
        users = [user for user in value.users if not (empty and reads_visible_only(user))]
        moved = {user: entries_in(user, value, entries) for user in users}
        if None in moved.values():
            return False
        stack += [(user, band) for user, band in moved.items() if user not in found and band is not None]
        found.update(moved)
    return True


def last_of(size: Size) -> float:
    """Return the last of so many columns; infinity for a number that may change."""
    return size - 1 if isinstance(size, int) else math.inf


def reads_visible_only(node: Node) -> bool:
    """Does a node's result not depend on masked scores?"""
    rule = find_rule(node) if node.op == "call_function" else None
    return rule is not None and rule.visible_only


def entries_in(user: Node, value: Node, entries: Band) -> Band | None:
    """Find the places of an operand's entries in a result; None if they are unknown. The result must have
    each of them in one place."""
    if user.op != "call_function" or not isinstance(value_of(user), torch.Tensor):
        return None
    known, rule = Placed(value, entries), find_rule(user)
    if isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags:
        moved = broadcast_value(value, user, known)
    elif form_of(user) is Form.CAST:
        moved = entries
    elif rule is not None and rule.mask is not None and (is_view(user) or form_of(user) is Form.COPY):
        moved = rule.mask(user, known)
    else:
        return None
    return moved if isinstance(moved, Band) else None


def is_constant_at(entries: Band, band: Abstract, fillings: tuple[object, ...]) -> bool:
    """Are these entries outside a band and filled with one of some numbers, without a condition on a call?"""
    if not isinstance(band, Band) or band.assumes or band.visibility_masks != ():
        return False
    low, high = entries.lo, entries.hi
    if (band.row, band.key) == (entries.key, entries.row):
        low, high = -high, -low
    elif (band.row, band.key) != (entries.row, entries.key):
        return False
    filled = not isinstance(band.outside, bool) and band.outside in fillings
    return filled and (low > band.hi or high < band.lo)


def drop(graph: Graph, node: Node) -> None:
    """Write zeros in place of a value, or remove it where it is added."""
    for user in list(node.users):
        others = [a for a in user.args if a is not node]
        adds = user.target is aten.add.Tensor and not user.kwargs and len(others) == 1
        if adds and isinstance(others[0], Node) and are_alike(others[0], user):
            user.replace_all_uses_with(others[0])
            graph.erase_node(user)
    value, write = value_of(node), Writing(graph, node)
    sizes = [write.sizes.written(s, node) for s in value.shape] if node.users else [None]
    if None not in sizes:
        zeros = write(aten.full.default, sizes, 0, value=value)
        zeros.kwargs = dict(dtype=value.dtype, device=value.device)
        node.replace_all_uses_with(zeros)

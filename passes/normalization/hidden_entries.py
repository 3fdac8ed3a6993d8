"""What a relative shift takes from neighbouring rows is left out where a mask hides it.

Transformer-XL's shift by reshapes puts entries of the next row where keys are later than the query. A causal
mask replaces them, and their gradient is zero: so neither is computed, if the mask is proved to be there for
every call. Otherwise they stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import arguments, is_equal, value_of
from ..mask_analysis.domains import EMPTY, Abstract, Band, Indicator, is_zero_outside
from ..mask_analysis.evaluation import evaluate
from ..mask_analysis.operands import broadcast_value
from ..phases import check_time
from ..rules import find_rule, form_of
from ..rules.facets import Form
from .writing import Writing

aten = torch.ops.aten
SAME_ENTRIES = (Form.ALIAS, Form.COPY, Form.CAST, Form.RESHAPE, Form.EXPAND, Form.UNSQUEEZE, Form.SQUEEZE)


def drop_hidden_shifts(graph: Graph) -> None:
    """Leave out relative shifts of neighbouring rows of which nothing is read, or that are zero."""
    shifts = [n for n in graph.nodes if form_of(n) is Form.SKEWED and arguments(n)["rows"] != 0]
    masks = evaluate(graph) if shifts else {}
    for node in shifts:
        if is_zero(node, masks) or is_hidden(node, masks):
            drop(graph, node)


@dataclass(frozen=True)
class Placed:
    """Where some entries are in an operand, for the functions that move masks."""

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
    """Is the gradient of entries of neighbours, or what else goes back to them, zero?"""
    given = arguments(node)
    x, dim, offset = given["x"], given["dim"], given["offset"]
    if given["step"] != 1 or not isinstance(offset, int):
        return False
    low, made = offset - given["rows"], value_of(node).shape[dim + 1]
    read = Band(dim, dim + 1, low, low + made - 1 if isinstance(made, int) else math.inf, 0.0, ())
    band = masks.get(x)
    return is_zero_outside(band) and is_beside(read, band)


def is_hidden(node: Node, masks: Mapping[Node, Abstract]) -> bool:
    """Does nothing depend on the entries that are not zero, because a mask replaces them?"""
    given = arguments(node)
    dim, offset, read = given["dim"], given["offset"], value_of(given["x"]).shape[given["dim"] + 1]
    if given["step"] != -1 or not isinstance(offset, int):
        return False
    high = read - 1 - offset if isinstance(read, int) else math.inf
    found, stack = {node}, [(node, Band(dim, dim + 1, -offset, high, 0.0, ()))]
    while stack:
        check_time()
        value, entries = stack.pop()
        band = masks.get(value)
        known = isinstance(band, Band) and is_beside(entries, band)
        if known and (is_zero_outside(band) or band.outside == -math.inf):
            continue
        for user in value.users:
            rule = find_rule(user) if user.op == "call_function" else None
            if known and band.outside in EMPTY and rule is not None and rule.visible_only:
                continue
            moved = entries_in(user, value, entries)
            if moved is None:
                return False
            if user not in found:
                found.add(user)
                stack.append((user, moved))
    return True


def entries_in(user: Node, value: Node, entries: Band) -> Band | None:
    """Where entries of an operand are in a result that has each of them in one place; None if unknown."""
    if user.op != "call_function" or not isinstance(value_of(user), torch.Tensor):
        return None
    known, rule = Placed(value, entries), find_rule(user)
    if isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags:
        moved = broadcast_value(value, user, known)
    elif rule is not None and rule.mask is not None and form_of(user) in SAME_ENTRIES:
        moved = broadcast_value(value, user, known) if form_of(user) is Form.CAST else rule.mask(user, known)
    else:
        return None
    return moved if isinstance(moved, Band) else None


def is_beside(entries: Band, band: Band) -> bool:
    """Are entries outside of a band, which no condition on a call must hold for?"""
    if band.assumes or band.visibility_masks != ():
        return False
    low, high = entries.lo, entries.hi
    if (band.row, band.key) == (entries.key, entries.row):
        low, high = -high, -low
    elif (band.row, band.key) != (entries.row, entries.key):
        return False
    return low > band.hi or high < band.lo


def drop(graph: Graph, node: Node) -> None:
    """Write zeros in place of a value, or nothing where it is added."""
    for user in list(node.users):
        others = [a for a in user.args if a is not node]
        adds = user.target is aten.add.Tensor and not user.kwargs and len(others) == 1
        if adds and isinstance(others[0], Node) and has_shape_of(others[0], user):
            user.replace_all_uses_with(others[0])
            graph.erase_node(user)
    value, write = value_of(node), Writing(graph, node)
    sizes = [write.sizes.written(s, node) for s in value.shape] if node.users else [None]
    if None not in sizes:
        zeros = write(aten.full.default, sizes, 0, value=value)
        zeros.kwargs = dict(dtype=value.dtype, device=value.device)
        node.replace_all_uses_with(zeros)


def has_shape_of(a: Node, b: Node) -> bool:
    sizes = value_of(a).shape, value_of(b).shape
    return (
        len(sizes[0]) == len(sizes[1])
        and all(map(is_equal, *sizes))
        and value_of(a).dtype == value_of(b).dtype
    )

"""Values of a graph that are zero together: a mask, whether it is true anywhere, a count of its rows.

Each step goes from a value to one that is zero exactly when the first is, so that two values with the
same end are zero together. Calls are recognized by their names: Dynamo's spellings and ATen's are read
alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .rules.forward import mutated
from .rules.named_calls import CASTS, COMPARISONS, COUNTS, NEGATIONS, PICKS, TOTALS, TURNS, VIEWS, name_of


@dataclass(frozen=True)
class Entries:
    """Entries of a value: all, those at one place of a dimension, or those that equal a number.

    at      the dimension, and the place in it
    number  the number that entries are compared with
    """

    node: Node
    at: tuple[int, int] | None = None
    number: int | None = None

    def mask(self) -> Node:
        """Build a value that is zero where these entries are."""
        if self.number is not None:
            return called(operator.eq, self.node, self.number)
        if self.at is None:
            return self.node
        dim, place = self.at
        return called(operator.getitem, self.node, (*[slice(None)] * dim, place))


def called(function: Callable, node: Node, given: Any) -> Node:
    made = node.graph.call_function(function, (node, given))
    made.meta["example_value"] = function(node.meta["example_value"], given)
    return made


def zeros_of(entries: Entries) -> tuple[Entries, list[Node]]:
    """Find the first entries that are zero together with these, and the values on the way."""
    way = [entries.node]
    while (before := one_before(entries)) is not None:
        entries = before
        way.append(entries.node)
    return entries, way


def condition_of(node: Node) -> tuple[Entries, list[Node], bool]:
    """Find the entries that a condition tests, the values on the way, and its result if they are zero."""
    source = first_operand(node)
    if source is not None and name_of(node) in NEGATIONS and value_of(node).dtype is torch.bool:
        entries, way, if_zero = condition_of(source)
        return entries, [node, *way], not if_zero
    if source is not None and compared(node) in (("eq", 0), ("le", 0), ("lt", 1)) and is_counted(source):
        entries, way = zeros_of(Entries(source))
        return entries, [node, *way], True
    return *zeros_of(Entries(node)), False


def are_written(way: Sequence[Node], nodes: Iterator[Node]) -> bool:
    """Does a node write into the memory of one of these values?"""
    memory = {storage_of(n) for n in way} - {None}
    written = map(mutated, nodes)
    return any(value is not None and storage_of(value) in memory for value in written)


def one_before(entries: Entries) -> Entries | None:
    """Find the entries of an operand that are zero exactly when these are, or None."""
    node, at, name = entries.node, entries.at, name_of(entries.node)
    source = first_operand(node)
    if source is None:
        return None
    if entries.number is not None:
        return replace(entries, node=source) if at is None and name in VIEWS | TURNS else None
    if name in VIEWS:
        return Entries(source) if at is None else None
    if name in TURNS:
        return Entries(source, turned(node, at))
    if name in CASTS:
        return Entries(source, at) if casts_to_zero_alone(source, value_of(node).dtype) else None
    if name in PICKS:
        picked = picked_place(node, value_of(source))
        return Entries(source, picked) if at is None and picked else None
    if name in TOTALS:
        return before_total(node, source, at)
    if name in COUNTS:
        return before_count(node, source, at)
    return before_comparison(node, source, at)


def before_comparison(node: Node, source: Node, at: tuple[int, int] | None) -> Entries | None:
    comparison, number = compared(node)
    same = comparison == "ne" and number == 0
    same |= (comparison, number) in (("gt", 0), ("ge", 1)) and is_counted(source)
    same |= (comparison, number) == ("eq", 1) and is_binary(source)
    if same:
        return Entries(source, at)
    told = comparison == "eq" and at is None and isinstance(number, int)
    return Entries(source, number=number) if told else None


def before_count(node: Node, source: Node, at: tuple[int, int] | None) -> Entries | None:
    """Find the entries that a count counts: those of the counted value that equal a number. Returns None for
    a place along another dimension than the last, and for a count of weights."""
    if at is None or at[0] != value_of(node).dim() - 1 or name_of(node) == "bincount" and is_weighted(node):
        return None
    return Entries(source, number=at[1])


def before_total(node: Node, source: Node, at: tuple[int, int] | None) -> Entries | None:
    if name_of(node) == "sum" and not (is_wide(value_of(node).dtype) and is_counted(source)):
        return None
    if at is None:
        return Entries(source)
    rank, given = value_of(source).dim(), node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if given is None:
        return None
    over = {d % rank for d in ([given] if isinstance(given, int) else given)}
    kept = value_of(node).dim() == rank
    dim = at[0] if kept else [d for d in range(rank) if d not in over][at[0]]
    return None if dim in over else Entries(source, (dim, at[1]))


def turned(node: Node, at: tuple[int, int] | None) -> tuple[int, int] | None:
    """Find the place in the operand of a node that rearranges dimensions."""
    if at is None:
        return None
    rank, given = value_of(node).dim(), [*node.args[1:], *node.kwargs.values()]
    if name_of(node) == "permute":
        order = given[0] if isinstance(given[0], (tuple, list)) else given
        return order[at[0]] % rank, at[1]
    one, other = (d % rank for d in given or (0, 1))
    return {one: other, other: one}.get(at[0], at[0]), at[1]


def picked_place(node: Node, value: torch.Tensor) -> tuple[int, int] | None:
    """Return the dimension and the place that an index picks, if it picks one place of one dimension."""
    if name_of(node) == "select":
        dim, place = node.args[1:3] if len(node.args) == 3 else (None, None)
    else:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        places = [(d, i) for d, i in enumerate(index) if i != slice(None)]
        dim, place = places[0] if len(places) == 1 else (None, None)
    if type(dim) is not int or type(place) is not int or place < 0:
        return None
    return dim % value.dim(), place


def compared(node: Node) -> tuple[str, Any]:
    """Return the name of a comparison with a number, and the number."""
    name, given = name_of(node), [*node.args[1:], *node.kwargs.values()]
    number = given[0] if len(given) == 1 and isinstance(given[0], (bool, int, float)) else None
    return COMPARISONS.get(name, name), number


def is_counted(node: Node) -> bool:
    """Is a value a count or a boolean, with no number below zero or between zero and one?"""
    source, name = first_operand(node), name_of(node)
    if is_binary(node) or name == "count_nonzero" or name == "bincount" and not is_weighted(node):
        return True
    if source is None or name in CASTS and not casts_to_zero_alone(source, value_of(node).dtype):
        return False
    kept = name in VIEWS | TURNS | CASTS | PICKS or name == "sum" and is_wide(value_of(node).dtype)
    return kept and is_counted(source)


def is_binary(node: Node) -> bool:
    """Is every number of a value zero or one?"""
    value, source = value_of(node), first_operand(node)
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool or name_of(node) == "one_hot":
        return True
    return name_of(node) in VIEWS | TURNS | CASTS | PICKS and source is not None and is_binary(source)


def casts_to_zero_alone(source: Node, dtype: torch.dtype) -> bool:
    """Does a cast to a data type turn only zero into zero?"""
    return is_binary(source) or (is_wide(dtype) and not value_of(source).is_floating_point())


def is_wide(dtype: torch.dtype) -> bool:
    """Can a data type hold counts without making any number but zero zero?"""
    return dtype.is_floating_point or dtype in (torch.bool, torch.int64)


def is_weighted(node: Node) -> bool:
    """Does ``bincount`` sum weights instead of counting?"""
    return "weights" in node.kwargs or len(node.args) > 1 and isinstance(node.args[1], Node)


def first_operand(node: Node) -> Node | None:
    """Return the first operand of a call, if both are tensors; otherwise None."""
    source = node.args[0] if node.op in ("call_function", "call_method") and node.args else None
    tensors = isinstance(source, Node) and all(isinstance(value_of(n), torch.Tensor) for n in (node, source))
    return source if tensors else None


def value_of(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def storage_of(node: Node) -> int | None:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

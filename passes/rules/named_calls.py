"""Properties of calls by their names alone, as Dynamo writes them, before they are ATen operators."""

from __future__ import annotations

from torch.fx import Node

PLACES_ALONG = {"topk": 2, "sort": 1, "max": 1, "argsort": 1, "argmax": 1}
"""Functions that tell places along a dimension, and which of their arguments that dimension is."""
WITH_VALUES = ("topk", "sort", "max")  # functions whose second result is the places
REARRANGING = frozenset(
    (
        *("flatten", "reshape", "view", "ravel", "squeeze", "unsqueeze", "permute", "transpose", "t"),
        *("contiguous", "clone", "detach", "expand", "long", "int", "getitem"),
    )
)
"""Functions that move the numbers of their first operand, or leave some of them out."""
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential")

# Functions whose numbers are zero where those of their operand are (passes/zero_values.py)
VIEWS = frozenset("flatten reshape view ravel squeeze unsqueeze contiguous clone detach alias".split())
TURNS = frozenset(("permute", "transpose", "t"))
CASTS = frozenset("to _to_copy type long int bool float double half bfloat16".split())
PICKS = frozenset(("getitem", "select"))
TOTALS = frozenset(("sum", "any", "count_nonzero"))
COUNTS = frozenset(("one_hot", "bincount"))
NEGATIONS = frozenset(("logical_not", "bitwise_not", "not_", "invert"))
COMPARISONS = {"greater": "gt", "greater_equal": "ge", "not_equal": "ne", "less": "lt", "less_equal": "le"}
"""The long name of a comparison → its short name, by which rules find it."""


def name_of(node: Node) -> str:
    """Return the name of a function, of a method, or of an ATen operator without its overload."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return target.partition(".")[0]


def places_along(node: Node) -> tuple[Node, int] | None:
    """Find the value, and its dimension, along which a node returns places. An example is the experts that
    `topk` picks. None for any other node."""
    second = name_of(node) == "getitem" and node.args[1:] == (1,)
    made = node.args[0] if second else node
    if not isinstance(made, Node) or not made.args or not isinstance(made.args[0], Node):
        return None
    name = name_of(made)
    if name not in PLACES_ALONG or (name in WITH_VALUES) is not second:
        return None
    given = made.args[PLACES_ALONG[name] :][:1]
    dim = made.kwargs.get("dim", given[0] if given else None if name == "argmax" else -1)
    return (made.args[0], dim) if isinstance(dim, int) else None


def lists_places(node: Node) -> bool:
    """Does a node list the places where a value is not zero?"""
    return name_of(node) in ("where", "nonzero", "argwhere")


def is_random(node: Node) -> bool:
    """Does the name of a function say that it draws random numbers?"""
    return any(part in name_of(node) for part in RANDOM)

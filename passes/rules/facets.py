"""Facets of a row of the operator table: properties of its op beside its signature.

Every facet is optional. An absent one means *unknown*, and unknown is safe: no pruning, no fusing, not
linear.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node


class CostClass(enum.Enum):
    """The cost of an op beside its neighbours, once Inductor has fused what it can."""

    PRODUCT = "product"  # a matrix product or attention: arithmetic at the device's rate
    KERNEL = "kernel"  # a kernel of its own, which reads its operands from memory and writes its result there
    SCATTER = "scatter"  # a kernel that adds few rows into its result: a sum of it costs only those rows
    FUSED = "fused"  # computed inside the kernel of a neighbour
    VIEW = "view"  # takes no memory and no time
    FREE = "free"  # a constant or a size


class Form(enum.Enum):
    """The operation behind a spelling, for rewrites that look for a pattern. Several ops can have one
    form."""

    ALIAS = "alias"  # the same values in the same memory
    COPY = "copy"  # the same values
    CAST = "cast"  # the same values in another dtype
    ASSIGN = "assign"  # the second argument, in the shape of the first
    RESHAPE = "reshape"
    EXPAND = "expand"
    UNSQUEEZE = "unsqueeze"
    SQUEEZE = "squeeze"
    SLICE = "slice"
    JOINED = "joined"  # values concatenated along a dimension
    FLIP = "flip"
    RECEPTIVE_FIELDS = "receptive fields"  # the rows of a value that each token reads, one after another
    SKEWED = "skewed"  # columns of each row shifted by the row's place: ``streambp.skewed``
    MATRIX_PRODUCT = "matrix product"  # of its last two operands, by its equation; one before is added
    SUM = "sum"
    LARGEST = "largest"  # without the places
    LEAST = "least"
    MAXIMUM = "maximum"  # along a dimension, with the places
    MINIMUM = "minimum"
    TO_EXTREME = "to extreme"  # the gradient of either
    EQUAL = "equal"
    COMPARED = "compared"  # larger, less, or not equal
    SOFTMAX = "softmax"
    SAFE_SOFTMAX = "safe softmax"  # zero where all scores are masked
    LOG_SOFTMAX = "log softmax"
    SOFTMAX_BACKWARD = "softmax backward"
    LOG_SOFTMAX_BACKWARD = "log softmax backward"
    SCATTER = "scatter"  # values of a tensor put where an index says
    SORT = "sort"  # ascending, unless its argument ``descending`` is set; with the places
    FLOOR_DIVIDE = "floor divide"
    COUNT = "count"  # how often each number occurs: a histogram
    RUNNING_SUM = "running sum"
    LOOK_UP = "look up"  # rows picked by index tensors
    LOOK_UP_ALONG = "look up along"  # rows picked along a dimension by an index
    PUT_ROWS = "put rows"  # rows written, or added, at index tensors
    ADD_ROWS = "add rows"  # rows added along a dimension at an index
    PLACES = "places"  # places where a mask is true, one row for each
    CREATED = "created"  # a constant or uninitialised value, given a tensor or strides to be like
    RANGE = "range"  # start, start + step, …
    FULL = "full"  # one number everywhere
    RANDOM = "random"  # uniform numbers in [0, 1)
    GROUPED_PRODUCT = "grouped product"  # sorted rows times a weight per group, or its gradient
    GROUPED_PRODUCT_BACKWARD = "grouped product backward"
    ATTENTION = "attention"  # ``streambp.attention``
    ATTENTION_BACKWARD = "attention backward"
    FUSED_ATTENTION = "fused attention"  # one of torch's kernels, which is written as ``streambp.attention``
    FUSED_ATTENTION_BACKWARD = "fused attention backward"


@dataclass(frozen=True)
class Scan:
    """The way in which a scan over tokens continues from one chunk to the next.

    Its state is the last row of its result, or the last rows that it has read. One of ``join``,
    ``state`` and ``window`` says how the state is used.

    identity  the state before any row
    join      op that joins a state to the rows behind it: ``join(scan of the rows, state)``
    state     the argument of the scan itself that takes the state (an optional tensor, one row)
    window    the number of rows before a chunk that the scan reads, all of which are the state
    """

    identity: float
    join: Callable | None = None
    state: str | None = None
    window: int = 0

    @property
    def rows(self) -> int:
        """Rows of a state."""
        return self.window or 1


LOWEST, HIGHEST = -math.inf, math.inf  # the ends of any dtype: see `identity_of`


@dataclass(frozen=True)
class Merge:
    """A way to merge the results of a reduction over different tokens into the result over all of them.

    identity  the result of no rows; `LOWEST` and `HIGHEST` are the ends of any dtype
    join      op that merges two results
    """

    identity: float
    join: Callable

    def identity_of(self, dtype: torch.dtype) -> float:
        """Return the result of no rows in a dtype."""
        if dtype.is_floating_point or not math.isinf(self.identity):
            return self.identity
        if dtype is torch.bool:
            return float(self.identity == HIGHEST)
        limits = torch.iinfo(dtype)
        return limits.max if self.identity == HIGHEST else limits.min


@dataclass(frozen=True)
class Window:
    """A value whose rows are moved rows of another, and zero elsewhere. Row i is row ``i - by`` of the other
    for ``low <= i < high``. Rows are counted along one dimension."""

    source: Node
    by: int
    low: int
    high: int

    def of(self, inner: Window) -> Window:
        """Compose two windows: the same rows, where this window's source is itself a window."""
        return Window(
            inner.source,
            self.by + inner.by,
            max(self.low, inner.low + self.by),
            min(self.high, inner.high + self.by),
        )


Windows = Iterator[tuple[int, Window]]  # for each dimension along which a node is a window of an operand


@dataclass(frozen=True)
class Linear:
    """The operands in which an op is linear, as a sum of products of arguments: ``"self + mat1 * mat2"``. An
    op keeps a tangent linear under three conditions. Every term of one factor is linear in the tangent or
    zero. Every term of several factors has exactly one that is linear in it. No other argument depends on
    it."""

    terms: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(text: str) -> Linear:
        return Linear(tuple(tuple(f.strip() for f in term.split("*")) for term in text.split("+")))

    @property
    def names(self) -> frozenset[str]:
        """The arguments in its terms."""
        return frozenset(name for term in self.terms for name in term)

    def __str__(self) -> str:
        return " + ".join(" * ".join(term) for term in self.terms)

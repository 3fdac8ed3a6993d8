"""What a row of the operator table can say of its op, beside its signature.

Every facet is optional. An absent one means *unknown*, and unknown is safe: no pruning, no fusing, not
linear.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node


class CostClass(enum.Enum):
    """What an op costs beside its neighbours, once Inductor has fused what it can."""

    PRODUCT = "product"  # a matrix product or attention: arithmetic at the device's rate
    KERNEL = "kernel"  # a kernel of its own, which reads its operands from memory and writes its result there
    SCATTER = "scatter"  # a kernel that adds few rows into its result: a sum of it costs only those rows
    FUSED = "fused"  # computed inside the kernel of a neighbour
    VIEW = "view"  # takes no memory and no time
    FREE = "free"  # a constant or a size


class Form(enum.Enum):
    """The operation behind a spelling, for rewrites that look for a pattern: several ops can have one
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
    SPLIT = "split"  # into slices along a dimension
    JOINED = "joined"  # values behind one another
    FLIP = "flip"
    SKEWED = "skewed"  # columns of each row moved by its place: ``streambp.skewed``
    MATRIX_PRODUCT = "matrix product"  # of its last two operands, by letters; what comes before them is added
    SUM = "sum"
    LARGEST = "largest"  # without the places
    LEAST = "least"
    MAXIMUM = "maximum"  # along a dimension, with the places
    MINIMUM = "minimum"
    TO_EXTREME = "to extreme"  # the gradient of either
    EQUAL = "equal"
    COMPARED = "compared"  # larger, less, or not equal
    SOFTMAX = "softmax"
    SAFE_SOFTMAX = "safe softmax"  # zero where all is masked
    LOG_SOFTMAX = "log softmax"
    SOFTMAX_BACKWARD = "softmax backward"
    LOG_SOFTMAX_BACKWARD = "log softmax backward"
    SCATTER = "scatter"  # values of a tensor put where an index says
    SORT = "sort"  # ascending but for its argument ``descending``, with the places
    FLOOR_DIVIDE = "floor divide"
    COUNT = "count"  # how often each number occurs: a histogram
    RUNNING_SUM = "running sum"
    LOOK_UP = "look up"  # rows picked by index tensors
    LOOK_UP_ALONG = "look up along"  # rows picked along a dimension by an index
    PUT_ROWS = "put rows"  # rows written, or added, at index tensors
    ADD_ROWS = "add rows"  # rows added along a dimension at an index
    PLACES = "places"  # where a mask is true, as many rows as there are such places
    CREATED = (
        "created"  # a constant, or nothing in particular, that is also given a tensor or strides to be like
    )
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
    """How a scan over tokens goes on from one chunk to the next. Its state is the last row of its result, or
    the last rows that it has read.

    identity  the state of no rows
    join      op that joins a state to the rows behind it: ``join(scan of the rows, state)``
    state     or the argument of the scan itself that takes the state (an optional tensor, one row)
    window    or the number of rows before a chunk that it reads, all of which are the state
    """

    identity: float
    join: Callable | None = None
    state: str | None = None
    window: int = 0

    @property
    def rows(self) -> int:
        """Rows of a state."""
        return self.window or 1


Running = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""Earlier rows with later ones; of what picks a row, what else is given of each row as well."""

LOWEST, HIGHEST = -math.inf, math.inf  # of any dtype: see `identity_of`


@dataclass(frozen=True)
class Merge:
    """How the results of a reduction over some tokens and over others become that over all of them.

    identity  the result of no rows; `LOWEST` and `HIGHEST` are the ends of any dtype
    join      op that merges two results
    """

    identity: float
    join: Callable

    def identity_of(self, dtype: torch.dtype) -> float:
        """The result of no rows in a dtype."""
        if dtype.is_floating_point or not math.isinf(self.identity):
            return self.identity
        if dtype is torch.bool:
            return float(self.identity == HIGHEST)
        limits = torch.iinfo(dtype)
        return limits.max if self.identity == HIGHEST else limits.min


@dataclass(frozen=True)
class Window:
    """Row i of a value is row ``i - by`` of another for ``low <= i < high``, and zero elsewhere (rows along
    one dimension)."""

    source: Node
    by: int
    low: int
    high: int

    def of(self, inner: Window) -> Window:
        """The same rows, seen through another window."""
        return Window(
            inner.source,
            self.by + inner.by,
            max(self.low, inner.low + self.by),
            min(self.high, inner.high + self.by),
        )


Windows = Iterator[tuple[int, Window]]  # for each dimension along which a node is a window of an operand


@dataclass(frozen=True)
class Linear:
    """In which operands an op is linear: a sum of products of the arguments named, ``"self + mat1 * mat2"``.

    An op keeps a tangent linear if every term of one factor is linear in the tangent or zero, every term of
    several factors has exactly one that is linear in it, and no other argument depends on it.
    """

    terms: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(text: str) -> Linear:
        return Linear(tuple(tuple(f.strip() for f in term.split("*")) for term in text.split("+")))

    @property
    def names(self) -> frozenset[str]:
        """The arguments that it speaks of."""
        return frozenset(name for term in self.terms for name in term)

    def __str__(self) -> str:
        return " + ".join(" * ".join(term) for term in self.terms)

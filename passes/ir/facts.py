"""Facts about a graph: token dimensions of values, reaches of operands, kinds of nodes, signatures of ops.

Row ``t`` of an output reads rows ``t+lo … t+hi`` of an operand. That interval is the *reach* of the
operand's edge (loop tiling over tokens, arXiv 2506.03077, section 3).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from .values import Size, hint, quotient


class Role(enum.Enum):
    """The part of an operand that a node reads."""

    ROWS = "rows"  # the rows of the chunk itself
    KEYS = "keys"  # the key range of the chunk
    HALO = "halo"  # a finite or infinite range of rows around the chunk, or shifted rows (reach ``[k,k]``)
    CARRY = "carry"  # the rows of the chunk, and the state of a scan before them
    WHOLE = "whole"  # the value as it is (shared, summed)

    def __str__(self) -> str:
        return self.value


class Kind(enum.Enum):
    """The kind of result that a node computes from rows of tokens."""

    ROWS = "rows"  # one output row per token
    SUM = "sum"  # adds up over chunks
    KEYSUM = "keysum"  # adds up per key
    WHOLE = "whole"  # no tokens at all
    MIXED = "mixed"  # several outputs, each with a kind of its own
    ALL = "all"  # needs the rows of all chunks at once

    def __str__(self) -> str:
        return self.value


class Contraction(enum.Enum):
    """The way in which a contracted label that carries tokens may be computed."""

    SUM = "sum"  # its entries may be added up over chunks
    PICKED = "picked"  # the same, if the rule's ``emit`` looks rows up by their place among all tokens
    ALL = "all"  # all its entries are needed at once

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Reach:
    """The rows of an operand that one output row reads, relative to it (tokens, both ends included)."""

    lo: float
    hi: float

    def __add__(self, other: Reach) -> Reach:
        return Reach(self.lo + other.lo, self.hi + other.hi)

    def __neg__(self) -> Reach:
        """Return the reach of the gradient: the rows that read this row, in place of those that it reads."""
        return Reach(-self.hi, -self.lo)

    def join(self, other: Reach) -> Reach:
        return Reach(min(self.lo, other.lo), max(self.hi, other.hi))

    def looks_back(self) -> bool:
        return self.hi <= 0

    def looks_ahead(self) -> bool:
        return self.lo >= 0

    def __str__(self) -> str:
        def end(x: float) -> str:
            return f"{x:+}" if math.isinf(x) else f"{int(x)}"

        return f"[{end(self.lo)},{end(self.hi)}]"


HERE = Reach(0, 0)
PAST = Reach(-math.inf, 0)
FUTURE = Reach(0, math.inf)
EVERYWHERE = Reach(-math.inf, math.inf)


@dataclass(frozen=True)
class Mark:
    """One dimension that carries tokens, with ``inner`` rows for each block of ``block`` tokens.

    Entry ``(o * N + n) * inner + i`` belongs to block ``n``, which holds the tokens from ``block * n``
    to before ``block * (n + 1)``. The last block may have fewer tokens, but has all its rows. With
    blocks of one token, ``n`` is the token.

    outer      sequences that share the dimension, at the sizes for which the graph was traced
    sequences  their number as a size of the graph, where it may change between calls; None: ``outer``
    """

    dim: int
    outer: int = 1
    inner: int = 1
    block: int = 1
    sequences: Size | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """Does the dimension have exactly one row for each token?"""
        return self.outer == self.inner == self.block == 1

    @property
    def step(self) -> int:
        """Rows of one block, over all sequences that share the dimension, at the traced sizes."""
        return self.outer * self.inner

    @property
    def outer_size(self) -> Size:
        """Sequences that share the dimension, at any size."""
        return self.outer if self.sequences is None else self.sequences

    @property
    def step_size(self) -> Size:
        """Rows of one block, over all sequences that share the dimension, at any size."""
        return self.outer_size * self.inner

    def located(self, size: Size, tokens: Size) -> tuple[Mark, int, Size]:
        """Relate a dimension of this size to a number of tokens. Returns the mark with its number of
        sequences, the rows that the dimension has beyond those of the tokens (negative: missing), and the
        entries that this leaves over: 0, or a size that the caller checks."""
        excess = hint(size) // self.step - self.count(hint(tokens))
        if self.outer == 1 and isinstance(tokens, int):
            return self, excess, 0
        rows = (self.count(tokens) + excess) * self.inner
        several = None if self.outer == 1 else quotient(size, rows)
        found = self if several is None or isinstance(several, int) else replace(self, sequences=several)
        return found, excess, size - rows * found.outer_size

    def count(self, tokens: Any) -> Any:
        """Count the blocks that a number of tokens fills; the last block may be short."""
        return tokens if self.block == 1 else -(-tokens // self.block)

    def size(self, tokens: Any) -> Any:
        """Compute the size of the dimension for a number of tokens."""
        return self.count(tokens) * self.step

    def at(self, sizes: Callable[[Size], int]) -> Mark:
        """Return the mark at the sizes of one call."""
        return self if self.sequences is None else replace(self, outer=sizes(self.sequences), sequences=None)

    def moved(self, dim: int) -> Mark:
        """Return the mark of the same rows in another dimension."""
        return replace(self, dim=dim)

    def grouped(self, rows: int) -> Mark:
        """Group the same rows into larger blocks, each a multiple of ``rows`` rows. With ``rows == 1``, the
        blocks become the smallest possible."""
        inner = self.inner // math.gcd(self.inner, self.block) if rows == 1 else math.lcm(self.inner, rows)
        return replace(self, inner=inner, block=self.block * inner // self.inner)


@dataclass(frozen=True)
class Tokens:
    """A value with one row per token and, for scores and masks, one column per key. ``lo`` and ``hi`` say
    which tokens have a row: ``lo <= t < T + hi``. A value shifted by slicing has fewer than T rows."""

    rows: Mark
    keys: Mark | None = None
    lo: int = 0
    hi: int = 0

    def pattern(self, rank: int) -> str:
        """Format the shape as a person writes it: ``b [t] d``, ``(b [t]) d``, ``b h [t] {t}``."""
        names = []
        for i in range(rank):
            if i == self.rows.dim:
                name = "[t]" if self.rows.block == 1 else f"[t/{self.rows.block}]"
                if self.rows.outer != 1:
                    name = f"(b {name})"
                if self.rows.inner != 1:
                    name = f"({name} {self.rows.inner})"
            elif self.keys is not None and i == self.keys.dim:
                name = "{t}"
            else:
                name = "bhdefg"[i] if i < 6 else "x"
            names.append(name)
        domain = (
            "" if (self.lo, self.hi) == (0, 0) else f"  rows {self.lo}…T{f'{self.hi:+}' if self.hi else ''}"
        )
        return " ".join(names) + domain


@dataclass(frozen=True)
class Shared:
    """A value without tokens: a weight, a constant, or a result computed from these alone."""

    def pattern(self, rank: int) -> str:
        return "shared"


@dataclass(frozen=True)
class Summed:
    """A value whose rows have been added up, or that is computed from such sums."""

    def pattern(self, rank: int) -> str:
        return "sum"


Fact = Tokens | Shared | Summed

Label = object
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class Signature:
    """A rule's description of one node: a label for every dimension of its operands and outputs.

    An operand dimension is tied to the output dimension of the same label. A label that no output has is
    contracted. ``None`` marks a dimension tied to no other (size one, broadcast).

    reach      label → rows read along it, where that is more than the own row
    contracts  a `Contraction`, or its value: how a contracted label that carries tokens may be computed
    sums       contracted labels that may be added up over chunks, whatever ``contracts`` says of the
               others
    rows/keys  labels of queries and keys, for an operator that is attention by itself
    reshape    the node moves rows between dimensions; ties come from the sizes
    offsets    label → an offset k for each operand: output row j reads row j+k along it (slices and
               padding)
    uniform    all rows are equal (a constant), so that a shift does not matter
    placed     labels along which the op identifies rows by their place, so that it cannot compute fewer
               rows
    indexed    labels along which an operand's numbers index entries (these labels are ``placed`` as
               well). Rows along them all exist at once; keys along them are counted from the first of
               all
    blocks     rows of a block along labels of the operands, and of the outputs, where these differ
    """

    operands: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    reach: Mapping[Label, Reach] = field(default_factory=dict)
    contracts: Contraction | str = Contraction.SUM
    sums: frozenset[Label] = frozenset()
    rows: Label = None
    keys: Label = None
    reshape: bool = False
    offsets: Mapping[Label, tuple[int, ...]] = field(default_factory=dict)
    uniform: bool = False
    placed: frozenset[Label] = frozenset()
    indexed: frozenset[Label] = frozenset()
    blocks: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Convert ``contracts`` to a `Contraction`, and add ``indexed`` to ``placed``. Raises ValueError for
        a contraction that does not exist."""
        object.__setattr__(self, "contracts", Contraction(self.contracts))
        object.__setattr__(self, "placed", self.placed | self.indexed)

    def mixes(self, label: Label) -> bool:
        """Does a row along this label read rows other than its own, or depend on the place of any row?"""
        moved = label in self.reach or label in self.placed or any(self.offsets.get(label, ()))
        return label is not None and (moved or label == self.keys)


@dataclass(frozen=True)
class Edge:
    """One operand of a node, the part of it that the node reads, and its reach."""

    operand: Node
    role: Role
    reach: Reach = HERE

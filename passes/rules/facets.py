"""What a row of the operator table can say of its op, beside its signature.

Every facet is optional. An absent one means *unknown*, and unknown is safe: no pruning, no fusing, not
linear.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CostClass(enum.Enum):
    """What an op costs beside its neighbours, once Inductor has fused what it can."""

    PRODUCT = "product"  # a matrix product or attention: arithmetic at the device's rate
    KERNEL = "kernel"  # a kernel of its own, which reads its operands from memory and writes its result there
    FUSED = "fused"  # computed inside the kernel of a neighbour
    VIEW = "view"  # takes no memory and no time
    FREE = "free"  # a constant or a size


@dataclass(frozen=True)
class Scan:
    """How a scan over tokens goes on from one chunk to the next.

    join      op that joins a state to the rows behind it
    identity  the state of no rows
    """

    join: object
    identity: float


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

    def __str__(self) -> str:
        return " + ".join(" * ".join(term) for term in self.terms)

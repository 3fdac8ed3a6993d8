"""Assumptions on sizes from tracing a chunk body, as a condition on its inputs.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from .body_inputs import BodyInputs


@dataclass(frozen=True)
class Place:
    """The place of a size among the inputs of a body: an integer, or a dimension of a tensor."""

    index: int
    dim: int | None = None

    def of(self, args: Sequence[object]) -> int:
        return args[self.index] if self.dim is None else args[self.index].shape[self.dim]

    def __str__(self) -> str:
        return f"args[{self.index}]" if self.dim is None else f"args[{self.index}].shape[{self.dim}]"


def places_of(values: Sequence[object]) -> dict[object, Place]:
    """Find the place of every symbol that is an input, or a size of one. Symbols that tracing found equal to
    another, and replaced, are included: earlier conditions still name them."""
    numbers = {
        e: Place(i)
        for i, v in enumerate(values)
        if isinstance(v, torch.SymInt)
        for e in (v.node.expr, v.node._expr)
    }
    sizes = {
        e: Place(i, d)
        for i, v in enumerate(values)
        if isinstance(v, torch.Tensor)
        for d, s in enumerate(v.shape)
        if isinstance(s, torch.SymInt)
        for e in (s.node.expr, s.node._expr)
    }
    return {**sizes, **numbers}


def conditions_of(inputs: BodyInputs) -> str:
    """Write the conditions on sizes under which a body was compiled, as Python text about ``args``.

    args  the body's inputs

    Conditions that a size differs from another are left out: code for sizes that differ is right for
    equal ones too (in the chunk that reads all keys, for one). Conditions that a size is neither 0 nor 1
    are kept: such sizes are broadcast or empty.
    """
    places = places_of(inputs.values)
    conditions = dict.fromkeys(g.expr for g in inputs.env.guards)
    kept = [c for c in conditions if not isinstance(c, sympy.Ne) or any(side in (0, 1) for side in c.args)]
    terms = [
        c.xreplace({s: sympy.Symbol(str(places[s]), integer=True) for s in c.free_symbols}) for c in kept
    ]
    return " and ".join(f"({PythonPrinter().doprint(term)})" for term in terms) or "True"


def guard_of(conditions: str) -> Callable[[Sequence[object]], bool]:
    """Compile conditions to a function of the inputs of a body."""
    return eval(f"lambda args: {conditions}", {"math": math})

"""Fake inputs of a chunk body, with a symbol for every size that may change.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..passes.ir import (
    ACCUMULATORS,
    OF_ROWS,
    Binding,
    BindingRole,
    Body,
    in_blocks,
    is_equal,
    is_expanded,
    layout_of,
    parted_name,
    strides_of_part,
    total_dtype,
)
from ..runtime.runner import source_value

POSITIONS = ("first", "offset")  # integers that are not sizes, and that are zero in the first chunk


class SizeArithmetic(PythonReferenceAnalysis):
    """Python's arithmetic of sizes, with fractions (``int(1.25 * tokens / experts)``). Torch's own arithmetic
    leaves fractions as expressions, which no operator takes."""

    @staticmethod
    def int_truediv(a, b):
        return a / b

    @staticmethod
    def trunc_to_int(x, dtype):
        return math.trunc(x)


class BodyInputs:
    """Fake inputs of a chunk body: every size that may change is a symbol of its own."""

    def __init__(self, body: Body, chunk: int, sizes: Mapping[object, int] = types.MappingProxyType({})):
        """Create the fake inputs.

        sizes  hints by the names of symbols, instead of those that the chunk length determines
        """
        self.env, self.known = ShapeEnv(duck_shape=False), sizes
        self.mode = FakeTensorMode(shape_env=self.env)
        self.symbols: dict[object, torch.SymInt] = {}
        chunk = max(chunk, 16)
        self.hints = {
            "rows": chunk,
            "keys": 4 * chunk + 7,
            "first": 3 * chunk + 7,
            "offset": 3 * chunk + 7,
            "length": 8 * chunk + 5,
        }
        self.values = [self.fake(b) for b in body.bindings]

    def symbol(self, name: object, size_hint: int) -> torch.SymInt:
        if name not in self.symbols:
            source = ConstantSource(f"streambp_{len(self.symbols)}")
            position = isinstance(name, str) and parted_name(name)[0] in POSITIONS
            size_hint = max(self.known.get(name, size_hint), 2)  # 0 and 1 would be constants
            symbol = self.env.create_symbol(
                size_hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=position
            )
            self.symbols[name] = self.env.create_symintnode(symbol, hint=size_hint, source=source)
        return self.symbols[name]

    def size(self, size):
        """Convert a size of the region's graph: symbols of that graph become symbols of this body."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr.is_Symbol:
            return self.symbol(expr, size.node.hint)
        names = sorted(expr.free_symbols, key=str)
        env = size.node.shape_env
        hints = (
            env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
        )  # the latter up to torch 2.11
        return sympy_interp(SizeArithmetic, {s: self.symbol(s, int(hints[s])) for s in names}, expr)

    def fake(self, binding: Binding):
        if binding.role is BindingRole.SCALAR:
            return self.scalar(binding)
        value = source_value(binding)
        in_total = binding.role in (*ACCUMULATORS, BindingRole.CARRY)
        sizes, strides = self.layout(binding, value, [self.size(s) for s in value.shape])
        return self.empty(sizes, strides, total_dtype(value.dtype) if in_total else value.dtype, value.device)

    def scalar(self, binding: Binding):
        if binding.source is not None:
            return self.size(binding.source.meta["val"])
        if binding.size is not None:
            return self.size(binding.size)
        return self.named(*parted_name(binding.name))

    def named(self, name: str, block: int = 1) -> torch.SymInt:
        """Return a number of a chunk, counted in blocks of ``block`` tokens."""
        return self.symbol(in_blocks(name, block), -(-self.hints[name] // block))

    def layout(self, binding: Binding, value: torch.Tensor, full: list) -> tuple[list, list]:
        """Compute the sizes and strides of a binding from the sizes of its value at full length."""
        mark, role = binding.mark, binding.role
        if role is BindingRole.CARRY:
            row = [*full[: mark.dim], binding.state_rows, *full[mark.dim + 1 :]]
            return row, contiguous_strides(row)
        if mark is None or role in (BindingRole.WHOLE, BindingRole.TOTAL):
            if role in ACCUMULATORS:
                return full, contiguous_strides(full)
            if is_expanded(value):
                return full, [self.size(s) for s in value.stride()]
            return full, layout_of(value).strides(full)
        return self.part(binding, value, full)

    def part(self, binding: Binding, value: torch.Tensor, full: list) -> tuple[list, list]:
        """Compute the sizes and strides of the rows or keys that a chunk reads of a value with tokens."""
        mark, role, of_rows = binding.mark, binding.role, binding.role in OF_ROWS
        length = self.named("length", mark.block)
        full[mark.dim] = length * self.size(mark.step_size)
        if binding.columns is not None and is_square(value, mark.dim, binding.columns.dim):
            full[binding.columns.dim] = full[mark.dim]
        summed = role is BindingRole.KEYTOTAL
        strides = contiguous_strides(full) if summed else layout_of(value).strides(full)
        if binding.columns is not None and role is BindingRole.ROWS:
            strides = strides_of_part(value, full)
        count = self.named("rows" if of_rows else "keys", mark.block)
        if binding.columns is not None:
            full[binding.columns.dim] = self.named("keys")
        before, after = full[: mark.dim], full[mark.dim + 1 :]
        if mark.step == 1 or not of_rows:
            return [*before, count, *after], strides
        step = strides[mark.dim]
        steps = [length * mark.inner * step, mark.inner * step, step]
        return (
            [*before, self.size(mark.outer_size), count, mark.inner, *after],
            [*strides[: mark.dim], *steps, *strides[mark.dim + 1 :]],
        )

    def empty(self, sizes, strides, dtype, device):
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def is_square(value: torch.Tensor, rows: int, columns: int) -> bool:
    """Has a matrix of tokens by tokens as many rows as columns, at every length?"""
    return is_equal(value.shape[rows], value.shape[columns])


def contiguous_strides(sizes) -> list:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return strides[::-1]

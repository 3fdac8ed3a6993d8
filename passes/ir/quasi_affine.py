"""Sizes that round a length to whole blocks: sums of multiples, remainders and quotients of it.

Such a size grows by the same number with every period of T. So it is ``a T`` plus a number for each
remainder of T, and this form is unique. ``T + (-T) % 8``, ``-(-T // 8) * 8`` and ``(T + 7) // 8 * 8`` all
have the same. isl calls these expressions quasi-affine.
"""

from __future__ import annotations

import functools
import math

import sympy
from torch.utils._sympy.functions import FloorDiv

ROUNDED = {"FloorToInt": 1, "TruncToInt": 1, "CeilToInt": -1}  # sign s: the quotient is s * (s * a // b)
LONGEST_PERIOD = 4096  # tokens; rounding to larger blocks stays as it is written


class ByRemainder(sympy.Function):
    """The number ``numbers[T % len(numbers)]``, of which the first is zero, and the next other one is 1."""

    nargs = 2  # T, numbers


@functools.lru_cache(4096)
def quasi_affine(expr: sympy.Expr) -> sympy.Expr:
    """Rewrite roundings in an expression of sizes in their unique form. Two expressions that differ only in
    how they round one symbol to blocks have the same result. A division without a remainder is carried
    out."""
    name = type(expr).__name__
    if expr.is_Add or expr.is_Mul:
        return expr.func(*map(quasi_affine, expr.args)).expand()
    if name in ROUNDED and type(expr.args[0]).__name__ == "IntTrueDiv":
        (given, by), sign = expr.args[0].args, ROUNDED[name]
        floors = name != "TruncToInt" or given.is_nonnegative and by.is_positive
        return sign * quasi_affine(FloorDiv(sign * given, by)) if floors else expr
    if name not in ("Mod", "PythonMod", "FloorDiv"):
        return expr
    given, by = map(quasi_affine, expr.args)
    rest = remainder(given, by)
    if rest is not None:
        return rest if name != "FloorDiv" else ((given - rest) / by).expand()
    exact = sympy.cancel(given / by)
    return exact if name == "FloorDiv" and exact.is_Integer else expr


def remainder(given: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
    """Compute ``given % by`` in its unique form. None unless ``by`` is a number and ``given`` rounds one
    symbol."""
    given = given.expand()
    atoms = given.atoms(ByRemainder)
    numbers = {atom: atom.args[1] for atom in atoms}
    (symbol, *others) = given.free_symbols or (None,)
    if symbol is None or others or not (by.is_Integer and by > 0):
        return None
    placeholders = {atom: sympy.Dummy() for atom in atoms}
    poly = given.subs(placeholders).as_poly(symbol, *placeholders.values())
    if poly is None or poly.total_degree() > 1 or not all(c.is_Rational for c in poly.coeffs()):
        return None
    slope = poly.coeff_monomial(symbol)
    period = math.lcm(*map(len, numbers.values()), (slope / by).q)
    if period > LONGEST_PERIOD:
        return None
    start = poly.coeff_monomial(1)
    parts = [(poly.coeff_monomial(placeholders[atom]), numbers[atom]) for atom in atoms]
    return by_remainder(
        symbol, [(start + slope * r + sum(k * n[r % len(n)] for k, n in parts)) % by for r in range(period)]
    )


def by_remainder(symbol: sympy.Symbol, numbers: list[sympy.Rational]) -> sympy.Expr:
    """Write a number for each remainder of a symbol, in the unique form of such numbers."""
    period = next(
        p
        for p in sorted(sympy.divisors(len(numbers)))
        if all(n == numbers[i % p] for i, n in enumerate(numbers))
    )
    first = numbers[0]
    unit = next((n - first for n in numbers if n != first), None)
    if unit is None:
        return first
    scaled = [(n - first) / unit for n in numbers[:period]]
    return first + unit * ByRemainder(symbol, sympy.Tuple(*scaled))


@functools.lru_cache(4096)
def is_zero(expr: sympy.Expr, guards: tuple[sympy.Expr, ...]) -> bool:
    """Is an expression zero, in the form of `quasi_affine`, for every remainder that the guards allow?

    guards  relations of sizes that hold; those of other symbols are ignored
    """
    (symbol, *others) = {atom.args[0] for atom in expr.atoms(ByRemainder)} or (None,)
    if symbol is None or others:
        return expr == 0
    values = by_each_remainder(expr)
    period, wrong = len(values), {r for r, value in enumerate(values) if value != 0}
    for guard in guards:
        known = allowed(guard).get(symbol, ())
        common = math.lcm(period, len(known)) if known else LONGEST_PERIOD + 1
        if wrong and common <= LONGEST_PERIOD:
            wrong = {r for r in range(common) if r % period in wrong and known[r % len(known)]}
            period = common
    return not wrong


@functools.lru_cache(4096)
def allowed(guard: sympy.Expr) -> dict[sympy.Symbol, tuple[bool, ...]]:
    """Tell for each remainder of a symbol whether a relation of it may hold. Empty for a relation of several
    symbols, or one that tells nothing about remainders."""
    guard = without_common_factors(guard)
    (symbol, *others) = guard.free_symbols or (None,)
    if not guard.is_Relational or others or not guard.has(sympy.Function):
        return {}
    found = quasi_affine(guard.lhs - guard.rhs)
    if not found.has(ByRemainder):
        return {}
    return {symbol: tuple(guard.func(value, 0) != sympy.false for value in by_each_remainder(found))}


def without_common_factors(guard: sympy.Expr) -> sympy.Expr:
    """Write ``a T % (a b) == 0`` as ``T % b == 0``. A reshape of several dimensions is guarded so."""
    if not guard.is_Equality or guard.rhs != 0 or type(guard.lhs).__name__ not in ("Mod", "PythonMod"):
        return guard
    given, by = sympy.cancel(guard.lhs.args[0] / guard.lhs.args[1]).as_numer_denom()
    return guard if by == 1 else guard.func(guard.lhs.func(given, by), 0)


@functools.lru_cache(4096)
def by_each_remainder(expr: sympy.Expr) -> list[sympy.Expr]:
    """Evaluate an expression for each remainder of its symbol, by the common period."""
    atoms = {atom: atom.args[1] for atom in expr.atoms(ByRemainder)}
    period = math.lcm(*map(len, atoms.values()))
    return [
        expr.xreplace({atom: numbers[r % len(numbers)] for atom, numbers in atoms.items()}).expand()
        for r in range(period)
    ]

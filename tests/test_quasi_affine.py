"""Sizes that round a length to blocks: one form for all spellings, and what guards say of it."""

import pytest
import sympy
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Mod, PythonMod, TruncToInt

from streambp_compile.passes.ir.quasi_affine import is_zero, quasi_affine

T, B = (sympy.Symbol(name, positive=True, integer=True) for name in "TB")
UP = T + Mod(8 - Mod(T, 8), 8)


@pytest.mark.parametrize(
    "spelling",
    [
        T + PythonMod(-T, 8),
        -8 * FloorDiv(-T, 8),
        8 * FloorDiv(T + 7, 8),
        8 * FloorDiv(UP, 8),
        FloorDiv(UP, 8) * FloorDiv(UP, FloorDiv(UP, 8)),
        8 * CeilToInt(IntTrueDiv(T, 8)),
        8 * TruncToInt(IntTrueDiv(T + 7, 8)),
    ],
    ids=str,
)
def test_every_spelling_of_a_rounding_has_one_form(spelling):
    assert quasi_affine(spelling - UP) == 0
    assert quasi_affine(B * spelling - B * UP) == 0
    for tokens in range(1, 40):
        assert spelling.subs(T, tokens) == tokens + -tokens % 8


@pytest.mark.parametrize("other", [8 * FloorDiv(T, 8), T, T + 7, 4 * FloorDiv(T + 3, 4), UP + 1], ids=str)
def test_other_sizes_differ(other):
    assert quasi_affine(other - UP) != 0
    assert not is_zero(quasi_affine(other - UP), ())


def test_a_truncated_quotient_that_may_be_negative_is_no_floor():
    assert quasi_affine(TruncToInt(IntTrueDiv(T - 10, 8)) - FloorDiv(T - 10, 8)) != 0


def test_nested_divisions_are_one():
    assert quasi_affine(FloorDiv(FloorDiv(T, 2), 4) - FloorDiv(T, 8)) == 0


@pytest.mark.parametrize(
    "guard, holds",
    [
        (sympy.Eq(Mod(T, 8), 0), True),
        (sympy.Eq(Mod(T, 16), 0), True),
        (sympy.Eq(Mod(T, 12), 0), False),
        (Mod(8 - Mod(T, 8), 8) <= 0, True),
        (Mod(8 - Mod(T, 8), 8) < 2, False),
        (sympy.Ne(Mod(T, 8), 0), False),
        (sympy.Eq(Mod(B, 8), 0), False),
        (T > 8, False),
    ],
    ids=str,
)
def test_a_guard_on_remainders_makes_sizes_equal(guard, holds):
    assert is_zero(quasi_affine(UP - T), (guard,)) is holds

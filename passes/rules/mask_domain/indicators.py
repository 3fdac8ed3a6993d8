"""Arithmetic on matrices of two numbers, such as a mask converted to 0 and 1, and results of it.

``(1.0 - causal.float()) * low`` is one number where the mask shows a key and another where it hides one. So
is the result of any function of such a matrix and of constants, entry by entry.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ...ir import DocumentMask, value_of
from ...mask_analysis.domains import (
    Abstract,
    Affine,
    Band,
    Indicator,
    Interval,
    complement,
    document_band,
    have_same_axes,
    intersection,
    is_constant,
    is_empty_outside,
    negation,
)
from ...mask_analysis.operands import Known, as_band, broadcast_value, is_boolean

Transfer = Callable[[Node, Known], Abstract]
Numbers = Callable[..., float]
MANTISSA, EXPONENTS = 8, range(-13, 16)  # bits of bfloat16, and exponents of float16's normal numbers
ROUNDING = 2.0**-7  # relative error of one operation, at most
WIDEST = 0.25  # relative width up to which an interval is useful


@dataclass(frozen=True)
class Instead:
    """The results of the analysis so far, with another value for one argument."""

    known: Known
    arg: object
    value: Abstract

    @property
    def bounded(self) -> Container[Node]:
        return self.known.bounded

    @property
    def indicators(self) -> Mapping[Node, Indicator]:
        return {}

    @property
    def nonnegative(self) -> Container[Node]:
        return self.known.nonnegative

    @property
    def integral(self) -> Container[Node]:
        return self.known.integral

    def __call__(self, arg: object) -> Abstract:
        return self.value if arg is self.arg else self.known(arg)

    def repeated_by(self, arg: Node) -> Node:
        return self.known.repeated_by(arg)

    def floor_division_behind(self, arg: Node) -> Node | None:
        return self.known.floor_division_behind(arg)


@dataclass(frozen=True)
class OperandNumbers:
    """The two numbers of an operand, and the mask that chooses between them. A constant has no mask, and
    twice the same number."""

    mask: Band | None
    visible: Interval
    hidden: Interval

    def aligned_with(self, mask: Band) -> OperandNumbers:
        """Express the matrix by a mask, if its own mask is the complement of that. Otherwise it stays as it
        is."""
        if self.mask is not None and self.mask.exact and complement(self.mask) == mask:
            return OperandNumbers(mask, self.hidden, self.visible)
        return self


def entrywise(function: Callable[[Node], Numbers | None], arguments: int) -> Callable[[Transfer], Transfer]:
    """Extend the transfer function of an op that computes entry by entry to indicators.

    function   node → the op as a function of Python's numbers; None: unknown
    arguments  how many operands it has
    """

    def decorate(transfer: Transfer) -> Transfer:
        @functools.wraps(transfer)
        def told(node: Node, known: Known) -> Abstract:
            value, args, numbers = transfer(node, known), node.args[:arguments], function(node)
            if numbers is None:
                return value
            if is_boolean(node) and not any(a in known.indicators for a in args if isinstance(a, Node)):
                return value  # the transfer function knows more of booleans than their numbers
            found = combined(node, args, known, numbers)
            band = as_band(found, node) if isinstance(found, Indicator) else found
            return value if found is None or is_empty_outside(value) and not is_empty_outside(band) else found

        return told

    return decorate


def moving(transfer: Transfer) -> Transfer:
    """Extend the transfer function of an op that moves the entries of its operand to indicators."""

    @functools.wraps(transfer)
    def moved(node: Node, known: Known) -> Abstract:
        indicator = known.indicators.get(node.args[0])
        if indicator is None:
            return transfer(node, known)
        mask = transfer(node, Instead(known, node.args[0], indicator.mask))
        return replace(indicator, mask=mask) if isinstance(mask, Band) else transfer(node, known)

    return moved


def combined(node: Node, args: Sequence[object], known: Known, function: Numbers) -> Abstract:
    """Apply a function to indicators and constants; None if the result has more than two numbers."""
    found = [operand for arg in args if (operand := operand_of(arg, node, known)) is not None]
    first = next((o.mask for o in found if o.mask is not None), None)
    if len(found) < len(args) or first is None or may_wrap(args, found):
        return None
    found = [operand.aligned_with(first) for operand in found]
    masks = [o.mask for o in found if o.mask is not None]
    visible = image(function, [o.visible for o in found], node)
    hidden = image(function, [o.hidden for o in found], node)
    if visible is None or hidden is None:
        return None
    if len(masks) == 1 or masks[0].exact and masks.count(masks[0]) == len(masks):
        return result_of(node, masks[0], visible, hidden)
    if len(masks) > 2 or not have_same_axes(*masks):
        return None
    hiding = [o for o in found if o.mask is not None]  # one mask may hide an entry that the other shows
    crossed = [image(function, [o.hidden if o is one else o.visible for o in found], node) for one in hiding]
    alike = hidden.low == hidden.high and crossed == [hidden, hidden]
    return result_of(node, intersection(*masks), visible, hidden) if alike else None


def may_wrap(args: Sequence[object], operands: Sequence[OperandNumbers]) -> bool:
    """May the op compute in an integer dtype that cannot hold one of its operands' numbers?"""
    whole = [(a, o) for a, o in zip(args, operands) if is_integer(a)]
    limits = [limits_of(a) for a, _ in whole]
    numbers = [n for _, o in whole for i in (o.visible, o.hidden) for n in (i.low, i.high)]
    return any(not low <= number <= high for low, high in limits for number in numbers)


def is_integer(arg: object) -> bool:
    value = value_of(arg) if isinstance(arg, Node) else arg
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | torch.SymInt)
    dtype = value.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def operand_of(arg: object, node: Node, known: Known) -> OperandNumbers | None:
    """Return an operand's numbers in the dimensions of a broadcast result; None if unknown."""
    value = broadcast_value(arg, node, known)
    if is_constant(value):
        const = constant(value.const, arg)
        return None if const is None else OperandNumbers(None, const, const)
    indicator = known.indicators.get(arg) if isinstance(arg, Node) else None
    if indicator is not None:
        mask = broadcast_value(arg, node, Instead(known, arg, indicator.mask))
        return OperandNumbers(mask, indicator.visible, indicator.hidden) if isinstance(mask, Band) else None
    return of_boolean(value, node) if is_boolean(arg) else None


def of_boolean(value: Abstract, node: Node) -> OperandNumbers | None:
    """Convert a boolean mask to the numbers 0 and 1."""
    zero, one = Interval(0.0, 0.0), Interval(1.0, 1.0)
    for mask, visible, hidden in ((value, one, zero), (negation(value), zero, one)):
        band = document_band(mask, node) if isinstance(mask, DocumentMask) else mask
        if isinstance(band, Band) and band.outside is False:
            return OperandNumbers(band, visible, hidden)
    return None


def result_of(node: Node, mask: Band, visible: Interval, hidden: Interval) -> Abstract:
    """Build an indicator; for booleans, the mask itself, its negation or a constant."""
    if not is_boolean(node):
        return Indicator(mask, visible, hidden)
    if visible == hidden:
        return Affine(visible.low)
    return mask if visible.low else negation(mask)


def constant(number: float, arg: object) -> Interval | None:
    """Find the numbers that an operand may store for a constant; None if it is out of range."""
    low, high = limits_of(arg)
    if not low <= number <= high:
        return Interval(number, number) if math.isinf(number) else None
    if is_exact(number):
        return Interval(number, number)
    error = abs(number) * ROUNDING
    return Interval(max(low, number - error), min(high, number + error))


def image(function: Numbers, operands: Sequence[Interval], node: Node) -> Interval | None:
    """Evaluate a function, monotonous in every operand, on intervals; None if that is too uncertain."""
    ends = [(o.low,) if o.low == o.high else (o.low, o.high) for o in operands]
    found = [float(function(*numbers)) for numbers in itertools.product(*ends)]
    low, high, (least, most) = min(found), max(found), limits_of(node)
    if any(map(math.isnan, found)):
        return None
    if low == high and is_exact(low):
        return Interval(low, high) if least <= low <= most or math.isinf(low) else None
    if is_boolean(node) or not value_of(node).dtype.is_floating_point or low <= 0 <= high:
        return None
    if min(abs(low), abs(high)) < torch.finfo(value_of(node).dtype).tiny:
        return None  # it may become zero
    low, high = low - abs(low) * ROUNDING, high + abs(high) * ROUNDING
    wide = high - low > WIDEST * max(abs(low), abs(high))
    return None if wide else Interval(low if low >= least else -math.inf, high if high <= most else math.inf)


def is_exact(number: float) -> bool:
    """Can every dtype represent this number?"""
    if number == 0 or math.isinf(number):
        return True
    mantissa, exponent = math.frexp(number)
    return (mantissa * 2**MANTISSA).is_integer() and exponent in EXPONENTS


def limits_of(arg: object) -> tuple[float, float]:
    """Return the least and the largest number of an operand's dtype."""
    if not isinstance(arg, Node) or not isinstance(value_of(arg), torch.Tensor) or is_boolean(arg):
        return -sys.float_info.max, sys.float_info.max
    dtype = value_of(arg).dtype
    if dtype.is_complex:
        return math.inf, -math.inf  # no number
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min, limits.max

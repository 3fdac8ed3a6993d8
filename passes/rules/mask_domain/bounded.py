"""Conditions under which the numbers of a result are far from the lowest of their dtype.

Such numbers mask no key. A row names one of these functions as its facet ``bounded``. Numbers that a model
computes from weights and activations are taken to be bounded. Lowest numbers come from constants and from
inputs.
"""

from __future__ import annotations

from torch.fx import Node

from ...ir import tensor_operands
from ...mask_analysis.operands import Known, is_bounded, numbers_of


def if_operands_are(node: Node, known: Known) -> bool:
    """Are all tensors and numbers that the op reads bounded?"""
    numbers = [n for n in numbers_of(node) if isinstance(n, (int, float))]
    return all(a in known.bounded for a in tensor_operands(node)) and all(map(is_bounded, numbers))


def always(node: Node, known: Known) -> bool:
    """Accept any operands: the result is a product of activations and weights, or a row of a table."""
    return True


def if_addend_is(node: Node, known: Known) -> bool:
    """Is the first operand, to which a product is added, bounded?"""
    return node.args[0] in known.bounded


def if_nonnegative(node: Node, known: Known) -> bool:
    """Is the operand of ``log1p`` bounded and nonnegative? For a negative operand, the result may be the
    logarithm of zero."""
    return node.args[0] in known.bounded and node.args[0] in known.nonnegative

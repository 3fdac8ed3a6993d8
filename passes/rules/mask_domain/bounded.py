"""When the numbers of a result are far from the lowest of their dtype, so that they mask no key.

A row names one of these functions as its facet ``bounded``. Numbers computed by a model from weights and
activations are taken to be bounded; lowest numbers come from constants and from inputs.
"""

from __future__ import annotations

from torch.fx import Node

from ...ir import tensor_operands
from ...mask_analysis.operands import Known, is_bounded, numbers_of


def if_operands_are(node: Node, known: Known) -> bool:
    """All tensors and numbers that the op reads are bounded."""
    numbers = [n for n in numbers_of(node) if isinstance(n, (int, float))]
    return all(a in known.bounded for a in tensor_operands(node)) and all(map(is_bounded, numbers))


def always(node: Node, known: Known) -> bool:
    """A product of activations and weights, or a row of a table."""
    return True


def if_addend_is(node: Node, known: Known) -> bool:
    """A product to which the first operand is added."""
    return node.args[0] in known.bounded


def if_nonnegative(node: Node, known: Known) -> bool:
    """A logarithm of one more than its operand; of a negative one it may be that of zero."""
    return node.args[0] in known.bounded and node.args[0] in known.nonnegative

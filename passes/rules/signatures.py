"""Constructors of signatures, shared by the rule families."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir import Signature, shape_of, tensor_operands, value_of


def aligned(operand: tuple[int, ...], output: tuple[int, ...]) -> tuple[int | None, ...]:
    """Label an operand that broadcasts against the output. Its dimensions are tied from the right. Dimensions
    of size one are tied to nothing."""
    shift = len(output) - len(operand)
    return tuple(i + shift if size == output[i + shift] else None for i, size in enumerate(operand))


def broadcast(node: Node) -> Signature:
    """Build the signature in which every operand broadcasts against the outputs. Row t reads row t."""
    several = isinstance(value_of(node), (tuple, list))
    out = shape_of(node, 0 if several else None)
    outputs = (tuple(range(len(out))),) * (len(value_of(node)) if several else 1)
    return Signature(tuple(aligned(shape_of(a), out) for a in tensor_operands(node)), outputs)


def all_at_once(node: Node) -> Signature:
    """Build the signature that follows no dimension: if an operand carries tokens, all are needed at once."""
    operands = tuple(
        tuple(("all", k, i) for i in range(len(shape_of(a)))) for k, a in enumerate(tensor_operands(node))
    )
    return Signature(operands, ((None,) * len(shape_of(node)),), contracts="all")


def equation(node: Node, text: str, **kwargs) -> Signature:
    """Build a signature from an einsum equation, ``"mk,kn->mn"``. The caller leaves out missing optional
    operands."""
    left, right = text.replace(" ", "").split("->")
    return Signature(
        tuple(tuple(o) for o in left.split(",")), tuple(tuple(o) for o in right.split(",")), **kwargs
    )


def dims_of(arg: object, rank: int) -> tuple[int, ...]:
    """List the dimensions that an argument names, as non-negative numbers. ``None`` and ``[]`` mean all."""
    if arg is None or (isinstance(arg, (list, tuple)) and not arg):
        return tuple(range(rank))
    dims = arg if isinstance(arg, (list, tuple)) else (arg,)
    return tuple(d % rank if rank else 0 for d in dims)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return a schema argument, whether passed by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)

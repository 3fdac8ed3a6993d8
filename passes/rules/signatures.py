"""Ways to write a signature down, shared by the rule families."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir import Signature, shape_of, tensor_operands, value_of


def aligned(operand: tuple[int, ...], output: tuple[int, ...]) -> tuple[int | None, ...]:
    """Labels of an operand that broadcasts against the output: tied from the right, size-one dims tied to
    nothing."""
    shift = len(output) - len(operand)
    return tuple(i + shift if size == output[i + shift] else None for i, size in enumerate(operand))


def broadcast(node: Node) -> Signature:
    """Every operand broadcasts against the outputs; row t reads row t."""
    several = isinstance(value_of(node), (tuple, list))
    out = shape_of(node, 0 if several else None)
    outputs = (tuple(range(len(out))),) * (len(value_of(node)) if several else 1)
    return Signature(tuple(aligned(shape_of(a), out) for a in tensor_operands(node)), outputs)


def all_at_once(node: Node) -> Signature:
    """No dimension can be followed: where tokens come in, the node needs all of them."""
    operands = tuple(
        tuple(("all", k, i) for i in range(len(shape_of(a)))) for k, a in enumerate(tensor_operands(node))
    )
    return Signature(operands, ((None,) * len(shape_of(node)),), contracts="all")


def equation(node: Node, text: str, **kwargs) -> Signature:
    """A signature from an einsum equation, ``"mk,kn->mn"``; missing optional operands are left out by the
    caller."""
    left, right = text.replace(" ", "").split("->")
    return Signature(
        tuple(tuple(o) for o in left.split(",")), tuple(tuple(o) for o in right.split(",")), **kwargs
    )


def dims_of(arg: object, rank: int) -> tuple[int, ...]:
    """Dimensions named by an argument, as non-negative numbers; ``None`` and ``[]`` mean all."""
    if arg is None or (isinstance(arg, (list, tuple)) and not arg):
        return tuple(range(rank))
    dims = arg if isinstance(arg, (list, tuple)) else (arg,)
    return tuple(d % rank if rank else 0 for d in dims)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """A schema argument, whether passed by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)

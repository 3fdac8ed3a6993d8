"""Effects of an op on rows that may be tokens. It may let one row see another, lose the rows, or treat them
as features."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch.fx import Graph, Node

from ...passes.ir import Mark, bytes_of, is_tensor, shape_of, tensor_operands, value_of
from ...passes.rules import along_of, is_product
from ...passes.token_propagation import TokenPropagation
from .values import is_parameter


def touches(node: Node, propagation: TokenPropagation) -> bool:
    return any(propagation.of(a) for a in tensor_operands(node))


def mixes(node: Node, propagation: TokenPropagation, length: int) -> bool:
    """Does this op let one token see another, as attention or a scan along tokens does?"""
    signature = propagation.signatures.get(node)
    if signature is None or signature.reshape or signature.rows is not None:
        return attends(node, propagation, length)
    if signature.blocks[0] > signature.blocks[1]:  # it makes rows from blocks
        return bool(propagation.of(node))
    reads = any(
        labels[d] in signature.reach
        for a, labels in zip(tensor_operands(node), signature.operands)
        for d in propagation.of(a)
    )
    return first_value(node).dtype.is_floating_point if reads else attends(node, propagation, length)


def attends(node: Node, propagation: TokenPropagation, length: int) -> bool:
    """Is this op attention over rows, or a product that contracts keys? Rows that are more than the tokens
    are another sequence."""
    signature = propagation.signatures.get(node)
    if signature is None or signature.reshape:
        return False
    operands = tensor_operands(node)
    if signature.rows is not None:
        return any(
            labels[d] == signature.rows and is_all(a, mark, length)
            for a, labels in zip(operands, signature.operands)
            for d, mark in propagation.of(a).items()
        )
    if any(
        labels[d] in signature.reach
        for a, labels in zip(operands, signature.operands)
        for d in propagation.of(a)
    ):
        return False
    return (
        any(is_pair(a, propagation, length) for a in operands)
        and is_tensor(node)
        and len(propagation.of(node)) == 1
        and value_of(node).dtype.is_floating_point
        and len(operands) > 1
    )


def is_all(node: Node, mark: Mark, length: int) -> bool:
    """Are these rows exactly the tokens? Several rows for each token (states and actions in turn) are
    another sequence."""
    return mark.inner == mark.block == 1 and shape_of(node)[mark.dim] == length * mark.outer


def is_pair(node: Node, propagation: TokenPropagation, length: int) -> bool:
    """Does a value have rows and keys, as probabilities have? The keys are the tokens; rows may have heads
    folded behind each token, as products of all heads with shared keys have them."""
    marks = propagation.of(node)
    return (
        len(marks) == 2
        and any(is_all(node, mark, length) for mark in marks.values())
        and all(shape_of(node)[d] == length * mark.outer * mark.inner for d, mark in marks.items())
    )


def exchanges(node: Node, propagation: TokenPropagation) -> bool:
    """Does a collective gather or scatter along these rows?"""
    dim = along_of(node)
    return dim is not None and any(dim in propagation.of(n) for n in (node, tensor_operands(node)[0]))


def gathers(node: Node) -> bool:
    """Does the result of a collective have more numbers than this process's operand?"""
    return value_of(node).numel() > value_of(tensor_operands(node)[0]).numel()


def crosses(node: Node, propagation: TokenPropagation, other: TokenPropagation) -> bool:
    """Does this product keep rows of one sequence, and contract keys of another?"""
    if (
        node not in propagation.signatures
        or not propagation.of(node)
        or other.of(node)
        or not is_product(node)
    ):
        return False
    return any(
        len(propagation.of(a).keys() | other.of(a).keys()) == 2
        for a in tensor_operands(node)
        if propagation.of(a) and other.of(a)
    )


def is_linear_layer(node: Node, propagation: TokenPropagation, weights: Container[Node]) -> bool:
    """May this mixer be a product with a square weight, as in a residual block? Then it may mix features
    instead of tokens."""
    pairs = [a for a in tensor_operands(node) if len(propagation.of(a)) == 2]
    return bool(pairs) and all(a in weights for a in pairs)


def is_feature(propagation: TokenPropagation, weights: Container[Node]) -> bool:
    """Do products with weights read or make this dimension, so that it holds features? A scan along it (a
    cumulative probability) then proves nothing. A weight that mixes tokens has them twice."""
    return any(
        a in weights and len(propagation.of(a)) == 1
        for n in propagation.met()
        if is_product(n)
        for a in tensor_operands(n)
    )


def made_of_weights(graph: Graph, fakes: Mapping[Node, object]) -> set[Node]:
    """Collect the values computed from weights and constants alone, and from at least one weight."""
    given = {n for n, fake in fakes.items() if isinstance(fake, torch.Tensor) and not is_parameter(fake)}
    found = {n for n, fake in fakes.items() if is_parameter(fake)}
    for node in graph.nodes:
        if given.isdisjoint(node.all_input_nodes):
            found |= set() if found.isdisjoint(node.all_input_nodes) else {node}
        elif node.op != "output":
            given.add(node)
    return found


def lost_bytes(propagation: TokenPropagation) -> int:
    """Count the bytes of values whose marked dimension ends in a reader: contracted, normalised over, or
    looked up."""
    lost = 0
    for node in propagation.met():
        signature = propagation.signatures.get(node)
        if signature is None or signature.reshape or not is_tensor(node):
            continue
        outputs = {label for labels in signature.outputs for label in labels}
        for operand, labels in zip(tensor_operands(node), signature.operands):
            ends = any(
                labels[d] is None or labels[d] not in outputs or labels[d] == signature.keys
                for d in propagation.of(operand)
            )
            if (
                ends
                and value_of(operand).dtype.is_floating_point
                and signature.rows is None
                and len(propagation.of(operand)) < 2
            ):
                lost += bytes_of(value_of(operand))
    return lost


def is_batch_of_matrices(node: Node) -> bool:
    """Does a node's value, or its first one, have three dimensions or more?"""
    value = first_value(node)
    return isinstance(value, torch.Tensor) and value.dim() > 2


def first_value(node: Node) -> object:
    """Return the value of a node, or the first of several."""
    value = value_of(node)
    return value[0] if isinstance(value, (tuple, list)) and value else value

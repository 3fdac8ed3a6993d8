"""Reshapes that split the tokens of a sequence into blocks."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from ...passes.ir import Mark, hint, is_equal
from ...passes.rules import form_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, is_pointwise, part_of
from ..reading.token_axes import Axis
from ..reading.values import fake_of, is_parameter, storage_of


def may_split(node: Node) -> bool:
    """May a node split the tokens into blocks? It may if it is a reshape that does more than join
    dimensions or split features into heads."""
    if not reshapes(node):
        return False
    old, new = (list(map(hint, fake_of(n).shape)) for n in (node.args[0], node))
    ends = {math.prod(old[d:]) for d in range(len(old) + 1)}
    parted = [math.prod(new[d:]) for d in range(len(new)) if math.prod(new[d:]) not in ends]
    return bool(parted) and not (max(parted) < old[-1] and has_features_last(node.args[0]))


def has_features_last(node: Node) -> bool:
    """Is the last dimension one of features, and so none of tokens? It is in a product with a weight, and
    in values computed from one element by element or cut from one."""
    while part_of(node) is not Part.HEAD:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, Node) and source.args:
            source = source.args[0]  # an item of a value that was split into several
        if not isinstance(source, Node) or not (is_cut(node, source) or is_number_by_number(node, source)):
            return False
        node = source
    weight = node.args[1]
    while isinstance(weight, Node) and part_of(weight) in (Part.COPY, Part.MOVE):
        weight = weight.args[0]
    return isinstance(weight, Node) and is_parameter(fake_of(weight))


def is_cut(node: Node, source: Node) -> bool:
    """Does a value have the rank and strides of another, in the same memory?"""
    part, whole = fake_of(node), fake_of(source)
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor) or part.dim() != whole.dim():
        return False
    return all(map(is_equal, part.stride(), whole.stride())) and storage_of(node) == storage_of(source)


def is_number_by_number(node: Node, source: Node) -> bool:
    """Is each element of a value computed from the element of another in the same place?"""
    made, given = fake_of(node), fake_of(source)
    if not isinstance(given, Tensor) or not is_pointwise(node) or made.dim() != given.dim():
        return False
    return all(map(is_equal, made.shape, given.shape))


def reshapes(node: Node) -> bool:
    return form_of(node) is Form.RESHAPE or part_of(node) in (Part.MERGE, Part.RESHAPE)


@dataclass(frozen=True)
class Split:
    """A reshape that splits tokens into ``count`` blocks of ``length``; ``mark`` is the blocks' dimension
    in its result."""

    node: Node
    length: int
    count: int
    mark: Mark


def split_of(node: Node, axis: Axis) -> Split | None:
    """Find how a node splits the tokens, padded or not, into at least two blocks. None if it does not."""
    if not reshapes(node):
        return None
    source = node.args[0]
    marks = axis.marks.get(source, ())
    if len(marks) != 1:
        return None
    mark, (old, new) = marks[0], (list(map(hint, fake_of(n).shape)) for n in (source, node))
    if 0 in old:
        return None
    rows = old[mark.dim] // (mark.outer * mark.inner)
    after, before = mark.inner * math.prod(old[mark.dim + 1 :]), mark.outer * math.prod(old[: mark.dim])
    for d in range(1, len(new)):
        length, rest = divmod(math.prod(new[d:]), after)
        if rest or not 1 < length < rows or rows % length:
            continue
        outer, rest = divmod(before, math.prod(new[: d - 1]))
        if not rest and new[d - 1] == outer * (rows // length):
            return Split(node, length, rows // length, Mark(d - 1, outer))
    return None

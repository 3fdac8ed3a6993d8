"""Reshapes that part the tokens of a sequence into blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from ..passes.ir import Mark, hint
from ..passes.rules import form_of
from ..passes.rules.facets import Form
from ..passes.rules.forward import Part, part_of
from .token_axes import Axis, fake_of


def may_split(node: Node) -> bool:
    """May a node part the tokens into blocks: a reshape that does more than join dimensions?"""
    if not reshapes(node):
        return False
    old, new = (list(map(hint, fake_of(n).shape)) for n in (node.args[0], node))
    ends = {math.prod(old[d:]) for d in range(len(old) + 1)}
    return any(math.prod(new[d:]) not in ends for d in range(len(new)))


def reshapes(node: Node) -> bool:
    return form_of(node) is Form.RESHAPE or part_of(node) in (Part.MERGE, Part.RESHAPE)


@dataclass(frozen=True)
class Split:
    """A reshape that parts tokens into ``count`` blocks of ``length``; where its result has the blocks."""

    node: Node
    length: int
    count: int
    mark: Mark


def split_of(node: Node, axis: Axis) -> Split | None:
    """How a node parts the tokens, or all of them and a padding, into two blocks or more."""
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

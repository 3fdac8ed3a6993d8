"""Operations that move rows of one sequence to another.

They pick rows by an index, put them back among all rows, or join them with others. They compute nothing:
they read and write rows that exist in any case. So each is a region of its own, between regions that
stream along either sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node

from .ir import Label, Signature, is_tensor, shape_of, tensor_operands, value_of
from .rules import along_of, find_rule, form_of, is_of_blocks, is_product
from .rules.facets import Form
from .token_propagation import TokenPropagation

FEATURES = 8  # numbers per row, at least: narrower rows may as well exist at full length
SHARE = 16  # picked rows matter if they are at least a 16th of the value that they are picked from


@dataclass(frozen=True, eq=False)
class Rows:
    """A sequence of tokens: the dimensions of a graph that hold its rows, and their number."""

    propagation: TokenPropagation
    length: int

    def dim(self, node: Node) -> int | None:
        """Find the dimension of a value that has all rows of the sequence; None if there is none."""
        shape = shape_of(node)
        for dim, mark in self.propagation.of(node).items():
            if mark.inner == mark.block == 1 and shape[dim] == self.length * mark.outer:
                return dim
        return None

    def some(self, node: Node) -> list[int]:
        """List the dimensions of a value that have rows of the sequence, all of them or a slice."""
        found = self.propagation.of(node).items()
        return [dim for dim, mark in found if mark.inner == mark.block == 1]

    def end_at(self, node: Node, signature: Signature, sliced: bool = False) -> bool:
        """Does a node read floating-point rows of the sequence, although its result has none? It reads all
        rows, or with ``sliced`` perhaps a slice of them."""
        return self.dim(node) is None and any(
            labels[dim] not in signature.outputs[0] and (sliced or dim == self.dim(operand))
            for operand, labels in floating_operands(node, signature)
            for dim in self.some(operand)
        )


def floating_operands(node: Node, signature: Signature) -> list[tuple[Node, tuple[Label, ...]]]:
    """List the floating-point operands, which are neither indices nor masks, with their labels."""
    pairs = zip(tensor_operands(node), signature.operands)
    return [(a, labels) for a, labels in pairs if value_of(a).dtype.is_floating_point]


def moving(node: Node, sequences: Sequence[Rows], sliced: bool = False) -> Signature | None:
    """Return the signature of a node whose result has rows other than an operand's sequence, or None. With
    ``sliced``, the operand may have a slice of the sequence's rows."""
    signature = signature_of(node, sequences)
    return signature if signature and any(s.end_at(node, signature, sliced) for s in sequences) else None


def signature_of(node: Node, sequences: Sequence[Rows]) -> Signature | None:
    """Return the signature of a node that may move rows, or None for any other node. A reshape, a product and
    attention do not move rows. Neither does a function of blocks, whose states are no rows of a sequence,
    nor a collective, which has the same tokens on several processes before or after."""
    signature = known_signature(node, sequences)
    if signature is None or signature.reshape or signature.rows is not None or along_of(node) is not None:
        return None
    return None if is_product(node) or is_of_blocks(node) else signature


def known_signature(node: Node, sequences: Sequence[Rows]) -> Signature | None:
    """Return the signature of a node with floating-point results, or None if no rule gives one."""
    if not sequences or not is_tensor(node) or not value_of(node).dtype.is_floating_point:
        return None
    return sequences[0].propagation.signatures.get(node)


def new_dims(node: Node, signature: Signature) -> list[int]:
    """List the dimensions of a result along which it has rows of no floating-point operand. A dimension
    counts only if at least `FEATURES` numbers lie behind it."""
    tied = {label for _, labels in floating_operands(node, signature) for label in labels} - signature.indexed
    shape, outputs = shape_of(node), signature.outputs[0]
    return [
        dim
        for dim, label in enumerate(outputs)
        if (label is None or label not in tied) and math.prod(shape[dim + 1 :]) >= FEATURES
    ]


def worth_a_sequence(node: Node, signature: Signature) -> bool:
    """Are enough rows picked for the values computed from them to matter?"""
    sources = (a for a, _ in floating_operands(node, signature))
    return SHARE * value_of(node).numel() >= max((value_of(a).numel() for a in sources), default=0)


def picked_rows(
    node: Node, sequences: Sequence[Rows], follow: Callable[[Node, int], Rows | None]
) -> Rows | None:
    """Find the sequence of a result's rows, if the node picked them from others and products read them.

    follow  follows a dimension of a value through the graph
    """
    signature = moving(node, sequences)
    if signature is None or not worth_a_sequence(node, signature):
        return None
    known = {dim for s in sequences if (dim := s.dim(node)) is not None}
    if known:
        return None
    found = [s for dim in new_dims(node, signature) if (s := follow(node, dim)) is not None]
    return max(
        (s for s in found if is_of_picked_rows(s, node, signature)), key=lambda s: s.length, default=None
    )


def is_of_picked_rows(rows: Rows, node: Node, signature: Signature) -> bool:
    """Do products read the rows, and were they not a dimension (the batch) of the value picked from?"""
    there_before = any(rows.dim(a) is not None for a, _ in floating_operands(node, signature))
    read = any(is_product(n) and is_tensor(n) and rows.dim(n) is not None for n in rows.propagation.met())
    return read and not there_before


def moves_rows(node: Node, sequences: Sequence[Rows]) -> bool:
    """Does a node make rows of one sequence from those of another? It may pick rows or join them with more,
    so that its result has rows that no operand has. It may write them among others. It may make several rows
    of each, or one of several (`regroups_rows`). Or it copies the rows that each token reads."""
    if regroups_rows(node, sequences) or form_of(node) is Form.RECEPTIVE_FIELDS:
        return True
    signature = moving(node, sequences, sliced=True)
    if signature is None:
        return False
    made = {dim for s in sequences if (dim := s.dim(node)) is not None}
    return bool(made.intersection(new_dims(node, signature))) or bool(made) and writes_rows(node)


def picks_rows_of(rows: Rows, node: Node) -> bool:
    """Does a node pick rows of a sequence by an index, so that its result has another sequence of rows?"""
    signature = moving(node, [rows])
    return signature is not None and bool(new_dims(node, signature)) and worth_a_sequence(node, signature)


def regroups_rows(node: Node, sequences: Sequence[Rows]) -> bool:
    """Does a reshape make several rows of each token, or one row of several tokens? Several values of a token
    become rows of their own (states and actions in turn), or the tokens of a patch become one row."""
    signature = known_signature(node, sequences)
    if signature is None or not signature.reshape:
        return False
    before, after = ({s for s in sequences if s.dim(n) is not None} for n in (node.args[0], node))
    return bool(before - after) and bool(after - before)


def writes_rows(node: Node) -> bool:
    rule = find_rule(node)
    return rule is not None and rule.writes is not None


# Cuts around these operations


def parts_between(
    movers: Sequence[int], count: int, cannot: Collection[int], light: Collection[int]
) -> list[tuple[int, int, bool]]:
    """Split a body of ``count`` nodes into parts, by cuts around the nodes that move rows.

    Returns the first and the last place of each part, and whether the part moves rows.

    movers  places of nodes that move rows
    cannot  places behind which no cut may be
    light   places of views and indices, which stay with their readers
    """
    found: list[tuple[int, int, bool]] = []
    start = 0
    for at in movers:
        before = max((i for i in range(start - 1, at) if i not in cannot), default=None)
        end = next((i for i in range(at, count) if i not in cannot), None)
        if before is None or end is None:  # it is in an earlier part, or no cut can separate it
            continue
        while before >= start and before in light and before - 1 not in cannot:
            before -= 1
        found += [(start, before, False)] if before >= start else []
        found.append((before + 1, end, True))
        start = end + 1
    return found + ([(start, count - 1, False)] if start < count else [])

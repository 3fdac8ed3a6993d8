"""Loops over rows of logits, written to save memory, merged to one expression of the whole.

``torch.stack([torch.logsumexp(row, -1) for row in logits])`` and ``torch.cat([f(part) for part in
logits.split(128)])`` are ``f`` of all of ``logits``, if ``f`` reads one row at a time. The expressions
of the pieces are compared. Where they differ only in the piece, one expression of the whole replaces
them. The compiled graph then does not depend on the number of pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..passes.ir import arguments
from ..passes.pieces import Correspondence
from ..passes.rules.forward import Part, cuts_into_pieces, is_along_last, is_pointwise, part_of, slice_of
from .expressions import Expression, Given, Op, Source, mapped, operation, ordered, recorded


class NotPieces(Exception):
    """The expressions are not the same function of consecutive pieces."""


def is_piece(op: Expression) -> bool:
    """Is this one row block of several that a loop runs over? Such a loop runs over ``x``, ``x.split(n)`` or
    ``range(len(x))``."""
    part = span(op)
    if part is None or isinstance(op, Op) and op.target is operator.getitem:
        return part is not None  # even if it is the only one
    return part.lost and part.base.fake.shape[0] > 1


@dataclass(frozen=True)
class Span:
    """Rows ``start`` to before ``stop`` of a dimension of a value.

    lost  it is one row, without that dimension
    """

    base: Expression
    dim: int
    start: int
    stop: int
    lost: bool


def span(part: Expression) -> Span | None:
    """Find the value that this is a piece of along its first dimension, and the rows. None if it is none."""
    if not isinstance(part, Op) or not part.args or not isinstance(part.args[0], Expression):
        return None
    over = part.args[0]
    if part.target is operator.getitem:
        if not isinstance(over, Op) or not cuts_into_pieces(over) or arguments(over)["dim"] != 0:
            return None
        base, key = over.args[0], part.args[1]
        if part.fake.dim() < base.fake.dim():
            return Span(base, 0, key, key + 1, True)
        start = sum(t.shape[0] for t in over.fake[:key])
        return Span(base, 0, start, start + over.fake[key].shape[0], False)
    found = sliced(part)
    return found if found is not None and found.dim == 0 else None


def sliced(part: Expression) -> Span | None:
    """Match a slice of a value along any dimension, or one row of it."""
    base = part.args[0] if isinstance(part, Op) and part.args else None
    if not isinstance(base, Expression) or not isinstance(base.fake, torch.Tensor) or not base.fake.dim():
        return None
    found = slice_of(part, base.fake.dim())
    if found is None:
        return None
    length = base.fake.shape[found.dim]
    if found.lost:
        return Span(base, found.dim, found.start % length, found.start % length + 1, True)
    start, stop, _ = slice(found.start, found.stop).indices(length)
    return Span(base, found.dim, start, stop, False)


def rows_of_logits(part: Expression) -> Span | None:
    """Match rows of logits along a dimension behind the first, which logits in pieces are."""
    found = sliced(part)
    fits = found is not None and isinstance(found.base, Source) and found.dim > 0 and not found.lost
    return found if fits else None


def reads_all_pieces(result: Expression) -> bool:
    """Does an expression read logits in pieces, and all of them?"""
    found: dict[tuple[Expression, int], set[Span]] = {}
    for rows in filter(None, map(rows_of_logits, ordered([result]))):
        found.setdefault((rows.base, rows.dim), set()).add(rows)
    return bool(found) and all(covers(spans, base.fake.shape[dim]) for (base, dim), spans in found.items())


def covers(spans: Iterable[Span], count: int) -> bool:
    """Are spans, in order, all rows, and each row once?"""
    ends = sorted((s.start, s.stop) for s in spans)
    return [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), count]


def joined(op: Op) -> Expression | None:
    """Merge a ``stack`` or ``cat`` of pieces to one expression over the whole. None if it is no such call.
    Along the first dimension, pieces of a loop are merged; along others, rows of logits."""
    kind, given = part_of(op), arguments(op)
    if kind is Part.JOIN and (logits := joined_logits(op)) is not None:
        return logits
    if kind not in (Part.STACK, Part.JOIN) or given["dim"] != 0:
        return None
    parts = op.args[0]
    try:
        found = Whole(parts)
        whole, lost = found.result(), found.lost
    except NotPieces:
        return None
    shapes = [p.fake.shape for p in parts]
    if lost and len(set(shapes)) == 1 and whole.fake.shape == (len(parts), *shapes[0]):
        return whole if kind is Part.STACK else flattened(whole)
    rows = (sum(s[0] for s in shapes if s), *shapes[0][1:])
    return whole if not lost and kind is Part.JOIN and whole.fake.shape == rows else None


def joined_logits(op: Op) -> Expression | None:
    """Return the logits whose rows a ``cat`` joins again, all of them and in their order."""
    rows = [s for part in op.args[0] if (s := rows_of_logits(part)) is not None]
    if len(rows) < len(op.args[0]) or len({(s.base, s.dim) for s in rows}) > 1:
        return None
    base, dim, starts = rows[0].base, rows[0].dim, [s.start for s in rows]
    fits = arguments(op)["dim"] % base.fake.dim() == dim and starts == sorted(starts)
    return base if fits and covers(rows, base.fake.shape[dim]) else None


def flattened(result: Expression) -> Expression | None:
    return recorded(torch.flatten, (result, 0, 1), {}, result.fake.device) if result.fake.dim() > 1 else None


class Whole:
    """Expressions of all pieces, in order, merged to the expression of the value that was cut."""

    def __init__(self, parts: Sequence[Expression]):
        self.parts, self.nodes = parts, ordered(parts)
        spans = {n: s for n in self.nodes if (s := span(n)) is not None}
        self.bases, self.lost = cut_values(spans, len(parts))
        starts = {base: sorted({s.start for s in spans.values() if s.base is base}) for base in self.bases}
        self.pieces = {
            n: (self.bases.index(s.base), starts[s.base].index(s.start))
            for n, s in spans.items()
            if s.base in starts
        }
        self.readers: dict[Expression, set[int]] = {}
        self.own: dict[Expression, str] = {}
        self.found = Correspondence(self.nodes, self.pieces, operands_of, self.text)
        self.values: dict[int, Expression] = {}
        for key in self.found.complete:
            lifted = self.lifted([self.found.classes[key][i] for i in range(len(parts))])
            if lifted is not None:
                self.values[key] = lifted

    def text(self, op: Op, found: Correspondence[Expression]) -> str:
        """Describe an operation. An outside tensor that only one piece reads is named by its position in
        the piece."""
        if not self.readers:
            for reader in self.nodes:
                for operand in operands_of(reader):
                    self.readers.setdefault(operand, set()).update(found.touched.get(reader, ()))
        piece = next(iter(found.touched[op]))

        def word(leaf: object) -> str:
            if not isinstance(leaf, Expression):
                return repr(leaf)
            name = found.name(leaf)
            if name is None and isinstance(leaf, Given) and self.readers[leaf] == {piece} and found.count > 1:
                place = sum(self.readers[other] == {piece} for other in self.own)
                name = self.own.setdefault(leaf, f"?{place}")
            return name or constant_text(leaf)

        return f"{op.target} {mapped((op.args, op.kwargs), word)} {op.modes}"

    def lifted(self, members: Sequence[Op]) -> Expression | None:
        """Apply the operation of all pieces to the whole; None if it does not compute row by row."""
        first = members[0]
        rank = max((o.fake.dim() for o in operands_of(first) if isinstance(o.fake, torch.Tensor)), default=0)
        along = is_along_last(first) and rank >= (1 if self.lost else 2)
        if first.target is not operator.getitem and not is_pointwise(first) and not along:
            return None
        leaves: list[list[object]] = [[] for _ in members]
        for member, found in zip(members, leaves):
            mapped((member.args, member.kwargs), found.append)
        try:
            wholes = [self.column(column) for column in zip(*leaves)]
            if len({w.fake.dim() for w, leaf in zip(wholes, leaves[0]) if is_lifted(w, leaf)}) > 1:
                return None
            values = iter(wholes)
            args, kwargs = mapped((first.args, first.kwargs), lambda leaf: next(values))
            return operation(first.target, args, kwargs, first.modes)
        except (NotPieces, RuntimeError):
            return None

    def column(self, column: Sequence[object]) -> object:
        """Convert the same argument of every piece's operation to the argument of the whole."""
        first = column[0]
        if isinstance(first, Given) and any(leaf is not first for leaf in column):
            return self.together(column)
        return self.value(first) if isinstance(first, Expression) else first

    def value(self, part: Expression) -> Expression:
        """Find the whole that a piece's expression is a part of. Raises NotPieces if it has none."""
        if part in self.pieces:
            return self.bases[self.pieces[part][0]]
        if part not in self.found.touched:
            return part
        if self.found.class_of.get(part) not in self.values:
            raise NotPieces
        return self.values[self.found.class_of[part]]

    def together(self, parts: Sequence[Given]) -> Given:
        """Join tensors that belong to one piece each (labels). Their rank must be that of the piece, so that
        no operation broadcasts differently. Raises NotPieces otherwise."""
        if len({p.fake.shape[1:] for p in parts}) > 1 or not parts[0].fake.dim():
            raise NotPieces
        for part in parts:
            part.check()
        return Given.of((torch.stack if self.lost else torch.cat)([p.tensor for p in parts]))

    def result(self) -> Expression:
        """Return the expression of the whole. Raises NotPieces unless the parts are the same function of the
        pieces, in their order."""
        for i, part in enumerate(self.parts):
            if self.found.touched.get(part) != {i} or self.value(part) is not self.value(self.parts[0]):
                raise NotPieces
        return self.value(self.parts[0])


def cut_values(spans: Mapping[Expression, Span], count: int) -> tuple[list[Expression], bool]:
    """List the values that are cut completely into ``count`` pieces. Also returns whether the pieces lose the
    dimension. Raises NotPieces if there is no such value."""
    found: dict[tuple[Expression, bool], set[Span]] = {}
    for part in spans.values():
        found.setdefault((part.base, part.lost), set()).add(part)
    complete = []
    for (base, lost), rows in found.items():
        if len(rows) == count and covers(rows, base.fake.shape[0]):
            complete.append((base, lost))
    if not complete or len({base for base, _ in complete}) < len(complete):
        raise NotPieces
    lost = complete[0][1]
    return [base for base, how in complete if how is lost], lost


def is_lifted(whole: object, part: object) -> bool:
    return isinstance(whole, Expression) and isinstance(whole.fake, torch.Tensor) and whole is not part


def operands_of(node: Expression) -> list[Expression]:
    return [p for p in node.parts() if isinstance(p, Expression)]


def constant_text(node: Expression) -> str:
    """Describe a value that depends on no piece: equal numbers give equal texts."""
    if isinstance(node, Op) and not operands_of(node):
        return f"{node.target} {node.args} {node.kwargs}"
    return f"@{id(node)}"

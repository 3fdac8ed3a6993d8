"""Loops over rows of logits, written to save memory, made whole again.

``torch.stack([torch.logsumexp(row, -1) for row in logits])`` and ``torch.cat([f(part) for part in
logits.split(128)])`` are ``f`` of all of
``logits``, if ``f`` sees one row at a time: the pieces' expressions are compared, and where they differ in
nothing but the piece, one
expression over the whole replaces them. The compiled graph then does not depend on how many pieces there
were.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from .expressions import POINTWISE, Expression, Given, Op, mapped, recorded

ALONG = {
    "log_softmax",
    "softmax",
    "gather",
    "take_along_dim",
    "logsumexp",
    "argmax",
    "argmin",
    "amax",
    "amin",
    "sum",
    "mean",
    "unsqueeze",
    "squeeze",
    "max",
    "min",
    "topk",
}  # of one row each, if along the last dimension
ROW_BY_ROW = frozenset(POINTWISE.split()) | ALONG | {"getitem"}
LOOPS = {"unbind", "__iter__"}
CUTS = {"split", "chunk", "tensor_split"}


class NotPieces(Exception):
    """The expressions are not the same function of consecutive pieces."""


def is_piece(op: Op) -> bool:
    """Is this one row block of several: what a loop over ``x``, ``x.split(n)`` or ``range(len(x))`` sees?"""
    if op.name in LOOPS | CUTS:
        return True  # even if it is the only one
    return op.name == "__getitem__" and type(op.args[1]) is int and op.args[0].fake.shape[0] > 1


def joined(function: str, parts: Sequence[object], dim: object) -> Op | Expression | None:
    """``stack`` or ``cat`` of pieces along the first dimension as one expression over the whole; None if they
    are not that."""
    if dim != 0 or not parts or not all(isinstance(p, Expression) for p in parts):
        return None
    try:
        unify = Unify(parts)
        result = unify.of(parts)
    except NotPieces:
        return None
    shapes = [p.fake.shape for p in parts]
    stacked = (len(parts), *shapes[0])
    if unify.stacked and len(set(shapes)) == 1 and result.fake.shape == stacked:
        return result if function == "stack" else flattened(result)
    if (
        not unify.stacked
        and function != "stack"
        and result.fake.shape == (sum(s[0] for s in shapes), *shapes[0][1:])
    ):
        return result
    return None


def flattened(result: Expression) -> Op | None:
    return recorded(torch.flatten, (result, 0, 1), {}, result.fake.device) if result.fake.dim() > 1 else None


class Unify:
    """Expressions of all pieces → the expression of the whole.

    stacked  pieces have lost the dimension along which they were cut
    """

    def __init__(self, parts: Sequence[Expression]):
        self.count, self.stacked = len(parts), None

    def of(self, parts: Sequence[Expression]) -> Expression:
        first = parts[0]
        origin = self.origin(parts)
        if origin is not None:
            return origin
        if all(p is first for p in parts) and isinstance(first, Given):
            return first
        if all(isinstance(p, Given) for p in parts):
            return self.given(parts)
        if not all(
            isinstance(p, Op) and p.function is first.function and p.modes == first.modes for p in parts
        ):
            raise NotPieces
        if first.name not in ROW_BY_ROW:
            raise NotPieces
        args, kwargs = self.arguments([(p.args, p.kwargs) for p in parts])
        if first.name in ALONG and not along_last(first, self.stacked):
            raise NotPieces
        if first.function is operator.getitem:
            return Op(args[0].fake[args[1]], operator.getitem, args, {}, first.modes)
        with first.modes.active():
            made = recorded(
                first.function,
                args,
                kwargs,
                first.fake.device if isinstance(first.fake, torch.Tensor) else first.fake[0].device,
            )
        if made is None:
            raise NotPieces
        return made

    def origin(self, parts: Sequence[Expression]) -> Expression | None:
        """The value that these are the pieces of, all of them and in order."""
        spans = [span(p) for p in parts]
        if any(s is None for s in spans):
            return None
        whole, stacked = spans[0][0], spans[0][3]
        ends = [0, *(s[2] for s in spans)]
        if (
            any(s[0] is not whole or s[3] is not stacked or s[1] != end for s, end in zip(spans, ends))
            or ends[-1] != whole.fake.shape[0]
        ):
            raise NotPieces
        if self.stacked not in (None, stacked):
            raise NotPieces
        self.stacked = stacked
        return whole

    def given(self, parts: Sequence[Given]) -> Given:
        """One tensor of what goes with each piece (labels). Its rank must be that of the piece, so that
        nothing broadcasts anew."""
        if len({p.fake.shape[1:] for p in parts}) > 1 or not parts[0].fake.dim():
            raise NotPieces
        join = torch.stack if self.stacked else torch.cat
        for part in parts:
            part.check()
        try:
            return Given.of(join([p.tensor for p in parts]))
        except RuntimeError:
            raise NotPieces from None

    def arguments(self, all_parts: Sequence[object]) -> object:
        """Arguments of the whole: expressions unified, pieces first (they say how they were cut), all else
        equal."""
        leaves = [[] for _ in all_parts]
        for part, found in zip(all_parts, leaves):
            mapped(part, lambda leaf, free: found.append(leaf))
        if len({len(found) for found in leaves}) != 1:
            raise NotPieces
        columns = list(zip(*leaves))
        made: dict[int, object] = {}
        for late in (False, True):
            for i, column in enumerate(columns):
                if isinstance(column[0], Given) is late:
                    made[i] = self.column(column)
        ranks = {
            m.fake.dim()
            for i, m in made.items()
            if isinstance(m, Expression) and isinstance(m.fake, torch.Tensor) and m is not columns[i][0]
        }
        if len(ranks) > 1:
            raise NotPieces
        values = iter([made[i] for i in range(len(columns))])
        return mapped(all_parts[0], lambda leaf, free: next(values))

    def column(self, column: Sequence[object]) -> object:
        if all(isinstance(leaf, Expression) for leaf in column):
            return self.of(column)
        if any(type(leaf) is not type(column[0]) or leaf != column[0] for leaf in column):
            raise NotPieces
        return column[0]


def span(part: Expression) -> tuple[Expression, int, int, bool] | None:
    """Of which value this is a piece, its first row and the one after its last, and whether the dimension is
    gone."""
    if not isinstance(part, Op) or not isinstance(part.args[0], Expression):
        return None
    over, key = part.args[0], part.args[1] if len(part.args) > 1 else None
    if part.function is operator.getitem and isinstance(over, Op):
        if over.name in LOOPS and not any(over.args[1:]) and not any(over.kwargs.values()):
            return over.args[0], key, key + 1, True
        if over.name in CUTS and not any(over.args[2:]) and not over.kwargs.get("dim"):
            start = sum(t.shape[0] for t in over.fake[:key])
            return over.args[0], start, start + over.fake[key].shape[0], False
    if part.name == "__getitem__" and isinstance(over.fake, torch.Tensor):
        length = over.fake.shape[0]
        if type(key) is int:
            return over, key % length, key % length + 1, True
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(length)
            return over, start, stop, False
    return None


def along_last(op: Op, stacked: bool | None) -> bool:
    """Is the operation on a piece along the last dimension, and that not the one that pieces are cut
    along?"""
    operand = op.args[0]
    if not isinstance(operand, Expression) or not isinstance(operand.fake, torch.Tensor):
        return False
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
    if op.name == "topk":
        dim = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else -1)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    return dims == (-1,) and operand.fake.dim() >= (1 if stacked else 2)

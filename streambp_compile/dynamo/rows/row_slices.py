"""Some rows of a value, computed from the same rows of its operands.

A slice moves up through operations on each row by itself, until it meets the place where rows were
joined, or made. So no other rows of the value have to exist. The rewrite is done in Dynamo's graph,
before autograd sees it.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...passes.ir import Size, are_equal, arguments, draws_random
from ...passes.phases import check_time
from ...passes.rules.forward import (
    TO_THE_END,
    Part,
    is_filled,
    is_mutable,
    part_of,
    with_arguments,
)
from ..reading.aten import inserted, size_as_node, sum_of
from ..reading.row_ties import operand_dims
from ..reading.values import autocast_of, fake_of, is_changed, joined_values

aten = torch.ops.aten


class OtherRows(ABC):
    """The rows that a value is to have along a dimension, in place of its own."""

    @property
    def first(self) -> int | Node | None:
        """The place of the first of them among the value's own rows; None where it is counted from the
        end."""
        return None

    @abstractmethod
    def count(self, size: object, like: Node) -> object:
        """Count these rows, in place of a dimension of ``size`` rows."""

    @abstractmethod
    def read(self, node: Node, dim: int, like: Node) -> Node:
        """Insert these rows, read from a value that exists."""

    def made(self, node: Node, dim: int, like: Node) -> Node | None:
        """Insert these rows of a value that is made in place, where only these rows know how."""
        return None


@dataclass(frozen=True)
class RowRange(OtherRows):
    """Rows from ``start`` to before ``stop`` of a dimension, counted as Python's slices do. ``stop`` may be
    None, the end. A node is a size that is a symbol, counted from the first row."""

    start: int | Node
    stop: int | Node | None

    def is_front(self) -> bool:
        """Are these the first rows, of a number that the range tells?"""
        return self.start == 0 and (isinstance(self.stop, Node) or (self.stop or 0) > 0)

    def places(self, count: Size) -> tuple[Size, Size]:
        """Return the first row and the one behind the last, of ``count`` rows."""

        def place(at: int | Node | None) -> Size:
            if isinstance(at, Node):
                return fake_of(at)
            return count if at is None else count + at if at < 0 else at

        return place(self.start), place(self.stop)

    @property
    def first(self) -> int | Node | None:
        return None if isinstance(self.start, int) and self.start < 0 else self.start

    def count(self, size: object, like: Node) -> object:
        if self.is_front():
            return self.stop
        start, stop = self.start, self.stop or 0  # 0: the end
        if isinstance(start, Node) or isinstance(stop, Node):
            end = stop if isinstance(stop, Node) or stop > 0 else sum_of(size, stop, like)
            return inserted(like, operator.sub, (end, start), as_written=True)
        from_one_end = (start < 0) == (stop <= 0)
        return stop - start if from_one_end else sum_of(size, stop - start, like)

    def read(self, node: Node, dim: int, like: Node) -> Node:
        stop = TO_THE_END if self.stop is None else self.stop
        return inserted(like, aten.slice.Tensor, (node, dim, self.start, stop))

    def made(self, node: Node, dim: int, like: Node) -> Node | None:
        """Join the parts that a value was joined of, or count some of the numbers of a range."""
        parts = parts_at(node, dim)
        run = None if parts is None else run_of(parts, self)
        if parts is not None and run is not None:
            return joined_rows(parts, run, like)
        counts = part_of(node) is Part.COUNT and arguments(node).get("step", 1) == 1
        return self.counted(node, like) if counts else None

    def counted(self, node: Node, like: Node) -> Node:
        """Insert an ``arange`` of some of the consecutive numbers of another."""
        given = arguments(node)
        first, end = given.get("start", 0), given["end"]

        def place(at: int | Node | None) -> object:
            from_end = at is None or isinstance(at, int) and at < 0
            return sum_of(end if from_end else first, at or 0, like)

        names = ("layout", "device", "pin_memory")
        kwargs = {name: given[name] for name in names if given.get(name) is not None}
        bounds = (place(self.start), place(self.stop))
        return inserted(like, aten.arange.start, bounds, {**kwargs, "dtype": fake_of(node).dtype})


@dataclass(frozen=True)
class Parts:
    """A place where rows were joined along a dimension.

    pieces  the values in order; None for padding
    sizes   the number of rows of each
    """

    node: Node
    dim: int
    pieces: tuple[Node | None, ...]
    sizes: tuple[Size, ...]

    def count(self, i: int, like: Node) -> int | Node:
        """Return the number of rows of a part: a number, or a node where the graph is being written."""
        size, piece = self.sizes[i], self.pieces[i]
        if isinstance(size, int):
            return size
        if piece is not None:
            return size_as_node(like, piece, self.dim)
        return arguments(self.node)["pad"][2 * (fake_of(self.node).dim() - 1 - self.dim) + (i > 0)]


def parts_at(node: Node, dim: int) -> Parts | None:
    """Find the parts that ``cat`` or padding joins along a dimension of a value. None if a part, or the
    value, may have changed by the time that it is read."""
    if any(map(is_changed, (node, *node.all_input_nodes))):
        return None
    if part_of(node) is Part.PAD:
        return padded_parts(node, dim)
    if part_of(node) is not Part.JOIN or arguments(node)["dim"] % fake_of(node).dim() != dim:
        return None
    pieces = tuple(joined_values(node))
    return Parts(node, dim, pieces, tuple(fake_of(p).shape[dim] for p in pieces))


def columns_of(node: Node) -> Parts | None:
    """Find the parts that ``cat`` or padding joins along a value's last dimension."""
    fake = fake_of(node) if node.op == "call_function" else None
    return parts_at(node, fake.dim() - 1) if isinstance(fake, torch.Tensor) and fake.dim() > 1 else None


def padded_parts(node: Node, dim: int) -> Parts | None:
    """Find the parts (source and padding) of a value that is padded with a number along this dimension
    alone."""
    given, source = arguments(node), node.args[0]
    pad, at = list(given["pad"]), 2 * (fake_of(node).dim() - 1 - dim)
    own = [fake_of(p) if isinstance(p, Node) else p for p in pad[at : at + 2]]
    if given.get("mode", "constant") != "constant" or any(pad[:at] + pad[at + 2 :]):
        return None
    if not any(pad) or not all(map(is_count, own)):
        return None
    found = [(None, own[0]), (source, fake_of(source).shape[dim]), (None, own[1])]
    pieces, sizes = zip(*itertools.compress(found, (pad[at], True, pad[at + 1])))  # a node is true
    return Parts(node, dim, pieces, sizes)


def is_count(size: Size) -> bool:
    """Is a number of rows of padding known not to be negative? A negative one cuts rows off."""
    return size >= 0 if isinstance(size, int) else bool(size.node.expr.is_nonnegative)


Rowwise = set[tuple[Node, int]]  # values, each with a dimension


def origin_of_rows(node: Node, dim: int, without: Rowwise) -> Parts | None:
    """Find where the rows of a value's dimension were joined, through operations on each row by itself.

    without  values whose rows were not joined, each with its dimension; those found here are added, so that a
             model of many layers is not walked from each of them
    """
    seen: list[tuple[Node, int]] = []
    for at in same_rows(node, dim, without):
        parts = parts_at(*at)
        if parts is not None:
            return parts
        seen.append(at)
    without.update(seen)
    return None


def same_rows(
    node: Node, dim: int, without: Set[tuple[Node, int]] = frozenset()
) -> Iterator[tuple[Node, int]]:
    """Yield the values whose row i becomes row i of a value's dimension, each with its dimension. The
    operations on the way treat each row by itself, and the value comes first. Values in ``without`` are
    skipped, and so is what is reached through them alone."""
    seen: set[tuple[Node, int]] = set()
    stack = [(node, dim)]
    while stack:
        node, dim = at = stack.pop()
        if at in seen or at in without:  # sums of residual branches would double the paths at every layer
            continue
        seen.add(at)
        check_time()
        yield at
        stack += reversed(operand_dims(node, dim).items())


# Values with other rows


Known = dict[tuple[Node, int, OtherRows], Node]


def with_rows(node: Node, dim: int, rows: OtherRows, like: Node, known: Known) -> Node:
    """Insert a value with other rows where the graph is being written. As far as possible, it is computed
    from the same rows of its operands.

    like   a node: new nodes get its stack trace and modes
    known  values that exist already, which are not made twice; new ones are added
    """
    at = (node, dim, rows)
    if at not in known:
        made = None if is_changed(node) else made_anew(*at, like, known)
        known[at] = rows.read(node, dim, like) if made is None else made
    return known[at]


def made_anew(node: Node, dim: int, rows: OtherRows, like: Node, known: Known) -> Node | None:
    """Compute other rows of a value from its operands. None if they must be read from the value."""
    made = rows.made(node, dim, like)
    if made is not None:
        return made
    given = arguments(node) if is_filled(node) or part_of(node) is Part.TRIANGLE else {}
    if is_filled(node):
        sizes = [rows.count(size, like) if d == dim else size for d, size in enumerate(given["size"])]
        return inserted(like, node.target, *with_arguments(node, size=sizes))
    if given:
        rank = fake_of(node).dim()
        by = 0 if dim < rank - 2 else rows.first
        if by is None:
            return None
        if dim == rank - 1:
            by = inserted(like, operator.neg, (by,), as_written=True) if isinstance(by, Node) else -by
        cut = with_rows(given["self"], dim, rows, like, known)
        return inserted(like, node.target, (cut, sum_of(given["diagonal"], by, like)))
    places = operand_dims(node, dim) if may_be_repeated(node, like) else {}
    values = {a: with_rows(a, at, rows, like, known) for a, at in places.items()}
    return repeated(node, dim, values, like) if values else None


def may_be_repeated(node: Node, like: Node) -> bool:
    """Would a node compute the same value again in the place of another?"""
    if node.op != "call_function" or is_mutable(node) or draws_random(node):
        return False
    if autocast_of(node) != autocast_of(like):
        return False
    return not any(map(is_changed, (node, *node.all_input_nodes)))


def repeated(node: Node, dim: int, values: dict[Node, Node], like: Node) -> Node:
    """Repeat an operation on each row by itself, for some rows of its operands."""
    if part_of(node) in (Part.MERGE, Part.RESHAPE, Part.EXPAND) and "dim" not in arguments(node):
        sizes = size_arguments(node)
        if sizes is not None:
            source, expands = values[node.args[0]], part_of(node) is Part.EXPAND
            target = aten.expand.default if expands else aten.reshape.default
            return inserted(like, target, (source, [-1 if d == dim else s for d, s in enumerate(sizes)]))
    if part_of(node) is Part.RESHAPE and "sizes" in arguments(node):  # unflatten
        source, sizes = values[node.args[0]], parted_into(node, dim)
        return inserted(like, node.target, *with_arguments(node, self=source, sizes=sizes))
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: values.get(a, a))
    return inserted(like, node.target, args, kwargs)


def parted_into(node: Node, dim: int) -> list[object]:
    """Return the sizes that ``unflatten`` splits a dimension into, with -1 for the result's dimension
    ``dim``."""
    given, shape = arguments(node), fake_of(node).shape
    written, first = given["sizes"], given["dim"] % fake_of(given["self"]).dim()
    if not first <= dim < first + len(written):
        return list(written)
    known = [n if isinstance(n, int) else w for n, w in zip(shape[first:], written)]
    return [-1 if first + i == dim else size for i, size in enumerate(known)]


def size_arguments(node: Node) -> list[object] | None:
    """Return the sizes that a node is called with: numbers, and nodes that have them."""
    given = arguments(node)
    written = given.get("size", given.get("shape"))
    if written is None:
        return None
    return [s if isinstance(s, int) else w for s, w in zip(fake_of(node).shape, written)]


# Parts


def run_of(parts: Parts, rows: RowRange) -> slice | None:
    """Find the consecutive parts that are exactly these rows, if any."""
    count = len(parts.sizes)
    runs = (slice(i, j) for i in range(count) for j in range(i + 1, count + 1))
    return next((run for run in runs if is_run(parts.sizes, run, rows)), None)


def is_run(sizes: Sequence[Size], run: slice, rows: RowRange) -> bool:
    ends = sum(sizes[: run.start]), sum(sizes[: run.stop])
    return are_equal(ends, rows.places(sum(sizes)))


def rows_between(parts: Parts, first: int, end: int, like: Node) -> RowRange:
    """Return the rows of consecutive parts, counted from the side on which all numbers are known. Where there
    is none, the sizes in front are inserted where the graph is being written."""
    sizes = parts.sizes

    def front(end: int) -> int | Node:
        total: object = 0
        for i in range(end):
            total = sum_of(parts.count(i, like), total, like)
        return total

    before, behind = sizes[:first], sizes[end:]
    start = -sum(sizes[first:]) if not are_known(before) and are_known(sizes[first:]) else front(first)
    if not behind:
        return RowRange(start, None)
    return RowRange(start, -sum(behind) if are_known(behind) else front(end))


def are_known(sizes: Sequence[Size]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def joined_rows(parts: Parts, run: slice, like: Node) -> Node:
    """Join consecutive parts into one value."""
    made = [parts.pieces[i] or padding(parts, i, like) for i in range(run.start, run.stop)]
    whole = made[0] if len(made) == 1 else inserted(like, aten.cat.default, (made, parts.dim))
    dtype = fake_of(parts.node).dtype  # a part of a wider dtype may not be among them
    return whole if fake_of(whole).dtype == dtype else inserted(like, aten.to.dtype, (whole, dtype))


def padding(parts: Parts, i: int, like: Node) -> Node:
    """Create the rows of padding that are part ``i``."""
    fake, source = fake_of(parts.node), next(p for p in parts.pieces if p is not None)

    value = arguments(parts.node).get("value") or 0
    sizes = [
        parts.count(i, like) if d == parts.dim else size_as_node(like, source, d) for d in range(fake.dim())
    ]
    return inserted(like, aten.full.default, (sizes, value), {"dtype": fake.dtype, "device": fake.device})

"""Some rows of a value, computed from the same rows of its operands.

A slice moves up through operations on each row by itself, until it meets the place where rows were
joined, or made. So no other rows of the value have to exist. The rewrite is done in Dynamo's graph,
before autograd sees it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...passes.ir import Mark, Size, are_equal, arguments, draws_random, hint, is_equal
from ...passes.phases import check_time
from ...passes.rules.forward import (
    TO_THE_END,
    Part,
    cuts_into_pieces,
    is_filled,
    is_mutable,
    is_pointwise,
    part_of,
    slice_of,
    with_arguments,
)
from ...passes.token_propagation import reshaped
from ..reading.aten import inserted, size_as_node, sum_of
from ..reading.values import autocast_of, fake_of, is_changed, joined_values

aten = torch.ops.aten


@dataclass(frozen=True)
class RowRange:
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
        operands = node.all_input_nodes if node.op == "call_function" else ()
        dims = [(a, operand_dim(node, a, dim)) for a in operands]
        stack += [(a, d) for a, d in reversed(dims) if d is not None]


# From a value's rows to those of its operands


def operand_dim(node: Node, operand: Node, dim: int) -> int | None:
    """Find an operand's dimension whose row i becomes row i of the node's dimension; None if there is
    none."""
    fake, given = fake_of(node), fake_of(operand)
    if cuts_into_pieces(operand):  # the node is one of its pieces
        return dim
    if not isinstance(given, torch.Tensor):
        return None
    if cuts_into_pieces(node):
        at = arguments(node)["dim"] % given.dim()
        if fake[0].dim() < given.dim():  # unbind
            return dim + (dim >= at)
        return dim if at != dim else None
    if part_of(node) in (Part.JOIN, Part.STACK):
        at = arguments(node)["dim"] % fake.dim()
        return None if at == dim else dim - (part_of(node) is Part.STACK and dim > at)
    if is_pointwise(node) or part_of(node) is Part.EXPAND:
        at = dim - (fake.dim() - given.dim())
        return at if at >= 0 and is_equal(given.shape[at], fake.shape[dim]) else None
    if operand is not node.args[0]:
        return None
    part = slice_of(node, given.dim())
    if part is not None:
        at = dim + (part.lost and dim >= part.dim)
        return at if at != part.dim or part.is_all() else None
    if part_of(node) is Part.MOVE:
        return moved_dim(node, dim, given.dim())
    if part_of(node) is Part.GATED:
        return dim if dim != arguments(node)["dim"] % given.dim() else None
    if part_of(node) in (Part.MERGE, Part.RESHAPE):
        return reshaped_dim(node, given, dim)
    if part_of(node) is Part.NORM:
        return dim if dim < fake.dim() - len(arguments(node)["normalized_shape"]) else None
    rows = part_of(node) is Part.HEAD and fake_of(node.args[1]).dim() == 2
    return dim if rows and dim < fake.dim() - 1 else None


def moved_dim(node: Node, dim: int, rank: int) -> int:
    given = arguments(node)
    if "dims" in given:
        return given["dims"][dim] % rank
    a, b = given["dim0"] % rank, given["dim1"] % rank
    return {a: b, b: a}.get(dim, dim)


def reshaped_dim(node: Node, given: torch.Tensor, dim: int) -> int | None:
    new = fake_of(node).shape
    old, sizes = tuple(map(hint, given.shape)), tuple(map(hint, new))
    same = [at for at, size in enumerate(given.shape) if is_equal(size, new[dim])]
    return next((at for at in same if reshaped(Mark(at), old, sizes) == Mark(dim)), None)


# The slice itself


Sliced = dict[tuple[Node, int, RowRange], Node]


def sliced(node: Node, dim: int, rows: RowRange, like: Node, known: Sliced) -> Node:
    """Insert some rows of a value where the graph is being written. As far as possible, no other rows of
    its operands are read.

    like   a node: new nodes get its stack trace and modes
    known  slices that exist already, which are not made twice; new ones are added
    """
    if (node, dim, rows) not in known:
        known[node, dim, rows] = cut_out(node, dim, rows, like, known)
    return known[node, dim, rows]


def cut_out(node: Node, dim: int, rows: RowRange, like: Node, known: Sliced) -> Node:
    made = None if is_changed(node) else made_anew(node, dim, rows, like, known)
    if made is not None:
        return made
    stop = TO_THE_END if rows.stop is None else rows.stop
    return inserted(like, aten.slice.Tensor, (node, dim, rows.start, stop))


def made_anew(node: Node, dim: int, rows: RowRange, like: Node, known: Sliced) -> Node | None:
    """Compute some rows of a value from its operands. None if they must be sliced out of the value."""
    parts = parts_at(node, dim)
    run = None if parts is None else run_of(parts, rows)
    if parts is not None and run is not None:
        return joined_rows(parts, run, like)
    if part_of(node) is Part.COUNT and arguments(node).get("step", 1) == 1:
        return counted(node, rows, like)
    if is_filled(node):
        sizes = list(arguments(node)["size"])
        sizes[dim] = count_of(sizes[dim], rows, like)
        return inserted(like, node.target, *with_arguments(node, size=sizes))
    start = rows.start
    is_triangle = part_of(node) is Part.TRIANGLE and dim == fake_of(node).dim() - 1
    if is_triangle and isinstance(start, int) and start >= 0:
        given = arguments(node)
        cut = sliced(given["self"], dim, rows, like, known)
        return inserted(like, node.target, (cut, given["diagonal"] - start))
    operands = node.all_input_nodes if may_be_repeated(node, like) else ()
    places = {a: operand_dim(node, a, dim) for a in operands}
    if all(at is None for at in places.values()):
        return None
    values = {a: a if at is None else sliced(a, at, rows, like, known) for a, at in places.items()}
    return repeated(node, dim, values, like)


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
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: values[a])
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


def counted(node: Node, rows: RowRange, like: Node) -> Node:
    """Insert an ``arange`` of some of the consecutive numbers of another."""
    given = arguments(node)
    first, end = given.get("start", 0), given["end"]

    def place(at: int | Node | None) -> object:
        from_end = at is None or isinstance(at, int) and at < 0
        return sum_of(end if from_end else first, at or 0, like)

    names = ("layout", "device", "pin_memory")
    kwargs = {name: given[name] for name in names if given.get(name) is not None}
    bounds = (place(rows.start), place(rows.stop))
    return inserted(like, aten.arange.start, bounds, {**kwargs, "dtype": fake_of(node).dtype})


def count_of(size: object, rows: RowRange, like: Node) -> object:
    """Count the rows of a range, in a dimension of ``size`` rows."""
    if rows.is_front():
        return rows.stop
    start, stop = rows.start, rows.stop or 0
    if isinstance(start, Node) or isinstance(stop, Node):
        end = stop if isinstance(stop, Node) else sum_of(size, stop, like)
        return inserted(like, operator.sub, (end, start), as_written=True)
    return stop - start if start < 0 else sum_of(size, stop - start, like)


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

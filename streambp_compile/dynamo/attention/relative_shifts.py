"""Relative shifts of attention scores ("skewing"): Transformer-XL, Music Transformer, XLNet, Conformer,
VITS.

Scores of queries and relative positions, ``[T, R]``, become scores of queries and keys: entry (i, j) is
that of query i at distance i - j. Models do it by reshapes alone. They put a zero in front of every row,
lay the rows one behind the other, and take a view whose rows are one shorter, which moves each row one
further. Such a view mixes tokens with columns, and no chunk can be cut out of it.

So padding, views and slices are followed as maps of places in the rows laid one behind the other. Where
they amount to a relative shift, ``streambp.skewed`` is written, in Dynamo's graph, before autograd sees
it. Entries that come from the row behind, or before, are a shift of those rows, so that nothing is left
out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from ... import internals
from ...passes.ir import Size, ancestors, arguments, is_equal, simplified
from ...passes.rules import filling_of
from ...passes.rules.forward import Part, is_detached, mutated, part_of, slice_of
from ..reading.aten import erase_unread, inserted, size_as_node, sum_of
from ..reading.token_axes import Axis, axes_of, traced
from ..reading.values import fake_of, is_changed, joined_values, storage_of

aten, streambp = torch.ops.aten, torch.ops.streambp


@dataclass(frozen=True)
class PlaceMap:
    """Places that the entries of a value come from, in the rows of a matrix laid one behind the other.

    source  the value that holds the matrix, with rows along ``dim`` and columns behind them
    front   zeros in front of each row
    width   places of a row, zeros included; before the first row and behind the last, all places are zero
    at      the first of the value's dimensions that count places; others are those of the source
    dims    size and stride of each of them: its index times its stride is added to ``offset``
    """

    source: Node
    dim: int
    front: Size
    width: Size
    at: int
    offset: Size
    dims: tuple[tuple[Size, Size], ...]

    @property
    def rows(self) -> Size:
        return fake_of(self.source).shape[self.dim]

    def fits(self, shape: Sequence[Size]) -> bool:
        """Does a value have the other dimensions of the source, in the same places?"""
        given = fake_of(self.source).shape
        others = [[s for d, s in enumerate(x) if d not in (self.dim, self.dim + 1)] for x in (given, shape)]
        return self.at == self.dim and len(given) == len(shape) and all(map(is_equal, *others))

    @property
    def step(self) -> int | None:
        """Columns that each row reads further than the row before it: 1 or -1. None if the value is no
        matrix with as many rows, or if it moves them by more than one."""
        if len(self.dims) != 2 or not same(self.dims[0][0], self.rows) or not same(self.dims[1][1], 1):
            return None
        step = constant(self.dims[0][1] - self.width)
        return step if step in (-1, 1) else None


@dataclass(frozen=True)
class Shift:
    """A call of ``streambp.skewed``. Entry (i, j) is that of row ``i + rows``, column ``j + step * i +
    offset``."""

    columns: Size
    offset: Size
    step: int
    rows: int


def write_relative_shifts(module: GraphModule) -> GraphModule:
    """Write relative shifts of rows of tokens as operators."""
    found = relative_shifts(module.graph)
    if found:
        fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
        axes = axes_of(traced(module, fakes), fakes)
        found = {node: place_map for node, place_map in found.items() if has_rows_of_tokens(place_map, axes)}
        count_apart(module.graph, [place_map.source for place_map in found.values()])
        erase_unread(module.graph, [node for node, place_map in found.items() if write(node, place_map)])
    return module


def has_rows_of_tokens(place_map: PlaceMap, axes: Sequence[Axis]) -> bool:
    marks = [m for axis in axes for m in axis.marks.get(place_map.source, ()) if m.dim == place_map.dim]
    known = not internals.is_unbacked(fake_of(place_map.source))
    return known and any(m.is_plain for m in marks)


def count_apart(graph: Graph, scores: Sequence[Node]) -> None:
    """Copy the position numbers that relative positions are computed from, one copy for each reader. A mask
    may read the same numbers as tokens, which would make keys of relative positions."""
    written = mutated_storages(graph)
    for node in ancestors(scores):
        if part_of(node) is not Part.COUNT or storage_of(node) in written:
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                copy = graph.node_copy(node)
            user.replace_input_with(node, copy)


def mutated_storages(graph: Graph) -> set[int | None]:
    return {storage_of(target) for n in graph.nodes if (target := mutated(n)) is not None}


def relative_shifts(graph: Graph) -> dict[Node, PlaceMap]:
    """Find the values that are relative shifts of others, and that more than other such values read."""
    place_maps: dict[Node, PlaceMap] = {}
    for node in graph.nodes:
        place_map = place_map_of(node, place_maps) if is_one_tensor(node) else None
        if place_map is not None:
            place_maps[node] = place_map
    shifts = {n: a for n, a in place_maps.items() if a.step is not None and a.fits(fake_of(n).shape)}
    written = mutated_storages(graph) if shifts else set()
    return {
        node: place_map
        for node, place_map in shifts.items()
        if storage_of(place_map.source) not in written and not all(user in shifts for user in node.users)
    }


def is_one_tensor(node: Node) -> bool:
    return node.op == "call_function" and isinstance(fake_of(node), torch.Tensor)


def constant(size: Size) -> int | None:
    """Return the number that a size is at every length. None if it depends on the length."""
    if isinstance(size, int):
        return size
    expr = simplified(size.node.expr)
    return int(expr) if expr.is_Integer else None


def same(a: Size, b: Size) -> bool:
    return constant(a - b) == 0


def size_of(value: object) -> Size | None:
    """Return a size, or the size that a node has. None if it is unknown."""
    size = fake_of(value) if isinstance(value, Node) else value
    known = isinstance(size, int) or isinstance(size, torch.SymInt) and size.node.hint is not None
    return size if known else None


# Padding, views and slices as maps of places


def place_map_of(node: Node, known: dict[Node, PlaceMap]) -> PlaceMap | None:
    """Find the place map of a value, from that of its operand or from a matrix that begins here."""
    if is_detached(node) or any(map(is_changed, (node, *node.all_input_nodes))):
        return None
    for padded in paddings(node):
        source = padded.source
        for given in filter(None, (known.get(source), rows_along(source, padded.dim - 1))):
            made = with_padding(given, padded)
            if made is not None:
                return made
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    given = known.get(source) if source is not None else None
    if part_of(node) in (Part.MERGE, Part.RESHAPE, Part.SHAPED_AS):
        given = given or remade_rows(source, fake_of(node).shape)
        return None if given is None else viewed_as(given, source, fake_of(node).shape)
    if given is None:
        return None
    if part_of(node) is Part.COPY:
        return given if fake_of(node).dtype == fake_of(source).dtype else None
    cut = first_taken(node)
    return None if cut is None else sliced(given, *cut, fake_of(node).shape)


def rows_along(source: Node, dim: int) -> PlaceMap | None:
    """Build the place map of a matrix as it is: rows along a dimension, columns behind."""
    if dim < 0:
        return None
    rows, columns = fake_of(source).shape[dim : dim + 2]
    return PlaceMap(source, dim, 0, columns, dim, 0, ((rows, columns), (columns, 1)))


def remade_rows(source: Node | None, new: Sequence[Size]) -> PlaceMap | None:
    """Build the place map of a matrix whose rows and columns a view changes. None if the view changes other
    dimensions."""
    old = fake_of(source).shape if source is not None else ()
    before = next((i for i, pair in enumerate(zip(old, new)) if not is_equal(*pair)), len(old))
    behind = list(zip(reversed(old[before:]), reversed(new[before:])))
    after = next((i for i, pair in enumerate(behind) if not is_equal(*pair)), len(behind))
    return rows_along(source, before) if len(old) - before - after == 2 else None


@dataclass(frozen=True)
class ZerosAround:
    """Zeros before and behind a value, along a dimension."""

    source: Node
    dim: int
    before: Size
    behind: Size


def paddings(node: Node) -> Iterator[ZerosAround]:
    """Yield the value that a node pads with zeros, by ``pad`` or ``cat``, and where the zeros are."""
    given = arguments(node) if part_of(node) in (Part.PAD, Part.JOIN) else {}
    if part_of(node) is Part.PAD and given.get("mode", "constant") == "constant" and not given.get("value"):
        amounts = [size_of(a) for a in given["pad"]]
        pairs = [(i // 2, amounts[i : i + 2]) for i in range(0, len(amounts), 2)]
        pairs = [(i, pair) for i, pair in pairs if any(a is None or not is_equal(a, 0) for a in pair)]
        if len(pairs) == 1 and all(a is not None and a >= 0 for a in pairs[0][1]):
            yield ZerosAround(node.args[0], fake_of(node).dim() - 1 - pairs[0][0], *pairs[0][1])
    if part_of(node) is Part.JOIN:
        pieces, dim = joined_values(node), given["dim"] % fake_of(node).dim()
        own = [i for i, piece in enumerate(pieces) if filling_of(piece) != 0]
        if len(own) == 1 < len(pieces):
            sizes = [fake_of(piece).shape[dim] for piece in pieces]
            yield ZerosAround(pieces[own[0]], dim, sum(sizes[: own[0]]), sum(sizes[own[0] + 1 :]))


def with_padding(given: PlaceMap, padded: ZerosAround) -> PlaceMap | None:
    """Apply padding to a place map: zeros around each row, or before and behind all rows."""
    at, rows, width = padded.dim - given.at, given.rows, given.width
    more = padded.before + padded.behind
    whole = ((rows, width), (width, 1))
    if at == 1 and len(given.dims) == 2 and same(given.offset, 0) and are_same(given.dims, whole):
        wider = width + more
        front = given.front + padded.before
        return replace(given, front=front, width=wider, dims=((rows, wider), (wider, 1)))
    if at != 0 or not is_run(given.dims) or not same(given.offset, 0):
        return None
    (size, stride), *others = given.dims
    if not same(size * stride, rows * width):
        return None
    return replace(given, offset=-padded.before * stride, dims=((size + more, stride), *others))


def are_same(a: Sequence[tuple[Size, Size]], b: Sequence[tuple[Size, Size]]) -> bool:
    return all(same(x, y) for pair in zip(a, b) for x, y in zip(*pair))


def is_run(dims: Sequence[tuple[Size, Size]]) -> bool:
    """Do these dimensions cover all places from the first to the last, in order?"""
    ends = [size * stride for size, stride in dims[1:]] + [1]
    return all(same(stride, end) for (_, stride), end in zip(dims, ends))


def viewed_as(given: PlaceMap, value: Node, new: Sequence[Size]) -> PlaceMap | None:
    """Apply a view to a place map: other dimensions for the same places in the same order."""
    old, count = fake_of(value).shape, len(given.dims)
    before, behind = math.prod(old[: given.at]), math.prod(old[given.at + count :])
    starts = [i for i in range(len(new)) if same(math.prod(new[:i]), before)]
    first = starts[-1] if starts else len(new)  # dimensions of size one count no places
    last = next((i for i in range(first + 1, len(new) + 1) if same(math.prod(new[i:]), behind)), None)
    if last is None:
        return None
    sizes = new[first:last]
    if is_run(given.dims):
        dims = tuple((size, math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes))
        return replace(given, at=first, dims=dims)
    unchanged = len(sizes) == count and all(same(a, b) for a, (b, _) in zip(sizes, given.dims))
    return replace(given, at=first) if unchanged else None


def first_taken(node: Node) -> tuple[int, Size] | None:
    """Find the dimension along which a node takes consecutive entries, and the first of them."""
    source = fake_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(source, torch.Tensor):
        return None
    if node.target is aten.index_select.default:
        index = node.args[2]
        counts = part_of(index) is Part.COUNT and arguments(index).get("step", 1) == 1
        start = size_of(arguments(index).get("start", 0)) if counts else None
        return None if start is None else (node.args[1] % source.dim(), start)
    if node.target is aten.narrow.default:
        dim, start = node.args[1] % source.dim(), size_of(node.args[2])
    else:
        part = slice_of(node, source.dim())
        if part is None or part.lost:
            return None
        dim, start = part.dim, size_of(part.start)
    if start is None:
        return None
    return dim, start + source.shape[dim] if constant(start) is not None and start < 0 else start


def sliced(given: PlaceMap, dim: int, start: Size, new: Sequence[Size]) -> PlaceMap | None:
    """Apply a slice to a place map: some of the places along a dimension."""
    at = dim - given.at
    if not 0 <= at < len(given.dims):
        return None
    stride = given.dims[at][1]
    dims = (*given.dims[:at], (new[dim], stride), *given.dims[at + 1 :])
    return replace(given, offset=given.offset + start * stride, dims=dims)


# Writing


def shifts_of(place_map: PlaceMap) -> list[Shift] | None:
    """List the shifts that a value consists of, one for each row of the matrix that a row reads. None if it
    reads more rows than its neighbours."""
    step, (columns, _) = place_map.step, place_map.dims[1]
    given = fake_of(place_map.source).shape[place_map.dim + 1]
    before, behind = (place_map.rows - 1, 0) if step == -1 else (0, place_map.rows - 1)
    found = []
    for rows in (-2, -1, 0, 1, 2):
        offset = place_map.offset - place_map.front - rows * place_map.width
        if offset + columns - 1 + behind >= 0 and offset - before < given:  # Dynamo guards on symbols
            found.append(Shift(columns, offset, step, rows))
    return found if all(abs(shift.rows) < 2 for shift in found) else None


def write(node: Node, place_map: PlaceMap) -> bool:
    """Write a value as a relative shift of its source. Returns False where that is impossible."""
    source, dim, fake = place_map.source, place_map.dim, fake_of(node)
    shifts = shifts_of(place_map)
    if not shifts:
        return False
    with node.graph.inserting_before(node):
        sizes = [(written(s.columns, place_map, node), written(s.offset, place_map, node)) for s in shifts]
        if any(None in pair for pair in sizes):
            return False
        calls = [(source, dim, *pair, s.step, s.rows) for pair, s in zip(sizes, shifts)]
        new, *others = [inserted(node, streambp.skewed.default, call) for call in calls]
        for other in others:
            new = inserted(node, aten.add.Tensor, (new, other))
        if fake.dtype != fake_of(new).dtype:
            new = inserted(node, aten.to.dtype, (new, fake.dtype))
    node.replace_all_uses_with(new)
    return True


def written(size: Size, place_map: PlaceMap, like: Node) -> Node | int | None:
    """Express a size by a number, or by a node. The node computes a multiple of the source's rows or
    columns, plus a number. None for other sizes."""
    known = constant(size)
    if known is not None:
        return known
    for dim in (place_map.dim, place_map.dim + 1):
        for times in (1, -1, 2):
            rest = constant(size - times * fake_of(place_map.source).shape[dim])
            if rest is not None:
                count = size_as_node(like, place_map.source, dim)
                if times != 1:
                    count = inserted(like, operator.mul, (count, times), as_written=True)
                return sum_of(count, rest, like)
    return None


# The gradient


def keep_shift(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, ctx.dim, _, ctx.offset, ctx.step, ctx.rows = inputs
    ctx.columns = x.shape[ctx.dim + 1]


def skewed_back(ctx, grad: torch.Tensor):
    """Compute the gradient as a shift the other way. Row i went to row ``i - rows``, and there ``step``
    columns further for each row."""
    offset = ctx.step * ctx.rows - ctx.offset
    back = streambp.skewed(grad, ctx.dim, ctx.columns, offset, -ctx.step, -ctx.rows)
    return back, None, None, None, None, None


torch.library.register_autograd("streambp::skewed", skewed_back, setup_context=keep_shift)

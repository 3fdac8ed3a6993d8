"""Values that are split into pieces along a whole dimension, and the same pieces of other values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ... import internals
from ...passes.ir import Size, arguments, hint, is_equal
from ...passes.rules.forward import cuts_into_pieces, slice_of
from ..reading.values import fake_of

Cuts = (
    tuple[int, ...] | int
    # the ends of the pieces (the last is the dimension's), or the number of pieces that ``chunk`` makes of
    # any size
)


@dataclass(frozen=True)
class Tiling:
    """A value that is split along a whole dimension, and its pieces in order."""

    base: Node
    dim: int
    cuts: Cuts
    pieces: tuple[Node, ...]


def has_rows_of(a: Tiling, b: Tiling) -> bool:
    """Do two values have equally many rows now? Dynamo then guards on that."""
    rows, others = (fake_of(t.base).shape[t.dim] for t in (a, b))
    return hint(rows) == hint(others) and bool(rows == others)


def rows_have_features(tiling: Tiling) -> bool:
    """Do the rows of a split value have features, as hidden states have?"""
    fake = fake_of(tiling.base)
    return fake.dtype.is_floating_point and tiling.dim < fake.dim() - 1


def tilings(graph: Graph) -> list[Tiling]:
    """Find all values that are split into at least two pieces, in one call or slice by slice."""
    found = []
    slices: dict[tuple[Node, int], dict[int, tuple[int | None, Node]]] = {}
    for node in graph.nodes:
        if cuts_into_pieces(node):
            found.append(cut_at_once(node))
        part = bounds_of_slice(node)
        if part is not None:
            dim, start, stop = part
            slices.setdefault((node.args[0], dim), {}).setdefault(start, (stop, node))
    found += [cut_by_slices(base, dim, parts) for (base, dim), parts in slices.items()]
    return [t for t in found if t is not None]


def cut_by_slices(base: Node, dim: int, parts: Mapping[int, tuple[int | None, Node]]) -> Tiling | None:
    rows, at, ends, pieces = fake_of(base).shape[dim], 0, [], []
    while at in parts:
        stop, node = parts[at]
        pieces.append(node)
        ends.append(rows if stop is None else stop)
        at = ends[-1]
        if stop is None:
            break
    complete = len(pieces) > 1 and is_equal(ends[-1], rows)
    return Tiling(base, dim, tuple(map(hint, ends)), tuple(pieces)) if complete else None


def cut_at_once(node: Node) -> Tiling | None:
    """Match ``x.chunk(n, dim)`` and similar calls, if all pieces are read."""
    pieces = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    fakes, base = fake_of(node), node.args[0]
    given = arguments(node)
    dim = given["dim"] % fake_of(base).dim()
    if any(f.dim() != fake_of(base).dim() for f in fakes):  # pieces of one row each, without the dimension
        return None
    sizes = [f.shape[dim] for f in fakes]
    if len(fakes) < 2 or set(pieces) != set(range(len(fakes))) or len(node.users) != len(fakes):
        return None
    ordered = tuple(pieces[i] for i in range(len(fakes)))
    if all(isinstance(s, int) for s in sizes[:-1]):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        return Tiling(base, dim, (*ends, hint(fake_of(base).shape[dim])), ordered)
    return (
        Tiling(base, dim, len(sizes), ordered)
        if "chunks" in given and all(is_equal(s, sizes[0]) for s in sizes[:-1])
        else None
    )


def bounds(cuts: Cuts, i: int, rows: int) -> tuple[int, int]:
    """Compute the first row of piece ``i``, and the row behind its last one, of a value with ``rows``
    rows."""
    if isinstance(cuts, int):
        size = (rows + cuts - 1) // cuts
        return i * size, rows if i == cuts - 1 else (i + 1) * size
    return cuts[i - 1] if i else 0, rows if i == len(cuts) - 1 else cuts[i]


@dataclass(frozen=True)
class RowInterval:
    """Rows ``start`` to before ``stop`` of a dimension of a value."""

    base: Node
    dim: int
    start: Size
    stop: Size


def cut_among(nodes: Iterable[Node]) -> dict[Node, RowInterval]:
    """Find nodes that are together all rows of a value, each some of them."""
    found: dict[tuple[Node, int], dict[Node, RowInterval]] = {}
    for node in nodes:
        part = taken(node)
        if part is not None and not any(map(internals.is_unbacked, (part.start, part.stop))):
            found.setdefault((part.base, part.dim), {})[node] = part
    pieces = {}
    for (base, dim), parts in found.items():
        if any(hint(part.start) < 0 for part in parts.values()):
            continue
        in_order = sorted(parts.values(), key=lambda part: hint(part.start))
        ends = [0, *(part.stop for part in in_order)]
        starts = [*(part.start for part in in_order), fake_of(base).shape[dim]]
        if len(parts) > 1 and all(map(is_equal, ends, starts)):
            pieces.update(parts)
    return pieces


def taken(node: Node) -> RowInterval | None:
    """Match consecutive rows of a value: ``x[:, a:b]`` or ``x.narrow(1, a, n)``, at any sizes."""
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or not isinstance(fake_of(base), torch.Tensor):
        return None
    rank = fake_of(base).dim()
    if node.target is torch.ops.aten.narrow.default:
        dim, start, length = (fake_of(a) if isinstance(a, Node) else a for a in node.args[1:])
        return RowInterval(base, dim % rank, start, start + length)
    part = slice_of(node, rank)
    if part is None or part.lost:
        return None
    rows = fake_of(base).shape[part.dim]
    start, stop = (fake_of(a) if isinstance(a, Node) else a for a in (part.start, part.stop))
    ends = stop is None or hint(start) >= 0 and is_equal(fake_of(node).shape[part.dim], rows - start)
    return RowInterval(base, part.dim, start, rows if ends else stop)


def bounds_of_slice(node: Node) -> tuple[int, int, int | None] | None:
    """Match ``x[:, a:b]`` with plain numbers: return (dimension, start, stop)."""
    part = taken(node)
    if part is None:
        return None
    start, stop = part.start, None if is_equal(part.stop, fake_of(part.base).shape[part.dim]) else part.stop
    numbers = type(start) is int and start >= 0 and (stop is None or type(stop) is int and stop > start)
    return (part.dim, start, stop) if numbers and (start, stop) != (0, None) else None


def split_rows(whole: torch.Tensor, mark: tuple[int, int, int]) -> torch.Tensor:
    """Split the dimension that carries rows into outer, rows and inner."""
    dim, outer, inner = mark
    return whole.unflatten(dim, (outer, whole.shape[dim] // (outer * inner), inner))


def rows_of_piece(whole: torch.Tensor, mark: tuple[int, int, int], cuts: Cuts, i: int) -> torch.Tensor:
    dim, outer, inner = mark
    start, stop = bounds(cuts, i, whole.shape[dim] // (outer * inner))
    if outer == inner == 1:
        return whole.narrow(dim, start, stop - start)
    return split_rows(whole, mark).narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)


def sum_of_piece(whole: torch.Tensor, mark: tuple[int, int, int], cuts: Cuts, i: int) -> torch.Tensor:
    """Sum all numbers in the rows of a piece."""
    split, dim = split_rows(whole, mark), mark[0] + 1
    start, stop = bounds(cuts, i, split.shape[dim])
    place = torch.arange(split.shape[dim], device=whole.device).view([-1] + [1] * (split.dim() - dim - 1))
    return torch.where(
        (place >= start) & (place < stop), split, torch.zeros((), dtype=whole.dtype, device=whole.device)
    ).sum()


def mean_of_piece(whole: torch.Tensor, mark: tuple[int, int, int], cuts: Cuts, i: int) -> torch.Tensor:
    rows = split_rows(whole, mark).shape[mark[0] + 1]
    start, stop = bounds(cuts, i, rows)
    return sum_of_piece(whole, mark, cuts, i) / (whole.numel() // rows * (stop - start))

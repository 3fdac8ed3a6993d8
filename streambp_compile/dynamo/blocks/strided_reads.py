"""Reads by strides: ``x.as_strided(...)`` as slices, windows and permutations of dimensions.

Strides are those of the memory of a value, and rewrites may lay it out in another way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import Layout, Size, are_equal, arguments, hint, is_equal
from ...passes.rules.forward import Part, part_of
from ...passes.rules.views import refuse_strides
from ..reading.aten import inserted, size_as_node
from ..reading.values import fake_of, storage_of

RESHAPED = (Part.MERGE, Part.RESHAPE, Part.MOVE, Part.TRANSPOSE)


def write_strided_reads(module: GraphModule) -> GraphModule:
    """Write ``x.as_strided(...)`` as slices and windows of dimensions. Its strides are those of the memory of
    ``x`` as Dynamo saw it, and later rewrites may lay values out in another way.

    Raises
      CannotStream  numbers are read that are in the memory of ``x``, but perhaps not in ``x``
    """
    for node in list(module.graph.nodes):
        if node.op == "call_method" and node.target == "stride":
            write_strides(node)
        if part_of(node) is not Part.STRIDED or internals.is_sharded(fake_of(node.args[0])):
            continue
        given = strided(node, node.args[0])
        if given is None:
            raise refuse_strides(node)
        if given.layout.order == (0,):
            continue  # a value of one dimension has one layout
        given, groups = through_reshapes(node, given)
        with node.graph.inserting_before(node):
            new = read_memory(node, given) if groups is None else read_dimensions(node, given, groups)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
    return module


@dataclass(frozen=True)
class Strided:
    """A view of the memory of ``source``.

    layout   that of ``source``, which is dense
    offset   the place in ``source`` of the first number that is read
    shape    of the view
    strides  of the view
    """

    source: Node
    layout: Layout
    offset: Size
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]

    def span(self, dims: Iterable[int]) -> int:
        """Return the distance between the first and the last number along some dimensions of the view."""
        return sum((hint(self.shape[i]) - 1) * hint(self.strides[i]) for i in dims)

    @property
    def moving(self) -> list[int]:
        """List the dimensions along which the place in memory changes. This adds guards."""
        return [i for i, (m, by) in enumerate(zip(self.shape, self.strides)) if m != 1 and by != 0]


@dataclass(frozen=True)
class DimGroup:
    """Dimensions of the source that are next to each other in memory, read as one.

    dims   the first and the last of them, in the order of the layout
    place  of the first row that is read
    steps  each dimension of the view that steps through the rows → rows in a step, the widest first
    """

    dims: tuple[int, int]
    place: int
    steps: dict[int, int]

    @property
    def is_one(self) -> bool:
        return self.dims[0] == self.dims[1]


def through_reshapes(node: Node, given: Strided) -> tuple[Strided, list[DimGroup] | None]:
    """Choose the source of a view, and group its dimensions. The source is the operand, or a value that the
    operand reshapes if each group is one dimension there: no tokens are then split and joined again. What is
    reshaped without gradients has been detached by then (`detach_operands`)."""
    found, at = [(given, groups_of(given))], given.source
    while part_of(at) in RESHAPED and storage_of(at) == storage_of(at.args[0]):
        at = at.args[0]
        other = strided(node, at)
        found += [(other, groups_of(other))] if other is not None else []
    single = (pair for pair in found if pair[1] is not None and all(group.is_one for group in pair[1]))
    return next(single, found[0])


def strided(node: Node, source: Node) -> Strided | None:
    """Read a call of ``as_strided`` as one of ``source``, which has the memory of its operand. None where it
    may read what ``source`` does not have."""
    given = arguments(node)
    fakes = map_arg(given, fake_of)
    layout = Layout.of(fake_of(source))
    if layout is None or "src" in given:
        return None
    start = fakes.get("storage_offset")
    start = fake_of(given["self"]).storage_offset() if start is None else start
    offset = start - fake_of(source).storage_offset()
    shape, strides = tuple(fakes["size"]), tuple(fakes["stride"])
    found = Strided(source, layout, offset, shape, strides)
    inside = 0 <= hint(offset) < hint(fake_of(source).numel()) - found.span(range(len(shape)))
    return found if inside else None


def groups_of(given: Strided) -> list[DimGroup] | None:
    """Group the dimensions of the source, from the outermost, so that each dimension of the view stays in one
    group. None where the view of a group is more than rows in steps, or than windows of rows."""
    shape, order = fake_of(given.source).shape, given.layout.order
    units = [given.layout.strides(shape)[dim] for dim in order]
    edges = [0, *(k for k in range(1, len(order)) if is_edge(given, hint(units[k - 1]))), len(order)]
    by = [hint(stride) for stride in given.strides]
    widest, groups = sorted(given.moving, key=lambda i: -by[i]), []
    for first, end in zip(edges, edges[1:]):
        unit, outer = units[end - 1], units[first - 1] if first else None
        own = [i for i in widest if by[i] >= hint(unit) and (outer is None or by[i] < hint(outer))]
        steps = {i: by[i] // hint(unit) for i in own}
        place = hint(given.offset) // hint(unit) % (hint(outer) // hint(unit) if first else 1 << 62)
        whole = all(step * unit == given.strides[i] for i, step in steps.items())  # this adds guards
        if not whole or len(steps) > 2 or len(steps) == 2 and [*steps.values()][1] != 1:
            return None
        groups.append(DimGroup((first, end - 1), place, steps))
    start = sum(group.place * units[group.dims[1]] for group in groups)
    return groups if start == given.offset else None


def is_edge(given: Strided, unit: int) -> bool:
    """Does each dimension of a view step either through rows of ``unit`` numbers, or within one such row?"""
    inner = [i for i in given.moving if hint(given.strides[i]) < unit]
    outer = [hint(given.strides[i]) for i in given.moving if i not in inner]
    return not any(by % unit for by in outer) and hint(given.offset) % unit + given.span(inner) < unit


def read_dimensions(node: Node, given: Strided, groups: Sequence[DimGroup]) -> Node:
    """Insert a view as slices and windows of the dimensions of its source."""
    sizes, rows = arguments(node)["size"], given.source

    def write(function: Callable, *args: object) -> None:
        nonlocal rows
        rows = inserted(node, function, (rows, *args))

    if list(given.layout.order) != sorted(given.layout.order):
        write(torch.permute, given.layout.order)
    for first, last in (group.dims for group in reversed(groups) if not group.is_one):
        write(torch.flatten, first, last)
    made: list[int | None] = [None] * len(groups)  # the dimension of the view that a dimension is
    for at in reversed(range(len(groups))):
        group = groups[at]
        if not group.steps:
            write(torch.select, at, group.place)
            del made[at]
            continue
        (dim, step), *inner = group.steps.items()
        if group.place or step > 1 and not inner:
            write(torch.ops.aten.slice.Tensor, at, group.place, None, 1 if inner else step)
        for other, _ in inner:
            write(torch.Tensor.unfold, at, sizes[other], step)
            made.append(other)
        if not is_equal(fake_of(rows).shape[at], given.shape[dim]):
            write(torch.narrow, at, 0, sizes[dim])
        made[at] = dim
    order = [made.index(i) for i in given.moving]
    if order != sorted(order):
        write(torch.permute, order)
    for i in sorted({*range(len(given.shape))} - {*given.moving}):
        write(torch.unsqueeze, i)
    if not are_equal(fake_of(rows).shape, given.shape):
        write(torch.Tensor.expand, sizes)
    return rows


def read_memory(node: Node, given: Strided) -> Node:
    """Insert a view of the numbers of its source, as one dimension."""
    flat = inserted(node, torch.permute, (given.source, given.layout.order))
    flat = inserted(node, torch.flatten, (flat,))
    call = arguments(node)
    return inserted(node, torch.as_strided, (flat, call["size"], call["stride"], given.offset))


def write_strides(node: Node) -> None:
    """Write the strides of a dense value as products of its sizes."""
    source, *dims = node.args
    layout = Layout.of(fake_of(source))
    items = {node: dims[0]} if dims else {n: n.args[1] for n in node.users if n.target is operator.getitem}
    for item, dim in items.items():
        if layout is None or isinstance(dim, slice) or not isinstance(fake_of(item), torch.SymInt):
            continue  # a number that is known is no node
        with node.graph.inserting_before(item):
            stride: Size | Node = 1
            for inner in layout.order[layout.order.index(dim % len(layout.order)) + 1 :]:
                size = size_as_node(source, source, inner)
                stride = (
                    size if stride == 1 else inserted(source, operator.mul, (stride, size), as_written=True)
                )
        item.replace_all_uses_with(stride)

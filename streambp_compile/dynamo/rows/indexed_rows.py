"""Whole rows that are read or written by index, in one spelling: ``x[b, i]``. Other spellings repeat the
index along the numbers of a row, or flatten it. One number of each row is read by ``gather``. The rewrite
is done in Dynamo's graph, before autograd sees it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import are_equal, arguments, is_equal, is_view
from ...passes.rules.forward import Along, Part, part_of, read_or_written_along
from ..reading.aten import inserted, size_as_node
from ..reading.values import fake_of, is_changed

aten = torch.ops.aten


def index_rows(module: GraphModule) -> GraphModule:
    """Write ``x.gather(1, i[..., None].expand(-1, -1, D))`` as ``x[b, i]``, and
    ``x[i.flatten()].view(*i.shape, D)`` as ``x[i]``. ``scatter`` is rewritten like ``gather``. A look-up
    of one number in each row, ``x[b, t, i]`` with ranges b and t, becomes a ``gather``. The
    repeated index would be as wide as hidden states where one region makes it and another reads it. A flat
    index of pairs of tokens has no rows that a chunk could take."""
    for node in list(module.graph.nodes):
        if part_of(node) is Part.INDEX:
            gather_numbers(node) if picks_numbers(node) else look_up_in_shape(node)
    for node in list(module.graph.nodes):
        found = read_or_written_along(node) if node.op == "call_function" else None
        rows = None if found is None else row_index(found)
        if found is None or rows is None:
            continue
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(by_rows(node, found, rows))
        module.graph.erase_node(node)
    return module


def picks_numbers(node: Node) -> bool:
    """Does a node read one number of each row, by a range for every dimension but the last one?"""
    indices, base, shape = arguments(node).get("indices", ()), fake_of(node.args[0]), fake_of(node).shape
    if len(indices) != base.dim() or len(shape) != base.dim() - 1 or None in indices or not len(shape):
        return False
    picked = fake_of(indices[-1])
    whole = picked.dtype is torch.int64 and isinstance(base.shape[-1], int)
    fits = base.dtype.is_floating_point and whole and are_equal(picked.shape, shape)
    return fits and all(
        is_range_along(ix, dim, shape[dim], len(shape)) for dim, ix in enumerate(indices[:-1])
    )


def is_range_along(node: Node, dim: int, size: object, rank: int) -> bool:
    """Is a value the range of a dimension, repeated along the other ones? It may lack dimensions in front."""
    fake = fake_of(node)
    while is_view(node):
        node = node.args[0]
    given = arguments(node) if part_of(node) is Part.COUNT else None
    if given is None or given.get("start", 0) != 0 or given.get("step", 1) != 1:
        return False
    own = dim - rank + fake.dim()
    here = own >= 0 and is_equal(fake.shape[own], size) and is_equal(fake_of(node).shape[0], size)
    moves = [d for d, step in enumerate(fake.stride()) if step != 0 and not is_equal(fake.shape[d], 1)]
    return here and fake.dtype is torch.int64 and all(d == own and fake.stride(d) == 1 for d in moves)


def gather_numbers(node: Node) -> None:
    """Replace a look-up of one number in each row. Negative places count from the end."""
    base, index = node.args[0], node.args[1][-1]
    last = fake_of(base).dim() - 1
    with node.graph.inserting_before(node):
        from_end = inserted(node, aten.add.Scalar, (index, fake_of(base).shape[last]))
        negative = inserted(node, aten.lt.Scalar, (index, 0))
        places = inserted(node, aten.where.self, (negative, from_end, index))
        places = inserted(node, aten.unsqueeze.default, (places, last))
        picked = inserted(node, aten.gather.default, (base, last, places))
        node.replace_all_uses_with(inserted(node, aten.squeeze.dim, (picked, last)))
    node.graph.erase_node(node)


def look_up_in_shape(node: Node) -> None:
    """Look up by an index before it is flattened, if all readers give the result the index's shape."""
    base, dim, flat = looked_up(node)
    source = flat.args[0] if flat is not None and part_of(flat) is Part.MERGE else None
    if not isinstance(source, Node) or fake_of(flat).dim() != 1 or fake_of(source).dtype is torch.bool:
        return
    if is_changed(source):
        return
    shape = (*fake_of(base).shape[:dim], *fake_of(source).shape, *fake_of(base).shape[dim + 1 :])
    readers = list(node.users)
    if not readers or not all(
        part_of(r) is Part.MERGE and are_equal(fake_of(r).shape, shape) for r in readers
    ):
        return
    with node.graph.inserting_before(node):
        new = inserted(node, aten.index.Tensor, (base, [*[None] * dim, source]))
        new = inserted(node, aten.contiguous.default, (new,)) if dim else new
    for old in (*readers, node, flat):
        if old in readers:
            old.replace_all_uses_with(new)
        if not old.users:
            node.graph.erase_node(old)


def looked_up(node: Node) -> tuple[Node, int, Node | None]:
    """Return the table, the dimension and the index of a look-up by one index. With several indices, the
    index is None."""
    base, *rest = node.args
    if node.target is aten.index_select.default:
        return base, rest[0] % max(1, fake_of(base).dim()), rest[1]
    given = [i for i, index in enumerate(rest[0]) if index is not None]
    return base, given[0] if given else 0, rest[0][given[0]] if len(given) == 1 else None


def by_rows(node: Node, found: Along, rows: Node) -> Node:
    """Insert the same read or write, with one index of rows and one for each dimension in front."""
    rank, dim = fake_of(node).dim(), found.dim % fake_of(node).dim()
    for _ in range(rank - dim - 1):
        rows = inserted(node, aten.select.int, (rows, -1, 0))
    index = [*(counted_along(node, rows, d) for d in range(dim)), rows]
    if found.values is None:
        return inserted(node, aten.index.Tensor, (found.base, index))
    return inserted(node, aten.index_put.default, (found.base, index, found.values, found.adds))


def counted_along(like: Node, rows: Node, dim: int) -> Node:
    """Number the entries of an index along one of its dimensions."""
    fake, size = fake_of(rows), size_as_node(like, rows, dim)
    places = inserted(like, aten.arange.default, (size,), {"device": fake.device})
    for _ in range(fake.dim() - dim - 1):
        places = inserted(like, aten.unsqueeze.default, (places, -1))
    if any(fake.shape[d] != 1 for d in range(dim)):
        places = inserted(like, aten.expand_as.default, (places, rows))
    return places


def row_index(found: Along) -> Node | None:
    """Find the index before it was repeated along the numbers of a row. There, its dimensions behind the rows
    have size one. None if rows are not read or written whole."""
    base, index = fake_of(found.base), found.index
    dim = found.dim % base.dim() if base.dim() else 0
    if not base.dtype.is_floating_point or fake_of(index).dim() != base.dim() or dim == base.dim() - 1:
        return None
    shape = fake_of(found.values if found.values is not None else index).shape
    same = all(
        is_equal(a, b) for d, (a, b) in enumerate(zip(fake_of(index).shape, base.shape)) if d != dim
    ) and all(map(is_equal, fake_of(index).shape, shape))
    while same and (source := repeated_from(index)) is not None:
        index = source
        if all(fake_of(index).shape[d] == 1 for d in range(dim + 1, base.dim())):
            kept = all(is_equal(fake_of(index).shape[d], shape[d]) for d in range(dim + 1))
            return index if kept else None
    return None


def repeated_from(node: Node) -> Node | None:
    """Find the value that a node repeats along dimensions of size one, or copies."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source, fake = node.args[0], fake_of(node)
    given = fake_of(source)
    if not isinstance(given, torch.Tensor) or given.dim() != fake.dim() or given.dtype != fake.dtype:
        return None
    if part_of(node) in (Part.EXPAND, Part.COPY):
        return source
    repeats = arguments(node)["repeats"] if node.target is aten.repeat.default else ()
    once = all(n == 1 or size == 1 for n, size in zip(repeats, given.shape))
    return source if repeats and once else None

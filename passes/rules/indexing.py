"""Look-ups by index: a table is read whole, and the result has the rows of the index."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..ir import (
    EVERYWHERE,
    Kind,
    Label,
    Labels,
    Reach,
    Role,
    Signature,
    Tokens,
    hint,
    refuse,
    shape_of,
    value_of,
)
from . import Indices, is_zeros, rule
from .facets import CostClass, Form
from .mask_domain import layout
from .mask_domain.bounded import always, if_operands_are
from .signatures import aligned, all_at_once, argument

FUSED = CostClass.FUSED
aten = torch.ops.aten


def into_rows(node: Node) -> Indices:
    """Return the index of a row look-up, with its bounds. Sizes that change are symbols here, because bounds
    must hold at every length."""
    return {node.args[1]: (0, value_of(node.args[0]).shape[0] - 1)}


def into_weight(node: Node) -> Indices:
    return {node.args[1]: (0, node.args[2] - 1)}


def along_dim(node: Node) -> Indices:
    """Return the index of ``gather`` or ``scatter``, with its bounds."""
    sizes = value_of(node.args[0]).shape
    return {node.args[2]: (0, sizes[node.args[1]] - 1 if sizes else 0)}


def into_dims(node: Node) -> Indices:
    """Return the indices of ``x[i, :, j]``, with their bounds. Negative indices count from the end: the last
    row is also -1."""
    sizes = value_of(node.args[0]).shape
    given = ((ix, size) for ix, size in zip(node.args[1], sizes) if isinstance(ix, Node))
    return {ix: (-size, size - 1) for ix, size in given if value_of(ix).dtype in (torch.int64, torch.int32)}


@rule("aten::embedding", cost=CostClass.KERNEL, linear="weight", bounded=always, indices=into_rows)
def embedding(node: Node) -> Signature:
    index = tuple(f"i{i}" for i in range(len(shape_of(node.args[1]))))
    return Signature((("v", "d"), index), ((*index, "d"),), contracts="all")


def emit_embedding_backward(body, node: Node):
    if not body.adds_up(node):
        return body.copy(node)
    index = body.operand(body.edges(node)[1])
    return body.accumulate_rows(node, index, body.summand(node.args[0]), padding=node.args[3])


@rule(
    "aten::embedding_dense_backward",
    emit=emit_embedding_backward,
    cost=CostClass.SCATTER,
    linear="grad_output",
    keep=True,
    indices=into_weight,
)
def embedding_backward(node: Node) -> Signature:
    index = tuple(f"i{i}" for i in range(len(shape_of(node.args[1]))))
    counts = len(node.args) > 4 and node.args[4]  # scale_grad_by_freq counts all tokens first
    return Signature(((*index, "d"), index), ((None, "d"),), contracts="all" if counts else "sum")


@rule("aten::index_select", cost=FUSED, linear="self", form=Form.LOOK_UP_ALONG, indices=along_dim)
def index_select(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    dim = node.args[1] % rank
    table = tuple("table" if i == dim else i for i in range(rank))
    return Signature(
        (table, ("rows",)), (tuple("rows" if i == dim else i for i in range(rank)),), contracts="all"
    )


def emit_index(body, node: Node):
    """Write rows that an index picks out of all tokens. Each chunk gives the rows that it has, and the chunks
    add up."""
    if not body.adds_up(node):
        return body.copy(node)
    x, indices = node.args[0], list(node.args[1])
    mark = body.fact(x).rows
    local, inside = body.rows_of_chunk(body.read_whole(indices[mark.dim]), mark, body.fact(x).lo)
    position = 1 + sum(1 for ix in indices[: mark.dim] if ix is not None)
    picked = body.copy(node, {0: body.read(x), position: local})
    return body.added(node, body.zero_unless(before_dims(body, inside, trailing(node)), picked, node))


def trailing(node: Node) -> int:
    """Count the dimensions of an indexed value that come after those of the indices."""
    x, indices = node.args[0], node.args[1]
    used = [i for i, ix in enumerate(indices) if ix is not None]
    together = used == list(range(used[0], used[-1] + 1))
    return len(shape_of(x)) - (used[-1] + 1 if together else len(used))


def before_dims(body, mask: Node, count: int) -> Node:
    """Reshape a mask to broadcast against values with ``count`` more trailing dimensions."""
    for _ in range(count):
        mask = body.graph.call_function(torch.ops.aten.unsqueeze.default, (mask, -1))
    return mask


@rule(
    "aten::index.Tensor",
    emit=emit_index,
    cost=FUSED,
    linear="self",
    form=Form.LOOK_UP,
    mask=layout.looked_up,
    bounded=if_operands_are,
    indices=into_dims,
)
def index(node: Node) -> Signature:
    """Build the signature of ``x[i, :, j]``. The index tensors broadcast together. Their dimensions come
    where the first index was, or in front if the indices are apart."""
    x, indices = node.args[0], list(node.args[1])
    rank = len(shape_of(x))
    if any(ix is not None and value_of(ix).dtype in (torch.bool, torch.uint8) for ix in indices):
        return all_at_once(node)  # how many rows a mask picks depends on the data
    indices += [None] * (rank - len(indices))
    used = [i for i, ix in enumerate(indices) if ix is not None]
    index_rank = max(len(shape_of(indices[i])) for i in used)
    out = shape_of(node)
    together = used == list(range(used[0], used[-1] + 1))
    first = used[0] if together else 0
    kept = [i for i in range(rank) if i not in used]
    before = [i for i in kept if together and i < first]
    after = [i for i in kept if i not in before]
    index_labels = tuple(("i", j) for j in range(index_rank))
    shape = out[len(before) : len(before) + index_rank]
    operands: list[Labels] = [tuple(("read", i) if i in used else ("x", i) for i in range(rank))]
    for i in used:
        operands.append(tuple(None if j is None else ("i", j) for j in aligned(shape_of(indices[i]), shape)))
    outputs = (*(("x", i) for i in before), *index_labels, *(("x", i) for i in after))
    picks = all(value_of(indices[i]).dtype is torch.int64 for i in used)
    return Signature(tuple(operands), (outputs,), contracts="picked" if picks else "all")


@rule("aten::gather", cost=FUSED, linear="self", bounded=if_operands_are, indices=along_dim)
def gather(node: Node) -> Signature:
    table, rows = shape_of(node.args[0]), shape_of(node)
    dim = node.args[1] % max(len(rows), 1)
    # An index narrower than the table along another dimension reads only the table's first rows there: row 0
    # is tied to row 0.
    labels = tuple(("moved", i) if i == dim else i for i in range(len(table)))
    shifts: dict[Label, tuple[int, ...]] = {
        i: (0, 0) for i in range(len(rows)) if i != dim and table[i] != rows[i]
    }
    return Signature(
        (labels, tuple(range(len(rows)))), (tuple(range(len(rows))),), contracts="all", offsets=shifts
    )


def emit_skewed(body, node: Node):
    """Write rows whose columns are shifted by the row's place. Rows and keys are counted from the first of
    all. The look-up is written out, so that the kernel that reads the scores moves them."""
    dim, _, offset, step, rows = node.args[1:]
    edge, call, sizes = body.edges(node)[0], body.graph.call_function, body.sizes(node)
    check_columns(body, node, edge.operand, dim + 1)
    value, given = body.operand(edge), body.sizes(edge.operand)[dim + 1]
    if rows and not body.carries_tokens(node, dim):
        value = call(torch.ops.streambp.shifted.default, (value, dim, -rows))
    elif rows and edge.role is Role.ROWS:
        value = body.fill_outside(node, value, 0, source=edge.operand)
    at = call(aten.view.default, (call(aten.mul.Scalar, (body.positions(node, dim), step)), [-1, 1]))
    at = call(aten.add.Tensor, (at, body.positions(node, dim + 1)))
    at = call(aten.add.Scalar, (at, body.read_int(offset) if isinstance(offset, Node) else offset))
    if body.carries_keys(edge.operand, dim + 1):
        at = call(aten.sub.Scalar, (at, body.first_key()))
    at = call(aten.view.default, (at, [*sizes[dim : dim + 2], *[1] * (len(sizes) - dim - 2)]))
    last = call(operator.sub, (given, 1)) if isinstance(given, Node) else given - 1
    index = call(aten.expand.default, (call(aten.clamp.default, (at, 0, last)), sizes))
    bounds = (call(aten.ge.Scalar, (at, 0)), call(aten.le.Scalar, (at, last)))
    moved = call(aten.gather.default, (value, dim + 1, index))
    return body.zero_unless(call(aten.logical_and.default, bounds), moved, node)


def check_columns(body, node: Node, operand: Node, dim: int) -> None:
    """Refuse columns that are not exactly the keys, or that are keys both before and after the shift. A chunk
    has only some of the keys, and would not find those that a shift reads."""
    counted = [value for value in (node, operand) if body.carries_keys(value, dim)]
    length = hint(body.analysis.length)
    if len(counted) > 1 or any(shape_of(value)[dim] != length for value in counted):
        raise refuse(
            node,
            "The attention keys are shifted against the token sequence",
            "Attend over all tokens, and slice the result afterwards",
        )


@rule(
    "streambp::skewed",
    emit=emit_skewed,
    cost=FUSED,
    linear="x",
    form=Form.SKEWED,
    bounded=if_operands_are,
    by_place=True,
)
def skewed(node: Node) -> Signature:
    _, dim, _, _, _, rows = node.args
    rank = len(shape_of(node))
    read, made = (tuple((name, i) if i == dim + 1 else i for i in range(rank)) for name in ("read", "made"))
    reach = {dim: Reach(rows, rows)} if rows else {}
    return Signature((read,), (made,), contracts="all", reach=reach, placed=frozenset({dim}))


def emit_scatter(body, node: Node):
    """Write a scatter, with keys counted from the first of all. Rows that a narrower index does not have must
    not be written, so zero is added in them."""
    edges, dim = body.edges(node), node.args[1] % max(len(shape_of(node)), 1)
    if among_some_keys(body, node, dim):
        padding = [0, 0] * (len(shape_of(node)) - 1 - dim) + [0, 1]
        base, index = (body.operand(edge) for edge in edges[:2])
        base = body.graph.call_function(aten.constant_pad_nd.default, (base, padding))
        index = among_keys(body, index, value_of(node).device)
        return without_others(body, body.copy(node, {0: base, 1: index}), dim)
    if len(edges) < 3 or "scatter_add" not in str(node.target):
        return body.copied(node)
    _, index, source = edges
    value = body.zero_beyond(source.operand, body.operand(source), source.operand)
    return body.copy(node, {2: body.zero_beyond(index.operand, value, source.operand)})


def among_some_keys(body, node: Node, dim: int) -> bool:
    """Does a value have columns along a dimension for the keys that the chunk reads, and no others?"""
    return body.carries_keys(node, dim) and body.sweep.keys != EVERYWHERE


def among_keys(body, index: Node, device: torch.device) -> Node:
    """Count places of keys from the first key that the chunk reads. Keys that it does not read share one
    place behind the others."""
    call, keys = body.graph.call_function, body.scalar("keys")
    at = call(aten.sub.Scalar, (index, body.first_key()))
    bounds = call(aten.ge.Scalar, (at, 0)), call(aten.lt.Scalar, (at, keys))
    behind = call(aten.full.default, ([], keys), dict(dtype=torch.int64, device=device))
    return call(aten.where.self, (call(aten.logical_and.default, bounds), at, behind))


def without_others(body, value: Node, dim: int) -> Node:
    """Slice the columns of the keys that the chunk reads."""
    return body.graph.call_function(aten.slice.Tensor, (value, dim, 0, body.scalar("keys")))


def scattered(node: Node) -> Signature:
    base, index = shape_of(node.args[0]), shape_of(node.args[2])
    dim = node.args[1] % max(len(base), 1)
    sources = [a for a in (node.args[2], node.args[3]) if isinstance(a, Node) and shape_of(a)]
    labels = tuple(range(len(base)))
    put = [tuple(("moved", k) if i == dim else i for i in labels) for k in range(len(sources))]
    narrow = any(index[i] != base[i] for i in labels if i != dim)
    if not narrow:
        numbers = [()] * (isinstance(node.args[3], Node) + 1 - len(sources))
        return Signature((labels, *put, *numbers), (labels,), contracts="all", indexed=frozenset({dim}))
    if "scatter_add" not in str(node.target):
        return all_at_once(node)
    out = tuple(None if i == dim else i for i in labels)
    offsets: dict[Label, tuple[int, ...]] = {i: (0,) * (1 + len(put)) for i in labels if i != dim}
    return Signature((out, *put), (out,), contracts="all", offsets=offsets)


def emit_sum_at(body, node: Node):
    """Write a sum of entries at an index. A sum over chunks, or per key, is added to its accumulator in
    place, because a part of it may be wide."""
    if body.analysis.kinds[node] in (Kind.SUM, Kind.KEYSUM):
        return body.accumulate_at(node)
    index, source = (body.operand(edge) for edge in body.edges(node))
    dim, sizes, value = node.args[2], body.sizes(node), value_of(node)
    if among_some_keys(body, node, dim):
        index = among_keys(body, index, value.device)
        sizes[dim] = body.graph.call_function(operator.add, (sizes[dim], 1))
    full = aten.full.default, (sizes, 0), dict(dtype=value.dtype, device=value.device)
    call = body.graph.call_function
    added = call(aten.scatter_add.default, (call(*full), dim, index, source))
    return without_others(body, added, dim) if among_some_keys(body, node, dim) else added


@rule(
    "streambp::sum_at",
    emit=emit_sum_at,
    cost=CostClass.SCATTER,
    linear="source",
    indices=lambda node: {node.args[0]: (0, value_of(node).shape[node.args[2]] - 1)},
)
def sum_at(node: Node) -> Signature:
    """Build the signature of the gradient of ``gather``. If it goes to rows of all tokens, its entries add up
    over chunks."""
    rank, dim = len(shape_of(node)), node.args[2]
    added = tuple("added" if i == dim else i for i in range(rank))
    out = tuple(range(rank))
    return Signature(
        (added, added), (out,), contracts="all", sums=frozenset({"added"}), indexed=frozenset({dim})
    )


def emit_number_put(body, node: Node):
    """Write a number at an index, with rows and keys counted from the first of all."""
    dim, number = node.args[1] % len(shape_of(node)), node.args[3]
    counts = body.carries_tokens(node, dim) or body.carries_keys(node, dim)
    if not counts or isinstance(number, Node) or shape_of(node.args[2])[dim] != 1:
        return emit_scatter(body, node)
    base, index = (body.operand(edge) for edge in body.edges(node))
    call, shape = body.graph.call_function, [1] * len(shape_of(node))
    shape[dim] = -1
    at = call(aten.view.default, (body.positions(node, dim), shape))
    value = value_of(node)
    put = call(aten.full.default, ([], number), dict(dtype=value.dtype, device=value.device))
    return call(aten.where.self, (call(aten.eq.Tensor, (at, index)), put, base))


@rule(
    "aten::scatter.value",
    emit=emit_number_put,
    cost=FUSED,
    linear="self + value",
    writes=0,
    indices=along_dim,
)
def number_put(node: Node) -> Signature:
    """Build the signature of ``scatter`` with a number. If it writes one place of each row (the gradient of
    the entry that ``gather`` picked), it is a comparison of places with that one."""
    base, index, rank = shape_of(node.args[0]), shape_of(node.args[2]), len(shape_of(node))
    dim = node.args[1] % max(rank, 1)
    one = rank > 0 and index[dim] == 1 and all(index[i] == base[i] for i in range(rank) if i != dim)
    if not one or isinstance(node.args[3], Node):
        return scattered(node)
    labels = tuple(range(rank))
    given = (labels, tuple(None if i == dim else i for i in labels))
    return Signature(given, (labels,), placed=frozenset({dim}))


rule(
    "aten::scatter.src",
    emit=emit_scatter,
    cost=FUSED,
    linear="self + src",
    writes=0,
    form=Form.SCATTER,
    indices=along_dim,
)(scattered)
rule("aten::scatter_reduce.two", emit=emit_scatter, cost=FUSED, writes=0, indices=along_dim)(scattered)
rule("aten::scatter_add", emit=emit_scatter, cost=FUSED, linear="self + src", writes=0, indices=along_dim)(
    scattered
)


def emit_index_put(body, node: Node):
    """Write a few rows among all tokens: each chunk takes those that fall into it."""
    base, indices, values = node.args[:3]
    if body.adds_up(node) or not isinstance(body.fact(node), Tokens):
        return body.copied(node)
    mark = body.fact(node).rows
    if mark.dim >= len(indices) or indices[mark.dim] is None:
        return body.copy(node)
    local, inside = body.rows_of_chunk(body.read_whole(indices[mark.dim]), mark, body.fact(node).lo)
    places = [
        None if ix is None else local if i == mark.dim else body.read_whole(ix)
        for i, ix in enumerate(indices)
    ]
    inside = before_dims(body, inside, len(shape_of(node)) - len(indices))
    given = body.zero_unless(inside, body.read_whole(values), values)
    return body.graph.call_function(node.target, (body.zeros(node), places, given, True))


@rule(
    "aten::index_put",
    "aten::_unsafe_index_put",
    emit=emit_index_put,
    cost=FUSED,
    linear="self + values",
    writes=0,
    form=Form.PUT_ROWS,
    indices=into_dims,
)
def index_put(node: Node) -> Signature:
    """Build the signature of rows that are accumulated into zeros. Where the rows carry tokens, they add up
    over chunks. Where the result does, each row is put at its place."""
    rank = len(shape_of(node))
    base, indices, values = node.args[0], node.args[1], node.args[2]
    used = [i for i, ix in enumerate(indices) if ix is not None]
    first, last = used[0], used[-1]
    index_rank = max(len(shape_of(indices[i])) for i in used)
    before, after = (tuple(("x", i) for i in dims) for dims in (range(first), range(last + 1, rank)))
    rows = shape_of(values)[first : first + index_rank]  # none of them broadcast
    fits = (
        len(used) == last + 1 - first
        and len(shape_of(values)) == first + index_rank + len(after)
        and all(value_of(indices[i]).dtype is torch.int64 and shape_of(indices[i]) == rows for i in used)
    )
    if not (argument(node, 3, "accumulate", False) and is_zeros(base) and fits):
        return all_at_once(node)
    index_labels = tuple(("i", j) for j in range(index_rank))
    labels = tuple(("written", i) if i in used else ("x", i) for i in range(rank))
    return Signature((labels, *[index_labels] * len(used), (*before, *index_labels, *after)), (labels,))


def sorted_into(node: Node, boundaries: int) -> Signature:
    """Describe a search for the place of each value among sorted numbers, which are read whole."""
    numbers, values = (node.args[i] for i in (boundaries, 1 - boundaries))
    index = tuple(f"i{i}" for i in range(len(shape_of(values))))
    row = (*index[: len(shape_of(numbers)) - 1], "s")
    operands = [index, index]
    operands[boundaries] = row
    orders = [row] if node.kwargs.get("sorter") is not None else []
    return Signature((*operands, *orders), (index,), contracts="all")


@rule("aten::searchsorted.Tensor", cost=FUSED, positions=(-1,))
def searchsorted(node: Node) -> Signature:
    return sorted_into(node, 0)


@rule("aten::bucketize.Tensor", cost=FUSED, positions=(-1,))
def bucketize(node: Node) -> Signature:
    return sorted_into(node, 1)


@rule("aten::nonzero", form=Form.PLACES)
def nonzero(node: Node) -> Signature:
    """Refuse a look-up of places whose number depends on the data.

    Where the operations on the rows are known, it is rewritten as ``streambp::picked_rows`` before it comes
    here.
    """
    raise refuse(
        node,
        "How many rows this operation picks depends on the data",
        "Compute each picked row by itself, and put the rows back by the same index or mask",
    )


@rule("aten::nonzero_static")
def nonzero_static(node: Node) -> Signature:
    return all_at_once(node)


@rule("aten::index_add", cost=FUSED, linear="self + source", writes=0, form=Form.ADD_ROWS)
def index_add(node: Node) -> Signature:
    return all_at_once(node)

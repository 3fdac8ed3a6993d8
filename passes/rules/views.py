"""Ops that move rows between dimensions without changing them, or cut, pad and join along one."""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from ..ir import (
    CannotStream,
    Label,
    Reach,
    Role,
    Signature,
    arguments,
    hint,
    refuse,
    shape_of,
    tensor_operands,
    value_of,
)
from . import is_zeros, rule
from .facets import CostClass, Form, Scan, Window, Windows
from .mask_domain import layout
from .mask_domain.bounded import if_operands_are
from .signatures import aligned, argument, dims_of

VIEW, FUSED = CostClass.VIEW, CostClass.FUSED


def emit_view(body, node: Node):
    """Write a view as a reshape. A chunk of a batch is not contiguous, so that a view of the whole may have
    to copy."""
    x = node.args[0]
    if body.makes_keys(node, x):
        sizes = body.sizes(node)
        sizes[body.fact(node).keys.dim] = -1  # a column for every key of the sequence
        return body.key_columns(node, body.reshaped(body.read(x), sizes))
    return body.reshaped(body.read(x), body.sizes(node))


@rule(
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    shape_arg=1,
    emit=emit_view,
    cost=VIEW,
    linear="self",
    form=Form.RESHAPE,
    any_layout=torch.ops.aten.reshape.default,
    mask=layout.reshaped,
    bounded=if_operands_are,
)
def view(node: Node) -> Signature:
    return Signature(
        (tuple(range(len(shape_of(node.args[0])))),), (tuple(range(len(shape_of(node)))),), reshape=True
    )


@rule(
    "aten::unsqueeze",
    cost=VIEW,
    linear="self",
    form=Form.UNSQUEEZE,
    mask=layout.reshaped,
    bounded=if_operands_are,
)
def unsqueeze(node: Node) -> Signature:
    rank = len(shape_of(node))
    dim = node.args[1] % rank
    return Signature((tuple(i for i in range(rank) if i != dim),), (tuple(range(rank)),))


@rule("aten::view_as_complex", cost=VIEW, linear="self")
def view_as_complex(node: Node) -> Signature:
    labels = tuple(range(len(shape_of(node))))
    return Signature(((*labels, "parts"),), (labels,), contracts="all")


@rule("aten::view_as_real", cost=VIEW, linear="self")
def view_as_real(node: Node) -> Signature:
    labels = tuple(range(len(shape_of(node)) - 1))
    return Signature((labels,), ((*labels, None),))


@rule(
    "aten::squeeze.dim",
    "aten::squeeze.dims",
    "aten::squeeze",
    cost=VIEW,
    linear="self",
    form=Form.SQUEEZE,
    mask=layout.reshaped,
    bounded=if_operands_are,
)
def squeeze(node: Node) -> Signature:
    shape = shape_of(node.args[0])
    named = dims_of(argument(node, 1, "dim"), len(shape))
    kept = tuple(i for i, size in enumerate(shape) if not (i in named and size == 1))
    return Signature((tuple(range(len(shape))),), (kept,))


@rule("aten::permute", cost=VIEW, linear="self", mask=layout.permuted, bounded=if_operands_are)
def permute(node: Node) -> Signature:
    rank = len(shape_of(node))
    return Signature((tuple(range(rank)),), (tuple(d % rank for d in node.args[1]),))


@rule("aten::t", "aten::numpy_T", cost=VIEW, linear="self", mask=layout.permuted, bounded=if_operands_are)
def transpose_matrix(node: Node) -> Signature:
    labels = tuple(range(len(shape_of(node))))
    return Signature((labels,), (labels[::-1],))


@rule("aten::transpose.int", cost=VIEW, linear="self", mask=layout.permuted, bounded=if_operands_are)
def transpose(node: Node) -> Signature:
    rank = len(shape_of(node))
    labels = list(range(rank))
    a, b = node.args[1] % rank if rank else 0, node.args[2] % rank if rank else 0
    swapped = list(labels)
    swapped[a], swapped[b] = labels[b], labels[a]
    return Signature((tuple(labels),), (tuple(swapped),))


@rule(
    "aten::expand",
    shape_arg=1,
    cost=VIEW,
    linear="self",
    form=Form.EXPAND,
    mask=layout.expanded,
    bounded=if_operands_are,
)
def expand(node: Node) -> Signature:
    out = shape_of(node)
    return Signature((aligned(shape_of(node.args[0]), out),), (tuple(range(len(out))),))


@rule("aten::repeat", cost=FUSED, linear="self")
def repeat(node: Node) -> Signature:
    out, repeats = shape_of(node), node.args[1]
    shift = len(out) - len(shape_of(node.args[0]))
    kept = tuple(i + shift if repeats[i + shift] == 1 else ("repeated", i) for i in range(len(out) - shift))
    return Signature((kept,), (tuple(i if i in kept else None for i in range(len(out))),), contracts="all")


def emit_slice(body, node: Node):
    """Write a slice; along tokens, the rows outside it stay in the chunk. The domain of the slice's fact
    excludes these rows. One row of all tokens is added up over chunks instead."""
    x, dim = node.args[0], argument(node, 1, "dim", 0) % len(shape_of(node))
    if body.adds_up(node):  # one row of all tokens
        return body.added(node, body.row_picked(x, dim, argument(node, 2, "start")))
    if body.carries_keys(x, dim):
        if is_key(body, x, dim, argument(node, 2, "start")) and shape_of(node)[dim] == 1:
            return body.key_picked(x, dim, argument(node, 2, "start"))
        bounds = (body.column(x, argument(node, 2, "start")), body.column(x, argument(node, 3, "end")))
        return body.graph.call_function(node.target, (body.read(x), dim, *bounds))
    return body.read(x) if body.carries_tokens(node, dim) else body.copy(node)


def is_key(body, x: Node, dim: int, index: int | Node | None) -> bool:
    """Does an index name a key, and not a column beyond them (an attention sink)?"""
    return clamped(index or 0, shape_of(x)[dim]) < hint(body.analysis.length)


def windows_of_slice(node: Node) -> Windows:
    given = arguments(node)
    dim, start = given["dim"] % len(shape_of(node)), given["start"] or 0
    if isinstance(start, int) and given["step"] == 1:
        size = shape_of(given["self"])[dim]
        by = -(max(0, start + size) if start < 0 else start)
        yield dim, Window(given["self"], by, 0, shape_of(node)[dim])


@rule(
    "aten::slice.Tensor",
    emit=emit_slice,
    cost=VIEW,
    linear="self",
    put=torch.ops.aten.slice_scatter.default,
    by_place=True,
    form=Form.SLICE,
    windows=windows_of_slice,
    mask=layout.sliced,
    bounded=if_operands_are,
)
def slice_(node: Node) -> Signature:
    shape = shape_of(node.args[0])
    dim = argument(node, 1, "dim", 0) % len(shape)
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    labels = tuple(range(len(shape)))
    if step != 1 or shape[dim] > shape_of(node)[dim] == 1:
        out = tuple(None if i == dim else i for i in labels)
        return Signature((labels,), (out,), contracts="all" if step != 1 else "picked")
    return Signature((labels,), (labels,), offsets={dim: (clamped(start, shape[dim]),)})


def clamped(index: int | Node, size: int) -> int:
    """Normalize a slice bound as slicing does: negative bounds count from the end, and none is outside."""
    number: int = hint(index.meta["val"]) if isinstance(index, Node) else index
    return max(0, min(size, number + size if number < 0 else number))


def emit_select(body, node: Node):
    """Write one row of all tokens, or one key. The chunk that has the row adds it to an accumulator, and
    other chunks add zero."""
    x, dim = node.args[0], node.args[1] % len(shape_of(node.args[0]))
    without = functools.partial(body.graph.call_function, torch.ops.aten.squeeze.dim)
    if body.adds_up(node):
        return body.added(node, without((body.row_picked(x, dim, node.args[2]), dim)))
    if not body.carries_keys(x, dim):
        return body.copy(node)
    if is_key(body, x, dim, node.args[2]):
        return without((body.key_picked(x, dim, node.args[2]), dim))
    return body.graph.call_function(node.target, (body.read(x), dim, body.column(x, node.args[2])))


@rule(
    "aten::select.int",
    emit=emit_select,
    cost=VIEW,
    linear="self",
    put=torch.ops.aten.select_scatter.default,
    by_place=True,
    mask=layout.selected,
    bounded=if_operands_are,
)
def select(node: Node) -> Signature:
    shape = shape_of(node.args[0])
    dim = node.args[1] % len(shape)
    return Signature(
        (tuple(range(len(shape))),), (tuple(i for i in range(len(shape)) if i != dim),), contracts="picked"
    )


def emit_select_scatter(body, node: Node):
    """Write one row among zeros, in the chunk that has it; or one column of keys, or beyond them."""
    dim, index = argument(node, 2, "dim", 0) % len(shape_of(node)), argument(node, 3, "index")
    row = functools.partial(body.graph.call_function, torch.ops.aten.unsqueeze.default)
    if body.carries_tokens(node, dim):
        return body.row_put(node, dim, index, row((body.read_whole(node.args[1]), dim)), node.args[1])
    if body.carries_keys(node, dim) and is_key(body, node, dim, index):
        return body.key_put(node, dim, index, row((body.read(node.args[1]), dim)), node.args[1])
    if not body.carries_keys(node, dim):
        return body.copy(node)
    operands = (body.operand(edge) for edge in body.edges(node))
    return body.graph.call_function(node.target, (*operands, dim, body.column(node, index)))


@rule("aten::select_scatter", emit=emit_select_scatter, cost=FUSED, linear="self + src", writes=0)
def select_scatter(node: Node) -> Signature:
    rank = len(shape_of(node))
    dim = argument(node, 2, "dim", 0) % rank
    labels, rest = tuple(range(rank)), tuple(i for i in range(rank) if i != dim)
    if is_zeros(node.args[0]):
        return Signature((labels, rest), (labels,), placed=frozenset({dim}))
    kept = tuple(None if i == dim else i for i in labels)
    base = tuple(("written", i) if i == dim else i for i in labels)
    return Signature((base, rest), (kept,), contracts="all")


def emit_pad(body, node: Node):
    """Write a padded value: features are padded in the chunk, and rows are filled. Filled rows are those that
    the operand does not have."""
    x, rank, amounts = node.args[0], len(shape_of(node)), list(node.args[1])
    filling = argument(node, 2, "value", 0)
    at = next((i for i in range(0, len(amounts), 2) if body.carries_tokens(node, rank - 1 - i // 2)), None)
    if at is None or not any(amounts[at : at + 2]):
        return body.copy(node)
    amounts[at : at + 2] = [0, 0]
    rows = body.read(x)
    if any(amounts):
        rows = body.graph.call_function(node.target, (rows, amounts, filling))
    return body.fill_outside(node, rows, filling)


def windows_of_pad(node: Node) -> Windows:
    amounts, rank = node.args[1], len(shape_of(node))
    padded = [
        (rank - 1 - i // 2, amounts[i])
        for i in range(0, len(amounts), 2)
        if amounts[i] != 0 or amounts[i + 1] != 0
    ] or [(rank - len(amounts) // 2, 0)]  # adds no rows at this length, but may at another
    if len(padded) == 1 and isinstance(padded[0][1], int) and arguments(node)["value"] == 0:
        dim, by = padded[0]
        source, rows = node.args[0], shape_of(node)[dim]
        yield dim, Window(source, by, max(0, by), min(rows, shape_of(source)[dim] + by))


@rule(
    "aten::constant_pad_nd",
    emit=emit_pad,
    cost=FUSED,
    linear="self + value",
    windows=windows_of_pad,
    bounded=if_operands_are,
)
def pad(node: Node) -> Signature:
    rank, amounts = len(shape_of(node)), node.args[1]
    ahead = {rank - 1 - i // 2: amounts[i] for i in range(0, len(amounts), 2) if amounts[i] or amounts[i + 1]}
    offsets: dict[Label, tuple[int, ...]] = {d: (-n,) for d, n in ahead.items() if isinstance(n, int)}
    labels = tuple(range(rank))
    made = tuple(None if isinstance(ahead.get(d), Node) else d for d in labels)  # moved by any number of rows
    return Signature((labels,), (made,), contracts="all", offsets=offsets)


def emit_shifted(body, node: Node):
    """Write rows that are shifted along the tokens. The driver slices the rows of a full-length value at the
    shift, and puts zeros where there are none. A value that the chunk computes at the shift has other rows
    there, which are set to zero here."""
    x, dim, by = node.args
    if body.carries_tokens(node, dim):
        edge = body.edges(node)[0]
        if edge.role is Role.CARRY:
            return body.from_window(node, edge)
        rows = body.operand(edge)
        return body.fill_outside(node, rows, 0, source=edge.operand) if edge.role is Role.ROWS else rows
    return body.graph.call_function(
        torch.ops.aten.constant_pad_nd.default,
        (body.read(x), [0, 0] * (len(shape_of(node)) - 1 - dim) + [by, -by]),
    )


@rule(
    "streambp::shifted",
    emit=emit_shifted,
    cost=FUSED,
    linear="x",
    scan=lambda node: Scan(0.0, window=abs(node.args[2])),
)
def shifted(node: Node) -> Signature:
    _, dim, by = node.args
    labels = tuple(range(len(shape_of(node))))
    return Signature((labels,), (labels,), reach={dim: Reach(-by, -by)})


def emit_slice_scatter(body, node: Node):
    dim = argument(node, 2, "dim", 0) % len(shape_of(node))
    source = node.args[1]
    if body.carries_keys(node, dim):
        start = argument(node, 3, "start")
        if shape_of(source)[dim] == 1 < shape_of(node)[dim] and is_key(body, node, dim, start):
            return body.key_put(node, dim, start, body.read(source), source)
        bounds = (body.column(node, start), body.column(node, argument(node, 4, "end")))
        return body.graph.call_function(
            node.target, (*(body.operand(edge) for edge in body.edges(node)), dim, *bounds)
        )
    if not body.carries_tokens(node, dim):
        return body.copy(node)
    if shape_of(source)[dim] == 1 < shape_of(node)[dim]:
        return body.row_put(node, dim, argument(node, 3, "start"), body.read_whole(source), source)
    base, source = (body.operand(edge) for edge in body.edges(node))
    return body.fill_outside(node, source, base, source=node.args[1])


def windows_of_slice_scatter(node: Node) -> Windows:
    given = arguments(node)
    dim, start = given["dim"] % len(shape_of(node)), given["start"] or 0
    if isinstance(start, int) and start >= 0 and given["step"] == 1 and is_zeros(given["self"]):
        yield dim, Window(given["src"], start, start, start + shape_of(given["src"])[dim])


@rule(
    "aten::slice_scatter",
    emit=emit_slice_scatter,
    cost=FUSED,
    linear="self + src",
    writes=0,
    windows=windows_of_slice_scatter,
)
def slice_scatter(node: Node) -> Signature:
    shape = shape_of(node)
    dim = argument(node, 2, "dim", 0) % len(shape)
    start, step = argument(node, 3, "start") or 0, argument(node, 5, "step", 1)
    labels = tuple(range(len(shape)))
    if step != 1 or not is_zeros(node.args[0]) and shape_of(node.args[1])[dim] != shape[dim]:
        out = tuple(None if i == dim else i for i in labels)
        return Signature(
            (
                tuple(("base", i) if i == dim else i for i in labels),
                tuple(("source", i) if i == dim else i for i in labels),
            ),
            (out,),
            contracts="all",
        )
    if shape_of(node.args[1])[dim] == 1 < shape[dim]:
        return Signature(
            (labels, tuple(None if i == dim else i for i in labels)), (labels,), placed=frozenset({dim})
        )
    return Signature((labels, labels), (labels,), offsets={dim: (0, -clamped(start, shape[dim]))})


def windows_of_cat(node: Node) -> Windows:
    """Yield the window of a value that is concatenated with zeros."""
    given = arguments(node)
    parts = [p for p in given["tensors"] if len(shape_of(p)) == len(shape_of(node))]
    others = [p for p in parts if not is_zeros(p)]
    if len(others) == 1 and len(parts) == len(given["tensors"]) and len(set(parts)) == len(parts):
        dim = given["dim"] % len(shape_of(node))
        at = sum(shape_of(p)[dim] for p in parts[: parts.index(others[0])])
        if all(isinstance(value_of(p).shape[dim], int) for p in parts if p is not others[0]):
            yield dim, Window(others[0], at, at, at + shape_of(others[0])[dim])


@rule(
    "aten::cat",
    cost=CostClass.KERNEL,
    form=Form.JOINED,
    linear="tensors",
    windows=windows_of_cat,
    mask=layout.joined,
    bounded=if_operands_are,
)
def cat(node: Node) -> Signature:
    """Build the signature of a concatenation. Columns behind a longer part (attention sinks behind scores)
    leave that part's columns where they are."""
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", 0) % rank
    operands = tensor_operands(node)
    sizes = [shape_of(a)[dim] if len(shape_of(a)) == rank else 0 for a in operands]
    follows = sizes[0] > 1 and all(size == 1 for size in sizes[1:]) and dim == rank - 1
    labels = tuple(i if follows or i != dim else None for i in range(rank))
    inner = [
        tuple(
            (dim if follows and k == 0 else None if follows else ("joined", k)) if i == dim else i
            for i in range(rank)
        )
        for k in range(len(operands))
    ]
    return Signature(
        tuple(inner[k] if len(shape_of(a)) == rank else (None,) for k, a in enumerate(operands)),
        (labels,),
        contracts="all",
    )


@rule("aten::split.Tensor", "aten::split_with_sizes", cost=VIEW, linear="self")
@rule("aten::unbind.int", "aten::chunk", cost=VIEW, linear="self")
def split(node: Node) -> Signature:
    shape = shape_of(node.args[0])
    unbind = node.target is torch.ops.aten.unbind.int
    position = 1 if unbind else 2
    dim = argument(node, position, "dim", 0) % len(shape)
    labels = tuple(range(len(shape)))
    out = tuple(i for i in labels if i != dim) if unbind else tuple(None if i == dim else i for i in labels)
    return Signature((labels,), tuple(out for _ in value_of(node)), contracts="all")


@rule("aten::flip", cost=FUSED, linear="self", form=Form.FLIP)
@rule("prims::rev", cost=FUSED, linear="a", form=Form.FLIP)
@rule("aten::roll", cost=FUSED, linear="self")
def moved(node: Node) -> Signature:
    rank = len(shape_of(node))
    dims = dims_of(
        argument(node, 2, "dims") if node.target is torch.ops.aten.roll.default else node.args[1], rank
    )
    return Signature(
        (tuple(range(rank)),), (tuple(None if i in dims else i for i in range(rank)),), contracts="all"
    )


@rule("aten::as_strided")
def as_strided(node: Node) -> Signature:
    raise refuse_strides(node)


def refuse_strides(node: Node) -> CannotStream:
    """Build the refusal of a read of memory by strides."""
    return refuse(
        node,
        "The tokens that as_strided reads cannot be derived from its arguments",
        "Use view, permute or slicing instead",
    )


def fills_with_zeros(node: Node) -> bool:
    """Does a node fill the rows that its operand does not have with zeros? These are rows before or behind
    the operand's own."""
    if node.target is torch.ops.aten.constant_pad_nd.default:
        return arguments(node)["value"] == 0
    return node.target is torch.ops.aten.slice_scatter.default and is_zeros(node.args[0])

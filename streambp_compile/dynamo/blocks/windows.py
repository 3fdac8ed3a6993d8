"""Windows of consecutive rows, each a few rows behind the one before it: pooling, filters, ``unfold``.

`RowMap` says which rows a window reads, with the zeros around them. Windows as long as their step are
blocks of tokens, and longer ones are blocks side by side; windows at every token are rows beside their
neighbours. They are written so before autograd sees them, and blocks.py and the passes then stream them.
Gradients come from autograd. Filters that keep the number of rows are sums of shifted rows if they are
short. Others, of any length and in groups, are one operator with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import Size, arguments, hint, is_equal
from ...passes.rules import windows_of
from ...passes.rules.forward import Part, mutated, part_of, slice_of, with_arguments
from ..reading.aten import erase_unread, inserted
from ..reading.token_axes import Trace, axes_of, traced
from ..reading.values import fake_of, is_changed, storage_of
from .row_maps import NotMapped, RowMap, along, map_of, padding_of

aten = torch.ops.aten
MOST_TAPS = 16
Made = Callable[..., Tensor]  # from windows ``[..., n, ..., size]``, and more operands


@dataclass(frozen=True)
class Windowed:
    """A node as a function of windows along a dimension of a value.

    rows  the rows of the value that a window reads
    made  a function of the windows and ``more`` operands; None where the windows are the result
    """

    source: Node
    dim: int
    rows: RowMap
    made: Made | None = None
    more: tuple = ()


def write_windows(module: GraphModule) -> GraphModule:
    """Write windows of tokens as reshapes and slices, and their way back to tokens as repeated rows."""
    for node in list(module.graph.nodes):
        if part_of(node) is Part.REPEATED:
            write_repeated(node)
    for node in filter(is_filter, list(module.graph.nodes)):
        pass_zeros_on(node)
    erase_unread(module.graph, filter(write_filter, filter(is_filter, list(module.graph.nodes))))
    found = [(node, w) for node in module.graph.nodes if (w := windowed(node)) is not None]
    if found:
        fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
        trace = traced(module, fakes)
        axes = axes_of(trace, fakes)
        for node, given in found:
            padded = zeros_around(given.source, given.dim, trace)
            if padded is not None and not may_pad_blocks(given, padded):
                padded = None
            rows = given.source if padded is None else padded[0]
            marks = [m for axis in axes for m in axis.marks.get(rows, ()) if m.dim == given.dim]
            if any(m.is_plain for m in marks) and not is_shared_view(node, given):
                write(node, given, padded or (rows, RowMap()))
    return module


def may_pad_blocks(given: Windowed, padded: tuple[Node, RowMap]) -> bool:
    """Are rows and the zeros around them whole blocks, so that blocks may be padded in place of rows?"""
    rows, zeros = fake_of(padded[0]).shape[given.dim], padded[1]
    step = given.rows.scale
    whole = zeros.before % step == zeros.behind % step == 0
    return step == 1 or whole and is_equal(rows // step * step, rows)


def write(node: Node, given: Windowed, padded: tuple[Node, RowMap]) -> None:
    """Write a node's windows; ``padded`` has the rows of tokens, and the zeros around them."""
    (source, zeros), size, step = padded, given.rows.count, given.rows.scale
    all_rows = given.rows.of(zeros)
    same = is_equal(fake_of(node).shape[given.dim], fake_of(source).shape[given.dim])
    if step == 1 and same and all_rows.more == size - 1:
        cut, how = neighbours, (range(all_rows.before, all_rows.before - size, -1),)
    elif given.rows.more == 0 and step == 1:
        source, cut, how = given.source, windows, (size, 1)
    elif given.rows.more == 0:
        cut, how = windows, (size, step, zeros.before // step, zeros.behind // step)
    else:
        return
    with node.graph.inserting_before(node):
        new = inserted(node, cut, (source, given.dim, *how))
        if given.made is not None:
            new = inserted(node, given.made, (new, *given.more))
        node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def write_repeated(node: Node) -> None:
    """Write nearest-neighbour interpolation to a whole multiple of the length as repeated rows."""
    source = arguments(node)["input"]
    rows, length = (fake_of(n).shape[-1] for n in (source, node))
    times = hint(length) // hint(rows)
    if is_equal(rows * times, length):
        with node.graph.inserting_before(node):
            node.replace_all_uses_with(inserted(node, torch.repeat_interleave, (source, times, -1)))
        node.graph.erase_node(node)


def is_shared_view(node: Node, given: Windowed) -> bool:
    """Are windows a view of memory that is written into? The rewrite may make a copy."""
    own = storage_of(given.source)
    written = [target for n in node.graph.nodes if (target := mutated(n)) is not None]
    return given.made is None and any(storage_of(target) == own for target in written)


def zeros_around(node: Node, dim: int, trace: Trace) -> tuple[Node, RowMap] | None:
    """Find the rows that a node pads with zeros, and the zeros around them."""
    for at, window in windows_of(trace.values.get(node)):
        source = next((n for n, value in trace.values.items() if value is window.source), None)
        if at == dim and source is not None and window.low == window.by:
            all_rows, rows = (hint(fake_of(n).shape[dim]) for n in (node, source))
            if window.high - window.low == rows:
                return source, RowMap(1, -window.by, 1, all_rows - rows)
    return None


def windowed(node: Node) -> Windowed | None:
    """Match a node as a function of windows that this file can write. None for other nodes, and for filters
    at every token. Padding is allowed only for a mean that counts its zeros, and for columns."""
    part, fake = part_of(node), fake_of(node)
    if part not in MADE or part is Part.CONVOLUTION and not is_filter(node):
        return None
    given, source = arguments(node), node.args[0]
    rank = fake_of(source).dim()
    dim = given["dimension"] % rank if part is Part.WINDOWS else 2 if part is Part.COLUMNS else rank - 1
    try:
        rows = map_of(node, dim)
    except NotMapped:
        return None
    padded = part is Part.COLUMNS or part is Part.MEAN_OF_WINDOWS and given["count_include_pad"]
    more: tuple = ()
    if part is Part.CONVOLUTION:
        more = (given["weight"], given.get("bias"), fake.dtype)
        channels, groups = fake_of(source).shape[1], given["groups"]
        if groups != 1 and not groups == fake.shape[1] == channels:
            return None
    elif part is Part.COLUMNS and (fake_of(source).shape[3:] != (1,) or map_of(node, 3).count != 1):
        return None
    if given.get("ceil_mode") or part is not Part.WINDOWS and along(node, dim, "dilation") != 1:
        return None
    short = 1 < rows.count <= MOST_TAPS and part is not Part.CONVOLUTION
    fits = short if rows.scale == 1 else rows.count % rows.scale == 0
    return Windowed(source, dim, rows, MADE[part], more) if fits and (padded or not rows.more) else None


# Filters that keep the number of rows


def is_filter(node: Node) -> bool:
    """Is a node a convolution of ``[B, C, T]``?"""
    return part_of(node) is Part.CONVOLUTION and fake_of(node).dim() == 3


def write_filter(node: Node) -> bool:
    """Write a convolution that gives one row for every row; return whether it does. The rows are padded by
    the convolution itself or by ``F.pad``. A slice behind it may cut off rows at the end."""
    given, rows = arguments(node), map_of(node, 2)
    source, zeros = without_zeros(given["input"], 2)
    length, dilation, groups = fake_of(source).shape[2], along(node, 2, "dilation"), given["groups"]
    ends = [node] if is_equal(fake_of(node).shape[2], length) else list(node.users)
    kept = all((n is node or is_prefix(n, 2)) and is_equal(fake_of(n).shape[2], length) for n in ends)
    if rows.scale != 1 or not ends or not kept:
        return False
    taps, before = fake_of(given["weight"]).shape[2], rows.before + zeros.before
    shifts = tuple(before - k * dilation for k in range(taps))
    plain = groups == 1 or groups == fake_of(source).shape[1] == fake_of(node).shape[1]
    # compare the length last: where it may change, Dynamo guards on the comparison
    short = plain and taps <= MOST_TAPS and length > max(map(abs, shifts))
    made, how = (sum_of_taps, [shifts]) if short else (filter_of_rows, [before, dilation, groups])
    with node.graph.inserting_before(node):
        operands = (source, given["weight"], given.get("bias"))
        new = inserted(ends[0], made, (*operands, *how, fake_of(node).dtype))
    for end in ends:
        end.replace_all_uses_with(new)
    return True


def without_zeros(node: Node, dim: int) -> tuple[Node, RowMap]:
    """Return the rows that a node pads with zeros, and the zeros around them."""
    if part_of(node) is Part.PAD and not any(map(is_changed, (node, *node.all_input_nodes))):
        try:
            return node.args[0], map_of(node, dim)
        except NotMapped:
            pass
    return node, RowMap()


def pass_zeros_on(node: Node) -> None:
    """Leave to a convolution the zeros in front that its own rows need, and pad its result by the others. Of
    zeros alone it makes its bias, which moves behind the convolutions that read it."""
    given, rows = arguments(node), map_of(node, 2)
    source, zeros = without_zeros(given["input"], 2)
    more = zeros.before - rows.count + 1
    if more <= 0 or rows.scale != 1 or rows.more or not are_filters_of(node):
        return
    if not is_equal(fake_of(node).shape[-1], fake_of(source).shape[-1] + more):
        return
    how = (1, 0, along(node, 2, "dilation"), given["groups"])
    with node.graph.inserting_before(node):
        made = inserted(node, F.pad, (source, (zeros.before - more, 0)))
        made = inserted(node, F.conv1d, (made, given["weight"], None, *how))
        made = inserted(node, F.pad, (made, (more, 0)))
    for reader in list(node.users):
        own = {**arguments(reader), "input": made}
        if given.get("bias") is not None:
            with node.graph.inserting_before(reader):
                biases = (given["bias"], own["weight"], own.get("bias"), own["groups"])
                own["bias"] = inserted(reader, bias_behind, biases)
        reader.args, reader.kwargs = tuple(own[a.name] for a in reader.target._schema.arguments), {}
    node.graph.erase_node(node)


def are_filters_of(node: Node) -> bool:
    """Are all readers of a value convolutions of its rows, and pad no more?"""
    found = [n for n in node.users if is_filter(n) and arguments(n)["input"] is node]
    return len(found) == len(node.users) > 0 and not any(map_of(n, 2).more for n in found)


def is_prefix(node: Node, dim: int) -> bool:
    """Does a node take the first rows along a dimension?"""
    part = slice_of(node, fake_of(node).dim())
    return part is not None and not part.lost and part.dim == dim and part.start == 0


# Rows that are cut off


def cut_rows_first(module: GraphModule) -> GraphModule:
    """Move slices of the first rows in front of padding that moves rows back or adds rows behind.

    A model pads its tokens to whole blocks, and cuts off the padding when they are rows of tokens again.
    Where the rows are moved in between, as in ``F.pad(x, (0, 0, 3, -3))[:, :n]`` (an hourglass, arXiv
    2110.13711), the remaining rows read none of those behind. Written as ``F.pad(x[:, :n], (0, 0, 3, -3))``,
    rows of tokens are moved.
    """
    moved = []
    for node in list(module.graph.nodes):
        try:
            stop = unpadded_stop(node)
        except NotMapped:
            continue
        padded, dim = node.args[0], slice_of(node, fake_of(node).dim()).dim
        value, (before, _) = padded.args[0], padding_of(padded, dim)
        with module.graph.inserting_before(node):
            if not is_equal(fake_of(value).shape[dim], fake_of(node).shape[dim]):
                value = inserted(node, aten.slice.Tensor, (value, dim, 0, stop))
            if before:
                pad = [0, 0] * (fake_of(node).dim() - 1 - dim) + [before, -before]
                value = inserted(padded, padded.target, *with_arguments(padded, self=value, pad=pad))
        node.replace_all_uses_with(value)
        moved.append(node)
    erase_unread(module.graph, moved)
    return module


def unpadded_stop(node: Node) -> Size | Node:
    """Return where a slice of the first rows of a padded value ends before padding. Raises `NotMapped` for
    other nodes, and where it reads padding behind."""
    padded = node.args[0] if node.args else None
    if not isinstance(padded, Node) or part_of(padded) is not Part.PAD:
        raise NotMapped
    part, source = slice_of(node, fake_of(padded).dim()), padded.args[0]
    if part is None or part.lost or part.start != 0 or is_changed(padded) or is_changed(source):
        raise NotMapped
    before, behind = padding_of(padded, part.dim)
    stop = fake_of(part.stop) if isinstance(part.stop, Node) else part.stop
    known = stop is not None and (hint(stop) >= 0 or isinstance(stop, int) and isinstance(behind, int))
    if not known or not isinstance(before, int) or before < 0:
        raise NotMapped
    rows, first = fake_of(source).shape[part.dim], fake_of(node).shape[part.dim]
    fits = before <= hint(first) < hint(rows) or (before == 0 and hint(first) == hint(rows))
    # Adds guards where lengths change: for a shorter text the same slice might reach into the padding.
    if not (fits and first <= rows and before <= first):
        raise NotMapped
    return stop + before + behind if isinstance(stop, int) and stop < 0 else part.stop


# Functions of rows


def windows(x: Tensor, dim: int, size: int, step: int, before: int = 0, behind: int = 0) -> Tensor:
    """Compute ``x.unfold(dim, size, step)``: windows stand at ``dim``, their rows behind all dimensions. Of a
    step of several rows, ``before`` and ``behind`` are blocks of zeros around those of ``x``."""
    if step == 1:
        count = x.shape[dim] - size + 1
        return torch.stack([x.narrow(dim, i, count) for i in range(size)], -1)
    blocks, beside = x.shape[dim] // step, size // step
    found = x.narrow(dim, 0, blocks * step).unflatten(dim, (blocks, step)).movedim(dim + 1, -1)
    if before or behind:
        found = F.pad(found, (*[0, 0] * (found.dim() - 1 - dim), before, behind))
    if beside == 1:
        return found
    count = before + blocks + behind - beside + 1
    return torch.cat([found.narrow(dim, i, count) for i in range(beside)], -1)


def neighbours(x: Tensor, dim: int, distances: Sequence[int]) -> Tensor:
    """Stack the rows at some distances before each row (negative: behind it) in a last dimension. Rows that
    do not exist are zeros."""
    others = [0, 0] * (x.dim() - 1 - dim)
    return torch.stack([F.pad(x, (*others, by, -by)) for by in distances], -1)


def columns_of_windows(rows: Tensor) -> Tensor:
    """Reshape ``[B, C, n, 1, size]`` to ``[B, C size, n]``."""
    return rows.squeeze(3).movedim(-1, 2).flatten(1, 2)


def mean_of_windows(rows: Tensor) -> Tensor:
    return rows.mean(-1)


def maximum_of_windows(rows: Tensor) -> Tensor:
    """Compute the maximum of each window. Of equal numbers the first has the gradient, as in pooling."""
    return rows.max(-1).values


def filter_of_windows(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute the convolution of ``[B, C, n, K]`` by ``[O, C or 1, K]``, in autocast's dtype. Half precision
    is added up in float32, as the kernels do."""
    sum_dtype = torch.promote_types(dtype, torch.float32)
    rows, weight = rows.to(dtype), weight.to(dtype)
    if weight.shape[1] == 1 < weight.shape[0] == rows.shape[1]:
        made = (rows.to(sum_dtype) * weight[:, 0, None].to(sum_dtype)).sum(-1)
    else:
        made = torch.einsum("bcnk,ock->bon", rows, weight).to(sum_dtype)
    return (made if bias is None else made + bias[:, None].to(dtype)).to(dtype)


def bias_behind(bias: Tensor, weight: Tensor, own: Tensor | None, groups: int) -> Tensor:
    """Compute what a convolution makes of rows that are all ``bias``."""
    sums = (weight.sum(-1).unflatten(0, (groups, -1)) @ bias.view(groups, -1, 1)).flatten()
    return sums if own is None else sums + own


def sum_of_taps(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shifts: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Compute the convolution of ``[B, C, T]`` by ``[O, C or 1, K]``. Tap k reads the row ``shifts[k]``
    before its own. Half precision is added up in float32, as the kernels do."""
    sum_dtype, total = torch.promote_types(dtype, torch.float32), None
    for k, by in enumerate(shifts):
        rows = x if by == 0 else F.pad(x, (by, -by))
        if weight.shape[1] == 1 < weight.shape[0] == x.shape[1]:
            part = rows.to(sum_dtype) * weight[:, 0, k, None].to(sum_dtype)
        else:
            part = F.linear(rows.transpose(1, 2), weight[:, :, k]).transpose(1, 2).to(sum_dtype)
        total = part if total is None else total + part
    return (total if bias is None else total + bias[:, None]).to(dtype)


def filter_of_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: int,
    dilation: int,
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the convolution of ``[B, C, T]`` by ``[O, C / groups, K]`` as one operator, in autocast's
    dtype. Tap k reads the row ``before - k * dilation`` before its own."""
    made = torch.ops.streambp.filtered(x.to(dtype), weight.to(dtype), before, dilation, groups)
    return made if bias is None else made + bias[:, None].to(dtype)


MADE: dict[Part | None, Made | None] = {
    Part.WINDOWS: None,
    Part.COLUMNS: columns_of_windows,
    Part.MEAN_OF_WINDOWS: mean_of_windows,
    Part.MAXIMUM_OF_WINDOWS: maximum_of_windows,
    Part.CONVOLUTION: filter_of_windows,
}

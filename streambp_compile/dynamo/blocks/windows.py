"""Windows of consecutive tokens, each a few tokens behind the one before it: pooling, strided filters,
``unfold``.

Windows as long as their step are blocks of tokens, and longer ones are blocks side by side; windows at
every token are rows beside their neighbours. They are written so before autograd sees them, and
blocks.py and the passes then stream them. Gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, hint, is_equal
from ...passes.rules import windows_of
from ...passes.rules.forward import Part, mutated, part_of
from ..reading.aten import inserted
from ..reading.token_axes import Trace, axes_of, traced
from ..reading.values import fake_of, storage_of
from .convolutions import MOST_TAPS, single

Made = Callable[..., Tensor]  # from windows ``[..., n, ..., size]``, and more operands


@dataclass(frozen=True)
class Windowed:
    """A node as a function of windows along a dimension of a value.

    around  rows of zeros that the node pads before and behind by itself
    made    a function of the windows and ``more`` operands; None where the windows are the result
    """

    source: Node
    dim: int
    size: int
    step: int
    around: tuple[int, int]
    made: Made | None = None
    more: tuple = ()


def write_windows(module: GraphModule) -> GraphModule:
    """Write windows of tokens as reshapes and slices, and their way back to tokens as repeated rows."""
    for node in list(module.graph.nodes):
        if part_of(node) is Part.REPEATED:
            write_repeated(node)
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
                write(node, given, padded or (rows, 0, 0))
    return module


def may_pad_blocks(given: Windowed, padded: tuple[Node, int, int]) -> bool:
    """Are rows and the zeros around them whole blocks, so that blocks may be padded in place of rows?"""
    rows, before, behind = fake_of(padded[0]).shape[given.dim], *padded[1:]
    step = given.step
    return step == 1 or before % step == behind % step == 0 and is_equal(rows // step * step, rows)


def write(node: Node, given: Windowed, padded: tuple[Node, int, int]) -> None:
    """Write a node's windows; ``padded`` has the rows, and the numbers of zeros before and behind them."""
    source, before, behind = padded[0], padded[1] + given.around[0], padded[2] + given.around[1]
    same = is_equal(fake_of(node).shape[given.dim], fake_of(source).shape[given.dim])
    if given.step == 1 and same and before + behind == given.size - 1:
        cut, how = neighbours, (range(before, before - given.size, -1),)
    elif given.around == (0, 0) and given.step == 1:
        source, cut, how = given.source, windows, (given.size, 1)
    elif given.around == (0, 0):
        cut, how = windows, (given.size, given.step, before // given.step, behind // given.step)
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


def zeros_around(node: Node, dim: int, trace: Trace) -> tuple[Node, int, int] | None:
    """Find the rows that a node pads with zeros, and the numbers of zeros before and behind."""
    for at, window in windows_of(trace.values.get(node)):
        source = next((n for n, value in trace.values.items() if value is window.source), None)
        if at == dim and source is not None and window.low == window.by:
            all_rows, rows = (hint(fake_of(n).shape[dim]) for n in (node, source))
            if window.high - window.low == rows:
                return source, window.by, all_rows - rows - window.by
    return None


def windowed(node: Node) -> Windowed | None:
    """Match a node as a function of windows that this file can write. None for other nodes."""
    part = part_of(node)
    if part is Part.WINDOWS:
        given = arguments(node)
        dim = given["dimension"] % fake_of(given["self"]).dim()
        found = Windowed(given["self"], dim, given["size"], given["step"], (0, 0))
    elif part is Part.COLUMNS:
        found = columns(arguments(node))
    elif part in (Part.MEAN_OF_WINDOWS, Part.MAXIMUM_OF_WINDOWS):
        found = pooled(arguments(node), part is Part.MEAN_OF_WINDOWS)
    elif part is Part.CONVOLUTION:
        found = filtered(arguments(node), fake_of(node).dtype)
    else:
        return None
    if found is None or not all(isinstance(n, int) for n in (found.size, found.step)):
        return None
    short = 1 < found.size <= MOST_TAPS if found.step == 1 else found.size % found.step == 0
    return found if short else None


def columns(given: dict) -> Windowed | None:
    """Match ``F.unfold`` of a plane one number wide, along its height."""
    source, (size, width), (around, beside) = given["self"], given["kernel_size"], given["padding"]
    step, dilation = given["stride"][0], given["dilation"][0]
    if fake_of(source).dim() != 4 or fake_of(source).shape[3] != 1 or (width, beside, dilation) != (1, 0, 1):
        return None
    return Windowed(source, 2, size, step, (around, around), columns_of_windows)


def pooled(given: dict, is_mean: bool) -> Windowed | None:
    """Match pooling. Padding is allowed only for a mean that counts its zeros."""
    size, padding = single(given["kernel_size"]), single(given["padding"])
    counts_zeros = is_mean and given["count_include_pad"]
    if given["ceil_mode"] or single(given.get("dilation", 1)) != 1 or padding and not counts_zeros:
        return None
    source, step = given["self"], single(given["stride"]) or size
    made = mean_of_windows if is_mean else maximum_of_windows
    return Windowed(source, fake_of(source).dim() - 1, size, step, (padding, padding), made)


def filtered(given: dict, dtype: torch.dtype) -> Windowed | None:
    """Match a strided convolution, dense or depthwise. Short filters at every token are written
    elsewhere."""
    source, weight, groups = given["input"], fake_of(given["weight"]), single(given["groups"])
    plain = single(given["padding"]) in (0, "valid") and single(given["dilation"]) == 1
    if not plain or single(given["stride"]) == 1 or fake_of(source).dim() != 3:
        return None
    if groups != 1 and not groups == weight.shape[0] == fake_of(source).shape[1]:
        return None
    size, step = hint(weight.shape[-1]), single(given["stride"])
    more = (given["weight"], given.get("bias"), dtype)
    return Windowed(source, 2, size, step, (0, 0), filter_of_windows, more)


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

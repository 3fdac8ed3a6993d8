"""Rows that are padded at one end and cut at the other are rows of their neighbours: ``streambp.shifted``.

Token shifts and short causal convolutions are made of them. As one operator they read ``[-k,-k]``, a finite
look-back; as a padding they would
have rows that no token has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from ..ir import arguments, hint, is_equal, is_zeros, shape_of, value_of

aten, streambp = torch.ops.aten, torch.ops.streambp


@dataclass(frozen=True)
class Window:
    """Row i of a value is row ``i - by`` of another for ``low <= i < high``, and zero elsewhere."""

    source: Node
    by: int
    low: int
    high: int

    def of(self, inner: Window) -> Window:
        """The same rows, seen through another window."""
        return Window(
            inner.source,
            self.by + inner.by,
            max(self.low, inner.low + self.by),
            min(self.high, inner.high + self.by),
        )


def shift_rows(graph: Graph) -> None:
    """Replace paddings, slices and joins with zeros that together move rows of wide values and keep their
    number."""
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or node.target not in WINDOWS
            or not value_of(node).dtype.is_floating_point
        ):
            continue
        for dim, window in windows(node):
            found = whole_window(node, dim, window)
            if found is None or not is_wide(node, dim):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(streambp.shifted.default, (found.source, dim, found.by))
            new.meta = {
                **node.meta,
                "replaces": node.name,
                "val": torch.empty_like(value_of(found.source), memory_format=torch.contiguous_format),
            }
            node.replace_all_uses_with(new)
            break


def whole_window(node: Node, dim: int, window: Window) -> Window | None:
    """Follow windows of windows up to a value with as many rows, all of which are seen but those that move
    out."""
    rows = value_of(node).shape[dim]
    while not is_equal(value_of(window.source).shape[dim], rows):
        inner = next((w for d, w in windows(behind(window.source)) if d == dim), None)
        if inner is None:
            return None
        window = window.of(inner)
    window = replace(window, source=behind(window.source))
    seen = window.low == max(0, window.by) and window.high == min(hint(rows), hint(rows) + window.by)
    return window if seen and window.by else None


def behind(node: Node) -> Node:
    """What a value is a copy of."""
    while (
        node.target is aten.clone.default
        or node.target is aten.copy.default
        and value_of(node.args[1]).dtype == value_of(node).dtype
        and (
            len(shape_of(node.args[1])) == len(shape_of(node))
            and all(map(is_equal, value_of(node.args[1]).shape, value_of(node).shape))
        )
    ):
        node = node.args[0 if node.target is aten.clone.default else 1]
    return node


def is_wide(node: Node, dim: int) -> bool:
    """Has it features? A few numbers per token (labels, masks, losses) are shifted by their rules."""
    shape = shape_of(node)
    return len(shape) > 2 and any(size > 1 for d, size in enumerate(shape) if d not in (0, dim))


def windows(node: Node) -> Iterator[tuple[int, Window]]:
    """The dimensions along which a node is a window of an operand."""
    yield from WINDOWS[node.target](node) if node.op == "call_function" and node.target in WINDOWS else ()


def of_padding(node: Node) -> Iterator[tuple[int, Window]]:
    amounts, rank = node.args[1], len(shape_of(node))
    padded = [
        (rank - 1 - i // 2, amounts[i])
        for i in range(0, len(amounts), 2)
        if amounts[i] != 0 or amounts[i + 1] != 0
    ]
    if len(padded) == 1 and isinstance(padded[0][1], int) and arguments(node)["value"] == 0:
        dim, by = padded[0]
        yield (
            dim,
            Window(node.args[0], by, max(0, by), min(shape_of(node)[dim], shape_of(node.args[0])[dim] + by)),
        )


def of_slice(node: Node) -> Iterator[tuple[int, Window]]:
    given = arguments(node)
    dim, start = given["dim"] % len(shape_of(node)), given["start"] or 0
    if isinstance(start, int) and given["step"] == 1:
        size = shape_of(given["self"])[dim]
        yield (
            dim,
            Window(given["self"], -(max(0, start + size) if start < 0 else start), 0, shape_of(node)[dim]),
        )


def of_scatter(node: Node) -> Iterator[tuple[int, Window]]:
    given = arguments(node)
    dim, start = given["dim"] % len(shape_of(node)), given["start"] or 0
    if isinstance(start, int) and start >= 0 and given["step"] == 1 and is_zeros(given["self"]):
        yield dim, Window(given["src"], start, start, start + shape_of(given["src"])[dim])


def of_join(node: Node) -> Iterator[tuple[int, Window]]:
    """Values joined to zeros."""
    given = arguments(node)
    parts = [p for p in given["tensors"] if len(shape_of(p)) == len(shape_of(node))]
    others = [p for p in parts if not is_zeros(p)]
    if len(others) == 1 and len(parts) == len(given["tensors"]) and len(set(parts)) == len(parts):
        dim = given["dim"] % len(shape_of(node))
        at = sum(shape_of(p)[dim] for p in parts[: parts.index(others[0])])
        if all(isinstance(value_of(p).shape[dim], int) for p in parts if p is not others[0]):
            yield dim, Window(others[0], at, at, at + shape_of(others[0])[dim])


WINDOWS = {
    aten.constant_pad_nd.default: of_padding,
    aten.slice.Tensor: of_slice,
    aten.slice_scatter.default: of_scatter,
    aten.cat.default: of_join,
}

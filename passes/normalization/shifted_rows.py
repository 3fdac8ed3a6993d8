"""Rows that are padded at one end and cut at the other are shifted rows: ``streambp.shifted``.

Token shifts and short causal convolutions are made of them. As one operator they read ``[-k,-k]``, a
finite look-back. As a padding they would have rows that no token has.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from ..ir import are_alike, arguments, hint, is_equal, is_floating, metadata_for, shape_of, value_of
from ..rules import form_of, windows_of
from ..rules.facets import Form, Window
from .writing import Writing

aten, streambp = torch.ops.aten, torch.ops.streambp


def shift_rows(graph: Graph) -> None:
    """Replace paddings, slices and joins with zeros by shifts, where wide rows move and keep their number."""
    for node in list(graph.nodes):
        if not is_floating(node):
            continue
        joined = joined_rows(graph, node) if form_of(node) is Form.JOINED else None
        if joined is not None:
            node.replace_all_uses_with(joined)
            continue
        for dim, window in windows_of(node):
            found = whole_window(node, dim, window)
            if found is None and form_of(node) is Form.JOINED and window.by == 0:
                pad_rows(graph, node, dim, window)
            if found is None or not has_features(node, dim):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(streambp.shifted.default, (found.source, dim, found.by))
            new.meta = metadata_for(
                node, torch.empty_like(value_of(found.source), memory_format=torch.contiguous_format)
            )
            node.replace_all_uses_with(new)
            break


def pad_rows(graph: Graph, node: Node, dim: int, window: Window) -> None:
    """Write a concatenation with zeros behind as a padding, of which the tokens are known. A single column
    behind attention scores stays: the rule of concatenation knows the keys of its other columns."""
    rank, behind = len(shape_of(node)), shape_of(node)[dim] - window.high
    if dim == rank - 1 and behind == 1:
        return
    with graph.inserting_before(node):
        amounts = [0, 0] * (rank - 1 - dim) + [0, behind]
        new = graph.call_function(aten.constant_pad_nd.default, (window.source, amounts, 0.0))
    new.meta = metadata_for(node)
    node.replace_all_uses_with(new)


def joined_rows(graph: Graph, node: Node) -> Node | None:
    """Write a concatenation of neighbours' rows and single rows as a shift and choices. In ``cat((x[:, :1],
    x[:, :-1]), 1)``, all rows but the single ones in front or behind are shifted."""
    given = arguments(node)
    parts, dim = given["tensors"], given["dim"] % len(shape_of(node))
    if any(len(shape_of(p)) != len(shape_of(node)) for p in parts) or not has_features(node, dim):
        return None
    longest = max(range(len(parts)), key=lambda i: shape_of(parts[i])[dim])
    others = [i for i in range(len(parts)) if i != longest]
    if any(not is_equal(value_of(parts[i]).shape[dim], 1) for i in others):
        return None
    rows = shape_of(parts[longest])[dim]
    found = whole_window(node, dim, Window(parts[longest], longest, longest, longest + rows))
    write = Writing(graph, node)
    place = None if found is None else write.places(node, dim)
    if found is None or place is None:
        return None
    result = write(streambp.shifted.default, found.source, dim, found.by)
    for i in others:
        at = i if i < longest else write.sizes.written(value_of(node).shape[dim] - len(parts) + i, node)
        result = write(aten.where.self, write(aten.eq.Scalar, place, at), parts[i], result)
    return result


def whole_window(node: Node, dim: int, window: Window) -> Window | None:
    """Follow windows of windows up to a value with as many rows. All of its rows must be seen, except those
    that are shifted out; returns None otherwise."""
    rows = value_of(node).shape[dim]
    while not is_equal(value_of(window.source).shape[dim], rows):
        inner = next((w for d, w in windows_of(behind(window.source)) if d == dim), None)
        if inner is None:
            return None
        window = window.of(inner)
    window = replace(window, source=behind(window.source))
    seen = window.low == max(0, window.by) and window.high == min(hint(rows), hint(rows) + window.by)
    return window if seen and window.by else None


def behind(node: Node) -> Node:
    """Find the value that a node is a copy of."""
    while form_of(node) is Form.COPY or form_of(node) is Form.ASSIGN and are_alike(node.args[1], node):
        node = node.args[0 if form_of(node) is Form.COPY else 1]
    return node


def has_features(node: Node, dim: int) -> bool:
    """Does every token have a vector? A few numbers per token (labels, masks, losses) are shifted by their
    rules."""
    shape = shape_of(node)
    return len(shape) > 2 and any(size > 1 for d, size in enumerate(shape) if d not in (0, dim))

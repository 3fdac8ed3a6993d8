"""Rows behind the tokens are cut off before the others are moved.

A model pads its tokens to whole blocks, and cuts off what it padded when they are rows of tokens again. Where
the rows are moved in between, as in ``F.pad(x, (0, 0, 3, -3))[:, :n]`` (an hourglass, arXiv 2110.13711), what
is left reads none of those behind. Written as ``F.pad(x[:, :n], (0, 0, 3, -3))``, rows of tokens are moved.
Rewritten in Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..passes.ir import arguments, hint, is_equal
from ..passes.rules.forward import TO_THE_END, Part, part_of, slice_of, with_arguments
from .aten import inserted
from .attention import erase_unread
from .values import fake_of, is_changed

aten = torch.ops.aten


def cut_rows_first(module: GraphModule) -> GraphModule:
    """Move slices of the first rows in front of padding that moves rows back, or adds some behind."""
    cut = []
    for node in list(module.graph.nodes):
        dim = cut_behind_padding(node)
        if dim is None:
            continue
        padded, rows = node.args[0], fake_of(node).shape[dim]
        pad, at = list(arguments(padded)["pad"]), 2 * (fake_of(node).dim() - 1 - dim)
        before, behind = pad[at : at + 2]
        with module.graph.inserting_before(node):
            value = padded.args[0]
            if not is_equal(fake_of(value).shape[dim], rows):
                value = inserted(
                    node, aten.slice.Tensor, (value, dim, 0, end_before_padding(node, before, behind))
                )
            if before:
                moved = [*pad[:at], before, -before, *pad[at + 2 :]]
                value = inserted(padded, padded.target, *with_arguments(padded, self=value, pad=moved))
        node.replace_all_uses_with(value)
        cut.append(node)
    erase_unread(module.graph, cut)
    return module


def end_before_padding(node: Node, before: int, behind: object) -> object:
    """Where a slice of padded rows ends in the rows themselves, of which it takes as many."""
    stop = slice_of(node, fake_of(node).dim()).stop
    if not isinstance(stop, int) or stop >= 0:
        return stop
    return min(stop + before + behind, 0) or TO_THE_END


def cut_behind_padding(node: Node) -> int | None:
    """The dimension of which a node takes the first rows, fewer than there were before padding; None if it
    does something else."""
    padded = node.args[0] if node.args else None
    if not isinstance(padded, Node) or part_of(padded) is not Part.PAD:
        return None
    part, given, source = slice_of(node, fake_of(padded).dim()), arguments(padded), padded.args[0]
    if part is None or part.start != 0 or part.lost or given.get("mode", "constant") != "constant":
        return None
    pad, at = list(given["pad"]), 2 * (fake_of(padded).dim() - 1 - part.dim)
    before, behind = pad[at : at + 2] if len(pad) > at else (None, None)
    if not isinstance(before, int) or before < 0 or any(pad[:at] + pad[at + 2 :]):
        return None
    stop = fake_of(part.stop) if isinstance(part.stop, Node) else part.stop
    if stop is None or hint(stop) < 0 and not (isinstance(stop, int) and isinstance(behind, int)):
        return None
    if is_changed(padded) or is_changed(source):
        return None
    rows, first = fake_of(source).shape[part.dim], fake_of(node).shape[part.dim]
    fits = before <= hint(first) < hint(rows) or (before == 0 and hint(first) == hint(rows))
    # A guard where lengths change: for a shorter text the same slice might reach into what was padded.
    return part.dim if fits and bool(first <= rows) and bool(before <= first) else None

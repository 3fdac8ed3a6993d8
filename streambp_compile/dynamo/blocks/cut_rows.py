"""Slices that cut off rows behind the tokens, moved in front of padding.

A model pads its tokens to whole blocks, and cuts off the padding when they are rows of tokens again.
Where the rows are moved in between, as in ``F.pad(x, (0, 0, 3, -3))[:, :n]`` (an hourglass, arXiv
2110.13711), the remaining rows read none of those behind. Written as ``F.pad(x[:, :n], (0, 0, 3, -3))``,
rows of tokens are moved. The rewrite is done in Dynamo's graph, before autograd sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, hint, is_equal
from ...passes.rules.forward import TO_THE_END, Part, part_of, slice_of, with_arguments
from ..reading.aten import erase_unread, inserted
from ..reading.values import fake_of, is_changed

aten = torch.ops.aten


@dataclass(frozen=True)
class PaddedRows:
    """A slice of the first rows of a padded value, no more than there were before padding.

    dim     the dimension of the slice
    pad     the padding, as `torch.nn.functional.pad` counts it
    at      the index of the dimension's numbers in ``pad``
    stop    where the slice ends
    """

    dim: int
    pad: tuple
    at: int
    stop: object

    @property
    def before(self) -> int:
        """Number of rows padded in front."""
        return self.pad[self.at]

    @property
    def unpadded_stop(self) -> object:
        """End of the same rows before padding."""
        if not isinstance(self.stop, int) or self.stop >= 0:
            return self.stop
        return self.stop + self.before + self.pad[self.at + 1] or TO_THE_END


def cut_rows_first(module: GraphModule) -> GraphModule:
    """Move slices of the first rows in front of padding that moves rows back or adds rows behind."""
    moved = []
    for node in list(module.graph.nodes):
        cut = cut_behind_padding(node)
        if cut is None:
            continue
        padded = node.args[0]
        with module.graph.inserting_before(node):
            value = padded.args[0]
            if not is_equal(fake_of(value).shape[cut.dim], fake_of(node).shape[cut.dim]):
                value = inserted(node, aten.slice.Tensor, (value, cut.dim, 0, cut.unpadded_stop))
            if cut.before:
                pad = [*cut.pad[: cut.at], cut.before, -cut.before, *cut.pad[cut.at + 2 :]]
                value = inserted(padded, padded.target, *with_arguments(padded, self=value, pad=pad))
        node.replace_all_uses_with(value)
        moved.append(node)
    erase_unread(module.graph, moved)
    return module


def cut_behind_padding(node: Node) -> PaddedRows | None:
    """Match a slice of the first rows of a padded value that reads no padding behind. None for other
    nodes."""
    padded = node.args[0] if node.args else None
    if not isinstance(padded, Node) or part_of(padded) is not Part.PAD:
        return None
    part, given, source = slice_of(node, fake_of(padded).dim()), arguments(padded), padded.args[0]
    if part is None or part.start != 0 or part.lost or given.get("mode", "constant") != "constant":
        return None
    pad, at = tuple(given["pad"]), 2 * (fake_of(padded).dim() - 1 - part.dim)
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
    # Adds guards where lengths change: for a shorter text the same slice might reach into the padding.
    fits = fits and bool(first <= rows) and bool(before <= first)
    return PaddedRows(part.dim, pad, at, part.stop) if fits else None

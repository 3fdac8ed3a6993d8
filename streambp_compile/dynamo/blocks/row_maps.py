"""The rows of an operand that a row of a result reads: an interval that numbers tell.

Padding, slices, windows, pooling and strided convolutions are such maps. The map of one operation behind
another is their product, as in the bounds inference of Halide (Ragan-Kelley et al., PLDI 2013).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ...passes.ir import Size, arguments
from ...passes.rules.forward import Part, part_of
from ..reading.values import fake_of

Number = tuple[int, int]  # (a, b): of n rows of an operand, ``(n + a) // b + 1`` rows are made
FILTERS = (Part.CONVOLUTION, Part.FILTER_OF_PLANES)


class NotMapped(Exception):
    """The rows that an operation reads are no interval that numbers tell."""


@dataclass(frozen=True)
class RowMap:
    """Row t of a result reads ``count`` rows of an operand, from row ``scale * t + start`` on.

    more  rows of zeros around those of the operand, so that the result has ``(rows + more - count) // scale
          + 1`` rows
    """

    scale: int = 1
    start: int = 0
    count: int = 1
    more: Size = 0

    def of(self, inner: RowMap) -> RowMap:
        """Return the rows that the operand of an operation is read for, where this map reads its result."""
        start, count = inner.scale * self.start + inner.start, (self.count - 1) * inner.scale + inner.count
        return RowMap(self.scale * inner.scale, start, count, inner.scale * self.more + inner.more)

    def join(self, other: RowMap) -> RowMap:
        """Return the least interval that includes both, which have the same scale."""
        start = min(self.start, other.start)
        stop = max(self.start + self.count, other.start + other.count)
        return RowMap(self.scale, start, stop - start)

    @property
    def number(self) -> Number:
        """The part that tells the result's number of rows, in numbers alone."""
        assert isinstance(self.more, int)
        return self.more - self.count, self.scale

    @property
    def before(self) -> int:
        """Zeros before the operand's first row."""
        return -self.start

    @property
    def behind(self) -> Size:
        """Zeros behind the operand's last row."""
        return self.more - self.before


def map_of(node: Node, dim: int) -> RowMap:
    """Describe what padding with zeros, windows, pooling or a convolution read along a dimension. Raises
    `NotMapped` for other padding, and where a size is no number."""
    part, given = part_of(node), arguments(node)
    if part is Part.PAD:
        before, behind = padding_of(node, dim)
        found = RowMap(1, -before, 1, before + behind)
        if given.get("value"):
            raise NotMapped
    elif part is Part.WINDOWS:
        found = RowMap(given["step"], 0, given["size"])
    else:
        weight = fake_of(given["weight"]) if part in FILTERS else None
        taps = along(node, dim, "kernel_size") if weight is None else int(weight.shape[dim])
        count = along(node, dim, "dilation") * (taps - 1) + 1
        more = before = 0
        if given["padding"] == "same":
            before, more = (count - 1) // 2, count - 1
        elif given["padding"] != "valid":
            before = along(node, dim, "padding")
            more = 2 * before
        found = RowMap(along(node, dim, "stride") or taps, -before, count, more)
    if not all(isinstance(n, int) for n in (found.scale, found.start, found.count)):
        raise NotMapped
    return found


def padding_of(node: Node, dim: int) -> tuple[Size, Size]:
    """Return the rows that padding adds before and behind (negative: cuts off) along a dimension. Raises
    `NotMapped` where it fills them with other rows, or pads other dimensions."""
    given = arguments(node)
    pad, at = list(given["pad"]), 2 * (fake_of(node).dim() - 1 - dim)
    if given.get("mode", "constant") != "constant" or any(pad[:at] + pad[at + 2 :]):
        raise NotMapped
    before, behind = (fake_of(n) if isinstance(n, Node) else n for n in pad[at : at + 2] or (0, 0))
    return before, behind


def along(node: Node, dim: int, name: str) -> int:
    """Return a setting of a convolution, pooling or ``im2col`` for a dimension of its operand."""
    given = arguments(node).get(name, 1)
    if not isinstance(given, (list, tuple)):
        return given
    return given[dim - 2 if len(given) > 1 else 0] if given else 0

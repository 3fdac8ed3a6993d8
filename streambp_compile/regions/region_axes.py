"""The choice of the sequence along which a region streams, where a model has several."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, is_parameter, own_of
from ..passes.ir import Mark, Size, bytes_of, hint
from ..passes.split import Region

MANY_ROWS = 64  # rows a sequence beside the attending one needs to be streamed; fewer if that one is shorter
FAR = 4  # a sequence with more than this many times the bytes of the one that attends is streamed along


def axis_of(region: Region, axes: Sequence[Axis]) -> Axis | None:
    """Choose the axis of a region.

    Tokens that enter or leave it in blocks come first, then tokens that attend in it, then those that
    see one another. Without such tokens, it is the axis of which most bytes of its values have tokens,
    with no rows beside them.

    A few tokens that attend beside a long sequence (a prompt beside an image, latents beside a text) do
    not take the memory, so the long sequence is chosen. And where each row of another sequence has an
    attention of its own (that of the patches of a frame), those rows are streamed, and no keys are kept.
    """
    nodes = set(region.nodes)
    parted = [a for a in axes if any(m.block > 1 for n in region.nodes for m in a.marks.get(n, ()))]
    fitting = [a for a in axes if not nodes.isdisjoint(a.attending)] or [
        a for a in axes if not nodes.isdisjoint(a.mixing)
    ]

    values = [n for n in values_of(region) if sum(n in a.marks for a in axes) == 1]

    def carried(axis: Axis) -> int:
        """Count the bytes of values with tokens of this axis alone. Scores of two sequences count for
        neither."""
        return sum(bytes_of(own_of(n)) for n in values if n in axis.marks and not has_more_rows(n, axis))

    if not any(nodes & a.attending for a in fitting) and any(nodes & a.received for a in fitting):
        # The tokens of all processes, and those of one: the region exchanges each for the other.
        fitting.sort(key=carried, reverse=True)
    most = max(parted or axes, key=lambda a: (carried(a), hint(a.length)), default=None)
    if parted or not fitting:
        return most
    many = min(MANY_ROWS, hint(fitting[0].length))
    beside = [a for a in axes if hint(a.length) >= many and lies_across(a, fitting[0], region)]
    if beside:
        return max(beside, key=lambda a: hint(a.length))
    return most if carried(most) > FAR * carried(fitting[0]) else fitting[0]


def values_of(region: Region) -> list[Node]:
    """List the values that a region reads or makes. Weights are left out: their rows may be places in a
    patch."""
    return [n for n in (*region.inputs, *region.nodes) if not is_parameter(fake_of(n))]


def lies_across(axis: Axis, attending: Axis, region: Region) -> bool:
    """Does a region treat each token of an axis by itself, beside those of the attending axis? All values
    with tokens of the attending axis need a place for the others, too; weights need none. Tokens that
    several rows of the attending axis belong to (states and actions in turn) have no place of their own."""
    marked = [(n, attending.marks[n]) for n in values_of(region) if n in attending.marks]
    across = all(
        axis.marks.get(n)
        and not any(
            share_a_place(one, axis.length, other, attending.length)
            for one in axis.marks[n]
            for other in found
        )
        for n, found in marked
    )
    return across and axis.mixing.isdisjoint(region.nodes)


def share_a_place(one: Mark, length: Size, other: Mark, other_length: Size) -> bool:
    """Do two axes occupy overlapping parts of the flat index of one dimension?"""
    return (
        one.dim == other.dim
        and one.inner < other.inner * hint(other_length)
        and other.inner < one.inner * hint(length)
    )


def has_more_rows(node: Node, axis: Axis) -> bool:
    """Does a value have rows beside those of the tokens (a prefix of learned ones)?"""
    return any(hint(own_of(node).shape[m.dim]) > m.size(hint(axis.length)) for m in axis.marks.get(node, ()))

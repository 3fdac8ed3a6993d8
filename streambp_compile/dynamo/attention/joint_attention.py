"""Attention over several streams at once, such as image and text tokens, each with weights of its own. The
streams are joined for the scores alone and separated behind them (arXiv 2403.03206, section 4).

The queries of different streams are then no rows of one sequence. So the queries of each stream get an
attention of their own over all keys, before autograd sees it. Slices of the joint result are read from
these.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import are_equal, arguments, hint, is_equal
from ...passes.rules.forward import Part, cuts_into_pieces, part_of, slice_of
from ..reading.aten import erase_unread, inserted
from ..reading.row_ties import operand_dims
from ..reading.values import fake_of
from ..rows.row_slices import Known, Parts, Rowwise, rows_between, with_rows
from .shared_keys import OwnKeys, apart, origins


@dataclass(frozen=True)
class TakenRows:
    """Rows that a node slices from a value: ``start`` to before ``stop`` (None: the end) of a dimension."""

    source: Node
    dim: int
    start: object
    stop: object


def part_joint_attention(module: GraphModule) -> GraphModule:
    """Write attention over several streams as one attention for the queries of each."""
    without: Rowwise = set()
    for node in [n for n in module.graph.nodes if part_of(n) is Part.ATTENTION]:
        parts = streams_of(node, without)
        cuts = {} if parts is None else cuts_between(node, parts)
        if cuts:
            for cut, value in zip(cuts, parted(node, parts, cuts)):
                cut.replace_all_uses_with(value)
            erase_unread(module.graph, [*cuts, node])
            without = set()
    return module


def streams_of(node: Node, without: Rowwise) -> Parts | None:
    """Find the streams that the queries, keys and values of an attention consist of. None if they consist
    of different streams or of one alone."""
    found = origins(node, ("query", "key", "value"), without)
    if not found or any(not are_equal(parts.sizes, found[0].sizes) for parts in found):
        return None
    return found[0] if len(found[0].sizes) > 1 else None


def longest(parts: Parts) -> int:
    return max(range(len(parts.sizes)), key=lambda i: hint(parts.sizes[i]))


def cuts_between(node: Node, parts: Parts) -> dict[Node, tuple[int, int]]:
    """Find the nodes that slice an attention's result at the bounds of streams. Returns for each the first
    stream, and the one behind the last."""
    found = {}
    for user in node.graph.nodes:
        cut = cut_of(user)
        run = streams_between(parts, cut) if cut is not None and is_result(node, cut) else None
        if run is not None:
            found[user] = run
    return found


def cut_of(node: Node) -> TakenRows | None:
    if node.target is operator.getitem and cuts_into_pieces(node.args[0]):
        source = node.args[0].args[0]
        dim = arguments(node.args[0])["dim"] % fake_of(source).dim()
        if fake_of(node).dim() < fake_of(source).dim():  # unbind
            return None
        sizes = [piece.shape[dim] for piece in fake_of(node.args[0])]
        start = sum(sizes[: node.args[1]])
        return TakenRows(source, dim, start, start + sizes[node.args[1]])
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None or not isinstance(fake_of(source), torch.Tensor):
        return None
    taken = slice_of(node, fake_of(source).dim())
    return None if taken is None or taken.lost else TakenRows(source, taken.dim, taken.start, taken.stop)


def is_result(node: Node, cut: TakenRows) -> bool:
    """Is a sliced value an attention's result, with only row-wise operations such as weights in between?"""
    value, dim = cut.source, cut.dim
    while value is not node:
        found = operand_dims(value, dim)
        if len(found) != 1:
            return False
        ((value, dim),) = found.items()
    return dim == fake_of(node).dim() - 2


def streams_between(parts: Parts, cut: TakenRows) -> tuple[int, int] | None:
    """Find the streams whose rows a slice takes, if its bounds are those of streams."""
    count = len(parts.sizes)
    bounds = [sum(parts.sizes[:i]) for i in range(count + 1)]

    def place(at: object) -> int | None:
        at = fake_of(at) if isinstance(at, Node) else at
        at = bounds[-1] if at is None else bounds[-1] + at if hint(at) < 0 else at
        return next((i for i, bound in enumerate(bounds) if is_equal(bound, at)), None)

    first, end = place(cut.start), place(cut.stop)
    return (first, end) if first is not None and end is not None and first < end else None


def parted(node: Node, parts: Parts, cuts: dict[Node, tuple[int, int]]) -> list[Node]:
    """Insert an attention for each stream's queries. Returns the values that replace the slices."""
    own, count = OwnKeys(parts, longest(parts)), len(parts.sizes)
    rows_dim = fake_of(node).dim() - 2
    known: Known = {}
    with node.graph.inserting_before(node):
        made = [apart(node, own, rows_between(parts, i, i + 1, node)) for i in range(count)]
        whole = inserted(node, torch.ops.aten.cat.default, (made, rows_dim))
    node.replace_all_uses_with(whole)
    values = []
    for user, (first, end) in cuts.items():
        cut = cut_of(user)
        with node.graph.inserting_before(user):
            rows = rows_between(parts, first, end, user)
            values.append(with_rows(cut.source, cut.dim, rows, user, known))
    return values

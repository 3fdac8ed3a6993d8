"""Work that a model does piece by piece over rows, done for all of them at once. The rewrite is done in the
Dynamo graph, before autograd sees it.

``for h, y in zip(hidden.chunk(8, 1), labels.chunk(8, 1)): loss += cross_entropy(head(h), y)`` is how a
loss is kept small by hand, often under activation checkpointing. Sweeps do the same for any number of
rows, where they see all rows as one value. So operations that every piece goes through alike, row by
row, are applied once, to the value that the pieces were cut from. Later operations on a piece are
applied to its part of the result.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import Mark, arguments, draws_random, hint
from ...passes.pieces import Correspondence
from ...passes.rules import functional
from ...passes.rules.forward import (
    NONE,
    SUM,
    Part,
    is_plain_loss,
    multiplies,
    mutated,
    part_of,
    with_arguments,
)
from ..reading.aten import functions_with_backward, inserted, is_from_torch, to_aten
from ..reading.modes import is_switch
from ..reading.row_ties import row_mark
from ..reading.values import fake_of, storage_of
from ..rows.row_slices import repeated
from .tiles import (
    Cuts,
    Tiling,
    has_rows_of,
    mean_of_piece,
    rows_have_features,
    rows_of_piece,
    sum_of_piece,
    tilings,
)


def merge_unrolled(module: GraphModule) -> GraphModule:
    """Apply operations on all pieces of a value to the value itself, where they are alike row by row. It is
    done only where an operation on all features of a row is among them. Functions with a backward of their
    own are searched as well."""
    for _, *graphs in functions_with_backward(module):
        for graph in graphs:
            merge_unrolled(to_aten(graph))
    add_up_parts(module.graph)
    tried: set[Cuts] = set()
    while True:
        found = [t for t in tilings(module.graph) if t.cuts not in tried]
        if not found:
            return to_aten(module)
        group = [t for t in found if t.cuts == found[0].cuts and has_rows_of(t, found[0])]
        tried.add(found[0].cuts)
        if any(map(rows_have_features, group)) and merge(module, group):
            tried.clear()  # pieces of pieces: those may be alike now


def add_up_parts(graph: Graph) -> None:
    """Write the sum or the mean of a concatenation as that of its parts. ``torch.cat(losses).sum()`` then is
    a loss in pieces."""
    for node in [n for n in graph.nodes if part_of(n) is Part.JOIN]:
        parts = arguments(node)["tensors"]
        if not isinstance(parts, (tuple, list)):
            continue
        alike = len({fake_of(p).dtype for p in (*parts, node)}) == 1
        if alike and all(part_of(u) in OF_PARTS and is_alone(u) for u in node.users):
            for reader in list(node.users):
                with graph.inserting_before(reader):
                    reader.replace_all_uses_with(inserted(reader, OF_PARTS[part_of(reader)], tuple(parts)))
                graph.erase_node(reader)
            graph.erase_node(node)


def total_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up all numbers of some values. Half precision is added up in float32, as torch does."""
    wide = [p.float() if p.dtype in (torch.float16, torch.bfloat16) else p for p in parts]
    return functools.reduce(operator.add, [p.sum() for p in wide])


def sum_of_parts(*parts: torch.Tensor) -> torch.Tensor:
    total = total_of(parts)
    return total.to(parts[0].dtype) if parts[0].dtype.is_floating_point else total


def mean_of_parts(*parts: torch.Tensor) -> torch.Tensor:
    return (total_of(parts) / sum(p.numel() for p in parts)).to(parts[0].dtype)


OF_PARTS = {Part.TOTAL: sum_of_parts, Part.MEAN: mean_of_parts}


class Pieces:
    """The operations on the pieces of some values that are split alike."""

    def __init__(self, graph: Graph, group: Sequence[Tiling]):
        self.graph, self.group, self.count = graph, group, len(group[0].pieces)
        self.tiles = {p: (k, i) for k, t in enumerate(group) for i, p in enumerate(t.pieces)}
        nodes = [n for n in graph.nodes if n.op != "output"]
        found = Correspondence(nodes, self.tiles, lambda n: n.all_input_nodes, self.text)
        self.touched, self.class_of, self.classes = found.touched, found.class_of, found.classes
        self.complete = found.complete

    @staticmethod
    def text(node: Node, found: Correspondence[Node]) -> str | None:
        """Describe the operation of a node. None for a hook, a function with a backward of its own, and
        values that are no tensor."""
        if isinstance(node.target, internals.HigherOrderOperator) or not isinstance(
            fake_of(node), torch.Tensor
        ):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: found.name(a) or f"@{a.name}")
        return f"{node.op} {node.target if isinstance(node.target, str) else id(node.target)} {args} {kwargs}"

    def externals(self) -> list[Node]:
        """List the values that a piece reads besides its tiles."""
        inside = {self.classes[key][0] for key in self.complete}
        return list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in self.touched))

    def first(self, node: Node) -> Node:
        """Return the node that is computed for all nodes that do the same to the same piece."""
        if node not in self.class_of:
            return node
        return self.classes[self.class_of[node]][next(iter(self.touched[node]))]

    def written(self) -> bool:
        """Is a base, a value computed from a piece, or any other operand written into?"""
        kept = {
            *(t.base for t in self.group),
            *self.tiles,
            *(n for key in self.complete for n in self.classes[key].values()),
        }
        targets = {target for n in self.graph.nodes if (target := mutated(n)) is not None}
        memory = {storage_of(target) for target in targets} - {None}
        return not targets.isdisjoint(kept) or any(
            storage_of(n) in memory for n in (*kept, *self.externals())
        )


def merge(module: GraphModule, group: Sequence[Tiling]) -> bool:
    """Apply operations that all pieces of a group share only once, to the whole. Returns whether there were
    any."""
    spell_out(module.graph, group)
    pieces = Pieces(module.graph, group)
    if not pieces.complete or pieces.written():
        return False
    alike = row_by_row(pieces)
    inside = {n for n, key in pieces.class_of.items() if key in alike}
    if not inside:
        return False
    first, last = min(inside), max(inside)
    if any(first < n for n in (*(t.base for t in group), *pieces.externals())) or any(
        map(is_switch, between(first, last))
    ):
        return False
    values = applied_to_whole(pieces, alike, first)
    if values is None:
        return False
    for node in sorted(inside):
        key, piece = pieces.class_of[node], next(iter(pieces.touched[node]))
        mark = alike[key]
        part = (values[pieces.classes[key][0]], (mark.dim, mark.outer, mark.inner), group[0].cuts, piece)
        for reader in [u for u in node.users if u not in inside]:
            cut_from(reader, node, part)
    for node in sorted(inside, reverse=True):
        module.graph.erase_node(node)
    for node in [n for n in module.graph.nodes if part_of(n) is Part.JOIN]:
        join(node, len(group[0].pieces))
    for node in (p for t in group for p in t.pieces):
        cutter = node.args[0]
        for unread in (node, cutter):
            if not unread.users and unread not in (t.base for t in group):
                module.graph.erase_node(unread)
    return True


class FitsPieceAlone(Exception):
    """An operation has sizes of a piece, written as numbers."""


def applied_to_whole(pieces: Pieces, alike: Mapping[int, Mark], first: Node) -> dict[Node, Node] | None:
    """Insert the operations of a piece for the whole, before the first of them. Returns the values for those
    of the piece. None, with nothing inserted, where one of them fits the rows of a piece alone."""
    graph, values = pieces.graph, {t.pieces[0]: t.base for t in pieces.group}
    rows, before = hint(fake_of(pieces.group[0].base).shape[pieces.group[0].dim]), set(graph.nodes)
    try:
        for key, mark in alike.items():
            node = pieces.classes[key][0]
            given = {a: values.get(pieces.first(a), a) for a in node.all_input_nodes}
            with graph.inserting_before(first):
                values[node] = repeated(node, mark.dim, given, node)
            wanted, found = ([hint(size) for size in fake_of(n).shape] for n in (node, values[node]))
            wanted[mark.dim] = rows * mark.step
            if found != wanted:
                raise FitsPieceAlone(node)
    except Exception:
        internals.log.debug("%s is done piece by piece", first, exc_info=True)
        for node in [n for n in reversed(graph.nodes) if n not in before]:
            graph.erase_node(node)
        return None
    return values


def between(first: Node, last: Node) -> Iterator[Node]:
    while first is not last:
        yield first
        first = first.next


def cut_from(reader: Node, node: Node, part: tuple) -> None:
    """Let the reader of a piece read that part of the whole. A reader that adds up the piece becomes the
    sum of those rows."""
    with reader.graph.inserting_before(reader):
        reduced = REDUCED.get(part_of(reader)) if is_alone(reader) else None
        if reduced is not None:
            reader.replace_all_uses_with(inserted(reader, reduced, part, as_written=True))
            reader.graph.erase_node(reader)
        else:
            reader.replace_input_with(node, inserted(node, rows_of_piece, part, as_written=True))


def is_alone(reader: Node) -> bool:
    """Does a node have one argument, as a sum over all dimensions?"""
    return len(reader.args) == 1 and not reader.kwargs


REDUCED = {Part.TOTAL: sum_of_piece, Part.MEAN: mean_of_piece}


def join(node: Node, count: int) -> None:
    """Replace a concatenation of all pieces, in their order, by the whole."""
    joined = node.args[0] if node.args and isinstance(node.args[0], (tuple, list)) else ()
    dim = arguments(node).get("dim", 0)
    if len(joined) != count or any(n.target is not rows_of_piece for n in joined):
        return
    whole, (at, outer, inner), cuts, _ = joined[0].args
    if (
        [n.args for n in joined] == [(whole, (at, outer, inner), cuts, i) for i in range(count)]
        and outer == inner == 1
        and (dim % fake_of(whole).dim() == at)
    ):
        node.replace_all_uses_with(whole)
        for old in dict.fromkeys((node, *joined)):
            if not old.users:
                node.graph.erase_node(old)


def spell_out(graph: Graph, group: Sequence[Tiling]) -> None:
    """Write a loss of a piece as a reduction of losses of its rows. Values that are written in place become
    values of their own."""
    touched = {p for t in group for p in t.pieces}
    for node in list(graph.nodes):
        if touched.isdisjoint(node.all_input_nodes):
            continue
        with graph.inserting_before(node):
            new = (
                by_rows(node)
                if is_plain_loss(node)
                else out_of_place(node)
                if mutated(node) in touched
                else None
            )
        touched.add(node if new is None else new)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def out_of_place(node: Node) -> Node | None:
    """Insert the value that a node writes over another as a value of its own. Later readers of the other
    read it. None if the other has an earlier alias, or another shape or dtype."""
    target, plain = mutated(node), functional(node.target)
    if plain is None:
        return None
    if any(
        n < node and n is not target and storage_of(n) is not None and storage_of(n) == storage_of(target)
        for n in node.graph.nodes
    ):
        return None
    new = inserted(node, plain, node.args, node.kwargs)
    if (fake_of(new).shape, fake_of(new).dtype) != (fake_of(target).shape, fake_of(target).dtype):
        node.graph.erase_node(new)
        return None
    for reader in [u for u in target.users if node < u]:
        reader.replace_input_with(target, new)
    return new


def by_rows(node: Node) -> Node:
    """Write the loss as a sum (or mean) over rows."""
    given = arguments(node)
    rows = inserted(node, node.target, *with_arguments(node, reduction=NONE))
    if given["reduction"] == SUM:
        return inserted(node, torch.sum, (rows,))
    if "ignore_index" not in given or fake_of(given["target"]).dtype.is_floating_point:
        return inserted(node, torch.mean, (rows,))
    counted = inserted(given["target"], torch.ne, (given["target"], given["ignore_index"]))
    total, count = inserted(node, torch.sum, (rows,)), inserted(counted, torch.sum, (counted,))
    return inserted(node, torch.div, (total, count))


def row_by_row(pieces: Pieces) -> dict[int, Mark]:
    """Find the classes that do the same to each row of any piece, and the rows' dimension in their values.
    Empty if none of them reads all features of a row, or if some product is not among them: pieces with more
    operations than these (texts of a batch, one after another) stay as they are."""
    marks = {t.pieces[0]: Mark(t.dim) for t in pieces.group}
    found: dict[int, Mark] = {}
    for key in pieces.complete:
        node = pieces.classes[key][0]
        given = {a: marks.get(pieces.first(a)) for a in node.all_input_nodes if a in pieces.touched}
        known = {a: mark for a, mark in given.items() if mark is not None}
        alone = len(known) == len(given) and not draws_random(node)
        mark = row_mark(node, known) if alone else None
        if mark is not None:
            found[key] = marks[node] = mark
        elif multiplies(node) or not is_from_torch(node.target):
            return {}
    return found if any(reads_all_features(pieces.classes[key][0]) for key in found) else {}


def reads_all_features(node: Node) -> bool:
    """Does an operation read all features of a row, as products, losses and softmax do?"""
    return multiplies(node) or part_of(node) in (Part.ALONG, Part.LOSS)

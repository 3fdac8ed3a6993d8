"""Work that a model does piece by piece over rows, done for all of them at once. The rewrite is done in the
Dynamo graph, before autograd sees it.

``for h, y in zip(hidden.chunk(8, 1), labels.chunk(8, 1)): loss += cross_entropy(head(h), y)`` is how a
loss is kept small by hand, often under activation checkpointing. Sweeps do the same for any number of
rows, where they see all rows as one value. So operations that every piece goes through alike, row by
row, are applied once, to the value that the pieces were cut from. Later operations on a piece are
applied to its part of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import Mark, arguments, draws_random, hint, is_tensor, shape_of
from ...passes.pieces import Correspondence
from ...passes.rules import functional, is_product, rule_of
from ...passes.rules.forward import NONE, SUM, Part, is_plain_loss, mutated, part_of, with_arguments
from ...passes.token_propagation import TokenPropagation
from ..reading.aten import inserted, to_aten
from ..reading.capture import Captured
from ..reading.modes import is_switch
from ..reading.values import fake_of, storage_of
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
    done only where a product is among them."""
    tried: set[Cuts] = set()
    while True:
        found = [t for t in tilings(module.graph) if t.cuts not in tried]
        if not found:
            return to_aten(module)
        group = [t for t in found if t.cuts == found[0].cuts and has_rows_of(t, found[0])]
        tried.add(found[0].cuts)
        if any(map(rows_have_features, group)) and merge(module, group):
            tried.clear()  # pieces of pieces: those may be alike now


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
    values: dict[Node, Node] = {t.pieces[0]: t.base for t in group}
    with module.graph.inserting_before(first):
        for key in alike:
            node = pieces.classes[key][0]
            args, kwargs = map_arg((node.args, node.kwargs), lambda a: values.get(pieces.first(a), a))
            values[node] = inserted(node, node.target, args, kwargs)
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


def between(first: Node, last: Node) -> Iterator[Node]:
    while first is not last:
        yield first
        first = first.next


def cut_from(reader: Node, node: Node, part: tuple) -> None:
    """Let the reader of a piece read that part of the whole. A reader that adds up the piece becomes the
    sum of those rows."""
    with reader.graph.inserting_before(reader):
        reduced = REDUCED.get(part_of(reader)) if len(reader.args) == 1 and not reader.kwargs else None
        if reduced is not None:
            reader.replace_all_uses_with(inserted(reader, reduced, part, as_written=True))
            reader.graph.erase_node(reader)
        else:
            reader.replace_input_with(node, inserted(node, rows_of_piece, part, as_written=True))


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
    Empty if no product is among them, or if some product is not: pieces with more operations than these
    (texts of a batch, one after another) stay as they are. The graph of the first piece is compared with
    the graph of the whole: they must be the same, node by node, but for the number of rows."""
    nodes, others = [pieces.classes[key][0] for key in pieces.complete], pieces.externals()
    module, copies = subgraph(nodes, [*(t.pieces[0] for t in pieces.group), *others], pieces)
    try:
        piece, whole = (
            Captured(module, [*map(contiguous, given), *map(fake_of, others)])
            for given in ([t.pieces[0] for t in pieces.group], [t.base for t in pieces.group])
        )
    except Exception:  # it has shapes written as numbers, which fit a piece alone
        return {}
    graph, values = piece.module.graph, piece.values_in(piece.module)
    cut = dict(zip(graph.find_nodes(op="placeholder"), pieces.group))
    propagation = TokenPropagation(graph, {n: (Mark(t.dim),) for n, t in cut.items()})
    alike = alike_by_rows(graph, whole.module.graph, propagation, cut)
    products = {n.name for n in graph.nodes if is_product(n) or n in propagation.missing}
    found: dict[int, Mark] = {}
    merges = False
    for key, node in zip(pieces.complete, nodes):
        names = {n.name for n in graph.nodes if n.name in piece.names[copies[node]]}
        marks = list(propagation.of(values[copies[node]]).values()) if copies[node] in values else []
        operands = [pieces.class_of[a] for a in node.all_input_nodes if a in pieces.class_of]
        if len(marks) == 1 and names <= alike and all(a in found for a in operands):
            found[key] = marks[0]
            merges |= not products.isdisjoint(names)
        elif not products.isdisjoint(names):
            return {}
    return found if merges else {}


def alike_by_rows(
    piece: Graph, whole: Graph, propagation: TokenPropagation, cut: Mapping[Node, Tiling]
) -> set[str]:
    """Collect the names of a piece's nodes that do the same in the whole's graph, to each row by itself."""
    first = next(iter(cut.values()))
    rows = hint(fake_of(first.base).shape[first.dim])
    alike: set[str] = set()
    counterpart: dict[Node, Node] = {}
    for a, b in zip(piece.nodes, whole.nodes):
        counterpart[a] = b
        given = a in cut or a.op == "placeholder" and not propagation.of(a)
        called = a.op == b.op == "call_function" and all(n.name in alike for n in a.all_input_nodes)
        same = called and is_same(a, b, counterpart, propagation, rows) and not draws_random(a)
        if given or same and propagation.maps_rows(a):
            alike.add(a.name)
    return alike


def contiguous(node: Node) -> torch.Tensor:
    """Create a contiguous fake value like that of a piece. A piece has the strides of what it was cut from,
    and would be copied where the whole is not."""
    fake = fake_of(node)
    with fake.fake_mode:
        return torch.empty(fake.shape, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad)


def subgraph(
    nodes: Sequence[Node], inputs: Sequence[Node], pieces: Pieces
) -> tuple[GraphModule, dict[Node, Node]]:
    """Copy some nodes to a graph of their own. Returns it, and the copy of each node."""
    graph = Graph()
    copies = {n: graph.placeholder(f"in_{i}") for i, n in enumerate(inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda a: copies[pieces.first(a)])
    graph.output(tuple(copies[n] for n in nodes))
    return GraphModule(nodes[0].graph.owning_module, graph), copies


def is_same(
    a: Node, b: Node, counterpart: Mapping[Node, Node], propagation: TokenPropagation, rows: int
) -> bool:
    """Are two nodes equal except for the rows of their shapes?"""
    signature = propagation.signatures.get(a)
    if a.target != b.target or signature is None or not is_tensor(a):
        return False
    shape_arg = 1 if signature.reshape else rule_of(a).shape_arg
    shapes = (
        [len(x) if i == shape_arg else x for i, x in enumerate(a.args)],
        [len(x) if i == shape_arg else x for i, x in enumerate(b.args)],
    )
    if map_arg((shapes[0], a.kwargs), counterpart.get) != (shapes[1], b.kwargs):
        return False
    marks = propagation.of(a)
    wanted = [
        marks[d].outer * rows * marks[d].inner if d in marks else size for d, size in enumerate(shape_of(a))
    ]
    return list(shape_of(b)) == wanted

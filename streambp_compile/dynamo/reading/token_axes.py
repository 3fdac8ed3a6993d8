"""The token axes of a model: dimensions of its values that carry tokens, and their places in the Dynamo
graph.

The forward is captured once, every candidate is propagated through it, and the one that reaches the rows
of attention wins. The size of a dimension never decides whether it carries tokens. Attention that the
axis does not reach is of another sequence (an encoder's, an image's), which has an axis of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import (
    Mark,
    Size,
    bytes_of,
    differs_by_a_number,
    draws_random,
    hint,
    is_equal,
    is_tensor,
    names_in,
    origin_of,
    shape_of,
    tensor_operands,
    value_of,
)
from ...passes.moved_rows import Rows, moves_rows, picked_rows, picks_rows_of
from ...passes.normalization.normalize import normal_form
from ...passes.rules import along_of, communicates, ends_along, form_of, is_product
from ...passes.rules.facets import Form
from ...passes.token_propagation import Signatures, TokenPropagation
from .capture import Captured
from .mixing import (
    attends,
    crosses,
    exchanges,
    gathers,
    is_all,
    is_batch_of_matrices,
    is_feature,
    is_linear_layer,
    lost_bytes,
    made_of_weights,
    mixes,
    touches,
)
from .values import fake_of, is_parameter, own_of

SHORTEST_STREAMED = 8  # tokens; for fewer, a graph of this very length is compiled whole, and nothing is lost


@dataclass(frozen=True)
class Axis:
    """A token axis of a model: its length, and the marks of every value of the Dynamo graph.

    mixing        nodes that let one token see another
    attending     those of them that are attention of these tokens
    recomputable  nodes that are neither products nor random nor collectives
    moving        nodes that make rows of one sequence from those of another
    received      nodes among ``mixing`` that get rows of other processes
    grids         of several axes as one: values with a vector for each pair of tokens of two sequences (the
                  patches of each frame), which are no scores of one over the other
    batch         sizes in front of the tokens of inputs and hidden states
    """

    length: Size
    marks: Mapping[Node, tuple[Mark, ...]]
    mixing: frozenset[Node]
    attending: frozenset[Node]
    recomputable: frozenset[Node]
    moving: frozenset[Node] = frozenset()
    received: frozenset[Node] = frozenset()
    grids: frozenset[Node] = frozenset()
    batch: tuple[Size, ...] = field(default=(), compare=False)


def joined(axes: Sequence[Axis]) -> Axis | None:
    """Join all axes into one that has tokens wherever any of them has. Scores of one sequence over another
    are matrices, too."""
    if not axes:
        return None
    marks: dict[Node, dict[int, Mark]] = {}
    for axis in reversed(axes):
        for node, found in axis.marks.items():
            marks.setdefault(node, {}).update({m.dim: m for m in found})
    mixing, attending, received = (
        frozenset().union(*(getattr(a, name) for a in axes)) for name in ("mixing", "attending", "received")
    )
    return replace(
        axes[0],
        marks={n: tuple(found.values()) for n, found in marks.items()},
        mixing=mixing,
        attending=attending,
        received=received,
        grids=frozenset(n for n, found in marks.items() if is_grid(n, found, axes)),
    )


def is_grid(node: Node, dims: Collection[int], axes: Sequence[Axis]) -> bool:
    """Does a value have one dimension for the tokens of each of two sequences, and features behind?"""
    each = [len(a.marks.get(node, ())) for a in axes]
    return len(dims) > 1 and max(each) == 1 and max(dims) < own_of(node).dim() - 1


def find_axes(module: GraphModule, fakes: Sequence[object]) -> tuple[Axis, ...]:
    """Find the dimensions of the inputs along which tokens run. First is the one that reaches the rows of
    attention, or else the widest. Next come other dimensions of inputs, for attention whose rows it does
    not reach. Last come rows of attention that were made inside (patches of an image)."""
    return axes_of(traced(module, fakes), fakes)


def axes_of(trace: Trace, fakes: Sequence[object]) -> tuple[Axis, ...]:
    """Find the token axes of a captured forward, each of one number of rows."""
    constant = {n for n, value in trace.values.items() if value in trace.weights}
    parts = [part for axis in connected_axes(trace, fakes) for part in by_length(axis, constant)]
    moving = frozenset[Node]().union(*(axis.moving for axis in parts))
    return tuple(replace(axis, moving=moving) for axis in parts)


@dataclass(frozen=True)
class GraphText:
    """A graph as it is at one time, and the values that enter it."""

    nodes: tuple[Node, ...]
    text: str
    fakes: tuple[int, ...]


class LastTrace:
    """The trace of a graph as it was last, for callers that ask for the same graph again."""

    def __init__(self) -> None:
        self.written: GraphText | None = None
        self.trace: Trace | None = None


LAST: ContextVar[LastTrace | None] = ContextVar("last", default=None)
"""Of the graph that is being rewritten; None outside `capturing_once`, which ends its life."""


@contextlib.contextmanager
def capturing_once() -> Iterator[None]:
    """Share one capture of an unchanged graph among all callers inside that ask for its token axes."""
    before = LAST.set(LastTrace())
    try:
        yield
    finally:
        LAST.reset(before)


def traced(module: GraphModule, fakes: Sequence[object]) -> Trace:
    """Trace the forward of a graph. Inside `capturing_once`, the last trace is returned if the graph has
    not changed."""
    nodes, last = tuple(module.graph.nodes), LAST.get()
    text = "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in nodes)
    written = GraphText(nodes, text, tuple(map(id, fakes)))
    if last is not None and last.trace is not None and last.written == written:
        return last.trace
    trace = Trace(module, fakes)
    if last is not None:
        last.written, last.trace = written, trace
    return trace


def connected_axes(trace: Trace, fakes: Sequence[object]) -> tuple[Axis, ...]:
    """Find the token axes of a captured forward. Slices and joins connect rows of several lengths to one
    axis."""
    found: list[AxisCandidate] = []
    for node, fake in zip(trace.placeholders, fakes):
        if isinstance(fake, torch.Tensor) and not is_parameter(fake) and fake.dim() <= 3:
            for dim, size in enumerate(fake.shape):
                if hint(size) > 1 and not any(dim in c.propagation.of(node) for c in found):
                    found += trace.candidate(node, dim)
    main = preferred(found)
    chosen = [] if main is None else [main]
    while found:
        left = [replace(c, mixers=attending_alone(c, chosen)) for c in found]
        found = [c for c in left if c.mixers and c not in chosen and not is_place_in_any(c, chosen)]
        chosen += [preferred(found)] if found else []
    born: list[AxisCandidate] = []
    for node, dim in trace.rows_of_attention():
        if not any(
            dim in c.propagation.of(node) and is_all(node, c.propagation.of(node)[dim], c.length)
            for c in (*chosen, *born)
        ):
            born += trace.candidate(node, dim)
    chosen += [c for c in born if c.attends]
    chosen = [c for c in chosen if c.mixers or not any(carries_all_of(c, other) for other in chosen)]
    chosen += trace.parts_of_processes(chosen)
    chosen = [c for c in chosen if c.length >= SHORTEST_STREAMED] or chosen
    chosen += trace.picked(chosen)
    moving = trace.moving(chosen)
    found_axes = (trace.axis(c, [other.propagation for other in chosen if other is not c]) for c in chosen)
    return tuple(replace(axis, moving=moving) for axis in found_axes if axis is not None)


class Trace:
    """The whole forward, captured once, with the node of the Dynamo graph that each of its nodes comes
    from.

    values    node of the Dynamo graph → its value
    unsorted  those of these nodes that are sorted; their value here is another one of the same shape
    """

    def __init__(self, module: GraphModule, fakes: Sequence[object]):
        captured = Captured(module, fakes)
        self.random = {n.name for n in captured.module.graph.nodes if draws_random(n)}
        places: set[int] = set()
        rewritten = normal_form(captured.module, places)
        self.unsorted = frozenset(n for i, n in enumerate(captured.tensors) if i in places)
        self.graph, self.captured_for, self.values = (
            rewritten.graph,
            captured.names,
            captured.values_in(rewritten),
        )
        self.placeholders = self.graph.find_nodes(op="placeholder")
        self.known = Signatures(self.graph)
        self.ends = ends_along(self.graph)
        self.weights = made_of_weights(self.graph, dict(zip(self.placeholders, fakes)))

    def candidate(self, node: Node, dim: int) -> list[AxisCandidate]:
        """Propagate a dimension of a value as a token axis. The list is empty if no floating-point value
        carries it."""
        length = shape_of(node)[dim]
        propagation = self.followed(node, dim, length)
        mixers = frozenset(n for n in propagation.met() if mixes(n, propagation, length))
        marked = [value_of(n) for n in propagation.marked() if is_tensor(n)]
        width = sum(bytes_of(value) for value in marked if value.dtype.is_floating_point)
        by_attention = frozenset(n for n in mixers if attends(n, propagation, length))
        if not width:
            return []
        feature = is_feature(propagation, self.weights)
        telling = by_attention if feature else mixers
        evidence = frozenset(n for n in telling if not is_linear_layer(n, propagation, self.weights))
        lost = lost_bytes(propagation) / width
        return [AxisCandidate(mixers, by_attention, evidence, feature, width, lost, length, propagation)]

    def followed(self, node: Node, dim: int, length: int) -> TokenPropagation:
        """Propagate the rows of a value. If a collective distributes them over processes or gathers them,
        all rows of that number at the ends of collectives count as the same: they are usually of another
        layer."""
        found = TokenPropagation(self.graph, {node: (Mark(dim),)}, self.known)
        ends = [(end, d) for end, d in self.ends if shape_of(end)[d] == length]
        others = {end: (Mark(d),) for end, d in ends if not found.of(end)}
        if not others or not any(d in found.of(end) for end, d in ends):
            return found
        return TokenPropagation(self.graph, {node: (Mark(dim),), **others}, self.known)

    def parts_of_processes(self, chosen: Sequence[AxisCandidate]) -> list[AxisCandidate]:
        """Find sequences that are one process's part of chosen ones (sequence parallel), or the other way
        round."""
        found: list[AxisCandidate] = []
        for node in self.graph.nodes:
            dim = along_of(node)
            ends = () if dim is None else (tensor_operands(node)[0], node)
            known = [any(dim in c.propagation.of(end) for c in (*chosen, *found)) for end in ends]
            if any(known) and not all(known):
                found += self.candidate(ends[known.index(False)], dim)
        return found

    def rows_of_attention(self) -> Iterator[tuple[Node, int]]:
        """Yield the queries of attention, or its scores, each with its dimension of rows."""
        for node, signature in self.known.found.items():
            if signature.keys is None or not is_batch_of_matrices(node):
                continue
            operand, labels = tensor_operands(node)[0], signature.operands[0]
            rows = (
                signature.rows
                if signature.rows is not None
                else labels[-2]
                if len(labels) > 2 and labels[-1] == signature.keys
                else None
            )
            if rows is not None and shape_of(operand)[labels.index(rows)] >= SHORTEST_STREAMED:
                yield operand, labels.index(rows)

    def picked(self, chosen: Sequence[AxisCandidate]) -> list[AxisCandidate]:
        """Find sequences of rows that are picked from others, by an index or a step."""
        known_rows: dict[Rows, AxisCandidate] = {}

        def rows_from(node: Node, dim: int) -> Rows | None:
            for candidate in self.candidate(node, dim) if shape_of(node)[dim] >= SHORTEST_STREAMED else ():
                known_rows[candidate.rows] = candidate
                return candidate.rows
            return None

        known = [c.rows for c in chosen]
        for node in self.graph.nodes:
            found = picked_rows(node, known, rows_from)
            known += [] if found is None else [found]
        return [known_rows[rows] for rows in known[len(chosen) :]]

    def moving(self, chosen: Sequence[AxisCandidate]) -> frozenset[Node]:
        """Find nodes of the Dynamo graph that make rows of one sequence from those of another."""
        sequences = [c.rows for c in chosen]
        names = {origin_of(n) for n in self.graph.nodes if moves_rows(n, sequences)}
        return frozenset(
            n
            for n, own in self.captured_for.items()
            if names & own and isinstance(n.target, torch._ops.OpOverload)
        )

    def axis(self, chosen: AxisCandidate, others: Sequence[TokenPropagation]) -> Axis | None:
        """Build the axis of a candidate in the Dynamo graph; None if its tokens have no own dimension."""
        graph, propagation = self.graph, chosen.propagation
        crossing = {n for n in propagation.met() if any(crosses(n, propagation, other) for other in others)}
        marks = {n: tuple(propagation.of(v).values()) for n, v in self.values.items() if propagation.of(v)}
        plain = [(n, m) for n, found in marks.items() for m in found if m.is_plain]
        first, at = next(
            ((n, m) for n, m in plain if hint(own_of(n).shape[m.dim]) == chosen.length), (None, None)
        )
        if first is None:
            return None
        mixers = {
            origin_of(n)
            for n in propagation.met()
            if mixes(n, propagation, chosen.length)
            or exchanges(n, propagation)
            or picks_rows_of(chosen.rows, n)
            or n in propagation.missing
            and touches(n, propagation)
            and is_tensor(n)
            and (value_of(n).dtype.is_floating_point or value_of(n).is_complex())
        }
        attending = {origin_of(n) for n in chosen.attends | crossing}
        received = {origin_of(n) for n in propagation.met() if exchanges(n, propagation) and gathers(n)}
        mixing, attending, received = (
            frozenset(n for n, names in self.captured_for.items() if names & found)
            for found in (mixers | attending, attending, received)
        )
        once = {origin_of(n) for n in graph.nodes if n in propagation.missing or is_computed_once(n)}
        recomputable = frozenset(
            n for n, names in self.captured_for.items() if not names & (once | self.random)
        )
        length, batch = own_of(first).shape[at.dim], sizes_ahead(first, plain, marks)
        return Axis(length, marks, mixing, attending, recomputable, received=received, batch=batch)


def is_computed_once(node: Node) -> bool:
    """Is a node a product, part of a collective, or a copy of an input's rows?"""
    return is_product(node) or communicates(node) or form_of(node) is Form.RECEPTIVE_FIELDS


def by_length(axis: Axis, constant: Container[Node]) -> list[Axis]:
    """Split an axis whose length may change into one for each number of rows along it. Numbers that differ
    by a constant share an axis. For a prompt of any length, a suffix of 30 tokens and the last 30 rows
    share another one.

    Nodes that join or slice such rows move them (`Axis.moving`).

    constant  values made of weights alone (a table of positions), which are sliced where they are read
    """
    lengths, moving = [axis.length], set()
    for node in axis.marks if isinstance(axis.length, torch.SymInt) else ():
        found = {n: rows_along(axis, n) for n in (node, *node.all_input_nodes) if n not in constant}
        rows = {n: size for n, size in found.items() if size is not None}
        if node in rows and fake_of(node).requires_grad:
            for size in rows.values():
                lengths += [] if any(share_rows(size, n) for n in lengths) else [size]
            if not all(share_rows(size, rows[node]) for size in rows.values()):
                moving.add(node)
    return [rows_of_length(axis, length, axis.moving | moving) for length in lengths] if moving else [axis]


def share_rows(size: Size, other: Size) -> bool:
    """Do two numbers of rows differ by the same number at every length?

    Each input has a symbol of its own for its length. Two that are the same number now (hidden states, and
    labels that say how many rows to keep) are guarded to stay so: Dynamo compiles another graph where they
    differ. A length and the same length rounded to blocks are equal now and then, and not guarded.
    """
    if differs_by_a_number(size, other):
        return True
    if not isinstance(size, torch.SymInt) or not isinstance(other, torch.SymInt):
        return False
    apart = not size.node.expr.free_symbols & other.node.expr.free_symbols
    return apart and hint(size) == hint(other) and bool(size == other)


def rows_along(axis: Axis, node: Node) -> Size | None:
    """Count the rows of a value along an axis. None if that dimension has anything else, or another one has
    rows."""
    marks, fake = axis.marks.get(node, ()), fake_of(node)
    if len(marks) != 1 or not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return None
    (mark,) = marks
    return own_of(node).shape[mark.dim] if mark.is_plain else None


def rows_of_length(axis: Axis, length: Size, moving: frozenset[Node]) -> Axis:
    """Select the part of an axis whose values have this many rows, or a constant number more or fewer."""

    def fits(node: Node) -> bool:
        sizes = [(own_of(node).shape[m.dim], m) for m in axis.marks[node]]
        return all(
            is_equal(m.located(size, length)[2], 0)
            if m.block == 1
            else is_equal(size * m.block, length * m.step)
            for size, m in sizes
        )

    marks = {n: found for n, found in axis.marks.items() if fits(n)}
    mixing, attending = (nodes & marks.keys() for nodes in (axis.mixing, axis.attending))
    return replace(axis, length=length, marks=marks, mixing=mixing, attending=attending, moving=moving)


def sizes_ahead(
    first: Node, plain: Sequence[tuple[Node, Mark]], marks: Mapping[Node, tuple[Mark, ...]]
) -> tuple[Size, ...]:
    """List the sizes in front of the tokens of a value, of inputs, and of hidden states."""
    found: list[Size] = []
    for node, mark in plain:
        hidden = own_of(node).dim() == 3 and mark.dim == 1 and len(marks[node]) == 1
        if node is first or node.op == "placeholder" or hidden:  # an input may be an image, or a weight
            found += own_of(node).shape[: mark.dim]
    return tuple(found)


def batch_sizes(axes: Sequence[Axis]) -> list[torch.SymInt]:
    """List the sizes of the batch that may change between calls, each once."""
    lengths = frozenset[str]().union(*(names_in(axis.length) for axis in axes))
    sizes = [s for axis in axes for s in axis.batch if names_in(s) and not names_in(s) & lengths]
    return list({str(s): s for s in sizes if isinstance(s, torch.SymInt)}.values())


@dataclass(frozen=True)
class AxisCandidate:
    """A dimension of a value, propagated through the graph.

    mixers       ops that mix its rows, by attention or otherwise
    attends      those of them that do so by attention
    evidence     mixers that cannot be linear layers over features
    feature      whether products with weights read or make it
    bytes        bytes of the values that carry it
    lost         the share of these bytes that a reader contracts, normalises over or looks up
    length       its size
    propagation  where it goes
    """

    mixers: frozenset[Node]
    attends: frozenset[Node]
    evidence: frozenset[Node]
    feature: bool
    bytes: int
    lost: float
    length: int
    propagation: TokenPropagation

    @functools.cached_property
    def rows(self) -> Rows:
        return Rows(self.propagation, self.length)


def attending_alone(candidate: AxisCandidate, chosen: Sequence[AxisCandidate]) -> frozenset[Node]:
    """Return the attention of a candidate that no chosen sequence has. A square weight that is applied to
    rows of a chosen sequence mixes their features."""
    taken = {n for other in chosen for n in other.mixers}
    features = {
        n
        for n in candidate.attends - candidate.evidence
        if any(touches(n, other.propagation) for other in chosen)
    }
    return candidate.attends - taken - features


def carries_all_of(candidate: AxisCandidate, other: AxisCandidate) -> bool:
    """Does every value with tokens of a candidate have rows of another sequence that attends? Bytes, for
    example, are rows of patches where patches attend to one another."""
    marked = set(candidate.propagation.marked())
    return bool(other.attends) and other is not candidate and marked <= set(other.propagation.marked())


def preferred(found: Sequence[AxisCandidate]) -> AxisCandidate | None:
    """Choose the candidate with the most mixers. Ties go to those that lose about the fewest bytes, then to
    those that no weight has, then to those that carry about the most bytes, and last to the most rows.

    In a head without attention the batch carries the same values as the tokens do, and a few numbers per
    sequence besides; features and classes carry much, but products and the softmax lose them. The place
    of a token in its block is no token.
    """
    found = [c for c in found if c.length >= SHORTEST_STREAMED] or found
    found = [c for c in found if not is_place_in_any(c, found)]
    for good in (
        lambda c, rivals: len(c.evidence) == max(len(r.evidence) for r in rivals),
        lambda c, rivals: c.lost <= 2 * min(r.lost for r in rivals) + 1 / 8,
        lambda c, rivals: c.feature == min(r.feature for r in rivals),
        lambda c, rivals: 2 * c.bytes >= max(r.bytes for r in rivals),
    ):
        found = [c for c in found if good(c, found)]
    return max(found, key=lambda c: c.length, default=None)


def is_place_in_any(candidate: AxisCandidate, rivals: Sequence[AxisCandidate]) -> bool:
    return any(is_place_in_block(candidate, rival) for rival in rivals)


def is_place_in_block(candidate: AxisCandidate, rival: AxisCandidate) -> bool:
    """Are the rows of a candidate places in a block, wherever a rival's attention reads all tokens?"""
    if not rival.attends or not rival.attends < candidate.attends:
        return False
    for operand in (tensor_operands(n)[0] for n in rival.attends):
        tokens = rival.propagation.of(operand)
        for dim, mark in candidate.propagation.of(operand).items():
            if dim in tokens and mark.outer > 1 and tokens[dim].is_plain:
                return True
    return False

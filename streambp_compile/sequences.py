"""A region whose sequences do not meet, for some sequences of the batch at a time.

Keys, values and their gradients exist for all tokens of a sequence, between the sweeps that make and read
them. Nothing in a layer of attention reads another sequence of the batch. So its sweeps may run for some
sequences, and then for the next ones: what lies between sweeps exists for these alone. Only sums over the
batch, the gradients of weights, go on from turn to turn.

That sequences do not meet is proved as everything else is, from the rules: the batch takes the place of the
tokens in the analysis of the joint graph, and each row has to read no row but its own. The joint graph of
some sequences is then the same graph with fewer rows, and streams along its tokens like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .joint_regions import InputMarks, Joint, analyzed, parted
from .passes.analyze import analyze
from .passes.ir import (
    HERE,
    Analysis,
    CannotStream,
    Contraction,
    Kind,
    Mark,
    Program,
    Role,
    Size,
    Summed,
    Tokens,
    arguments,
    bytes_of,
    draws_random,
    is_row_wise,
    is_tensor,
    is_view,
    parts_of,
    rank_of,
    shape_of,
    value_of,
)
from .passes.phases import Abandoned
from .passes.planning.choices import Choices
from .passes.planning.chunk_length import SLACK, seconds_in_turn
from .passes.planning.devices import Device
from .passes.rules import filling_of, find_rule, form_of, is_random, merge_of, rule_of
from .passes.rules.facets import Form
from .passes.token_propagation import TokenPropagation
from .region_programs import Programs, directions

WORTH = 10  # what is saved is at least one part in so many of what the region holds


@dataclass(frozen=True)
class Sequences:
    """How the values of a region are parted between the sequences of a batch.

    count    sequences in the batch
    at_once  how many of them its sweeps run for at a time
    marks    value with a part for each sequence → its dimension of sequences
    sums     values that add up over sequences
    whole    value → the same for the whole batch (a fake tensor)
    """

    count: int
    at_once: int
    marks: Mapping[Node, Mark]
    sums: frozenset[Node]
    whole: Mapping[Node, torch.Tensor]
    inputs: tuple[Node, ...]

    @property
    def turns(self) -> int:
        return self.count // self.at_once


def worth_parting(
    region: Joint, analysis: Analysis, programs: Programs, choices: Choices, device: Device
) -> Iterator[tuple[Node, Mark, int]]:
    """Inputs with their dimensions that may be the batch, each with how many sequences to take at a time: the
    fewest that cost little time, if that saves memory."""
    if programs.fused:
        return
    held = max(map(bytes_between_sweeps, directions(programs)))
    ends = [n for n in (*region.primals, *region.tangents) if has_rows(n, analysis)]
    around = sum(bytes_of(value_of(n)) for n in ends)
    if not ends or held * WORTH < held + around:
        return
    widest = max(ends, key=lambda n: bytes_of(value_of(n)))
    for dim in range(rank_of(widest) - 1):
        count = value_of(widest).shape[dim]
        if dim == analysis.tokens_of(widest).rows.dim or not isinstance(count, int):
            continue
        at_once = sequences_at_once(programs, analysis, choices, device, count)
        if held * (count - at_once) * WORTH >= (held + around) * count:
            yield widest, Mark(dim), at_once


def has_rows(node: Node, analysis: Analysis) -> bool:
    """Is an input rows of features, each token in a place of its own?"""
    fact = analysis.facts[node]
    return isinstance(fact, Tokens) and fact.keys is None and fact.rows == Mark(fact.rows.dim)


def bytes_between_sweeps(program: Program) -> int:
    """What exists at full length while sweeps run, beside what goes in and out."""
    sums = (n for sweep in program.sweeps for n in sweep.keysums)
    held = {n for n in (*program.kept, *sums) if is_tensor(n)}
    return sum(bytes_of(value_of(n)) for n in held.difference(program.outputs))


def sequences_at_once(
    programs: Programs, analysis: Analysis, choices: Choices, device: Device, count: int
) -> int:
    """The fewest of the sequences of a batch for which sweeps take ``SLACK`` longer than for all at once."""

    def seconds(at_once: int) -> float:
        share = at_once / count
        return sum(seconds_in_turn(p, analysis, choices, device, share) for p in directions(programs))

    most = (1 + SLACK) * seconds(count)
    return next(n for n in range(1, count + 1) if count % n == 0 and (n == count or seconds(n) <= most))


def in_turn(
    region: Joint,
    whole: Analysis,
    found: tuple[Node, Mark, int],
    length: Size,
    input_marks: InputMarks,
    checkable: Sequence[int],
) -> tuple[Joint, Analysis, Sequences] | None:
    """The region for some sequences of its batch; None where they meet, or it cannot be written so.

    whole  the analysis of the region; what it proves of keys has to be true of the part as well, under the
           same conditions, which each call checks for the whole batch
    """
    widest, mark, at_once = found
    count = shape_of(widest)[mark.dim]
    try:
        by_batch = of_batch(region, widest, mark, count)
        smaller, new = Smaller(region.module, by_batch, at_once).written()
        part = parted(smaller, len(region.forward), len(region.tangents), region.tangent_of)
        marks = {i: marks_of_part(m, region.primals[i], by_batch, at_once) for i, m in input_marks.items()}
        known = set(smaller.graph.nodes)
        part, analysis = analyzed(part, length, marks, checkable)
    except Abandoned:
        raise
    except (CannotStream, Unfit):
        return None
    if known.symmetric_difference(part.graph.nodes) or analysis.shifted_copies:
        return None
    if dict(analysis.reaches) != {new[n]: reach for n, reach in whole.reaches.items()}:
        return None
    if list(map(type, analysis.conditions)) != list(map(type, whole.conditions)):
        return None
    facts = {new[n]: fact for n, fact in by_batch.facts.items() if n in new}
    return (
        part,
        replace(analysis, conditions=whole.conditions),
        Sequences(
            count,
            at_once,
            {n: fact.rows for n, fact in facts.items() if isinstance(fact, Tokens)},
            frozenset(new[n] for n, kind in by_batch.kinds.items() if kind is Kind.SUM),
            {new[n]: value_of(n) for n in new if is_tensor(n)},
            region.primals,
        ),
    )


class Unfit(Exception):
    """The sequences of a batch meet, or the joint graph of some of them cannot be written."""


def of_batch(region: Joint, widest: Node, mark: Mark, count: int) -> Analysis:
    """The facts of a joint graph whose rows are the sequences of the batch.

    Raises `CannotStream`, or `Unfit` where a sequence reads another, or the sum over all.
    """
    places = places_in_batch(region.graph, count)
    seeds = {widest: (mark,), **{table: (Mark(dim),) for table, dim in places.tables}}
    spread = TokenPropagation(region.graph, seeds)
    inputs = (*region.primals, *region.tangents)
    marks = {n: tuple(spread.of(n).values()) for n in inputs if is_tensor(n) and spread.of(n)}
    if any(len(found) > 1 or found[0].outer != 1 for found in marks.values()):
        raise Unfit
    analysis = analyze(region.graph, count, {**seeds, **marks})
    for node in region.graph.nodes:
        if node.op != "output" and node not in places.nodes and not is_apart(node, analysis):
            raise Unfit
    return analysis


@dataclass(frozen=True)
class Places:
    """Where a graph counts the sequences of the batch to look up what belongs to each: ``mask[b, :, k]`` with
    ``b = arange(batch)``. Among some sequences it may count these.

    nodes   the ranges, and the look-ups that read them
    tables  what is looked up in, with its dimension of sequences
    """

    nodes: frozenset[Node]
    tables: tuple[tuple[Node, int], ...]


def places_in_batch(graph: Graph, count: int) -> Places:
    """All ranges over so many numbers that nothing reads but such look-ups."""
    nodes, tables = set[Node](), dict[tuple[Node, int], None]()
    for node in graph.nodes:
        if form_of(node) is Form.RANGE and node.args == (count,) and counts_from_zero(node):
            found = look_ups(node, count)
            if found:
                nodes.update((node, *(user for user, _ in found)))
                tables.update({(user.args[0], dim): None for user, dim in found})
    return Places(frozenset(nodes), tuple(tables))


def counts_from_zero(node: Node) -> bool:
    given = arguments(node)
    return (given["start"], given["step"]) == (0, 1)


def look_ups(node: Node, count: int) -> list[tuple[Node, int]]:
    """The look-ups that take a range for a whole dimension of a table; none if something else reads it."""
    found = []
    for user in node.users:
        if form_of(user) is Form.LOOK_UP and user.args[0] is not node:
            dims = [d for d, index in enumerate(user.args[1]) if index is node]
            if len(dims) != 1 or shape_of(user.args[0])[dims[0]] != count:
                return []
            found.append((user, dims[0]))
        elif is_view(user) or form_of(user) in (Form.EXPAND, Form.RESHAPE, Form.COPY, Form.CAST):
            more = look_ups(user, count)
            if not more:
                return []
            found += more
        else:
            return []
    return found


def is_apart(node: Node, analysis: Analysis) -> bool:
    """Does every row of a node read that row alone, or the node add rows up?"""
    facts, kind = parts_of(analysis.facts[node]), analysis.kinds[node]
    edges = analysis.edges[node]
    read = [e for e in edges if is_row_wise(analysis.facts[e.operand])]
    rows = [f for f in facts if isinstance(f, Tokens)]
    if is_random(node) or draws_random(node) or kind not in (Kind.ROWS, Kind.SUM, Kind.WHOLE):
        return False
    if any((f.keys, f.lo, f.hi) != (None, 0, 0) for f in rows):
        return False
    if any(e.role is not Role.ROWS or e.reach != HERE for e in read):
        return False
    if not rows and not read:
        return True
    if node.op == "placeholder" or node.target is operator.getitem:
        return True
    if node.op == "get_attr" or not node.all_input_nodes and filling_of(node) is None:
        return False  # numbers of their place in the batch
    if rows and any(isinstance(f, Summed) for e in edges for f in parts_of(analysis.facts[e.operand])):
        return False
    return adds_up(node) if kind is Kind.SUM else not names_rows(node, analysis)


def adds_up(node: Node) -> bool:
    """Is the sum of a node's results for parts of its rows its result for all?"""
    rule = rule_of(node)
    signature = rule.signature(node)
    picks = signature.contracts is Contraction.PICKED and not signature.sums
    return merge_of(node) is None and rule.linear is not None and not picks and not signature.placed


def names_rows(node: Node, analysis: Analysis) -> bool:
    """Does an operation name the rows of an operand, or of its result, by their place?"""
    rule = find_rule(node)
    if rule is None:
        return True
    signature = rule.signature(node)
    if signature.reshape:
        return False
    operands = [
        (analysis.facts[e.operand], dims) for e, dims in zip(analysis.edges[node], signature.operands)
    ]
    results = zip(parts_of(analysis.facts[node]), signature.outputs)
    return any(
        isinstance(fact, Tokens) and dims[fact.rows.dim] in signature.placed
        for fact, dims in (*operands, *results)
    )


def marks_of_part(marks: tuple[Mark, ...], node: Node, by_batch: Analysis, at_once: int) -> tuple[Mark, ...]:
    """The marks of tokens of an input, where it has fewer sequences. Raises `Unfit` where they share a
    dimension."""
    fact = by_batch.facts[node]
    if isinstance(fact, Tokens) and any(m.dim == fact.rows.dim for m in marks):
        raise Unfit
    return marks


class Smaller:
    """A graph with fewer rows."""

    def __init__(self, module: GraphModule, analysis: Analysis, rows: int):
        self.module, self.analysis, self.rows = module, analysis, rows
        self.graph, self.new = Graph(), dict[Node, Node]()

    def written(self) -> tuple[GraphModule, dict[Node, Node]]:
        """The graph, and its node for each of the old ones. Raises `Unfit`."""
        for node in self.module.graph.nodes:
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], self.new.__getitem__))
                continue
            copy = self.new[node] = self.copied(node)
            copy.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"}
            copy.meta["val"] = self.value(node, copy)
        module = GraphModule(self.module, self.graph)
        return module, self.new

    def copied(self, node: Node) -> Node:
        if node.op != "call_function":
            return self.graph.node_copy(node, self.new.__getitem__)
        args, kwargs = (
            list(map_arg(node.args, self.new.__getitem__)),
            map_arg(node.kwargs, self.new.__getitem__),
        )
        fact, rule = self.analysis.facts[node], find_rule(node)
        if form_of(node) is Form.RANGE and isinstance(fact, Tokens):
            args[0] = self.rows
        if isinstance(fact, Tokens) and rule is not None and rule.shape_arg is not None:
            sizes = list(args[rule.shape_arg])
            sizes[fact.rows.dim] = self.size(fact.rows)
            args[rule.shape_arg] = sizes
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def size(self, mark: Mark) -> int:
        return mark.outer * self.rows * mark.inner

    def value(self, node: Node, copy: Node) -> object:
        """The fake value of a copy, of the shape that its fact says."""
        old = value_of(node)
        if not is_row_wise(self.analysis.facts[node]):
            return old
        if node.op == "placeholder":
            return part_of(old, self.analysis.tokens_of(node).rows, 0, self.rows)
        value = self.run(copy)
        pairs = zip(
            parts_of(self.analysis.facts[node]),
            *(v if isinstance(v, (tuple, list)) else (v,) for v in (old, value)),
        )
        for fact, before, after in pairs:
            if isinstance(before, torch.Tensor) and list(after.shape) != self.shape(fact, before):
                raise Unfit
        return value

    def shape(self, fact: object, before: torch.Tensor) -> list:
        sizes = list(before.shape)
        if isinstance(fact, Tokens):
            sizes[fact.rows.dim] = self.size(fact.rows)
        return sizes

    def run(self, node: Node) -> object:
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        if node.target is operator.getitem:
            return node.target(*args)
        like = next(value_of(n) for n in self.graph.nodes if is_tensor(n))
        try:
            with like.fake_mode, torch.no_grad():
                return node.target(*args, **kwargs)
        except Exception as error:  # sizes of the batch that no rule knows of
            raise Unfit from error


def part_of(value: torch.Tensor, mark: Mark, turn: int, at_once: int) -> torch.Tensor:
    """The rows of a turn, of a value whose dimension of sequences is the outermost of its own."""
    rows = at_once * mark.inner
    return value.narrow(mark.dim, turn * rows, rows)


def sums_go_on(programs: Programs, sequences: Sequences) -> bool:
    """Does everything that adds up over sequences go on from turn to turn: in an accumulator of a sweep, or
    as a value at full length?"""
    for program in directions(programs):
        inside = {n for sweep in program.sweeps for n in sweep.nodes}
        added = {n for sweep in program.sweeps for n in (*sweep.sums, *sweep.summed)}
        if not inside & sequences.sums <= added or not all(map(is_tensor, added & sequences.sums)):
            return False
        for sweep in program.sweeps:
            if any((a in sequences.sums) != (b in sequences.sums) for a, b in sweep.joined):
                return False
    return True

"""Regions that run for some sequences of the batch at a time.

Keys, values and their gradients exist for all tokens of a sequence between the sweep that computes them
and the sweep that reads them. An attention layer reads no other sequence of the batch, so its sweeps may
run for some sequences first, and then for the next ones. Values between sweeps then exist for these
sequences alone. Only sums over the batch, such as the gradients of weights, are continued from turn to
turn.

The table of rules proves that sequences do not meet: the batch takes the place of the tokens in the
analysis of the joint graph, and each row must read only itself. The joint graph for some sequences is
the same graph with fewer rows, and streams along its tokens like any other.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..passes.ir import (
    Analysis,
    CannotStream,
    Fact,
    Kind,
    Layout,
    Mark,
    Program,
    Size,
    Tokens,
    ancestors,
    are_equal,
    bytes_of,
    hint,
    is_equal,
    is_floating,
    is_row_wise,
    is_tensor,
    names_in,
    parts_of,
    quotient,
    rank_of,
    value_of,
)
from ..passes.phases import FIXES_SIZES, Abandoned, SizeFixed
from ..passes.planning.choices import Choices
from ..passes.planning.chunk_length import sequences_at_once
from ..passes.planning.devices import Device
from ..passes.rules import find_rule, form_of
from ..passes.rules.facets import Form
from .batch_analysis import Unfit, of_batch
from .joint_regions import Ends, Joint, parted
from .region_programs import Programs, directions

Follow = Callable[[Joint], tuple[Joint, Analysis]]
Facts = Fact | tuple[Fact, ...]

WORTH = 10  # turns must save at least 1 / WORTH of what the region holds


@dataclass(frozen=True)
class BatchParts:
    """Division of a region's values between the sequences of a batch.

    size     sequences in the batch, which may change between calls if they run one at a time
    at_once  how many of them its sweeps run for at a time
    marks    value with a part for each sequence → its dimension of sequences
    sums     values that add up over sequences
    whole    value → the same value for the whole batch (a fake tensor)
    inputs   of the joint graph of the whole batch, in which the conditions of its analysis are written
    """

    size: Size
    at_once: int
    marks: Mapping[Node, Mark]
    sums: frozenset[Node]
    whole: Mapping[Node, torch.Tensor]
    inputs: tuple[Node, ...]

    @property
    def count(self) -> int:
        """Sequences in the batch for which the graph was traced."""
        return hint(self.size)

    @property
    def turns(self) -> int:
        return self.count // self.at_once

    def __str__(self) -> str:
        return f"{self.at_once} of {self.count} sequences of the batch at a time"


def worth_parting(
    region: Joint, analysis: Analysis, programs: Programs, choices: Choices, device: Device
) -> Iterator[tuple[Node, Mark, int]]:
    """Yield inputs with a dimension that may be the batch, and the sequences per turn. The number of
    sequences is the smallest that costs little time. A dimension is left out where turns would save too
    little memory (see ``WORTH``)."""
    if programs.fused:
        return
    held = max(map(bytes_between_sweeps, directions(programs)))
    ends = [n for n in (*region.tangents, *region.primals) if has_rows(n, analysis)]
    around = sum(bytes_of(value_of(n)) for n in ends)
    if not ends or held * WORTH < held + around:
        return
    widest = max(ends, key=lambda n: bytes_of(value_of(n)))
    for dim in range(rank_of(widest) - 1):
        size = value_of(widest).shape[dim]
        if dim == analysis.tokens_of(widest).rows.dim or dim and not isinstance(size, int):
            continue
        if names_in(size) & names_in(analysis.length):
            continue
        count = hint(size)
        at_once = sequences_at_once(directions(programs), analysis, choices, device, count)
        if held * (count - at_once) * WORTH >= (held + around) * count:
            if at_once > 1 and names_in(size):  # turns of several divide only some batches
                if FIXES_SIZES.get():
                    raise SizeFixed
                continue
            yield widest, Mark(dim), at_once


def has_rows(node: Node, analysis: Analysis) -> bool:
    """Is an input made of rows of features, with each token at its own position?"""
    fact = analysis.facts[node]
    return (
        is_floating(node)
        and isinstance(fact, Tokens)
        and fact.keys is None
        and fact.rows == Mark(fact.rows.dim)
    )


def bytes_between_sweeps(program: Program) -> int:
    """Count the bytes at full length between sweeps, without outputs of the program."""
    sums = (n for sweep in program.sweeps for n in sweep.keysums)
    held = {n for n in (*program.kept, *sums) if is_tensor(n)}
    return sum(bytes_of(value_of(n)) for n in held.difference(program.outputs))


def in_turn(
    region: Joint, analysis: Analysis, found: tuple[Node, Mark, int], follow: Follow
) -> tuple[Joint, Analysis, BatchParts] | None:
    """Rewrite the region for some sequences of its batch; None where they meet, or the rewrite fails.

    analysis  facts of the region. The part must have the same key ranges under the same conditions, because
              each call checks the conditions for the whole batch
    """
    widest, mark, at_once = found
    try:
        size = value_of(widest).shape[mark.dim]
        size = size if names_in(size) else hint(size)
        by_batch = of_batch(region, widest, mark, size)
        if any(share_dimension(analysis.facts[n], by_batch.facts[n]) for n in region.primals):
            return None
        smaller, new = Smaller(region.module, by_batch, size, at_once).written()
        known = set(smaller.graph.nodes)
        part = parted(smaller, Ends(len(region.forward), region.tangent_of))
        part, facts = follow(part)
    except Abandoned:
        raise
    except (CannotStream, Unfit):
        return None
    rewritten = known.symmetric_difference(part.graph.nodes)
    if rewritten or facts.shifted_copies or not proves_the_same(facts, analysis, new):
        return None
    facts = replace(facts, conditions=analysis.conditions, ranges=analysis.ranges)
    return part, facts, parts_of_batch(region, by_batch, new, size, at_once)


def share_dimension(tokens: Facts, sequences: Facts) -> bool:
    """Are the tokens of an input in the same dimension as the sequences?"""
    both = isinstance(tokens, Tokens) and isinstance(sequences, Tokens)
    return both and tokens.rows.dim == sequences.rows.dim


def proves_the_same(part: Analysis, whole: Analysis, new: Mapping[Node, Node]) -> bool:
    """Do rows of a part reach the same keys, under the same conditions?"""
    same = list(map(type, part.conditions)) == list(map(type, whole.conditions))
    return same and dict(part.reaches) == {new[n]: r for n, r in whole.reaches.items() if n in new}


def parts_of_batch(
    region: Joint, by_batch: Analysis, new: Mapping[Node, Node], size: Size, at_once: int
) -> BatchParts:
    facts = {new[n]: by_batch.facts[n] for n in new}
    return BatchParts(
        size,
        at_once,
        {n: fact.rows for n, fact in facts.items() if isinstance(fact, Tokens)},
        frozenset(new[n] for n, kind in by_batch.kinds.items() if kind is Kind.SUM and n in new),
        {new[n]: value_of(n) for n in new if is_tensor(n)},
        region.primals,
    )


class Smaller:
    """A copy of a graph with the rows of one turn.

    count  sequences in the batch
    rows   sequences in one turn; one, if their number may change
    """

    def __init__(self, module: GraphModule, analysis: Analysis, count: Size, rows: int):
        self.module, self.analysis, self.count, self.rows = module, analysis, count, rows
        self.graph, self.new = Graph(), dict[Node, Node]()

    def written(self) -> tuple[GraphModule, dict[Node, Node]]:
        """Write the smaller graph, and map each old node to its new one. Raises `Unfit`. No guards are
        recorded. Where the shape of a result depends on the current length (``topk`` of a number that is
        derived from it), the graph is not written."""
        like = next(value_of(n) for n in self.module.graph.nodes if is_tensor(n))
        env = like.fake_mode.shape_env
        with (
            like.fake_mode,
            torch.no_grad(),
            contextlib.nullcontext() if env is None else env.suppress_guards(),
        ):
            self.copy_nodes()
        return GraphModule(self.module, self.graph), self.new

    def copy_nodes(self) -> None:
        """Copy the inputs, and the nodes that outputs need; others are masks that are read as ranges."""
        graph = self.module.graph
        needed = ancestors(graph.find_nodes(op="output")).union(graph.find_nodes(op="placeholder"))
        for node in filter(needed.__contains__, graph.nodes):
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], self.new.__getitem__))
                continue
            copy = self.new[node] = self.copied(node)
            copy.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"}
            copy.meta["val"] = self.value(node, copy)

    def copied(self, node: Node) -> Node:
        if node.op != "call_function":
            return self.graph.node_copy(node, self.new.__getitem__)
        args = list(map_arg(node.args, self.new.__getitem__))
        kwargs = map_arg(node.kwargs, self.new.__getitem__)
        fact, rule = self.analysis.facts[node], find_rule(node)
        if form_of(node) is Form.RANGE and isinstance(fact, Tokens):
            args[0] = self.rows
        if isinstance(fact, Tokens) and rule is not None and rule.shape_arg is not None:
            sizes = list(args[rule.shape_arg])
            sizes[fact.rows.dim] = self.size(sizes[fact.rows.dim])
            args[rule.shape_arg] = sizes
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def size(self, whole: Node | int) -> Node | int:
        """Compute the size of a part: a number, or a node where it depends on the length."""
        if not isinstance(whole, Node):
            return whole if whole == -1 else self.part(whole)  # -1: an inferred size, or an unchanged one
        size = self.part(value_of(whole))
        if isinstance(size, int):
            return size
        part = self.graph.call_function(operator.floordiv, (whole, self.turns()))
        part.meta["val"] = size
        return part

    def turns(self) -> Node | int:
        """Return the number of turns: a number, or the input that is the size of the batch."""
        if isinstance(self.count, int):
            return self.count // self.rows
        given = next((n for n in self.new if is_equal_size(n, self.count)), None)
        if given is None:
            raise Unfit
        return self.new[given]

    def part(self, whole: Size) -> Size:
        """Compute the size of a dimension that has rows of one turn alone."""
        one = quotient(whole, self.count)
        if one is None:
            raise Unfit
        return one * self.rows

    def value(self, node: Node, copy: Node) -> object:
        """Compute the fake value of a copied node, and check its shape against the node's fact."""
        old = value_of(node)
        if not is_row_wise(self.analysis.facts[node]):
            return old
        if node.op == "placeholder":
            mark = self.analysis.tokens_of(node).rows
            return dense_as(old, old.narrow(mark.dim, 0, self.part(old.shape[mark.dim])))
        value = self.run(copy)
        several = isinstance(value, (tuple, list))
        results = zip(old, value) if several else [(old, value)]
        for fact, (before, after) in zip(parts_of(self.analysis.facts[node]), results):
            if isinstance(before, torch.Tensor) and not self.has_shape(after, fact, before):
                raise Unfit
        return value

    def has_shape(self, after: torch.Tensor, fact: Fact | None, before: torch.Tensor) -> bool:
        """Does a result have the old shape with fewer rows, at every length?"""
        sizes = list(before.shape)
        if isinstance(fact, Tokens):
            sizes[fact.rows.dim] = self.part(sizes[fact.rows.dim])
        return are_equal(after.shape, sizes)

    def run(self, node: Node) -> object:
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        try:
            return node.target(*args, **kwargs)
        except Exception as error:  # a size of the batch that no rule knows
            raise Unfit from error


def is_equal_size(node: Node, size: Size) -> bool:
    value = value_of(node)
    return isinstance(value, torch.SymInt) and is_equal(value, size)


def dense_as(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Lay out a part of a dense value densely, as a sweep reads it."""
    layout = Layout.of(whole)
    return part if layout is None else part.as_strided(part.shape, layout.strides(part.shape))


def part_of(value: torch.Tensor, mark: Mark, turn: int, turns: int) -> torch.Tensor:
    """Slice the rows of one turn from a value, whose mark must have no outer part."""
    rows = value.shape[mark.dim] // turns
    return value.narrow(mark.dim, turn * rows, rows)


def may_take_turns(programs: Programs, batch: BatchParts, together: Programs) -> bool:
    """Can the programs run in turns, and do turns save memory?

    Inputs and outputs must hold the part of each sequence in one piece. Every value that adds up over
    sequences must continue from turn to turn, in an accumulator of a sweep or at full length.

    together  the programs for the whole batch, which must hold more between sweeps
    """
    held = [max(map(bytes_between_sweeps, directions(p))) for p in (programs, together)]
    if held[0] * batch.count > held[1] * (batch.at_once + batch.count) / 2:
        return False  # most of what they hold is not divided between sequences
    for program in directions(programs):
        ends = [n for n in (*program.inputs, *program.outputs) if n in batch.marks]
        inside = {n for sweep in program.sweeps for n in sweep.nodes}
        added = {n for sweep in program.sweeps for n in (*sweep.sums, *sweep.summed)}
        joined = [pair for sweep in program.sweeps for pair in sweep.joined]
        if any(batch.marks[n].outer != 1 for n in ends) or not inside & batch.sums <= added:
            return False
        if not all(map(is_tensor, added & batch.sums)):
            return False
        if any((part in batch.sums) != (total in batch.sums) for part, total in joined):
            return False
    return True

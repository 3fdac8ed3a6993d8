"""Assemble the program of given levels: what each sweep computes again, what is kept, and what all of it
costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch.fx import Node

from ..ir import (
    EVERYWHERE,
    HERE,
    SHORTEST_CHUNK,
    Direction,
    Edge,
    Kind,
    Program,
    Reach,
    Role,
    Sweep,
    Tokens,
    bytes_of,
    hint,
    is_tensor,
    value_of,
)
from ..phases import check_time
from ..rules import state_rows
from .full_length import FullLength
from .levels import Levels, is_causal
from .problem import Problem, is_item

Cost = tuple[int, int, tuple[bool, ...]]  # bytes kept, then nodes computed, then sweeps that descend


@dataclass(frozen=True)
class Contents:
    """What each sweep computes; the values kept at full length, and the scans whose states are saved, for
    later ones."""

    bodies: tuple[set[Node], ...]
    kept: set[Node]
    saved_states: set[Node]


class Assembly:
    """The program of given levels.

    row_outputs  outputs that sweeps compute
    """

    def __init__(self, problem: Problem, choice: FullLength, levels: Levels):
        self.problem, self.choice = problem, choice
        self.directions, self.level = levels.directions, levels.of
        self.kinds = problem.analysis.kinds
        nodes = (o for o in problem.outputs if isinstance(o, Node))
        self.row_outputs = {o for o in nodes if self.in_sweep(o)}

    def in_sweep(self, node: Node) -> bool:
        outside = node in self.choice.nodes or node in self.problem.inputs
        return node in self.level and not outside

    def program(self) -> tuple[Cost, Program]:
        """What it costs, to choose by, and the program."""
        contents, count = self.contents(), len(self.directions)
        sweeps = tuple(self.sweep(at, contents) for at in range(count))
        full_length = tuple(
            tuple(n for n in self.problem.needed if n in self.choice.nodes and self.level[n] == step)
            for step in range(count + 1)
        )
        inputs = tuple(n for n in self.problem.needed if n in self.problem.inputs)
        kept = self.problem.in_order(contents.kept)
        statistics = tuple(n for n in kept if self.is_statistic(n))
        cost = (
            sum(map(self.bytes_kept, sweeps)),
            sum(map(len, contents.bodies)),
            tuple(d is not Direction.ASCENDING for d in self.directions),
        )
        return cost, Program(inputs, full_length, sweeps, kept, self.problem.outputs, statistics)

    def contents(self) -> Contents:
        """Collect the sweeps from the last to the first: a later one says what it wants of those before
        it."""
        roots: tuple[set[Node], ...] = tuple(set() for _ in self.directions)
        contents = Contents(tuple(set() for _ in self.directions), set(), set())
        for output in self.row_outputs:
            roots[self.level[output]].add(output)
        for node in self.choice.nodes & self.problem.all_needed:
            for operand in filter(self.in_sweep, node.all_input_nodes):
                roots[self.level[operand]].add(operand)
                if self.kinds[operand] is Kind.ROWS:
                    contents.kept.add(operand)
        for at in reversed(range(len(self.directions))):
            self.collect(at, contents, roots)
        return contents

    def collect(self, at: int, contents: Contents, roots: tuple[set[Node], ...]) -> None:
        """All that one sweep computes for its roots; what it reads of earlier sweeps becomes their root."""
        body, stack = contents.bodies[at], list(roots[at])
        while stack:
            node = stack.pop()
            if node in body:
                continue
            check_time()
            body.add(node)
            if self.choice.scans.get(node, self.directions[at]) is not self.directions[at]:
                contents.saved_states.add(node)
                roots[self.level[node]].add(node)
            for edge in self.problem.edges(node):
                operand = edge.operand
                if not self.in_sweep(operand):
                    continue
                if self.is_kept_for(edge, at, contents.kept):
                    contents.kept.add(operand)
                    roots[self.level[operand]].add(operand)
                if self.kinds[operand] is Kind.SUM and not is_item(node):
                    roots[self.level[operand]].add(operand)
                elif self.level[operand] == at or operand not in contents.kept:
                    stack.append(operand)

    def is_kept_for(self, edge: Edge, at: int, kept: set[Node]) -> bool:
        """Is an operand read at full length from a sweep's point of view: as keys or a halo, or instead of
        being computed again?"""
        operand = edge.operand
        if self.kinds[operand] is Kind.SUM:
            return False
        if edge.role in (Role.KEYS, Role.HALO):
            return True
        if self.level[operand] == at:
            return False
        again = self.is_row_chain(operand) or self.problem.is_matrix(operand)
        return operand in kept or not again or self.is_statistic(operand)

    def is_row_chain(self, node: Node) -> bool:
        """Is it cheap to compute again: a chain of ops on own rows? Attention is kept, and rows of an op that
        adds up as well."""
        source = node.args[0] if is_item(node) else node
        beyond = (e for e in self.problem.edges(source) if e.role in (Role.KEYS, Role.HALO))
        rows = self.kinds[source] is self.kinds[node] is Kind.ROWS
        return rows and not any(self.in_sweep(e.operand) for e in beyond)

    def is_statistic(self, node: Node) -> bool:
        """A few numbers per token, computed from many: kept rather than computed again."""
        return is_tensor(node) and self.problem.is_small(node) and node not in self.problem.early

    def sweep(self, at: int, contents: Contents) -> Sweep:
        """One sweep; ``own`` are its nodes that no earlier sweep computes."""
        direction, scans = self.directions[at], self.choice.scans
        nodes = self.problem.in_order(contents.bodies[at])
        own = [n for n in nodes if self.level[n] == at]
        keysums = tuple(n for n in own if self.kinds[n] is Kind.KEYSUM)
        written = contents.kept | self.row_outputs
        writes = tuple(n for n in own if n in written and self.kinds[n] not in (Kind.SUM, Kind.KEYSUM))
        key_reads = {e.operand for n in nodes for e in self.problem.edges(n) if e.role is Role.KEYS}
        return Sweep(
            direction,
            nodes,
            writes,
            appended=tuple(n for n in writes if n in key_reads),
            sums=tuple(n for n in own if self.kinds[n] is Kind.SUM and is_tensor(n)),
            keysums=keysums,
            keysums_final=direction is Direction.DESCENDING
            and all(is_causal(self.problem, n) for n in keysums),
            in_place=self.in_place(nodes, writes) if at == len(self.directions) - 1 else (),
            keys=self.keys(nodes),
            scans=tuple(n for n in nodes if n in scans and scans[n] is direction),
            saved_states=tuple(n for n in own if n in contents.saved_states),
            restored_states=tuple(n for n in nodes if n in scans and scans[n] is not direction),
        )

    def keys(self, nodes: tuple[Node, ...]) -> Reach:
        """The keys that rows of a chunk reach in any of these nodes, and always the rows themselves."""
        known = self.problem.analysis.reaches
        reaches = [known[n] for n in nodes if n in known]
        return functools.reduce(Reach.join, reaches, HERE) if reaches else EVERYWHERE

    def bytes_kept(self, sweep: Sweep) -> int:
        """Bytes at full length that are there for other sweeps, and saved states for the shortest chunks."""
        kept = [n for n in sweep.writes if n not in self.row_outputs]
        states = sum(bytes_of(value_of(n)) * state_rows(n) for n in sweep.saved_states)
        return sum(bytes_of(value_of(n)) for n in (*kept, *sweep.keysums)) + states // SHORTEST_CHUNK

    def in_place(self, nodes: tuple[Node, ...], writes: tuple[Node, ...]) -> tuple[tuple[Node, Node], ...]:
        """Outputs of the last sweep that may take over an input's buffer, each with that input."""
        returned = {o for o in self.problem.outputs if isinstance(o, Node)}
        free = [
            source
            for source in self.problem.movable
            if source in self.problem.all_needed
            and source not in returned
            and self.is_read_by_rows(source, nodes)
        ]
        found: list[tuple[Node, Node]] = []
        for out in (n for n in writes if n in returned):
            source = next((s for s in free if self.is_alike(s, out)), None)
            if source is not None:
                found.append((out, source))
                free.remove(source)
        return tuple(found)

    def is_read_by_rows(self, source: Node, nodes: tuple[Node, ...]) -> bool:
        """Do only these nodes read an input, and each only its own rows?"""
        inside = set(nodes) - self.choice.nodes
        computed = self.problem.all_needed - self.problem.inputs
        readers = [n for n in source.users if n in computed]
        edges = [e for n in readers for e in self.problem.edges(n) if e.operand is source]
        return inside.issuperset(readers) and all(e.role is Role.ROWS and e.reach == HERE for e in edges)

    def is_alike(self, source: Node, out: Node) -> bool:
        """Have two values the same rows and the same layout?"""
        fact, value, other = self.problem.analysis.facts[out], value_of(out), value_of(source)
        return (
            isinstance(fact, Tokens)
            and fact.keys is None
            and self.problem.analysis.facts[source] == fact
            and (fact.lo, fact.hi) == (0, 0)
            and other.dtype == value.dtype
            and list(map(hint, other.shape)) == list(map(hint, value.shape))
            and list(map(hint, other.stride())) == list(map(hint, value.stride()))
        )

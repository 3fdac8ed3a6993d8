"""Assemble the program of given levels: recomputed values, kept values, reused memory, and the cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

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
    is_item,
    is_tensor,
    value_of,
    viewed,
)
from ..phases import check_time
from ..rules import is_compared, state_rows
from .crossing import narrowest_crossing
from .full_length import FullLength
from .levels import Levels, is_causal
from .problem import Problem

# Bytes kept; then bytes written for later sweeps, also into memory that is taken over; then nodes computed;
# then which sweeps descend.
Cost = tuple[int, int, int, tuple[bool, ...]]


@dataclass(frozen=True)
class Contents:
    """The nodes that each sweep computes, and the results that later sweeps need.

    kept          values kept at full length
    saved_states  scans whose state is saved before each chunk
    """

    bodies: tuple[set[Node], ...]
    kept: set[Node]
    saved_states: set[Node]


class Assembly:
    """Builder of the program for given levels.

    row_outputs  outputs that sweeps compute
    over_inputs  assume that values like an incoming gradient cost nothing, as one may be written over it
    """

    def __init__(self, problem: Problem, choice: FullLength, levels: Levels, over_inputs: bool = False):
        self.problem, self.choice, self.over_inputs = problem, choice, over_inputs
        self.directions, self.level = levels.directions, levels.of
        self.kinds = problem.analysis.kinds
        nodes = (o for o in problem.outputs if isinstance(o, Node))
        self.row_outputs = {o for o in nodes if self.in_sweep(o)}

    def in_sweep(self, node: Node) -> bool:
        outside = node in self.choice.nodes or node in self.problem.inputs
        return node in self.level and not outside

    def program(self) -> tuple[Cost, Program]:
        """Build the program, and return it with its cost, by which candidates are compared."""
        contents, count = self.contents(), len(self.directions)
        sweeps = self.taken_over(tuple(self.sweep(at, contents) for at in range(count)))
        full_length = tuple(
            tuple(n for n in self.problem.needed if n in self.choice.nodes and self.level[n] == step)
            for step in range(count + 1)
        )
        kept = self.problem.in_order(contents.kept)
        statistics = tuple(n for n in kept if self.is_statistic(n))
        cost = (
            sum(map(self.bytes_kept, sweeps)),
            sum(bytes_of(value_of(n)) for s in sweeps for n in s.writes if n not in self.row_outputs),
            sum(map(len, contents.bodies)),
            tuple(d is not Direction.ASCENDING for d in self.directions),
        )
        return cost, Program(
            self.problem.read_inputs, full_length, sweeps, kept, self.problem.outputs, statistics
        )

    def contents(self) -> Contents:
        """Collect the nodes of each sweep, from the last sweep to the first. A later sweep decides which
        values it needs from earlier ones."""
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
        """Collect all nodes that one sweep computes for its roots. Values that it reads from earlier sweeps
        become roots of those sweeps."""
        contents.kept.update(self.crossing(at, roots[at], contents.kept))
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
        """Must an operand be at full length for this sweep to read it? It must if it is read as keys or as a
        halo, or if an earlier sweep computes it and this one does not recompute it. An operator with
        several results is not a value itself: its items are kept."""
        operand = edge.operand
        if self.kinds[operand] is Kind.SUM or not is_tensor(operand):
            return False
        if edge.role in (Role.KEYS, Role.HALO):
            return True
        if self.level[operand] == at:
            return False
        return operand in kept or not self.is_computed_again(operand) or self.is_statistic(operand)

    def crossing(self, at: int, roots: set[Node], kept: set[Node]) -> set[Node]:
        """Find the values of earlier sweeps to keep for this one, by a minimum cut. With them, the sweep
        recomputes nothing that can be computed only once, such as attention. Of all such choices, this one
        takes the fewest bytes, and then leaves the least to recompute."""
        reads: dict[Node, list[Node]] = {}  # recomputed or kept value → its streamed operands
        wanted, stack, seen = set[Node](), list(roots), set[Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.level[node] < at:
                reads[node] = []
                if not self.is_computed_again(node):
                    continue
            for edge in self.problem.edges(node):
                operand = edge.operand
                if not self.in_sweep(operand) or operand in kept or self.kinds[operand] is Kind.SUM:
                    continue
                if edge.role in (Role.KEYS, Role.HALO):
                    continue
                stack.append(operand)
                if self.level[node] < at:
                    reads[node].append(operand)
                elif self.level[operand] < at:
                    wanted.add(operand)
        fixed = {n for n in reads if not self.is_computed_again(n)}
        if not fixed:
            return set()
        return narrowest_crossing(reads, fixed, wanted, {n: self.bytes_to_keep(n) for n in reads})

    def is_computed_again(self, node: Node) -> bool:
        return self.is_row_chain(node) or self.problem.is_matrix(node)

    def bytes_to_keep(self, node: Node) -> int | None:
        """Count the additional bytes for keeping a value at full length for a later sweep. None if it cannot
        be kept."""
        kinds = (Kind.ROWS, Kind.KEYSUM)
        if not is_tensor(node) or self.kinds[node] not in kinds or self.problem.is_matrix(node):
            return None
        if is_compared(node):
            return None
        if self.kinds[node] is Kind.KEYSUM or node in self.row_outputs or self.is_statistic(node):
            return 0  # it exists in any case
        if self.over_inputs and any(self.is_alike(source, node) for source in self.problem.movable):
            return 0
        return bytes_of(value_of(node))

    def is_row_chain(self, node: Node) -> bool:
        """Is a value computed from own rows alone, and so cheap to recompute? Results of attention are kept
        instead, and so are rows of an operator that also adds up over tokens."""
        source = node.args[0] if is_item(node) else node
        beyond = (e for e in self.problem.edges(source) if e.role in (Role.KEYS, Role.HALO))
        rows = self.kinds[source] is self.kinds[node] is Kind.ROWS
        return rows and not any(self.in_sweep(e.operand) for e in beyond)

    def is_statistic(self, node: Node) -> bool:
        """Does a value hold a few numbers per token that are computed from many? Such values are kept rather
        than recomputed."""
        small = is_tensor(node) and self.problem.is_small(node) and node not in self.problem.early
        return small and not is_compared(node)

    def sweep(self, at: int, contents: Contents) -> Sweep:
        """Build sweep ``at`` from its contents. ``own`` are its nodes that no earlier sweep computes: their
        results are written, added up, or saved."""
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
            final_keysums=tuple(n for n in keysums if is_causal(self.problem, n))
            if direction is Direction.DESCENDING
            else (),
            keys=self.keys(nodes),
            scans=tuple(n for n in nodes if n in scans and scans[n] is direction),
            saved_states=tuple(n for n in own if n in contents.saved_states),
            restored_states=tuple(n for n in nodes if n in scans and scans[n] is not direction),
        )

    def keys(self, nodes: tuple[Node, ...]) -> Reach:
        """Join the key ranges of these nodes, and the chunk's own rows. ``EVERYWHERE`` if no node reads
        keys."""
        known = self.problem.analysis.reaches
        reaches = [known[n] for n in nodes if n in known]
        return functools.reduce(Reach.join, reaches, HERE) if reaches else EVERYWHERE

    def bytes_kept(self, sweep: Sweep) -> int:
        """Count the bytes that a sweep holds at full length for other sweeps. Saved states are counted for
        the shortest chunks."""
        over = dict(sweep.in_place)
        kept = [n for n in sweep.writes if n not in self.row_outputs and n not in over]
        states = sum(bytes_of(value_of(n)) * state_rows(n) for n in sweep.saved_states)
        return sum(bytes_of(value_of(n)) for n in (*kept, *sweep.keysums)) + states // SHORTEST_CHUNK

    def taken_over(self, sweeps: tuple[Sweep, ...]) -> tuple[Sweep, ...]:
        """Let sweeps write values over others that are no longer read. The memory taken over belongs to
        incoming gradients, and to values that an earlier sweep kept."""
        returned = {o for o in self.problem.outputs if isinstance(o, Node)}
        free = [n for n in self.problem.needed if n in self.problem.movable]
        found: list[Sweep] = []
        for at, sweep in enumerate(sweeps):
            over: list[tuple[Node, Node]] = []
            for out in (n for n in sweep.writes if n not in sweep.appended):
                source = next(
                    (s for s in free if self.is_alike(s, out) and self.is_last_read(s, at, sweeps)), None
                )
                if source is not None and source not in returned:
                    over.append((out, source))
                    free.remove(source)
            found.append(replace(sweep, in_place=tuple(over)))
            free += [n for n in sweep.writes if n not in sweep.appended]
        return tuple(found)

    def is_last_read(self, source: Node, at: int, sweeps: tuple[Sweep, ...]) -> bool:
        """Is this the last sweep that reads a value, and does it read own rows alone? Nodes at full length
        must have read the value before. No sweep may read a view of it, because the view is the same
        memory. This sweep may not write a view of it either, because it writes a chunk's results one after
        another."""
        if any(viewed(n) is source for n in sweeps[at].writes):
            return False
        inside, later = set(sweeps[at].nodes), {n for s in sweeps[at + 1 :] for n in s.nodes}
        whole, edges = self.choice.nodes, list[Edge]()
        for node in (n for n in self.problem.needed if n not in self.problem.inputs):
            if all(viewed(a, whole) is not source for a in node.all_input_nodes):
                continue
            if node in later or node in whole and self.level[node] > at:
                return False
            if node in inside and node not in whole:
                edges += [e for e in self.problem.edges(node) if viewed(e.operand, whole) is source]
        own_rows = all(e.operand is source and e.role is Role.ROWS and e.reach == HERE for e in edges)
        return bool(edges) and own_rows

    def is_alike(self, source: Node, out: Node) -> bool:
        """Do two values have the same rows and the same layout?"""
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

"""Assign every node to a sweep: one loop over chunks of tokens, ascending or descending.

Inside one sweep an edge is satisfied when it reads the chunk's own rows, when it reads past keys while the
sweep ascends, when it
reads what later rows added while the sweep descends, or when it is a scan's and the sweep goes its way.
Anything else (a sum that
somebody reads, the wrong direction, both directions) puts the reader into a later sweep. What crosses between
sweeps is kept
full-length if it is read beyond its own rows, and recomputed otherwise; a scan, in a sweep of the other
direction, from what it came to
at the start of each chunk. The number of sweeps, their directions, and what is kept are *found*: the fewest
sweeps, then the fewest kept bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .ir import (
    EVERYWHERE,
    HERE,
    SHORTEST,
    Analysis,
    Edge,
    Reach,
    Tokens,
    bytes_of,
    hint,
    is_row_wise,
    is_tensor,
    is_view,
    parts_of,
    refuse,
    shape_of,
    tensor_operands,
    value_of,
)
from .rules.views import fills_with_zeros
from .stages import checkpoint

ASCENDING, DESCENDING = "ascending", "descending"
MOST_SWEEPS = 4


@dataclass(frozen=True)
class Sweep:
    """One loop over chunks.

    nodes     what a chunk body computes, in graph order
    writes    token values written row by row into full-length buffers (outputs and kept values)
    fed       those of ``writes`` that later rows of the same sweep read as keys
    sums      values added up over chunks
    keysums   values added up per key; ``settled`` says that a chunk's own rows are final in this sweep
    scans     running values that go from chunk to chunk
    noted     those of ``scans`` whose state before each chunk is kept for a later sweep
    resumed   scans of the other direction, which go on from such states
    keys      the keys that rows of a chunk reach, and always the chunk's own rows: no chunk is without keys
    in_place  output → the input whose buffer it takes over
    """

    direction: str
    nodes: tuple[Node, ...]
    writes: tuple[Node, ...]
    fed: tuple[Node, ...]
    sums: tuple[Node, ...]
    keysums: tuple[Node, ...]
    settled: bool
    in_place: tuple[tuple[Node, Node], ...] = ()
    keys: Reach = EVERYWHERE
    scans: tuple[Node, ...] = ()
    noted: tuple[Node, ...] = ()
    resumed: tuple[Node, ...] = ()

    def __str__(self) -> str:
        """``descending, keys [-inf,0]: 41 ops; reads x, w; writes dx over dy; adds up dw``."""
        inside, over = set(self.nodes), dict(self.in_place)
        parts = {
            "reads": dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside),
            "writes": [f"{n} over {over[n]}" if n in over else n for n in self.writes if n not in self.fed],
            "feeds": self.fed,
            "carries": self.scans,
            "notes": self.noted,
            "resumes": self.resumed,
            "adds up": self.sums,
            "settles" if self.settled else "adds up per key": self.keysums,
        }
        said = [f"{what} {', '.join(map(str, values))}" for what, values in parts.items() if values]
        keys = "" if self.keys == EVERYWHERE else f", keys {self.keys}"
        return "; ".join([f"{self.direction}{keys}: {len(self.nodes)} ops", *said])


@dataclass(frozen=True)
class Program:
    """What runs, in order: ``whole[0]``, sweep 0, ``whole[1]``, sweep 1, …

    given    nodes whose values come from outside (inputs, and what the forward saved)
    whole    per stage, nodes computed at once and at full length: token-free values, and cheap ones that are
             read beyond their rows
    outputs  nodes (or constants) to return
    distilled  those of ``kept`` that are a few numbers per token, made of wide rows
    """

    given: tuple[Node, ...]
    whole: tuple[tuple[Node, ...], ...]
    sweeps: tuple[Sweep, ...]
    kept: tuple[Node, ...]
    outputs: tuple[object, ...]
    distilled: tuple[Node, ...] = ()

    def __str__(self) -> str:
        lines = []
        for stage, nodes in enumerate(self.whole):
            lines += [f"whole: {', '.join(map(str, nodes))}"] if nodes else []
            lines += [str(self.sweeps[stage])] if stage < len(self.sweeps) else []
        return "\n".join([*lines, f"returns {', '.join(map(str, self.outputs))}"])


def partition(
    graph: Graph,
    analysis: Analysis,
    outputs: Iterable[object],
    given: Iterable[Node] = (),
    movable: Iterable[Node] = (),
) -> Program:
    """The sweeps that compute ``outputs`` from the placeholders and ``given``.

    movable  inputs that this program may overwrite (incoming gradients)
    Raises `CannotStream` where no four sweeps do.
    """
    outputs = tuple(outputs)
    searches = [Search(graph, analysis, outputs, frozenset(given))]
    if searches[0].scans_whole:
        searches.append(Search(graph, analysis, outputs, frozenset(given), carry_all=True))
    for count in range(0 if not searches[0].streamed else 1, MOST_SWEEPS + 1):
        for search in searches:
            best = search.best(count, frozenset(movable))
            if best is not None:
                return best
    node = next(iter(searches[0].streamed))
    raise refuse(
        node,
        f"more than {MOST_SWEEPS} sweeps would be needed",
        "Report the printed graph; the region runs whole",
    )


class Search:
    """The best program of so many sweeps.

    carry_all  scans of a few numbers per token go from chunk to chunk too, and do not run whole between two
               sweeps
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        outputs: tuple[object, ...],
        given: frozenset[Node],
        carry_all: bool = False,
    ):
        self.graph, self.analysis, self.outputs, self.carry_all = graph, analysis, outputs, carry_all
        self.given = given | {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.needed = self.closure([o for o in outputs if isinstance(o, Node)])
        self.all_needed = set(self.needed)
        self.small = self.small_rows()
        self.scans_whole = False
        self.whole = self.find_whole()
        self.streamed = [n for n in self.needed if n not in self.whole and n not in self.given]
        self.scans = {n: way for n in self.streamed if (way := self.direction(n)) is not None}
        self.check_domains()

    def best(self, count: int, movable: frozenset[Node]) -> Program | None:
        """The program of that many sweeps that keeps the fewest bytes, and no matrix of tokens by tokens."""
        found = []
        for directions in itertools.product((ASCENDING, DESCENDING), repeat=count):
            levels = self.levels(directions)
            if levels is not None:
                found += [
                    self.build(directions, at, movable)
                    for at in (levels, *([self.sunk(levels, directions)] if self.scans else []))
                ]
        allowed = [(cost, program) for cost, program in found if not any(map(self.is_matrix, program.kept))]
        return min(allowed, key=lambda plan: plan[0], default=(None, None))[1]

    def closure(self, roots: list[Node]) -> list[Node]:
        seen: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in self.given:
                stack.extend(node.all_input_nodes)
        return sorted(seen, key=self.order.get)

    def tokens(self, node: Node) -> bool:
        return is_row_wise(self.analysis.facts.get(node))

    def small_rows(self) -> int:
        """Bytes per token below which a value may as well exist at full length: a few numbers, or a sixteenth
        of the widest input."""
        length = hint(self.analysis.length)
        widths, batches = [0], [1 << 30]
        for node in self.given:
            fact = self.analysis.facts[node]
            if isinstance(fact, Tokens) and fact.keys is None:
                widths.append(bytes_of(value_of(node)) // length)
                batches.append(math.prod(shape_of(node)[: fact.rows.dim]) * fact.rows.outer)
        return max(16 * (min(batches) if len(batches) > 1 else 1), max(widths) // 16)

    def is_small(self, node: Node) -> bool:
        """Few bytes per token, at any length: what has a column per key never is."""
        if self.is_matrix(node):
            return False
        value = value_of(node)
        values = value if isinstance(value, (tuple, list)) else (value,)
        return sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor)) <= self.small * hint(
            self.analysis.length
        )

    def find_whole(self) -> set[Node]:
        """What runs at full length: token-free values, and small ones that must meet all rows at once or that
        come after a sum."""
        whole: set[Node] = set()

        def take(node: Node) -> None:
            stack = [node]
            while stack:
                node = stack.pop()
                if node not in whole and node not in self.given:
                    whole.add(node)
                    stack += [
                        a
                        for a in node.all_input_nodes
                        if a in self.early
                        and (self.tokens(a) or a.target is operator.getitem or not is_tensor(a))
                    ]

        self.early, late = self.before_any_sweep(), set()
        for node in self.needed:
            if node in self.given:
                continue
            kind = self.analysis.kinds.get(node, "whole")
            after = any(a in late for a in node.all_input_nodes)
            exists = self.can_exist(node) and all(map(self.can_exist, node.all_input_nodes))
            if kind == "whole":
                whole.add(node)
            elif kind == "all":
                if node not in self.early and not exists:
                    raise refuse(
                        node,
                        "reads rows of every chunk at once, and they are too large to exist whole",
                        "Reduce over features first, or compute this outside the compiled function",
                    )
                take(node)
            elif kind == "sum" and node in self.early:
                take(node)
            elif self.direction(node) is not None and (node in self.early or exists and not self.carry_all):
                self.scans_whole |= node not in self.early
                take(node)
            elif (
                node.target is not operator.getitem
                and after
                and exists
                and all(
                    a in whole or a not in late or self.analysis.kinds[a] == "sum"
                    for a in node.all_input_nodes
                )
            ):
                take(
                    node
                )  # the tail of a loss that looks at sums: a few numbers per token, and no sweep of its own
            if node not in self.early and (
                after or kind in ("sum", "all") or node in whole and self.tokens(node)
            ):
                late.add(node)
            if (
                node.target is operator.getitem
                and node.args[0] in whole
                or node in self.early
                and is_view(node)
                and (self.is_matrix(node) or self.has_padding(node))
            ):
                take(node)
            for edge in self.analysis.edges.get(node, ()):
                if (
                    edge.role in ("keys", "halo")
                    and edge.operand in self.early
                    and edge.operand not in self.given
                ):
                    take(edge.operand)
        return whole

    def has_padding(self, node: Node) -> bool:
        """Has rows before the first token, or after the last."""
        fact = self.analysis.facts.get(node)
        return isinstance(fact, Tokens) and (fact.lo < 0 or fact.hi > 0)

    def is_matrix(self, node: Node) -> bool:
        """Has a row and a column per token."""
        return any(
            isinstance(f, Tokens) and f.keys is not None for f in parts_of(self.analysis.facts.get(node))
        )

    def before_any_sweep(self) -> set[Node]:
        """Inputs, and what small values alone make of them."""
        early: set[Node] = set()
        for node in self.needed:
            if (
                node in self.given
                or all(a in early for a in node.all_input_nodes)
                and (not self.tokens(node) or self.is_small(node) or is_view(node))
            ):
                early.add(node)
        return early

    def can_exist(self, node: Node) -> bool:
        return node in self.given or not self.tokens(node) or self.is_small(node)

    def check_domains(self) -> None:
        for node in self.streamed:
            if node in self.outputs and self.is_matrix(node):
                raise refuse(
                    node,
                    "a matrix of tokens by tokens leaves the region",
                    "Make masks where they are read, from ranges and padding",
                )
            if not self.has_padding(node) or not tensor_operands(node):
                continue
            if node not in self.outputs or not fills_with_zeros(node):
                raise refuse(node, "has rows beyond the tokens", "Pad labels or masks, not hidden states")

    def direction(self, node: Node) -> str | None:
        """The way a scan goes over the tokens; None of what is no scan."""
        reach = next((e.reach for e in self.edges_of(node) if e.role == "carry"), None)
        return None if reach is None else ASCENDING if reach.looks_back() else DESCENDING

    # Levels

    def levels(self, directions: tuple[str, ...]) -> dict[Node, int] | None:
        """The sweep of every streamed node; for whole nodes, the sweep before which they are ready. None: too
        few sweeps."""
        level: dict[Node, int] = {}
        for node in self.needed:
            checkpoint()
            if node in self.given:
                level[node] = 0
            elif node in self.whole:
                level[node] = max((self.ready(a, level) for a in node.all_input_nodes), default=0)
                if level[node] > len(directions):
                    return None
            else:
                at = 0
                for edge in self.edges_of(node):
                    at = max(at, self.satisfied(node, edge, level, directions))
                while at < len(directions) and self.scans.get(node, directions[at]) != directions[at]:
                    at += 1
                if at >= len(directions):
                    return None
                level[node] = at
        return level

    def edges_of(self, node: Node):
        return self.analysis.edges.get(node, ())

    def ready(self, node: Node, level: dict[Node, int]) -> int:
        """When a node's full value exists."""
        return level[node] if node in self.whole or node in self.given else level[node] + 1

    def satisfied(self, node: Node, edge, level: dict[Node, int], directions) -> int:
        operand = edge.operand
        if operand in self.given or operand in self.whole:
            return level[operand]
        at = level[operand]
        if at >= len(directions):
            return at
        kind = self.analysis.kinds[operand]
        if kind == "mixed" and node.target is operator.getitem:
            return at
        if kind in ("sum",) or edge.role in ("halo", "whole"):
            return at if node.target is operator.getitem and kind != "sum" else at + 1
        if kind == "keysum":
            return (
                at
                if edge.role in ("rows", "carry") and directions[at] == DESCENDING and self.causal(operand)
                else at + 1
            )
        if edge.role == "keys":
            reach = self.analysis.reaches.get(node, edge.reach)
            return at if directions[at] == ASCENDING and reach.looks_back() else at + 1
        return at

    def sunk(self, level: dict[Node, int], directions: tuple[str, ...]) -> dict[Node, int]:
        """The same levels with all that only the last sweep wants moved there, so that a sweep for a scan's
        states makes little else."""
        late, last = dict(level), len(directions) - 1

        def reads_too_early(reader: Node, edge: Edge) -> bool:
            if reader in self.whole:
                return late[reader] < self.ready(edge.operand, late)
            return late[reader] < last or self.satisfied(reader, edge, late, directions) > last

        for node in reversed(self.needed):
            checkpoint()
            readers = [n for n in node.users if n in late]
            parts = [n for n in readers if n.target is operator.getitem]
            source = node.args[:1] if node.target is operator.getitem else ()
            if node in self.whole:
                late[node] = last + 1 if all(late[r] > last for r in readers) else level[node]
            elif (
                node not in self.given
                and self.scans.get(node, directions[last]) == directions[last]
                and all(self.analysis.kinds[n] in ("rows", "sum") for n in (node, *source))
            ):
                late[node] = last
                if any(reads_too_early(r, e) for r in readers for e in self.edges_of(r) if e.operand is node):
                    late.update((n, level[n]) for n in (node, *parts))
        return late

    def causal(self, node: Node) -> bool:
        source = node.args[0] if node.target is operator.getitem else node
        return self.analysis.reaches.get(source, EVERYWHERE).looks_back()

    # Sweeps

    def build(
        self, directions: tuple[str, ...], level: dict[Node, int], movable: frozenset[Node]
    ) -> tuple[tuple, Program]:
        count = len(directions)
        kept: set[Node] = set()
        noted: set[Node] = set()
        bodies: list[set[Node]] = [set() for _ in directions]
        roots: list[set[Node]] = [set() for _ in directions]
        for output in self.outputs:
            if (
                isinstance(output, Node)
                and output in level
                and output not in self.whole
                and output not in self.given
            ):
                roots[level[output]].add(output)
        for node in self.needed:  # sums and kept values are made in their own sweep, whoever reads them
            if node in self.whole:
                for operand in node.all_input_nodes:
                    if operand in level and operand not in self.whole and operand not in self.given:
                        roots[level[operand]].add(operand)
                        if self.analysis.kinds[operand] == "rows":
                            kept.add(operand)
        for at in reversed(range(count)):
            stack = list(roots[at])
            while stack:
                node = stack.pop()
                if node in bodies[at]:
                    continue
                checkpoint()
                bodies[at].add(node)
                if self.scans.get(node, directions[at]) != directions[at]:
                    noted.add(node)
                    roots[level[node]].add(node)
                for edge in self.edges_of(node):
                    operand = edge.operand
                    if operand in self.given or operand in self.whole:
                        continue
                    made = level[operand]
                    if self.analysis.kinds[operand] == "sum":
                        roots[made].add(operand)
                    elif edge.role == "keys" or edge.role == "halo":
                        kept.add(operand)
                        roots[made].add(operand)
                        if made == at:
                            stack.append(operand)
                    elif made == at:
                        stack.append(operand)
                    elif (
                        operand in kept
                        or not (self.recomputable(operand) or self.is_matrix(operand))
                        or self.is_distilled(operand)
                    ):
                        kept.add(operand)
                        roots[made].add(operand)
                    else:
                        stack.append(operand)
        sweeps = []
        cost = 0
        row_outputs = {
            o
            for o in self.outputs
            if isinstance(o, Node) and o in level and o not in self.whole and o not in self.given
        }
        for at, direction in enumerate(directions):
            nodes = sorted((n for n in bodies[at]), key=self.order.get)
            own = [n for n in nodes if level[n] == at]
            keysums = tuple(n for n in own if self.analysis.kinds[n] == "keysum")
            sums = tuple(n for n in own if self.analysis.kinds[n] == "sum")
            writes = tuple(
                n for n in own if (n in kept or n in row_outputs) and n not in keysums and n not in sums
            )
            fed = tuple(
                n
                for n in writes
                if any(e.operand is n and e.role == "keys" for r in nodes for e in self.edges_of(r))
            )
            reaches = [self.analysis.reaches[n] for n in nodes if n in self.analysis.reaches]
            keys = functools.reduce(Reach.join, reaches, HERE) if reaches else EVERYWHERE
            settled = direction == DESCENDING and all(self.causal(n) for n in keysums)
            scans, resumed = (
                tuple(n for n in nodes if n in self.scans and (self.scans[n] == direction) is same)
                for same in (True, False)
            )
            sweeps.append(
                Sweep(
                    direction,
                    tuple(nodes),
                    writes,
                    fed,
                    sums,
                    keysums,
                    settled,
                    self.in_place(at, count, nodes, writes, movable),
                    keys,
                    scans,
                    tuple(n for n in own if n in noted),
                    resumed,
                )
            )
            cost += sum(
                bytes_of(value_of(n)) for n in (*(w for w in writes if w not in row_outputs), *keysums)
            )
            cost += sum(bytes_of(value_of(n)) for n in sweeps[-1].noted) // SHORTEST
        whole = tuple(
            tuple(n for n in self.needed if n in self.whole and level[n] == stage)
            for stage in range(count + 1)
        )
        # Ties go to fewer nodes computed, then to ascending sweeps.
        order = (cost, sum(len(b) for b in bodies), tuple(d != ASCENDING for d in directions))
        given = tuple(n for n in self.needed if n in self.given)
        ordered = tuple(sorted(kept, key=self.order.get))
        return order, Program(
            given,
            whole,
            tuple(sweeps),
            ordered,
            self.outputs,
            tuple(n for n in ordered if self.is_distilled(n)),
        )

    def recomputable(self, node: Node) -> bool:
        """Cheap rows: a chain of own-row ops. Attention and what was added up are kept."""
        source = node.args[0] if node.target is operator.getitem else node
        return self.analysis.kinds[node] == "rows" and not any(
            e.role in ("keys", "halo") and e.operand not in self.given and e.operand not in self.whole
            for e in self.edges_of(source)
        )

    def is_distilled(self, node: Node) -> bool:
        """A few numbers per token that took wide rows to make: kept rather than made again."""
        return is_tensor(node) and self.is_small(node) and node not in self.early

    def in_place(self, at: int, count: int, nodes, writes, movable) -> tuple[tuple[Node, Node], ...]:
        """Outputs of the last sweep that may take over an input's buffer: same rows, same layout, read
        nowhere else."""
        if at != count - 1:
            return ()
        found, used = [], set()
        inside, returned = set(nodes), {o for o in self.outputs if isinstance(o, Node)}
        computed = self.all_needed - self.given
        readers_of = {source: [n for n in source.users if n in computed] for source in movable}
        for out in writes:
            fact, value = self.analysis.facts[out], value_of(out)
            for source in movable:
                if source in used or source not in self.all_needed or out not in returned:
                    continue
                other = value_of(source)
                alike = (
                    self.analysis.facts[source] == fact
                    and (fact.lo, fact.hi) == (0, 0)
                    and other.dtype == value.dtype
                    and list(map(hint, other.shape)) == list(map(hint, value.shape))
                    and list(map(hint, other.stride())) == list(map(hint, value.stride()))
                )
                readers = readers_of[source]
                if (
                    alike
                    and source not in returned
                    and all(
                        n in inside
                        and n not in self.whole
                        and all(
                            e.role == "rows" and e.reach == HERE
                            for e in self.edges_of(n)
                            if e.operand is source
                        )
                        for n in readers
                    )
                ):
                    found.append((out, source))
                    used.add(source)
                    break
        return tuple(found)

"""Copies of wide values that are read at a constant shift, or states that carry such rows between chunks.

Where neighbours meet (``logits[:, 1:]`` beside ``logits[:, :-1]``), one of them is read beyond a chunk's
own rows. If it were kept at full length, a value wider than all inputs would cost more than streaming
saves. So a chain of ops on own rows gets a copy that computes the shifted rows from shifted inputs.
Where that would take a matrix product for each shift, or is impossible (attention, blocks), the shift
becomes a scan, whose state is the last rows of the chunk before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from .ir import (
    HERE,
    Analysis,
    Edge,
    Kind,
    Reach,
    Role,
    Tokens,
    bytes_of,
    is_floating,
    is_item,
    is_tensor,
    tensor_operands,
    value_of,
)
from .phases import check_time
from .rules import indices_of, is_built_in, is_product, scan_of

MOST_COPIES = 8  # different shifts of one value; more are a long filter, and cost more than they save


def copy_shifted(graph: Graph, analysis: Analysis) -> Analysis:
    """Copy wide operands that are read shifted, and return the facts of the changed graph."""
    copies = Copies(graph, analysis)
    for node in list(graph.nodes):
        check_time()
        copies.visit(node)
    copies.hand_out()
    return replace(
        analysis,
        facts=copies.facts,
        edges=copies.edges,
        kinds=copies.kinds,
        shifted_copies=frozenset((*copies.made.values(), *copies.clamped)),
    )


class Copies:
    """Copies of nodes for shifts: row t of a copy is row t + shift of the node.

    made     node and shift → its copy
    clamped  indices of copies, clamped to the sizes of their tables, because rows before the first token
             and behind the last have no valid index
    readers  a node, its operand, and the copy that it shall read instead
    """

    def __init__(self, graph: Graph, analysis: Analysis):
        self.graph, self.analysis = graph, analysis
        self.facts, self.edges, self.kinds = dict(analysis.facts), dict(analysis.edges), dict(analysis.kinds)
        self.made: dict[tuple[Node, int], Node] = {}
        self.clamped: list[Node] = []
        self.readers: list[tuple[Node, Node, Node]] = []
        self.widest = max((bytes_of(value_of(n)) for n in graph.nodes if self.is_input(n)), default=0)

    def is_input(self, node: Node) -> bool:
        fact = self.analysis.facts.get(node)
        return node.op == "placeholder" and isinstance(fact, Tokens) and fact.keys is None

    def visit(self, node: Node) -> None:
        """Copy the wide values that a node reads shifted, or carry their rows between chunks."""
        edges = self.analysis.edges.get(node, ())
        operands = [e.operand for e in edges]
        for edge in edges:
            by = shift_of(edge)
            if not by or operands.count(edge.operand) != 1 or not self.is_wide(edge.operand):
                continue
            if self.is_carried(node, edge.operand):
                self.edges[node] = (replace(edge, role=Role.CARRY),)
            elif self.is_worth_a_copy(edge.operand):
                self.readers.append((node, edge.operand, self.copied(edge.operand, by, node)))

    def hand_out(self) -> None:
        """Replace the operands of readers with the copies."""
        for node, operand, copy in self.readers:
            node.replace_input_with(operand, copy)
            edges = self.edges[node]
            self.edges[node] = tuple(Edge(copy, Role.ROWS) if e.operand is operand else e for e in edges)

    def is_wide(self, node: Node) -> bool:
        return is_tensor(node) and bytes_of(value_of(node)) > self.widest

    def is_worth_a_copy(self, node: Node) -> bool:
        shifts = sum(known is node for known, _ in self.made)
        return shifts < MOST_COPIES and self.has_own_rows(node)

    def is_carried(self, node: Node, operand: Node) -> bool:
        """Is a node a shift whose operand has one row for each token and is costly to recompute?"""
        scan, fact = scan_of(node), self.facts[operand]
        if scan is None or not scan.window or not isinstance(fact, Tokens):
            return False
        plain = fact.rows.step == 1 and fact.keys is None and (fact.lo, fact.hi) == (0, 0)
        return plain and not self.is_cheap(operand)

    def is_cheap(self, node: Node) -> bool:
        """Can a value be computed from inputs by ops on own rows, without a matrix product?"""
        stack, seen = [node], {node}
        while stack:
            node = stack.pop()
            if not self.has_own_rows(node) or is_product(node):
                return False
            operands = [e.operand for e in self.analysis.edges[node] if shift_of(e) is not None]
            new = {a for a in operands if a.op == "call_function" and self.kinds[a] is Kind.ROWS} - seen
            seen |= new
            stack += new
        return True

    def has_own_rows(self, node: Node) -> bool:
        """Is a node computed from its own rows, rows at constant shifts, and operands without rows? Blocks
        are counted from the first token, and cannot be shifted. An item is computed with its operator."""
        if is_item(node) and not self.has_own_rows(node.args[0]):
            return False
        fact = self.analysis.facts.get(node)
        facts = fact if isinstance(fact, tuple) else (fact,)
        if node.op != "call_function" or self.analysis.kinds[node] is not Kind.ROWS:
            return False
        plain = all(isinstance(f, Tokens) and f.keys is None and f.rows.block == 1 for f in facts)
        edges = self.analysis.edges[node]
        plain &= self.allows_any_rows(node)
        return plain and all(shift_of(e) is not None or e.role is Role.WHOLE for e in edges)

    def allows_any_rows(self, node: Node) -> bool:
        """Can a node be computed for rows before the first token and behind the last? Integers of such rows
        may be invalid indices, which are clamped. So the limits of an index must be known, and be the same
        at every length."""
        limits = indices_of(node)
        if any(not isinstance(size, int) for pair in limits.values() for size in pair):
            return False
        return is_built_in(node) or all(is_floating(a) or a in limits for a in tensor_operands(node))

    def copied(self, node: Node, by: int, before: Node) -> Node:
        """Copy a node for a shift, in front of its first reader."""
        if (node, by) in self.made:
            return self.made[node, by]
        edges = tuple(
            self.allowed(e, self.moved(e, by, before), by, node, before) for e in self.analysis.edges[node]
        )
        operands = {old.operand: new.operand for old, new in zip(self.analysis.edges[node], edges)}
        with self.graph.inserting_before(before):
            copy = self.graph.node_copy(node, lambda a: operands.get(a, a))
        copy.meta = dict(node.meta)
        fact = self.analysis.facts[node]
        self.facts[copy] = tuple(moved(f, by) for f in fact) if isinstance(fact, tuple) else moved(fact, by)
        self.edges[copy], self.kinds[copy] = edges, self.analysis.kinds[node]
        self.made[node, by] = copy
        return copy

    def moved(self, edge: Edge, by: int, before: Node) -> Edge:
        """Build an edge of a copy, to a copy of the operand where possible, else to its shifted rows."""
        shift = shift_of(edge)
        if shift is None:
            return edge
        at = shift + by
        if at and self.has_own_rows(edge.operand):
            return Edge(self.copied(edge.operand, at, before), Role.ROWS)
        reach = Reach(at, at)
        return Edge(edge.operand, Role.ROWS if reach == HERE else Role.HALO, reach)

    def allowed(self, old: Edge, new: Edge, by: int, node: Node, before: Node) -> Edge:
        """Return an edge of a copy; the operand of one that is an index is clamped to its table."""
        limits, shift = indices_of(node).get(old.operand), shift_of(old)
        if limits is None or shift is None or not shift + by:
            return new
        with self.graph.inserting_before(before):
            clamped = self.graph.call_function(torch.ops.aten.clamp.default, (new.operand, *limits))
        clamped.meta = dict(old.operand.meta)
        self.facts[clamped] = moved(self.facts[old.operand], shift + by)
        self.edges[clamped], self.kinds[clamped] = (new,), Kind.ROWS
        self.clamped.append(clamped)
        return Edge(clamped, Role.ROWS)


def shift_of(edge: Edge) -> int | None:
    """Return the distance from its own token at which a row reads, or None if it is not constant."""
    if edge.role is Role.ROWS:
        return 0
    constant = edge.role is Role.HALO and edge.reach.lo == edge.reach.hi
    return int(edge.reach.lo) if constant else None


def moved(fact: object, by: int) -> Tokens:
    assert isinstance(fact, Tokens)
    return replace(fact, lo=fact.lo - by, hi=fact.hi - by)

"""Levels of nodes: for each node, the earliest sweep whose direction satisfies all its edges."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..ir import EVERYWHERE, Direction, Edge, Kind, Role, is_item, viewed
from ..phases import check_time
from .full_length import FullLength
from .problem import Problem


@dataclass(frozen=True)
class Levels:
    """The sweep of every streamed node, for sweeps of given directions. For an input or a node at full
    length, the number is that of the sweep before which it is ready."""

    directions: tuple[Direction, ...]
    of: dict[Node, int]


def levels_of(problem: Problem, choice: FullLength, directions: tuple[Direction, ...]) -> Levels | None:
    """Find the earliest sweep for every node. None if there are too few sweeps."""
    order = Order(problem, choice, directions)
    level: dict[Node, int] = {}
    for node in problem.needed:
        check_time()
        if node in problem.inputs:
            level[node] = 0
        elif node in choice.nodes:
            level[node] = max((order.ready(a, level) for a in node.all_input_nodes), default=0)
            if level[node] > len(directions):
                return None
        else:
            level[node] = order.earliest(node, level)
            if level[node] >= len(directions):
                return None
    return Levels(directions, level)


def sink(problem: Problem, choice: FullLength, levels: Levels) -> Levels:
    """Move nodes into the last sweep if only the last sweep, or a node after it, reads them. A sweep that
    exists for the states of a scan, or for keys and values, then computes little else. Nodes at full
    length that are read only after the last sweep move behind it, unless they read an input that sweeps
    may overwrite."""
    order, level = Order(problem, choice, levels.directions), dict(levels.of)
    last = len(levels.directions) - 1
    for node in reversed(problem.needed):
        check_time()
        readers = [n for n in node.users if n in level]
        if node in choice.nodes:
            waits = all(level[r] > last for r in readers) and not reads_movable(node, problem)
            level[node] = last + 1 if waits else levels.of[node]
        elif node not in problem.inputs and order.may_sink(node):
            level[node] = last
            at_once = [r for r in readers if r in choice.nodes]  # a reader of a size has no edge
            streamed = [r for r in readers if r not in choice.nodes]
            edges = [(r, e) for r in streamed for e in problem.edges(r) if e.operand is node]
            if any(order.reads_too_early(r, e, level) for r, e in edges) or any(
                level[r] < order.ready(node, level) for r in at_once
            ):
                level.update((n, levels.of[n]) for n in (node, *filter(is_item, readers)))
    return Levels(levels.directions, level)


def reads_movable(node: Node, problem: Problem) -> bool:
    """Does a node at full length read an input that sweeps may overwrite, directly or through views?"""
    return any(viewed(a) in problem.movable for a in (node, *node.all_input_nodes))


@dataclass(frozen=True)
class Order:
    """Order constraints between nodes, for sweeps of given directions."""

    problem: Problem
    choice: FullLength
    directions: tuple[Direction, ...]

    def runs_before_sweeps(self, node: Node) -> bool:
        return node in self.choice.nodes or node in self.problem.inputs

    def ready(self, node: Node, level: dict[Node, int]) -> int:
        """Return the number of the sweep before which a node's full value exists."""
        return level[node] if self.runs_before_sweeps(node) else level[node] + 1

    def goes_along(self, node: Node, at: int) -> bool:
        """May a node run in this sweep: is it no scan, or a scan of the same direction?"""
        return self.choice.scans.get(node, self.directions[at]) is self.directions[at]

    def earliest(self, node: Node, level: dict[Node, int]) -> int:
        """Find the first sweep that satisfies all edges of a node. Return the number of sweeps if none
        does."""
        at = max((self.satisfied(node, e, level) for e in self.problem.edges(node)), default=0)
        numbers = (level[a] for a in node.all_input_nodes if a in self.choice.nodes)  # these have no edges
        at = max((at, *numbers))
        while at < len(self.directions) and not self.goes_along(node, at):
            at += 1
        return at

    def satisfied(self, node: Node, edge: Edge, level: dict[Node, int]) -> int:
        """Find the first sweep in which a node may read an operand."""
        operand, at = edge.operand, level[edge.operand]
        if self.runs_before_sweeps(operand) or at >= len(self.directions):
            return at
        kind, direction = self.problem.analysis.kinds[operand], self.directions[at]
        if kind is Kind.MIXED and is_item(node):
            return at
        if kind is Kind.SUM or edge.role in (Role.HALO, Role.WHOLE):
            return at if is_item(node) else at + 1
        if kind is Kind.KEYSUM:
            own_rows = edge.role in (Role.ROWS, Role.CARRY)
            final = own_rows and direction is Direction.DESCENDING and is_causal(self.problem, operand)
            return at if final else at + 1
        if edge.role is Role.KEYS:
            reach = self.problem.analysis.reaches.get(node, edge.reach)
            return at if direction is Direction.ASCENDING and reach.looks_back() else at + 1
        return at

    def may_sink(self, node: Node) -> bool:
        """May a streamed node run in the last sweep?"""
        source = node.args[:1] if is_item(node) else ()
        kinds = {self.problem.analysis.kinds[n] for n in (node, *source)}
        return self.goes_along(node, len(self.directions) - 1) and kinds <= {Kind.ROWS, Kind.SUM}

    def reads_too_early(self, reader: Node, edge: Edge, level: dict[Node, int]) -> bool:
        """Does a streamed node run before the sweep in which it may read this operand?"""
        last = len(self.directions) - 1
        return level[reader] < last or self.satisfied(reader, edge, level) > last


def is_causal(problem: Problem, node: Node) -> bool:
    """Do the rows of a node's attention reach no later keys?

    node  the attention, or one of its results, such as a sum per key
    """
    source = node.args[0] if is_item(node) else node
    return problem.analysis.reaches.get(source, EVERYWHERE).looks_back()

"""Which nodes run at full length, before, between and after the sweeps.

Token-free values; and small ones (a few bytes per token) that must meet all rows at once, or come after a
sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from ..ir import Direction, Kind, Role, is_item, is_tensor, is_view, refuse, shape_of, tensor_operands
from .problem import Problem


@dataclass(frozen=True)
class FullLength:
    """What runs at full length, and what that leaves for sweeps.

    nodes      computed at full length
    streamed   computed in sweeps, in graph order
    scans      those of them that carry a state, and the direction that they go
    has_scans  some scan of a few numbers per token is among ``nodes``, and could be in a sweep as well
    """

    nodes: frozenset[Node]
    streamed: tuple[Node, ...]
    scans: dict[Node, Direction]
    has_scans: bool


def find_full_length(problem: Problem, carry_all: bool = False) -> FullLength:
    """The nodes that run at full length.

    carry_all  scans of a few numbers per token carry their state from chunk to chunk too
    Raises `CannotStream` for rows that are needed all at once and are too large for that.
    """
    search = Search(problem, carry_all)
    for node in problem.needed:
        if node not in problem.inputs:
            search.visit(node)
    streamed = tuple(n for n in problem.needed if n not in search.found and n not in problem.inputs)
    scans = {n: way for n in streamed if (way := problem.scan_direction(n)) is not None}
    return FullLength(frozenset(search.found), streamed, scans, search.has_scans)


class Search:
    """One pass in graph order.

    found  nodes at full length so far
    late   nodes that are ready only after a sweep
    """

    def __init__(self, problem: Problem, carry_all: bool):
        self.problem, self.carry_all = problem, carry_all
        self.kinds, self.early = problem.analysis.kinds, problem.early
        self.found: set[Node] = set()
        self.late: set[Node] = set()
        self.has_scans = False

    def visit(self, node: Node) -> None:
        if self.kinds.get(node, Kind.WHOLE) is Kind.WHOLE:
            self.found.add(node)
        elif self.must_be_whole(node) or self.follows_a_sum(node):
            self.take(node)
        if node not in self.early and self.is_late(node):
            self.late.add(node)
        if is_item(node) and node.args[0] in self.found or self.is_view_of_matrix(node):
            self.take(node)
        elif self.is_padded_output(node):
            self.take(node)
        for edge in self.problem.edges(node):
            beyond = edge.role in (Role.KEYS, Role.HALO)
            if beyond and edge.operand in self.early and edge.operand not in self.problem.inputs:
                self.take(edge.operand)

    def take(self, node: Node) -> None:
        """The node at full length, with what it is computed from as far as that is early, and all results of
        what has several."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node not in self.found and node not in self.problem.inputs:
                self.found.add(node)
                stack += [a for a in node.all_input_nodes if a in self.early and self.is_computed(a)]
                stack += [u for u in node.users if is_item(u) and u in self.problem.all_needed]

    def is_computed(self, node: Node) -> bool:
        return self.problem.has_tokens(node) or is_item(node) or not is_tensor(node)

    def exists(self, node: Node) -> bool:
        """May the node and all that it reads exist at full length?"""
        return all(map(self.problem.may_exist, (node, *node.all_input_nodes)))

    def must_be_whole(self, node: Node) -> bool:
        """Does it read rows of all chunks at once, or add up what is there before any sweep?"""
        kind, early = self.kinds[node], node in self.early
        if kind is Kind.ALL:
            if not early and not all(map(self.problem.may_meet, (node, *node.all_input_nodes))):
                raise refuse(
                    node,
                    "This operation needs the rows of all tokens at once, and they are too large to keep "
                    "at full length",
                    "Reduce over features first, or compute this outside the compiled function",
                )
            return True
        if kind is Kind.SUM and early:
            return True
        if self.problem.scan_direction(node) is None:
            return False
        whole = early or not self.carry_all and self.exists(node)
        self.has_scans |= whole and not early
        return whole

    def follows_a_sum(self, node: Node) -> bool:
        """Is it the tail of a loss that looks at sums: a few numbers per token, and no sweep of its own?"""
        if is_item(node) or not any(a in self.late for a in node.all_input_nodes) or not self.exists(node):
            return False
        return all(
            a in self.found or a not in self.late or self.kinds[a] is Kind.SUM for a in node.all_input_nodes
        )

    def is_late(self, node: Node) -> bool:
        kind = self.kinds.get(node, Kind.WHOLE)
        return (
            any(a in self.late for a in node.all_input_nodes)
            or kind in (Kind.SUM, Kind.ALL)
            or node in self.found
            and self.problem.has_tokens(node)
        )

    def is_padded_output(self, node: Node) -> bool:
        """A few numbers per token that are returned, with rows before or behind all tokens (labels moved by
        one, for the next region): no sweep writes those."""
        beyond = node in self.problem.outputs and self.problem.has_padding(node)
        return beyond and node in self.early

    def is_view_of_matrix(self, node: Node) -> bool:
        """A view, of a stored matrix or with rows beyond the tokens, that costs nothing at full length. One
        that repeats a row or a matrix is copied where a chunk is cut from it."""
        if node not in self.early or not is_view(node):
            return False
        return self.problem.has_padding(node) or self.problem.is_matrix(node) and not repeats(node)


def repeats(node: Node) -> bool:
    """Has a view more entries than what it is of?"""
    return math.prod(shape_of(node)) > math.prod(shape_of(tensor_operands(node)[0]))

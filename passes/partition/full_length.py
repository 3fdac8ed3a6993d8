"""Choose the nodes that run at full length: before, between and after the sweeps.

These are values without tokens, and small values (a few bytes per token) that need all rows at once or
follow a sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Node

from ..ir import (
    Direction,
    Kind,
    Role,
    bytes_of,
    is_item,
    is_tensor,
    is_view,
    refuse,
    shape_of,
    tensor_operands,
    value_of,
)
from ..rules import is_product
from .problem import Problem


@dataclass(frozen=True)
class FullLength:
    """Nodes that run at full length, and nodes left for sweeps.

    nodes      computed at full length
    streamed   computed in sweeps, in graph order
    scans      those of ``streamed`` that carry a state → the direction in which they run
    has_scans  ``nodes`` contains a scan of a few numbers per token that could run in a sweep as well
    """

    nodes: frozenset[Node]
    streamed: tuple[Node, ...]
    scans: dict[Node, Direction]
    has_scans: bool


def find_full_length(problem: Problem, carry_all: bool = False) -> FullLength:
    """Find the nodes that run at full length.

    carry_all  scans of a few numbers per token carry their state from chunk to chunk too
    Raises `CannotStream` for an operation that needs all rows at once, if they are too large to keep.
    """
    search = Search(problem, carry_all)
    for node in problem.needed:
        if node not in problem.inputs:
            search.visit(node)
    streamed = tuple(n for n in problem.needed if n not in search.found and n not in problem.inputs)
    scans = {n: way for n in streamed if (way := problem.scan_direction(n)) is not None}
    return FullLength(frozenset(search.found), streamed, scans, search.has_scans)


class Search:
    """One pass over the nodes in graph order, which finds those at full length.

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
            for follower in self.followers(node) if self.kinds.get(node) is Kind.ALL else ():
                self.take(follower)
        if node not in self.early and self.is_late(node):
            self.late.add(node)
        if is_item(node) and node.args[0] in self.found or self.is_view_of_matrix(node):
            self.take(node)
        elif self.is_padded_output(node):
            self.take(node)
        elif self.problem.has_unwritten_padding(node) and node in self.problem.early_if_needed:
            self.take(node, self.problem.early_if_needed)
        for edge in self.problem.edges(node):
            beyond = edge.role in (Role.KEYS, Role.HALO)
            if beyond and edge.operand in self.early and edge.operand not in self.problem.inputs:
                self.take(edge.operand)

    def take(self, node: Node, early: Collection[Node] | None = None) -> None:
        """Put a node at full length, with its early operands. All results of an operator that has several are
        put there together.

        early  the operands that are early; by default those made of small values alone
        """
        early = self.early if early is None else early
        stack = [node]
        while stack:
            node = stack.pop()
            if node not in self.found and node not in self.problem.inputs:
                self.found.add(node)
                stack += [a for a in node.all_input_nodes if a in early and self.is_computed(a)]
                stack += [u for u in node.users if is_item(u) and u in self.problem.all_needed]

    def followers(self, node: Node) -> set[Node]:
        """Find what lies between an operation that needs all rows and values that exist at full length.

        The operation's operands are kept at full length anyway, so a sweep of their own would save nothing.
        A ring of processes sends keys on several times, and adds gradients of keys on their way back. Returns
        no nodes if one of them is a product, reads a row of a sweep, or is larger than what the operation
        reads.
        """
        found, stack = set(), list(node.all_input_nodes)
        largest = max((bytes_of(value_of(a)) for a in stack if is_tensor(a)), default=0)
        while stack:
            at = stack.pop()
            if at in found or at in self.found or self.kinds.get(at) in (Kind.SUM, Kind.KEYSUM):
                continue
            by_rows = self.kinds.get(at) is Kind.ROWS and is_tensor(at) and at not in self.problem.inputs
            if not by_rows or is_product(at) or bytes_of(value_of(at)) > largest:
                return set()
            found.add(at)
            stack += at.all_input_nodes
        return found

    def is_computed(self, node: Node) -> bool:
        return self.problem.has_tokens(node) or is_item(node) or not is_tensor(node)

    def exists(self, node: Node) -> bool:
        """May the node and all its operands exist at full length?"""
        return all(map(self.problem.may_exist, (node, *node.all_input_nodes)))

    def must_be_whole(self, node: Node) -> bool:
        """Must a node run at full length, whatever it follows? It must if it needs all rows at once, or sums
        values that exist before any sweep. A scan must if its operands are early, or if it is small and
        ``carry_all`` is not set. Raises `CannotStream` if all rows are needed at once and are too large to
        keep."""
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
        """Does a node compute a few numbers per token from sums and other values at full length? Such a node
        is the tail of a loss, and needs no sweep of its own."""
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
        """Is a node an early output with rows before the first or after the last token? No sweep writes such
        rows. An example is labels moved by one token for the next region."""
        beyond = node in self.problem.outputs and self.problem.has_padding(node)
        return beyond and node in self.early

    def is_view_of_matrix(self, node: Node) -> bool:
        """Is a node an early view of a stored matrix, or one with rows beyond the tokens? Such a view costs
        nothing at full length. A view that repeats rows of a matrix, or matrices, is excluded: it would be
        copied where a chunk is sliced from it."""
        if node not in self.early or not is_view(node):
            return False
        return self.problem.has_padding(node) or self.problem.is_matrix(node) and not repeats(node)


def repeats(node: Node) -> bool:
    """Does a view have more entries than its base?"""
    return math.prod(shape_of(node)) > math.prod(shape_of(tensor_operands(node)[0]))

"""The problem to partition: nodes that the outputs need, and values that may exist at full length."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import (
    Analysis,
    Direction,
    Edge,
    Mark,
    Role,
    Tokens,
    bytes_of,
    cannot_tell,
    hint,
    is_equal,
    is_row_wise,
    is_tangent,
    is_tensor,
    is_view,
    parts_of,
    shape_of,
    sizes_of,
    tensor_operands,
    value_of,
)
from ..rules import ends_along, inner_width, is_zeros
from ..rules.views import fills_with_zeros

FEW_BYTES = 16  # per token: four numbers in float32
NARROW = 16  # a value this many times narrower than the widest input adds little to the memory of a step


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph with its analysis, and the outputs to compute.

    given      nodes whose values come from outside, beside placeholders and constants
    movable    inputs that the program may overwrite
    gradients  outputs that are gradients of inputs
    """

    graph: Graph
    analysis: Analysis
    outputs: tuple[object, ...]
    given: frozenset[Node]
    movable: frozenset[Node]
    gradients: frozenset[object] = frozenset()

    @functools.cached_property
    def inputs(self) -> frozenset[Node]:
        return self.given | {n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")}

    @functools.cached_property
    def order(self) -> dict[Node, int]:
        return {n: i for i, n in enumerate(self.graph.nodes)}

    @functools.cached_property
    def needed(self) -> tuple[Node, ...]:
        """The outputs and all that they are computed from, in graph order."""
        found: set[Node] = set()
        stack = [o for o in self.outputs if isinstance(o, Node)]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(() if node in self.inputs else node.all_input_nodes)
        return self.in_order(found)

    @functools.cached_property
    def read_inputs(self) -> tuple[Node, ...]:
        """Inputs that the outputs are computed from, and further inputs that tell the remaining sizes.
        Told are also the symbols in sizes of inputs: a compiled body takes each symbol as an input."""
        read = {n for n in self.needed if n in self.inputs}
        wanted = [self.analysis.length, *sizes_of(self.needed)]
        given = [value_of(n) for n in read]
        others = [
            n for n in self.graph.nodes if n.op == "placeholder" and n not in read and not is_tangent(n)
        ]
        untold = cannot_tell(given, wanted)
        for node in sorted(others, key=lambda n: bytes_of(value_of(n)) if is_tensor(n) else 0):
            if not untold:
                break
            left = cannot_tell([*given, value_of(node)], untold)
            if len(left) < len(untold):
                read.add(node)
                given.append(value_of(node))
                untold = left
        return self.in_order(read)

    def in_order(self, nodes: set[Node]) -> tuple[Node, ...]:
        return tuple(sorted(nodes, key=self.order.__getitem__))

    @functools.cached_property
    def all_needed(self) -> frozenset[Node]:
        return frozenset(self.needed)

    def edges(self, node: Node) -> tuple[Edge, ...]:
        return self.analysis.edges.get(node, ())

    def has_tokens(self, node: Node) -> bool:
        return is_row_wise(self.analysis.facts.get(node))

    def is_matrix(self, node: Node) -> bool:
        """Does a node have a row and a column per token?"""
        facts = parts_of(self.analysis.facts.get(node))
        return any(isinstance(f, Tokens) and f.keys is not None for f in facts)

    def is_table(self, node: Node) -> bool:
        """Is a node the gradient of a table over pairs of positions? Such a table has a row and a column for
        each token, and no others. The gradient takes as much memory as the table does."""
        fact = self.analysis.facts.get(node)
        if node not in self.gradients or not isinstance(fact, Tokens) or fact.keys is None:
            return False
        columns = value_of(node).shape[fact.keys.dim]
        whole = (fact.lo, fact.hi) == (0, 0) and fact.keys.is_plain
        return whole and is_equal(columns, self.analysis.length)

    def has_padding(self, node: Node) -> bool:
        """Does a node have rows before the first token, or after the last?"""
        fact = self.analysis.facts.get(node)
        return isinstance(fact, Tokens) and (fact.lo < 0 or fact.hi > 0)

    def has_unwritten_padding(self, node: Node) -> bool:
        """Does a node compute rows beyond the tokens that no sweep can write? Sweeps write zeros there, in
        outputs, and shifted copies."""
        if not self.has_padding(node) or not tensor_operands(node) or node in self.analysis.shifted_copies:
            return False
        # Rows beyond the tokens that an operand has are none that the op fills.
        given = [a for a in tensor_operands(node) if not is_zeros(a)]
        return node not in self.outputs or not fills_with_zeros(node) or any(map(self.has_padding, given))

    @functools.cached_property
    def hidden(self) -> dict[Node, Mark]:
        """Inputs that have rows of tokens and no columns of them, with the marks of their rows. Values that
        other processes send or receive count as inputs, because they have to exist, too."""
        given = self.inputs.union(end for end, _ in ends_along(self.graph) if end in self.all_needed)
        facts = ((n, self.analysis.facts[n]) for n in given)
        return {n: fact.rows for n, fact in facts if isinstance(fact, Tokens) and fact.keys is None}

    @functools.cached_property
    def widest_bytes(self) -> int:
        """Bytes per token of the widest input."""
        length = hint(self.analysis.length)
        return max((bytes_of(value_of(n)) // length for n in self.hidden), default=0)

    @functools.cached_property
    def small_bytes(self) -> int:
        """Bytes per token up to which a value may exist at full length."""
        batches = [math.prod(shape_of(n)[: mark.dim]) * mark.outer for n, mark in self.hidden.items()]
        return max(FEW_BYTES * min(batches, default=1), self.widest_bytes // NARROW)

    @functools.cached_property
    def most_bytes(self) -> int:
        """Bytes per token up to which a value may exist at full length if the region would otherwise run
        unchunked."""
        return max(self.small_bytes, self.widest_bytes)

    def is_small(self, node: Node) -> bool:
        """Does a value take few bytes per token, at any length? A value with a column per key never does."""
        return self.is_within(node, self.small_bytes)

    def is_within(self, node: Node, limit: int) -> bool:
        """Do a value, and the computation of it, take at most ``limit`` bytes per token each?"""
        if self.is_matrix(node) or inner_width(node, hint(self.analysis.length)) > limit:
            return False
        value = value_of(node)
        values = value if isinstance(value, (tuple, list)) else (value,)
        total = sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor))
        return total <= limit * hint(self.analysis.length)

    def may_meet(self, node: Node) -> bool:
        """May all rows of a value exist where an operation needs them at once? They may take as much as the
        widest input, because the region would otherwise run unchunked."""
        return node in self.inputs or not self.has_tokens(node) or self.is_within(node, self.most_bytes)

    def may_exist(self, node: Node) -> bool:
        """May a node's value exist at full length?"""
        return node in self.inputs or not self.has_tokens(node) or self.is_small(node)

    @functools.cached_property
    def early(self) -> frozenset[Node]:
        """Inputs, and nodes computed from them through small values alone. They may be computed before any
        sweep."""
        return self.computed_within(self.small_bytes)

    @functools.cached_property
    def early_if_needed(self) -> frozenset[Node]:
        """Inputs, and nodes computed from them through values that take no more than the widest input. They
        are computed before any sweep if the region would otherwise run unchunked."""
        return self.computed_within(self.most_bytes)

    def computed_within(self, limit: int) -> frozenset[Node]:
        """Find what is computed from the inputs through values of at most ``limit`` bytes per token."""
        found: set[Node] = set()
        for node in self.needed:
            narrow = not self.has_tokens(node) or self.is_within(node, limit) or is_view(node)
            narrow = narrow and inner_width(node, hint(self.analysis.length)) <= limit
            if node in self.inputs or narrow and all(a in found for a in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def scan_direction(self, node: Node) -> Direction | None:
        """Return the direction in which a scan runs over the tokens. None for a node that is no scan."""
        reach = next((e.reach for e in self.edges(node) if e.role is Role.CARRY), None)
        if reach is None:
            return None
        return Direction.ASCENDING if reach.looks_back() else Direction.DESCENDING

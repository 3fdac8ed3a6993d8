"""The result of the analysis of a graph: the facts of its values, and the conditions of these facts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .conditions import Condition, Ranges
from .facts import HERE, Edge, Fact, Kind, Reach, Role, Tokens
from .values import Size, rank_of


@dataclass(frozen=True)
class Analysis:
    """Facts about a graph: token dimensions of values, edges to operands, and kinds of nodes.

    reaches         node that relates rows to keys → the keys that a row can reach
    conditions      conditions that each call has to satisfy for these reaches to hold
    ranges          masks that attention reads as ranges of keys
    shifted_copies  nodes that hold the rows of other tokens, and so may have rows before the first token
                    or behind the last
    """

    length: Size
    facts: Mapping[Node, Fact | tuple[Fact, ...]]
    edges: Mapping[Node, tuple[Edge, ...]]
    kinds: Mapping[Node, Kind]
    reaches: Mapping[Node, Reach]
    conditions: tuple[Condition, ...] = ()
    ranges: Ranges = Ranges()
    shifted_copies: frozenset[Node] = frozenset()

    @property
    def checked(self) -> tuple[Condition, ...]:
        """All conditions that each call has to satisfy."""
        return tuple(dict.fromkeys((*self.conditions, *self.ranges.conditions, *self.ranges.visible)))

    def fact(self, node: Node) -> Fact:
        """Return the fact of a node that has one value."""
        fact = self.facts[node]
        assert not isinstance(fact, tuple), f"{node} is several values"
        return fact

    def tokens_of(self, node: Node) -> Tokens:
        """Return the fact of a value that is known to have rows."""
        fact = self.facts[node]
        assert isinstance(fact, Tokens), f"{node} has no rows"
        return fact

    def block(self, nodes: Iterable[Node]) -> int:
        """Compute the number of tokens that a chunk must be a multiple of. Blocks that these nodes read, or
        make, are not split."""
        values = {value for node in nodes for value in (node, *node.all_input_nodes)}
        facts = (fact for value in values for fact in parts_of(self.facts[value]))
        return math.lcm(*(fact.rows.block for fact in facts if isinstance(fact, Tokens)))

    def table(self) -> str:
        lines = []
        for node, fact in self.facts.items():
            if isinstance(fact, tuple):
                text = " | ".join(f.pattern(rank_of(node, i)) for i, f in enumerate(fact))
            else:
                text = fact.pattern(rank_of(node))
            reads = ", ".join(
                f"{e.operand.name} {e.role}{'' if e.reach == HERE else ' ' + str(e.reach)}"
                for e in self.edges.get(node, ())
                if e.role is not Role.WHOLE
            )
            lines.append(f"{node.name:<28} {text:<24} {self.kinds[node]:<7} {reads}".rstrip())
        return "\n".join(lines)


def parts_of(fact: Fact | tuple[Fact, ...] | None) -> tuple[Fact | None, ...]:
    """Return the facts of a node's outputs as a tuple: one, or several."""
    return fact if isinstance(fact, tuple) else (fact,)


def is_row_wise(fact: Fact | tuple[Fact, ...] | None) -> bool:
    """Does a value, or one of several outputs, have a row per token?"""
    return any(isinstance(f, Tokens) for f in parts_of(fact))

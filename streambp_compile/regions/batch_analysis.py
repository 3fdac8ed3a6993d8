"""Do the sequences of a batch meet? This module analyses a joint graph whose rows are sequences, not
tokens.

The batch takes the place of the tokens in the analysis. Sequences do not meet where each row reads only
itself or rows add up, and no operation reads such a sum together with rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..passes.analyze import analyze
from ..passes.ir import (
    HERE,
    Analysis,
    Contraction,
    Kind,
    Mark,
    Role,
    Size,
    Summed,
    Tokens,
    arguments,
    draws_random,
    hint,
    is_equal,
    is_row_wise,
    is_tensor,
    is_view,
    parts_of,
    shape_of,
    value_of,
)
from ..passes.rules import filling_of, find_rule, form_of, is_random, is_zeros, linear_of, merge_of, rule_of
from ..passes.rules.facets import Form
from ..passes.token_propagation import TokenPropagation
from .joint_regions import Joint


class Unfit(Exception):
    """The sequences of a batch meet, or the joint graph for some of them cannot be written."""


def of_batch(region: Joint, widest: Node, mark: Mark, count: Size) -> Analysis:
    """Derive the facts of a joint graph whose rows are the sequences of the batch. Raises `CannotStream`, or
    `Unfit` where a sequence reads another one, or the sum over all."""
    places = places_in_batch(region.graph, count)
    seeds = {widest: (mark,), **{table: (Mark(dim),) for table, dim in places.tables}}
    spread = TokenPropagation(region.graph, seeds)
    inputs = (*region.primals, *region.tangents)
    marks = {n: tuple(spread.of(n).values()) for n in inputs if is_tensor(n) and spread.of(n)}
    if any(len(found) > 1 or found[0].outer != 1 for found in marks.values()):
        raise Unfit
    analysis = analyze(region.graph, hint(count), {**seeds, **marks})
    for node in region.graph.nodes:
        if node.op != "output" and node not in places.nodes and not is_apart(node, analysis):
            raise Unfit
    return analysis


@dataclass(frozen=True)
class Places:
    """Ranges over the batch by which a graph looks up the entries of each sequence.

    An example is ``mask[b, :, k]`` with ``b = arange(batch)``. In a graph for some of the sequences, the
    range may count only these.

    nodes   the ranges, and the look-ups that read them
    tables  the values that are looked up in, each with its dimension of sequences
    """

    nodes: frozenset[Node]
    tables: tuple[tuple[Node, int], ...]


def places_in_batch(graph: Graph, count: Size) -> Places:
    """Find all ranges over ``count`` numbers that only such look-ups read."""
    nodes, tables = set[Node](), dict[tuple[Node, int], None]()
    for node in graph.nodes:
        if form_of(node) is Form.RANGE and len(node.args) == 1 and counts_from_zero(node):
            (end,) = node.args
            number = value_of(end) if isinstance(end, Node) else end
            found = look_ups(node, hint(count)) if is_equal(number, count) else []
            if found:
                nodes.update((node, *(user for user, _ in found)))
                tables.update({(user.args[0], dim): None for user, dim in found})
    return Places(frozenset(nodes), tuple(tables))


def counts_from_zero(node: Node) -> bool:
    given = arguments(node)
    return (given["start"], given["step"]) == (0, 1)


def look_ups(node: Node, count: int) -> list[tuple[Node, int]]:
    """List the look-ups that take a range for a whole dimension of a table. The list is empty if any other
    operation reads the range."""
    found = []
    for user in node.users:
        if form_of(user) is Form.LOOK_UP and user.args[0] is not node:
            dims = [d for d, index in enumerate(user.args[1]) if index is node]
            if len(dims) != 1 or shape_of(user.args[0])[dims[0]] != count:
                return []
            found.append((user, dims[0]))
        elif is_view(user) or form_of(user) in (Form.EXPAND, Form.RESHAPE, Form.COPY, Form.CAST):
            more = look_ups(user, count)
            if not more:
                return []
            found += more
        else:
            return []
    return found


def is_apart(node: Node, analysis: Analysis) -> bool:
    """Does every row of a node read only the same row, or does the node add rows up?"""
    facts, kind = parts_of(analysis.facts[node]), analysis.kinds[node]
    edges = analysis.edges[node]
    read = [e for e in edges if is_row_wise(analysis.facts[e.operand])]
    rows = [f for f in facts if isinstance(f, Tokens)]
    if is_random(node) or draws_random(node) or kind not in (Kind.ROWS, Kind.SUM, Kind.WHOLE):
        return False
    if any((f.keys, f.lo, f.hi) != (None, 0, 0) for f in rows):
        return False
    if any(e.role is not Role.ROWS or e.reach != HERE for e in read):
        return False
    if not rows and not read:
        return True
    if node.op == "placeholder" or node.target is operator.getitem:
        return True
    if node.op == "get_attr" or not node.all_input_nodes and filling_of(node) is None:
        return False  # entries that depend on their position in the batch
    if any(isinstance(f, Summed) for e in edges for f in parts_of(analysis.facts[e.operand])):
        return False  # a sum that is not complete before the last turn
    return adds_up(node, analysis) if kind is Kind.SUM else not names_rows(node, analysis)


def adds_up(node: Node, analysis: Analysis) -> bool:
    """Is the result for all rows the sum of the results for parts of the rows? Every term must contain rows
    or zeros. A term without rows would be added once in every turn."""
    signature, linear, given = rule_of(node).signature(node), linear_of(node), arguments(node)
    picks = signature.contracts is Contraction.PICKED and not signature.sums
    if linear is None or merge_of(node) is not None or picks or signature.placed:
        return False

    def has_rows(value: object) -> bool:
        return isinstance(value, Node) and (is_row_wise(analysis.facts[value]) or is_zeros(value))

    return all(any(has_rows(given[factor]) for factor in term) for term in linear.terms)


def names_rows(node: Node, analysis: Analysis) -> bool:
    """Does an operation name rows of an operand or of its result by their position?"""
    rule = find_rule(node)
    if rule is None:
        return True
    signature = rule.signature(node)
    if signature.reshape:
        return False
    operands = [
        (analysis.facts[e.operand], dims) for e, dims in zip(analysis.edges[node], signature.operands)
    ]
    results = zip(parts_of(analysis.facts[node]), signature.outputs)
    return any(
        isinstance(fact, Tokens) and dims[fact.rows.dim] in signature.placed
        for fact, dims in (*operands, *results)
    )

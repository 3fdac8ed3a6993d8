"""Widths of the values that a program holds at full length, and their limits.

A program that keeps logits, or values inside an MLP, for every token is not a streamed one. Widths are
numbers per token. They are compared with the widest value that a region cannot do without: its inputs,
its outputs, hidden states that it looks up for token ids, and values that processes exchange.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .ir import (
    Analysis,
    Edge,
    Kind,
    Program,
    Role,
    Sweep,
    Tokens,
    bytes_of,
    hint,
    is_floating,
    is_tensor,
    is_view,
    shape_of,
    tensor_operands,
    value_of,
    viewed,
)
from .rules import along_of, inner_width

# A value computed from its own rows alone can be recomputed, so it is kept only if it is hardly wider than
# hidden states: twice, as a short convolution over an expanded state is. An MLP is 2.5 to 4 times as wide,
# logits 8 and more.
ROWS = 2
# Keys, values, their gradients and results of attention cannot be recomputed from their own rows. With
# many heads they are up to five times as wide as the hidden states (DeepSeek-V2).
KEYS = 8
# A value wider than this is not inside a layer, but the output of a head: logits.
LOGITS = 8


def widens(sweep: Sweep, program: Program, analysis: Analysis) -> bool:
    """Does a sweep compute logits, or another value far wider than all that its region takes and returns?"""
    own = max((max(width(n, analysis), numbers_inside(n, analysis)) for n in sweep.nodes), default=0)
    return own > LOGITS * widest_needed(program, analysis) > 0


def numbers_inside(node: Node, analysis: Analysis) -> int:
    """Count the numbers per token that are alive at the widest moment inside a node. Returns 0 unless they
    are known to be more than its result."""
    inside = inner_width(node, hint(analysis.length))
    given = tree_leaves([value_of(a) for a in tensor_operands(node)]) if inside else []
    floating = [value for value in given if value.dtype.is_floating_point]
    return inside // max(value.dtype.itemsize for value in floating or given) if inside else 0


def too_wide(program: Program, analysis: Analysis) -> tuple[Node, ...]:
    """List the values that a program holds at full length although they are wider than allowed. Matrices of
    tokens by tokens are always among them."""
    widest = widest_needed(program, analysis)
    attended = set(keys_and_results(program, analysis))

    def is_too_wide(node: Node) -> bool:
        if is_matrix(node, analysis):
            return True
        return widest > 0 and width(node, analysis) > (KEYS if node in attended else ROWS) * widest

    return tuple(n for n in held(program, analysis) if is_too_wide(n))


def widest_at_full_length(program: Program, apart: Collection[Node] = frozenset()) -> tuple[int, Node | None]:
    """Measure the most bytes that operations at full length hold at a time.

    Inputs and outputs of the program do not count. A compiler that fuses the operations takes less.
    Returns the bytes, and the operation whose result is the largest.

    apart  nodes whose values do not count
    """
    given = {*apart, *program.inputs, *(viewed(o) for o in program.outputs if isinstance(o, Node))}
    order = [n for n in chain.from_iterable(program.full_length) if is_tensor(n)]
    made = [n for n in order if n not in given and not is_view(n)]
    own = set(made)
    last = {viewed(operand): node for node in order for operand in node.all_input_nodes}
    ended: dict[Node, int] = {}
    for node in made:
        ended[last.get(node, node)] = ended.get(last.get(node, node), 0) + bytes_of(value_of(node))
    held, widest = 0, 0
    for node in order:
        held += bytes_of(value_of(node)) if node in own else 0
        widest = max(widest, held)
        held -= ended.get(node, 0)
    return widest, max(made, key=lambda n: bytes_of(value_of(n)), default=None)


def held(program: Program, analysis: Analysis) -> list[Node]:
    """List the values that exist at full length while the program runs, without its inputs and outputs."""
    swept = (n for s in program.sweeps for n in (*s.writes, *s.keysums))
    whole = (n for nodes in program.full_length for n in nodes if not is_view(n))
    given = {*program.inputs, *(o for o in program.outputs if isinstance(o, Node))}
    found = dict.fromkeys((*swept, *whole))
    return [n for n in found if n not in given and isinstance(analysis.facts[n], Tokens)]


def widest_needed(program: Program, analysis: Analysis) -> int:
    """Count the numbers per token of the widest value that the region cannot do without."""
    return max((width(n, analysis) for n in needed_values(program, analysis)), default=0)


def bytes_needed(program: Program, analysis: Analysis) -> int:
    """Count the bytes of the largest value with rows that the region cannot do without."""
    rows = (n for n in needed_values(program, analysis) if width(n, analysis))
    return max((bytes_of(value_of(n)) for n in rows), default=0)


def needed_values(program: Program, analysis: Analysis) -> Iterator[Node]:
    """Yield the values that a region cannot do without. These are its inputs and outputs, values looked up
    for token ids, and values that come from other processes or go to them."""
    yield from program.inputs
    yield from (o for o in program.outputs if isinstance(o, Node))
    for node in (n for nodes in program.full_length for n in nodes if along_of(n) is not None):
        yield from (node, *tensor_operands(node))
    for node in (n for sweep in program.sweeps for n in sweep.nodes):
        table, rows = table_and_rows(analysis.edges[node])
        if any(map(is_floating, table)) and rows and not any(map(is_floating, rows)):
            yield node


def table_and_rows(edges: Iterable[Edge]) -> tuple[list[Node], list[Node]]:
    """Separate the operands without rows from those with rows."""
    table: list[Node] = []
    rows: list[Node] = []
    for edge in edges:
        (table if edge.role is Role.WHOLE else rows).append(edge.operand)
    return table, rows


def keys_and_results(program: Program, analysis: Analysis) -> Iterator[Node]:
    """Yield values read as keys, results of nodes that read keys, and gradients of keys."""
    for sweep in program.sweeps:
        for node in sweep.nodes:
            keys = [e.operand for e in analysis.edges[node] if e.role is Role.KEYS]
            yield from keys
            if keys or analysis.kinds[node] is Kind.KEYSUM:
                yield from (node, *node.users)


def is_matrix(node: Node, analysis: Analysis) -> bool:
    fact = analysis.facts[node]
    return isinstance(fact, Tokens) and fact.keys is not None


def width(node: Node, analysis: Analysis) -> int:
    """Count the numbers per token of a value. It is 0 for a value without rows, and for one with a row and a
    column per token."""
    if not is_tensor(node) or not isinstance(analysis.facts[node], Tokens) or is_matrix(node, analysis):
        return 0
    return math.prod(shape_of(node)) // hint(analysis.length)

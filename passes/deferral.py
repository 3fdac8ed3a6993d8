"""Deferral: wide values that no attention needs are computed after everything else.

A frozen teacher's logits, computed before the student's layers and read by the loss, would exist at full
length while all those layers run. If they are computed late, in the loss's own region, only the
teacher's hidden states are kept until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from .ir import ancestors

WIDE = 2  # times the bytes of what attention returns: logits are wider, hidden states are not


def deferred(
    body: Sequence[Node], size: Mapping[Node, int], mixers: Collection[Node], written: Collection[Node]
) -> list[Node]:
    """Order the nodes so that as few wide values as possible wait for later attention.

    size     bytes of each value; -1 for one that may never wait (a matrix of tokens by tokens)
    mixers   nodes that let one token see another
    written  values whose memory is written into: they stay where they are
    """
    late = late_nodes(body, size, mixers)
    if not late or not late.isdisjoint(written):
        return list(body)
    moved = [n for n in body if n not in late] + [n for n in body if n in late]
    return min(list(body), moved, key=lambda order: waiting(order, size, mixers))


def late_nodes(body: Sequence[Node], size: Mapping[Node, int], mixers: Collection[Node]) -> set[Node]:
    """Find the nodes that should be computed late. These are wide values that wait for attention which does
    not need them, the wide values that those are computed from, and everything computed from them."""
    limit = WIDE * max((size[n] for n in mixers), default=0)
    needed = ancestors(mixers)
    free = [n for n in body if n not in needed]
    wide = {n for n in free if not 0 <= size[n] <= limit}
    found: set[Node] = set()
    stack = list(across(body, wide, mixers))
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += (a for a in node.all_input_nodes if a in wide)
    for node in free:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def across(body: Sequence[Node], values: Collection[Node], mixers: Collection[Node]) -> list[Node]:
    """List the values that are computed before a mixer and read after it."""
    place = {n: i for i, n in enumerate(body)}
    mixed = [0]
    for node in body:
        mixed.append(mixed[-1] + (node in mixers))

    def waits(node: Node) -> bool:
        last = max((place[u] for u in node.users if u in place), default=place[node])
        return mixed[last] > mixed[place[node]]

    return [n for n in values if waits(n)]


def waiting(body: Sequence[Node], size: Mapping[Node, int], mixers: Collection[Node]) -> float:
    """Sum the bytes of all values that wait for a mixer; infinite if one of them may not wait."""
    sizes = [size[n] for n in across(body, body, mixers)]
    return float("inf") if min(sizes, default=0) < 0 else sum(sizes)

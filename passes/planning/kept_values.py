"""Choose values of the forward to keep for the backward, which would otherwise recompute them.

Streaming keeps the inputs of a region and recomputes everything else (arXiv 2506.03077, section 3). Where
memory is left, keeping the result of a matrix product or of attention saves the time of computing it twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..ir import (
    EVERYWHERE,
    Analysis,
    Kind,
    Program,
    Tokens,
    bytes_of,
    is_row_wise,
    is_tensor,
    is_view,
    value_of,
)
from ..rules import is_product, rule_of
from .cost_model import attention_work, product_work
from .devices import Device

Nodes = tuple[Node, ...]


@dataclass(frozen=True)
class KeptValue:
    """A value that may be kept, with its memory and the time that it saves.

    nodes    the values that are kept together (the outputs of one operation)
    bytes    memory that they take from the forward to the backward
    seconds  time that the backward saves, by the device's rates
    count    operations whose outputs they are
    """

    nodes: Nodes
    bytes: int
    seconds: float
    count: int = 1

    def __str__(self) -> str:
        names = " and ".join(n.name for n in self.nodes)
        return f"{names}: {self.bytes / 2**20:.1f} MiB for {self.seconds * 1e3:.2f} ms"


def joined(values: Sequence[KeptValue]) -> KeptValue:
    """Join several values that are kept together or not at all."""
    nodes = tuple(n for v in values for n in v.nodes)
    total, saved = sum(v.bytes for v in values), sum(v.seconds for v in values)
    return KeptValue(nodes, total, saved, sum(v.count for v in values))


def worth_keeping(
    backward: Program, tangents: Iterable[Node], analysis: Analysis, device: Device
) -> tuple[KeptValue, ...]:
    """Sort values that the backward recomputes from inputs alone by seconds saved per byte, the best first.
    Each is rated with those before it kept already. A value that saves nothing then is left out."""
    again = recomputed(backward, frozenset(tangents))
    seconds = {n: seconds_of(n, analysis, device) for n in again if is_product(n)}
    candidates = [
        c for n in dict.fromkeys((*seconds, *backward.kept)) if (c := kept_together(n, again, analysis))
    ]
    kept: set[Node] = set(backward.inputs)
    found = []
    while candidates:
        needed = computed_from(backward, kept)
        rated = [(saving(c, backward, kept, needed, seconds), c) for c in candidates]
        best, nodes = max(rated, key=lambda r: r[0] / size_of(r[1]))
        if best <= 0:
            break
        found.append(KeptValue(nodes, size_of(nodes), best))
        kept.update(nodes)
        candidates.remove(nodes)
    return tuple(found)


def recomputed(backward: Program, tangents: frozenset[Node]) -> dict[Node, None]:
    """Find nodes of the backward's sweeps that depend on no tangent, in graph order."""
    late = set(tangents)
    found: dict[Node, None] = {}
    nodes = dict.fromkeys(n for sweep in backward.sweeps for n in sweep.nodes)
    for node in (*(n for part in backward.full_length for n in part), *nodes):
        if any(a in late for a in node.all_input_nodes):
            late.add(node)
    for node in nodes:
        if node not in late:
            found[node] = None
    return found


def kept_together(node: Node, again: Collection[Node], analysis: Analysis) -> Nodes:
    """Find the values to keep instead of running a node. None are found if they cannot be kept row by row."""
    if node not in again:
        return ()
    values = (node,) if is_tensor(node) else tuple(n for n in node.users if n in again)
    return values if values and all(is_keepable(n, analysis) for n in values) else ()


def is_keepable(node: Node, analysis: Analysis) -> bool:
    """Does a value have one row of floating-point numbers per token, in memory of its own?"""
    fact = analysis.facts.get(node)
    return (
        is_tensor(node)
        and isinstance(fact, Tokens)
        and (fact.keys, fact.lo, fact.hi) == (None, 0, 0)
        and analysis.kinds[node] is Kind.ROWS
        and value_of(node).dtype.is_floating_point
        and (not is_view(node) or isinstance(value_of(node.args[0]), tuple | list))
    )


def size_of(nodes: Nodes) -> int:
    return sum(bytes_of(value_of(n)) for n in nodes)


def computed_from(backward: Program, given: Collection[Node]) -> set[Node]:
    """Find all nodes that the backward's outputs are computed from if these values are given."""
    found: set[Node] = set()
    stack = [o for o in backward.outputs if isinstance(o, Node)]
    while stack:
        node = stack.pop()
        if node not in found and node not in given:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def saving(
    nodes: Nodes, backward: Program, kept: set[Node], needed: set[Node], seconds: dict[Node, float]
) -> float:
    """Estimate the seconds of products that the backward saves if it is given these values as well."""
    left = computed_from(backward, kept.union(nodes))
    return sum(s for n, s in seconds.items() if n in needed and n not in left)


def seconds_of(node: Node, analysis: Analysis, device: Device) -> float:
    """Estimate the seconds of a product or of attention at full length, at the device's rates."""
    signature = rule_of(node).signature(node)
    if signature.rows is not None:
        dtype, backward, flop, _ = attention_work(node, analysis.reaches.get(node, EVERYWHERE))
        return flop / device.attention_rate(dtype, backward)
    dtype, flop, _ = product_work(node, signature, is_row_wise(analysis.facts[node]))
    return flop / device.rate(dtype)

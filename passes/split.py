"""Cut a model's forward graph into a chain of regions at its narrowest live frontiers.

A region holds at most one token-mixing operator. Between two of them the cut goes where the fewest bytes are alive (the residual stream
alone, between layers); of equally narrow places, where regions come out equal, so that equal layers share everything. Values that
are cheap to make from the inputs (positions, rotary tables, masks) are never carried across a cut: every region makes its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx
from torch.fx import Graph, Node


@dataclass(frozen=True)
class Traits:
    """What the cut needs to know of a node: bytes of its value (0: none; -1: not a tensor), and what it does with tokens."""

    bytes: int
    grad: bool
    tokens: bool
    matrix: bool
    mixing: bool


@dataclass(frozen=True)
class Region:
    """A piece of the chain.

    nodes    its nodes in order, copies of cheap ones included
    inputs   placeholders and values of earlier regions that it reads
    outputs  its values that later regions or the caller read
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def split(graph: Graph, traits: Mapping[Node, Traits], state: Callable[[Node], bool]) -> tuple[Region, ...]:
    """Regions in execution order.

    state  true for nodes that only switch a mode (autocast, gradients): they belong to no region, the builder replays them
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not state(n)]
    flow = networkx.DiGraph()
    flow.add_nodes_from(graph.nodes)
    flow.add_edges_from((operand, n) for n in graph.nodes for operand in n.all_input_nodes)
    cheap = cheap_nodes(traits, flow)
    body = [n for n in nodes if n not in cheap]
    widths = frontier(body, traits)
    mixers = [i for i, n in enumerate(body) if traits[n].mixing]
    cuts = [narrowest(widths, before, after)[-1] for before, after in zip(mixers, mixers[1:])]
    if mixers:
        cuts += tail_cut(body, widths, traits, mixers[-1], cuts)
    pieces = [body[a:b] for a, b in zip([0, *(c + 1 for c in cuts)], [*(c + 1 for c in cuts), len(body)])]
    returned = set(next(n for n in graph.nodes if n.op == "output").all_input_nodes)
    loose = [n for n in nodes if n in cheap and n in returned]
    return tuple(assemble(pieces, loose, cheap, returned, {n: i for i, n in enumerate(graph.nodes)}))


def cheap_nodes(traits: Mapping[Node, Traits], flow: networkx.DiGraph) -> set[Node]:
    """Values made from inputs without weights: positions, masks, rotary tables."""
    cheap: set[Node] = set()
    changed = written_to(flow)
    for node in networkx.topological_sort(flow):
        if node.op in ("placeholder", "output") or node in changed:
            continue
        light = all(a in cheap or a.op == "placeholder" and a not in changed and not traits[a].matrix and not traits[a].grad
                    for a in node.all_input_nodes)
        if light and not traits[node].grad and not traits[node].mixing:
            cheap.add(node)
    return cheap


def mutated(node: Node) -> Node | None:
    """The value that a node writes into, if it does (``x[i] = y``, ``x.add_(y)``, ``x += y``, ``out=``, ``inplace=True``)."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    spelt = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")  # operator's own names
    in_place = (spelt or name in IN_PLACE) and node.op in ("call_method", "call_function")
    if in_place and node.args and isinstance(node.args[0], Node):
        return node.args[0]
    if isinstance(node.kwargs.get("out"), Node):
        return node.kwargs["out"]
    return node.args[0] if node.args and isinstance(node.args[0], Node) and flagged_in_place(node) else None


def flagged_in_place(node: Node) -> bool:
    """``inplace=True``, by name or by position."""
    if node.kwargs.get("inplace") is True or node.op != "call_function":
        return node.kwargs.get("inplace") is True
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace") is True
    except (TypeError, ValueError):
        return False


IN_PLACE = {"setitem", "__setitem__", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
            "irshift", "imatmul"}


def written_to(flow: networkx.DiGraph) -> set[Node]:
    """Values that are written into, what they may be views of, and the writers: none of them can be made a second time."""
    writers = {n: target for n in flow.nodes if (target := mutated(n)) is not None}
    found = set(writers)
    for target in writers.values():
        found.add(target)
        found.update(networkx.ancestors(flow, target))
    return found


FORBIDDEN = 1 << 100


def frontier(body: Sequence[Node], traits: Mapping[Node, Traits]) -> list[int]:
    """Bytes alive after each node of the body: made up to there and read later. Where a value that is no tensor is alive, no cut can be."""
    place = {n: i for i, n in enumerate(body)}
    change = [0] * (len(body) + 1)
    for i, node in enumerate(body):
        end = max((place[u] for u in node.users if u in place), default=i)
        size = FORBIDDEN if traits[node].bytes < 0 else traits[node].bytes
        change[i] += size if end > i else 0
        change[end] -= size if end > i else 0
    widths, alive = [], 0
    for step in change[:-1]:
        alive += step
        widths.append(alive)
    return widths


def narrowest(widths: Sequence[int], start: int, stop: int) -> list[int]:
    """Places from ``start`` up to before ``stop`` where the fewest bytes are alive."""
    least = min(widths[start:stop])
    return [i for i in range(start, stop) if widths[i] == least]


def tail_cut(body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], last: int, cuts: Sequence[int]) -> list[int]:
    """Part the last layer from a head that widens it (logits) or adds it up (a loss).

    Of equally narrow places, the one that makes the last layer equal to the layer before it; else the first after the mixer's own sum.
    """
    until = max((i for i, n in enumerate(body) if traits[n].tokens and widths[i] > 0), default=-1)
    alive = [i for i in range(last, until + 1) if widths[i] < FORBIDDEN]
    if not alive:
        return []
    least = min(widths[i] for i in alive)
    places = [i for i in alive if widths[i] == least]
    after = body[places[0] + 1:]
    widens = any(traits[n].tokens and traits[n].bytes > 2 * least for n in after)
    adds_up = any(traits[n].bytes > 0 and not traits[n].tokens for n in after)
    if not (widens or adds_up):
        return []
    if cuts:
        start = cuts[-1] + 1
        before = shape_of_piece(body[cuts[-2] + 1 if len(cuts) > 1 else 0:start])
        for place in reversed(places):
            piece = shape_of_piece(body[start:place + 1])
            if piece == before[-len(piece):]:
                return [place]
    return [places[-1]]


def shape_of_piece(piece: Sequence[Node]) -> tuple:
    return tuple(str(n.target) for n in piece)


def assemble(pieces, loose, cheap, returned, order) -> list[Region]:
    """Close each piece over the cheap values that it reads."""
    regions = []
    owner = {n: i for i, piece in enumerate(pieces) for n in piece}
    for i, piece in enumerate(pieces):
        inside: set[Node] = set()
        stack = [*piece, *(loose if i == len(pieces) - 1 else ())]
        while stack:
            node = stack.pop()
            if node not in inside:
                inside.add(node)
                stack.extend(a for a in node.all_input_nodes if a in cheap)
        nodes = tuple(sorted(inside, key=order.get))
        inputs = tuple(sorted({a for n in nodes for a in n.all_input_nodes if a not in inside}, key=order.get))
        last = i == len(pieces) - 1
        outputs = tuple(n for n in nodes if (n in returned and (n in owner or last)) or (
            n in owner and any(owner.get(u, i) > i for u in n.users)))
        regions.append(Region(nodes, inputs, outputs))
    return regions

"""Cut a model's forward graph into a chain of regions at its narrowest live frontiers.

A region holds at most one token-mixing operator, except for mixers that no cut can separate, and for
scans and convolutions of one layer. Between two mixers, the cut goes where the fewest bytes are alive:
between layers, this is the residual stream alone. Among equally narrow places, it goes where regions
come out equal, so that equal layers share everything. Values that are cheap to compute from the inputs
(positions, rotary tables, masks) are never carried across a cut: every region computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx
from torch.fx import Graph, Node

from .deferral import deferred
from .ir import ancestors, is_view
from .moved_rows import parts_between
from .phases import check_time
from .rules.forward import mutated


@dataclass(frozen=True)
class Traits:
    """Properties of a node that decide about cuts.

    bytes         size of its value (0: none; -1: it cannot cross a cut)
    attends       for a node that mixes tokens: it is attention, and not a scan or a convolution
    recomputable  it costs little to compute and gives the same bits when computed again
    storage       the memory that holds its value
    moves         it makes rows of one sequence from those of another
    received      its rows come from other processes: the backward has them sent again, and no cut keeps
                  them
    """

    bytes: int
    grad: bool
    tokens: bool
    matrix: bool
    mixing: bool
    attends: bool = True
    recomputable: bool = False
    storage: int | None = None
    moves: bool = False
    received: bool = False

    @property
    def crosses(self) -> bool:
        """May its value cross a cut?"""
        return self.bytes >= 0 and not self.received


@dataclass(frozen=True)
class Region:
    """A piece of the chain.

    nodes         its nodes in order, including copies of cheap ones
    inputs        placeholders and values of earlier regions that it reads
    outputs       its values that later regions or the caller read
    recomputable  the backward recomputes its outputs from the inputs of the graph, so that they are not
                  kept
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    recomputable: bool = False

    def __str__(self) -> str:
        """Format the region: ``x, w → y: scores, mixed, y``."""
        inputs, outputs, nodes = (
            ", ".join(map(str, part)) for part in (self.inputs, self.outputs, self.nodes)
        )
        return f"{inputs} → {outputs}: {nodes}"


def split(graph: Graph, traits: Mapping[Node, Traits], state: Callable[[Node], bool]) -> tuple[Region, ...]:
    """Split a graph into regions, in execution order.

    state  true for nodes that belong to no region: those that only switch a mode (autocast, gradients),
           which the builder replays, and those that run before all regions
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not state(n)]
    flow = networkx.DiGraph()
    flow.add_nodes_from(graph.nodes)
    flow.add_edges_from((operand, n) for n in graph.nodes for operand in n.all_input_nodes)
    cheap = {n for n in cheap_nodes(traits, flow) if not state(n)}
    body = deferred(
        [n for n in nodes if n not in cheap],
        {n: traits[n].bytes for n in nodes},
        {n for n in nodes if traits[n].mixing},
        written_to(flow, traits),
    )
    widths = frontier(body, traits)
    prelude, cuts = all_cuts(body, widths, traits, cheap)
    pieces = [body[a:b] for a, b in zip([0, *(c + 1 for c in cuts)], [*(c + 1 for c in cuts), len(body)])]
    returned = set(next(n for n in graph.nodes if n.op == "output").all_input_nodes)
    loose = [n for n in nodes if n in cheap and n in returned]
    regions = assemble(pieces, loose, cheap, returned, {n: i for i, n in enumerate(graph.nodes)})
    return (replace(regions[0], recomputable=bool(prelude) and again(pieces[0], traits)), *regions[1:])


def all_cuts(
    body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], cheap: Collection[Node]
) -> tuple[list[int], list[int]]:
    """Choose the last node of the prelude, if there is one, and of every region but the final one. Returns
    two lists of places; the second includes the prelude."""
    movers = [i for i, n in enumerate(body) if moves_values(n, traits, cheap)]
    cannot = {i for i, width in enumerate(widths) if width >= FORBIDDEN}
    prelude: list[int] = []
    cuts: list[int] = []
    light = {i for i, n in enumerate(body) if is_view(n) or traits[n].bytes >= 0 and not traits[n].matrix}
    for first, last, moves in parts_between(movers, len(body), cannot, light):
        part, alive = body[first : last + 1], widths[first : last + 1]
        mixers = [] if moves else [i for i, n in enumerate(part) if traits[n].mixing]
        inside = layer_cuts(part, alive, traits, mixers)
        if last < len(body) - 1:
            layer = [layer_end(part, inside, narrowest(alive, mixers[-1], len(part)))] if mixers else []
            inside = [*inside, *layer, *({len(part) - 1}.difference(layer))]
        if first == 0 and not moves:
            prelude = prelude_cut(part, alive, traits, inside)
        cuts += [first + i for i in inside]
    return prelude, [*prelude, *cuts]


def moves_values(node: Node, traits: Mapping[Node, Traits], cheap: Collection[Node]) -> bool:
    """Does a node move rows that are neither cheap to recompute nor an input without gradients? Or does it
    move rows that the backward must not compute again?"""
    return traits[node].moves and (
        not traits[node].recomputable
        or any(
            a not in cheap and traits[a].matrix and (a.op != "placeholder" or traits[a].grad)
            for a in node.all_input_nodes
        )
    )


LONGEST_CHAIN = 2  # scans and convolutions of a region that read one another: each needs sweeps of its own


class ScanChain:
    """The number of scans and convolutions of a region that read one another in a chain."""

    def __init__(self, body: Sequence[Node], traits: Mapping[Node, Traits]):
        self.body, self.traits = body, traits
        self.begin(0)

    def begin(self, start: int) -> None:
        """Start a region at this place."""
        self.lengths: dict[Node, int] = {}
        self.next = start

    def length(self, last: int) -> int:
        """Measure the chain that ends at a place of the region."""
        for node in self.body[self.next : last + 1]:
            links = self.traits[node].mixing and not self.traits[node].attends
            before = (self.lengths.get(a, 0) for a in node.all_input_nodes)
            self.lengths[node] = max(before, default=0) + links
        self.next = last + 1
        return self.lengths[self.body[last]]


def layer_cuts(
    body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], mixers: Sequence[int]
) -> list[int]:
    """Choose the last node of every region but the final one. There is a cut after each mixer, and one before
    the head."""
    layer = layer_width(body, widths, traits, mixers)
    most = most_between_layers(body, traits)
    cuts: list[int] = []
    chain = ScanChain(body, traits)
    for mixer, following in zip(mixers, [*mixers[1:], None]):
        check_time()
        end = len(body) - 1 if following is None else narrowest(widths, mixer, following)[-1]
        if following is not None and (
            widths[end] >= FORBIDDEN
            or widths[end] >= layer
            and not (traits[body[mixer]].attends and traits[body[following]].attends)
            and (widths[end] > 2 * layer or chain.length(following) <= LONGEST_CHAIN)
        ):
            # two mixers that no cut can separate share a region; so do a scan or a convolution and the other
            # mixers of its layer
            continue
        chain.begin(end + 1)
        if not traits[body[mixer]].received:  # a head that widens received rows was cut off in front of them
            cuts += head_cut(body, widths, traits, mixer, end, cuts, most if following is None else layer)
        cuts += [] if following is None else [end]
    return cuts


def cheap_nodes(traits: Mapping[Node, Traits], flow: networkx.DiGraph) -> set[Node]:
    """Find the values that are cheap enough for every region to compute its own. They are made from inputs
    without weights: positions, masks, rotary tables. Matrices of tokens by tokens that only look weights
    up (a bias by distance) are cheap as well: every region adds its part to the gradients of these
    weights."""
    cheap: set[Node] = set()
    recomputable: set[Node] = set()
    changed = written_to(flow, traits)
    for node in networkx.topological_sort(flow):
        if node.op in ("placeholder", "output") or node in changed or traits[node].mixing:
            continue
        if not traits[node].grad and all(
            a in cheap
            or a.op == "placeholder"
            and a not in changed
            and not traits[a].matrix
            and not traits[a].grad
            for a in node.all_input_nodes
        ):
            cheap.add(node)
        if traits[node].recomputable and all(
            a in recomputable or a.op == "placeholder" and a not in changed for a in node.all_input_nodes
        ):
            recomputable.add(node)
    return cheap | ancestors(n for n in recomputable if traits[n].bytes < 0) & recomputable


def written_to(flow: networkx.DiGraph, traits: Mapping[Node, Traits]) -> set[Node]:
    """Find the values whose memory is written into, and the writers: none of them can be recomputed. Writes
    that are as good as new values (`is_linear`) do not count."""
    writers = {n: target for n in flow.nodes if (target := mutated(n)) is not None}
    storages = {traits[t].storage for t in writers.values()} - {None}
    written: dict[int | None, list[Node]] = {storage: [] for storage in storages}
    for node in flow.nodes:
        if node in traits and traits[node].storage in written:
            written[traits[node].storage].append(node)
    found = {*writers, *writers.values(), *(n for nodes in written.values() for n in nodes)}
    return found - {n for nodes in written.values() if is_linear(nodes, writers) for n in nodes}


def is_linear(nodes: Sequence[Node], writers: Mapping[Node, Node]) -> bool:
    """Is memory that is made here read in one chain, up to the last write into it? Each value is read by the
    next writer alone (``x = a + b; x += c``), or through the next view of it (``x.mT.mul_(c)``). Such
    writes are as good as new values."""
    place = {n: i for i, n in reversed(list(enumerate(nodes)))}
    writes = [n for n in nodes if writers.get(n) in place]
    written_elsewhere = any(u not in place for n in nodes for u in n.users if writers.get(u) is n)
    if written_elsewhere or nodes[0].op in ("placeholder", "get_attr"):
        return False
    last = max(place[n] for n in writes)
    return all(
        list(a.users) == [b] and (writers.get(b) is a or is_view(b) and b.args[0] is a)
        for a, b in zip(nodes[:last], nodes[1 : last + 1])
    )


FORBIDDEN = 1 << 100


def frontier(body: Sequence[Node], traits: Mapping[Node, Traits]) -> list[int]:
    """Count the bytes alive after each node of the body: computed up to there and read later. No cut can be
    where a value is alive that cannot cross one (no tensor, a matrix of tokens by tokens, rows of other
    processes). Nor can it be between the first node of memory that is written into and the last write.
    Such places have at least `FORBIDDEN` bytes."""
    place = {n: i for i, n in enumerate(body)}
    change = [0] * (len(body) + 1)
    for i, node in enumerate(body):
        end = max((place[u] for u in node.users if u in place), default=i)
        size = traits[node].bytes if traits[node].crosses else FORBIDDEN
        change[i] += size if end > i else 0
        change[end] -= size if end > i else 0
    for first, last in unfinished(body, traits):
        change[first] += FORBIDDEN
        change[last] -= FORBIDDEN
    widths, alive = [], 0
    for step in change[:-1]:
        alive += step
        widths.append(alive)
    return widths


def rows_alive(body: Sequence[Node], traits: Mapping[Node, Traits]) -> list[bool]:
    """Is a value with a token axis alive after each node of the body?"""
    place = {n: i for i, n in enumerate(body)}
    found, last = [], -1
    for i, node in enumerate(body):
        if traits[node].tokens:
            last = max(last, *(place[u] for u in node.users if u in place), i)
        found.append(last > i)
    return found


def unfinished(body: Sequence[Node], traits: Mapping[Node, Traits]) -> list[tuple[int, int]]:
    """Find the places of the first node and of the last write, for all memory that is written into."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, node in enumerate(body):
        storage = traits[node].storage
        if storage is not None:
            first.setdefault(storage, i)
        target = mutated(node)
        changed = None if target is None else traits[target].storage
        if changed is not None:
            first.setdefault(changed, i)
            last[changed] = i
    return [(first[s], i) for s, i in last.items()]


def narrowest(widths: Sequence[int], start: int, stop: int) -> list[int]:
    """Find the places from ``start`` up to before ``stop`` where the fewest bytes are alive."""
    least = min(widths[start:stop])
    return [i for i in range(start, stop) if widths[i] == least]


def layer_width(
    body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], mixers: Sequence[int]
) -> int:
    """Estimate the bytes that are alive inside layers, but not between them.

    They are twice the fewest bytes between two mixers. Places where only sums over tokens are alive do
    not count: there, the loss of one sequence ends and the layers of another one begin. Three mixers or
    fewer may all be in one layer; then they are three times the fewest bytes behind the mixers, if that
    is less. Layers may be compiled one by one, each as a graph of its own; so they are at most twice the
    hidden states that come in.
    """
    if len(mixers) < 2:
        return 0
    rows = rows_alive(body, traits)
    between = [min(widths[a:b]) for a, b in zip(mixers, mixers[1:]) if all(rows[a:b])]
    inside = min(2 * min(between, default=FORBIDDEN), most_between_layers(body, traits))
    if len(mixers) > 3:
        return inside
    behind = range(mixers[-1], len(body))
    widest = max(behind, key=lambda i: (traits[body[i]].bytes if traits[body[i]].tokens else -1, i))
    return min(inside, 3 * min((w for w in widths[mixers[-1] : widest] if w > 0), default=inside))


def most_between_layers(body: Sequence[Node], traits: Mapping[Node, Traits]) -> int:
    """Return twice the bytes of the hidden states that come in: inputs with a row per token and a gradient.
    Without such inputs there is no limit."""
    given = {a for n in body for a in n.all_input_nodes if a.op == "placeholder"}
    return 2 * sum(traits[a].bytes for a in given if traits[a].tokens and traits[a].grad) or FORBIDDEN


def head_cut(
    body: Sequence[Node],
    widths: Sequence[int],
    traits: Mapping[Node, Traits],
    mixer: int,
    end: int,
    cuts: Sequence[int],
    below: int,
) -> list[int]:
    """Separate a layer from a head behind it that widens it (logits) or adds it up (a loss).

    Such a head ends narrower than layers do. The cut goes where the layers before were cut, at the same
    width. Among several such places, it goes to the one that makes this layer equal to the layer before
    it, else to the last. Without such places, it goes to the narrowest place before the widest value, if
    fewer than ``below`` bytes are alive there, and no more than twice those of the cut before: a value that
    is widened inside a layer is no head.
    """
    places = [i for i in range(mixer, end) if cuts and widths[i] == widths[cuts[-1]]]
    below = min(below, 2 * widths[cuts[-1]] + 1) if cuts else below
    places = places or [
        i for i in narrowest_before_widest(body, widths, traits, mixer, end) if widths[i] < below
    ]
    if not places or 2 * widths[end] > widths[places[0]]:
        return []
    after = body[places[0] + 1 : end + 1]
    widens = any(traits[n].tokens and traits[n].bytes > 2 * widths[places[0]] for n in after)
    adds_up = any(traits[n].bytes > 0 and not traits[n].tokens for n in after)
    if not (widens or adds_up):
        return []
    return [layer_end(body, cuts, places)]


def narrowest_before_widest(
    body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], mixer: int, end: int
) -> list[int]:
    """Find the places behind a mixer where the fewest bytes are alive, up to the last widest value."""
    sizes = {i: traits[body[i]].bytes for i in range(mixer, end + 1) if traits[body[i]].tokens}
    most = max(sizes.values(), default=0)
    widest = max((i for i, size in sizes.items() if size == most), default=-1)
    alive = [i for i in range(mixer, widest) if 0 < widths[i] < FORBIDDEN]
    least = min((widths[i] for i in alive), default=0)
    return [i for i in alive if widths[i] == least]


def layer_end(body: Sequence[Node], cuts: Sequence[int], places: Sequence[int]) -> int:
    """Choose the last of some places that ends a layer equal to the one before it. Without such a place, it
    is the last one."""
    if not cuts:
        return places[-1]
    start = cuts[-1] + 1
    before = shape_of_piece(body[cuts[-2] + 1 if len(cuts) > 1 else 0 : start])
    longest = shape_of_piece(body[start : places[-1] + 1])
    for place in reversed(places):
        piece = longest[: place + 1 - start]
        if piece == before[-len(piece) :]:
            return place
    return places[-1]


def prelude_cut(
    body: Sequence[Node], widths: Sequence[int], traits: Mapping[Node, Traits], cuts: Sequence[int]
) -> list[int]:
    """Separate an embedding from the first layer, if this makes that layer equal to the next one. The
    embedding must be recomputable, read no tokens (pixels), or make the tokens itself, whatever is added
    to its patches."""
    if len(cuts) < 2:
        return []
    following = shape_of_piece(body[cuts[0] + 1 : cuts[1] + 1])
    place = cuts[0] - len(following)
    equal = (
        place >= 0
        and widths[place] == widths[cuts[0]]
        and shape_of_piece(body[place + 1 : cuts[0] + 1]) == following
    )
    before = body[: place + 1]
    tokens = any(traits[a].tokens and a.op == "placeholder" for n in before for a in n.all_input_nodes)
    born = any(makes_tokens(n, traits) for n in before)
    return [place] if equal and (born or not tokens or again(before, traits)) else []


def makes_tokens(node: Node, traits: Mapping[Node, Traits]) -> bool:
    """Is a node a costly op on values without tokens, such as the filter that makes patches of an image?"""
    costly = not traits[node].recomputable and traits[node].matrix and traits[node].bytes > 0
    return costly and not any(traits[a].tokens for a in node.all_input_nodes)


def again(piece: Sequence[Node], traits: Mapping[Node, Traits]) -> bool:
    """Can a piece be recomputed at little cost?"""
    return all(traits[n].recomputable and mutated(n) is None for n in piece)


def shape_of_piece(piece: Sequence[Node]) -> tuple:
    return tuple(str(n.target) for n in piece)


def assemble(pieces, loose, cheap, returned, order) -> list[Region]:
    """Build a region from each piece, with the cheap values that it reads."""
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
        inputs = tuple(
            sorted({a for n in nodes for a in n.all_input_nodes if a not in inside}, key=order.get)
        )
        last = i == len(pieces) - 1
        outputs = tuple(
            n
            for n in nodes
            if (n in returned and (n in owner or last))
            or (n in owner and any(owner.get(u, i) > i for u in n.users))
        )
        regions.append(Region(nodes, inputs, outputs))
    return regions

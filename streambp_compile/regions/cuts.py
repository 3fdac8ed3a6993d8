"""Regions of the Dynamo graph: the traits that decide where it is cut, and wide values between regions.

Outputs that merely widen a small value (logits beside a loss) leave the last region for one of their own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from .. import internals
from ..dynamo.loops.tiles import cut_among
from ..dynamo.reading.modes import is_switch
from ..dynamo.reading.processes import spans_processes
from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, own_of, storage_of, wants_gradient
from ..dynamo.writes.written_inputs import written_storages
from ..passes.ir import Refusal, ancestors, bytes_of, unbound, where_of
from ..passes.rules import form_of
from ..passes.rules.facets import Form
from ..passes.rules.forward import Part, multiplies, mutated, part_of
from ..passes.split import Region, Traits

# An output is lazy if it is this many times wider than the inputs of its region. The second number is for
# graphs that end at a break, whose outputs the next graph reads: recording its operations, instead of
# compiling them, pays only behind a head, and only a head widens by so much.
WIDER, WIDER_THAN_LAYERS = 2, 8


def whole_graph(graph: Graph) -> tuple[Region, ...]:
    nodes = tuple(n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_switch(n))
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    return (Region(nodes, inputs, tuple(n for n in returned if n in inside)),)


def with_sizes(region: Region, graph: Graph) -> Region:
    """Add the inputs that a region needs to know every size of its values. Its own inputs may have a symbol
    in expressions alone (``2 s`` rows). Then an input of the graph that is this symbol, or has it as a
    size, is added."""
    read = list(map(fake_of, region.nodes))
    inputs = [n for n in region.inputs if n.op != "get_attr"]
    missing = unbound(handed(inputs), read)
    if not missing:
        return region
    more = [n for n in graph.find_nodes(op="placeholder") if n not in inputs and not wants_gradient(n)]
    for node in sorted(more, key=lambda n: isinstance(fake_of(n), torch.Tensor)):
        left = unbound(handed((*inputs, node)), read)
        if len(left) < len(missing):
            inputs.append(node)
            missing = left
    return replace(region, inputs=tuple(dict.fromkeys((*region.inputs, *inputs))))


def handed(inputs: Iterable[Node]) -> Iterator[object]:
    """Yield what inputs tell a region of sizes. Computed tensors are handed over dense, whatever strides they
    have in the graph."""
    for node in inputs:
        fake = fake_of(node)
        computed = node.op != "placeholder" and isinstance(fake, torch.Tensor)
        yield from fake.shape if computed else (fake,)


def traits_of(graph: Graph, axis: Axis | None) -> dict[Node, Traits]:
    pieces = cut_among(n for n in graph.output_node().all_input_nodes if len(n.users) == 1)
    found = {}
    for node in graph.nodes:
        fake = fake_of(node)
        tensor = isinstance(fake, torch.Tensor)
        plain = fake is None or isinstance(fake, (int, float, bool, torch.SymInt, torch.Size))
        # A matrix of tokens by tokens must never exist at full length, so it must not cross a cut.
        matrix = len(axis.marks.get(node, ())) > 1 and node not in axis.grids
        own = own_of(node)
        size = bytes_of(own) if tensor and not matrix else 0 if plain else -1
        found[node] = Traits(
            size,
            tensor and fake.requires_grad,
            node in axis.marks,
            tensor and fake.dtype.is_floating_point and fake.dim() >= 2,
            node in axis.mixing,
            node in axis.attending,
            node in axis.recomputable,
            storage_of(node),
            node in axis.moving and node not in pieces,
            node in axis.received,
        )
    return found


def widest_input(region: Region, axis: Axis) -> int:
    return max(
        (
            bytes_of(own_of(n))
            for n in region.inputs
            if n in axis.marks and fake_of(n).dtype.is_floating_point
        ),
        default=1 << 62,
    )


def lazy_regions(
    regions: Sequence[Region], axis: Axis, factor: int
) -> tuple[list[Region], dict[Node, Region]]:
    """Move outputs that merely widen a small value (logits) from the last region to regions of their own.
    They are at least ``factor`` times as wide as the region's widest input. Outputs that are the rows of such
    a value, piece by piece, have the region of that value.

    Logits beside a loss are moved whatever computes them. Logits alone are moved if a head computes
    them, but not if attention would run a second time. Values that several processes compute together
    stay: whether they are computed must not depend on what one process reads.
    """
    last = regions[-1]
    whole = {n: n for n in last.outputs} | {n: t.base for n, t in cut_among(last.outputs).items()}
    limit = factor * widest_input(last, axis)
    expanding = {n: w for n, w in whole.items() if w in axis.marks and bytes_of(own_of(w)) >= limit}
    alone = {w: narrowed(last, (w,)) for w in expanding.values()}
    # writes into buffers must run once, and now
    unfit = [w for w, part in alone.items() if written_storages(part) or spans_processes(part.nodes)]
    lazy = {n: alone[w] for n, w in expanding.items() if w not in unfit}
    nothing_else = len(lazy) == len(last.outputs)
    if not lazy or nothing_else and any(n in axis.mixing for part in lazy.values() for n in part.nodes):
        return list(regions), {}
    kept = tuple(n for n in last.outputs if n not in lazy)
    return [*regions[:-1], narrowed(last, kept, written_storages(last))], lazy


def wide_between(regions: Sequence[Region], axis: Axis) -> list[Node]:
    """Find values made in one region for a later one that are much wider than hidden states. They are wider
    than twice what is alive between layers, and than four times what attention returns (four residual
    streams are common). Copies of an input's rows are left out: the user has no way to avoid them."""
    last = {n: i for i, region in enumerate(regions) for n in region.inputs if n.op != "placeholder"}
    made = {n: i for i, region in enumerate(regions) for n in region.outputs}
    alive = [[n for n in made if made[n] <= i < last.get(n, 0)] for i in range(len(regions) - 1)]
    narrowest = min((sum(map(tensor_bytes, at)) for at in alive if at), default=0)
    limit = max(2 * narrowest, 4 * max(map(tensor_bytes, axis.mixing), default=0))
    wide = [n for n in made if n in last and last[n] > made[n] and tensor_bytes(n) > limit]
    return [n for n in wide if not copies_input(n)]


def copies_input(node: Node) -> bool:
    """Does a node copy, for each token, the rows that it reads of an input? The rows of a product, such as a
    frozen filter's, are no input."""
    while part_of(node) is Part.MERGE:
        node = node.args[0]
    return form_of(node) is Form.RECEPTIVE_FIELDS and not any(map(multiplies, ancestors([node.args[0]])))


def tensor_bytes(node: Node) -> int:
    fake = own_of(node)
    return bytes_of(fake) if isinstance(fake, torch.Tensor) else 0


def narrowed(region: Region, outputs: tuple[Node, ...], storages: Container[int] = ()) -> Region:
    """Return the part of a region that some of its outputs need, or that writes into some storages."""
    inside, needed, stack = set(region.nodes), set(), list(outputs)
    writers: dict[Node | None, list[Node]] = {}
    for node in region.nodes:
        writers.setdefault(mutated(node), []).append(node)
    for target, writing in writers.items():
        stack += writing if target is not None and storage_of(target) in storages else []
    while stack:
        node = stack.pop()
        if node in inside and node not in needed:
            needed.add(node)
            stack += [*node.all_input_nodes, *writers.get(node, ())]
    nodes = tuple(n for n in region.nodes if n in needed)
    read = {a for n in nodes for a in n.all_input_nodes}
    return Region(nodes, tuple(n for n in region.inputs if n in read), outputs)


def subclass_between(regions: Sequence[Region]) -> Refusal | None:
    """Refuse values of a tensor subclass between regions, because regions are compiled for plain tensors.
    Subclasses as weights are allowed. Returns None if there are no such values."""
    for node in (n for region in regions for n in region.outputs):
        value = fake_of(node)
        if internals.is_traceable_wrapper_subclass(value) and not internals.is_sharded(value):
            return Refusal(
                str(node),
                f"The hidden states are {type(fake_of(node)).__name__}, a tensor subclass",
                "Use tensor subclasses for weights only, and plain tensors (to_local() of a DTensor) "
                "between layers",
                where_of(node),
            )
    return None

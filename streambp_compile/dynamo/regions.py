"""Regions of the Dynamo graph, before and after the cut: what may be cut, what each piece is made of, and
which are the same.

Outputs that merely widen a small value (logits beside a loss) leave the last region for one of their own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..passes.ir import Layout, Refusal, bytes_of, is_view, where_of
from ..passes.rules.forward import mutated, slice_of
from ..passes.split import Region, Traits
from .token_axes import Axis
from .values import fake_of, is_parameter, storage_of

# An output is lazy if it is this many times wider than what its region reads. What leaves a graph at a break
# is read by the graph that follows: only a head widens so much that an operation after it had better be
# recorded than compiled.
WIDER, WIDER_THAN_LAYERS = 2, 8


def is_switch(node: Node) -> bool:
    """Does a node only switch a mode, or count a use of torch's?"""
    return node.op == "call_function" and node.target in internals.MODE_SWITCHES


def early_views(graph: Graph, axis: Axis | None) -> tuple[Node, ...]:
    """Views of inputs that are taken before the regions.

    ``weight[3]`` of weights that all layers have in one tensor: regions are then equal but for which weight
    they read. And ``table[:, :tokens]`` of a table that is as long as the longest sequence, where the number
    of tokens is a symbol: only this part has a row for each token. And ``table[:tokens, :tokens]`` of a
    weight for each pair of positions: only this part of its gradient has a row and a column for each token.
    Views that the model takes without gradients stay where they are.
    """
    found: dict[Node, None] = {}
    detached, with_gradients = set[Node](), True
    for node in graph.nodes:
        if is_gradient_switch(node):
            with_gradients = bool(node.args[0])
        detached |= set() if with_gradients else {node}
        if is_item_of_weight(node) or is_part_of_table(node, axis) or is_part_of_pairs(node, axis):
            steps = steps_from_input(node)
            seen = {*steps, *(a for s in steps for a in s.all_input_nodes)}
            if detached.isdisjoint(steps) and not any(
                mutated(user) in seen for s in seen for user in s.users
            ):
                found.update(dict.fromkeys(steps))
    return tuple(found)


def steps_from_input(node: Node) -> list[Node]:
    """The views that lead from an input to this one, which included; none if anything else does."""
    steps: list[Node] = []
    while node.op == "call_function" and is_view(node):
        steps.insert(0, node)
        if any(n.op != "placeholder" for n in node.all_input_nodes[1:]):
            return []
        node = node.args[0]
    return steps if node.op == "placeholder" else []


def is_item_of_weight(node: Node) -> bool:
    weight = node.args[0] if node.args else None
    if not isinstance(weight, Node) or weight.op != "placeholder" or not is_parameter(fake_of(weight)):
        return False
    part = slice_of(node, fake_of(weight).dim()) if isinstance(fake_of(node), torch.Tensor) else None
    fits = part is not None and part.lost and part.dim == 0 and isinstance(part.start, int)
    return fits and fake_of(weight).requires_grad == fake_of(node).requires_grad


def is_part_of_table(node: Node, axis: Axis | None) -> bool:
    """Are these the rows of tokens of a value with a constant number of rows, and the tokens a symbol?"""
    table, marks = node.args[0] if node.args else None, axis.marks.get(node, ()) if axis else ()
    if len(marks) != 1 or not isinstance(table, Node) or not isinstance(fake_of(table), torch.Tensor):
        return False
    part = slice_of(node, fake_of(table).dim())
    if part is None or part.lost or part.dim != marks[0].dim:
        return False
    rows, tokens = (fake_of(n).shape[part.dim] for n in (table, node))
    return isinstance(rows, int) and not isinstance(tokens, int)


def is_part_of_pairs(node: Node, axis: Axis | None) -> bool:
    """Are these the rows, or the columns, of tokens of a weight that has an entry for each pair of
    positions?"""
    table, marks = node.args[0] if node.args else None, axis.marks.get(node, ()) if axis else ()
    if len(marks) != 2 or not isinstance(table, Node) or not wants_gradient(table):
        return False
    part = slice_of(node, fake_of(table).dim())
    if part is None or part.lost or part.dim not in {mark.dim for mark in marks}:
        return False
    steps = steps_from_input(node)
    return bool(steps) and is_parameter(fake_of(steps[0].args[0])) and all(map(wants_gradient, steps))


def weight_updates(graph: Graph) -> tuple[Node, ...]:
    """``weight.data.clamp_(-1, 1)`` before anything reads the weight, and the alias that it writes through.

    They run once, before all regions: whatever a region computes again reads what it read before.
    """
    found: list[Node] = []
    read: set[int | None] = set()
    for node in graph.nodes:
        target = mutated(node)
        alias = target is not None and is_alias_alone(target, node)
        weight = target.args[0] if target is not None and alias else target
        if (
            weight is not None
            and weight.op == "placeholder"
            and is_parameter(fake_of(weight))
            and not node.users
            and node.all_input_nodes == [target]
            and storage_of(weight) not in read
        ):
            found += [target, node] if alias else [node]
        elif not any(is_alias_alone(node, user) for user in node.users):
            read |= {storage_of(a) for a in node.all_input_nodes}
    return tuple(found)


def is_alias_alone(node: Node, writer: Node) -> bool:
    """Is a value another one's memory without its gradient, made for one writer alone (``weight.data``)?"""
    source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    if source is None or list(node.users) != [writer] or mutated(writer) is not node or node.kwargs:
        return False
    same = storage_of(node) is not None and storage_of(node) == storage_of(source)
    return same and not wants_gradient(node) and same_layout(fake_of(node), fake_of(source))


def whole_graph(graph: Graph) -> tuple[Region, ...]:
    nodes = tuple(n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_switch(n))
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    return (Region(nodes, inputs, tuple(n for n in returned if n in inside)),)


def traits_of(graph: Graph, axis: Axis | None) -> dict[Node, Traits]:
    found = {}
    for node in graph.nodes:
        fake = fake_of(node)
        tensor = isinstance(fake, torch.Tensor)
        plain = fake is None or isinstance(fake, (int, float, bool, torch.SymInt, torch.Size))
        matrix = (
            len(axis.marks.get(node, ())) > 1
        )  # of tokens by tokens: never to exist, so never to cross a cut
        size = bytes_of(fake) if tensor and not matrix else 0 if plain else -1
        found[node] = Traits(
            size,
            tensor and fake.requires_grad,
            node in axis.marks,
            tensor and fake.dtype.is_floating_point and fake.dim() >= 2,
            node in axis.mixing,
            node in axis.attending,
            node in axis.recomputable,
            storage_of(node),
            node in axis.moving,
        )
    return found


def widest_input(region: Region, axis: Axis) -> int:
    return max(
        (
            bytes_of(fake_of(n))
            for n in region.inputs
            if n in axis.marks and fake_of(n).dtype.is_floating_point
        ),
        default=1 << 62,
    )


def lazy_regions(
    regions: Sequence[Region], axis: Axis, factor: int
) -> tuple[list[Region], dict[Node, Region]]:
    """Take outputs that merely widen a small value (logits), by this factor at least, out of the last region;
    each gets a region of its own.

    Logits beside a loss go whatever they are made of. Logits alone go where a head makes them, not where
    attention would be done again.
    """
    last = regions[-1]
    expanding = [
        n
        for n in last.outputs
        if n in axis.marks and bytes_of(fake_of(n)) >= factor * widest_input(last, axis)
    ]
    # what writes into buffers happens once, and now
    lazy = [n for n in expanding if not written_storages(narrowed(last, (n,)))]
    nothing_else = len(lazy) == len(last.outputs)
    if not lazy or nothing_else and any(n in axis.mixing for n in narrowed(last, tuple(lazy)).nodes):
        return list(regions), {}
    kept = tuple(n for n in last.outputs if n not in lazy)
    return [*regions[:-1], narrowed(last, kept, written_storages(last))], {
        n: narrowed(last, (n,)) for n in lazy
    }


def wide_between(regions: Sequence[Region], axis: Axis) -> list[Node]:
    """Values made in one region for a later one although they are much wider than hidden states.

    That is wider than twice what is alive between layers, and than four times what attention returns (four
    residual streams are common).
    """
    last = {n: i for i, region in enumerate(regions) for n in region.inputs if n.op != "placeholder"}
    made = {n: i for i, region in enumerate(regions) for n in region.outputs}
    alive = [[n for n in made if made[n] <= i < last.get(n, 0)] for i in range(len(regions) - 1)]
    narrowest = min((sum(map(tensor_bytes, at)) for at in alive if at), default=0)
    limit = max(2 * narrowest, 4 * max(map(tensor_bytes, axis.mixing), default=0))
    return [n for n in made if n in last and last[n] > made[n] and tensor_bytes(n) > limit]


def tensor_bytes(node: Node) -> int:
    fake = fake_of(node)
    return bytes_of(fake) if isinstance(fake, torch.Tensor) else 0


def narrowed(region: Region, outputs: tuple[Node, ...], storages: Container[int] = ()) -> Region:
    """The part of a region that some of its outputs need, or that writes into some storages."""
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
    """Why values of a tensor subclass cannot go from region to region: regions are compiled for plain tensors
    (subclasses as weights are)."""
    for node in (n for region in regions for n in region.outputs):
        if internals.is_traceable_wrapper_subclass(fake_of(node)):
            return Refusal(
                str(node),
                f"The hidden states are {type(fake_of(node)).__name__}, a tensor subclass",
                "Use tensor subclasses for weights only, and plain tensors (to_local() of a DTensor) "
                "between layers",
                where_of(node),
            )
    return None


def written_storages(region: Region) -> set[int]:
    """Memory of a region's inputs that it writes into (an average kept in a buffer, a weight clamped in
    place)."""
    given = {storage_of(n) for n in region.inputs} - {None}
    return {storage_of(target) for target in map(mutated, region.nodes) if target is not None} & given


def written_buffers(region: Region) -> tuple[Node, ...]:
    """Inputs without gradients that a region writes into, whose new contents it returns after its own
    outputs.

    The region works on a copy, and the chain writes the contents back. Written in place, what autograd keeps
    for the backward would be
    another value by then. Memory that also comes in as another input, or goes out as a view of other sizes,
    is left to AOTAutograd.
    """
    storages = written_storages(region)

    def has_memory_of_its_own(node: Node) -> bool:
        views = [
            n
            for n in (*region.inputs, *region.outputs)
            if n is not node and storage_of(n) == storage_of(node)
        ]
        return all(n not in region.inputs and same_layout(fake_of(n), fake_of(node)) for n in views)

    return tuple(
        n
        for n in region.inputs
        if n.op == "placeholder"
        and storage_of(n) in storages
        and not wants_gradient(n)
        and is_dense(fake_of(n))
        and has_memory_of_its_own(n)
    )


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


def build_region(
    module: GraphModule, region: Region, views: Container[Node] = ()
) -> tuple[GraphModule, list[object]]:
    """A module of its own for a region, with the modes (autocast, gradients) that held at its nodes replayed
    around them.

    views  views of inputs that are taken before all regions
    """
    graph = Graph()
    values: dict[Node, Node] = {}
    inputs, storages = [], written_storages(region)
    for i, node in enumerate(region.inputs):
        if node.op == "get_attr":
            continue
        values[node] = graph.placeholder(f"in_{i}")
        given = node.op == "placeholder" or node in views
        written = storage_of(node) in storages and wants_gradient(node)
        inputs.append(fresh(fake_of(node), computed=not given, written=written))
        values[node].meta["example_value"] = inputs[-1]
    buffers = written_buffers(region)
    values.update({n: graph.call_method("clone", (values[n],)) for n in buffers})
    inside, switches = set(region.nodes), Switches(graph)
    for node in module.graph.nodes:
        if is_switch(node):
            switches.meet(node)
        elif node.op == "get_attr" and any(u in inside for u in node.users):
            values[node] = graph.get_attr(node.target)
        elif node in inside:
            switches.write()
            values[node] = graph.node_copy(node, lambda a: values[a])
    switches.close()
    graph.output((*unaliased(graph, values, region), *(values[n] for n in buffers)))
    return GraphModule(module, graph), inputs


class Switches:
    """Writes into a region's graph the modes (autocast, gradients) that hold at each of its nodes in the
    whole graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.active: list[Node] = []  # nodes of the whole graph that switched a mode which still holds
        self.replayed: list[tuple[Node, Node]] = []  # those that hold in the region's graph, and their copies

    def meet(self, node: Node) -> None:
        """Pass a switch of the whole graph."""
        if is_gradient_switch(node):
            self.active = [s for s in self.active if not is_gradient_switch(s)]
            self.active += [] if node.args[0] else [node]
        elif node.target is internals.enter_autocast:
            self.active.append(node)
        elif node.target is internals.exit_autocast:
            self.active = [s for s in self.active if s is not node.args[0]]

    def write(self) -> None:
        """Close what no longer holds, open what now does."""
        common = 0
        while (
            common < min(len(self.active), len(self.replayed))
            and self.replayed[common][0] is self.active[common]
        ):
            common += 1
        while len(self.replayed) > common:
            self.undo(*self.replayed.pop())
        for switch in self.active[common:]:
            copy = self.graph.call_function(switch.target, switch.args, switch.kwargs)
            self.replayed.append((switch, copy))

    def undo(self, switch: Node, copy: Node) -> None:
        if is_gradient_switch(switch):
            before = next((s.args[0] for s, _ in reversed(self.replayed) if is_gradient_switch(s)), True)
            self.graph.call_function(internals.set_grad_enabled, (before,))
        else:
            self.graph.call_function(internals.exit_autocast, (copy,))

    def close(self) -> None:
        self.active = []
        self.write()


def is_gradient_switch(node: Node) -> bool:
    return node.target is internals.set_grad_enabled


def unaliased(graph: Graph, values: dict[Node, Node], region: Region) -> list[Node]:
    """The outputs of a region, copied where they share memory with its inputs or one another: each is to have
    a gradient of its own.

    And where another region reads a part of something wider: between regions all values are dense, as sweeps
    write them.
    """
    shared, inside = {storage_of(n) for n in region.inputs if wants_gradient(n)}, set(region.nodes)
    buffers = {storage_of(n) for n in written_buffers(region)}
    shared |= buffers
    parted = buffers | views_returned(region)
    results = []
    for node in region.outputs:
        storage = storage_of(node) if wants_gradient(node) or storage_of(node) in parted else None
        read = any(u not in inside and u.op != "output" for u in node.users)
        if read and not is_dense(fake_of(node)):
            results.append(graph.call_method("contiguous", (values[node],)))
        else:
            results.append(
                graph.call_method("clone", (values[node],))
                if storage is not None and storage in shared
                else values[node]
            )
            shared.add(storage)
    return results


def views_returned(region: Region) -> set[int | None]:
    """Memory of which differentiable outputs are views, and no output is the whole.

    If another output shared it, even a detached one, AOTAutograd would return the whole too, and ask for its
    gradient in place of theirs.
    """
    owners: dict[int | None, Node] = {}
    for node in region.nodes:
        owners.setdefault(storage_of(node), node)
    return {
        storage_of(n) for n in region.outputs if wants_gradient(n) and owners.get(storage_of(n)) is not n
    } - {storage_of(n) for n in region.outputs if owners.get(storage_of(n)) is n}


def is_dense(fake: object) -> bool:
    return not isinstance(fake, torch.Tensor) or Layout.of(fake) is not None


def wants_gradient(node: Node) -> bool:
    return isinstance(fake_of(node), torch.Tensor) and fake_of(node).requires_grad


def fresh(fake: object, computed: bool, written: bool = False):
    """A leaf of the same description: a region's inputs have no history. What another region computes
    is dense.

    written  the region writes into it, and gradients go through that: it is no leaf, because AOTAutograd
             hides from autograd what is written into one
    """
    if not isinstance(fake, torch.Tensor):
        return fake
    dense = is_dense(fake) or not computed
    if isinstance(fake, torch.nn.Parameter) or dense and fake.is_leaf and not written:
        return fake
    with fake.fake_mode, torch.no_grad():
        leaf = (
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            if dense
            else fake.contiguous()
        )
    leaf.requires_grad_(fake.requires_grad)
    if not written:
        return leaf
    with fake.fake_mode, torch.enable_grad():
        return leaf.clone()


def region_text(module: GraphModule, inputs: Sequence[object], axis: Axis | None, region: Region) -> str:
    """Everything that a region's compilation depends on; equal texts, equal artifacts."""
    index: dict[Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        index[node] = f"%{len(index)}"
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: index[n])
        target = (
            node.target
            if node.op in ("get_attr", "call_method") or isinstance(node.target, torch._ops.OpOverload)
            else torch.typename(node.target) + getattr(node.target, "__name__", str(node.target))
        )
        call = f"{target} {args}" if node.op != "placeholder" else ""
        lines.append(f"{index[node]} {node.op} {call}")
    for value, node in zip(inputs, (n for n in region.inputs if n.op != "get_attr")):
        grad = isinstance(value, torch.Tensor) and value.requires_grad
        lines.append(f"{internals.describe(value)} {grad} {axis.marks.get(node) if axis else None}")
    lines.append(str(list(map(wants_gradient, region.outputs))))
    return "\n".join(lines)

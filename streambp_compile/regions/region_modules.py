"""A region as a module of its own, and the text that identifies equal regions."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..dynamo.reading.modes import Switches, is_switch
from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, storage_of, wants_gradient
from ..dynamo.writes.written_inputs import is_dense, written_buffers, written_storages
from ..passes.split import Region


def build_region(
    module: GraphModule, region: Region, views: Container[Node] = ()
) -> tuple[GraphModule, list[object]]:
    """Build a module for a region, which replays the modes (autocast, gradients) of its nodes. Returns the
    module and its inputs as fake values.

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


def unaliased(graph: Graph, values: dict[Node, Node], region: Region) -> list[Node]:
    """Return the outputs of a region, copied where they share memory with its inputs or one another. Each
    needs a gradient of its own. An output is also copied where another region reads a part of something
    wider: between regions all values are dense, as sweeps write them."""
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
    """Find storages of which differentiable outputs are views, and no output is the whole. If another output
    shared such a storage, even a detached one, AOTAutograd would return the whole too, and ask for its
    gradient in place of theirs."""
    owners: dict[int | None, Node] = {}
    for node in region.nodes:
        owners.setdefault(storage_of(node), node)
    return {
        storage_of(n) for n in region.outputs if wants_gradient(n) and owners.get(storage_of(n)) is not n
    } - {storage_of(n) for n in region.outputs if owners.get(storage_of(n)) is n}


def fresh(fake: object, computed: bool, written: bool = False):
    """Create a leaf with the properties of a fake tensor: a region's inputs have no history.

    computed  another region computes it, and returns it dense
    written   the region writes into it, and gradients go through that: it is no leaf, because AOTAutograd
              hides writes into leaves from autograd
    """
    if not isinstance(fake, torch.Tensor):
        return fake
    if internals.is_sharded(fake):
        local = fresh(internals.local_of(fake).detach(), computed, written)
        return internals.with_local(fake, local)
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
    """Describe all that a region's compilation depends on. Equal texts mean equal artifacts."""
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

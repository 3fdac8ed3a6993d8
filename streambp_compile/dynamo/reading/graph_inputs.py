"""The inputs of Dynamo's graph: every tensor that it reads becomes one, and has a fake tensor.

The states of an optimizer, and weights of graphs that Dynamo did not make, are attributes of the graph
module. A graph that reads attributes would give real tensors to its tracers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from ... import internals
from .values import fake_of


def attributes_as_inputs(module: GraphModule) -> list[torch.Tensor]:
    """Make each tensor that a graph reads as an attribute its last input. Returns these tensors in order."""
    graph, found = module.graph, dict[int, Node]()
    tensors: list[torch.Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(module)
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in found:
            last = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(last):
                found[id(value)] = graph.placeholder(f"attribute_{len(graph.find_nodes(op='placeholder'))}")
            found[id(value)].meta = dict(node.meta)
            tensors.append(value)
        node.replace_all_uses_with(found[id(value)])
        graph.erase_node(node)
    if tensors:
        module.recompile()
    return tensors


def meshes_as_attributes(module: GraphModule) -> None:
    """Replace each input that is a device mesh by an attribute. Dynamo passes meshes as inputs, and guards
    them. A tracer of a part of the graph then gets the mesh itself."""
    graph = module.graph
    for node in graph.find_nodes(op="placeholder"):
        mesh = internals.mesh_of(fake_of(node))
        if mesh is None:
            continue
        name, node.meta["example_value"] = f"mesh_{node.name}", mesh
        setattr(module, name, mesh)
        for user in list(node.users):
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.create_node("get_attr", name))
    module.recompile()


def with_attributes(call: Callable, tensors: Sequence[torch.Tensor]) -> Callable:
    """Wrap a call so that it passes these tensors after its inputs."""
    return (lambda *args: call(*args, *tensors)) if tensors else call


def fakes_of(placeholders: Sequence[Node], values: Sequence[object]) -> list[object]:
    """Return the inputs as fake tensors. Dynamo's own are kept, and other inputs get new ones."""
    mode = internals.detect_fake_mode([fake_of(n) for n in placeholders]) or internals.FakeTensorMode()
    for node, value in zip(placeholders, values):
        if fake_of(node) is None:
            node.meta["example_value"] = internals.as_fake(mode, value)
    return [fake_of(n) for n in placeholders]

"""Higher-order operators: activation checkpoints and nested compile regions are inlined, a vmap becomes one
node."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from ... import internals
from ...passes.ir import outputs_of
from ..reading.modes import is_switch
from ..reading.values import fake_of


def inline_wrappers(module: GraphModule) -> GraphModule:
    """Replace activation checkpoints and nested compile regions by the graphs that they wrap. This package
    plans recomputation itself, and finds equal layers without the user's marks."""
    shared = bool(module.graph.find_nodes(op="call_function", target=NESTED))
    while found := [n for n in module.graph.nodes if wrapped_operands(n) is not None]:
        for node in found:
            inline_wrapper(module, node)
    if shared:
        compute_fakes(module)
    module.recompile()
    return module


NESTED = torch.ops.higher_order.invoke_subgraph


def wrapped_operands(node: Node) -> tuple | None:
    """Return the operands that a wrapper passes to its graph, which is its first argument. None for other
    nodes. A nested compile region also has a name."""
    if node.target is NESTED:
        return node.args[2:]
    return node.args[1:] if node.target is torch.ops.higher_order.tag_activation_checkpoint else None


def inline_wrapper(module: GraphModule, node: Node) -> None:
    """Replace one wrapper by the nodes of its graph."""
    name, inner = node.args[0].target, getattr(module, node.args[0].target)
    placeholders = inner.graph.find_nodes(op="placeholder")
    values: dict[Node, object] = dict(zip(placeholders, wrapped_operands(node)))
    with module.graph.inserting_before(node):
        for n in inner.graph.nodes:
            if n.op == "get_attr":
                attribute = f"{name}_{n.target}".replace(".", "_")
                setattr(module, attribute, getattr(inner, n.target))
                values[n] = module.graph.get_attr(attribute)
            elif n.op not in ("placeholder", "output"):
                values[n] = module.graph.node_copy(n, values.get)
            if n.op not in ("placeholder", "output"):
                values[n].meta = dict(n.meta)
    results = outputs_of(inner)
    for user in list(node.users):
        user.replace_all_uses_with(values[results[user.args[1]]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def compute_fakes(module: GraphModule) -> None:
    """Recompute the fake tensors of a graph. A graph that several calls share has those of one call, so
    different layers would seem to share memory."""

    def given(operand: Node) -> object:
        value = getattr(module, operand.target) if operand.op == "get_attr" else None
        return fake_of(operand) if value is None or isinstance(value, torch.Tensor) else value

    known = [fake_of(n) for n in module.graph.nodes]
    with internals.replaying(module) as replay, internals.as_these(known):
        for node in module.graph.nodes:
            if is_switch(node):
                replay(node)
            elif node.op in ("call_function", "call_method") and gives_tensors(fake_of(node)):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given)
                called = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
                node.meta["example_value"] = called(*args, **kwargs)


def gives_tensors(value: object) -> bool:
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (tuple, list)) else [value]))


def has_other_transforms(graph: Graph) -> bool:
    """Does a graph contain a transform that `fold_maps` cannot fold? ``jvp`` computes tangents beside values,
    and the backward of ``vjp`` runs later than its forward."""
    depth = 0
    for node in graph.nodes:
        depth += internals.transform_step(node)
        if internals.is_other_transform(node) or node.target is internals.ask_for_gradients and not depth:
            return True
    return False


def fold_maps(module: GraphModule) -> GraphModule:
    """Turn each ``torch.vmap`` and ``torch.func.grad`` into a submodule, the same one for equal transforms.
    Its inner values have a hidden dimension, or a backward of their own, so no cut may separate them."""
    known: dict[str, str] = {}
    span: list[Node] = []
    depth = 0
    for node in list(module.graph.nodes):
        if node.target in internals.FORBIDS_HOOKS:
            module.graph.erase_node(node)
            continue
        depth += internals.transform_step(node)
        if depth or span:
            span.append(node)
        if span and not depth:
            fold(module, span, known)
            span = []
    return module


def fold(module: GraphModule, span: Sequence[Node], known: dict[str, str]) -> None:
    """Replace nodes by a call of a submodule that contains them; ``known`` maps the code of submodules to
    their names."""
    inside, graph, values = set(span), Graph(), {}
    inputs = list(dict.fromkeys(a for n in span for a in n.all_input_nodes if a not in inside))
    outputs = [n for n in span if any(u not in inside for u in n.users)]
    for i, node in enumerate(inputs):
        values[node] = graph.placeholder(f"in_{i}")
    for i, node in enumerate(span):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
        values[node] = graph.create_node(
            node.op, node.target, args, kwargs, name=f"n_{i}"
        )  # equal names, so that equal spans have equal code
    graph.output(tuple(values[n] for n in outputs))
    inner = GraphModule(module, graph)
    name = known.setdefault(inner.code, f"vmap_{len(known)}")
    setattr(module, name, inner)
    with module.graph.inserting_after(span[-1]):
        call = module.graph.call_module(name, tuple(inputs))
    call.meta = dict(
        next((n for n in span if "stack_trace" in n.meta), span[0]).meta,
        example_value=tuple(map(fake_of, outputs)),
    )
    with module.graph.inserting_after(call):
        for i, node in reversed(list(enumerate(outputs))):
            result = module.graph.call_function(operator.getitem, (call, i))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(span):
        module.graph.erase_node(node)

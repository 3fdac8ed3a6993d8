"""Graphs for tests: one node by hand, a traced function, a region's joint graph, and a region streamed
without Inductor."""

from __future__ import annotations

import operator

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from streambp_compile import internals
from streambp_compile.passes.ir import Mark, outputs_of
from streambp_compile.passes.planning.choices import Choices
from streambp_compile.pipeline import Machine, StreamedRegion, stream
from streambp_compile.regions.joint_regions import Ends, JointInputs


def single(target, args, kwargs) -> tuple[Graph, Node]:
    """A graph of one call; its tensors are placeholders, and every node bears its real value."""
    graph = Graph()

    def placed(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = arg
        return node

    nodes, named = tree_map(placed, args), tree_map(placed, kwargs)
    call = graph.call_function(target, tuple(nodes), dict(named))
    value = target(*args, **kwargs)
    call.meta["val"] = tuple(value) if isinstance(value, (tuple, list)) else value
    return graph, call


class Written:
    """A graph written down node by node: every node has the name that it is given here, and bears its real
    value."""

    def __init__(self):
        self.graph = Graph()

    def given(self, name: str, value: torch.Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def __call__(self, name: str, target, *args, **kwargs) -> Node:
        value = target(*tree_map(value_of, args), **tree_map(value_of, kwargs))
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = value
        return node


def value_of(arg: object) -> object:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def causal_layer(causal: bool = True) -> tuple[Written, dict[Node, tuple[Mark, ...]], Node, tuple[Node, ...]]:
    """The joint graph of a layer of five tokens: ``y = x + attention(x, x w, x w)``.

    Returns the graph, the seeds of its tokens, its output and its gradients (of x, of w).
    """
    write, aten, streambp = Written(), torch.ops.aten, torch.ops.streambp
    x, w = write.given("x", torch.randn(2, 5, 8)), write.given("w", torch.randn(8, 8))
    dy = write.given("dy", torch.randn(2, 5, 8))
    flat = write("flat", aten.view.default, x, [10, 8])
    projected = write("projected", aten.mm.default, flat, w)
    keys = write("keys", aten.view.default, projected, [2, 1, 5, 8])
    query = write("query", aten.unsqueeze.default, x, 1)
    both = write("both", streambp.attention.default, query, keys, keys, None, causal, 1.0, 0)
    out, lse = write("out", operator.getitem, both, 0), write("lse", operator.getitem, both, 1)
    y = write("y", aten.add.Tensor, x, write("mixed", aten.squeeze.dim, out, 1))
    dout = write("dout", aten.unsqueeze.default, dy, 1)
    grads = write(
        "grads", streambp.attention_backward.default, dout, query, keys, keys, out, lse, None, causal, 1.0
    )
    dquery, dk, dv = (
        write(name, operator.getitem, grads, i) for i, name in enumerate(("dquery", "dk", "dv"))
    )
    dprojected = write("dprojected", aten.reshape.default, write("dkeys", aten.add.Tensor, dk, dv), [10, 8])
    dw = write("dw", aten.mm.default, write("rows_first", aten.permute.default, flat, [1, 0]), dprojected)
    dflat = write("dflat", aten.mm.default, dprojected, write("turned", aten.permute.default, w, [1, 0]))
    beside = write("beside", aten.add.Tensor, dy, write("of_query", aten.squeeze.dim, dquery, 1))
    dx = write("dx", aten.add.Tensor, beside, write("of_keys", aten.view.default, dflat, [2, 5, 8]))
    write.graph.output((y, dx, dw))
    return write, {x: (Mark(1),), dy: (Mark(1),)}, y, (dx, dw)


def traced(function, *inputs) -> GraphModule:
    """The ATen graph of a function in the spelling of the rules, with fake values."""
    return make_fx(function, decomposition_table=internals.decompositions(), tracing_mode="fake")(*inputs)


def joint_of(function, *inputs, dynamic: bool = False) -> tuple[GraphModule, int, int]:
    """AOTAutograd's joint graph of a function, with its numbers of forward outputs and tangents.

    dynamic  sizes of inputs are symbols
    """
    found = {}

    def keep(joint, joint_inputs, *, num_fwd_outputs, **kwargs):
        found.update(joint=joint, outputs=num_fwd_outputs, tangents=len(joint_inputs[1]))
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    def as_is(module, _inputs):
        return module

    aot_function(
        function,
        as_is,
        as_is,
        partition_fn=keep,
        decompositions=internals.decompositions(),
        dynamic=dynamic,
    )(*inputs)
    return found["joint"], found["outputs"], found["tangents"]


def eagerly(body, _chunk):
    """Stands in for Inductor: a chunk body run node by node."""
    return lambda args: body.graph(*args)


def streamed(function, inputs, marks: dict[int, int], length: int, chunk: int = 3) -> StreamedRegion:
    """A function of leaves, streamed with gradients. ``marks``: input → the dimension that carries tokens."""
    joint, outputs, tangents = joint_of(function, *inputs)
    return stream(
        joint,
        Ends(outputs, range(tangents)),
        JointInputs(length, {i: (Mark(d),) for i, d in marks.items()}),
        Choices(chunk),
        Machine(eagerly),
    )


def run_region(region: StreamedRegion, inputs, tangents) -> list[torch.Tensor]:
    """Forward outputs and input gradients of a streamed region, in the order of its joint graph."""
    given = dict(zip(region.placeholders, (i.detach() for i in inputs)))
    outputs = outputs_of(region.joint)
    if region.fused:
        given.update(zip(region.tangents, tangents))
        made = dict(zip(region.forward.program.outputs, region.forward.runner(given)))
    else:
        made = dict(zip(region.forward.program.outputs, region.forward.runner(dict(given))))
        saved = {n: made[n] if n in made else given[n] for n in region.saved}
        made.update(
            zip(
                region.backward.program.outputs,
                region.backward.runner({**saved, **dict(zip(region.tangents, tangents))}),
            )
        )
    return [made[o] if isinstance(o, Node) else o for o in outputs]

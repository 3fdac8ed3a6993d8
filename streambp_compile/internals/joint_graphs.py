"""AOTAutograd: joint graphs, and the partition of those that do not stream.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes

from ..passes.ir import draws_random
from .dtensors import mesh_of
from .dynamo import OneAtATime
from .inductor import rewrite


def keep_inputs_partition(joint: GraphModule, inputs, *, num_fwd_outputs: int, once: bool = False, **kwargs):
    """Keep only inputs and recompute everything else, or use Inductor's min-cut partition.

    The latter is used where random numbers are drawn, where there are no tangents, and with ``once``.

    once  some operation must not run a second time: a write into inputs, or an exchange that other
          processes run once
    """
    if any(map(draws_random, joint.graph.nodes)) or not inputs[1] or once:
        rewrite(joint)  # seeds are drawn once, so that recomputation sees the same bits
        with sizes_read(len(inputs[0])):
            return min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
            )
    primals = [n for n in joint.graph.nodes if n.op == "placeholder"][: len(inputs[0])]
    tensors = [n for n in primals if isinstance(n.meta.get("val"), torch.Tensor)]
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    meshes = [n for n in primals if mesh_of(n.meta.get("val")) is not None]
    more = {"saved_opaque_nodes": meshes} if meshes else {}  # which torch 2.11 does not know
    with sizes_read(len(inputs[0])):
        return _extract_fwd_bwd_modules(joint, tensors, symbols, num_fwd_outputs=num_fwd_outputs, **more)


def sizes_read(primals: int) -> contextlib.AbstractContextManager:
    """Let a partition keep for the backward each symbol that a size of the first inputs is. It looks for an
    input that is the symbol, as Dynamo passes it. A region may get tensors alone, and its backward may read
    only those whose sizes are made of the symbol."""

    def bindings(graph: Graph) -> dict[object, Node]:
        inputs = graph.find_nodes(op="placeholder")
        found, last = find_symbol_binding_fx_nodes(graph), inputs[-1]
        values = ((n, n.meta.get("val")) for n in inputs[:primals])
        sizes = ((n, d, s) for n, v in values if isinstance(v, torch.Tensor) for d, s in enumerate(v.shape))
        for tensor, dim, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                with graph.inserting_after(last):
                    last = graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
                last.meta["val"], found[size.node.expr] = size, last
        return found

    return mock.patch.object(partitioners, "find_symbol_binding_fx_nodes", bindings)


def read_meshes_of_primals(joint: GraphModule, tangents: int) -> None:
    """Read each mesh of devices from an input of the forward, if the forward has it. A tangent that is a
    DTensor has its mesh as an input of its own, and AOTAutograd treats equal meshes as one value, even one
    that the forward returns."""
    inputs = joint.graph.find_nodes(op="placeholder")
    given = inputs[: len(inputs) - tangents]
    for node in inputs[len(given) :]:
        mesh = mesh_of(node.meta.get("val"))
        same = [n for n in given if mesh is not None and mesh_of(n.meta.get("val")) == mesh]
        if same:
            node.replace_all_uses_with(same[0])


@contextlib.contextmanager
def of_regions() -> Iterator[None]:
    """Set AOTAutograd's options for regions. Tokens that order effects are not among inputs and outputs. No
    kept value may be overwritten by the backward, because ``retain_graph=True`` lets another backward read
    it."""
    with (
        functorch_config.patch(unlift_effect_tokens=True),
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
    ):
        yield


@contextlib.contextmanager
def tracing_of(mode: FakeTensorMode | None) -> Iterator[None]:
    """Enter a tracing context for compiling outside of Dynamo with its fake tensors, one thread at a time."""
    with OneAtATime(), tracing(TracingContext(mode)):
        yield

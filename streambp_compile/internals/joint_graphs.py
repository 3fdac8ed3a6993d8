"""AOTAutograd: joint graphs, and the partition of those that do not stream.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from ..passes.ir import draws_random
from .dtensors import mesh_of
from .dynamo import OneAtATime
from .inductor import rewrite


def keep_inputs_partition(joint: GraphModule, inputs, *, num_fwd_outputs: int, once: bool = False, **kwargs):
    """Keep only inputs and recompute all of the rest, unless random numbers are drawn (then as Inductor
    would).

    once  something must not run a second time: writes into inputs, exchanges that other processes run once
    """
    if any(map(draws_random, joint.graph.nodes)) or not inputs[1] or once:
        rewrite(joint)  # seeds are drawn once, so that recomputation sees the same bits
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    primals = [n for n in joint.graph.nodes if n.op == "placeholder"][: len(inputs[0])]
    tensors = [n for n in primals if isinstance(n.meta.get("val"), torch.Tensor)]
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    meshes = [n for n in primals if mesh_of(n.meta.get("val")) is not None]
    more = {"saved_opaque_nodes": meshes} if meshes else {}  # which torch 2.11 does not know
    return _extract_fwd_bwd_modules(joint, tensors, symbols, num_fwd_outputs=num_fwd_outputs, **more)


def read_meshes_of_primals(joint: GraphModule, tangents: int) -> None:
    """Read each mesh of devices from an input of the forward, if it has it: a tangent that is a DTensor
    brings its mesh along, and AOTAutograd takes equal meshes for one value, even one that the forward
    returns."""
    inputs = joint.graph.find_nodes(op="placeholder")
    given = inputs[: len(inputs) - tangents]
    for node in inputs[len(given) :]:
        mesh = mesh_of(node.meta.get("val"))
        same = [n for n in given if mesh is not None and mesh_of(n.meta.get("val")) == mesh]
        if same:
            node.replace_all_uses_with(same[0])


@contextlib.contextmanager
def of_regions() -> Iterator[None]:
    """How AOTAutograd compiles regions: without the tokens that order effects among inputs and outputs, and
    with no kept value that the backward may overwrite, for ``retain_graph=True`` has it read again."""
    with (
        functorch_config.patch(unlift_effect_tokens=True),
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
    ):
        yield


@contextlib.contextmanager
def tracing_of(mode: FakeTensorMode | None) -> Iterator[None]:
    """A tracing context for compiling outside of Dynamo with fake tensors that Dynamo made, by one thread at
    a time."""
    with OneAtATime(), tracing(TracingContext(mode)):
        yield

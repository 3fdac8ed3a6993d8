"""Drivers of a streamed region: forward and backward as functions of their values in AOTAutograd's order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..passes.ir import Layout, is_tensor, outputs_of, value_of
from ..passes.kernels.products import scale_
from ..passes.kernels.simulated_device import device_type
from ..pipeline import StreamedRegion
from ..runtime.gradient_ownership import is_handed_over, ours_alone, sole_owners
from ..runtime.opaque_calls import Driver, one_call
from .joint_regions import unit


def forward_and_backward(
    region: StreamedRegion, forward_outputs: int, located: Callable[[Driver], Driver]
) -> tuple[GraphModule, GraphModule]:
    """Build forward and backward as graph modules of one call each, with values in AOTAutograd's order.

    forward_outputs  how many outputs of the joint graph are those of the forward
    located          wraps a driver so that its errors name the region
    """
    owner, outputs = GraphModule({}, Graph()), outputs_of(region.joint)
    if region.fused:
        return fused_modules(region, outputs, forward_outputs, located, owner)
    tensors = [n for n in region.saved if is_tensor(n)]
    meshes = [n for n in region.saved if internals.mesh_of(value_of(n)) is not None]
    symbols = [n for n in region.saved if not is_tensor(n) and n not in meshes]
    returned = [*outputs[:forward_outputs], *tensors, *meshes, *symbols]
    forward = one_call(owner, region.placeholders, located(run_forward(region, returned)), returned)
    given = [*symbols, *tensors, *meshes, *region.tangents]
    backward = one_call(owner, given, located(run_backward(region, given)), outputs[forward_outputs:])
    return forward, backward


def fused_modules(
    region: StreamedRegion,
    outputs: Sequence[object],
    forward_outputs: int,
    located: Callable[[Driver], Driver],
    owner: GraphModule,
) -> tuple[GraphModule, GraphModule]:
    """Build forward and backward for a region whose forward computes its gradients as well."""
    gradients = outputs[forward_outputs:]
    saved = list(dict.fromkeys(o for o in gradients if isinstance(o, Node) and o not in region.tangents))
    returned = [*outputs[:forward_outputs], *saved]
    driver = located(run_forward(region, returned, forward_outputs))
    forward = one_call(owner, region.placeholders, driver, returned)
    scaled = run_scaled(saved, gradients, region.tangents[0])
    return forward, one_call(owner, [*saved, *region.tangents], scaled, gradients)


def run_forward(region: StreamedRegion, outputs: Sequence[object], returned: int | None = None) -> Driver:
    """Build the forward driver of a region.

    returned  for a fused region, the number of outputs before the gradients, which `run_scaled` overwrites
    """
    runner = region.forward.runner
    index = {o: i for i, o in enumerate(region.forward.program.outputs) if isinstance(o, Node)}
    placeholders = region.placeholders

    def take(args: list) -> list:
        inputs = dict(zip(placeholders, args))
        args.clear()
        owned = frozenset(n for n, value in inputs.items() if is_handed_over(value))
        given = storages(value for n, value in inputs.items() if n not in owned)
        passed = {n: inputs[n] for n in outputs if n in inputs}
        for tangent in region.tangents if region.fused else ():
            inputs[tangent] = unit(tangent)
        results = runner(inputs, owned)
        values = [
            results[index[o]] if o in index else passed.get(o, o) if isinstance(o, Node) else o
            for o in outputs
        ]
        return (
            values
            if returned is None
            else [*values[:returned], *apart(values[returned:], given | storages(values[:returned]))]
        )

    return Driver("streambp_forward", take)


def storages(values: Iterable[object]) -> weakref.WeakSet:
    return weakref.WeakSet(v.untyped_storage() for v in values if isinstance(v, torch.Tensor))


def apart(values: Sequence[torch.Tensor], taken: weakref.WeakSet) -> list[torch.Tensor]:
    """Give each value memory of its own that may be overwritten.

    taken  memory of other values; it is extended by that of the results
    """
    found = []
    for value in values:
        own = value.untyped_storage() not in taken and Layout.of(value) is not None
        found.append(value.detach() if own else value.clone(memory_format=torch.contiguous_format))
        taken.add(found[-1].untyped_storage())
    return found


def run_scaled(saved: Sequence[Node], outputs: Sequence[object], unscaled: Node) -> Driver:
    """Build the backward driver of a fused head: it scales gradients that exist already, for a unit tangent.
    They are scaled in place, unless the graph is kept and another backward will read them. On a GPU they
    are scaled by one as well: reading the tangent would synchronise. In half precision a tangent that is
    no power of two rounds them a second time."""

    def take(args: list) -> list:
        values, tangent = dict(zip(saved, args)), args[-1]
        args.clear()
        kept = internals.graph_is_kept()
        if not is_on_host(tangent) or tangent.item() != 1:
            for node in saved:
                values[node] = values[node].clone() if kept else values[node]
                scale_(values[node], tangent)
        values[unscaled] = tangent
        gradients = [values[o] if isinstance(o, Node) else o for o in outputs]
        return gradients if kept else sole_owners(gradients)

    return Driver("streambp_scale", take)


def is_on_host(value: torch.Tensor) -> bool:
    """Can its value be read without synchronising with a device?"""
    return device_type(value) == "cpu"


def run_backward(region: StreamedRegion, given: Sequence[Node]) -> Driver:
    runner = region.backward.runner
    tangents = region.tangents

    def take(args: list) -> list:
        inputs = dict(zip(given, args))
        args.clear()
        owned = frozenset(n for n in tangents if ours_alone(inputs, n))
        return sole_owners(runner(inputs, owned))

    return Driver("streambp_backward", take)

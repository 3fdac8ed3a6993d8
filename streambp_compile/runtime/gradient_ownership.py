"""Values that a region may overwrite: those that have no other reader.

A gradient that one streamed backward hands to the next is marked. A tensor that other code computes from
it (a sum, a view) has no mark. A hook that keeps a gradient, or a part of its memory, shows as one more
reference. In the forward the chain itself knows the readers of a value, and hands it over to the only
one.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..passes.ir import outputs_of
from .opaque_calls import Driver, driver_of, one_call


def sole_owners(gradients: list) -> list:
    """Give each gradient storage of its own, and mark it as ours."""
    seen: set[int] = set()
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, torch.Tensor):
            continue
        if gradient.untyped_storage()._cdata in seen:
            gradients[i] = gradient = gradient.clone()
        seen.add(gradient.untyped_storage()._cdata)
        gradient.streambp_owned = True
    return gradients


def ours_alone(values: Mapping[Node, torch.Tensor], node: Node) -> bool:
    """May the gradient of a value be overwritten?"""
    marked = getattr(values[node], "streambp_owned", False)
    return marked and all(map(operator.le, references(values, node), plain_references()))


def references(values: Mapping[Any, torch.Tensor], key: object) -> tuple[int, ...]:
    """Count references to a value from Python and from C++, and to its memory. They are counted where the
    value lies: passed from function to function it has one more wherever Dynamo watches calls, which
    CPython then does not inline."""
    return sys.getrefcount(values[key]), *internals.use_counts(values[key])


def hand_over(values: Iterable[torch.Tensor]) -> None:
    """Let the region that reads these values next overwrite them."""
    for value in values:
        value.streambp_handed_over = True


def is_handed_over(value: object) -> bool:
    return getattr(value, "streambp_handed_over", False)


@functools.cache
def plain_references() -> tuple[int, ...]:
    """Count references to an incoming gradient that no hook keeps, once, on a chain of two nodes."""
    counts = []

    def forward(args: list) -> list:
        return [args[0] * 2]

    def backward(args: list) -> list:
        inputs = dict(enumerate(args))
        args.clear()
        counts.append(references(inputs, 0))
        gradient = inputs[0] * 2
        return sole_owners([gradient])

    def cut(joint, joint_inputs, *, num_fwd_outputs, **kwargs):
        primals = [n for n in joint.graph.nodes if n.op == "placeholder"]
        outputs = outputs_of(joint)
        owner = GraphModule({}, Graph())
        return (
            one_call(owner, primals[:1], Driver("calibration_forward", forward), outputs[:1]),
            one_call(owner, primals[1:], Driver("calibration_backward", backward), outputs[1:]),
        )

    graph = Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)),))
    # The very first call may run without gradients, or under compiled autograd, where counts differ.
    with internals.OneAtATime(), torch.enable_grad(), internals.without_compiled_autograd():
        compiled = internals.aot_autograd(
            fw_compiler=lambda m, _: driver_of(m), bw_compiler=lambda m, _: driver_of(m), partition_fn=cut
        )(GraphModule({}, graph), [torch.ones(2, requires_grad=True)])
        x = torch.ones(2, requires_grad=True)
        (y,) = compiled(compiled(x)[0])
        y.sum().backward()
    return counts[-1]

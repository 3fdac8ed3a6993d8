"""Functions as graphs of ATen ops, before autograd and after.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import sympy
import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..passes.normalization.diagonals import diagonal, diagonal_backward, diagonal_scatter
from ..passes.normalization.normalize import (
    as_strided,
    eye,
    index_put,
    layer_norm,
    mean,
    repeat,
    split,
    split_with_sizes,
    stack,
    var,
    var_mean,
)
from ..passes.normalization.random_numbers import normal, normal_around, randn, uniform
from ..passes.rules import kept
from .dtensors import is_sharded, local_of, with_local
from .dynamo import OneAtATime
from .fake_tensors import mode_of, stand_in, stand_in_whole

aten = torch.ops.aten


LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default, aten.detach.default)


def decompositions() -> dict:
    """Return Inductor's decompositions, without those of ops that the table of rules describes itself."""
    table = dict(select_decomp_table())
    for op in kept():
        table.pop(op, None)
    table[aten.mean.dim] = mean
    table[aten.mean.default] = mean
    table[aten.repeat.default] = repeat
    table[aten.stack.default] = stack
    table[aten.split.Tensor] = split
    table[aten.split_with_sizes.default] = split_with_sizes
    table[aten.index_put.default] = index_put
    table[aten.eye.default] = table[aten.eye.m] = eye
    table[aten.as_strided.default] = as_strided
    table[aten.diagonal.default] = diagonal
    table[aten.diagonal_backward.default] = diagonal_backward
    table[aten.diagonal_scatter.default] = diagonal_scatter
    table[aten.uniform.default] = uniform
    table[aten.normal_functional.default] = normal
    table[aten.randn.default] = randn
    for op in (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor):
        table[op] = normal_around
    table[aten.var.correction] = var
    table[aten.var_mean.correction] = var_mean
    table[aten.native_layer_norm.default] = functools.partial(
        layer_norm, table[aten.native_layer_norm.default]
    )
    table.update(
        get_decompositions(
            [aten.t, aten.transpose.int, aten.detach, aten.select_backward, aten.slice_backward]
        )
    )
    return table


@OneAtATime()
def capture(function: Callable, inputs: Sequence[object]) -> GraphModule:
    """Trace the forward of a function on fake inputs to one ATen graph, with the ops that the rules expect.

    For a DTensor, the part of this process is the input.

    Sizes are numbers there: a symbol that tracing specialises (in a range over ``tokens`` numbers) would
    be specialised by Dynamo as well.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        numbers = [stand_in_whole(v) if is_sharded(v) else stand_in(v) for v in inputs]

        def of_parts(*parts):
            return function(*map(with_local, numbers, parts))

        return make_fx(
            of_parts, decomposition_table=decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*map(local_of, numbers))


TRACED_COUNT, OTHER_COUNTS = 8, (3, 5, 1000)


class NotForAnyCount(Exception):
    """A function has no graph that holds for any count."""


@OneAtATime()
def for_any_count(function: Callable, create: Callable[[int], Sequence[torch.Tensor]]) -> GraphModule:
    """Trace a function of a count and of operands to an ATen graph that holds for any count. Its first input
    is the count.

    create  creates the operands for a count

    Raises `NotForAnyCount` where the function does something else for another count.
    """
    environment = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    source = ConstantSource("count")
    symbol = environment.create_symbol(TRACED_COUNT, source, DimDynamic.DYNAMIC, None)
    count = environment.create_symintnode(symbol, hint=TRACED_COUNT, source=source)
    modes = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True), enable_python_dispatcher()
    with torch.no_grad(), modes[0], modes[1]:
        module = make_fx(function, decomposition_table=decompositions())(count, *create(count))
    for guard in environment.guards:
        if any(guard.expr.subs(symbol, other) is not sympy.true for other in OTHER_COUNTS):
            raise NotForAnyCount(f"{guard.expr} holds for some counts only")
    return module


@OneAtATime()
def before_autograd(function: Callable, fakes: Sequence[object]) -> GraphModule:
    """Trace a function of fakes to the ATen ops that it calls, above autograd and autocast, in the active
    mode. The function runs on stand-ins, so that inputs which it writes into stay as they were."""
    given = [
        torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device)
        if isinstance(f, torch.Tensor)
        else f
        for f in fakes
    ]
    with mode_of(given):
        module = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    inline_numbers(module)
    for node in module.graph.nodes:  # a constant of one number needs no copy of its own
        source = node.args[0] if node.args and node.target in LIFTS else None
        if isinstance(source, Node) and source.target is aten.full.default:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    return module


def inline_numbers(module: GraphModule) -> None:
    """Replace constants of one number by operations, so that the analysis can read them. An example is
    ``torch.tensor(-1.0)`` in a forward."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None)
        number = number_of(value)
        if number is not None:
            with module.graph.inserting_before(node):
                new = module.graph.call_function(
                    aten.full.default, ([], number), {"dtype": value.dtype, "device": value.device}
                )
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)


def number_of(value: object) -> bool | int | float | None:
    """Return the number of a real tensor without dimensions; None for anything else."""
    with unset_fake_temporarily():
        return value.item() if type(value) is torch.Tensor and value.dim() == 0 else None


def known_number(fake: object) -> bool | int | float | None:
    """Return the number of a fake tensor that was computed from constants; None where it is not known."""
    return number_of(getattr(fake, "constant", None))


def newest_captured() -> Node | None:
    """Return the last node captured so far."""
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def captured_after(last: Node | None) -> list[str]:
    """List the names of the nodes captured after a given one; all of them for None."""
    names, node = [], newest_captured()
    while node is not None and node is not last and node.op != "root":
        names.append(node.name)
        node = node.prev
    return names


def has_gradient(op: torch._ops.OpOverload) -> bool:
    """Does autograd know an operator? It treats an unknown one as constant, and only warns."""
    keys = ("Autograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)

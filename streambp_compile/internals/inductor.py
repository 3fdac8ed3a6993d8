"""Inductor on whole graphs and functions, and its passes over joint graphs.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.codegen.cpp import CppKernelProxy, CppTile2DKernel, CppVecKernel
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_fx import compile_fx_inner as inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..passes.phases import stage
from ..passes.verify import verify_bound
from .dynamo import OneAtATime

aten, prims = torch.ops.aten, torch.ops.prims


def rewrite(module: GraphModule) -> None:
    """Run Inductor's passes over a joint graph. They create random numbers from seeds, and replace a scatter
    into a constant by a comparison."""
    mode = detect_fake_mode([n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])
    before = set(module.graph.nodes)
    scattered = {
        user: n.meta["val"].dtype
        for n in module.graph.find_nodes(op="call_function", target=aten.scatter.value)
        for user in n.users
    }
    with V.set_fake_mode(mode):
        joint_graph_passes(module)
    written = {n for n in module.graph.nodes if n not in before}
    choices = [n for n in written if n.target is aten.where.self]
    changed = False
    for choice, dtype in ((n, dtype_wanted(n, written, scattered)) for n in choices):
        for node in numbers_of(choice, written) if dtype is not None else ():
            if node.target is aten.scalar_tensor.default:
                node.update_kwarg("dtype", dtype)
            with node.meta["val"].fake_mode:
                node.meta["val"] = node.meta["val"].to(dtype)
            changed = True
    if changed:
        module.recompile()


def dtype_wanted(
    choice: Node, written: set[Node], scattered: Mapping[Node, torch.dtype]
) -> torch.dtype | None:
    """Find the dtype of a scatter into a constant that Inductor replaced by a choice of another dtype.
    Inductor gives the choice between numbers the default dtype, so that half of the digits of float64 are
    lost. Torch 2.13 then converts the choice; torch 2.11 does not, and its readers get the other dtype."""
    wanted = {scattered[n] for n in choice.users if n in scattered}
    converted = [n for n in choice.users if n.target is prims.convert_element_type.default and n in written]
    if converted and len(converted) == len(choice.users):
        wanted = {n.args[1] for n in converted if n.args[1] is torch.float64}
    return wanted.pop() if len(wanted) == 1 and wanted != {choice.meta["val"].dtype} else None


def numbers_of(choice: Node, written: set[Node]) -> list[Node]:
    """List the two numbers of a choice, and the choice; empty where it is between other values."""
    numbers = [n for n in choice.args[1:] if n in written and n.target is aten.scalar_tensor.default]
    return [*numbers, choice] if len(numbers) == 2 else []


class Tile2DKernel(CppTile2DKernel):
    """A kernel whose atomic additions to transposed tiles write to the right place. Up to torch 2.13,
    Inductor adds the offset within a tile twice to their index, and writes behind the end of the tensor
    (pytorch issue 191837): in gradients of gathers and of overlapping windows, on a CPU with several
    threads."""

    def store(self, name, index, value, mode=None):
        atomic = mode == "atomic_add" and (inductor_config.cpp.dynamic_threads or self.num_threads > 1)
        if atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            CppVecKernel.store(self, name, index, value, mode)
        else:
            super().store(name, index, value, mode)


def compile_fx_inner(*args, **kwargs) -> Callable:
    """Call Inductor's function of that name, with `Tile2DKernel`."""
    with mock.patch.object(CppKernelProxy, "tile2d_kernel_cls", Tile2DKernel):
        return inner(*args, **kwargs)


def compile_ours(module: GraphModule, *args, **kwargs) -> Callable:
    """Compile a graph of ours, whose inputs bind all sizes, by Inductor."""
    verify_bound(module.graph)
    return compile_fx_inner(module, *args, **kwargs)


@OneAtATime()
@stage("Inductor")
def compile_graph(module: GraphModule, inputs: Sequence[object], **kwargs) -> Callable:
    """Compile the graph of an unchunked region by Inductor. Ops that were kept only for the rules are
    decomposed first. Inputs that the graph returns, which are those that the backward reads, bypass the
    compiled code: where Inductor reads one in another layout (images, channels last), it would return that
    copy instead."""
    examples = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with enable_python_dispatcher(), detect_fake_mode(examples) or contextlib.nullcontext():
        plain = make_fx(module, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)(
            *examples
        )
    if kwargs.get("is_inference"):
        rewrite(plain)
    given = [n for n in plain.graph.nodes if n.op == "placeholder"]
    returned = plain.graph.output_node().args[0]
    around = {i: given.index(out) for i, out in enumerate(returned) if out in given}
    if not around:
        return compile_ours(plain, inputs, **kwargs)
    plain.graph.output_node().args = (tuple(out for out in returned if out not in given),)
    plain.recompile()
    call = compile_ours(plain, inputs, **kwargs)
    strides = TracingContext.get().output_strides
    if strides:
        for i in around:
            strides.insert(i, None)  # inputs keep their strides

    def run(args: list) -> list:
        inputs_returned = [(i, args[at]) for i, at in around.items()]
        results = list(call(args))
        for i, value in inputs_returned:
            results.insert(i, value)
        return results

    run._boxed_call = True
    return run


@OneAtATime()
@stage("Inductor")
def compile_plainly(module: GraphModule, inputs: Sequence[object], mode: str | None = None) -> Callable:
    """Compile the whole graph as ``backend="inductor"`` does. This happens after an internal error, and where
    nothing streams."""
    patches = list_mode_options(mode) if mode else {}
    with (
        functorch_config.patch(unlift_effect_tokens=False),
        inductor_config.patch(patches),
        contextlib.nullcontext() if has_symbolic_floats(module) else floats_are_tensors(),
    ):
        return compile_fx(module, list(inputs), inner_compile=compile_fx_inner)


def has_symbolic_floats(module: GraphModule) -> bool:
    values = (n.meta.get("example_value", n.meta.get("val")) for n in module.graph.nodes)
    return any(isinstance(value, torch.SymFloat) for value in values)


def floats_are_tensors():
    """Disable AOTAutograd's pass that turns symbolic floats into tensors. It makes every float constant that
    it does not know; regions have no symbolic floats left (dynamo/user_code/python_floats.py). With it,
    torch 2.13 also drops writes into inputs of one float64 number, such as the step counter of an
    optimizer."""
    return mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", lambda module: None)


@OneAtATime()
def compile_function(function: Callable, examples: Sequence[object]) -> Callable:
    """Compile a function without gradients, which returns a tuple of tensors, by Inductor.

    examples  fakes of its arguments, whose symbols stay free or get the guards of their mode
    """
    mode = detect_fake_mode(examples)
    with tracing(TracingContext(mode)), enable_python_dispatcher(), mode, torch.no_grad():
        traced = make_fx(
            function,
            decomposition_table=select_decomp_table(),
            _allow_non_fake_inputs=True,
        )(*examples)
        fakes = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
        rewrite(traced)
        artifact = compile_ours(traced, fakes, is_inference=True)
    return lambda *args: tuple(artifact(list(args)))

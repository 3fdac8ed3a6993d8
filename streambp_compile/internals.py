"""The only place that imports private parts of torch. Tested with torch 2.11 and 2.13.

A new release of torch changes this file alone: joint graphs of AOTAutograd, fake tensors with symbolic sizes,
Inductor's inner compilation, graph breaks of Dynamo and the structured trace.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import sympy
import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch import predispatch
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from .passes.ir import ACCUMULATORS, OF_ROWS, Binding, BindingRole, Body, draws_random, hint, total_dtype
from .passes.normalization.normalize import layer_norm, mean, repeat, var, var_mean
from .passes.rules import kept
from .runtime.runner import Layout, layout_of, source_value

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "aot_autograd",
    "capture",
    "compile_body",
    "ignore_library_logging",
    "decompositions",
    "detect_fake_mode",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "keep_inputs_partition",
    "make_fx",
]

log = logging.getLogger(__name__)
aten = torch.ops.aten


def decompositions() -> dict:
    """Inductor's decompositions without those of ops that the rules know better."""
    table = dict(select_decomp_table())
    for op in kept():
        table.pop(op, None)
    table[aten.mean.dim] = mean
    table[aten.mean.default] = mean
    table[aten.repeat.default] = repeat
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


def capture(function: Callable, inputs: Sequence[object]) -> GraphModule:
    """The forward of a function on fake inputs, as one ATen graph in the spelling of the rules.

    Sizes are numbers there: a symbol that became one on the way (in a range of so many tokens) would be one
    for Dynamo as well.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        numbers = [stand_in(value) for value in inputs]
        return make_fx(
            function, decomposition_table=decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*numbers)


def stand_in(fake: object) -> object:
    """A fake tensor of the same description in the mode that is active, with numbers for symbols."""
    if not isinstance(fake, torch.Tensor):
        return hint(fake) if isinstance(fake, torch.SymInt) else fake
    sizes, strides = ([hint(s) for s in part] for part in (fake.shape, fake.stride()))
    return torch.empty_strided(
        sizes, strides, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad
    )


def before_autograd(function: Callable, fakes: Sequence[object]) -> GraphModule:
    """A function of fakes as the ATen ops that it calls, above autograd and autocast, in the active mode.

    The function runs on stand-ins, so that what it writes into stays as it was.
    """
    given = [
        torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device)
        if isinstance(f, torch.Tensor)
        else f
        for f in fakes
    ]
    module = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    inline_numbers(module)
    for node in module.graph.nodes:  # a constant of one number needs no copy of its own
        source = node.args[0] if node.args and node.target in LIFTS else None
        if isinstance(source, Node) and source.target is aten.full.default:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    return module


def without_guards(fakes: Sequence[object]):
    """What is computed here was computed by Dynamo already, which has guarded on all that it rests on."""
    mode = detect_fake_mode(fakes)
    env = None if mode is None else mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()


LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default, aten.detach.default)


@contextlib.contextmanager
def replaying(module: GraphModule):
    """Walk a Dynamo graph with its fake mode active: yields a function that does what a switch node does
    (gradients, autocast).

    All switches are as they were when the walk ends.
    """
    values: dict[Node, object] = {}
    mode = detect_fake_mode([n.meta.get("example_value") for n in module.graph.nodes])
    entered: list[object] = []

    def replay(node: Node) -> None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
        values[node] = node.target(*args, **kwargs)
        if node.target is enter_autocast:
            entered.append(values[node])
        elif node.target is exit_autocast:
            entered.remove(args[0])

    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),
        enable_python_dispatcher(),
        mode or contextlib.nullcontext(),
    ):
        try:
            yield replay
        finally:
            while entered:
                exit_autocast(entered.pop())


def modes_text() -> str:
    """The switches that a function may ask for: gradients, and autocast of each kind of device."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return f"{torch.is_grad_enabled()} {autocast}"


def is_unbacked(value: object) -> bool:
    """Does a value or its shape depend on data, so that computing it again would make other symbols?"""
    return bool(free_unbacked_symbols(value))


def is_batched(value: torch.Tensor) -> bool:
    """Is this code running inside ``torch.vmap``?"""
    return torch._C._functorch.is_batchedtensor(value)


def index_by_tensors():
    """Inside a ``torch.vmap``, ``values[i]`` may have a tensor for its index."""
    return TransformGetItemToIndex()


def parts_of(value: object) -> list[object]:
    """The plain tensors that AOTAutograd makes of a tensor subclass, in its order; any other value is
    itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in parts_of(getattr(value, name))]


def stand_in_whole(fake: object) -> object:
    """As `stand_in`, a tensor subclass of its own class."""
    if not is_traceable_wrapper_subclass(fake):
        return stand_in(fake)
    names, context = fake.__tensor_flatten__()
    parts = {name: stand_in_whole(getattr(fake, name)) for name in names}
    return (
        type(fake)
        .__tensor_unflatten__(parts, context, fake.shape, fake.stride())
        .requires_grad_(fake.requires_grad)
    )


def is_transform(node: Node) -> bool:
    """Does a `torch.func` transform (grad, vjp, jvp) begin or end at a node of Dynamo's graph?"""
    name = getattr(node.target, "__name__", "")
    return name.endswith(("_increment_nesting", "_decrement_nesting")) and node.target not in (
        enter_map,
        leave_map,
    )


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def is_hook(node: Node) -> bool:
    """Is this node a hook on a gradient? Dynamo writes it where the value is."""
    return isinstance(node.target, HigherOrderOperator) and node.target.__name__ == "register_hook"


def inline_numbers(module: GraphModule) -> None:
    """Write constants of one number (``torch.tensor(-1.0)`` in a forward) into the graph, where the analysis
    can read them."""
    for node in module.graph.find_nodes(op="get_attr"):
        with unset_fake_temporarily():
            value = getattr(module, node.target, None)
            number = value.item() if type(value) is torch.Tensor and value.dim() == 0 else None
        if number is not None:
            with module.graph.inserting_before(node):
                new = module.graph.call_function(
                    aten.full.default, ([], number), {"dtype": value.dtype, "device": value.device}
                )
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)


def captured_after(last: Node | None) -> tuple[Node | None, list[str]]:
    """The last node captured so far, and the names of those that came after a given one."""
    mode = get_proxy_mode()
    if mode is None:
        return None, []
    names, node = [], next(iter(reversed(mode.tracer.graph.nodes)), None)
    newest = node
    while node is not None and node is not last and node.op != "root":
        names.append(node.name)
        node = node.prev
    return newest, names


def keep_inputs_partition(
    joint: GraphModule, inputs, *, num_fwd_outputs: int, writes: bool = False, **kwargs
):
    """Keep only inputs and recompute all of the rest, unless random numbers are drawn or inputs written (then
    as Inductor would)."""
    if any(map(draws_random, joint.graph.nodes)) or not inputs[1] or writes:
        rewrite(joint)  # seeds are drawn once, so that recomputation sees the same bits
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    primals = [n for n in joint.graph.nodes if n.op == "placeholder"][: len(inputs[0])]
    tensors = [n for n in primals if isinstance(n.meta.get("val"), torch.Tensor)]
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    return _extract_fwd_bwd_modules(joint, tensors, symbols, num_fwd_outputs=num_fwd_outputs)


def rewrite(module: GraphModule) -> None:
    """Inductor's passes over a joint graph: they make random numbers from seeds, and a scatter into a
    constant a comparison."""
    mode = detect_fake_mode([n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])
    with V.set_fake_mode(mode):
        joint_graph_passes(module)


def compile_graph(module: GraphModule, inputs: Sequence[object], **kwargs) -> Callable:
    """Inductor on the graph of an unchunked region; ops that only the rules kept are decomposed now."""
    examples = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with detect_fake_mode(examples) or contextlib.nullcontext():
        plain = make_fx(module, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)(
            *examples
        )
    if kwargs.get("is_inference"):
        rewrite(plain)
    return compile_fx_inner(plain, inputs, **kwargs)


# Errors that are no defects: what a user asked for, want of memory, and how Dynamo starts again.
NO_DEFECTS = (Warning, MemoryError, torch.OutOfMemoryError, RestartAnalysis, SkipFrame)


def compile_plainly(module: GraphModule, inputs: Sequence[object], mode: str | None = None) -> Callable:
    """The whole graph as ``backend="inductor"`` compiles it, after an internal error."""
    patches = list_mode_options(mode) if mode else {}
    with functorch_config.patch(unlift_effect_tokens=False), inductor_config.patch(patches):
        return compile_fx(module, list(inputs), inner_compile=compile_fx_inner)


def compile_function(function: Callable, examples: Sequence[object]) -> Callable:
    """Inductor on a function without gradients; ``examples`` are fakes of its arguments, whose symbols stay
    free or are guarded with theirs."""
    mode = detect_fake_mode(examples)
    with tracing(TracingContext(mode)), mode, torch.no_grad():
        traced = make_fx(
            lambda *args: (function(*args),),
            decomposition_table=select_decomp_table(),
            _allow_non_fake_inputs=True,
        )(*examples)
        fakes = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
        rewrite(traced)
        artifact = compile_fx_inner(traced, fakes, is_inference=True)
    return lambda *args: artifact(list(args))[0]


PLACES = ("first", "offset")  # integers that are no size of anything, and zero in the first chunk


class BodyInputs:
    """Fake inputs of a chunk body: every size that may change is a symbol of its own."""

    def __init__(self, body: Body, chunk: int, sizes: Mapping[object, int] = types.MappingProxyType({})):
        """``sizes``: hints, by the names of symbols, in place of those that the chunk length gives."""
        self.env, self.known = ShapeEnv(duck_shape=False), sizes
        self.mode = FakeTensorMode(shape_env=self.env)
        self.symbols: dict[object, torch.SymInt] = {}
        chunk = max(chunk, 16)
        self.hints = {
            "rows": chunk,
            "keys": 4 * chunk + 7,
            "first": 3 * chunk + 7,
            "offset": 3 * chunk + 7,
            "length": 8 * chunk + 5,
        }
        self.values = [self.fake(b) for b in body.bindings]

    def symbol(self, name: object, size_hint: int) -> torch.SymInt:
        if name not in self.symbols:
            source, place = ConstantSource(f"streambp_{len(self.symbols)}"), name in PLACES
            size_hint = max(self.known.get(name, size_hint), 2)  # 0 and 1 would be constants
            symbol = self.env.create_symbol(
                size_hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=place
            )
            self.symbols[name] = self.env.create_symintnode(symbol, hint=size_hint, source=source)
        return self.symbols[name]

    def size(self, size):
        """A size of the region's graph; symbols of that graph become symbols of this body."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr.is_Symbol:
            return self.symbol(expr, size.node.hint)
        names = sorted(expr.free_symbols, key=str)
        env = size.node.shape_env
        hints = (
            env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
        )  # the latter up to torch 2.11
        return sympy_interp(PythonReferenceAnalysis, {s: self.symbol(s, int(hints[s])) for s in names}, expr)

    def fake(self, binding: Binding):
        if binding.role is BindingRole.SCALAR:
            if binding.source is not None:
                value = binding.source.meta["val"]
                return self.size(value)
            if binding.size is not None:
                return self.size(binding.size)
            return self.symbol(binding.name, self.hints[binding.name])
        value = source_value(binding)
        dtype = (
            total_dtype(value.dtype) if binding.role in (*ACCUMULATORS, BindingRole.CARRY) else value.dtype
        )
        mark = binding.mark
        full = [self.size(s) for s in value.shape]
        if binding.role is BindingRole.CARRY:
            full[mark.dim] = 1
            return self.empty(full, _contiguous(full), dtype, value.device)
        if binding.role in (BindingRole.WHOLE, BindingRole.TOTAL) or mark is None:
            if binding.role is BindingRole.TOTAL or mark is None and binding.role is BindingRole.KEYTOTAL:
                strides = _contiguous(full)
            elif Layout.of(value) is None:
                strides = [self.size(s) for s in value.stride()]
            else:
                strides = layout_of(value).strides(full)
            return self.empty(full, strides, dtype, value.device)
        length = self.symbol("length", self.hints["length"])
        full[mark.dim] = mark.outer * length * mark.inner
        strides = (
            _contiguous(full) if binding.role is BindingRole.KEYTOTAL else layout_of(value).strides(full)
        )
        rows = self.symbol(
            "rows" if binding.role in OF_ROWS else "keys",
            self.hints["rows" if binding.role in OF_ROWS else "keys"],
        )
        if binding.columns is not None:
            full[binding.columns.dim] = self.symbol("keys", self.hints["keys"])
        if mark.outer == mark.inner == 1 or binding.role not in OF_ROWS:
            sizes = [*full[: mark.dim], rows, *full[mark.dim + 1 :]]
        else:
            step = strides[mark.dim]
            sizes = [*full[: mark.dim], mark.outer, rows, mark.inner, *full[mark.dim + 1 :]]
            strides = [
                *strides[: mark.dim],
                length * mark.inner * step,
                mark.inner * step,
                step,
                *strides[mark.dim + 1 :],
            ]
        return self.empty(sizes, strides, dtype, value.device)

    def empty(self, sizes, strides, dtype, device):
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _contiguous(sizes) -> list:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * size
    return strides[::-1]


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.mm``; on a CPU in panels, where a wide transposed weight (a head) is multiplied by few rows."""
    wide = hint(weight.shape[1]) >= WIDE * hint(rows.shape[0]) and weight.stride(0) == 1
    panels = wide and rows.device.type == "cpu" and rows.dtype.itemsize >= 4
    return torch.ops.streambp.panels_mm(rows, weight) if panels else NotImplemented


WIDE = 8  # columns of a weight for every row, from which its product is made in panels


@dataclass(frozen=True)
class Artifact:
    """A compiled body and what Inductor assumed of its sizes, such as that 32-bit indices suffice.

    run    a function of the list of inputs
    holds  are the assumptions true of these inputs?
    """

    run: Callable
    holds: Callable[[Sequence[object]], bool]


COMPILED: dict[
    str, list[Artifact]
] = {}  # by the text of a body and its inputs: one artifact per range of sizes


class CompiledBody:
    """A compiled chunk body: runs the first artifact that fits the sizes of a call, or compiles one."""

    def __init__(self, body: Body, chunk: int, mode: str | None):
        self.body, self.chunk, self.mode = body, chunk, mode
        self.artifacts = self.compiled({})

    def __call__(self, args: list) -> object:
        for artifact in self.artifacts:
            if artifact.holds(args):
                return artifact.run(args)
        with (
            disable_current_modes()
        ):  # a memory simulation is to count what bodies allocate, not what compiling them does
            sizes = self.sizes(args)
            log.debug("compiling a chunk body again, for sizes %s", sizes)
            self.artifacts = self.compiled(sizes)
        return self.artifacts[-1].run(args)

    def compiled(self, sizes: Mapping[object, int]) -> list[Artifact]:
        """All artifacts of this body; with ``sizes``, after compiling one for them."""
        with inductor_config.patch(body_options(self.mode)):
            return compile_once(self.body, BodyInputs(self.body, self.chunk, sizes), again=bool(sizes))

    def sizes(self, args: Sequence[object]) -> dict[object, int]:
        """The sizes of a call, by the names that `BodyInputs` gives them."""
        inputs = BodyInputs(self.body, self.chunk)
        places = places_of(inputs.values)
        return {
            name: places[s.node.expr].of(args) for name, s in inputs.symbols.items() if s.node.expr in places
        }


def body_options(mode: str | None) -> dict[str, object]:
    """Inductor's options for a mode, without CUDA graphs.

    A CUDA graph is recorded for fixed sizes and addresses, and those of a body change with every chunk.
    """
    return {**(list_mode_options(mode) if mode else {}), "triton.cudagraphs": False}


def compile_body(body: Body, chunk: int, mode: str | None = None) -> Callable:
    """Compile a body with Inductor; bodies of the same text on the same inputs share artifacts.

    mode  `torch.compile`'s mode, as Inductor options

    Returns a function of the list of inputs. Raises if Inductor fixed a size that must stay free.
    """
    return CompiledBody(body, chunk, mode)


def compile_once(body: Body, inputs: BodyInputs, again: bool = False) -> list[Artifact]:
    """The artifacts of a body's text; with ``again``, after compiling one for the hints of these inputs."""
    described = [describe(v) for v in inputs.values]
    artifacts = COMPILED.setdefault(
        f"{body.graph.code}|{described}|{inductor_config.save_config_portable()}", []
    )
    if again or not artifacts:
        with tracing(
            TracingContext(inputs.mode)
        ):  # a body's sizes are its own, not those of the graph around it
            with inputs.mode:
                table = {**select_decomp_table(), aten.mm.default: product}
                traced = make_fx(
                    body.graph,
                    decomposition_table=table,
                    tracing_mode="symbolic",
                    _allow_non_fake_inputs=True,
                )(*inputs.values)
            examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
            rewrite(traced)
            counters["streambp"]["bodies"] += 1
            run = compile_fx_inner(traced, examples)
        fixed = [str(s) for s in inputs.symbols.values() if inputs.env.replace(s.node.expr).is_number]
        if fixed:
            raise AssertionError(f"sizes were fixed while compiling a chunk body: {fixed}")
        artifacts.append(Artifact(run, guard_of(inputs)))
    return artifacts


@dataclass(frozen=True)
class Place:
    """Where a size is found among the inputs of a body: an integer, or a dimension of a tensor."""

    index: int
    dim: int | None = None

    def of(self, args: Sequence[object]) -> int:
        return args[self.index] if self.dim is None else args[self.index].shape[self.dim]

    def __str__(self) -> str:
        return f"args[{self.index}]" if self.dim is None else f"args[{self.index}].shape[{self.dim}]"


def places_of(values: Sequence[object]) -> dict[object, Place]:
    """For every symbol that is an input, or a size of one, where it is found.

    Also for a symbol that tracing found equal to another, and replaced: conditions that were noted before
    still name it.
    """
    numbers = {
        e: Place(i)
        for i, v in enumerate(values)
        if isinstance(v, torch.SymInt)
        for e in (v.node.expr, v.node._expr)
    }
    sizes = {
        e: Place(i, d)
        for i, v in enumerate(values)
        if isinstance(v, torch.Tensor)
        for d, s in enumerate(v.shape)
        if isinstance(s, torch.SymInt)
        for e in (s.node.expr, s.node._expr)
    }
    return {**sizes, **numbers}


def guard_of(inputs: BodyInputs) -> Callable[[Sequence[object]], bool]:
    """The conditions on sizes under which a body was traced and compiled, as a function of its inputs.

    That a size differs from another is left out: code for sizes that differ is right for equal ones too (in
    the chunk that reads all keys, for one). That it is neither 0 nor 1 is kept: those are broadcast, or have
    nothing in them.
    """
    places = places_of(inputs.values)
    conditions = dict.fromkeys(g.expr for g in inputs.env.guards)
    kept = [c for c in conditions if not isinstance(c, sympy.Ne) or any(side in (0, 1) for side in c.args)]
    terms = [
        c.xreplace({s: sympy.Symbol(str(places[s]), integer=True) for s in c.free_symbols}) for c in kept
    ]
    text = " and ".join(f"({PythonPrinter().doprint(term)})" for term in terms)
    return eval(f"lambda args: {text or True}", {"math": math})


@contextlib.contextmanager
def without_kernels():
    """Run Inductor's artifacts on fake tensors: they allocate and free as ever, and launch nothing."""
    before = CompiledFxGraph.__call__
    CompiledFxGraph.__call__ = lambda artifact, inputs: wrapper_alone(artifact)(inputs)
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = before


def wrapper_alone(artifact: CompiledFxGraph) -> Callable:
    """The Python wrapper of an artifact, with its allocators under torch's dispatch and without its
    kernels."""
    call = generated(artifact.current_callable)
    names = dict(call.__globals__)
    for name in call.__globals__:
        if name.startswith(("cpp_fused", "triton_")):
            names[name] = Silent()
    names.update(
        extern_kernels=Silent(),
        assert_size_stride=Silent(),
        assert_alignment=Silent(),
        reinterpret_tensor=torch.as_strided,
        empty_strided_cpu=functools.partial(empty_on, "cpu"),
        empty_strided_cuda=functools.partial(empty_on, "cuda"),
    )
    alone = types.FunctionType(call.__func__.__code__, names, closure=call.__func__.__closure__)
    return functools.partial(alone, call.__self__)


def generated(function: Callable) -> types.MethodType:
    """The method that Inductor wrote, behind the closures that align inputs on CUDA."""
    waiting, seen = [function], set()
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, types.MethodType) and "assert_size_stride" in found.__func__.__globals__:
            return found
        if isinstance(found, functools.partial):
            waiting += [found.func, *found.args]
        cells = getattr(found, "__closure__", None) or ()
        waiting += [v for v in (cell_value(c) for c in cells) if callable(v) and id(v) not in seen]
        seen.update(map(id, waiting))
    raise TypeError(
        f"Nothing that Inductor wrote was found behind {function!r}; is this version of torch supported?"
    )


def cell_value(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def empty_on(device: str, sizes, strides, dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


class Silent:
    """Accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Silent:
        return self

    def __call__(self, *args, **kwargs) -> None:
        return None


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{tuple(value.stride())}{value.dtype}{value.device}"
    return str(value)


def effects_inside():
    """AOTAutograd's graphs without the tokens that order effects among inputs and outputs."""
    return functorch_config.patch(unlift_effect_tokens=True)


def tracing_of(mode: FakeTensorMode | None):
    """A tracing context for compiling outside of Dynamo with fake tensors that Dynamo made."""
    return tracing(TracingContext(mode))


@contextlib.contextmanager
def faked(like: torch.Tensor):
    """Inside, values are fake as Dynamo's are; with gradients, if the value has them."""
    with enable_python_dispatcher(), like.fake_mode, torch.set_grad_enabled(like.requires_grad):
        yield


set_grad_enabled = torch._C._set_grad_enabled
enter_autocast, exit_autocast = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
MODE_SWITCHES = (set_grad_enabled, enter_autocast, exit_autocast, torch._C._log_api_usage_once)
enter_map, leave_map = (
    predispatch._vmap_increment_nesting,
    predispatch._vmap_decrement_nesting,
)  # what Dynamo makes of torch.vmap
HigherOrderOperator = torch._ops.HigherOrderOperator
ONCE = ("info_once", "warning_once", "warning_advice")  # what transformers adds to logging.Logger


def ignore_library_logging() -> None:
    """Keep graphs whole where transformers logs inside a forward, by methods that Dynamo cannot trace.

    GPT-2 and BERT do; the break would part the head from the loss. What a user logs breaks the graph as ever.
    """
    found = (getattr(logging.Logger, name, None) for name in ONCE)
    dynamo_config.ignore_logging_functions.update(f for f in found if f is not None)


def symbolic_functions() -> dict[Callable, Callable]:
    """Functions by which Dynamo writes ``math.sqrt`` and its like of a symbolic float → those of tensors."""
    found = {n.removeprefix("_sym_"): getattr(torch, n) for n in dir(torch) if n.startswith("_sym_")}
    return {function: getattr(torch, n) for n, function in found.items() if hasattr(torch, n)}


def floats_are_tensors():
    """AOTAutograd's pass that turns symbolic floats into tensors would make every float constant that it does
    not know: in regions none is left for it (dynamo/python_floats.py)."""
    return mock.patch.object(graph_compile, "_apply_tensorify_python_scalars", lambda module: None)


def make_constant(floats: Sequence[torch.SymFloat]) -> None:
    """Have Dynamo trace again with these floats as constants. Raises its restart, or AssertionError where
    they were to be constants already: a restart would come back here."""
    # Of `expr`, a symbol that has a value already is gone.
    names = {str(symbol) for value in floats for symbol in value.node._expr.free_symbols}
    assert not all(map(TensorifyState.should_specialize, names)), f"{floats} stay symbols"
    for name in names:
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


PADDINGS = (torch.nn.functional.pad, torch._C._nn.pad)  # Dynamo writes the latter
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo split a graph, why, and torch's advice."""

    where: str
    reason: str
    remedy: str


def graph_break(module: GraphModule) -> GraphBreak | None:
    """The break that ends this Dynamo graph before the function ends, if any."""
    found = getattr(module, "compile_subgraph_reason", None)
    if not getattr(found, "graph_break", False):
        return None
    reason = found.reason
    if reason == "step_unsupported":  # of a call that was traced into; what stopped it there was counted
        reason = next(reversed(counters["graph_break"]), reason)
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    last = found.user_stack[-1] if found.user_stack else None
    remedy = next((line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")), "")
    return GraphBreak(
        f"{last.filename}:{last.lineno}" if last else "a line unknown", lines[0].rstrip("."), remedy
    )


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError if a boolean is false; on a GPU the device itself stops, without synchronisation."""
    torch._assert_async(condition, text)


def graph_is_kept() -> bool:
    """Does the running backward keep its graph (``retain_graph=True``), and so the saved values?"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to the structured trace, which ``tlparse`` shows."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def keep_ddp_graphs_whole(package: str) -> None:
    """Have the optimizer of DistributedDataParallel hand over whole graphs to the backends of a package.

    It cuts a graph at the limits of gradient buckets: all gradients of one compiled graph arrive together.
    Regions are autograd nodes of their own: their gradients arrive one layer after another. Torch (2.11 to
    2.13) has this switch for all backends of a process only.
    """
    cut = DDPOptimizer.compile_fn
    if hasattr(cut, "__wrapped__"):
        return

    @functools.wraps(cut)
    def compile_fn(optimizer: DDPOptimizer, module: GraphModule, inputs: Sequence[object], **options):
        if defined_in(optimizer.backend_compile_fn, package):
            return optimizer.backend_compile_fn(module, inputs, **options)
        return cut(optimizer, module, inputs, **options)

    DDPOptimizer.compile_fn = compile_fn


def defined_in(backend: Callable, package: str) -> bool:
    """Is a backend, behind what torch.compile wraps around it, a function of this package?"""
    for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
        inner = getattr(backend, name, None)
        if inner is not None:
            return defined_in(inner, package)
    return (getattr(backend, "__module__", None) or "").startswith(f"{package}.")


def is_ddp_piece() -> bool:
    """Is this graph a piece that the optimizer of DistributedDataParallel cut out?"""
    context = TracingContext.try_get()
    return context is not None and context.ddp_optimizer_ctx is not None


@contextlib.contextmanager
def apart_from_ddp():
    """Compile several graphs of AOTAutograd for one piece, of which that optimizer expects exactly one."""
    counts = counters["aot_autograd"]
    before = counts["total"]
    with tracing_of(TracingContext.get().fake_mode):
        yield
    counts["total"] = before

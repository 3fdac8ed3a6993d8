"""Dynamo: its graphs' switches, maps and hooks, its graph breaks and restarts.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import callback_handler, compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._dynamo import utils as dynamo_utils
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.callback import CallbackArgs
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters, get_metrics_context
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._functorch import predispatch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from ..passes.phases import SizeFixed

set_grad_enabled = torch._C._set_grad_enabled


enter_autocast, exit_autocast = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)


enter_inference, exit_inference = (
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)
MODE_SWITCHES = (set_grad_enabled, enter_autocast, exit_autocast, torch._C._log_api_usage_once)


# Transforms of `torch.func` forbid hooks on saved tensors meanwhile. Nothing else depends on these calls.
FORBIDS_HOOKS = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
)


HigherOrderOperator = torch._ops.HigherOrderOperator


PADDINGS = (torch.nn.functional.pad, torch._C._nn.pad)  # Dynamo writes the latter


DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


# Errors that are no defects: warnings raised at the user's request, lack of memory, restarts.
NO_DEFECTS = (Warning, MemoryError, torch.OutOfMemoryError, RestartAnalysis, SkipFrame, SizeFixed)

ASSERTIONS = (torch._assert, torch._assert_async)  # ``assert`` of a value in Dynamo's graph
# Files of the code that runs around a function which Dynamo traces.
AROUND = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
ONCE = ("info_once", "warning_once", "warning_advice")  # methods that transformers adds to logging.Logger


class OneAtATime(contextlib.ContextDecorator):
    """Hold Dynamo's compile lock around code that is traced or compiled while a step runs. Dynamo has
    released the lock by then. Tracing patches `torch.nn.Module`, and compiling the options of Inductor,
    for all threads."""

    def __enter__(self) -> None:
        compile_lock.acquire()

    def __exit__(self, *exception: object) -> None:
        compile_lock.release()


def without_compiled_autograd() -> contextlib.AbstractContextManager:
    """Disable compiled autograd inside the context."""
    return compiled_autograd._disable()


def is_compiled_backward() -> bool:
    """Is this graph a backward that compiled autograd traced?"""
    return compiled_autograd.in_compiled_autograd_region


def ignore_library_logging() -> None:
    """Keep graphs whole where transformers logs inside a forward, by methods that Dynamo cannot trace. GPT-2
    and BERT do; the break would separate the head from the loss. The user's own logging still breaks the
    graph."""
    found = {getattr(logging.Logger, name, None) for name in ONCE} - {None}
    dynamo_config.ignore_logging_functions.update(found)
    if found:
        keep_log_of_compilations()


@functools.cache
def keep_log_of_compilations() -> None:
    """Keep Dynamo's own log free of errors about functions in its settings, which it writes down."""
    try:
        dynamo_utils._get_dynamo_config_for_logging()
    except TypeError:  # torch before 2.13 would log an error, pages long, at every compilation
        dynamo_utils._get_dynamo_config_for_logging = settings_if_they_can_be_written(
            dynamo_utils._get_dynamo_config_for_logging
        )


def settings_if_they_can_be_written(settings: Callable[[], str | None]) -> Callable[[], str | None]:
    """Wrap Dynamo's function that returns its settings for its log of compilations. It returns None where
    functions among them have no text (torch/_dynamo/utils.py, `_get_dynamo_config_for_logging`)."""

    def written() -> str | None:
        try:
            return settings()
        except TypeError:
            return None

    return written


def ignore_library_logging_from_now_on() -> None:
    """Call `ignore_library_logging` whenever Dynamo begins to trace, as transformers may be imported by
    then."""
    ignore_library_logging()
    if before_tracing not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(before_tracing)


@torch._dynamo.disable
def before_tracing(args: CallbackArgs) -> None:
    """Call `ignore_library_logging`, untraced by Dynamo. Dynamo would trace this where `loss.backward()` is
    called in a compiled function, and wait for the lock under which it calls it."""
    ignore_library_logging()


def trace_methods_of_attributes() -> None:
    """Keep graphs whole where a method of a string is called that is an attribute of a class of torch. Dynamo
    knows such a string, but not its methods. PEFT calls ``type(weight).__module__.startswith("torchao.")``
    in every DoRA layer, to check whether a weight is quantised."""
    before = GetAttrVariable.call_method
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def call_method(self, tx, name: str, args: list, kwargs: dict) -> object:
        value = self.as_python_constant() if self.is_python_constant() else None
        if isinstance(value, str):
            return ConstantVariable.create(value).call_method(tx, name, args, kwargs)
        return before(self, tx, name, args, kwargs)

    GetAttrVariable.call_method = call_method


@contextlib.contextmanager
def replaying(module: GraphModule):
    """Walk a Dynamo graph with its fake mode active, and yield a function that runs its switch nodes.
    Switches are those of gradients and autocast. All are as they were when the walk ends."""
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


@contextlib.contextmanager
def in_autocast(arguments: Sequence[tuple]):
    """Enter autocasts with these arguments, one inside the other."""
    with contextlib.ExitStack() as stack:
        for given in arguments:
            stack.callback(exit_autocast, enter_autocast(*given))
        yield


def modes_text() -> str:
    """Describe the modes that a function may query: gradients, autocast per device type, default dtype."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return f"{torch.is_grad_enabled()} {autocast} {torch.get_default_dtype()}"


BEGIN_TRANSFORM = (predispatch._vmap_increment_nesting, torch._C._functorch._grad_increment_nesting)
END_TRANSFORM = (predispatch._vmap_decrement_nesting, torch._C._functorch._grad_decrement_nesting)


ask_for_gradients = torch._functorch.eager_transforms._autograd_grad


def transform_step(node: Node) -> int:
    """Return 1 where ``torch.vmap`` or ``torch.func.grad`` begins at a node of Dynamo's graph, -1 where one
    ends, and 0 elsewhere."""
    return (node.target in BEGIN_TRANSFORM) - (node.target in END_TRANSFORM)


def is_other_transform(node: Node) -> bool:
    """Does a transform begin or end at a node that `transform_step` does not count (``torch.func.jvp``)?"""
    name = getattr(node.target, "__name__", "")
    return name.endswith(("_increment_nesting", "_decrement_nesting")) and not transform_step(node)


def is_hook(node: Node) -> bool:
    """Is this node a hook on a gradient? Dynamo writes it next to the value."""
    return isinstance(node.target, HigherOrderOperator) and node.target.__name__ == "register_hook"


def index_by_tensors():
    """Allow a tensor as the index in ``values[i]`` inside a ``torch.vmap``."""
    return TransformGetItemToIndex()


def symbolic_functions() -> dict[Callable, Callable]:
    """Map Dynamo's functions of symbolic floats, such as that for ``math.sqrt``, to those of tensors."""
    found = {n.removeprefix("_sym_"): getattr(torch, n) for n in dir(torch) if n.startswith("_sym_")}
    return {function: getattr(torch, n) for n, function in found.items() if hasattr(torch, n)}


def make_constant(floats: Sequence[torch.SymFloat]) -> None:
    """Make Dynamo trace again with these floats as constants. Raises its restart, or AssertionError where
    they are meant to be constants already: a restart would come back here."""
    # `expr` no longer contains symbols that have a value already.
    names = {str(symbol) for value in floats for symbol in value.node._expr.free_symbols}
    assert not all(map(TensorifyState.should_specialize, names)), f"{floats} stay symbols"
    for name in names:
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


@dataclass(frozen=True)
class GraphBreak:
    """The line where Dynamo split a graph, the reason, and torch's advice."""

    where: str
    reason: str
    remedy: str

    @property
    def is_of_unknown_size(self) -> bool:
        """True if Dynamo advises to keep values in the graph whose sizes depend on the data."""
        return "capture_dynamic_output_shape_ops" in self.remedy


def graph_break(module: GraphModule) -> GraphBreak | None:
    """Find the break that ends this Dynamo graph before the function ends, if any."""
    found = getattr(module, "compile_subgraph_reason", None)
    if not getattr(found, "graph_break", False):
        return None
    reason = found.reason
    if reason == "step_unsupported":  # of an inlined call, whose own reason is in the counters
        reason = next(reversed(counters["graph_break"]), reason)
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    last = found.user_stack[-1] if found.user_stack else None
    remedy = next((line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")), "")
    return GraphBreak(
        f"{last.filename}:{last.lineno}" if last else "a line unknown", lines[0].rstrip("."), remedy
    )


def is_all_of(module: GraphModule, caller: types.FrameType) -> bool:
    """Is this Dynamo graph the whole function that ``caller`` calls? It is not where the graph is broken, or
    belongs to a function that runs within that one."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame is not caller:
        if not frame.f_code.co_filename.startswith(AROUND):
            return False
        frame = frame.f_back
    return graph_break(module) is None


def seconds_so_far() -> float:
    """Return the seconds since Dynamo began with the function that it compiles now; 0 where it compiles
    none."""
    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) * 1e-9 if context.in_progress() else 0.0


@contextlib.contextmanager
def outside_of_metrics():
    """Allow a backward to be compiled while Dynamo is still compiling the function around it. Metrics of
    torch (2.11 to 2.13) take one backward for each of its compilations."""
    context = get_metrics_context()
    before = vars(context).copy()
    vars(context).update(vars(type(context)(context._on_exit)))
    try:
        yield
    finally:
        vars(context).update(before)


def forget_dynamic_sizes(values: Sequence[object]) -> None:
    """Remove marks from outputs of compiled graphs that tell Dynamo which of their sizes change. They would
    make symbols of these sizes in a graph where equal sizes of other inputs are constant."""
    for value in values:
        for mark in PROPAGATED if isinstance(value, torch.Tensor) else ():
            vars(value).pop(mark, None)


# The first since torch 2.12, the second up to torch 2.11.
PROPAGATED = ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices")

"""Operations on logits after the compiled function returned them.

They are recorded as expressions that are evaluated whole, or streamed. A `Source` is a lazy region of a
compiled graph (hidden states → logits), `Given` any other tensor, `Op` a recorded operation. Each
carries a fake tensor, so that shape, dtype and errors are known at once. An expression becomes one
graph, source included, which is compiled like any function: its logits then exist a chunk of tokens at a
time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..config import Config
from ..dynamo.reading.aten import drop_expansions
from ..passes.ir import Refusal, bytes_of
from ..passes.phases import summary
from ..passes.rules.forward import TO_THE_END, may_be_deferred, takes_lengths
from ..reporting.notices import warn_refused
from .fingerprints import TensorContents

# a value this many times smaller than the logits is computed; a wider one waits for its next operation
NARROW = 8
FAKES = internals.FakeTensorMode()


@dataclass(frozen=True)
class Modes:
    """Modes that are active where an operation is written. They are gradients, and the dtype of autocast on
    the logits' device."""

    grad: bool
    device: str
    autocast: torch.dtype | None

    @staticmethod
    def now(device: torch.device) -> Modes:
        enabled = torch.is_autocast_enabled(device.type)
        return Modes(
            torch.is_grad_enabled(), device.type, torch.get_autocast_dtype(device.type) if enabled else None
        )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, self.autocast, enabled=self.autocast is not None),
        ):
            yield


@dataclass(eq=False)
class Expression:
    """A recorded value: its fake, and the value itself once it was needed whole."""

    fake: object
    cached: torch.Tensor | None = field(default=None, init=False)

    def parts(self) -> Sequence[object]:
        """Return its operands and other arguments."""
        return ()

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the outside tensors that it reads."""
        return () if self.cached is None else (self.cached,)


@dataclass(eq=False)
class Given(Expression):
    """An outside tensor: labels, a temperature, a mask."""

    tensor: torch.Tensor
    contents: TensorContents | None = field(default=None, init=False)

    @staticmethod
    def of(tensor: torch.Tensor) -> Given:
        return Given(FAKES.from_tensor(tensor), tensor)

    def tensors(self) -> Sequence[torch.Tensor]:
        return (self.tensor,)

    def keep(self, by_copy: bool) -> None:
        """Prepare for a later read: keep a copy, or fingerprint the tensor to detect changes."""
        if by_copy:
            self.tensor = self.tensor.clone()
        elif self.contents is None:
            self.contents = TensorContents.of([self.tensor])

    def check(self) -> None:
        if self.cached is None and self.contents is not None:
            self.contents.check()


@dataclass(eq=False)
class LazyRegion:
    """A lazy region that is compiled once, shared by all of its results.

    module    a function that returns the region as a graph module
    compiled  one compiled function per expression over this region
    """

    module: Callable[[], GraphModule]
    config: Config
    compile: Callable[[GraphModule], Callable]
    serial: int = field(default_factory=itertools.count().__next__)
    compiled: dict[str, Callable] = field(default_factory=dict)


@dataclass(eq=False)
class Source(Expression):
    """Logits of one call: the region's inputs, their contents, and a function that computes the logits
    whole.

    hooks  run when a gradient arrives at any value that depends on these logits
    """

    region: LazyRegion
    inputs: tuple[object, ...]
    whole: Callable[[], torch.Tensor]
    modes: Modes
    contents: TensorContents
    hooks: list[Callable] = field(default_factory=list)

    def evaluate(self) -> torch.Tensor:
        with self.modes.active():
            self.cached = self.whole()
        self.watch(self.cached)
        return self.cached

    def watch(self, value: object) -> None:
        """Register the hooks to run before a gradient goes through a value."""
        for hook in self.hooks if isinstance(value, torch.Tensor) and value.requires_grad else ():
            value.register_hook(hook)

    def tensors(self) -> Sequence[torch.Tensor]:
        return (
            [v for v in self.inputs if isinstance(v, torch.Tensor)] if self.cached is None else (self.cached,)
        )

    def check(self) -> None:
        if self.cached is None:
            self.contents.check()


@dataclass(eq=False)
class Op(Expression):
    """One ATen operator, above autograd, or an item of several results."""

    target: Callable
    args: tuple
    kwargs: dict
    modes: Modes

    def parts(self) -> Sequence[object]:
        found: list[object] = []
        mapped((self.args, self.kwargs), found.append)
        return found

    def evaluate(self, known: dict[Expression, object]) -> object:
        args, kwargs = mapped(
            (self.args, self.kwargs), lambda leaf: known[leaf] if isinstance(leaf, Expression) else leaf
        )
        with self.modes.active():
            return self.target(*args, **kwargs)


def mapped(value: object, leaf: Callable[[object], object]) -> object:
    """Apply a function to every leaf of nested arguments."""
    if isinstance(value, (tuple, list)):
        items = [mapped(v, leaf) for v in value]
        return tuple(items) if type(value) is torch.Size else type(value)(items)
    if isinstance(value, dict):
        return {k: mapped(v, leaf) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(v, leaf) for v in (value.start, value.stop, value.step)))
    return leaf(value)


CALLS: dict[tuple, tuple[GraphModule, type] | None] = {}
"""Calls as ATen operators, by function, arguments and modes; None where a call must not be recorded. Kept
while the process lives: each step of a training loop makes the same calls."""

# methods that Python's operators call
DUNDERS = {"__iter__", "__getitem__"} | {f"__{n}__" for n in vars(operator) if not n.startswith("_")}


@functools.cache
def functions() -> frozenset[Callable]:
    """Return torch's functions of tensors, without those of the tensor object (copies, hooks, attributes)."""
    known = torch.overrides.get_overridable_functions().values()
    return frozenset(f for group in known for f in group if has_plain_name(getattr(f, "__name__", "")))


def has_plain_name(name: str) -> bool:
    return (
        not name.startswith("_") or name in DUNDERS or name.startswith("__r") and f"__{name[3:]}" in DUNDERS
    )


def in_operators(
    function: Callable, args: tuple, kwargs: dict
) -> tuple[GraphModule, type, list[Expression]] | None:
    """Trace a call on expressions to ATen operators; None where it must not be recorded. Returns the graph,
    the type of the call's result, and the expressions that the graph reads."""
    operands: list[Expression] = []

    def word(leaf: object) -> str:
        if not isinstance(leaf, Expression):
            return f"{type(leaf).__name__} {leaf!r}"
        if leaf not in operands:
            operands.append(leaf)
        return f"%{operands.index(leaf)}"

    if function not in functions() or kwargs.get("out") is not None:
        return None
    words = str(mapped((args, kwargs), word))
    fakes = [e.fake for e in operands]
    key = (function, words, *map(internals.describe, fakes), internals.modes_text())
    if key not in CALLS:
        CALLS[key] = operators_of(function, args, kwargs, operands)
    return None if CALLS[key] is None else (*CALLS[key], operands)


def operators_of(
    function: Callable, args: tuple, kwargs: dict, operands: Sequence[Expression]
) -> tuple[GraphModule, type] | None:
    kinds: list[type] = []

    def call(*values):
        given = dict(zip(operands, values))
        plain = mapped((args, kwargs), lambda leaf: given[leaf] if isinstance(leaf, Expression) else leaf)
        result = function(*plain[0], **plain[1])
        kinds.append(type(result))
        return result

    try:
        with FAKES:
            module = internals.before_autograd(call, [e.fake for e in operands])
    except Exception:  # eager raises the error, when the operation runs on the values
        return None
    drop_expansions(module.graph)
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    fit = all(n.op == "get_attr" or n.target is operator.getitem or may_be_deferred(n) for n in nodes)
    return (module, kinds[-1]) if fit else None


def recorded(function: Callable, args: tuple, kwargs: dict, device: torch.device) -> object:
    """Apply a function to expressions; None if it must not be recorded, or fails. Returns the results as
    expressions, in the structure that the function returns."""
    found = in_operators(function, args, kwargs)
    if found is None:
        return None
    module, kind, operands = found
    modes, values = Modes.now(device), dict(zip(module.graph.find_nodes(op="placeholder"), operands))
    try:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = Given.of(getattr(module, node.target))
            elif node.op == "call_function":
                given = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
                values[node] = operation(node.target, *given, modes)
    except Exception:
        return None
    result = torch.fx.node.map_arg(next(iter(module.graph.find_nodes(op="output"))).args[0], values.get)
    results = result if isinstance(result, (tuple, list)) else (result,)
    tensors = all(isinstance(r, Expression) and isinstance(r.fake, torch.Tensor) for r in results)
    if not results or not tensors:
        return None
    return result if isinstance(result, Expression) else kind(results)


def operation(target: Callable, args: tuple, kwargs: dict, modes: Modes) -> Op:
    """Build an operator on expressions, with its fake value. Where the operator returns an operand itself,
    that operand is returned."""
    fakes = mapped((args, kwargs), lambda leaf: leaf.fake if isinstance(leaf, Expression) else leaf)
    with FAKES, modes.active():
        fake = target(*fakes[0], **fakes[1])
    same = next((a for a in args if isinstance(a, Expression) and a.fake is fake), None)
    return Op(fake, target, args, kwargs, modes) if same is None else same


def ordered(results: Sequence[Expression]) -> list[Expression]:
    """List all expressions that some results need, operands first; a computed value needs none."""
    found: dict[Expression, None] = {}
    stack: list[tuple[Expression, bool]] = [(r, False) for r in reversed(results)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack += [
                (p, False) for p in (node.parts() if node.cached is None else ()) if isinstance(p, Expression)
            ]
    return list(found)


def sources(expression: Expression) -> list[Source]:
    return [n for n in ordered([expression]) if isinstance(n, Source)]


def whole(results: Sequence[Expression]) -> list[torch.Tensor]:
    """Evaluate as eager code does, with logits computed once at full length for all of their results."""
    known: dict[Expression, object] = {}
    with internals.apart_from_checkpoint():
        for node in ordered(results):
            if node.cached is not None:
                known[node] = node.cached
            elif isinstance(node, Op):
                known[node] = node.evaluate(known)
            else:
                node.check()
                known[node] = node.tensor if isinstance(node, Given) else node.evaluate()
    return [known[r] for r in results]


def streamed(results: Sequence[Expression]) -> Sequence[torch.Tensor]:
    """Compute values far smaller than logits in one pass over tokens; whole where that fails."""
    written = WrittenExpression(results)
    source = next(n for n in written.nodes if isinstance(n, Source))
    first = source.region
    text = "\n".join(written.text)
    for node in written.nodes:
        if not isinstance(node, Op):
            node.check()
    if text not in first.compiled:
        first.compiled[text] = first.compile(written.module())
    grad = any(isinstance(r.fake, torch.Tensor) and r.fake.requires_grad for r in results)
    plain = torch.autocast(results[0].fake.device.type, enabled=False)
    try:
        with internals.apart_from_checkpoint(), torch.set_grad_enabled(grad), plain:
            values = [
                v.to(r.fake.dtype) if isinstance(r.fake, torch.Tensor) else v
                for v, r in zip(first.compiled[text](*written.inputs), results)
            ]  # compiled autocast may widen
        for logits in (n for n in written.nodes if isinstance(n, Source) and n.cached is None):
            for value in values:
                logits.watch(value)
        return values
    except internals.NO_DEFECTS:
        raise
    except Exception as error:  # as in CompiledRegion.compiled: warn, and compute the whole exactly
        if first.config.strict:
            raise
        internals.log.debug("streaming what was done to logits failed", exc_info=True)
        warn_refused(
            Refusal(
                "logits",
                f"The operations on these logits cannot be streamed ({summary(error)})",
                "Compute the loss inside the compiled function",
            ),
            bytes_of(source.fake),
        )
        return whole(results)


class WrittenExpression:
    """An expression as text, free of shapes, and as a graph.

    inputs  tensors, and numbers that may change from step to step: lengths, bounds of slices,
            temperatures
    """

    def __init__(self, results: Sequence[Expression]):
        self.results, self.nodes = results, ordered(results)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.inputs: list[object] = []
        self.text: list[str] = []
        for node in self.nodes:
            self.text.append(self.line(node))
        self.text.append(str([self.index[r] for r in results]))

    def line(self, node: Expression) -> str:
        if node.cached is not None or isinstance(node, Given):
            self.inputs.append(node.tensor if node.cached is None else node.cached)
            return "given"
        if isinstance(node, Source):
            internals.forget_dynamic_sizes(node.inputs)
            self.inputs += node.inputs
            return f"source {node.region.serial} {node.modes}"

        def word(leaf: object) -> str:
            if isinstance(leaf, Expression):
                return f"%{self.index[leaf]}"
            if isinstance(leaf, Number):
                self.inputs.append(leaf.value)
                return "?"
            return repr(leaf)

        return f"{node.target} {mapped(numbered(node), word)} {node.modes}"

    def module(self) -> GraphModule:
        graph, attributes, values = Graph(), torch.nn.Module(), {}
        inputs = iter([graph.placeholder(f"in_{i}") for i in range(len(self.inputs))])
        switch: tuple[torch.dtype, Node] | None = None
        for node in self.nodes:
            if node.cached is not None or isinstance(node, Given):
                values[node] = next(inputs)
                continue
            if (switch and switch[0]) != node.modes.autocast:
                if switch:
                    graph.call_function(internals.exit_autocast, (switch[1],))
                switch = node.modes.autocast and (
                    node.modes.autocast,
                    graph.call_function(
                        internals.enter_autocast,
                        (node.modes.device, node.modes.autocast, True, True),
                    ),
                )
            values[node] = (
                self.source(node, graph, inputs, attributes)
                if isinstance(node, Source)
                else self.op(node, graph, inputs, values)
            )
        if switch:
            graph.call_function(internals.exit_autocast, (switch[1],))
        graph.output(tuple(values[r] for r in self.results))
        return GraphModule(attributes, graph)

    @staticmethod
    def source(node: Source, graph: Graph, inputs: Iterator[Node], attributes: torch.nn.Module) -> Node:
        module, values = node.region.module(), {}
        for n in module.graph.nodes:
            if n.op == "placeholder":
                values[n] = next(inputs)
            elif n.op == "get_attr":
                name = f"source_{node.region.serial}_{n.target}".replace(".", "_")
                setattr(attributes, name, operator.attrgetter(n.target)(module))
                values[n] = graph.get_attr(name)
            elif n.op == "output":
                return values[n.args[0][0]]
            else:
                values[n] = graph.node_copy(n, lambda a: values[a])

    def op(self, node: Op, graph: Graph, inputs: Iterator[Node], values: dict[Expression, Node]) -> Node:
        def operand(leaf: object) -> object:
            if isinstance(leaf, Expression):
                return values[leaf]
            return next(inputs) if isinstance(leaf, Number) else leaf

        call = graph.call_function(node.target, *mapped(numbered(node), operand))
        tensor = isinstance(
            node.fake, torch.Tensor
        )  # several results are taken one by one by operations of their own
        return graph.call_function(torch.Tensor.detach, (call,)) if tensor and not node.modes.grad else call


@dataclass(frozen=True)
class Number:
    """A number that may change from step to step, and so is an input of the compiled expression. Examples are
    a length, a bound of rows, and a temperature."""

    value: float


FIXED = (-1, 0, 1, TO_THE_END)  # lengths with a special meaning: inferred, none, broadcast, all


def numbered(node: Op) -> tuple[tuple, dict]:
    """Mark the changing numbers among the arguments of an operation."""
    if node.target is operator.getitem:
        return node.args, node.kwargs
    names = [a.name for a in node.target._schema.arguments]

    def marked(name: str, value: object) -> object:
        lengths = takes_lengths(node.target, name)

        def leaf(x: object) -> object:
            changes = type(x) is float or lengths and type(x) is int and x not in FIXED
            return Number(x) if changes else x

        return mapped(value, leaf)

    args = tuple(marked(name, value) for name, value in zip(names, node.args))
    return args, {name: marked(name, value) for name, value in node.kwargs.items()}

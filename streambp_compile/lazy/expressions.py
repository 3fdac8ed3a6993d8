"""What was done to logits after the compiled function returned them: expressions that are evaluated whole, or
streamed.

A `Source` is a postponed region of a compiled graph (hidden states → logits), `Given` any other tensor, `Op`
a recorded operation. Each
carries a fake tensor, so that shape, dtype and errors are known at once. An expression becomes one graph,
source included, which is
compiled like any function: its logits then exist a chunk of tokens at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from .. import internals
from ..config import Config
from ..passes.ir import Refusal, bytes_of
from ..passes.phases import summary
from ..report import warn_refused
from .fingerprints import Contents

# a value this many times smaller than the logits is worth computing; anything wider waits for what is done to
# it next
NARROW = 8
FAKES = internals.FakeTensorMode()

POINTWISE = """
    add sub rsub subtract mul multiply div divide true_divide neg negative exp expm1 log log2 log1p pow
    square sqrt rsqrt abs sigmoid tanh clamp clamp_min clamp_max minimum maximum where masked_fill eq ne
    gt ge lt le isnan isinf isfinite logical_not logical_and logical_or softplus logsigmoid nan_to_num
    xlogy logaddexp reciprocal relu sign __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
    __rtruediv__ __div__ __rdiv__ __neg__ __pow__ __rpow__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__ float
    double half bfloat16 to type type_as detach clone contiguous
"""
VIEWS = """
    view reshape flatten unflatten view_as reshape_as transpose swapaxes permute movedim unsqueeze squeeze
    expand expand_as __getitem__ select narrow split chunk tensor_split unbind stack cat concat
    concatenate
"""
VOCABULARY = """
    log_softmax softmax gather take_along_dim logsumexp argmax argmin max min amax amin sum mean var std
    topk index_select cross_entropy nll_loss kl_div norm
"""
RECORDED = frozenset(f"{POINTWISE} {VIEWS} {VOCABULARY}".split())
SIZED = {
    "view",
    "reshape",
    "split",
    "narrow",
    "unflatten",
    "expand",
}  # their whole numbers are lengths, free to change from step to step
OPERATORS = {
    f"__{n}__": getattr(operator, n)
    for n in ("add", "sub", "mul", "truediv", "neg", "pow", "eq", "ne", "gt", "ge", "lt", "le", "getitem")
}
OPERATORS["__div__"] = operator.truediv
REVERSED = {
    "__radd__": operator.add,
    "__rsub__": operator.sub,
    "__rmul__": operator.mul,
    "__rtruediv__": operator.truediv,
    "__rdiv__": operator.truediv,
    "__rpow__": operator.pow,
}


@dataclass(frozen=True)
class Modes:
    """The switches that hold where an operation is written: gradients, and autocast to which dtype on the
    logits' device."""

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
    """A recorded value: its fake, and the value itself once somebody needed it whole."""

    fake: object
    made: torch.Tensor | None = field(default=None, init=False)

    def parts(self) -> Sequence[object]:
        """Its operands, and whatever else it is called with."""
        return ()

    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors from outside that it reads."""
        return () if self.made is None else (self.made,)


@dataclass(eq=False)
class Given(Expression):
    """A tensor from outside: labels, a temperature, a mask."""

    tensor: torch.Tensor
    contents: Contents | None = field(default=None, init=False)

    @staticmethod
    def of(tensor: torch.Tensor) -> Given:
        return Given(FAKES.from_tensor(tensor), tensor)

    def tensors(self) -> Sequence[torch.Tensor]:
        return (self.tensor,)

    def keep(self, by_copy: bool) -> None:
        """It will be read later: keep a copy, or notice changes."""
        if by_copy:
            self.tensor = self.tensor.clone()
        elif self.contents is None:
            self.contents = Contents.of([self.tensor])

    def check(self) -> None:
        if self.made is None and self.contents is not None:
            self.contents.check()


@dataclass(eq=False)
class LazyRegion:
    """A postponed region as compiled once: what all of its results share.

    module   a function that returns the region as a graph module
    compiled one compiled function per expression over this region
    """

    module: Callable[[], GraphModule]
    config: Config
    compile: Callable[[GraphModule], Callable]
    serial: int = field(default_factory=itertools.count().__next__)
    compiled: dict[str, Callable] = field(default_factory=dict)


@dataclass(eq=False)
class Source(Expression):
    """Logits of one call: the region's inputs, what they held, and a function that computes the logits
    whole."""

    region: LazyRegion
    inputs: tuple[object, ...]
    whole: Callable[[], torch.Tensor]
    modes: Modes
    contents: Contents

    def evaluate(self) -> torch.Tensor:
        with self.modes.active():
            self.made = self.whole()
        return self.made

    def tensors(self) -> Sequence[torch.Tensor]:
        return [v for v in self.inputs if isinstance(v, torch.Tensor)] if self.made is None else (self.made,)

    def check(self) -> None:
        if self.made is None:
            self.contents.check()


@dataclass(eq=False)
class Op(Expression):
    """One operation, as it was written."""

    function: Callable
    args: tuple
    kwargs: dict
    modes: Modes

    @property
    def name(self) -> str:
        return self.function.__name__

    def parts(self) -> Sequence[object]:
        found: list[object] = []
        mapped((self.args, self.kwargs), lambda leaf, free: found.append(leaf))
        return found

    def evaluate(self, known: dict[Expression, object]) -> object:
        args, kwargs = mapped(
            (self.args, self.kwargs), lambda leaf, free: known[leaf] if isinstance(leaf, Expression) else leaf
        )
        with self.modes.active():
            return self.function(*args, **kwargs)


def mapped(value: object, leaf: Callable[[object, bool], object], free: bool = False) -> object:
    """Nested arguments with a function applied to every leaf; ``free`` tells it of bounds of slices."""
    if isinstance(value, (tuple, list)):
        return (
            type(value)([mapped(v, leaf, free) for v in value])
            if type(value) is not torch.Size
            else tuple(value)
        )
    if isinstance(value, dict):
        return {k: mapped(v, leaf, free) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(v, leaf, True) for v in (value.start, value.stop, value.step)))
    return leaf(value, free)


def recorded(function: Callable, args: tuple, kwargs: dict, device: torch.device) -> Op | None:
    """An operation on expressions as an expression, or None if it is not one that is recorded, or fails."""
    if getattr(function, "__name__", "") not in RECORDED or kwargs.get("out") is not None:
        return None
    fakes = mapped((args, kwargs), lambda leaf, free: leaf.fake if isinstance(leaf, Expression) else leaf)
    try:
        with FAKES:
            fake = function(*fakes[0], **fakes[1])
    except Exception:  # eager says why, when the operation is done on the values
        return None
    tensors = fake if isinstance(fake, (tuple, list)) else (fake,)
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    return Op(fake, function, args, kwargs, Modes.now(device))


def item(op: Op, index: int) -> Op:
    return Op(op.fake[index], operator.getitem, (op, index), {}, op.modes)


def ordered(results: Sequence[Expression]) -> list[Expression]:
    """Everything that some results need, operands first. A value that exists already needs nothing."""
    found: dict[Expression, None] = {}
    stack: list[tuple[Expression, bool]] = [(r, False) for r in reversed(results)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack += [
                (p, False) for p in (node.parts() if node.made is None else ()) if isinstance(p, Expression)
            ]
    return list(found)


def sources(expression: Expression) -> list[Source]:
    return [n for n in ordered([expression]) if isinstance(n, Source)]


def whole(results: Sequence[Expression]) -> list[torch.Tensor]:
    """Evaluate as eager does. Logits are computed at full length, once for all that is made of them."""
    known: dict[Expression, object] = {}
    for node in ordered(results):
        if node.made is not None:
            known[node] = node.made
        elif isinstance(node, Op):
            known[node] = node.evaluate(known)
        else:
            node.check()
            known[node] = node.tensor if isinstance(node, Given) else node.evaluate()
    return [known[r] for r in results]


def streamed(results: Sequence[Expression]) -> Sequence[torch.Tensor]:
    """Values far smaller than logits, in one pass over tokens; whole where that fails."""
    written = Written(results)
    source = next(n for n in written.nodes if isinstance(n, Source))
    first = source.region
    text = "\n".join(written.text)
    for node in written.nodes:
        if not isinstance(node, Op):
            node.check()
    if text not in first.compiled:
        first.compiled[text] = first.compile(written.module())
    grad = any(isinstance(r.fake, torch.Tensor) and r.fake.requires_grad for r in results)
    device = results[0].fake.device.type
    try:
        with torch.set_grad_enabled(grad), torch.autocast(device, enabled=False):
            made = first.compiled[text](*written.inputs)
            return [
                m.to(r.fake.dtype) if isinstance(r.fake, torch.Tensor) else m for m, r in zip(made, results)
            ]  # compiled autocast may widen
    except internals.NO_DEFECTS:
        raise
    except Exception as error:  # as in CompiledRegion.compiled: loud, whole, exact
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


class Written:
    """An expression as text, free of shapes, and as a graph.

    inputs  tensors, and numbers that may change from step to step: lengths, bounds of slices, temperatures
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
        if node.made is not None or isinstance(node, Given):
            self.inputs.append(node.tensor if node.made is None else node.made)
            return "given"
        if isinstance(node, Source):
            self.inputs += node.inputs
            return f"source {node.region.serial} {node.modes}"

        def word(leaf: object, free: bool) -> str:
            if isinstance(leaf, Expression):
                return f"%{self.index[leaf]}"
            if self.is_input(node, leaf, free):
                self.inputs.append(leaf)
                return "?"
            return repr(leaf)

        return (
            f"{torch.typename(node.function)} {node.name} {mapped((node.args, node.kwargs), word)} "
            f"{node.modes}"
        )

    @staticmethod
    def is_input(node: Op, leaf: object, free: bool) -> bool:
        return type(leaf) is float or type(leaf) is int and (free or node.name in SIZED)

    def module(self) -> GraphModule:
        graph, attributes, values = Graph(), torch.nn.Module(), {}
        inputs = iter([graph.placeholder(f"in_{i}") for i in range(len(self.inputs))])
        switch: tuple[torch.dtype, Node] | None = None
        for node in self.nodes:
            if node.made is not None or isinstance(node, Given):
                values[node] = next(inputs)
                continue
            if (switch and switch[0]) != node.modes.autocast:
                if switch:
                    graph.call_function(torch.amp.autocast_mode._exit_autocast, (switch[1],))
                switch = node.modes.autocast and (
                    node.modes.autocast,
                    graph.call_function(
                        torch.amp.autocast_mode._enter_autocast,
                        (node.modes.device, node.modes.autocast, True, True),
                    ),
                )
            values[node] = (
                self.source(node, graph, inputs, attributes)
                if isinstance(node, Source)
                else self.op(node, graph, inputs, values)
            )
        if switch:
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (switch[1],))
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
        def operand(leaf: object, free: bool) -> object:
            if isinstance(leaf, Expression):
                return values[leaf]
            return next(inputs) if self.is_input(node, leaf, free) else leaf

        args, kwargs = mapped((node.args, node.kwargs), operand)
        if node.name in OPERATORS:
            made = graph.call_function(OPERATORS[node.name], args, kwargs)
        elif node.name in REVERSED:
            made = graph.call_function(REVERSED[node.name], args[::-1], kwargs)
        elif getattr(torch.Tensor, node.name, None) is node.function:
            made = graph.call_method(node.name, args, kwargs)
        else:
            made = graph.call_function(node.function, args, kwargs)
        tensor = isinstance(
            node.fake, torch.Tensor
        )  # of several results, each is taken by an operation of its own
        return graph.call_method("detach", (made,)) if tensor and not node.modes.grad else made

"""Graphs of block functions, for any number of blocks, and their gradients.

A forward graph is copied from a captured one: sizes along blocks are told by marks. A gradient is traced for
three numbers of blocks; sizes that differ between the traces are those along blocks.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import internals
from ..passes.ir import Mark, bytes_of, hint, is_tensor, is_view, shape_of, value_of
from ..passes.kernels.blocks import FUNCTIONS, BlockAxis, BlockFunction, Unit, over_blocks
from ..passes.rules import find_rule, for_any_layout, functional
from ..passes.rules.forward import mutated
from ..passes.token_propagation import TokenPropagation

aten = torch.ops.aten
COUNTS = (3, 5, 8)  # numbers of blocks that gradients are traced for


class NoBlockFunction(Exception):
    """Why some nodes are no function of blocks; they stay as they are."""


class BlockGraph:
    """Copies nodes of a captured graph, for any number of blocks.

    operands  where the placeholders have rows or blocks
    """

    def __init__(self, marks: TokenPropagation, length: int, count: int, full: bool):
        self.marks, self.length, self.blocks, self.full = marks, length, count, full
        self.graph, self.values = Graph(), dict[Node, Node]()
        self.count = self.graph.placeholder("count")
        self.operands: list[BlockAxis] = []

    def times(self, factor: int) -> Node:
        return self.graph.call_function(operator.mul, (self.count, factor))

    def read(self, value: Node, place: BlockAxis, mark: Mark | None) -> None:
        """Read a captured value as an operand; its rows, or blocks, have a dimension of their own there."""
        placeholder = self.graph.placeholder(f"operand_{len(self.operands)}")
        self.operands.append(place)
        if mark is not None and (mark.outer != 1 or self.inner(place, mark) != 1):
            self.values[value] = self.graph.call_function(
                aten.reshape.default, (placeholder, self.sizes(value))
            )
        else:
            self.values[value] = placeholder

    def inner(self, place: BlockAxis, mark: Mark) -> int:
        return mark.inner // (self.length if place.along is Unit.ROWS else 1)

    def sizes(self, value: Node) -> list:
        found = self.marks.of(value)
        return [
            self.times(found[d].outer * found[d].inner) if d in found else size
            for d, size in enumerate(shape_of(value))
        ]

    def result(self, value: Node, per_row: bool) -> tuple[BlockFunction, Mark]:
        """The function whose result is a captured value, and the mark of that; ``per_row``: rows of tokens,
        and not blocks."""
        made, mark = self.copied(value), next(iter(self.marks.of(value).values()))
        unit = self.length if per_row else 1
        shape, outer, inner = list(shape_of(value)), mark.outer, mark.inner // unit
        place = BlockAxis(Unit.ROWS if per_row else Unit.BLOCKS, mark.dim + (outer != 1))
        apart = [s for s in (outer, 0, inner) if s != 1]
        shape[mark.dim : mark.dim + 1] = [s or self.blocks * unit for s in apart]
        if len(apart) > 1:
            sizes = [self.times(unit) if d == place.dim else size for d, size in enumerate(shape)]
            made = self.graph.call_function(aten.reshape.default, (made, sizes))
        self.graph.output(made)
        module, dtype = GraphModule({}, self.graph), value_of(value).dtype
        operands = tuple(self.operands)
        width = most_alive(list(self.values)) // (self.blocks * self.length)
        return BlockFunction(
            module, self.length, operands, place, tuple(shape), dtype, width, self.full
        ), mark

    def copied(self, value: Node) -> Node:
        if value not in self.values:
            rule = find_rule(value)
            if rule is None and value.target is not operator.getitem:
                raise NoBlockFunction(f"{value.target} has no rule")
            at = None if rule is None else rule.shape_arg
            args = [
                self.sizes(value) if i == at else map_arg(a, self.copied) for i, a in enumerate(value.args)
            ]
            kwargs = map_arg(value.kwargs, self.copied)
            target = for_any_layout(value.target)
            if mutated(value) is not None:  # of a value that nobody else reads
                target = functional(target)
            if target is None:
                raise NoBlockFunction(f"{value.target} has no form that writes into nothing")
            self.values[value] = self.graph.call_function(target, tuple(args), kwargs)
        return self.values[value]


def register(found: BlockFunction, fakes: Sequence[torch.Tensor]) -> str:
    """Enter a function into the table under a name of its contents, with its gradients.

    fakes  the operands, which tell dtypes, other sizes, and which of them want gradients
    """
    described = [
        f"{shape_at(x, axis, found, 2)}{x.dtype}{x.device}{x.requires_grad}"
        for x, axis in zip(fakes, found.operands)
    ]
    text = (
        f"{found.module.code}{found.operands}{found.result}{found.length}{found.full}{found.dtype}{described}"
    )
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    if name not in FUNCTIONS:
        wanted = [i for i, x in enumerate(fakes) if x.requires_grad and x.dtype.is_floating_point]
        if wanted:
            check_differentiable(found.module)
        try:
            grads = dict(zip((f"{name}_{i}" for i in wanted), gradients_of(found, fakes, wanted)))
        except (RuntimeError, NotImplementedError) as error:  # an op inside has none
            raise NoBlockFunction(f"there is no gradient: {error}") from error
        FUNCTIONS.update({name: found, **grads})
    return name


def check_differentiable(module: GraphModule) -> None:
    """Raises `NoBlockFunction` for an operator without a gradient: autograd would take it for zero."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not internals.has_gradient(node.target):
            raise NoBlockFunction(f"{node.target} has no gradient")


def shape_at(x: torch.Tensor, axis: BlockAxis, found: BlockFunction, count: int) -> list[int]:
    """The shape of an operand of so many blocks."""
    shape = list(map(hint, x.shape))
    if axis.along is not Unit.WHOLE:
        shape[axis.dim] = count * (found.length if axis.along is Unit.ROWS else 1)
    return shape


def gradients_of(
    found: BlockFunction, fakes: Sequence[torch.Tensor], wanted: Sequence[int]
) -> Iterator[BlockFunction]:
    """The gradients of operands, each as a function of that of the result and of all operands."""
    traces = [traced(found, fakes, wanted, count) for count in COUNTS] if wanted else []
    for at, i in enumerate(wanted):
        parts = [one_output(trace, at) for trace in traces]
        yield BlockFunction(
            for_any_count(parts),
            found.length,
            (found.result, *found.operands),
            found.operands[i],
            tuple(map(hint, fakes[i].shape)),
            fakes[i].dtype,
            most_alive(list(parts[0].nodes)) // (COUNTS[0] * found.length),
            found.full,
        )


def one_output(graph: Graph, at: int) -> Graph:
    """A graph with one of its outputs alone."""
    copy = Graph()
    copied: dict[Node, Node] = {}
    copy.graph_copy(graph, copied)
    copy.output(copied[graph.output_node().args[0][at]])
    copy.eliminate_dead_code()
    return copy


def most_alive(nodes: Sequence[Node]) -> int:
    """Bytes that exist at the widest moment, where nodes are computed in this order and dropped after their
    last reader."""
    source: dict[Node, Node] = {}  # whose memory a view is
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        read = [source[a] for a in node.all_input_nodes if a in source]
        if node.op == "call_function" and is_tensor(node):
            source[node] = read[0] if is_view(node) and read else node
            read.append(source[node])
        last |= dict.fromkeys(read, i)
    ending: dict[int, int] = {}
    for node, i in last.items():
        ending[i] = ending.get(i, 0) + bytes_of(value_of(node))
    alive = most = 0
    for i, node in enumerate(nodes):
        alive += bytes_of(value_of(node)) if source.get(node) is node else 0
        most = max(most, alive)
        alive -= ending.get(i, 0)
    return most


def traced(found: BlockFunction, fakes: Sequence[torch.Tensor], wanted: Sequence[int], count: int) -> Graph:
    """The gradients for so many blocks."""
    unit = {Unit.ROWS: found.length, Unit.BLOCKS: 1}
    shape = list(found.shape)
    shape[found.result.dim] = count * unit[found.result.along]

    def run(grad: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        return gradients_at(lambda *given: found.module(count, *given), operands, wanted, grad)

    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        grad = torch.empty(shape, dtype=found.dtype, device=fakes[0].device)
        operands = [
            torch.empty(shape_at(x, a, found, count), dtype=x.dtype, device=x.device)
            for x, a in zip(fakes, found.operands)
        ]
        module = internals.make_fx(run, decomposition_table=internals.decompositions())(grad, *operands)
    return module.graph


def gradients_at(
    function: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    wanted: Sequence[int],
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of some operands of a function, from that of its result."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(operands)]
        read = [given[i] for i in wanted]
        return list(torch.autograd.grad(function(*given), read, grad, materialize_grads=True))


def for_any_count(traces: Sequence[Graph]) -> GraphModule:
    """One graph for traces of several numbers of blocks, with that number as its first input.

    Raises `NoBlockFunction` where they differ in anything but sizes that grow with it.
    """
    joining = Joining()
    for nodes in zip(*(t.nodes for t in traces), strict=True):
        if len({(n.op, n.target) for n in nodes}) != 1 or nodes[0].op == "get_attr":
            raise NoBlockFunction(f"{nodes[0]} is not the same for every number of blocks")
        joining.add(nodes)
    return GraphModule({}, joining.graph)


class Joining:
    """Writes the graph that several traces are instances of, for operands of any layout."""

    def __init__(self) -> None:
        self.graph, self.values = Graph(), dict[Node, Node]()
        self.count = self.graph.placeholder("count")

    def add(self, nodes: Sequence[Node]) -> None:
        """The next node, given as it is in each trace."""
        node = nodes[0]
        if node.op == "output":
            self.graph.output(self.joined([n.args[0] for n in nodes]))
        elif node.op == "placeholder":
            self.values[node] = self.graph.placeholder(node.name)
        else:
            args, kwargs = self.joined([n.args for n in nodes]), self.joined([dict(n.kwargs) for n in nodes])
            target, into = for_any_layout(node.target), mutated(node)
            if into is not None:
                target = functional(target)
                if target is None or is_view(into) or any(map(is_view, into.users)):
                    raise NoBlockFunction(f"{node.target} writes into a value that others view")
            self.values[node] = self.graph.call_function(target, args, kwargs)
            if into is not None:
                self.values[into] = self.values[node]

    def joined(self, given: Sequence[Any]) -> Any:
        """An argument, given as it is in each trace."""
        first = given[0]
        if isinstance(first, Node):
            return self.values[first]
        if isinstance(first, (list, tuple)):
            return type(first)(self.joined(items) for items in zip(*given, strict=True))
        if isinstance(first, dict):
            return {key: self.joined([g[key] for g in given]) for key in first}
        if all(g == first for g in given):
            return first
        if not all(isinstance(g, int) for g in given):
            raise NoBlockFunction(f"{given} differ with the number of blocks")
        return self.size(given)

    def size(self, given: Sequence[int]) -> Node:
        factor, rest = divmod(given[1] - given[0], COUNTS[1] - COUNTS[0])
        start = given[0] - factor * COUNTS[0]
        if rest or any(g != start + factor * c for g, c in zip(given, COUNTS)):
            raise NoBlockFunction(f"sizes {given} do not grow with the number of blocks")
        grown = self.graph.call_function(operator.mul, (self.count, factor))
        return self.graph.call_function(operator.add, (grown, start)) if start else grown


def write_out(module: GraphModule) -> bool:
    """Let a region that runs unchunked trace into its block functions. Are there any in it?"""
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.streambp.over_blocks.default)
    for node in calls:
        node.target = over_blocks
    module.recompile()
    return bool(calls)


def keep_operands(ctx, inputs: tuple, output: torch.Tensor) -> None:
    operands, ctx.function = inputs
    ctx.save_for_backward(*operands)


def gradients(ctx, grad: torch.Tensor):
    """Each gradient of a block function is one too."""
    operands = list(ctx.saved_tensors)
    needs = [
        isinstance(x, torch.Tensor) and f"{ctx.function}_{i}" in FUNCTIONS for i, x in enumerate(operands)
    ]
    found = [
        torch.ops.streambp.over_blocks(([grad, *operands]), f"{ctx.function}_{i}") if need else None
        for i, need in enumerate(needs)
    ]
    return found, None


torch.library.register_autograd("streambp::over_blocks", gradients, setup_context=keep_operands)


def keep_shift(ctx, inputs: tuple, output: torch.Tensor) -> None:
    _, ctx.dim, ctx.by = inputs


def shifted_back(ctx, grad: torch.Tensor):
    return torch.ops.streambp.shifted(grad, ctx.dim, -ctx.by), None, None


torch.library.register_autograd("streambp::shifted", shifted_back, setup_context=keep_shift)


def keep_scan(ctx, inputs: tuple, output: torch.Tensor) -> None:
    _, ctx.dim, ctx.kind = inputs


def scanned_back(ctx, grad: torch.Tensor):
    if ctx.kind != "cumsum":
        raise NotImplementedError(f"a reverse {ctx.kind} has no gradient")
    return grad.cumsum(ctx.dim), None, None


torch.library.register_autograd("streambp::reverse_scan", scanned_back, setup_context=keep_scan)

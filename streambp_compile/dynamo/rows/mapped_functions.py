"""Functions that are mapped over rows, on their way into the table that operators read.

The rows are those that a mask picks (picked_rows.py), or one token after another (loops/token_loops.py).
Gradients are traced once, with a symbol for the number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import Mark, bytes_of, is_tensor, is_view, outputs_of, value_of
from ...passes.kernels.mapped_functions import FUNCTIONS, MappedFunction, MappedValue
from ...passes.rules import for_any_layout, functional
from ...passes.rules.forward import mutated
from ...passes.token_propagation import Signatures, TokenPropagation

streambp = torch.ops.streambp


class NotRowByRow(Exception):
    """Raised with the reason why operations on picked rows are no function of single rows."""


def name_of(found: MappedFunction, fakes: Sequence[Tensor]) -> str:
    """Return the name of a function: a hash of its contents and its operands."""
    described = [f"{tuple(x.shape)}{x.dtype}{x.device}{x.requires_grad}" for x in fakes]
    text = f"{found.module.code}{found.operands}{found.results}{described}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FunctionGraph:
    """A graph of copied nodes. Values that they read from outside are its operands.

    operands  for each value from outside, by what it is called there, its placeholder
    """

    def __init__(self, *given: str):
        self.graph, self.operands = Graph(), dict[Any, Node]()
        self.given = [self.graph.placeholder(name) for name in given]

    def operand(self, key: object) -> Node:
        if key not in self.operands:
            places = [*self.given, *self.operands.values()]
            with self.graph.inserting_after(places[-1] if places else None):
                self.operands[key] = self.graph.placeholder(f"operand_{len(self.operands)}")
        return self.operands[key]

    def copy(self, node: Node, read: Callable[[Node], Node]) -> Node:
        """Copy a node, each operand of which ``read`` finds. A copy writes into no value. Raises
        `NotRowByRow` where it would have to."""
        args, kwargs = map_arg((node.args, node.kwargs), read)
        target = node.target if mutated(node) is None else functional(node.target)
        if target is None:
            raise NotRowByRow(f"{node.target} has no form that writes into nothing")
        return self.graph.create_node(node.op, target, args, kwargs)

    def module(self, results: Sequence[Node], root: object = None) -> GraphModule:
        self.graph.output(results)
        return GraphModule({} if root is None else root, self.graph)


def traced(function: Callable[..., object], create: Callable[[int], Sequence[Tensor]]) -> GraphModule:
    """Trace a function of a number of rows and of operands, for any number and any layout. No node of the
    graph writes into a value.

    create  creates the operands for a number of rows

    Raises `NotForAnyCount` where the function differs with the number of rows, or has a constant tensor.
    """
    module = internals.for_any_count(function, create)
    if any(mutated(node) is not None for node in module.graph.nodes):
        module = internals.for_any_count(torch.func.functionalize(module), create)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            raise internals.NotForAnyCount(f"{node} is a constant tensor")
        node.target = for_any_layout(node.target) if node.op == "call_function" else node.target
    module.recompile()
    return module


def gradients_at(
    function: Callable[..., Tensor],
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    grad: Tensor,
    zeros: bool = True,
) -> list[Tensor]:
    """Compute the gradients of a function's ``wanted`` operands, from the gradient of its result.

    zeros  an operand on which the result does not depend gets zeros, not None
    """
    with torch.enable_grad():
        given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(operands)]
        result, read = function(*given), [given[i] for i in wanted]
        if not result.requires_grad and not zeros:
            return [None] * len(read)
        how = {"materialize_grads": True} if zeros else {"allow_unused": True}
        return list(torch.autograd.grad(result, read, grad, **how))


def most_alive(nodes: Sequence[Node]) -> int:
    """Compute the peak memory of a list of nodes, in bytes. They run in this order, and a value is freed
    after its last reader. A view has the memory of its base; inputs are not counted."""
    source: dict[Node, Node] = {}  # node → the node that owns its memory
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


# Functions of picked rows


def enter_picked(found: MappedFunction, fakes: Sequence[Tensor]) -> str:
    """Enter a function of picked rows into the table, together with its gradient. One gradient function is
    for operands with rows, another for operands whose gradients are sums over rows.

    fakes  the operands

    Raises `NotRowByRow` if a row of the result depends on other picked rows, or if an operator has no
    gradient.
    """
    name = name_of(found, fakes)
    if name not in FUNCTIONS:
        width = width_if_row_by_row(found, fakes)
        for node in found.module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and not internals.has_gradient(node.target):
                raise NotRowByRow(f"{node.target} has no gradient, which autograd would treat as zero")
        try:
            module = gradient(found, fakes)
        except (internals.NotForAnyCount, NotImplementedError) as error:
            raise NotRowByRow(f"its gradient has no graph for all numbers of rows: {error}") from error
        real = [i for i, grad in enumerate(outputs_of(module)) if grad is not None]
        for kind, wanted in (
            ("rows", [i for i in real if found.operands[i].dims]),
            ("sums", [i for i in real if not found.operands[i].dims]),
        ):
            if wanted:
                FUNCTIONS[f"{name}_{kind}"] = part_of_gradient(found, fakes, module, wanted)
        FUNCTIONS[name] = replace(found, width=width, wanted=tuple(real))
    return name


def example_of(how: MappedValue, fake: Tensor, count: int) -> Tensor:
    """Build an operand as the graph of a function reads it, for ``count`` picked rows."""
    sizes = [int(size) for size in fake.shape[len(how.dims) :]]
    return torch.empty([count, *sizes] if how.dims else sizes, dtype=fake.dtype, device=fake.device)


def constant_shape(how: MappedValue, fake: Tensor) -> tuple[int, ...]:
    """Return the shape of an operand, with zeros for its leading sizes, which the mask has."""
    return (*(0 for _ in how.dims), *map(int, fake.shape[len(how.dims) :]))


def width_if_row_by_row(found: MappedFunction, fakes: Sequence[Tensor]) -> int:
    """Compute the peak memory of a function, in bytes per picked row. Raises `NotRowByRow` where a row of the
    result depends on other picked rows."""
    count = internals.TRACED_COUNT
    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        given = [example_of(how, x, count) for how, x in zip(found.operands, fakes)]
    graph = internals.capture(lambda *operands: found.module(count, *operands)[0], given).graph
    places = zip(graph.find_nodes(op="placeholder"), found.operands)
    marks = {n: (Mark(0),) for n, how in places if how.dims}
    propagation = TokenPropagation(graph, marks, Signatures(graph))
    for node in propagation.met():
        if node in propagation.missing or propagation.loses(node):
            raise NotRowByRow(f"what {node.target} does to rows is unknown")
        if node in propagation.signatures and not propagation.maps_rows(node):
            raise NotRowByRow(f"{node.target} lets picked rows see one another")
    if propagation.of(graph.output_node().args[0]) != {0: Mark(0)}:
        raise NotRowByRow("the result has no row for each picked row")
    return most_alive(list(graph.nodes)) // count


def gradient(found: MappedFunction, fakes: Sequence[Tensor]) -> GraphModule:
    """Trace the gradients of all operands, from the gradient of the result. An operand that wants none, is
    detached inside or only compared gets None."""
    (result,) = found.results
    wanted = [i for i, x in enumerate(fakes) if x.requires_grad and x.dtype.is_floating_point]

    def run(count: int, grad: Tensor, *operands: Tensor) -> list[Tensor | None]:
        made = gradients_at(
            lambda *given: found.module(count, *given)[0], operands, wanted, grad, zeros=False
        )
        known = dict(zip(wanted, made))
        return [known.get(i) for i in range(len(operands))]

    def create(count: int) -> list[Tensor]:
        shape = [count, *map(int, result.shape[len(result.dims) :])]
        grad = torch.empty(shape, dtype=result.dtype, device=fakes[0].device)
        return [grad, *(example_of(how, x, count) for how, x in zip(found.operands, fakes))]

    return traced(run, create)


def part_of_gradient(
    found: MappedFunction, fakes: Sequence[Tensor], module: GraphModule, wanted: Sequence[int]
) -> MappedFunction:
    """Build the function for the gradients of some operands. It reads the gradient of the result, and all
    operands. Values without rows (the gradient of a weight) do not count in its width."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.graph_copy(module.graph, copies)
    graph.output([copies[outputs_of(module)[i]] for i in wanted])
    graph.eliminate_dead_code()
    rows = [n for n in graph.nodes if is_tensor(n) and internals.has_symbols(value_of(n))]
    return MappedFunction(
        GraphModule({}, graph),
        (MappedValue(found.results[0].dims), *found.operands),
        tuple(
            MappedValue(found.operands[i].dims, constant_shape(found.operands[i], fakes[i]), fakes[i].dtype)
            for i in wanted
        ),
        most_alive(rows) // internals.TRACED_COUNT,
    )


def keep_operands(ctx, inputs: tuple, output: list[Tensor]) -> None:
    operands, ctx.function = inputs
    ctx.save_for_backward(*operands)


def gradients(ctx, grads: list[Tensor]):
    """Compute the gradients of a function of picked rows: one call for rows, and one for sums."""
    mask, *operands = ctx.saved_tensors
    found, given = FUNCTIONS[ctx.function], [mask, grads[0], *operands]
    results: list[Tensor | None] = [None] * (len(operands) + 1)
    for kind, call in (("rows", streambp.picked_rows), ("sums", streambp.picked_sums)):
        places = [i for i in found.wanted if bool(found.operands[i].dims) == (kind == "rows")]
        for i, value in zip(places, call(given, f"{ctx.function}_{kind}") if places else ()):
            results[i + 1] = value
    return results, None


torch.library.register_autograd("streambp::picked_rows", gradients, setup_context=keep_operands)

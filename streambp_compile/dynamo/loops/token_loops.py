"""Loops over single tokens, unrolled by Dynamo: recurrent cells, linear attention and delta rules in plain
form.

As in a loop over blocks, work without a state, and work that reads the states, are mapped over all
tokens. The chain of states becomes one scan, ``streambp::token_loop``, so that states exist for the
tokens of a chunk alone. The gradient of states is a scan the other way. All other gradients are those of
one step, mapped over tokens.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import hint
from ...passes.kernels.token_loops import TOKEN_FUNCTIONS, TokenFunction
from ...passes.rules import for_any_layout, functional
from ...passes.rules.forward import is_detached, mutated
from ..reading.aten import inserted
from ..reading.values import fake_of
from ..rows.any_count import gradients_at
from .iterations import Sliced, State
from .loop_distribution import Distribution

aten, streambp = torch.ops.aten, torch.ops.streambp


class TokenDistribution(Distribution):
    """A loop over tokens in three parts.

    sources  the states that the scan makes, in the order in which they lie in its result
    """

    @property
    def sources(self) -> list[State]:
        return [s for s in self.loop.states if s.source in self.chain]

    def is_worth_it(self) -> bool:
        dtypes = {fake_of(s.initial).dtype for s in self.sources}
        return len(dtypes) == 1 and all(d.is_floating_point for d in dtypes)

    def write_chain(self) -> None:
        """Write the chain of states as one scan."""
        step = ChainStep(self)
        rows, wholes = step.operands()
        name = register(step.module(), step.size, [*map(fake_of, (*rows, *wholes))], len(rows))
        sources = self.sources
        self.chain = set()  # its other values that are read are mapped, given the states
        states = inserted(self.like(), streambp.token_loop.default, (rows, wholes, name, None))
        before = inserted(self.like(), streambp.shifted.default, (states, 0, 1))
        for state, (start, stop) in zip(sources, step.places):
            self.whole[state.source] = self.unpacked(states, state, start, stop)
            self.stacked[state] = self.with_initial(self.unpacked(before, state, start, stop), state)

    def unpacked(self, states: Node, state: State, start: int, stop: int) -> Node:
        """Slice one state out of the packed states of all tokens, in its own shape."""
        part = inserted(self.like(), torch.narrow, (states, 1, start, stop - start))
        shape = tuple(map(hint, fake_of(state.initial).shape))
        return inserted(self.like(), torch.unflatten, (part, 1, shape)) if len(shape) != 1 else part

    def stack(self, state: State) -> Node:
        """Shift a state that needs no scan, so that each token reads the one before it."""
        whole, dim = self.given(state.source)
        moved = inserted(self.like(), torch.movedim, (whole, dim, 0))
        return self.with_initial(inserted(self.like(), streambp.shifted.default, (moved, 0, 1)), state)

    def with_initial(self, before: Node, state: State) -> Node:
        sizes = [-1, *[1] * fake_of(state.initial).dim()]
        first = inserted(self.like(), torch.reshape, (self.first(), sizes))
        return inserted(self.like(), torch.where, (first, state.initial, before))

    def first(self) -> Node:
        """Build a mask that is true for the first token."""
        places = inserted(self.like(), torch.arange, (self.loop.count,), {"device": self.device()})
        return inserted(self.like(), torch.eq, (places, 0))

    def value_in(self, i: int, operand: int | Sliced) -> Node:
        """Return the value of one token. Most loops are read at the last token alone, which a sweep
        computes as a sum."""
        nodes = [step[operand] for step in self.loop.steps] if isinstance(operand, int) else []
        alone = [n for n in nodes if n is not None and any(not self.joins(u, operand) for u in self.after(n))]
        if len(alone) != 1:
            return super().value_in(i, operand)
        whole, dim = self.given(operand)
        return inserted(self.like(), torch.select, (whole, dim, i))

    def after(self, node: Node) -> list[Node]:
        return [u for u in node.users if u not in self.loop.nodes]

    def device(self) -> torch.device:
        return fake_of(self.loop.states[0].initial).device


class ChainStep:
    """The graph of a step of the chain.

    It reads the packed states, whether the token is the first, other values with a row per token, the
    states before the first token, and values that are the same for all tokens.

    places  where each state lies in the vector of all
    """

    def __init__(self, found: TokenDistribution):
        self.found, self.graph = found, Graph()
        self.places: list[tuple[int, int]] = []
        self.size = 0
        for state in found.sources:
            numbers = fake_of(state.initial).numel()
            self.places.append((self.size, self.size + numbers))
            self.size += numbers
        self.rows: dict[object, Node] = {}
        self.wholes: dict[object, Node] = {}
        for p in sorted(found.chain):
            for operand in found.operands(p):
                self.learn(operand)

    def learn(self, operand: int | Sliced | State | Node) -> None:
        """Note an operand of the chain that the chain does not compute."""
        if operand in self.found.chain or operand in self.found.sources or operand in self.rows:
            return
        if isinstance(operand, Node):
            self.wholes[operand] = operand
            return
        whole, dim = self.found.given(operand)
        like = self.found.like()
        self.rows[operand] = inserted(like, torch.movedim, (whole, dim, 0)) if dim else whole

    def operands(self) -> tuple[list[Node], list[Node]]:
        """Return the operands of the scan: those with a row per token, and those that are the same
        for all."""
        initial = [s.initial for s in self.found.sources]
        return [self.found.first(), *self.rows.values()], [*initial, *self.wholes.values()]

    def module(self) -> GraphModule:
        call, values = self.graph.call_function, dict[object, Node]()
        packed, first = self.graph.placeholder("state"), self.graph.placeholder("first")
        for i, operand in enumerate(self.rows):
            values[operand] = self.graph.placeholder(f"rows_{i}")
        initial = [self.graph.placeholder(f"initial_{i}") for i in range(len(self.found.sources))]
        for i, operand in enumerate(self.wholes):
            values[operand] = self.graph.placeholder(f"whole_{i}")
        for state, given, (start, stop) in zip(self.found.sources, initial, self.places):
            part = call(aten.slice.Tensor, (packed, 0, start, stop))
            part = call(aten.view.default, (part, list(map(hint, fake_of(state.initial).shape))))
            values[state] = call(aten.where.self, (first, given, part))
        for p in sorted(self.found.chain):
            values[p] = self.copied(self.found.loop.template[p], values)
        made = [call(aten.reshape.default, (values[s.source], [-1])) for s in self.found.sources]
        self.graph.output(call(aten.cat.default, (made,)))
        return GraphModule({}, self.graph)

    def copied(self, node: Node, values: dict[object, Node]) -> Node:
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise NotImplementedError(f"{node} is no operator")
        if is_detached(node):
            raise NotImplementedError(f"{node} stops gradients, which the graph of a step does not show")
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: values[self.found.loop.operand(a)])
        target = node.target if mutated(node) is None else functional(node.target)
        return self.graph.call_function(target, args, kwargs)


def register(step: GraphModule, size: int, fakes: Sequence[Tensor], rows: int) -> str:
    """Enter a step into the table under a name of its contents, together with its gradient.

    fakes  the operands; the first ``rows`` of them have a row for each token
    """
    own = [x[0] if i < rows else x for i, x in enumerate(fakes)]
    described = [f"{tuple(x.shape)}{x.dtype}{x.device}{x.requires_grad}" for x in own]
    name = hashlib.sha256(f"{step.code}{size}{rows}{described}".encode()).hexdigest()[:16]
    if name not in TOKEN_FUNCTIONS:
        wanted, dtypes = tuple(x.requires_grad for x in own), tuple(x.dtype for x in own)

        vector = torch.empty(size, dtype=dtypes[rows], device="meta")
        # Traced twice: the writes inside a composite operator (`lstm_cell`) show only in its graph.
        composed = traced(step, [vector, *own])
        found = traced(torch.func.functionalize(composed), [vector, *own])

        def back(grad: Tensor, *given: Tensor) -> Tensor:
            return gradients_at(found, given, [0], grad)[0]

        TOKEN_FUNCTIONS[name] = TokenFunction(
            found,
            traced(back, [vector, vector, *own]),
            size,
            vector.dtype,
            dtypes,
            wanted,
        )
    return name


def traced(function: Callable[..., Tensor], like: Sequence[Tensor]) -> GraphModule:
    """Trace a function of such tensors, without views that depend on an operand's layout."""
    device = like[-1].device
    with torch.no_grad(), internals.FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(list(map(hint, x.shape)), dtype=x.dtype, device=device) for x in like]
        module = internals.make_fx(function, decomposition_table=internals.decompositions())(*given)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        node.target = for_any_layout(node.target) if node.op == "call_function" else node.target
    module.recompile()
    return module


def keep(ctx, inputs: tuple, output: Tensor) -> None:
    rows, wholes, ctx.function, _ = inputs
    ctx.save_for_backward(output, *rows, *wholes)
    ctx.rows = len(rows)


def gradients(ctx, grad: Tensor):
    """Compute the gradients of one step, mapped over all tokens. First, a scan computes the gradients of
    all states."""
    found = TOKEN_FUNCTIONS[ctx.function]
    states, *operands = ctx.saved_tensors
    rows, wholes = operands[: ctx.rows], operands[ctx.rows :]
    before = streambp.shifted(states, 0, 1)
    carried = streambp.token_loop_back(grad, before, rows, wholes, ctx.function, None)
    total = grad + streambp.shifted(carried, 0, -1)
    step = torch.vmap(found.step, in_dims=(0, *[0] * len(rows), *[None] * len(wholes)))
    wanted = [i for i, want in enumerate(found.wanted) if want]
    made = dict(zip(wanted, gradients_at(lambda *given: step(before, *given), operands, wanted, total)))
    each = [made.get(i) for i in range(len(operands))]
    return each[: ctx.rows], each[ctx.rows :], None, None


torch.library.register_autograd("streambp::token_loop", gradients, setup_context=keep)

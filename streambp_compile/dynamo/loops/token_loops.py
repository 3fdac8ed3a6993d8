"""Loops over single tokens, unrolled by Dynamo: recurrent cells, linear attention and delta rules in plain
form.

As in a loop over blocks, work without a state, and work that reads the states, are mapped over all
tokens. The chain of states becomes one scan, ``streambp::token_loop``, so that states exist for the
tokens of a chunk alone. The gradient of states is a scan the other way. All other gradients are those of
one step, mapped over tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import hint
from ...passes.kernels.mapped_functions import FUNCTIONS, MappedFunction, MappedValue
from ...passes.rules.forward import is_detached
from ..reading.aten import inserted
from ..reading.values import fake_of
from ..rows.mapped_functions import FunctionGraph, gradients_at, name_of, traced
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
        operands, has_rows = zip(*step.operands())
        name = enter_step(step.module(), step.size, list(map(fake_of, operands)), has_rows)
        sources = self.sources
        self.chain = set()  # its other values that are read are mapped, given the states
        states = inserted(self.like(), streambp.token_loop.default, (list(operands), name, None))
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


FIRST = "whether the token is the first"


class ChainStep:
    """A step of the chain, as a function of the packed states.

    It also reads whether the token is the first, other values with a row per token, the states before the
    first token, and values that are the same for all tokens.

    places  where each state lies in the vector of all
    """

    def __init__(self, found: TokenDistribution):
        self.found, self.function = found, FunctionGraph("count", "state")
        self.values: dict[object, Node] = {}
        self.places: list[tuple[int, int]] = []
        self.size = 0
        for state in found.sources:
            numbers = fake_of(state.initial).numel()
            self.places.append((self.size, self.size + numbers))
            self.size += numbers
            self.values[state] = self.unpacked(state, *self.places[-1])
        for p in sorted(found.chain):
            self.values[p] = self.copied(found.loop.template[p])

    def unpacked(self, state: State, start: int, stop: int) -> Node:
        call, first = self.function.graph.call_function, self.function.operand(FIRST)
        part = call(aten.slice.Tensor, (self.function.given[1], 0, start, stop))
        part = call(aten.view.default, (part, list(map(hint, fake_of(state.initial).shape))))
        return call(aten.where.self, (first, self.function.operand(state.initial), part))

    def copied(self, node: Node) -> Node:
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise NotImplementedError(f"{node} is no operator")
        if is_detached(node):
            raise NotImplementedError(f"{node} stops gradients, which the graph of a step does not show")
        return self.function.copy(node, self.value)

    def value(self, node: Node) -> Node:
        operand = self.found.loop.operand(node)
        return self.values[operand] if operand in self.values else self.function.operand(operand)

    def module(self) -> GraphModule:
        call = self.function.graph.call_function
        made = [call(aten.reshape.default, (self.values[s.source], [-1])) for s in self.found.sources]
        return self.function.module([call(aten.cat.default, (made,))])

    def operands(self) -> list[tuple[Node, bool]]:
        """Insert the operands of the loop. Returns each, and whether it has a row for each token."""
        return [self.outside(key) for key in self.function.operands]

    def outside(self, key: int | Sliced | Node | str) -> tuple[Node, bool]:
        if isinstance(key, Node):
            return key, False
        if key is FIRST:
            return self.found.first(), True
        whole, dim = self.found.given(key)
        return inserted(self.found.like(), torch.movedim, (whole, dim, 0)) if dim else whole, True


def enter_step(step: GraphModule, size: int, fakes: Sequence[Tensor], has_rows: Sequence[bool]) -> str:
    """Enter a step into the table of functions, together with the gradient of its state.

    fakes     the operands
    has_rows  which of them have a row for each token
    """
    own = [x[0] if rows else x for x, rows in zip(fakes, has_rows)]
    dtype, device = own[1].dtype, own[1].device  # of a state
    ways = tuple(MappedValue((0,) if rows else (), dtype=x.dtype) for x, rows in zip(own, has_rows))
    results = (MappedValue((0,), (0, size), dtype),)
    wanted = tuple(i for i, x in enumerate(own) if x.requires_grad)
    name = name_of(MappedFunction(step, ways, results), own)
    if name not in FUNCTIONS:

        def create(count: int) -> list[Tensor]:
            like = [([size], dtype), *((list(map(hint, x.shape)), x.dtype) for x in own)]
            return [torch.empty(shape, dtype=kind, device=device) for shape, kind in like]

        def back(count: int, grad: Tensor, *given: Tensor) -> list[Tensor]:
            return gradients_at(lambda *read: module(count, *read)[0], given, [0], grad)

        module = traced(step, create)
        of_state = traced(back, lambda count: [create(count)[0], *create(count)])
        FUNCTIONS[f"{name}_back"] = MappedFunction(of_state, ways, results)
        FUNCTIONS[name] = MappedFunction(module, ways, results, wanted=wanted)
    return name


def keep(ctx, inputs: tuple, output: Tensor) -> None:
    operands, ctx.function, _ = inputs
    ctx.save_for_backward(output, *operands)


def gradients(ctx, grad: Tensor):
    """Compute the gradients of one step, mapped over all tokens. First, a scan computes the gradients of
    all states."""
    found = FUNCTIONS[ctx.function]
    states, *operands = ctx.saved_tensors
    before = streambp.shifted(states, 0, 1)
    carried = streambp.token_loop_back(grad, before, operands, ctx.function, None)
    total = grad + streambp.shifted(carried, 0, -1)
    dims = [0 if how.dims else None for how in found.operands]
    step = torch.vmap(found.module, in_dims=(None, 0, *dims))
    made = gradients_at(lambda *given: step(1, before, *given)[0], operands, found.wanted, total)
    known = dict(zip(found.wanted, made))
    return [known.get(i) for i in range(len(operands))], None, None


torch.library.register_autograd("streambp::token_loop", gradients, setup_context=keep)

"""An unrolled loop over blocks of tokens, computed for all blocks at once except for its chain of states.

``for i in range(n): out.append(f(q[:, i], state)); state = g(k[:, i], state)`` is how linear attention,
the delta rule and other recurrences in block form are written. The work of an iteration before it reads
the state, and the work on the state that no later iteration reads, are functions of one block, mapped
over all of them (loop distribution). Only the chain of states stays a loop. `part_blocks` (blocks/blocks.py)
streams the rest.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import arguments, is_view
from ...passes.rules.forward import Part, multiplies, part_of
from ..reading.aten import inserted
from ..reading.values import fake_of
from ..rows.mapped_functions import FunctionGraph
from .iterations import Loop, Sliced, State

aten = torch.ops.aten


class Mapped(nn.Module):
    """A function of one block, mapped over all blocks, which are the first dimension of its results.

    dims  the dimension of blocks in each argument; None: it is the same for all
    """

    def __init__(self, function: GraphModule, dims: Sequence[int | None]):
        super().__init__()
        self.function, self.dims = function, tuple(dims)

    def forward(self, *given: object) -> tuple[Tensor, ...]:
        return torch.vmap(self.function, in_dims=self.dims)(*given)


class Distribution:
    """A loop in three parts: work without a state, the chain of states, and work that reads them.

    A position is the place of a node in its iteration; `Loop.operand` classifies the operands of a node.

    stateful  positions that depend on a state
    chain     those of them that later iterations need
    results   positions that are read after the loop
    whole     position → its value for all blocks, which are the first dimension
    links     position in the chain → its values, stacked for a map that reads them
    """

    def __init__(self, module: GraphModule, loop: Loop):
        self.module, self.graph, self.loop = module, module.graph, loop
        self.stateful: set[int] = set()
        for p, node in enumerate(loop.template):
            read = [loop.operand(a) for a in node.all_input_nodes]
            if any(isinstance(a, State) or a in self.stateful for a in read):
                self.stateful.add(p)
        handed_on = [s.source for s in loop.states if isinstance(s.source, int)]
        self.chain = self.needed(handed_on) & self.stateful
        self.results = loop.results()
        self.whole: dict[int, Node] = {}
        self.links: dict[int, Node] = {}
        self.unrolled: list[dict[int, Node]] = []
        self.stacked: dict[State, Node] = {}
        self.blocks: dict[Sliced, Node] = {}
        self.apart: dict[int | Sliced, Node] = {}

    def needed(self, positions: Iterable[int], known: Container[int] = ()) -> set[int]:
        """Collect these positions, and those that they are computed from, except known ones."""
        found: set[int] = set()
        stack = list(positions)
        while stack:
            p = stack.pop()
            if p not in found:
                found.add(p)
                stack += [a for a in self.operands(p) if isinstance(a, int) and a not in known]
        return found

    def is_worth_it(self) -> bool:
        """Is a good part of the work outside of the chain? Where all products are in the chain, a map would
        only move its values (segments that pass on memory tokens, arXiv 2207.06881)."""
        outside = [n for p, n in enumerate(self.loop.template) if p not in self.chain]
        inside = [self.loop.template[p] for p in self.chain]
        if any(map(multiplies, inside)):
            return any(map(multiplies, outside))
        return not all(map(is_view, outside))

    def operands(self, p: int) -> list[int | Sliced | State | Node]:
        return [self.loop.operand(a) for a in self.loop.template[p].all_input_nodes]

    def rewrite(self) -> None:
        loop, last = self.loop, max(self.loop.nodes)
        sources = {s.source for s in loop.states if isinstance(s.source, int)}
        wanted = self.results | sources
        read = {a for p in self.stateful for a in self.operands(p) if isinstance(a, int)}
        with self.graph.inserting_before(last.next):
            self.map_over_blocks((read | wanted) - self.stateful)
            self.write_chain()
            self.map_over_blocks(self.results_of_states() - self.whole.keys())
            self.hand_out(last)
        for node in reversed(self.graph.nodes):
            if (node in loop.nodes or node in loop.pieces) and not node.users:
                self.graph.erase_node(node)

    def results_of_states(self) -> set[int]:
        """Collect the results that depend on states and that no later iteration needs."""
        return (self.results & self.stateful) - self.chain

    # The three parts

    def map_over_blocks(self, positions: set[int]) -> None:
        """Compute the values of positions for all blocks, by a map."""
        if not positions:
            return
        outputs = sorted(positions)
        function, values = FunctionGraph(), dict[int, Node]()

        def read(node: Node) -> Node:
            operand = self.loop.operand(node)
            return values[operand] if operand in values else function.operand(operand)

        for p in sorted(self.needed(outputs, self.whole.keys() | self.chain)):
            values[p] = function.copy(self.loop.template[p], read)
        module = function.module(tuple(values[p] for p in outputs), self.module)
        given = [self.given(operand) for operand in function.operands]
        results = self.called(Mapped(module, [dim for _, dim in given]), [v for v, _ in given], outputs)
        self.whole.update(zip(outputs, results))

    def given(self, operand: int | Sliced | State | Node) -> tuple[Node, int | None]:
        """Return the value that a map reads for an operand, and its dimension of blocks."""
        if operand in self.chain:
            if operand not in self.links:
                made = [values[operand] for values in self.unrolled]
                self.links[operand] = inserted(self.loop.template[operand], torch.stack, (made,))
            return self.links[operand], 0
        if isinstance(operand, int):
            return self.whole[operand], 0
        if isinstance(operand, State):
            if operand not in self.stacked:
                self.stacked[operand] = self.stack(operand)
            return self.stacked[operand], 0
        if isinstance(operand, Sliced):
            return self.in_blocks(operand), operand.dim
        return operand, None

    def in_blocks(self, key: Sliced) -> Node:
        """Give a sliced value a dimension for its blocks."""
        if not key.length:
            return key.base
        if key not in self.blocks:
            sizes = (self.loop.count, key.length)
            self.blocks[key] = inserted(self.like(), torch.Tensor.unflatten, (key.base, key.dim, sizes))
        return self.blocks[key]

    def called(self, mapped: Mapped, given: Sequence[Node], outputs: Sequence[int]) -> list[Node]:
        """Insert a call of a map, and return its results."""
        text = f"{mapped.function.code}{mapped.dims}"
        name = f"over_blocks_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.module.add_module(name, mapped)
        call = self.graph.call_module(name, tuple(given))
        nodes = [self.loop.template[p] for p in outputs]
        like = next((n for n in nodes if fake_of(n).requires_grad), nodes[0])
        with internals.faked(fake_of(like)):
            fakes = mapped(*map_arg(tuple(given), fake_of))
        call.meta = {**like.meta, "example_value": fakes}
        return [item(call, i) for i in range(len(outputs))]

    def write_chain(self) -> None:
        """Write the chain of states, one iteration after the other."""
        mapped = self.needed(self.results_of_states(), self.chain)
        read = self.results.union(*(self.operands(p) for p in mapped))
        last_too = not self.chain.isdisjoint(read)
        for i in range(self.loop.count - (not last_too)):
            values: dict[int, Node] = {}
            self.unrolled.append(values)
            for p in sorted(self.chain):
                node = self.loop.template[p]
                values[p] = self.graph.node_copy(node, lambda a, i=i: self.in_iteration(i, a))
                values[p].meta = dict(node.meta)

    def in_iteration(self, i: int, node: Node) -> Node:
        """Return an operand of the template as iteration ``i`` has it."""
        operand = self.loop.operand(node)
        if isinstance(operand, State):
            return operand.initial if not i else self.value_in(i - 1, operand.source)
        return self.value_in(i, operand) if isinstance(operand, (int, Sliced)) else operand

    def value_in(self, i: int, operand: int | Sliced) -> Node:
        if operand in self.chain:
            return self.unrolled[i][operand]
        if operand not in self.apart:
            whole, dim = self.given(operand)
            like = self.like() if isinstance(operand, Sliced) else self.loop.template[operand]
            # One call for all: the gradient of a block selected alone is as large as all blocks.
            self.apart[operand] = inserted(like, torch.unbind, (whole, dim))
        return item(self.apart[operand], i)

    def stack(self, state: State) -> Node:
        """Stack the values of a state that the iterations read."""
        like = self.like() if isinstance(state.source, Sliced) else self.loop.template[state.source]
        if state.source in self.chain:
            later = [self.unrolled[i][state.source] for i in range(self.loop.count - 1)]
            return inserted(like, torch.stack, ([state.initial, *later],))
        whole, dim = self.given(state.source)
        moved = inserted(like, torch.movedim, (whole, dim, 0))
        earlier = inserted(like, torch.narrow, (moved, 0, 0, self.loop.count - 1))
        return inserted(like, torch.cat, ([inserted(like, torch.unsqueeze, (state.initial, 0)), earlier],))

    def like(self) -> Node:
        """Find a node of the loop that gradients flow through, or else any tensor."""
        tensors = [n for n in self.loop.template if isinstance(fake_of(n), Tensor)]
        return next((n for n in tensors if fake_of(n).requires_grad), tensors[0])

    # Readers

    def hand_out(self, last: Node) -> None:
        """Replace the operands of nodes after the loop by the new values."""
        for key, p in self.loop.written.items():
            for reader in [u for u in key.base.users if last < u]:
                reader.replace_input_with(key.base, self.joined(p, key.dim, flat=bool(key.length)))
        nodes = self.loop.nodes
        for i, step in enumerate(self.loop.steps):
            for p in self.results:
                for reader in [u for u in (step[p].users if step[p] is not None else ()) if u not in nodes]:
                    self.replace(reader, step[p], i, p)

    def replace(self, reader: Node, node: Node, i: int, p: int) -> None:
        if p not in self.chain and self.joins(reader, p):
            dim = arguments(reader).get("dim", 0)
            flat = part_of(reader) is Part.JOIN
            reader.replace_all_uses_with(self.joined(p, dim % fake_of(reader).dim(), flat))
            self.graph.erase_node(reader)
        else:
            reader.replace_input_with(node, self.value_in(i, p))

    def joins(self, reader: Node, p: int) -> bool:
        """Does a reader concatenate or stack the values of all iterations?"""
        together = part_of(reader) in (Part.JOIN, Part.STACK)
        return together and list(reader.args[0]) == [step[p] for step in self.loop.steps]

    def joined(self, p: int, dim: int, flat: bool) -> Node:
        """Join the values of all blocks along a dimension: an existing one if ``flat``, else a new one."""
        like = self.loop.template[p]
        whole = self.whole[p]
        moved = inserted(like, torch.movedim, (whole, 0, dim)) if dim else whole
        return inserted(like, torch.flatten, (moved, dim, dim + 1)) if flat else moved


def item(call: Node, i: int) -> Node:
    """Take one of the results of a call."""
    found = call.graph.call_function(operator.getitem, (call, i))
    found.meta = {**call.meta, "example_value": fake_of(call)[i]}
    return found

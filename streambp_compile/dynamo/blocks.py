"""Sequences that a model cuts into blocks of so many tokens: state-space layers in block form, chunked linear
attention, attention inside blocks.

Between the reshape that parts the tokens into blocks and the one that joins them, a node either maps each
block by itself, or lets blocks meet. What maps blocks becomes calls of ``streambp::over_blocks``
(passes/kernels/blocks.py), whose chunks are whole blocks. What lets them exchange a state stays as it is: its
values are small, a state per block, and exist at full length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

from .. import internals
from ..passes.ir import ancestors, bytes_of, draws_random
from ..passes.kernels.blocks import BlockAxis as Place
from ..passes.kernels.blocks import Unit
from ..passes.rules.forward import is_detached, mutated
from .aten import inserted
from .block_functions import BlockGraph, NoBlockFunction, register
from .block_splits import may_split, split_of
from .block_values import Blocked
from .modes import is_switch
from .token_axes import axes_of, traced
from .values import fake_of, is_changed, storage_of

streambp = torch.ops.streambp


def over_blocks(module: GraphModule) -> GraphModule:
    """Write what maps each block of tokens by itself as calls of ``streambp::over_blocks``."""
    if not any(may_split(node) for node in module.graph.nodes):
        return module
    placeholders = module.graph.find_nodes(op="placeholder")
    fakes = [fake_of(n) for n in placeholders]
    trace = traced(module, fakes)
    for axis in axes_of(trace, fakes):
        splits = [s for node in module.graph.nodes if (s := split_of(node, axis)) is not None]
        for length in dict.fromkeys(s.length for s in splits):
            try:
                found = Blocked(module, trace, axis, [s for s in splits if s.length == length])
                BlockCalls(found).rewrite()
            except NoBlockFunction as reason:
                internals.log.debug("blocks of %s tokens stay as they are: %s", length, reason)
    return module


class BlockCalls:
    """Calls of block functions in the place of the values of blocks that somebody reads."""

    def __init__(self, found: Blocked):
        self.found = found
        trace, nodes = found.trace, found.module.graph.nodes
        known = [n for n in reversed(nodes) if n in trace.values and n not in trace.unsorted]
        self.graph_values = {trace.values[n]: n for n in known}
        self.laid_out: list[Node] = []

    def rewrite(self) -> None:
        """Replace every value of blocks that somebody reads: rows of tokens, and what the exchange reads."""
        wanted = [n for n in self.found.module.graph.nodes if n in self.found.inside and self.is_wanted(n)]
        self.check(wanted)
        self.check_writes()
        self.check_gradients()
        try:
            new: dict[Node, Node] = {}
            for node, (name, operands, *dims) in [(node, self.function(node)) for node in wanted]:
                new[node] = self.replace(node, name, [new.get(a, a) for a in operands], *dims)
        finally:
            for node in reversed([n for n in self.found.module.graph.nodes if self.may_erase(n)]):
                if not node.users:
                    self.found.module.graph.erase_node(node)

    def may_erase(self, node: Node) -> bool:
        """Is a node a value, which is computed for its readers alone?"""
        inside = node in self.found.calls and any(a in self.found.inside for a in self.found.read_by(node))
        return mutated(node) is None and (inside or node in self.found.inside or node in self.laid_out)

    def is_wanted(self, node: Node) -> bool:
        if node in self.found.exchange or self.found.pads(node):
            return False
        return self.found.leaves(node) or any(
            u not in self.found.inside or u in self.found.exchange for u in self.found.readers_of(node)
        )

    def check(self, wanted: list[Node]) -> None:
        """Raises `NoBlockFunction` where values that must exist at full length are wide, or no tokens read
        what is made of the blocks: then blocks are the tokens of another sequence."""
        if not self.found.readers and not any(map(self.found.leaves, self.found.inside)):
            raise NoBlockFunction("no rows of tokens come out")
        if self.found.are_tokens():
            raise NoBlockFunction("blocks are the tokens of another sequence: they attend to one another")
        for node in wanted:
            if node in self.found.trace.unsorted:
                raise NoBlockFunction(f"{node} is in another order than that of blocks")
            if not self.found.leaves(node) and bytes_of(fake_of(node)) > self.found.small():
                raise NoBlockFunction(f"{node} is wide, and blocks exchange it")
        for node in self.found.exchange:
            held = not self.found.axis.marks.get(node) and not self.is_view(node)
            if (
                held and bytes_of(fake_of(node)) > self.found.small()
            ):  # what has a row per token may still stream
                raise NoBlockFunction(f"{node} is wide, and made of values that blocks exchange")

    def check_writes(self) -> None:
        """Raises `NoBlockFunction` where a value is written into that is read before and after: a value is
        replaced by what it is at one time."""
        for node in self.found.inside:
            target = mutated(node)
            if target is None:
                continue
            same = [n for n in self.found.inside if n < node and storage_of(n) == storage_of(target)]
            if same != [target] or list(target.users) != [node]:
                raise NoBlockFunction(f"{node} writes into a value that others read")

    def check_gradients(self) -> None:
        """Raises `NoBlockFunction` where gradients are not those of the operators.

        The gradient of a block function is derived from what was captured, which has neither detached values
        nor a user's backward.
        """
        for node in self.found.module.graph.nodes:
            read = self.found.read_by(node)
            if self.hides_gradients(node) and not self.found.inside.isdisjoint(read):
                raise NoBlockFunction(f"{node} may have a backward of its own")
            stops = wants_gradient(read) and is_real(node) and not wants_gradient([node])
            if node in self.found.inside and stops and not self.is_made_of_nothing(node):
                raise NoBlockFunction(f"{node} stops gradients")

    def hides_gradients(self, node: Node) -> bool:
        """Is it, or a function that is mapped there, more than operators with their own gradients?"""
        if isinstance(node.target, internals.HigherOrderOperator):
            return True
        mapped = self.found.module.get_submodule(node.target).modules() if node.op == "call_module" else ()
        nodes = [n for m in mapped if isinstance(m, GraphModule) for n in m.graph.nodes]
        return any(
            is_switch(n) or is_detached(n) or isinstance(n.target, internals.HigherOrderOperator)
            for n in nodes
        )

    def is_made_of_nothing(self, node: Node) -> bool:
        """Does a node take sizes alone from what it reads (``zeros_like``)?"""
        made = self.found.between(node)
        return bool(made) and not any(value.all_input_nodes for value in made)

    def is_view(self, node: Node) -> bool:
        return all(getattr(v.target, "is_view", False) for v in self.found.between(node))

    def function(self, node: Node) -> tuple[str, list[Node], int, int, int]:
        """The name of the function that makes a value, its operands, and the dimensions of its result that
        are one of the value's: the first of them, and how many more."""
        value = self.found.trace.values[node.args[0] if self.found.crops(node) else node]
        graph = BlockGraph(self.found.marks, self.found.length, self.found.count, self.found.full)
        boundary = list(self.boundary(value))
        if any(is_changed(a) for _, a in boundary):
            raise NoBlockFunction(f"{node} reads a value that is written into")
        operands = [self.operand(graph, *pair) for pair in boundary]
        if not any(place.along is Unit.ROWS for place in graph.operands):
            raise NoBlockFunction(f"{node} is made of no rows")
        made, mark = graph.result(value, self.found.leaves(node))
        inner = mark.inner // (self.found.length if self.found.leaves(node) else 1)
        return (
            register(made, list(map(fake_of, operands))),
            operands,
            mark.dim,
            (mark.outer != 1) + (inner != 1),
        )

    def boundary(self, value: Node) -> Iterator[tuple[Node, Node]]:
        """Captured values that a block function reads, and the nodes of the graph whose values they are."""
        seen, stack = set(), [value]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            node = self.graph_values.get(at)
            if node is not None and at is not value and self.is_outside(node, at):
                yield at, node
            elif at.op != "call_function":
                raise NoBlockFunction(f"{at} is a constant")
            else:
                stack += reversed(at.all_input_nodes)

    def is_outside(self, node: Node, value: Node) -> bool:
        """Is a value read, and not made inside?"""
        if self.found.pads(node) or node in self.found.exchange:
            return True
        return (node not in self.found.inside or self.found.leaves(node)) and not self.is_constant(value)

    def is_constant(self, value: Node) -> bool:
        """Is it made of nothing, and the same for every block: a mask of the rows of a block, zeros?"""
        if self.found.marks.of(value):
            signature = self.found.marks.signatures.get(value)
            return signature is not None and signature.uniform and not value.all_input_nodes
        made = ancestors([value])
        return all(n.op == "call_function" and not draws_random(n) for n in made)

    def operand(self, graph: BlockGraph, value: Node, node: Node) -> Node:
        """An operand of a function: what is read, with a dimension for its rows, or blocks, alone."""
        source, found = self.rows_behind(node), self.found.marks.of(value)
        if not found:
            if self.found.axis.marks.get(node):
                raise NoBlockFunction(f"{node} has tokens, and no blocks")
            graph.read(value, Place(Unit.WHOLE), None)
            return source
        mark = next(iter(found.values()))
        if len(found) > 1 or not self.found.has_full_rows(value):
            raise NoBlockFunction(f"{node} has neither rows nor blocks alone")
        along = Unit.ROWS if source is not node or self.found.is_rows(source) else Unit.BLOCKS
        graph.read(value, Place(along, mark.dim + (mark.outer != 1)), mark)
        inner = mark.inner // (self.found.length if along is Unit.ROWS else 1)
        if mark.outer == inner == 1:
            return source
        sizes = [size for size in (mark.outer, -1, inner) if size != 1]
        with self.found.module.graph.inserting_after(source):
            self.laid_out.append(inserted(source, torch.Tensor.unflatten, (source, mark.dim, sizes)))
        return self.laid_out[-1]

    def rows_behind(self, node: Node) -> Node:
        """A row per token, of what was padded to full blocks, or cut to them; else the node itself."""
        if self.found.pads(node):
            return next(a for a in node.all_input_nodes if self.found.is_padded(node, a))
        mark = self.found.mark_of(node)
        is_cut = self.found.full and mark is not None and self.found.is_cut(node, mark.dim)
        return node.all_input_nodes[0] if is_cut else node

    def replace(self, node: Node, name: str, operands: list[Node], dim: int, more: int) -> Node:
        with self.found.module.graph.inserting_before(node):
            new = inserted(node, streambp.over_blocks.default, (operands, name))
            if more:
                new = inserted(node, torch.flatten, (new, dim, dim + more))
        node.replace_all_uses_with(new)
        return new


def wants_gradient(nodes: Iterable[Node]) -> bool:
    return any(isinstance(fake_of(n), torch.Tensor) and fake_of(n).requires_grad for n in nodes)


def is_real(node: Node) -> bool:
    """Is a value made of numbers that may have gradients?"""
    fake = fake_of(node)
    return isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())

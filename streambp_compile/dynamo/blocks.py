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
from ..passes.ir import Mark, ancestors, bytes_of, draws_random, hint, is_equal, shape_of, tensor_operands
from ..passes.kernels.blocks import Along, blocks_in
from ..passes.kernels.blocks import Axis as Place
from ..passes.rules import form_of, windows_of
from ..passes.rules.facets import Form
from ..passes.rules.forward import Part, is_detached, mutated, part_of
from ..passes.token_propagation import TokenPropagation
from .aten import inserted
from .block_functions import BlockGraph, NoBlockFunction, register
from .block_splits import Split, may_split, split_of
from .regions import is_switch
from .token_axes import Axis, Trace, axes_of, fake_of, storage_of

streambp = torch.ops.streambp
WIDE = 4  # a value that blocks exchange may be so many times as large as the widest rows that enter them


def over_blocks(module: GraphModule) -> GraphModule:
    """Write what maps each block of tokens by itself as calls of ``streambp::over_blocks``."""
    if not any(may_split(node) for node in module.graph.nodes):
        return module
    placeholders = module.graph.find_nodes(op="placeholder")
    trace = Trace(module, [fake_of(n) for n in placeholders])
    for axis in axes_of(trace, [fake_of(n) for n in placeholders]):
        splits = [s for node in module.graph.nodes if (s := split_of(node, axis)) is not None]
        for length in dict.fromkeys(s.length for s in splits):
            try:
                Blocked(module, trace, axis, [s for s in splits if s.length == length]).rewrite()
            except NoBlockFunction as reason:
                internals.log.debug("blocks of %s tokens stay as they are: %s", length, reason)
    return module


class Blocked:
    """The part of a graph between the reshapes to and from blocks of one length.

    marks     where blocks go, as tokens do: a mark's ``inner`` of a block's length is a row per token
    inside    nodes between those reshapes, both included
    full      whether a last block that is not full is left out
    calls     nodes that are no value of their own: their results are
    exchange  those of them that let blocks meet, and what follows from these for a block alone
    rowless   nodes inside that read nothing but what blocks exchanged: made once more for each reader
    readers   rows of tokens that read what is made of blocks, as they read a weight
    """

    def __init__(self, module: GraphModule, trace: Trace, axis: Axis, splits: list[Split]):
        self.module, self.trace, self.axis = module, trace, axis
        self.length, self.count = splits[0].length, splits[0].count
        self.tokens = hint(axis.length)
        self.full = any(self.is_cut(s.node.args[0], s.mark.dim) for s in splits)
        expected = self.tokens // self.length if self.full else blocks_in(self.tokens, self.length)
        if {s.count for s in splits} != {expected}:
            raise NoBlockFunction("these are not blocks of all tokens")
        self.starts = {s.node for s in splits}
        seeds = {trace.values[s.node]: (s.mark,) for s in splits}
        self.marks = TokenPropagation(trace.graph, seeds, trace.known)
        self.inside: set[Node] = set()
        self.exchange: set[Node] = set()
        self.readers: set[Node] = set()
        self.rowless: set[Node] = set()
        self.laid_out: list[Node] = []
        self.graph_values = {trace.values[n]: n for n in reversed(module.graph.nodes) if n in trace.values}
        self.calls = {n for n in module.graph.nodes if n.op != "output" and n not in trace.values}
        for node in module.graph.nodes:
            self.visit(node)

    # What a node does to blocks

    def mark_of(self, node: Node) -> Mark | None:
        found = self.marks.of(self.trace.values[node]) if node in self.trace.values else {}
        return next(iter(found.values())) if len(found) == 1 else None

    def read_by(self, node: Node) -> list[Node]:
        """The values that a node reads; the result of a call reads what the call does, a size reads none."""
        operands = [a for a in node.all_input_nodes if not is_size(a)]
        found = [self.read_by(a) if a in self.calls else [a] for a in operands]
        return list(dict.fromkeys(a for group in found for a in group))

    def readers_of(self, node: Node) -> list[Node]:
        found = [self.readers_of(u) if u in self.calls else [u] for u in node.users]
        return [u for group in found for u in group]

    def visit(self, node: Node) -> None:
        if node.op != "call_function" or node not in self.trace.values:
            return
        entered = node in self.starts or self.pads(node)
        if not entered and not any(a in self.inside and not self.leaves(a) for a in self.read_by(node)):
            return
        if any(map(self.has_only_tokens, self.read_by(node))):
            self.readers.add(node)
            return
        self.inside.add(node)
        if not (entered or self.crops(node) or any(map(self.gives_rows, self.read_by(node)))):
            self.rowless.add(node)
        if not entered and not self.crops(node) and (self.has_other_tokens(node) or self.lets_meet(node)):
            self.exchange.add(node)

    def has_only_tokens(self, node: Node) -> bool:
        """Has a value a row per token, and nothing that counts blocks?"""
        value = self.trace.values.get(node)
        return (
            node not in self.inside
            and value is not None
            and bool(self.axis.marks.get(node))
            and not (self.marks.of(value))
        )

    def is_cut(self, node: Node, dim: int) -> bool:
        """Are these the rows of all tokens but the last few, which are no full block?"""
        value, (source, *_) = self.trace.values.get(node), (*node.all_input_nodes, None)
        (mark, *others) = self.axis.marks.get(node, (None,))
        if mark is None or others or self.axis.marks.get(source) != (mark,) or mark.outer != 1:
            return False
        if form_of(value) is not Form.SLICE or value.args[0] is not self.trace.values[source]:
            return False
        old, new = (fake_of(n).shape[mark.dim] for n in (source, node))
        windows = list(windows_of(value))
        return (
            mark.dim == dim
            and is_equal(old, self.axis.length * mark.inner)
            and not is_equal(old, new)
            and len(windows) == 1
            and windows[0][0] == dim
            and windows[0][1].by == windows[0][1].low == 0
        )

    def gives_rows(self, node: Node) -> bool:
        """Does a value that blocks read come from the rows of tokens, block by block?"""
        if node in self.inside:
            return node not in self.exchange and node not in self.rowless
        return self.mark_of(node) is not None and self.is_rows(node)

    def has_other_tokens(self, node: Node) -> bool:
        """Has a value a row for each token, and blocks in another dimension?"""
        blocks = self.marks.of(self.trace.values[node])
        return bool(blocks) and any(mark.dim not in blocks for mark in self.axis.marks.get(node, ()))

    def pads(self, node: Node) -> bool:
        """Does it add zero rows behind the tokens, up to full blocks?"""
        mark = self.mark_of(node)
        if mark is None or mark.inner != self.length or not self.has(node, mark, self.count):
            return False
        return any(self.is_padded(node, a) for a in node.all_input_nodes)

    def is_padded(self, node: Node, source: Node) -> bool:
        if source not in self.trace.values or not self.is_rows(source) or self.tokens % self.length == 0:
            return False
        windows = list(windows_of(self.trace.values[node]))
        return (
            len(windows) == 1
            and windows[0][1].source is self.trace.values[source]
            and windows[0][1].by == windows[0][1].low == 0
        )

    def crops(self, node: Node) -> bool:
        """Does it cut off the rows behind the tokens?"""
        value = self.trace.values[node]
        if form_of(value) is not Form.SLICE or not self.is_rows(node):
            return False
        windows = list(windows_of(value))
        return len(windows) == 1 and windows[0][1].by == 0 and self.has_full_rows(value.args[0])

    def has_full_rows(self, value: Node) -> bool:
        found = list(self.marks.of(value).values())
        return (
            len(found) == 1 and shape_of(value)[found[0].dim] == self.count * found[0].outer * found[0].inner
        )

    def is_rows(self, node: Node) -> bool:
        """Has a value one row per token, and no padding?"""
        mark = self.mark_of(node)
        if mark is None or mark.inner % self.length:
            return False
        return shape_of(self.trace.values[node])[mark.dim] == (
            self.tokens * mark.outer * (mark.inner // self.length)
        )

    def has(self, node: Node, mark: Mark, count: int) -> bool:
        return shape_of(self.trace.values[node])[mark.dim] == count * mark.outer * mark.inner

    def leaves(self, node: Node) -> bool:
        """Are these rows of tokens again, with nothing of blocks?"""
        mark = self.mark_of(node)
        apart = node in self.starts or node in self.rowless
        return not apart and mark is not None and mark.inner == self.length and self.is_rows(node)

    def lets_meet(self, node: Node) -> bool:
        """Does a node let blocks meet? So does what only follows from such values, and is small."""
        if not all(map(self.maps_blocks, self.between(node))):
            return True
        read = [a for a in self.read_by(node) if a in self.inside or self.mark_of(a) is not None]
        if part_of(node) is Part.ATTENTION and not self.exchange.isdisjoint(read):
            return True  # its keys are of all blocks
        if node in self.rowless and self.is_rows(node):
            return False  # a row for each token of a block
        return bool(read) and self.exchange.issuperset(read) and bytes_of(fake_of(node)) <= self.small()

    def small(self) -> int:
        """Bytes up to which a value may exist at full length."""
        widths = (bytes_of(fake_of(n.args[0])) for n in self.starts)
        return WIDE * max(widths)

    def between(self, node: Node) -> list[Node]:
        """What a node became in the captured graph."""
        stops = {self.trace.values[a] for a in self.read_by(node)}
        found, stack = [], [self.trace.values[node]]
        while stack:
            value = stack.pop()
            if value not in stops and value not in found and value.op == "call_function":
                found.append(value)
                stack += value.all_input_nodes
        return found

    def maps_blocks(self, value: Node) -> bool:
        """Does a captured node map each block by itself, if blocks come to it?"""
        operands = tensor_operands(value)
        touched = [a for a in (value, *operands) if self.marks.of(a)]
        if not touched:
            return True
        signature = self.marks.signatures.get(value)
        if signature is None or value in self.marks.lost or len(self.marks.of(value)) != 1:
            return False
        if any(len(self.marks.of(a)) > 1 or not self.has_full_rows(a) for a in touched):
            return False
        if signature.reshape:
            return bool(self.marks.of(operands[0]))
        label = signature.outputs[0][next(iter(self.marks.of(value)))]
        read = [
            labels[next(iter(self.marks.of(a)))]
            for a, labels in zip(operands, signature.operands)
            if self.marks.of(a)
        ]
        moved = label in signature.reach or any(signature.offsets.get(label, ())) or label in signature.placed
        alike = bool(operands) or signature.uniform
        return label is not None and all(r == label for r in read) and not moved and alike

    # Calls

    def rewrite(self) -> None:
        """Replace every value of blocks that somebody reads: rows of tokens, and what the exchange reads."""
        wanted = [n for n in self.module.graph.nodes if n in self.inside and self.is_wanted(n)]
        self.check(wanted)
        self.check_writes()
        self.check_gradients()
        try:
            new: dict[Node, Node] = {}
            for node, (name, operands, *dims) in [(node, self.function(node)) for node in wanted]:
                new[node] = self.replace(node, name, [new.get(a, a) for a in operands], *dims)
        finally:
            for node in reversed([n for n in self.module.graph.nodes if self.may_erase(n)]):
                if not node.users:
                    self.module.graph.erase_node(node)

    def may_erase(self, node: Node) -> bool:
        """Is a node a value, which is computed for its readers alone?"""
        inside = node in self.calls and any(a in self.inside for a in self.read_by(node))
        return mutated(node) is None and (inside or node in self.inside or node in self.laid_out)

    def is_wanted(self, node: Node) -> bool:
        if node in self.exchange or self.pads(node):
            return False
        return self.leaves(node) or any(
            u not in self.inside or u in self.exchange for u in self.readers_of(node)
        )

    def check(self, wanted: list[Node]) -> None:
        """Raises `NoBlockFunction` where values that must exist at full length are wide, or no tokens read
        what is made of the blocks: then blocks are the tokens of another sequence."""
        if not self.readers and not any(map(self.leaves, self.inside)):
            raise NoBlockFunction("no rows of tokens come out")
        for node in wanted:
            if not self.leaves(node) and bytes_of(fake_of(node)) > self.small():
                raise NoBlockFunction(f"{node} is wide, and blocks exchange it")
        for node in self.exchange:
            held = not self.axis.marks.get(node) and not self.is_view(node)
            if held and bytes_of(fake_of(node)) > self.small():  # what has a row per token may still stream
                raise NoBlockFunction(f"{node} is wide, and made of values that blocks exchange")

    def check_writes(self) -> None:
        """Raises `NoBlockFunction` where a value is written into that is read before and after: a value is
        replaced by what it is at one time."""
        for node in self.inside:
            target = mutated(node)
            if target is None:
                continue
            same = [n for n in self.inside if n < node and storage_of(n) == storage_of(target)]
            if same != [target] or list(target.users) != [node]:
                raise NoBlockFunction(f"{node} writes into a value that others read")

    def check_gradients(self) -> None:
        """Raises `NoBlockFunction` where gradients are not those of the operators.

        The gradient of a block function is derived from what was captured, which has neither detached values
        nor a user's backward.
        """
        for node in self.module.graph.nodes:
            read = self.read_by(node)
            if self.hides_gradients(node) and not self.inside.isdisjoint(read):
                raise NoBlockFunction(f"{node} may have a backward of its own")
            stops = wants_gradient(read) and is_real(node) and not wants_gradient([node])
            if node in self.inside and stops and not self.is_made_of_nothing(node):
                raise NoBlockFunction(f"{node} stops gradients")

    def hides_gradients(self, node: Node) -> bool:
        """Is it, or a function that is mapped there, more than operators with their own gradients?"""
        if isinstance(node.target, internals.HigherOrderOperator):
            return True
        mapped = self.module.get_submodule(node.target).modules() if node.op == "call_module" else ()
        nodes = [n for m in mapped if isinstance(m, GraphModule) for n in m.graph.nodes]
        return any(
            is_switch(n) or is_detached(n) or isinstance(n.target, internals.HigherOrderOperator)
            for n in nodes
        )

    def is_made_of_nothing(self, node: Node) -> bool:
        """Does a node take sizes alone from what it reads (``zeros_like``)?"""
        made = self.between(node)
        return bool(made) and not any(value.all_input_nodes for value in made)

    def is_view(self, node: Node) -> bool:
        return all(getattr(v.target, "is_view", False) for v in self.between(node))

    def function(self, node: Node) -> tuple[str, list[Node], int, int, int]:
        """The name of the function that makes a value, its operands, and the dimensions of its result that
        are one of the value's: the first of them, and how many more."""
        value = self.trace.values[node.args[0] if self.crops(node) else node]
        graph = BlockGraph(self.marks, self.length, self.count, self.full)
        boundary = list(self.boundary(value))
        operands = [self.operand(graph, *pair) for pair in boundary]
        if not any(place.along is Along.ROWS for place in graph.operands):
            raise NoBlockFunction(f"{node} is made of no rows")
        made, mark = graph.result(value, self.leaves(node))
        inner = mark.inner // (self.length if self.leaves(node) else 1)
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
        if self.pads(node) or node in self.exchange:
            return True
        return (node not in self.inside or self.leaves(node)) and not self.is_constant(value)

    def is_constant(self, value: Node) -> bool:
        """Is it made of nothing, and the same for every block: a mask of the rows of a block, zeros?"""
        if self.marks.of(value):
            signature = self.marks.signatures.get(value)
            return signature is not None and signature.uniform and not value.all_input_nodes
        made = ancestors([value])
        return all(n.op == "call_function" and not draws_random(n) for n in made)

    def operand(self, graph: BlockGraph, value: Node, node: Node) -> Node:
        """An operand of a function: what is read, with a dimension for its rows, or blocks, alone."""
        source, found = self.rows_behind(node), self.marks.of(value)
        if not found:
            if self.axis.marks.get(node):
                raise NoBlockFunction(f"{node} has tokens, and no blocks")
            graph.read(value, Place(Along.WHOLE), None)
            return source
        mark = next(iter(found.values()))
        if len(found) > 1 or not self.has_full_rows(value):
            raise NoBlockFunction(f"{node} has neither rows nor blocks alone")
        along = Along.ROWS if source is not node or self.is_rows(source) else Along.BLOCKS
        graph.read(value, Place(along, mark.dim + (mark.outer != 1)), mark)
        inner = mark.inner // (self.length if along is Along.ROWS else 1)
        if mark.outer == inner == 1:
            return source
        sizes = [size for size in (mark.outer, -1, inner) if size != 1]
        with self.module.graph.inserting_after(source):
            self.laid_out.append(inserted(source, torch.Tensor.unflatten, (source, mark.dim, sizes)))
        return self.laid_out[-1]

    def rows_behind(self, node: Node) -> Node:
        """A row per token, of what was padded to full blocks, or cut to them; else the node itself."""
        if self.pads(node):
            return next(a for a in node.all_input_nodes if self.is_padded(node, a))
        mark = self.mark_of(node)
        is_cut = self.full and mark is not None and self.is_cut(node, mark.dim)
        return node.all_input_nodes[0] if is_cut else node

    def replace(self, node: Node, name: str, operands: list[Node], dim: int, more: int) -> Node:
        with self.module.graph.inserting_before(node):
            new = inserted(node, streambp.over_blocks.default, (operands, name))
            if more:
                new = inserted(node, torch.flatten, (new, dim, dim + more))
        node.replace_all_uses_with(new)
        return new


def wants_gradient(nodes: Iterable[Node]) -> bool:
    return any(isinstance(fake_of(n), torch.Tensor) and fake_of(n).requires_grad for n in nodes)


def is_size(node: Node) -> bool:
    return isinstance(fake_of(node), (int, torch.SymInt, torch.Size)) or node.target == "size"


def is_real(node: Node) -> bool:
    """Is a value made of numbers that may have gradients?"""
    fake = fake_of(node)
    return isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())

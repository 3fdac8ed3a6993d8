"""Sequences that a model splits into blocks of tokens. Examples are state-space layers in block form,
chunked linear attention, and attention inside blocks.

Between the reshape that splits the tokens into blocks and the one that joins them, a node either maps
each block by itself, or lets blocks exchange data. Nodes that map blocks have rows of blocks, and chunks
hold whole blocks (`streambp::regrouped`, passes/kernels/blocks.py). Nodes that let blocks exchange a
state stay as they are: their values are small, a state per block, and exist at full length.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import Mark, bytes_of, is_equal
from ...passes.kernels import blocks as kernels
from ...passes.rules.forward import mutated
from ..reading.aten import erase_unread, inserted, size_as_node, sum_of
from ..reading.token_axes import axes_of, connected_axes, traced
from ..reading.values import fake_of, is_changed, own_of, storage_of
from .block_splits import may_split, split_of
from .block_values import Blocked, NoBlocks, is_size

streambp = torch.ops.streambp


class Home(enum.Enum):
    """The form of the values that a node reads and makes."""

    BLOCKS = "rows of blocks"
    AT_ONCE = "at full length"
    OUTSIDE = "rows of tokens, or no rows"


def part_blocks(module: GraphModule) -> GraphModule:
    """Give blocks of tokens rows of their own, from where tokens are split to where they are joined."""
    done: set[tuple[str, int]] = set()
    if any(may_split(node) for node in module.graph.nodes):
        while part_blocks_of_one_length(module, done):
            pass
    return module


def part_blocks_of_one_length(module: GraphModule, done: set[tuple[str, int]]) -> bool:
    """Give blocks of one length rows of their own: the longest that can have some.

    Returns whether other reshapes are left that may split tokens. They may split the rows that come out
    of these blocks.

    done  numbers of tokens, and lengths of blocks that have rows of their own
    """
    fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
    trace = traced(module, fakes)
    axes = connected_axes(trace, fakes)
    cut = [p for p in axes_of(trace, fakes) if not any(is_equal(p.length, axis.length) for axis in axes)]
    for axis in (*axes, *cut):
        nodes = [node for node in module.graph.nodes if node in trace.values]
        splits = [s for node in nodes if (s := split_of(node, axis)) is not None]
        lengths = {s.length for s in splits if (str(axis.length), s.length) not in done}
        for length in sorted(lengths, reverse=True):
            try:
                found = Blocked(module, trace, axis, [s for s in splits if s.length == length], axis in axes)
                Boundary(found).write()
                done.add((str(axis.length), length))
                return any(may_split(node) for node in nodes if node not in found.inside)
            except NoBlocks as reason:
                internals.log.debug("blocks of %s tokens stay as they are: %s", length, reason)
    return False


class Boundary:
    """The operators that convert values between rows of tokens, rows of blocks, and full length."""

    def __init__(self, found: Blocked):
        self.found, self.graph = found, found.module.graph
        self.known: dict[tuple[Node, Home], Node] = {}

    def write(self) -> None:
        """Insert the operators. Raises `NoBlocks` before any is inserted, if one cannot be."""
        nodes = [n for n in self.graph.nodes if n.op != "placeholder" and not is_size(n)]
        edges = [(n, a) for n in nodes for a in n.all_input_nodes if a in self.found.trace.values]
        crossing = [(n, a, home) for n, a in edges if (home := self.destination(n, a)) is not None]
        self.check(crossing)
        self.check_writes()
        for node, operand, home in crossing:
            node.replace_input_with(operand, self.led(operand, home))
        resized = sorted(filter(self.is_resized, self.found.inside))
        for node in resized:
            self.resize(node)
        erase_unread(self.graph, resized)

    def is_resized(self, node: Node) -> bool:
        """Does a node pad tokens to whole blocks, or cut off rows behind the tokens?"""
        return node in self.found.inside and (self.found.pads(node) or self.found.crops(node))

    # Which operand has to be converted to which form

    def home(self, node: Node) -> Home:
        """Return the form of the values that a node reads and makes. For a call it is that of its results."""
        if node in self.found.exchange:
            return Home.AT_ONCE
        if node in self.found.inside:
            return Home.BLOCKS
        homes = {self.home(u) for u in node.users} if node in self.found.calls else set()
        if len(homes) > 1:
            raise NoBlocks(f"{node} has results of blocks, and others")
        return homes.pop() if homes else Home.OUTSIDE

    def destination(self, node: Node, operand: Node) -> Home | None:
        """Find the form to which an operand of a node must be converted. None if it has that form, or no
        rows."""
        if self.is_resized(node):  # an operator replaces the node itself
            return None
        crops = self.is_resized(operand) and self.found.crops(operand)
        made = Home.OUTSIDE if crops else self.home(operand)
        read, found = self.home(node), self.found
        in_blocks = bool(found.marks.of(found.trace.values[operand])) or node in found.starts
        if made is read or not in_blocks:
            return None
        if made is Home.OUTSIDE:
            marked = bool(found.axis.marks.get(operand))
            if node in found.starts and not marked:
                raise NoBlocks(f"{operand} has no rows of tokens yet")
            return Home.BLOCKS if read is Home.BLOCKS and marked else None
        if read is Home.OUTSIDE and made is Home.BLOCKS:
            return Home.OUTSIDE if found.leaves(operand) else Home.AT_ONCE
        return None if read is Home.OUTSIDE else read

    def check(self, crossing: Sequence[tuple[Node, Node, Home]]) -> None:
        """Check that all crossing values can be converted. Raises `NoBlocks` where values that must exist at
        full length are wide, where rows are not in the order of blocks, where a crossing value is written
        into, or where no tokens read the result of the blocks: then blocks are the tokens of another
        sequence."""
        if not self.found.readers and not any(map(self.found.leaves, self.found.inside)):
            raise NoBlocks("no rows of tokens come out")
        if self.found.are_tokens():
            raise NoBlocks("blocks are the tokens of another sequence: they attend to one another")
        unsorted = self.found.inside & self.found.trace.unsorted
        if unsorted:
            raise NoBlocks(f"{unsorted} are in another order than that of blocks")
        if not self.knows_tokens() and any(map(self.is_resized, self.found.inside)):
            raise NoBlocks("no input has a row for each token")
        for _, operand, home in crossing:
            if is_changed(operand):
                raise NoBlocks(f"{operand} is written into")
            if home is Home.AT_ONCE and bytes_of(fake_of(operand)) > self.found.small():
                raise NoBlocks(f"{operand} is wide, and blocks exchange it")
            self.mark_of(operand)
        for node in self.found.exchange:
            held = not self.found.axis.marks.get(node) and not self.is_view(node)
            if held and bytes_of(fake_of(node)) > self.found.small():  # a row per token may still stream
                raise NoBlocks(f"{node} is wide, and made of values that blocks exchange")

    def check_writes(self) -> None:
        """Raise `NoBlocks` where a value is written into that is read before and after. Rows of blocks are
        a copy, so a reader would miss the write."""
        for node in self.found.inside:
            target = mutated(node)
            if target is None:
                continue
            same = [n for n in self.found.inside if n < node and storage_of(n) == storage_of(target)]
            if same != [target] or list(target.users) != [node]:
                raise NoBlocks(f"{node} writes into a value that others read")

    def is_view(self, node: Node) -> bool:
        return all(getattr(v.target, "is_view", False) for v in self.found.between(node))

    def mark_of(self, node: Node) -> Mark:
        """Find the one dimension of a value for blocks, or for the rows of all their tokens. Raises
        `NoBlocks` if there is not exactly one."""
        value = self.found.trace.values[node]
        marks = list(self.found.marks.of(value).values())
        if not marks:
            marks = [replace(m, inner=m.inner * self.found.length) for m in self.found.axis.marks[node]]
        elif not self.found.has_full_rows(value) and not self.found.crops(node):
            raise NoBlocks(f"{node} has rows of no whole blocks")
        if len(marks) != 1:
            raise NoBlocks(f"{node} has neither rows nor blocks alone")
        return marks[0]

    # The operators

    def led(self, operand: Node, home: Home) -> Node:
        """Convert an operand to the form that its reader needs. All readers share one conversion."""
        if (operand, home) not in self.known:
            with self.graph.inserting_before(behind(operand)):
                self.known[operand, home] = self.written(operand, home)
        return self.known[operand, home]

    def written(self, operand: Node, home: Home) -> Node:
        mark = self.mark_of(operand)
        if home is Home.AT_ONCE:
            return along(operand, mark, lambda x, dim: inserted(x, streambp.at_once.default, (x, dim)))
        if self.home(operand) is Home.AT_ONCE:
            return along(operand, mark, lambda x, dim: inserted(x, streambp.by_block.default, (x, dim)))
        blocks = (mark.inner, 1) if home is Home.OUTSIDE else (1, mark.inner)
        is_cut = self.found.full and self.found.is_cut(operand, mark.dim)
        source = operand.all_input_nodes[0] if is_cut else operand

        def regrouped(x: Node, dim: int) -> Node:
            size = size_as_node(x, operand if x is source else x, dim)
            return inserted(x, streambp.regrouped.default, (x, dim, size, *blocks))

        return along(source, mark, regrouped)

    def resize(self, node: Node) -> None:
        """Replace a padding to whole blocks, or a cut behind the tokens, by ``streambp::regrouped``."""
        mark, crops = self.found.mark_of(node), self.found.crops(node)
        read = node.args[0] if crops else self.found.padded_by(node)
        blocks = (self.found.length, 1) if crops else (1, self.found.length)
        with self.graph.inserting_before(node):
            size = self.resized(node, mark, crops)
            new = inserted(node, streambp.regrouped.default, (read, mark.dim, size, *blocks))
        node.replace_all_uses_with(new)

    def resized(self, node: Node, mark: Mark, crops: bool) -> int | Node:
        """Compute the rows of a value that has those of all tokens, or those of all blocks."""
        size, block = fake_of(node).shape[mark.dim], self.found.length
        if isinstance(size, int):
            return size
        assert self.tokens is not None  # checked before
        tokens = size_as_node(node, *self.tokens)
        if crops:
            return times(tokens, mark.inner // block, node)
        rounded = tokens if self.found.full else sum_of(tokens, block - 1, node)
        return times(inserted(node, operator.floordiv, (rounded, block), as_written=True), block, node)

    def knows_tokens(self) -> bool:
        return isinstance(self.found.axis.length, int) or self.tokens is not None

    @functools.cached_property
    def tokens(self) -> tuple[Node, int] | None:
        """Find a dimension of an input that has one row for each token."""
        axis = self.found.axis
        for node in self.graph.find_nodes(op="placeholder"):
            for mark in axis.marks.get(node, ()):
                if mark.is_plain and is_equal(own_of(node).shape[mark.dim], axis.length):
                    return node, mark.dim
        return None


def times(count: Node, by: int, like: Node) -> Node:
    return count if by == 1 else inserted(like, operator.mul, (count, by), as_written=True)


def behind(node: Node) -> Node:
    """Find the first place behind a node where a graph may compute: after all placeholders."""
    while node.next.op == "placeholder":
        node = node.next
    return node.next


def along(x: Node, mark: Mark, write: Callable[[Node, int], Node]) -> Node:
    """Insert an operator along the rows of a value. If other sequences share the dimension, it is split for
    the operator and joined afterwards."""
    if mark.outer == 1:
        return write(x, mark.dim)
    apart = inserted(x, torch.Tensor.unflatten, (x, mark.dim, (mark.outer, -1)))
    return inserted(x, torch.flatten, (write(apart, mark.dim + 1), mark.dim, mark.dim + 1))


def write_out(module: GraphModule) -> bool:
    """Replace the operators by torch's own, in a region that runs unchunked. Returns whether it had any."""
    calls = [n for n in module.graph.nodes if n.target in kernels.PLAIN]
    for node in calls:
        node.target = kernels.PLAIN[node.target]
    module.recompile()
    return bool(calls)

"""Values of a graph that consist of blocks of tokens, and the nodes that let blocks exchange data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from ...passes.ir import Mark, Size, bytes_of, is_equal, shape_of, tensor_operands
from ...passes.rules import form_of, is_product, windows_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, part_of
from ...passes.token_propagation import TokenPropagation
from ..reading.mixing import attends
from ..reading.token_axes import Axis, Trace
from ..reading.values import fake_of, own_of
from .block_splits import Split

WIDE = 4  # a value that blocks exchange may be this many times as large as the widest rows that enter them


class NoBlocks(Exception):
    """Raised with the reason why tokens are not split into blocks; they stay as they are."""


class Blocked:
    """The part of a graph between the reshapes to and from blocks of one length.

    marks     dimensions of blocks; one whose ``inner`` is a block's length has a row per token
    inside    nodes between those reshapes, both included
    full      whether a last block that is not full is left out
    calls     nodes that are no value themselves, only their results are
    exchange  nodes inside that let blocks exchange data, and small ones derived from such values alone
    rowless   nodes inside that read only exchanged values
    readers   rows of tokens that read values of blocks as they read a weight
    """

    def __init__(self, module: GraphModule, trace: Trace, axis: Axis, splits: list[Split], exact: bool):
        self.exact, self.module, self.trace, self.axis = exact, module, trace, axis
        self.length, self.count = splits[0].length, splits[0].count
        self.full = any(self.is_cut(s.node.args[0], s.mark.dim) for s in splits)
        self.starts = {s.node for s in splits}
        seeds = {trace.values[s.node]: (s.mark,) for s in splits}
        self.marks = TokenPropagation(trace.graph, seeds, trace.known)
        if not all(map(self.is_full, self.starts)):
            raise NoBlocks("these are not blocks of all tokens")
        self.inside: set[Node] = set()
        self.exchange: set[Node] = set()
        self.readers: set[Node] = set()
        self.rowless: set[Node] = set()
        self.calls = {n for n in module.graph.nodes if n.op != "output" and n not in trace.values}
        for node in module.graph.nodes:
            self.visit(node)

    # How a node treats blocks

    def mark_of(self, node: Node) -> Mark | None:
        found = self.marks.of(self.trace.values[node]) if node in self.trace.values else {}
        return next(iter(found.values())) if len(found) == 1 else None

    def read_by(self, node: Node) -> list[Node]:
        """List the values that a node reads. A call's result reads the operands of the call, and a size
        reads none."""
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
        """Does a value have a row per token, and no dimension of blocks?"""
        value = self.trace.values.get(node)
        return (
            node not in self.inside
            and value is not None
            and bool(self.axis.marks.get(node))
            and not (self.marks.of(value))
        )

    def is_cut(self, node: Node, dim: int) -> bool:
        """Does a node keep the rows of all tokens but the last few, which form no full block?"""
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
        """Does a value have a row for each token, and blocks in another dimension?"""
        blocks = self.marks.of(self.trace.values[node])
        return bool(blocks) and any(mark.dim not in blocks for mark in self.axis.marks.get(node, ()))

    def pads(self, node: Node) -> bool:
        """Does a node add zero rows behind the tokens, up to full blocks?"""
        return self.padded_by(node) is not None

    def padded_by(self, node: Node) -> Node | None:
        """Find the rows of tokens, among a node's operands, behind which it adds zero rows."""
        mark = self.mark_of(node)
        if mark is None or mark.inner != self.length or self.is_rows(node) or not self.is_full(node):
            return None
        given = (a for a in node.all_input_nodes if a in self.trace.values and self.is_rows(a))
        return next((a for a in given if self.keeps_first_rows(node, a)), None)

    def crops(self, node: Node) -> bool:
        """Does a node cut off the rows behind the tokens, of a value that maps each block by itself?"""
        (source, *_) = (*node.all_input_nodes, None)
        if source not in self.inside or source in self.exchange or self.pads(source):
            return False
        cuts = self.is_rows(node) and self.is_full(source) and not self.is_rows(source)
        return cuts and self.keeps_first_rows(node, source)

    def keeps_first_rows(self, node: Node, source: Node) -> bool:
        """Are the first rows of a node those of its source? At the traced length, none may be missing."""
        value, given = self.trace.values[node], self.trace.values[source]
        windows = [window for _, window in windows_of(value)]
        return value is given or (
            len(windows) == 1 and windows[0].source is given and windows[0].by == windows[0].low == 0
        )

    def has_full_rows(self, value: Node) -> bool:
        found = list(self.marks.of(value).values())
        return (
            len(found) == 1 and shape_of(value)[found[0].dim] == self.count * found[0].outer * found[0].inner
        )

    def is_rows(self, node: Node) -> bool:
        """Does a value have one row per token, and no padding, at every length?"""
        mark = self.mark_of(node)
        if mark is None or mark.inner % self.length:
            return False
        return has_rows(node, replace(mark, inner=mark.inner // self.length), self.axis.length, self.exact)

    def is_full(self, node: Node) -> bool:
        """Does a value have all rows of all blocks, at every length?"""
        tokens, mark = self.axis.length, self.mark_of(node)
        tokens = tokens // self.length * self.length if self.full else tokens
        return mark is not None and has_rows(node, replace(mark, block=self.length), tokens, self.exact)

    def has_row_per_token(self, node: Node) -> bool:
        """Does a value have a row for each token, or for each row of padded blocks?"""
        mark = self.mark_of(node)
        return self.is_rows(node) or (
            mark is not None and mark.inner % self.length == 0 and self.is_full(node)
        )

    def leaves(self, node: Node) -> bool:
        """Is a value rows of tokens again, without a dimension of blocks?"""
        mark = self.mark_of(node)
        apart = node in self.starts or node in self.rowless
        return not apart and mark is not None and mark.inner == self.length and self.is_rows(node)

    def are_tokens(self) -> bool:
        """Do blocks attend to one another, and do linear layers map them, as tokens of a layer?

        All tokens may attend to values that are made of blocks."""
        values = [v for n in self.exchange for v in self.between(n) if not self.has_tokens(v)]
        mapped = [v for n in self.inside for v in self.between(n) if is_product(v)]
        return any(attends(v, self.marks, self.count) for v in values) and any(
            any(a in self.trace.weights for a in tensor_operands(v))
            and any(m.inner == 1 for a in tensor_operands(v) for m in self.marks.of(a).values())
            for v in mapped
        )

    def has_tokens(self, value: Node) -> bool:
        """Does a captured value have a row for each token of a block?"""
        return any(mark.inner == self.length for mark in self.marks.of(value).values())

    def lets_meet(self, node: Node) -> bool:
        """Does a node let blocks exchange data? The answer is yes, too, for small values that are derived
        only from exchanged ones."""
        if not all(map(self.maps_blocks, self.between(node))):
            return True
        read = [a for a in self.read_by(node) if a in self.inside or self.mark_of(a) is not None]
        if part_of(node) is Part.ATTENTION and not self.exchange.isdisjoint(read):
            return True  # its keys come from all blocks
        if node in self.rowless and self.has_row_per_token(node):
            return False  # it has a row for each token of a block
        return bool(read) and self.exchange.issuperset(read) and bytes_of(fake_of(node)) <= self.small()

    def small(self) -> int:
        """Return the largest size, in bytes, of a value that may exist at full length."""
        widths = (bytes_of(fake_of(n.args[0])) for n in self.starts)
        return WIDE * max(widths)

    def between(self, node: Node) -> list[Node]:
        """List the captured nodes that a node became."""
        stops = {self.trace.values[a] for a in self.read_by(node)}
        found, stack = [], [self.trace.values[node]]
        while stack:
            value = stack.pop()
            if value not in stops and value not in found and value.op == "call_function":
                found.append(value)
                stack += value.all_input_nodes
        return found

    def maps_blocks(self, value: Node) -> bool:
        """Does a captured node map each block by itself, or read no blocks at all?"""
        operands = tensor_operands(value)
        touched = [a for a in (value, *operands) if self.marks.of(a)]
        if not touched:
            return True
        alone = all(len(self.marks.of(a)) == 1 and self.has_full_rows(a) for a in touched)
        return alone and value in touched and self.marks.maps_rows(value)


def has_rows(node: Node, mark: Mark, tokens: Size, exact: bool) -> bool:
    """Does a value have the rows that a mark says, at the traced length, or ``exact``ly at every length?"""
    _, excess, rest = mark.located(own_of(node).shape[mark.dim], tokens)
    return excess == 0 and (not exact or is_equal(rest, 0))


def is_size(node: Node) -> bool:
    return isinstance(fake_of(node), (int, torch.SymInt, torch.Size)) or node.target == "size"

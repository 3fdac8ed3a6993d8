"""How a chunk body reads: its inputs, as a driver cuts them, and the sizes of values at chunk length."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir import Analysis, Mark, Size, Tokens, hint, is_tensor, shape_of, symbols_in, value_of
from ..kernels.attention import Attention, Choice, Target, choose
from ..partition import Sweep

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


@dataclass(frozen=True)
class Binding:
    """How a driver prepares one input of a chunk body.

    role    rows    rows of the chunk, unflattened to ``[…, outer, C, inner, …]`` where tokens share their
            dimension
            keys    the key range of the chunk
            whole   the value as it is
            scalar  an integer: ``rows`` C, ``keys`` S, ``first`` token, ``offset`` of the chunk in its key
                    range, ``length`` T
            write   like rows, for a buffer that the body fills
            feed    like keys, for a buffer that the body fills and reads
            total   an accumulator
            carry   a scan's state, which the body moves on; or, in a sweep that resumes the scan, only reads
            keytotal  the key range of an accumulator
    low     the token of row 0 of the source, after any shift
    size    for a scalar that is a size of the model: the symbol
    filling  for a state: what it is before the first row
    columns  for rows of a stored matrix: its dimension of keys, cut like keys
    """

    role: str
    source: Node | None
    name: str
    mark: Mark | None = None
    low: int = 0
    size: torch.SymInt | None = None
    columns: Mark | None = None
    filling: float = 0.0

    def __str__(self) -> str:
        return f"{self.role:<8} {self.name}"


@dataclass(frozen=True)
class Body:
    """A chunk body: its graph, and how to cut its inputs. All its results are written into them.

    attends  the kernels that were chosen for its attention, each once, and why
    """

    graph: GraphModule
    bindings: tuple[Binding, ...]
    attends: tuple[Choice, ...] = ()


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulators are float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def kernel_for(query: Node, value: Node, mask: Node | None, target: Target) -> Choice:
    """The kernel for these operands on a target; a CPU's for operands on a CPU, whatever the target."""
    like = value_of(query)
    known = (target.device == "cpu") == (like.device.type == "cpu")
    asked = Attention(like.dtype, shape_of(query)[-1], shape_of(value)[-1], mask is not None)
    return choose(asked, target if known else Target(like.device.type))


class Reading:
    """A body in the making: its graph, its inputs, and the values that it has of the nodes of a sweep."""

    def __init__(self, sweep: Sweep, analysis: Analysis, target: Target):
        self.sweep, self.analysis, self.target = sweep, analysis, target
        self.graph = Graph()
        self.bindings: dict[tuple, tuple[Binding, Node]] = {}
        self.values: dict[Node, Node] = {}
        self.inside = set(sweep.nodes)
        self.feeds: dict[Node, Node] = {}
        self.settled: dict[Node, Node] = {}
        self.attends: list[Choice] = []
        self.writing: Node | None = None

    def bind(
        self,
        role: str,
        source: Node | None,
        name: str,
        mark: Mark | None = None,
        low: int = 0,
        size=None,
        filling: float = 0.0,
    ) -> Node:
        key = (role, source, name if source is None else None, low if role == "rows" else 0)
        if key not in self.bindings:
            last = list(self.bindings.values())[-1][1] if self.bindings else None
            with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
                unique = f"{name}_{role}" if source is not None else name
                if any(n.target == unique for _, n in self.bindings.values()):
                    unique = f"{unique}_{len(self.bindings)}"
                node = self.graph.placeholder(unique)
            columns = self.fact(source).keys if role == "rows" else None
            self.bindings[key] = (Binding(role, source, name, mark, low, size, columns, filling), node)
            for given in self.sizes_of(source, mark, size):  # Inductor wants each symbol by itself
                for symbol in symbols_in(given):
                    self.symbol(symbol)
        return self.bindings[key][1]

    @staticmethod
    def sizes_of(source: Node | None, mark: Mark | None, size: object) -> list[Size]:
        """The sizes that an input is told by, or is: those of its shape but for its rows, or a number."""
        value = size if source is None else value_of(source)
        if isinstance(value, torch.Tensor):
            return [s for d, s in enumerate(value.shape) if mark is None or d != mark.dim]
        return [value] if isinstance(value, torch.SymInt) else []

    def scalar(self, name: str) -> Node:
        return self.bind("scalar", None, name)

    def size(self, mark: Mark, name: str = "rows") -> Node:
        size = self.scalar(name)
        factor = mark.outer * mark.inner
        return size if factor == 1 else self.graph.call_function(operator.mul, (size, factor))

    def unflattened(self, node: Node, mark: Mark, name: str = "rows") -> list:
        """Sizes of a value with the token dimension split into outer, rows, inner."""
        sizes = self.sizes(node)
        sizes[mark.dim : mark.dim + 1] = [mark.outer, self.scalar(name), mark.inner]
        return sizes

    def sizes(self, node: Node, output: int | None = None) -> list:
        """The shape of a value at chunk length."""
        fact = self.fact(node, output)
        shape = list(value_of(node, output).shape)
        sizes = [s if isinstance(s, int) else None for s in shape]
        if isinstance(fact, Tokens):
            sizes[fact.rows.dim] = self.size(fact.rows)
            if fact.keys is not None:
                sizes[fact.keys.dim] = self.columns(shape[fact.keys.dim], fact.keys)
        for i, size in enumerate(sizes):
            if size is None:
                sizes[i] = self.symbol(shape[i])
        return sizes

    def columns(self, size, mark: Mark) -> Node:
        """The keys of the chunk, and the columns that a matrix of scores has beyond them (attention
        sinks)."""
        keys, extra = self.size(mark, "keys"), hint(size) - hint(self.analysis.length)
        return self.graph.call_function(operator.add, (keys, extra)) if extra else keys

    def column(self, node: Node, at: int | None) -> object:
        """A bound of a slice along keys, counted from the first key or, beyond the last, from there."""
        length = hint(self.analysis.length)
        if isinstance(at, Node):
            at = hint(value_of(at))
        if at is None or at < length:
            return at
        return self.columns(min(at, shape_of(node)[self.fact(node).keys.dim]), self.fact(node).keys)

    def symbol(self, size: torch.SymInt) -> Node:
        """A size that is neither rows nor keys but no constant either: handed in by the driver."""
        name = "size_" + "".join(c if c.isalnum() else "_" for c in str(size.node.expr))
        return self.bind("scalar", None, name, size=size)

    def fact(self, node: Node, output: int | None = None):
        fact = self.analysis.facts[node]
        return fact[output or 0] if isinstance(fact, tuple) else fact

    def read(self, node: Node, role: str = "rows", low: int | None = None) -> Node:
        """The chunk's rows (or key range, or all) of a value, wherever it lives."""
        fact = self.fact(node) if not isinstance(value_of(node), (tuple, list)) else None
        if role == "rows" and low is None and isinstance(fact, Tokens):
            low = fact.lo - self.shift(node)
        if role == "rows" and node in self.inside and (not isinstance(fact, Tokens) or low == fact.lo):
            if node in self.sweep.keysums:
                return self.settled_rows(node)
            return self.values[node]
        if fact is None or not isinstance(fact, Tokens) or role == "whole":
            if node in self.inside and node not in self.sweep.sums:
                return self.values[node]
            if not is_tensor(node):
                return self.bind("scalar", node, node.name)
            return self.bind("whole", node, node.name)
        if role == "keys":
            if node in self.feeds:
                return self.feeds[node]
            return self.bind("keys", node, node.name, fact.rows)
        mark, start = fact.rows, fact.lo if low is None else low
        value = self.bind("rows", node, node.name, mark, start)
        if mark.outer == mark.inner == 1:
            return value
        return self.reshaped(value, self.sizes(node))

    def settled_rows(self, node: Node) -> Node:
        """The chunk's own rows of a key accumulator, final because every later row has added its part."""
        if node not in self.settled:
            mark, value = self.fact(node).rows, value_of(node)
            total = self.bind("keytotal", node, node.name, mark)
            rows = self.graph.call_function(
                streambp.rows_at.default, (total, mark.dim, self.scalar("offset"), self.scalar("rows"))
            )
            if total_dtype(value.dtype) != value.dtype:
                rows = self.graph.call_function(prims.convert_element_type.default, (rows, value.dtype))
            self.settled[node] = rows
        return self.settled[node]

    def shift(self, operand: Node) -> int:
        """The rows of an operand that the node being written reads, relative to its own."""
        edges = self.analysis.edges.get(self.writing, ())
        return next(
            (
                int(e.reach.lo)
                for e in edges
                if e.operand is operand and e.role == "halo" and e.reach.lo == e.reach.hi
            ),
            0,
        )

    def domain(self, operand: Node):
        """The fact of an operand, its domain counted in the rows of the node being written."""
        fact, shift = self.fact(operand), self.shift(operand)
        return (
            replace(fact, lo=fact.lo - shift, hi=fact.hi - shift)
            if isinstance(fact, Tokens) and shift
            else fact
        )

    def operand(self, edge) -> Node:
        """An operand as its edge says."""
        if edge.role == "halo":
            if edge.reach.lo == edge.reach.hi:  # rows shifted by a constant
                return self.read(edge.operand, "rows", self.fact(edge.operand).lo - int(edge.reach.lo))
            return self.read(edge.operand, "whole")
        return self.read(edge.operand, "rows" if edge.role == "carry" else edge.role)

    def edges(self, node: Node):
        return self.analysis.edges[node]

    def kind(self, node: Node) -> str:
        return self.analysis.kinds[node]

    def carries_keys(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.keys is not None and fact.keys.dim == dim

    def carries_tokens(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.rows.dim == dim

    def read_int(self, node: Node):
        value = value_of(node)
        if isinstance(value, (int, float, bool)):
            return value
        return self.bind("scalar", node, node.name)

    def reshaped(self, value: Node, sizes: list) -> Node:
        return self.graph.call_function(aten.reshape.default, (value, sizes))

    def device(self) -> torch.device:
        return next(value_of(n).device for n in self.sweep.nodes if is_tensor(n))

"""Write each sweep's chunk body as an FX graph: the same nodes at length C.

Nothing is decided here: roles, directions and ranges are read from the partition and the analysis. A body's inputs are
`Binding`s, which say how a driver cuts each one for a chunk; its size arguments are symbols, so that one compiled body serves every
chunk, the short last one, every prefix and every sequence length.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from .ir import Analysis, Mark, Tokens, hint, is_tensor, rank_of, refuse, shape_of, symbols_in, tensor_operands, value_of
from .partition import Program, Sweep
from .rules import rule_of

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp

SCALARS = ("rows", "keys", "first", "offset", "length")


@dataclass(frozen=True)
class Binding:
    """How a driver prepares one input of a chunk body.

    role    rows    rows of the chunk, unflattened to ``[…, outer, C, inner, …]`` where tokens share their dimension
            keys    the key range of the chunk
            whole   the value as it is
            scalar  an integer: ``rows`` C, ``keys`` S, ``first`` token, ``offset`` of the chunk in its key range, ``length`` T
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
    """A chunk body: its graph, and how to cut its inputs. All its results are written into them."""

    graph: GraphModule
    bindings: tuple[Binding, ...]


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulators are float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def lower(program: Program, analysis: Analysis) -> tuple[Body, ...]:
    """One body per sweep."""
    return tuple(Writer(program, sweep, analysis).write() for sweep in program.sweeps)


class Writer:
    """Builds one body. Rules with an ``emit`` call its public methods; everything else is copied."""

    def __init__(self, program: Program, sweep: Sweep, analysis: Analysis):
        self.program, self.sweep, self.analysis = program, sweep, analysis
        self.graph = Graph()
        self.bindings: dict[tuple, tuple[Binding, Node]] = {}
        self.values: dict[Node, Node] = {}
        self.inside = set(sweep.nodes)
        self.feeds: dict[Node, Node] = {}
        self.settled: dict[Node, Node] = {}
        self.writing: Node | None = None

    def write(self) -> Body:
        for name in ("rows", "length"):  # strides of row views are written in them
            self.scalar(name)
        for node in self.sweep.nodes:
            self.emit(node)
        for node in self.sweep.writes:
            if node not in self.feeds:
                self.store(node)
        self.graph.output(())
        ordered = [b for b, _ in self.bindings.values()]
        module = GraphModule({}, self.graph)
        return Body(module, tuple(ordered))

    # Reading

    def bind(self, role: str, source: Node | None, name: str, mark: Mark | None = None, low: int = 0, size=None, filling: float = 0.0) -> Node:
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
            if role == "whole":
                for symbol in (s for size in value_of(source).shape for s in symbols_in(size)):  # Inductor wants each by itself
                    self.symbol(symbol)
        return self.bindings[key][1]

    def scalar(self, name: str) -> Node:
        return self.bind("scalar", None, name)

    def size(self, mark: Mark, name: str = "rows") -> Node:
        size = self.scalar(name)
        factor = mark.outer * mark.inner
        return size if factor == 1 else self.graph.call_function(operator.mul, (size, factor))

    def unflattened(self, node: Node, mark: Mark, name: str = "rows") -> list:
        """Sizes of a value with the token dimension split into outer, rows, inner."""
        sizes = self.sizes(node)
        sizes[mark.dim:mark.dim + 1] = [mark.outer, self.scalar(name), mark.inner]
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
        """The keys of the chunk, and the columns that a matrix of scores has beyond them (attention sinks)."""
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

    def shift(self, operand: Node) -> int:
        """The rows of an operand that the node being written reads, relative to its own."""
        edges = self.analysis.edges.get(self.writing, ())
        return next((int(e.reach.lo) for e in edges if e.operand is operand and e.role == "halo" and e.reach.lo == e.reach.hi), 0)

    def domain(self, operand: Node):
        """The fact of an operand, its domain counted in the rows of the node being written."""
        fact, shift = self.fact(operand), self.shift(operand)
        return replace(fact, lo=fact.lo - shift, hi=fact.hi - shift) if isinstance(fact, Tokens) and shift else fact

    def operand(self, edge) -> Node:
        """An operand as its edge says."""
        if edge.role == "halo":
            if edge.reach.lo == edge.reach.hi:  # rows shifted by a constant
                return self.read(edge.operand, "rows", self.fact(edge.operand).lo - int(edge.reach.lo))
            return self.read(edge.operand, "whole")
        return self.read(edge.operand, "rows" if edge.role == "carry" else edge.role)

    # What rules may ask

    def kind(self, node: Node) -> str:
        return self.analysis.kinds[node]

    def carries_keys(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.keys is not None and fact.keys.dim == dim

    def carries_tokens(self, node: Node, dim: int) -> bool:
        fact = self.fact(node)
        return isinstance(fact, Tokens) and fact.rows.dim == dim

    def copy(self, node: Node, given: Mapping[int, Node] | None = None) -> Node:
        """The same node with operands at chunk length and its shape argument rewritten."""
        rule = rule_of(node)
        edges = iter(self.analysis.edges[node])
        counter = iter(range(len(tensor_operands(node))))

        def mapped(arg):
            if isinstance(arg, Node):
                value = value_of(arg)
                if isinstance(value, (torch.Tensor, tuple, list)):
                    edge, index = next(edges), next(counter)
                    return given[index] if given and index in given else self.operand(edge)
                return self.read_int(arg)
            if isinstance(arg, (list, tuple)):
                return type(arg)(mapped(a) for a in arg) if not isinstance(arg, torch.Size) else [mapped(a) for a in arg]
            return arg

        args = [self.sizes(node) if i == rule.shape_arg else mapped(a) for i, a in enumerate(node.args)]
        kwargs = {k: mapped(v) for k, v in node.kwargs.items()}
        kwargs.pop("pin_memory", None)
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def read_int(self, node: Node):
        value = value_of(node)
        if isinstance(value, (int, float, bool)):
            return value
        return self.bind("scalar", node, node.name)

    def tokens_of_rows(self) -> Node:
        """``[C]``: the token of each row."""
        rows = self.graph.call_function(prims.iota.default, (self.scalar("rows"),), dict(
            start=0, step=1, dtype=torch.int64, device=self.device(), requires_grad=False))
        return self.graph.call_function(aten.add.Scalar, (rows, self.scalar("first")))

    def device(self) -> torch.device:
        return next(value_of(n).device for n in self.sweep.nodes if is_tensor(n))

    def inside_domain(self, fact: Tokens, rank: int, mark: Mark) -> Node:
        """A boolean, true where a row of the chunk counts; shaped to broadcast against a value of that rank."""
        tokens = self.tokens_of_rows()
        call = self.graph.call_function
        inside = None
        if fact.lo > 0:
            inside = call(aten.ge.Scalar, (tokens, fact.lo))
        if fact.hi < 0:
            below = call(aten.lt.Scalar, (tokens, call(operator.add, (self.scalar("length"), fact.hi))))
            inside = below if inside is None else call(aten.logical_and.default, (inside, below))
        if mark.outer != 1 or mark.inner != 1:
            size = self.scalar("rows")
            spread = call(aten.view.default, (inside, [1, size, 1]))
            spread = call(aten.expand.default, (spread, [mark.outer, size, mark.inner]))
            inside = call(aten.reshape.default, (spread, [self.size(mark)]))
        return call(aten.view.default, (inside, [1] * mark.dim + [self.size(mark)] + [1] * (rank - mark.dim - 1)))

    def fill_outside(self, node: Node, value: Node, filling, source: Node | None = None) -> Node:
        """Rows that the source does not have get the filling."""
        fact = self.domain(source if source is not None else node.args[0])
        if fact.lo <= 0 and fact.hi >= 0:
            return value
        if not isinstance(filling, Node):
            like = value_of(node)
            filling = self.graph.call_function(aten.full.default, ([], filling), dict(dtype=like.dtype, device=like.device))
        inside = self.inside_domain(fact, rank_of(node), self.fact(node).rows)
        return self.graph.call_function(aten.where.self, (inside, value, filling))

    def edges(self, node: Node):
        return self.analysis.edges[node]

    def rows_of_chunk(self, index: Node, mark: Mark, low: int = 0) -> tuple[Node, Node]:
        """Where the rows that an index names lie in the chunk, and whether they do; the others get some row that exists.

        index  a value (or number) of the body: positions along the marked dimension at full length, negative ones from its end
        low    the token of row 0 of that dimension
        """
        call, rows, length = self.graph.call_function, self.scalar("rows"), self.scalar("length")
        size = call(operator.mul, (length, mark.outer * mark.inner)) if mark.outer * mark.inner != 1 else length
        index = call(aten.where.self, (call(aten.lt.Scalar, (index, 0)), call(aten.add.Tensor, (index, size)), index))
        inner = call(aten.remainder.Scalar, (index, mark.inner)) if mark.inner != 1 else None
        tokens = call(aten.floor_divide.default, (index, mark.inner)) if mark.inner != 1 else index
        outer = call(aten.floor_divide.default, (tokens, length)) if mark.outer != 1 else None
        tokens = call(aten.remainder.Scalar, (tokens, length)) if mark.outer != 1 else tokens
        offset = call(operator.sub, (low, self.scalar("first"))) if low else call(operator.neg, (self.scalar("first"),))
        local = call(aten.add.Tensor, (tokens, offset))
        inside = call(aten.logical_and.default, (call(aten.ge.Scalar, (local, 0)), call(aten.lt.Scalar, (local, rows))))
        local = call(aten.clamp.default, (local, 0, call(operator.sub, (rows, 1))))
        if outer is not None:
            local = call(aten.add.Tensor, (local, call(aten.mul.Tensor, (outer, rows))))
        if inner is not None:
            local = call(aten.add.Tensor, (call(aten.mul.Scalar, (local, mark.inner)), inner))
        return local, inside

    def places(self, node: Node, device: torch.device) -> Node:
        """For every entry of the chunk's rows of a value, its position in the full value, counted in the order of dimensions."""
        call, fact, rank = self.graph.call_function, self.fact(node), rank_of(node)
        sizes, full = self.sizes(node), self.sizes(node)
        total = None

        def along(count, first=None) -> Node:
            steps = call(prims.iota.default, (count,), dict(start=0, step=1, dtype=torch.int64, device=device, requires_grad=False))
            return steps if first is None else call(aten.add.Tensor, (steps, first))

        for dim in range(rank):
            if dim == fact.rows.dim:
                mark, rows = fact.rows, self.scalar("length")
                if fact.hi != fact.lo:
                    rows = call(operator.add, (rows, fact.hi - fact.lo))
                first = self.scalar("first") if not fact.lo else call(operator.sub, (self.scalar("first"), fact.lo))
                place, full[dim] = along(self.scalar("rows"), first), rows
                if mark.outer != 1 or mark.inner != 1:
                    outer = call(aten.mul.Tensor, (call(aten.view.default, (along(mark.outer), [mark.outer, 1, 1])), rows))
                    place = call(aten.add.Tensor, (outer, call(aten.view.default, (place, [1, self.scalar("rows"), 1]))))
                    place = call(aten.add.Tensor, (call(aten.mul.Scalar, (place, mark.inner)), along(mark.inner)))
                    place = call(aten.reshape.default, (place, [sizes[dim]]))
                    full[dim] = call(operator.mul, (rows, mark.outer * mark.inner))
            elif fact.keys is not None and dim == fact.keys.dim:
                first = call(operator.sub, (self.scalar("first"), self.scalar("offset")))
                place, full[dim] = along(self.scalar("keys"), first), self.scalar("length")
            else:
                place = along(sizes[dim])
            place = call(aten.view.default, (place, [-1] + [1] * (rank - dim - 1)))
            total = place if total is None else call(aten.add.Tensor, (call(aten.mul.Tensor, (total, full[dim])), place))
        return total

    def zeros(self, node: Node) -> Node:
        """The chunk's rows of a value of zeros."""
        value = value_of(node)
        return self.graph.call_function(aten.full.default, (self.sizes(node), 0), dict(dtype=value.dtype, device=value.device))

    def added(self, node: Node, part: Node) -> Node:
        """Add a chunk's part to the sum that a node is."""
        return self.graph.call_function(streambp.add_.default, (part, self.bind("total", node, node.name)))

    def zero_unless(self, inside: Node, value: Node, like: Node) -> Node:
        """A value of the dtype of ``like``, zero where a mask is false."""
        zero = self.graph.call_function(aten.full.default, ([], 0), dict(dtype=value_of(like).dtype, device=value_of(like).device))
        return self.graph.call_function(aten.where.self, (inside, value, zero))

    def zero_beyond(self, operand: Node, value: Node, like: Node) -> Node:
        """A value shaped like ``like``, zero in the rows that an operand does not have."""
        fact = self.domain(operand)
        if not isinstance(fact, Tokens) or fact.lo <= 0 and fact.hi >= 0:
            return value
        return self.zero_unless(self.inside_domain(fact, rank_of(like), fact.rows), value, like)

    def summand(self, operand: Node) -> Node:
        """An operand of a sum over rows, zero where its rows do not count."""
        return self.zero_beyond(operand, self.read(operand), operand)

    def place_of_row(self, node: Node, index: object) -> tuple[Node, Node]:
        """The place in the chunk of one row of all tokens, as ``[1]``, and whether it is there."""
        index = self.read_int(index) if isinstance(index, Node) else index
        place = self.graph.call_function(aten.full.default, ([1], index), dict(dtype=torch.int64, device=value_of(node).device))
        return self.rows_of_chunk(place, self.fact(node).rows, self.fact(node).lo)

    def row_picked(self, operand: Node, dim: int, index: object) -> Node:
        """One row of all tokens, ``[…, 1, …]``, from the chunk that has it; zero from the others."""
        local, inside = self.place_of_row(operand, index)
        row = self.graph.call_function(aten.index_select.default, (self.read(operand), dim, local))
        return self.zero_unless(inside, row, operand)

    def row_put(self, node: Node, dim: int, index: object, row: Node, like: Node) -> Node:
        """The chunk's rows of a value of zeros with one row, ``[…, 1, …]``, written by the chunk that has it."""
        local, inside = self.place_of_row(node, index)
        return self.graph.call_function(aten.index_add.default, (self.zeros(node), dim, local, self.zero_unless(inside, row, like)))

    def iota(self, node: Node, start, step) -> Node:
        rows = self.graph.call_function(prims.convert_element_type.default, (self.places(node, node.kwargs["device"]), node.kwargs["dtype"]))
        if step != 1:
            rows = self.graph.call_function(aten.mul.Scalar, (rows, step))
        return rows if start == 0 else self.graph.call_function(aten.add.Scalar, (rows, self.read_int(start) if isinstance(start, Node) else start))

    def reshaped(self, value: Node, sizes: list) -> Node:
        return self.graph.call_function(aten.reshape.default, (value, sizes))

    def scan(self, node: Node, scan, dim: int, join, filling: float, turned: bool = False) -> Node:
        """A scan over the chunk's rows, joined to what it came to before them.

        join     joins a state to rows behind it, ``filling`` is the state of no rows
        turned   from the last row to the first
        """
        edge, = self.analysis.edges[node]
        if edge.role != "carry":
            return self.copy(node)
        call, mark, dtype = self.graph.call_function, self.fact(node).rows, total_dtype(value_of(node).dtype)
        state = self.bind("carry", node, node.name, mark, filling=filling)
        rows = call(prims.convert_element_type.default, (self.fill_outside(node, self.operand(edge), filling), dtype))
        rows = call(aten.flip.default, (rows, [dim])) if turned else rows
        rows = call(join, (call(scan, (rows, dim)), state))
        if node in self.sweep.scans:
            last = call(aten.unsqueeze.default, (call(aten.select.int, (rows, dim, -1)), dim))
            call(aten.copy_.default, (state, last))
        rows = call(aten.flip.default, (rows, [dim])) if turned else rows
        return call(prims.convert_element_type.default, (rows, value_of(node).dtype))

    def accumulate_mm(self, node: Node, left: Node, right: Node) -> Node:
        return self.graph.call_function(streambp.add_product_.default, (left, right, self.bind("total", node, node.name)))

    def accumulate_grouped(self, node: Node, left: Node, right: Node, groups: Node) -> Node:
        return self.graph.call_function(streambp.add_grouped_outer_.default, (left, right, groups, self.bind("total", node, node.name)))

    def accumulate_rows(self, node: Node, index: Node, rows: Node, padding: int) -> Node:
        return self.graph.call_function(streambp.add_rows_.default, (index, rows, padding, self.bind("total", node, node.name)))

    def attention(self, node: Node) -> Node:
        query, key, value, mask = node.args[:4]
        _, causal, scale = node.args[3:6]
        return self.graph.call_function(streambp.attention.default, (
            self.read(query), self.key_operand(node, 1), self.key_operand(node, 2), None if mask is None else self.read(mask),
            causal, scale, self.scalar("offset") if causal else 0))

    def key_operand(self, node: Node, position: int) -> Node:
        edge = self.analysis.edges[node][position]
        return self.operand(edge)

    def attention_backward(self, node: Node) -> Node:
        grad, query, _, _, out, lse, mask, causal, scale = node.args
        key, value = (self.key_operand(node, i) for i in (2, 3))
        grads = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return self.graph.call_function(streambp.attention_backward_.default, (
            self.read(grad), self.read(query), key, value, self.read(out), self.read(lse),
            None if mask is None else self.read(mask), causal, scale, self.scalar("offset") if causal else 0,
            self.key_total(node, grads.get(1), 1), self.key_total(node, grads.get(2), 2)))

    def key_total(self, node: Node, grad: Node | None, index: int) -> Node:
        """The accumulator of a key gradient; one that nobody reads still takes what the kernel computes."""
        if grad is None:
            return self.bind("keytotal", node, f"{node.name}_{index}", self.fact(node, index).rows if isinstance(self.fact(node, index), Tokens) else None, index)
        fact = self.fact(grad)
        if not isinstance(fact, Tokens):
            return self.bind("total", grad, grad.name)
        return self.bind("keytotal", grad, grad.name, fact.rows)

    # Writing

    def emit(self, node: Node) -> None:
        kind, self.writing = self.analysis.kinds[node], node
        if node.target is operator.getitem:
            source = node.args[0]
            if self.analysis.kinds[source] == "mixed":
                self.values[node] = self.values[source]
            else:
                self.values[node] = self.graph.call_function(operator.getitem, (self.values[source], node.args[1]))
        else:
            rule = rule_of(node)
            self.values[node] = rule.emit(self, node) if rule.emit is not None else self.copied(node, kind)
        if node in self.sweep.fed:
            self.feed(node)

    def copied(self, node: Node, kind: str) -> Node:
        if kind == "sum":
            part = self.copy(node, self.summands(node))
            if value_of(node).dtype != total_dtype(value_of(node).dtype) and node.target in (aten.sum.dim_IntList, aten.sum.default):
                part.kwargs = {**part.kwargs, "dtype": torch.float32}
            return self.graph.call_function(streambp.add_.default, (part, self.bind("total", node, node.name)))
        if kind == "keysum":
            part = self.copy(node, self.summands(node))
            total = self.bind("keytotal", node, node.name, self.fact(node).rows)
            return self.graph.call_function(streambp.add_.default, (part, total))
        return self.copy(node)

    def summands(self, node: Node) -> dict[int, Node]:
        """Operands with rows that do not count, zeroed; one zero factor is enough."""
        for i, edge in enumerate(self.analysis.edges[node]):
            fact = self.domain(edge.operand)
            if edge.role in ("rows", "halo", "carry") and isinstance(fact, Tokens) and (fact.lo > 0 or fact.hi < 0):
                return {i: self.summand(edge.operand)}
        return {}

    def feed(self, node: Node) -> None:
        """Rows become keys of this very chunk and of all later ones."""
        fact = self.fact(node)
        if fact.rows.outer != 1:
            raise refuse(node, "writes keys in several places for each token", "Keep the tokens in a dimension of their own")
        full = self.bind("feed", node, node.name, fact.rows)
        self.graph.call_function(streambp.write_rows_.default, (self.values[node], fact.rows.dim, self.scalar("offset"), full))
        self.feeds[node] = full

    def settled_rows(self, node: Node) -> Node:
        """The chunk's own rows of a key accumulator, final because every later row has added its part."""
        if node not in self.settled:
            mark, value = self.fact(node).rows, value_of(node)
            total = self.bind("keytotal", node, node.name, mark)
            rows = self.graph.call_function(streambp.rows_at.default, (total, mark.dim, self.scalar("offset"), self.scalar("rows")))
            if total_dtype(value.dtype) != value.dtype:
                rows = self.graph.call_function(prims.convert_element_type.default, (rows, value.dtype))
            self.settled[node] = rows
        return self.settled[node]

    def store(self, node: Node) -> None:
        mark, value = self.fact(node).rows, self.values[node]
        target = dict(self.sweep.in_place).get(node)
        if target is not None:
            buffer = self.bind("rows", target, target.name, mark, self.fact(target).lo)
        else:
            buffer = self.bind("write", node, node.name, mark, self.fact(node).lo)
        if mark.outer != 1 or mark.inner != 1:
            value = self.reshaped(value, self.unflattened(node, mark))
        self.graph.call_function(aten.copy_.default, (buffer, value))

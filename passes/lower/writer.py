"""Write one body: every node of a sweep at chunk length, by the rule of its op or as a copy, and what becomes
of its results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import GraphModule, Node

from ..ir import Edge, Tokens, refuse, tensor_operands, value_of
from ..rules import rule_of, scan_of
from ..rules.facets import Scan
from .reading import Body, kernel_for, total_dtype
from .rows import Rows

aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


class Writer(Rows):
    """Builds one body. Rules with an ``emit`` call its public methods; everything else is copied."""

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
        return Body(module, tuple(ordered), tuple(dict.fromkeys(self.attends)))

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
                return (
                    type(arg)(mapped(a) for a in arg)
                    if not isinstance(arg, torch.Size)
                    else [mapped(a) for a in arg]
                )
            return arg

        args = [self.sizes(node) if i == rule.shape_arg else mapped(a) for i, a in enumerate(node.args)]
        kwargs = {k: mapped(v) for k, v in node.kwargs.items()}
        kwargs.pop("pin_memory", None)
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def added(self, node: Node, part: Node) -> Node:
        """Add a chunk's part to the sum that a node is."""
        return self.add(part, self.bind("total", node, node.name))

    def add(self, part: Node, total: Node) -> Node:
        """Written out, so that the kernel which computes the part adds it."""
        return self.graph.call_function(
            aten.copy_.default, (total, self.graph.call_function(aten.add.Tensor, (total, part)))
        )

    def scan(self, node: Node, run: Callable[[Node], Node] | None = None) -> Node:
        """A scan over the chunk's rows, which goes on from the state that the rows before them left.

        run  writes the scan of rows by themselves, where that is not the node at chunk length
        """
        edges, scan = self.analysis.edges[node], scan_of(node)
        carried = [i for i, edge in enumerate(edges) if edge.role == "carry"]
        if not carried:
            return self.copy(node)
        call, mark, dtype = self.graph.call_function, self.fact(node).rows, total_dtype(value_of(node).dtype)
        state = self.bind("carry", node, node.name, mark, filling=scan.identity)
        rows = {i: self.rows_of_scan(node, edges[i], scan, dtype) for i in carried}
        part = self.copy(node, rows) if run is None else run(rows[carried[0]])
        if scan.join is not None:
            part.kwargs = {k: v for k, v in part.kwargs.items() if k != "dtype"}
            part = call(scan.join, (part, state))
        else:
            set_argument(part, scan.state, state)
        if node in self.sweep.scans:
            end = -1 if edges[carried[0]].reach.looks_back() else 0
            last = call(aten.unsqueeze.default, (call(aten.select.int, (part, mark.dim, end)), mark.dim))
            call(aten.copy_.default, (state, last))
        return call(prims.convert_element_type.default, (part, value_of(node).dtype))

    def rows_of_scan(self, node: Node, edge: Edge, scan: Scan, dtype: torch.dtype) -> Node:
        """The chunk's rows of an operand of a scan, in the dtype of its state; those that do not count leave
        the state as it is."""
        rows = self.fill_outside(node, self.operand(edge), scan.identity, source=edge.operand)
        if scan.join is None and value_of(edge.operand).dtype != value_of(node).dtype:
            return rows
        return self.graph.call_function(prims.convert_element_type.default, (rows, dtype))

    def accumulate_mm(self, node: Node, left: Node, right: Node) -> Node:
        return self.graph.call_function(
            streambp.add_product_.default, (left, right, self.bind("total", node, node.name))
        )

    def accumulate_grouped(self, node: Node, left: Node, right: Node, groups: Node) -> Node:
        return self.graph.call_function(
            streambp.add_grouped_outer_.default, (left, right, groups, self.bind("total", node, node.name))
        )

    def accumulate_rows(self, node: Node, index: Node, rows: Node, padding: int) -> Node:
        """Rows are widened in the body, where that costs the kernel that makes them nothing."""
        dtype = value_of(node).dtype
        if total_dtype(dtype) != dtype:
            rows = self.graph.call_function(prims.convert_element_type.default, (rows, total_dtype(dtype)))
        return self.graph.call_function(
            streambp.add_rows_.default, (index, rows, padding, self.bind("total", node, node.name))
        )

    def attention(self, node: Node) -> Node:
        query, key, value, mask = node.args[:4]
        _, causal, scale = node.args[3:6]
        return self.graph.call_function(
            streambp.attention.default,
            (
                self.read(query),
                self.key_operand(node, 1),
                self.key_operand(node, 2),
                None if mask is None else self.read(mask),
                causal,
                scale,
                self.scalar("offset") if causal else 0,
                self.kernel(query, value, mask),
            ),
        )

    def kernel(self, query: Node, value: Node, mask: Node | None) -> str:
        """The name of the kernel that attends on the device that this body is written for."""
        self.attends.append(kernel_for(query, value, mask, self.target))
        return self.attends[-1].kernel.name

    def key_operand(self, node: Node, position: int) -> Node:
        edge = self.analysis.edges[node][position]
        return self.operand(edge)

    def attention_backward(self, node: Node) -> Node:
        grad, query, _, given, out, lse, mask, causal, scale = node.args[:9]
        key, value = (self.key_operand(node, i) for i in (2, 3))
        grads = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return self.graph.call_function(
            streambp.attention_backward_.default,
            (
                self.read(grad),
                self.read(query),
                key,
                value,
                self.read(out),
                self.read(lse),
                None if mask is None else self.read(mask),
                causal,
                scale,
                self.scalar("offset") if causal else 0,
                self.key_total(node, grads.get(1), 1),
                self.key_total(node, grads.get(2), 2),
                self.kernel(query, given, mask),
            ),
        )

    def key_total(self, node: Node, grad: Node | None, index: int) -> Node:
        """The accumulator of a key gradient; one that nobody reads still takes what the kernel computes."""
        if grad is None:
            return self.bind(
                "keytotal",
                node,
                f"{node.name}_{index}",
                self.fact(node, index).rows if isinstance(self.fact(node, index), Tokens) else None,
                index,
            )
        fact = self.fact(grad)
        if not isinstance(fact, Tokens):
            return self.bind("total", grad, grad.name)
        return self.bind("keytotal", grad, grad.name, fact.rows)

    def emit(self, node: Node) -> None:
        kind, self.writing = self.analysis.kinds[node], node
        if node.target is operator.getitem:
            source = node.args[0]
            if self.analysis.kinds[source] == "mixed":
                self.values[node] = self.values[source]
            else:
                self.values[node] = self.graph.call_function(
                    operator.getitem, (self.values[source], node.args[1])
                )
        else:
            rule = rule_of(node)
            if rule.emit is not None:
                self.values[node] = rule.emit(self, node)
            else:
                self.values[node] = self.copied(node, kind) if rule.scan is None else self.scan(node)
        if node in self.sweep.fed:
            self.feed(node)

    def copied(self, node: Node, kind: str, wide: bool = False) -> Node:
        """The node at chunk length; what is a sum over rows, or per key, is added to its accumulator.

        wide  parts come in the dtype of the accumulator (ops with an argument ``dtype``)
        """
        if kind == "sum":
            part = self.copy(node, self.summands(node))
            if wide and value_of(node).dtype != total_dtype(value_of(node).dtype):
                part.kwargs = {**part.kwargs, "dtype": torch.float32}
            return self.added(node, part)
        if kind == "keysum":
            part = self.copy(node, self.summands(node))
            total = self.bind("keytotal", node, node.name, self.fact(node).rows)
            return self.add(part, total)
        return self.copy(node)

    def summands(self, node: Node) -> dict[int, Node]:
        """Operands with rows that do not count, zeroed; one zero factor is enough."""
        for i, edge in enumerate(self.analysis.edges[node]):
            fact = self.domain(edge.operand)
            if (
                edge.role in ("rows", "halo", "carry")
                and isinstance(fact, Tokens)
                and (fact.lo > 0 or fact.hi < 0)
            ):
                return {i: self.summand(edge.operand)}
        return {}

    def feed(self, node: Node) -> None:
        """Rows become keys of this very chunk and of all later ones."""
        fact = self.fact(node)
        if fact.rows.outer != 1:
            raise refuse(
                node,
                "writes keys in several places for each token",
                "Keep the tokens in a dimension of their own",
            )
        full = self.bind("feed", node, node.name, fact.rows)
        self.graph.call_function(
            streambp.write_rows_.default, (self.values[node], fact.rows.dim, self.scalar("offset"), full)
        )
        self.feeds[node] = full

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


def set_argument(node: Node, name: str, value: Node) -> None:
    """Give a node an argument by its name in the schema."""
    names = [a.name for a in node.target._schema.arguments]
    if names.index(name) < len(node.args):
        node.update_arg(names.index(name), value)
    else:
        node.update_kwarg(name, value)

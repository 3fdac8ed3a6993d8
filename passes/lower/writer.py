"""Write one node of a sweep at chunk length, by the rule of its op or as a copy.

The result is then appended to keys, or stored in its buffer.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from ..ir import (
    Binding,
    BindingRole,
    ChosenKernel,
    Edge,
    Kind,
    Role,
    Tokens,
    arguments,
    total_dtype,
    value_of,
)
from ..rules import Rule, rule_of, scan_of, state_rows
from ..rules.facets import Merge, Scan
from .rows import RowReading

TENSORS = (torch.Tensor, tuple, list)  # types of values that have edges
aten, prims, streambp = torch.ops.aten, torch.ops.prims, torch.ops.streambp


class Writer(RowReading):
    """Writer of one node: rules with an ``emit`` call its public methods; everything else is copied."""

    def write(self) -> None:
        """Write the node's value into the body and, if later rows read it as keys, into their buffer."""
        node, rule = self.node, None if self.node.target is operator.getitem else rule_of(self.node)
        if rule is None:
            value = self.item(node)
        else:
            value = self.by_rule(node, rule)
        self.draft.values[node] = value
        if node in self.sweep.appended:
            self.append(node, value)

    def by_rule(self, node: Node, rule: Rule) -> Node:
        if rule.emit is not None:
            return rule.emit(self, node)
        if rule.merge is not None and self.adds_up(node):
            return self.merged(node, rule.merge)
        return self.copied(node) if rule.scan is None else self.scan(node)

    def item(self, node: Node) -> Node:
        """Select one output of a node of the body. The body has only the first output of a mixed node, and
        only accumulators for a sum: their value is returned as it is."""
        source = node.args[0]
        value = self.draft.values[source]
        if self.analysis.kinds[source] in (Kind.MIXED, Kind.SUM):
            return value
        return self.graph.call_function(operator.getitem, (value, node.args[1]))

    def copy(self, node: Node, given: Mapping[int, Node] | None = None) -> Node:
        """Copy the node, with operands at chunk length and its shape argument rewritten.

        given  number of an edge → the value to use in place of its operand
        """
        rule = rule_of(node)
        edges = enumerate(self.edges(node))

        def mapped(arg: Any) -> Any:
            if isinstance(arg, Node):
                return operand() if isinstance(value_of(arg), TENSORS) else self.read_int(arg)
            if isinstance(arg, (list, tuple)):
                return (list if isinstance(arg, torch.Size) else type(arg))(mapped(a) for a in arg)
            return arg

        def operand() -> Node:
            index, edge = next(edges)
            return given[index] if given and index in given else self.operand(edge)

        args = [self.sizes(node) if i == rule.shape_arg else mapped(a) for i, a in enumerate(node.args)]
        kwargs = {k: mapped(v) for k, v in node.kwargs.items()}
        kwargs.pop("pin_memory", None)
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def added(self, node: Node, part: Node) -> Node:
        """Add a chunk's part to the accumulator of a sum."""
        return self.add(part, self.total(node))

    def total(self, node: Node, filling: float = 0.0) -> Node:
        """Bind the accumulator of a node.

        filling  its value before the first chunk
        """
        node = dict(self.sweep.joined).get(node, node)
        return self.draft.bind(Binding(BindingRole.TOTAL, node, node.name, filling=filling))

    def is_read(self, node: Node, output: int) -> bool:
        """Does the sweep read this one of a node's several results?"""
        return any(u.args[1] == output for u in node.users if u in self.draft.inside)

    def total_of(self, node: Node, output: int, filling: float) -> Node:
        """Bind the accumulator of one of a node's several results, even if it is not read."""
        items = (u for u in node.users if u.args[1] == output and u in self.draft.inside)
        item = next(items, None)
        if item is not None:
            return self.total(item, filling)
        name = f"{node.name}_{output}"
        return self.draft.bind(Binding(BindingRole.TOTAL, node, name, output=output, filling=filling))

    def replace_total(self, total: Node, value: Node) -> Node:
        return self.graph.call_function(aten.copy_.default, (total, value))

    def merged(self, node: Node, merge: Merge) -> Node:
        """Reduce the chunk's rows, and merge the result with that of earlier chunks."""
        value, rows = value_of(node), self.rows_of_merge(node, merge)
        total = self.total(node, merge.identity_of(value.dtype))
        part = self.copy(node, {0: rows})
        return self.replace_total(total, self.graph.call_function(merge.join, (total, part)))

    def rows_of_merge(self, node: Node, merge: Merge) -> Node:
        """Read the operand of a reduction at chunk length. Rows that do not exist are filled with the
        identity, which leaves the result as it is."""
        edge = self.edges(node)[0]
        rows, value = self.operand(edge), value_of(edge.operand)
        rows = self.zero_beyond(edge.operand, rows, edge.operand, merge.identity_of(value.dtype))
        if total_dtype(value.dtype) != value.dtype:
            rows = self.graph.call_function(
                prims.convert_element_type.default, (rows, total_dtype(value.dtype))
            )
        return rows

    def add(self, part: Node, total: Node) -> Node:
        """Add a part to an accumulator. The addition is written out, so that the kernel which computes the
        part adds it."""
        return self.graph.call_function(
            aten.copy_.default, (total, self.graph.call_function(aten.add.Tensor, (total, part)))
        )

    def scan(self, node: Node, run: Callable[[Node], Node] | None = None) -> Node:
        """Scan the chunk's rows, starting from the state of the previous chunk.

        run  writes the scan of rows by themselves, where that is not the node at chunk length
        """
        edges, scan = self.analysis.edges[node], scan_of(node)
        carried = [i for i, edge in enumerate(edges) if edge.role is Role.CARRY]
        if scan is None or not carried:
            return self.copy(node)
        call, mark, dtype = self.graph.call_function, self.fact(node).rows, total_dtype(value_of(node).dtype)
        state = self.state_of(node)
        rows = {i: self.rows_of_scan(node, edges[i], scan, dtype) for i in carried}
        part = self.copy(node, rows) if run is None else run(rows[carried[0]])
        if scan.join is not None:
            part.kwargs = {k: v for k, v in part.kwargs.items() if k != "dtype"}
            part = call(scan.join, (part, state))
        elif scan.state is not None:
            set_argument(part, scan.state, state)
        if node in self.sweep.scans:
            end = -1 if edges[carried[0]].reach.looks_back() else 0
            last = call(aten.unsqueeze.default, (call(aten.select.int, (part, mark.dim, end)), mark.dim))
            call(aten.copy_.default, (state, last))
        return call(prims.convert_element_type.default, (part, value_of(node).dtype))

    def from_window(self, node: Node, edge: Edge) -> Node:
        """Read rows at a constant shift from the chunk and from rows kept of the previous one."""
        call, mark, dtype = self.graph.call_function, self.fact(node).rows, value_of(node).dtype
        dim = mark.dim
        state, rows, ahead = self.state_of(node), self.operand(edge), not edge.reach.looks_back()
        kept = call(prims.convert_element_type.default, (state, dtype))
        joined = call(aten.cat.default, ([rows, kept] if ahead else [kept, rows], dim))
        bounds = (state_rows(node), sys.maxsize) if ahead else (0, self.scalar("rows", mark.block))
        result = call(aten.slice.Tensor, (joined, dim, *bounds))
        if node in self.sweep.scans:
            call(streambp.slide_rows_.default, (rows, dim, ahead, state))
        return result

    def state_of(self, node: Node) -> Node:
        """Bind the state that the previous chunk has left."""
        scan, mark = scan_of(node), self.fact(node).rows
        assert scan is not None
        binding = Binding(BindingRole.CARRY, node, node.name, mark, filling=scan.identity)
        return self.draft.bind(replace(binding, state_rows=scan.rows))

    def rows_of_scan(self, node: Node, edge: Edge, scan: Scan, dtype: torch.dtype) -> Node:
        """Read the chunk's rows of a scan's operand, in the dtype of the state. Rows that do not exist are
        filled with the identity, which leaves the state as it is. Without a ``join``, an operand of
        another dtype than the result keeps it."""
        rows = self.fill_outside(node, self.operand(edge), scan.identity, source=edge.operand)
        if scan.join is None and value_of(edge.operand).dtype != value_of(node).dtype:
            return rows
        return self.graph.call_function(prims.convert_element_type.default, (rows, dtype))

    def accumulate_mm(self, node: Node, left: Node, right: Node) -> Node:
        return self.graph.call_function(streambp.add_product_.default, (left, right, self.total(node)))

    def accumulate_grouped(self, node: Node, left: Node, right: Node, groups: Node) -> Node:
        return self.graph.call_function(
            streambp.add_grouped_outer_.default, (left, right, groups, self.total(node))
        )

    def accumulate_rows(self, node: Node, index: Node, rows: Node, padding: int) -> Node:
        """Add rows at an index to the accumulator of a node. The rows are widened in the body, where that
        costs the kernel that makes them nothing."""
        dtype = value_of(node).dtype
        if total_dtype(dtype) != dtype:
            rows = self.graph.call_function(prims.convert_element_type.default, (rows, total_dtype(dtype)))
        return self.graph.call_function(streambp.add_rows_.default, (index, rows, padding, self.total(node)))

    def accumulate_at(self, node: Node) -> Node:
        """Add entries at an index to the accumulator of a sum, or of a sum per key."""
        zeroed = self.summands(node)
        index, source = (zeroed.get(i) or self.operand(edge) for i, edge in enumerate(self.edges(node)))
        is_total = self.analysis.kinds[node] is Kind.SUM
        total = self.total(node) if is_total else self.key_sum(node)
        return self.graph.call_function(streambp.add_at_.default, (index, source, node.args[2], total))

    def key_sum(self, node: Node) -> Node:
        """Bind the accumulator of a sum per key."""
        return self.draft.bind(Binding(BindingRole.KEYTOTAL, node, node.name, self.fact(node).rows))

    def attention(self, node: Node) -> Node:
        if self.is_of_each_row(node, 1):
            return self.attention_of_each_row(node)
        given = arguments(node)
        return self.graph.call_function(
            streambp.attention.default,
            (
                self.read(given["query"]),
                self.key_operand(node, 1),
                self.key_operand(node, 2),
                *self.visible_keys(node),
            ),
            {**self.by_ranges(node), **self.kernel(node).arguments},
        )

    def visible_keys(self, node: Node) -> tuple[Node | float | None, ...]:
        """Return the arguments of an attention node from its mask to the place of its first row."""
        given = arguments(node)
        mask, causal = given["mask"], given["causal"]
        start = self.scalar("offset") if causal else 0
        return None if mask is None else self.read(mask), causal, given["scale"], start

    def by_ranges(self, node: Node) -> dict[str, Argument]:
        """Return the arguments of an attention node that reads ranges of keys in place of a mask."""
        given = arguments(node)
        if given["ranges"] is None:
            return {}
        return {"ranges": self.read(given["ranges"]), "slot": given["slot"]}

    def is_of_each_row(self, node: Node, key: int) -> bool:
        """Does each row of an attention node read only keys of its own?

        key  the number of the node's key operand
        """
        return self.analysis.edges[node][key].role is Role.ROWS

    def attention_of_each_row(self, node: Node) -> Node:
        """Write attention within each row: tokens are the batch of its kernel."""
        copied = self.copy(node)
        set_argument(copied, "kernel", self.kernel(node).name)
        return copied

    def kernel(self, node: Node) -> ChosenKernel:
        """Return the kernel planned for an attention node, and note that it is used."""
        chosen = self.draft.kernels[node]
        self.draft.used[chosen] = None
        return chosen

    def key_operand(self, node: Node, position: int) -> Node:
        edge = self.analysis.edges[node][position]
        return self.operand(edge)

    def attention_backward(self, node: Node) -> Node:
        if self.is_of_each_row(node, 2):
            return self.attention_of_each_row(node)
        given = arguments(node)
        key, value = (self.key_operand(node, i) for i in (2, 3))
        grads = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return self.graph.call_function(
            streambp.attention_backward_.default,
            (
                self.read(given["grad"]),
                self.read(given["query"]),
                key,
                value,
                self.read(given["out"]),
                self.read(given["lse"]),
                *self.visible_keys(node),
                self.key_total(node, grads.get(1), 1),
                self.key_total(node, grads.get(2), 2),
            ),
            {**self.by_ranges(node), **self.kernel(node).arguments},
        )

    def rows_and_key_sums(self, node: Node, results: Node) -> Node:
        """Return the first of several results, which has a row per query; add up the others per key."""
        call = self.graph.call_function
        grads = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        for index in range(1, len(value_of(node))):
            part = call(operator.getitem, (results, index))
            self.add(part, self.key_total(node, grads.get(index), index))
        return call(operator.getitem, (results, 0))

    def key_total(self, node: Node, grad: Node | None, index: int) -> Node:
        """Bind the accumulator of a key gradient. The kernel computes all of them, so one that is not read
        has an accumulator as well."""
        fact = self.fact(node, index)
        mark = fact.rows if isinstance(fact, Tokens) else None
        if grad is None:
            name = f"{node.name}_{index}"
            return self.draft.bind(Binding(BindingRole.KEYTOTAL, node, name, mark, output=index))
        if mark is None:
            return self.total(grad)
        return self.draft.bind(Binding(BindingRole.KEYTOTAL, grad, grad.name, mark))

    def copied(self, node: Node, wide: bool = False) -> Node:
        """Copy the node to chunk length; add a sum over rows, or per key, to its accumulator.

        wide  parts come in the dtype of the accumulator (ops with an argument ``dtype``)
        """
        kind = self.analysis.kinds[node]
        if kind not in (Kind.SUM, Kind.KEYSUM):
            return self.copy(node)  # the node may have several outputs, and no dtype
        part = self.copy(node, self.summands(node))
        if kind is Kind.KEYSUM:
            return self.add(part, self.key_sum(node))
        if wide and value_of(node).dtype != total_dtype(value_of(node).dtype):
            part.kwargs = {**part.kwargs, "dtype": torch.float32}
        return self.added(node, part)

    def summands(self, node: Node) -> dict[int, Node]:
        """Zero the rows that do not exist, in all operands that have some, by number of the edge. Zeroing one
        factor of a product would not do, because such rows need not be finite."""
        found = {}
        for i, edge in enumerate(self.edges(node)):
            fact = self.domain(edge.operand)
            reads_rows = edge.role in (Role.ROWS, Role.HALO, Role.CARRY)
            if reads_rows and isinstance(fact, Tokens) and (fact.lo > 0 or fact.hi < 0):
                found[i] = self.summand(edge.operand)
        return found

    def append(self, node: Node, value: Node) -> None:
        """Append the node's rows to the keys of this chunk and of all later ones."""
        mark = self.fact(node).rows
        full = self.draft.bind(Binding(BindingRole.APPEND, node, node.name, mark))
        self.graph.call_function(streambp.write_rows_.default, (value, mark.dim, self.scalar("offset"), full))
        self.draft.appended[node] = full

    def store(self) -> None:
        """Write the node's rows into their buffer, or over the value whose memory they take."""
        node, target = self.node, dict(self.sweep.in_place).get(self.node)
        fact, value = self.fact(node), self.draft.values[node]
        mark = fact.rows
        if target is not None:
            binding = Binding(BindingRole.ROWS, target, target.name, mark, self.fact(target).lo)
        else:
            binding = Binding(BindingRole.WRITE, node, node.name, mark, fact.lo, columns=fact.keys)
        if mark.step != 1:
            value = self.reshaped(value, self.unflattened(node, mark))
        self.graph.call_function(aten.copy_.default, (self.draft.bind(binding), value))


def set_argument(node: Node, name: str, value: Argument) -> None:
    """Give a node an argument by its name in the schema."""
    names = [a.name for a in node.target._schema.arguments]
    if names.index(name) < len(node.args):
        node.update_arg(names.index(name), value)
    else:
        node.update_kwarg(name, value)

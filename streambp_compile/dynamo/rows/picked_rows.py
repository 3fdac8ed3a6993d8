"""Rows that a mask picks (``x[mask]``, ``torch.where(mask)``), computed by themselves and put back. Experts
in a Python loop are an example.

The number of picked rows is unknown before the graph runs. Operations that map each picked row by
itself, and put it back to its place, become a call of ``streambp::picked_rows``
(passes/kernels/mapped_functions.py), whose operands and results have a row per token. Other operations on
picked rows break the graph, as they do by default.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import is_tensor
from ...passes.kernels.mapped_functions import MappedValue
from ...passes.rules import find_rule
from ...passes.rules.forward import WRITING, mutated
from ...passes.rules.named_calls import lists_places
from ..reading.aten import Named, inserted
from ..reading.modes import is_switch
from ..reading.values import fake_of, storage_of
from .mapped_functions import NotRowByRow, enter_picked
from .picked_graphs import PickedGraph, is_count, is_unknown, last_of_picked, mask_of
from .picked_losses import MappedRows, picked_loss

aten, streambp = torch.ops.aten, torch.ops.streambp
OPERATORS = frozenset(filter(callable, vars(operator).values())) - WRITING
"""Python's operators, without those that write into their first argument."""


def write_picked_rows(module: GraphModule) -> GraphModule:
    """Write operations on picked rows as calls of ``streambp::picked_rows``."""
    if not any(map(depends_on_data, module.graph.nodes)):
        return module
    compare_with_zero(module.graph)
    unify_masks(module.graph)
    with internals.replaying(module) as replay:
        modes: dict[Node, str] = {}
        known: dict[str, PickedTrace] = {}
        for node in list(module.graph.nodes):
            if is_switch(node):
                replay(node)
            modes[node] = internals.modes_text()
            if puts_back(node):
                try:
                    PutBack(node, modes, known).rewrite()
                except NotRowByRow as reason:
                    internals.log.debug("picked rows at %s stay as they are: %s", node, reason)
    erase_rows_unread(module.graph)
    module.recompile()
    return module


def compare_with_zero(graph: Graph) -> None:
    """Write places of nonzero numbers (``torch.where(one_hot[e])``) as places where a mask is true."""
    for node in list(graph.nodes):
        if (
            lists_places(node)
            and len(node.all_input_nodes) == 1
            and any(map(depends_on_data, (node, *node.users)))
        ):
            (numbers,) = node.all_input_nodes
            value = fake_of(numbers)
            if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
                with graph.inserting_before(node):
                    mask = inserted(numbers, operator.ne, (numbers, 0), as_written=True)
                node.replace_input_with(numbers, mask)


def unify_masks(graph: Graph) -> None:
    """Merge masks that are computed twice by Python's operators or by methods. Examples are ``x[:,
    1:][mask[:, 1:]]`` and ``x[mask.to(x.device) != 0]``."""
    written = {storage_of(value) for node in graph.nodes if (value := mutated(node)) is not None}
    known: dict[str, Node] = {}
    for node in list(graph.nodes):
        if not is_integral(node) or not is_spelling(node):
            continue
        read = node.all_input_nodes
        if all(map(is_integral, read)) and written.isdisjoint(map(storage_of, (node, *read))):
            first = known.setdefault(f"{node.op} {node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def is_spelling(node: Node) -> bool:
    """Is a node one of Python's operators, or a method that writes into no operand?"""
    if node.op == "call_method":
        return not node.target.endswith("_")
    return node.op == "call_function" and node.target in OPERATORS


def is_integral(node: Node) -> bool:
    """Is it a tensor of booleans or integers, from which a mask may be computed?"""
    value = fake_of(node)
    whole = isinstance(value, torch.Tensor) and not internals.is_unbacked(value)
    return whole and not value.is_floating_point() and not value.is_complex()


def depends_on_data(node: Node) -> bool:
    """Is a value, or its size, known only when the graph runs?"""
    values = fake_of(node)
    values = values if isinstance(values, (tuple, list)) else (values,)
    return any(internals.is_unbacked(v) for v in values if v is not None)


def puts_back(node: Node) -> bool:
    """Does a node make a value of known size from picked rows? A check of a size makes none."""
    makes = isinstance(fake_of(node), torch.Tensor) or mutated(node) is not None
    read = any(map(depends_on_data, node.all_input_nodes))
    return makes and read and not depends_on_data(node)


def erase_rows_unread(graph: Graph) -> None:
    """Erase values that depend on data, masks made from them, and checks of them, if no node reads them."""
    for node in reversed(graph.nodes):
        read = any(map(depends_on_data, node.all_input_nodes))
        calls = node.op in ("call_function", "call_method") and mutated(node) is None
        checks = read and calls and fake_of(node) is None
        if not node.users and (depends_on_data(node) or checks or calls and is_integral(node)):
            graph.erase_node(node)


@dataclass
class PickedTrace:
    """The trace of a node, the functions of rows in it, and their names by last node."""

    trace: GraphModule
    rows: list[PickedGraph]
    names: dict[Node, str] = field(default_factory=dict)


class PutBack:
    """A node that puts rows back or reduces them, with all values of picked rows that lead to it.

    nodes   nodes that depend on the data, in order, and the node itself
    inputs  other values that these read
    """

    def __init__(self, node: Node, modes: dict[Node, str], known: dict[str, PickedTrace]):
        self.node, self.modes, self.known = node, modes, known
        self.graph = node.graph
        found, stack = {node}, list(node.all_input_nodes)
        while stack:
            each = stack.pop()
            if each not in found and depends_on_data(each):
                found.add(each)
                stack += each.all_input_nodes
        self.nodes = sorted(found)
        self.inputs = sorted({a for n in found for a in n.all_input_nodes} - found)

    def rewrite(self) -> None:
        """Replace the node by functions of rows. Raises `NotRowByRow` if that is impossible."""
        self.check()
        if self.ignores_rows():
            return
        text = self.text()
        found = self.known.get(text)
        if found is None:
            trace = internals.capture_with_picked_rows(self.computed, list(map(fake_of, self.inputs)))
            found = PickedTrace(trace, [PickedGraph(trace, n) for n in last_of_picked(trace)])
        last = found.trace.graph.output_node().args[0]
        if mutated(self.node) is not None and [rows.last for rows in found.rows] != [last]:
            raise NotRowByRow("it writes something else than picked rows")
        self.values = dict(zip(found.trace.graph.find_nodes(op="placeholder"), self.inputs))
        with self.graph.inserting_before(self.node):
            self.mask = self.outside(mask_of(list(found.trace.graph.nodes)))
            for rows in found.rows:
                self.values[rows.last] = self.called(rows, found.names)
            new = self.outside(last)
        self.known[text] = found
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)

    def ignores_rows(self) -> bool:
        """Write a loss that can ignore rows as the loss of all of them. Returns False for other nodes."""
        value = fake_of(self.node)
        if not isinstance(value, torch.Tensor) or value.dim() or mutated(self.node) is not None:
            return False
        trace = internals.capture_with_picked_rows(
            self.computed, list(map(fake_of, self.inputs)), as_written=True
        )
        loss = picked_loss(trace)
        if loss is None:
            return False
        self.values = dict(zip(trace.graph.find_nodes(op="placeholder"), self.inputs))
        with self.graph.inserting_before(self.node):
            mask, ignored = self.outside(loss.rows.mask), loss.others["ignore_index"]
            labels = inserted(self.node, torch.where, (mask, self.mapped(loss.labels), ignored))
            rows = inserted(self.node, torch.flatten, (self.mapped(loss.rows), 0, -2))
            others = map_arg(loss.others, self.outside)
            labels = inserted(self.node, torch.flatten, (labels,))
            new = inserted(self.node, loss.operator, (rows, labels), others)
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
        return True

    def mapped(self, rows: MappedRows) -> Node:
        """Apply the functions of picked rows to all rows of their source."""
        value = self.outside(rows.source)
        for each in rows.maps:
            value = inserted(self.node, each.target, (value, *each.args[1:]), each.kwargs)
        return value

    def called(self, rows: PickedGraph, names: dict[Node, str]) -> Node:
        """Call the function of rows that a node of the trace computes. It gets a name at its first call."""
        base = None if rows.base is None else self.outside(rows.base)
        operands = [self.kept(self.outside(n)) for n in rows.operands]
        if rows.last not in names:
            names[rows.last] = enter_picked(rows.function(), list(map(fake_of, operands)))
        given = ([self.mask, *operands], names[rows.last])
        made = inserted(self.value_like(), streambp.picked_rows.default, given)
        put = inserted(self.value_like(), operator.getitem, (made, 0))
        return (
            self.sum_of_put(put, rows) if base is None else self.put_into(base, put, self.mask, rows.result)
        )

    def text(self) -> str:
        """Describe all that the function depends on. Equal texts mean equal functions."""
        index = {n: f"%{i}" for i, n in enumerate((*self.inputs, *self.nodes))}
        given = [f"{internals.describe(fake_of(n))}{fake_of(n).requires_grad}" for n in self.inputs]
        calls = [
            f"{n.op} {n.target} {map_arg((n.args, n.kwargs), lambda a: Named(index[a]))}" for n in self.nodes
        ]
        return "\n".join([*given, *calls, self.modes[self.node]])

    def check(self) -> None:
        """Raise `NotRowByRow` where the nodes would compute something else here, or by other operators."""
        last = self.modes[self.node]
        for node in self.nodes:
            fake = fake_of(node)
            real = isinstance(fake, torch.Tensor) and fake.is_floating_point()
            if real and self.modes[node] != last:
                raise NotRowByRow(f"{node} is computed under other switches")
            apart = node.target is getattr  # ``x.data``
            if apart or isinstance(node.target, internals.HigherOrderOperator):
                raise NotRowByRow(f"{node} may have a backward of its own")
        if any(not isinstance(fake_of(n), torch.Tensor) for n in self.inputs):
            raise NotRowByRow("it reads a size")
        self.check_writes()

    def check_writes(self) -> None:
        """Raise `NotRowByRow` where an input is written into after it was read, or where the nodes write
        into one."""
        memory, inside = {storage_of(n) for n in self.inputs}, set(self.nodes)
        node = self.nodes[0]
        while node is not self.node:
            written = mutated(node)
            if written is not None and node in inside and written not in inside:
                raise NotRowByRow(f"{node} writes into a value beside the picked rows")
            if written is not None and node not in inside and storage_of(written) in memory:
                raise NotRowByRow(f"{node} writes into a value that picked rows are read from")
            node = node.next

    def computed(self, *given: torch.Tensor) -> torch.Tensor:
        """Compute the value of the node, or the one that it has written into."""
        values = dict(zip(self.inputs, given))
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            else:
                raise NotRowByRow(f"{node} is neither an operator nor a method")
        written = mutated(self.node)
        return values[self.node] if written is None else values[written]

    def value_like(self) -> Node:
        """Find a picked value that has the user's line, and a gradient if any has one."""
        rows = [n for n in self.nodes[:-1] if isinstance(fake_of(n), torch.Tensor)]
        return max(rows, key=lambda n: (fake_of(n).requires_grad, n is rows[-1]))

    def outside(self, value: Node) -> Node:
        """Insert into the graph a value of the trace that contains no picked row. Each is inserted once."""
        if value not in self.values and isinstance(value.meta["val"], torch.SymInt) and is_count(value):
            self.values[value] = inserted(self.value_like(), torch.sum, (self.mask,))
        elif value not in self.values:
            if is_unknown(value) and is_tensor(value):
                raise NotRowByRow(f"{value} is made of picked rows")
            rule = find_rule(value)
            sized = rule is None or rule.shape_arg is not None
            if sized and any(internals.has_symbols(fake_of(n)) for n in self.inputs):
                raise NotRowByRow(f"{value} names sizes that change")
            args, kwargs = map_arg((value.args, value.kwargs), self.outside)
            counted = isinstance(value.target, torch._ops.OpOverload) and any(
                map(is_unknown, value.all_input_nodes)
            )
            target = value.target.overloadpacket if counted else value.target  # a count is a tensor now
            self.values[value] = inserted(self.value_like(), target, args, kwargs)
        return self.values[value]

    def sum_of_put(self, put: Node, rows: PickedGraph) -> Node:
        """Compute the sum or the mean of rows that were put among zeros, one for each token."""
        like, dtype = self.value_like(), rows.last.meta["val"].dtype
        total = inserted(like, torch.sum, (put, list(rows.result.dims)))
        if rows.mean_of is not None:
            count = inserted(like, torch.sum, (self.mask,))
            total = inserted(like, torch.div, (total, inserted(like, torch.mul, (count, rows.mean_of))))
        return total if fake_of(total).dtype == dtype else inserted(like, torch.Tensor.to, (total, dtype))

    def kept(self, operand: Node) -> Node:
        """Return an operand that autograd may save. It is a copy, if the node writes into the operand."""
        written = mutated(self.node)
        if written is None or storage_of(operand) != storage_of(written):
            return operand
        return inserted(self.value_like(), torch.clone, (operand,))

    def put_into(self, base: Node, put: Node, mask: Node, how: MappedValue) -> Node:
        """Put the computed rows, one for each token, into their base."""
        in_place, like = mutated(self.node) is not None, self.value_like()
        if how.added and in_place:
            return self.written(aten.add_.Tensor, base, put)
        if how.added:
            return inserted(like, torch.add, (base, put))
        for dim in reversed(range(fake_of(mask).dim())):
            if dim not in how.dims:
                mask = inserted(like, torch.any, (mask, dim))
        order = sorted(how.dims)
        mask = inserted(like, torch.permute, (mask, [order.index(d) for d in how.dims]))
        for _ in range(fake_of(base).dim() - len(how.dims)):
            mask = inserted(like, torch.unsqueeze, (mask, -1))
        new = inserted(like, torch.where, (mask, put, base))
        return self.written(aten.copy_.default, base, new) if in_place else new

    def written(self, target: torch._ops.OpOverload, base: Node, value: Node) -> Node:
        """Insert an operator that writes into a value. Dynamo has written into its fake value already."""
        node = self.graph.call_function(target, (base, value))
        node.meta = {**self.value_like().meta, "example_value": fake_of(base)}
        return node

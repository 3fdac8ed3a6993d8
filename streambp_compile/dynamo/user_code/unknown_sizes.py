"""Values whose size only the data tells (``bincount``, ``unique``, ``nonzero``), where no gradient is
wanted. Examples are load counters of routers, and metrics.

Counts with ``minlength`` become sums of known length where all counted numbers are proved to be smaller,
or where the model itself asserts the length. Any other such value is computed when all regions have run:
the regions return its operands, and nothing that they compute reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ... import internals
from ...passes.ir import is_equal, outputs_of
from ...passes.rules.forward import mutated
from ...passes.rules.named_calls import REARRANGING, name_of, places_along
from ..reading.aten import inserted
from ..reading.modes import is_switch
from ..reading.values import autocast_of, fake_of, storage_of, wants_gradient
from ..rows.picked_rows import depends_on_data

COUNTED = ("input", "weights", "minlength")  # arguments of ``bincount``


def write_counts_as_sums(module: GraphModule) -> GraphModule:
    """Write ``bincount(x, minlength=n)`` as a sum of n numbers, where nothing in x can be n or more. Where
    the model asserts that the result has n numbers (it adds them to a buffer of n), a larger x is an error
    with and without the rewrite."""
    written = {storage_of(value) for node in module.graph.nodes if (value := mutated(node)) is not None}
    for node in [n for n in module.graph.nodes if name_of(n) == "bincount"]:
        given = {**dict(zip(COUNTED, node.args)), **node.kwargs}
        x, weights, least = given["input"], given.get("weights"), given.get("minlength", 0)
        if not isinstance(least, int) or least < 1:
            continue
        if is_below(x, least, written):
            internals.assert_size(fake_of(node).shape[0], least)
        if is_equal(fake_of(node).shape[0], least):
            with module.graph.inserting_before(node):
                new = inserted(node, counts, (x, weights, least))
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
            drop_checks(new, least)
    return module


def counts(x: torch.Tensor, weights: torch.Tensor | None, length: int) -> torch.Tensor:
    """Count how often each number below ``length`` is in x, or sum up its weights."""
    places = x.to(torch.int64)
    if weights is None:
        return places.new_zeros(length).scatter_add(0, places, torch.ones_like(places))
    sum_dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return weights.new_zeros(length, dtype=sum_dtype).scatter_add(0, places, weights.detach().to(sum_dtype))


def is_below(node: Node, bound: int, written: set[int | None]) -> bool:
    """Are all numbers of a value indices of a dimension with at most ``bound`` entries
    (``topk(...).indices``)? They may have been moved since, but not changed.

    written  memory that anything in the graph writes into
    """
    while storage_of(node) not in written:
        found = places_along(node)
        if found is not None:
            shape = fake_of(found[0]).shape
            among = shape[found[1]] if shape else 1
            return isinstance(among, int) and among <= bound
        if name_of(node) not in REARRANGING or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return False


def drop_checks(counted: Node, length: int) -> None:
    """Replace the length of a value by a number, and remove the graph's checks of it."""
    sizes = [n for n in counted.users if n.target is torch.ops.aten.sym_size.int]
    asked, graph = list(sizes), counted.graph
    for node in asked:
        asked += [n for n in node.users if n not in asked and not isinstance(fake_of(n), torch.Tensor)]
    for size in sizes:
        size.replace_all_uses_with(length)
    for node in sorted(asked, reverse=True):
        is_check = node.target is torch.ops.aten._assert_scalar.default
        if node.op == "call_function" and not node.users and (is_check or fake_of(node) is not None):
            graph.erase_node(node)


@dataclass(frozen=True)
class OfUnknownSize:
    """Values that are computed when all regions have run.

    module    computes them from ``inputs``; gives all results of the given graph that are made there
    inputs    for each of its inputs, the place of a placeholder of the graph, or None for one of its last
              outputs
    returned  the values of those last outputs
    places    for each of its results, the place among all outputs
    autocast  the arguments of each autocast that it runs under
    """

    module: GraphModule
    inputs: tuple[int | None, ...]
    returned: tuple[Node, ...]
    places: tuple[int, ...]
    autocast: tuple

    def after(self, call: Callable) -> Callable:
        """Wrap a call so that it computes these values after the regions."""

        def run(*args: object) -> tuple:
            results = list(call(*args))
            kept = len(results) - len(self.returned)
            last = iter(results[kept:])
            given = [next(last) if i is None else args[i] for i in self.inputs]
            with torch.no_grad(), internals.in_autocast(self.autocast):
                made = self.module(*given)
            del results[kept:]
            for place, value in zip(self.places, made):
                results.insert(place, value)
            return tuple(results)

        return run


def part_unknown_sizes(module: GraphModule) -> OfUnknownSize | None:
    """Remove values of unknown sizes, and all that is computed from them, from a graph. None where there
    are none, or where something needs them before all regions have run."""
    graph = module.graph
    chosen = {n for n in graph.nodes if n.op != "placeholder" and depends_on_data(n)}
    stack = list(chosen)
    while stack:
        readers = [n for n in stack.pop().users if n.op != "output" and n not in chosen]
        chosen.update(readers)
        stack += readers
    nodes = [n for n in graph.nodes if n in chosen]
    autocasts = {autocast_of(n) for n in nodes}
    if len(autocasts) != 1 or not all(map(may_wait, nodes)) or is_written_between(graph, nodes):
        return None
    return parted(module, nodes, autocasts.pop())


def may_wait(node: Node) -> bool:
    """Is it a call without a gradient, which changes no mode?"""
    values = fake_of(node)
    values = values if isinstance(values, (tuple, list)) else (values,)
    plain = node.op in ("call_function", "call_method") and not is_switch(node)
    plain = plain and not isinstance(node.target, torch._ops.HigherOrderOperator)
    return plain and not any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def is_written_between(graph: Graph, nodes: Sequence[Node]) -> bool:
    """Would any value be read or written differently if these nodes ran last?"""
    chosen = set(nodes)
    read = {storage_of(a) for n in nodes for a in n.all_input_nodes} - {None}
    written = {storage_of(value) for n in nodes if (value := mutated(n)) is not None}
    at = nodes[0]
    while at.op != "output":
        if at not in chosen:
            value = mutated(at)
            if value is not None and storage_of(value) in read:
                return True
            if written.intersection(map(storage_of, (at, *at.all_input_nodes))):
                return True
        at = at.next
    return False


def parted(module: GraphModule, nodes: Sequence[Node], autocast: tuple) -> OfUnknownSize:
    graph, placeholders = Graph(), list(module.graph.find_nodes(op="placeholder"))
    new: dict[Node, Node] = {}
    inputs: list[int | None] = []
    returned: list[Node] = []

    def copy_of(node: Node) -> Node:
        """Copy a value to the new graph. It is made there, is a size to compute again, or becomes an
        input."""
        if node in new:
            return new[node]
        sized = node.op == "call_function" and not isinstance(fake_of(node), torch.Tensor)
        if node in chosen or sized:
            for operand in node.all_input_nodes:
                copy_of(operand)
            new[node] = graph.node_copy(node, lambda a: new[a])
            return new[node]
        inputs.append(placeholders.index(node) if node.op == "placeholder" else None)
        if inputs[-1] is None:
            returned.append(without_gradient(node))
        with graph.inserting_before(first(graph)):
            new[node] = graph.placeholder(node.name)
        return new[node]

    chosen = set(nodes)
    for node in nodes:
        copy_of(node)
    outputs = outputs_of(module)
    places = tuple(i for i, n in enumerate(outputs) if n in chosen)
    graph.output(tuple(new[outputs[i]] for i in places))
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*(n for n in outputs if n not in chosen), *returned),)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    module.recompile()
    return OfUnknownSize(GraphModule(module, graph), tuple(inputs), tuple(returned), places, autocast)


def first(graph: Graph) -> Node:
    """Find the first node that is no input, or the end of the graph."""
    return next((n for n in graph.nodes if n.op != "placeholder"), graph._root)


def without_gradient(node: Node) -> Node:
    if not wants_gradient(node):
        return node
    with node.graph.inserting_after(node):
        return inserted(node, torch.ops.aten.detach.default, (node,))

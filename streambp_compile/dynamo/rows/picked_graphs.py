"""Operations of a trace on the rows that a mask picks, as a graph for any number of such rows."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import ancestors, arguments, draws_random, is_tensor
from ...passes.kernels.mapped_functions import MappedFunction, MappedValue
from ...passes.rules import form_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, part_of, written_argument
from .mapped_functions import FunctionGraph, NotRowByRow

aten = torch.ops.aten


def last_of_picked(trace: GraphModule) -> list[Node]:
    """List the nodes that make values of a known size from picked rows. They put rows back, or reduce them
    to one value."""
    return [
        n
        for n in trace.graph.nodes
        if n.op == "call_function"
        and is_tensor(n)
        and not is_unknown(n)
        and any(map(is_unknown, rows_in(n)))
        and form_of(n) is not Form.CREATED
    ]


def is_unknown(node: Node) -> bool:
    return internals.is_unbacked(node.meta["val"])


def rows_in(node: Node) -> list[Node]:
    return [i for i in node.all_input_nodes if is_tensor(i)]


def masks_of(node: Node) -> list[Node]:
    """List the masks by which a node picks rows or puts them, without their places."""
    if form_of(node) not in (Form.LOOK_UP, Form.PUT_ROWS):
        return []
    return [i for i in node.args[1] if i is not None and i.meta["val"].dtype is torch.bool]


def mask_of(nodes: Sequence[Node]) -> Node:
    """Find the one mask by which all these nodes pick rows. Raises `NotRowByRow` if there is no such
    mask."""
    masks = [n.args[0] for n in nodes if form_of(n) is Form.PLACES]
    masks += [mask for n in nodes for mask in masks_of(n)]
    if len(set(masks)) != 1 or masks[0].meta["val"].dtype is not torch.bool:
        raise NotRowByRow("rows are picked by several masks, or by numbers")
    return masks[0]


def coordinates_of(nodes: Sequence[Node]) -> dict[Node, int]:
    """Find the values that hold one coordinate of each picked place. Returns for each the dimension of the
    mask that it indexes."""
    lists: dict[Node, int] = {}  # values of all coordinates → the dimension along which these lie
    found: dict[Node, int] = {}
    for node in nodes:
        source = next((a for a in node.args[:1] if isinstance(a, Node)), None)
        if form_of(node) is Form.PLACES:
            lists[node] = 1
        elif node.target is operator.getitem and source.target is aten.unbind.int:
            if lists.get(source.args[0]) == arguments(source)["dim"] % 2:
                found[node] = node.args[1]
        elif node.target is aten.select.int and lists.get(source) == node.args[1] % 2:
            found[node] = node.args[2] % source.meta["val"].shape[lists[source]]
        elif source in lists and (turned := is_turned(node)) is not None:
            lists[node] = 1 - lists[source] if turned else lists[source]
        elif source in lists and source.meta["val"].shape[lists[source]] == 1 and is_same_list(node):
            found[node] = 0
        elif source in found and is_same_list(node):
            found[node] = found[source]
    return found


def is_turned(node: Node) -> bool | None:
    """Does a node exchange the two dimensions of a list of places? False if it changes nothing, None if it
    does anything else."""
    if part_of(node) is Part.TRANSPOSE:
        return True
    if node.target is aten.permute.default:
        return node.args[1][0] % 2 == 1
    if part_of(node) is Part.MOVE:
        return (node.args[1] - node.args[2]) % 2 == 1
    return False if is_same(node) or is_whole_slice(node) else None


def is_same(node: Node) -> bool:
    """Does a node have the whole numbers of its operand, unchanged?"""
    copies = part_of(node) is Part.COPY or form_of(node) is Form.ALIAS
    return copies and node.meta["val"].dtype is torch.int64


def is_whole_slice(node: Node) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    given = arguments(node)
    return not given["start"] and given["step"] == 1 and given["end"] in (None, sys.maxsize)


def is_same_list(node: Node) -> bool:
    """Is a node the same list of numbers as its operand?"""
    shaped = part_of(node) is Part.MERGE or form_of(node) in (Form.SQUEEZE, Form.RESHAPE)
    same = shaped or is_same(node) or is_whole_slice(node)
    return same and is_tensor(node) and node.meta["val"].dim() == 1


class PickedGraph:
    """Operations on picked rows, read from a trace.

    last      the node of the trace that puts rows back, or reduces them
    mask      the mask
    operands  values of the trace that the rows are computed from
    base      the value into which rows are put; None where they are reduced
    result    how they are put there, or among zeros, which are then summed
    within    dimensions of a picked row over which it is reduced first
    mean_of   how many numbers of each picked row enter a mean over all of them; None for a sum
    """

    def __init__(self, trace: GraphModule, last: Node):
        self.trace, self.last = trace, last
        self.within: list[int] = []
        self.mean_of: int | None = None
        self.nodes = sorted({n for n in ancestors([last]) if n.op != "output"})
        self.picked = self.made_of_picked()
        self.mask = mask_of(self.nodes)
        self.coordinates = coordinates_of(self.nodes)
        self.made, self.values = FunctionGraph("count"), dict[Node, Node]()
        self.graph = self.made.graph
        self.base, rows, self.result = self.put(last)
        self.write(rows, last)

    def made_of_picked(self) -> set[Node]:
        """Collect all nodes that depend on which rows are picked."""
        found: set[Node] = set()
        for node in self.nodes:
            random = node.op == "call_function" and draws_random(node) and part_of(node) is not Part.DROPOUT
            if node.op == "get_attr" or random:
                raise NotRowByRow(f"{node} is a constant tensor, or draws random numbers")
            if self.picks_places(node) or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def picks_places(self, node: Node) -> bool:
        return form_of(node) is Form.PLACES or bool(masks_of(node))

    def dims(self, indices: Sequence[Node | None]) -> tuple[int, ...]:
        """Return the dimensions of the mask that index the leading dimensions of a value."""
        given = list(indices)
        while given and given[-1] is None:
            given.pop()
        if given == [self.mask]:
            return tuple(range(self.mask.meta["val"].dim()))
        if not given or any(i not in self.coordinates for i in given):
            raise NotRowByRow("an index is no place where the mask is true")
        return tuple(self.coordinates[i] for i in given)

    def put(self, node: Node) -> tuple[Node | None, Node, MappedValue]:
        """Find the value into which the last node puts rows, the rows, and how they are put. The value is
        None where rows are reduced."""
        given, form = arguments(node), form_of(node)
        if part_of(node) in (Part.TOTAL, Part.MEAN):
            return None, *self.reduction(node, given)
        if form is Form.PUT_ROWS:
            base, rows, added = given["self"], given["values"], bool(given["accumulate"])
            dims = self.dims(given["indices"])
        elif form is Form.ADD_ROWS and given["dim"] == 0 and given["alpha"] == 1:
            base, rows, added = given["self"], given["source"], True
            dims = self.dims([given["index"]])
        else:
            raise NotRowByRow(f"{node.target} does not put rows back")
        if base in self.picked or rows not in self.picked:
            raise NotRowByRow("no picked rows are put into a value of known size")
        value = base.meta["val"]
        return base, rows, MappedValue(dims, tuple(value.shape), value.dtype, added)

    def reduction(self, node: Node, given: dict) -> tuple[Node, MappedValue]:
        """Find the rows of which the last node takes the sum or mean, and how they are put among zeros."""
        rows, value = given["self"], given["self"].meta["val"]
        dims = {d % value.dim() for d in given.get("dim") or range(value.dim())}
        if 0 not in dims or given.get("keepdim") or any(map(internals.is_unbacked, value.shape[1:])):
            raise NotRowByRow(f"{node.target} reduces something else than picked rows")
        self.within = sorted(dims - {0})
        if part_of(node) is Part.MEAN:
            self.mean_of = math.prod(value.shape[d] for d in self.within)
        tail = [n for d, n in enumerate(value.shape) if d not in dims]
        mask, dtype = self.mask.meta["val"], node.meta["val"].dtype
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        return rows, MappedValue(tuple(range(mask.dim())), (*mask.shape, *tail), wide, added=False)

    def write(self, rows: Node, last: Node) -> None:
        """Copy the operations that compute the rows, for any number of them."""
        self.check_writes(last)
        value = self.copied(rows)
        if self.base is None:
            how = {"dtype": self.result.dtype}
            if self.within:
                value = self.graph.call_function(aten.sum.dim_IntList, (value, self.within), how)
            else:
                value = self.graph.call_function(aten.to.dtype, (value, self.result.dtype))
        tail = list(self.result.shape[len(self.result.dims) :])
        if self.base is not None and list(rows.meta["val"].shape[1:]) != tail:
            value = self.graph.call_function(aten.expand.default, (value, [self.made.given[0], *tail]))
        self.value = value

    def check_writes(self, last: Node) -> None:
        """Raise `NotRowByRow` where a picked value is written into that is also read as it was before."""
        for node in self.picked - {last}:
            written = written_argument(node) if node.op == "call_function" and is_tensor(node) else None
            if written is not None and (written not in self.picked or set(written.users) != {node}):
                raise NotRowByRow(f"{node} writes into a value that others read")

    def copied(self, node: Node) -> Node:
        if node not in self.picked:
            return self.operand(node, MappedValue(()))
        if node not in self.values:
            self.values[node] = self.copy(node)
        return self.values[node]

    def copy(self, node: Node) -> Node:
        form = form_of(node)
        if node in self.coordinates:
            raise NotRowByRow("the place of a row is used as a number")
        if node.target is operator.getitem and part_of(node.args[0]) is Part.DROPOUT:
            return self.dropped(node.args[0], node.args[1])
        if form is Form.LOOK_UP and node.args[0] not in self.picked:
            return self.looked_up(*node.args)
        if form is Form.LOOK_UP_ALONG and node.args[0] not in self.picked and node.args[1] == 0:
            return self.operand(node.args[0], MappedValue(self.dims([node.args[2]])))
        if isinstance(node.meta["val"], torch.SymInt) and is_count(node):
            return self.made.given[0]
        return self.made.copy(node, self.copied)

    def dropped(self, node: Node, result: int) -> Node:
        """Apply dropout to picked rows. Its mask is drawn for all rows, and picked as they are."""
        rows, rate = node.args[:2]
        if result != 0:
            raise NotRowByRow("what dropout has dropped is read")
        value, mask = rows.meta["val"], self.mask.meta["val"]
        shape, how = [*mask.shape, *value.shape[1:]], {"dtype": value.dtype, "device": value.device}
        with self.trace.graph.inserting_before(node):
            ones = self.trace.graph.call_function(aten.ones.default, (shape,), how)
            scale = self.trace.graph.call_function(aten.dropout.default, (ones, rate, True))
        ones.meta["val"] = scale.meta["val"] = self.mask.meta["val"].new_empty(shape, dtype=value.dtype)
        picked = self.operand(scale, MappedValue(tuple(range(mask.dim()))))
        return self.graph.call_function(aten.mul.Tensor, (self.copied(rows), picked))

    def looked_up(self, source: Node, indices: Sequence[Node | None]) -> Node:
        """Pick rows of a value along its leading dimensions, or along those behind (``x[None, rows]``)."""
        ahead = next(i for i, index in enumerate(indices) if index is not None)
        how, rank = MappedValue(self.dims(indices[ahead:])), source.meta["val"].dim()
        if not ahead:
            return self.operand(source, how)
        last = ahead + len(how.dims)
        order = [*range(ahead, last), *range(ahead), *range(last, rank)]
        with self.trace.graph.inserting_after(source):
            moved = self.trace.graph.call_function(aten.permute.default, (source, order))
        moved.meta["val"] = source.meta["val"].permute(order)
        rows = self.operand(moved, how)
        back = [*range(1, ahead + 1), 0, *range(ahead + 1, rank - len(how.dims) + 1)]
        return self.graph.call_function(aten.permute.default, (rows, back))

    def operand(self, value: Node, how: MappedValue) -> Node:
        if value is self.mask:
            raise NotRowByRow("the mask is used as a number")
        return self.made.operand((value, how))

    @property
    def operands(self) -> list[Node]:
        return [value for value, _ in self.made.operands]

    def function(self) -> MappedFunction:
        ways = tuple(how for _, how in self.made.operands)
        return MappedFunction(self.made.module([self.value]), ways, (self.result,))


def is_count(node: Node) -> bool:
    """Is a size exactly the number of picked rows?"""
    return node.meta["val"].node.expr.is_Symbol

"""Undo sorts whose order is restored later: experts' rows are sorted, processed and put back.

A value sorted over all tokens can be in no chunk. But if everything between the sort and the way back is
row by row, or adds rows up, the sort changes only the order of work. Every value in between is then
written in the order of tokens. A grouped product, which needs its rows sorted, becomes one that gets the
expert of each row and sorts the rows that it is given.

If anything is not proved to be row by row, the sort, and everything after it, stays as it was.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir import (
    CannotStream,
    Contraction,
    Label,
    Signature,
    Size,
    arguments,
    metadata_for,
    shape_of,
    tensor_operands,
    value_of,
)
from ..rules import form_of, is_zeros, rule_of
from ..rules.facets import Form

aten, streambp = torch.ops.aten, torch.ops.streambp


class CannotUndo(Exception):
    """A reader of sorted rows to which their order matters, or that no rule describes."""


def undo_sorts(module: GraphModule, unsorted: set[int] | None = None) -> GraphModule:
    """Rewrite a normal graph, in place, without the sorts that are undone in it.

    unsorted  if given, the graph may return other values of the same shapes in place of sorted ones, and
              their places among the results are added here; otherwise, a sort stays whose order is
              returned
    """
    graph = module.graph
    for node in [n for n in graph.nodes if form_of(n) is Form.SORT and len(shape_of(n.args[0])) == 1]:
        before = set(graph.nodes)
        if node not in before:  # the sort of an order that is undone already
            continue
        try:
            sort = Sort(graph, node)
            sort.follow(may_be_returned=unsorted is not None)
        except CannotUndo:
            for new in reversed([n for n in graph.nodes if n not in before]):
                graph.erase_node(new)
            continue
        sort.rewrite(unsorted)
        graph.eliminate_dead_code()
        module.recompile()
    return module


class Sort:
    """One sort of a row of keys, and the values computed from it.

    rows    sorted value → the dimension that is in sorted order (a tuple for several outputs)
    plain   sorted value → the same value in the order of tokens
    tokens  index of sorted rows → how many rows share the row that it names (``order // k``)
    places  positions to which the rows went: the inverse of the order
    counts  rows per key, and their running sum, which is where each key's rows end
    back    value in the order of tokens again → the same value without the sort
    """

    def __init__(self, graph: Graph, sort: Node):
        self.graph, self.sort, self.keys = graph, sort, sort.args[0]
        self.rows: dict[Node, int | tuple] = {}
        self.plain: dict[Node, Node] = {}
        self.tokens: dict[Node, int] = {}
        self.places: set[Node] = set()
        self.counts: set[Node] = set()
        self.back: dict[Node, Node] = {}

    def follow(self, may_be_returned: bool) -> None:
        """Follow all readers of sorted values. Raises `CannotUndo`."""
        nodes = list(self.graph.nodes)
        for node in nodes[nodes.index(self.sort) + 1 :]:
            if node.op == "output":
                if not may_be_returned and any(self.is_sorted(n) for n in node.all_input_nodes):
                    raise CannotUndo(node)
            elif self.sort in node.all_input_nodes or any(map(self.is_sorted, node.all_input_nodes)):
                with self.graph.inserting_before(node):
                    self.read(node)

    def is_sorted(self, node: Node) -> bool:
        return node in self.rows or node in self.tokens or node in self.places or node in self.counts

    def read(self, node: Node) -> None:
        """Read one node that reads something sorted."""
        if node.args and node.args[0] is self.sort:
            if node.args[1] == 0:
                self.rows[node], self.plain[node] = 0, self.keys
            else:
                self.tokens[node] = 1
            return
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if first in self.tokens and len(node.all_input_nodes) == 1:
            self.read_order(node, first)
        elif node.target is operator.getitem and first in self.places:
            self.places.add(node)
        elif first in self.counts and (is_same(node) or form_of(node) is Form.RUNNING_SUM):
            self.counts.add(node)
        elif form_of(node) is Form.COUNT and first in self.rows:
            self.counts.add(node)
        elif form_of(node) is Form.LOOK_UP and len(node.args[1]) == 1 and self.is_index(node.args[1][0]):
            self.read_index(node, node.args[0], node.args[1][0])
        elif form_of(node) is Form.PUT_ROWS and len(node.args[1]) == 1 and self.is_index(node.args[1][0]):
            self.read_write(node, node.args[1][0], node.args[2], len(node.args) > 3 and node.args[3])
        elif (
            form_of(node) is Form.ADD_ROWS
            and node.args[1] == 0
            and self.is_index(node.args[2])
            and len(node.args) == 4
            and not node.kwargs
        ):
            self.read_write(node, node.args[2], node.args[3], True)
        elif form_of(node) is Form.GROUPED_PRODUCT:
            self.read_grouped(node)
        elif form_of(node) is Form.GROUPED_PRODUCT_BACKWARD:
            self.read_grouped_backward(node)
        else:
            self.read_rows(node)

    def is_index(self, node: object) -> bool:
        return node in self.tokens or node in self.places

    def read_order(self, node: Node, order: Node) -> None:
        """Read ``order``, ``order // k``, or the sort of the order, whose indices are the inverse."""
        if is_same(node):
            self.tokens[node] = self.tokens[order]
        elif (
            form_of(node) is Form.FLOOR_DIVIDE
            and isinstance(node.args[1], int)
            and node.args[1] > 0
            and node.kwargs.get("rounding_mode", "floor") in ("floor", "trunc")
        ):
            self.tokens[node] = self.tokens[order] * node.args[1]
        elif (
            form_of(node) is Form.SORT
            and self.tokens[order] == 1
            and not descending(node)
            and all(user.args[1] == 1 for user in node.users)
        ):
            self.places.add(node)
        else:
            raise CannotUndo(node)

    def read_index(self, node: Node, source: Node, index: Node) -> None:
        """Read a look-up: ``x[order // k]`` sorts rows, and ``sorted[places]`` puts them back."""
        if index in self.places and self.rows.get(source) == 0:
            self.back[node] = self.plain[source]
        elif (
            index in self.tokens
            and not self.is_sorted(source)
            and self.has_tokens(source, self.tokens[index])
        ):
            self.rows[node], self.plain[node] = 0, self.repeated(source, self.tokens[index])
        else:
            raise CannotUndo(node)

    def read_write(self, node: Node, index: Node, values: object, accumulate: bool) -> None:
        """Read a write of rows by an index. Rows added where the order says go back, and rows added at their
        places are sorted. ``inverse[order] = 0, 1, …`` are the places."""
        named = self.tokens.get(index, 1)
        if (
            not self.has_tokens(node, named)
            or not isinstance(values, Node)
            or shape_of(values)[1:] != shape_of(node)[1:]
            or (not is_zeros(without_casts(node.args[0])) if accumulate else named != 1)
        ):
            raise CannotUndo(node)  # not every row is written once, or added to zeros
        if index in self.tokens and named == 1 and counts_up(values):
            self.places.add(node)
        elif index in self.tokens and self.rows.get(values) == 0:
            self.back[node] = self.added(self.plain[values], named)
        elif index in self.places and not self.is_sorted(values) and self.has_tokens(values, 1):
            self.rows[node], self.plain[node] = 0, values
        else:
            raise CannotUndo(node)

    def has_tokens(self, node: Node, shared: int) -> bool:
        """Does a value have one row for every ``shared`` keys?"""
        return same_size(value_of(node).shape[0] * shared, value_of(self.keys).shape[0])

    def read_rows(self, node: Node) -> None:
        """Read any other op, by its rule. Sorted rows must meet only sorted rows, and their order must not
        matter to the op."""
        if node.target is operator.getitem:
            dims = self.rows.get(node.args[0])
            if not isinstance(dims, tuple) or dims[node.args[1]] is None:
                raise CannotUndo(node)
            self.rows[node], self.plain[node] = dims[node.args[1]], self.copied(node)
        elif form_of(node) is Form.RESHAPE:
            source, dim = node.args[0], self.rows.get(node.args[0])
            if not isinstance(dim, int) or shape_of(source)[: dim + 1] != shape_of(node)[: dim + 1]:
                raise CannotUndo(node)
            self.rows[node], self.plain[node] = dim, self.copied(node)
        else:
            self.read_by_label(node)

    def read_by_label(self, node: Node) -> None:
        """Follow sorted rows through an op by the label that its rule gives to their dimension."""
        signature, label = self.label_of_rows(node)
        dims = tuple(ties.index(label) for ties in signature.outputs if label in ties)
        new = self.copied(node)
        if len(dims) == len(signature.outputs):
            several = isinstance(value_of(node), (tuple, list))
            self.rows[node], self.plain[node] = dims if several else dims[0], new
        elif not dims and signature.contracts is Contraction.SUM:
            self.back[node] = new
        else:
            raise CannotUndo(node)

    def label_of_rows(self, node: Node) -> tuple[Signature, Label]:
        """Return an op's signature, and its one label of sorted rows. Raises `CannotUndo` where their order
        matters to it."""
        try:
            signature = rule_of(node).signature(node)
        except CannotStream as refusal:
            raise CannotUndo(node) from refusal
        if any(self.is_sorted(a) and not isinstance(self.rows.get(a), int) for a in node.all_input_nodes):
            raise CannotUndo(node)
        labelled = list(zip(tensor_operands(node), signature.operands))
        labels = {ties[dim] for a, ties in labelled if isinstance(dim := self.rows.get(a), int)}
        if len(labels) != 1 or None in labels or signature.reshape:
            raise CannotUndo(node)
        (label,) = labels
        if {label} & {*signature.reach, *signature.offsets, signature.rows, signature.keys}:
            raise CannotUndo(node)
        for operand, ties in labelled:
            if form_of(operand) is not Form.FULL and any(
                tie == label and self.rows.get(operand) != dim for dim, tie in enumerate(ties)
            ):
                raise CannotUndo(node)
        return signature, label

    # Grouped products

    def ends(self, node: Any, experts: int) -> None:
        """Verify that a value says where the rows of each key end. It has to be the running sum of a
        histogram of these very keys. Raises `CannotUndo` otherwise."""
        node = without_casts(node)
        source = without_casts(node.args[0]) if form_of(node) is Form.RUNNING_SUM else None
        if source is None or form_of(source) is not Form.COUNT or descending(self.sort):
            raise CannotUndo(node)
        given = arguments(source)
        fits = (
            (given["bins"], given["min"], given["max"]) == (experts, 0, experts - 1)
            if "bins" in given
            else (given["minlength"] == experts)
        )
        counted = without_casts(source.args[0])
        if (
            not fits
            or counted is not self.keys
            and without_casts(self.plain.get(counted)) is not self.keys
            or shape_of(source) != (experts,)
        ):
            raise CannotUndo(node)

    def read_grouped(self, node: Node) -> None:
        """Read torch's grouped product of sorted rows and a weight per group, or of rows and rows. The latter
        is the gradient of the weights."""
        left, right, ends = node.args[:3]
        if any(a is not None for a in (*node.args[3:], *node.kwargs.values())):
            raise CannotUndo(node)
        if self.rows.get(left) == 0 and len(shape_of(right)) == 3 and not self.is_sorted(right):
            self.ends(ends, shape_of(right)[0])
            self.rows[node], self.plain[node] = (
                0,
                self.emitted(node, streambp.grouped_mm.default, (self.plain[left], right, self.keys)),
            )
        elif self.rows.get(left) == 1 and self.rows.get(right) == 0:
            experts = shape_of(node)[0]
            self.ends(ends, experts)
            rows = self.transposed(self.plain[left])
            self.back[node] = self.emitted(
                node, streambp.grouped_outer.default, (rows, self.plain[right], self.keys, experts)
            )
        else:
            raise CannotUndo(node)

    def read_grouped_backward(self, node: Node) -> None:
        rows, weight, ends, grad = node.args
        experts = shape_of(weight)[0]
        self.ends(ends, experts)
        if self.rows.get(rows) != 0 or self.rows.get(grad) != 0 or self.is_sorted(weight):
            raise CannotUndo(node)
        for user in node.users:
            if user.args[1] == 0:
                across = self.emitted(
                    user, aten.transpose.int, (weight, 1, 2), value_of(weight).transpose(1, 2)
                )
                self.rows[user], self.plain[user] = (
                    0,
                    self.emitted(user, streambp.grouped_mm.default, (self.plain[grad], across, self.keys)),
                )
            else:
                self.back[user] = self.emitted(
                    user,
                    streambp.grouped_outer.default,
                    (self.plain[rows], self.plain[grad], self.keys, experts),
                )

    # Writing

    def emitted(self, like: Node, target, args: tuple, value=None) -> Node:
        new = self.graph.call_function(target, args)
        new.meta = metadata_for(like, value)
        return new

    def copied(self, node: Node) -> Node:
        new = self.graph.node_copy(node, lambda a: self.plain.get(a, a))
        new.meta = metadata_for(node)
        return new

    def transposed(self, node: Node) -> Node:
        return self.emitted(node, aten.transpose.int, (node, 0, 1), value_of(node).transpose(0, 1))

    def repeated(self, source: Node, times: int) -> Node:
        """Repeat every row as often as it is named, in the order of tokens."""
        if times == 1:
            return source
        value, rest = value_of(source), list(shape_of(source)[1:])
        apart = value.unsqueeze(1)
        new = self.emitted(source, aten.unsqueeze.default, (source, 1), apart)
        wide = apart.expand([-1, times, *[-1] * len(rest)])
        new = self.emitted(new, aten.expand.default, (new, [-1, times, *[-1] * len(rest)]), wide)
        return self.emitted(new, aten.reshape.default, (new, [-1, *rest]), wide.reshape([-1, *rest]))

    def added(self, rows: Node, times: int) -> Node:
        """Add up rows that name the same token."""
        if times == 1:
            return rows
        shape = [-1, times, *shape_of(rows)[1:]]
        apart = value_of(rows).reshape(shape)
        new = self.emitted(rows, aten.reshape.default, (rows, shape), apart)
        return self.emitted(new, aten.sum.dim_IntList, (new, [1]), apart.sum(1))

    def rewrite(self, unsorted: set[int] | None) -> None:
        for old, new in self.back.items():
            old.replace_all_uses_with(new)
        if unsorted is not None:
            output = self.graph.output_node()
            stand_ins = {
                **dict.fromkeys((*self.tokens, *self.places), self.keys),
                **dict.fromkeys(self.counts),
                **self.plain,
            }
            returned = list(output.args[0])
            for place, node in enumerate(returned):
                if isinstance(node, Node) and self.is_sorted(node):
                    returned[place] = stand_ins.get(node, node)
                    unsorted.add(place)
            output.args = (returned,)


def same_size(a: Size, b: Size) -> bool:
    """Are two sizes equal at every length, not only at the traced one?"""
    return all(isinstance(s, int) for s in (a, b)) and a == b or str(a) == str(b)


def descending(sort: Node) -> bool:
    return bool(arguments(sort)["descending"])


def is_same(node: Node) -> bool:
    """Does a node hold the values of its operand, perhaps in another dtype?"""
    return form_of(node) in (Form.ALIAS, Form.COPY, Form.CAST)


def without_casts(node: Any) -> Any:
    while isinstance(node, Node) and is_same(node):
        node = node.args[0]
    return node


def counts_up(node: Any) -> bool:
    """Is a value the range 0, 1, 2, …?"""
    node = without_casts(node)
    if form_of(node) is not Form.RANGE:
        return False
    given = arguments(node)
    return given["start"] == 0 and given["step"] == 1

"""Propagation of token dimensions through a graph, as marks.

Tokens spread from marked inputs along equally labelled dimensions, in both directions: from inputs to
values computed from them, and from readers back to creation ops, whose sizes alone never say which
dimension carries tokens.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from .ir import CannotStream, Mark, Signature, refuse, shape_of, tensor_operands, value_of
from .phases import check_time
from .rules import rule_of

Slot = tuple[Node, int]  # a node and which of its outputs; -1 for a node that is one value


def outputs_of(node: Node) -> tuple[int, ...]:
    value = value_of(node)
    return tuple(range(len(value))) if isinstance(value, (tuple, list)) else (-1,)


def slot_of(node: Node) -> Slot:
    return (node.args[0], node.args[1]) if node.target is operator.getitem else (node, -1)


class Signatures:
    """The signatures of all nodes of a graph, read once for all propagations.

    order    node → its place
    around   slot → the nodes that have it as an operand or as a result
    holders  slot → the nodes whose value it is
    missing  nodes without a rule that fits them → the refusal
    written  nodes that write among rows → the operand whose other rows they keep
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.found: dict[Node, Signature] = {}
        self.missing: dict[Node, CannotStream] = {}
        self.written: dict[Node, Node] = {}
        self.around: dict[Slot, list[Node]] = {}
        self.holders: dict[Slot, list[Node]] = {}
        for node in graph.nodes:
            self.holders.setdefault(slot_of(node), []).append(node)
            if node.op == "call_function" and node.target is not operator.getitem and has_tensors(node):
                check_time()
                self.read(node)
                for slot in {*map(slot_of, tensor_operands(node)), *((node, o) for o in outputs_of(node))}:
                    self.around.setdefault(slot, []).append(node)

    def read(self, node: Node) -> None:
        try:
            rule = rule_of(node)
            self.found[node] = rule.signature(node)
            if rule.writes is not None and isinstance(node.args[rule.writes], Node):
                self.written[node] = node.args[rule.writes]
        except CannotStream as refusal:
            self.missing[node] = refusal
        except Exception as error:  # a rule that does not fit this call; harmless unless tokens come here
            reason = f"The rule for this operation failed on these arguments ({error})"
            self.missing[node] = refuse(
                node, reason, "Correct the rule if it is yours, or report this call if it is not"
            )


class TokenPropagation:
    """Marks, spread to a fixpoint. ``marks[slot][dim]`` is the mark of that dimension.

    lost     reshapes that tokens do not come through → the reason
    merging  those of them that would merge queries and keys into one dimension
    crossed  nodes where rows in two orders meet: blocks of four neighbours, and blocks of every fourth
             row

    Nodes are visited forwards and backwards in the order of the graph, whenever marks around them are
    new. So the cost is that of the nodes that tokens reach.
    """

    def __init__(
        self, graph: Graph, input_marks: Mapping[Node, tuple[Mark, ...]], known: Signatures | None = None
    ):
        self.graph = graph
        self.known = Signatures(graph) if known is None else known
        self.signatures, self.missing = self.known.found, self.known.missing
        self.marks: dict[Slot, dict[int, Mark]] = {}
        self.lost: dict[Node, str] = {}
        self.merging: dict[Node, None] = {}
        self.crossed: set[Node] = set()
        self.keys: dict[Slot, int] = {}
        self.waiting: set[Node] = set()
        for node, marks in input_marks.items():
            for mark in marks:
                self.marks.setdefault(slot_of(node), {})[mark.dim] = mark
            self.wake(slot_of(node))
        self.visit(self.tied)
        undecided = [slot for slot in self.marks if self.pairs(slot)]
        for slot in undecided:
            self.wake(slot)
        self.visit(self.orient)
        for slot in undecided:
            if slot not in self.keys:  # nothing tells rows from keys: by custom, keys come last
                self.place_keys(slot, max(self.marks[slot]))
                self.visit(self.orient)

    def wake(self, slot: Slot) -> None:
        """Schedule a visit of the nodes around a slot, because something about it is new."""
        self.waiting.update(n for n in self.known.around.get(slot, ()) if n in self.signatures)

    def visit(self, look: Callable[[Node, Signature], None]) -> None:
        """Visit waiting nodes, forwards and backwards, until none waits. Nodes that are woken behind the
        current one wait for the next turn."""
        turn, order = 1, self.known.order
        while self.waiting:
            queued, later, self.waiting = self.waiting, set(), set()
            queue = [(turn * order[n], n) for n in queued]
            heapq.heapify(queue)
            while queue:
                check_time()
                at, node = heapq.heappop(queue)
                queued.discard(node)
                look(node, self.signatures[node])
                for new in self.waiting - queued:
                    if turn * order[new] <= at:
                        later.add(new)
                    else:
                        queued.add(new)
                        heapq.heappush(queue, (turn * order[new], new))
                self.waiting = set()
            turn, self.waiting = -turn, later

    def of(self, node: Node) -> dict[int, Mark]:
        return self.marks.get(slot_of(node), {})

    def met(self) -> list[Node]:
        """List the nodes around marked slots, in order."""
        found = {n for slot, marks in self.marks.items() if marks for n in self.known.around.get(slot, ())}
        return sorted(found, key=self.known.order.__getitem__)

    def marked(self) -> list[Node]:
        """List the nodes whose values have marks."""
        return [n for slot, marks in self.marks.items() if marks for n in self.known.holders.get(slot, ())]

    def add(self, slot: Slot, mark: Mark | None) -> None:
        if mark is not None and mark.dim not in self.marks.setdefault(slot, {}):
            self.marks[slot][mark.dim] = mark
            self.wake(slot)

    def place(self, node: Node, slot: Slot, mark: Mark | None) -> None:
        """Add a mark to a value. If the value has another mark there, its rows are in another order, and the
        node is recorded as crossed."""
        self.add(slot, mark)
        if mark is not None and self.marks[slot][mark.dim] != mark:
            self.crossed.add(node)

    def loses(self, node: Node) -> bool:
        """Do tokens reach a node, but not pass through it?"""
        return node in self.lost or node in self.crossed

    def maps_rows(self, node: Node) -> bool:
        """Is row t of a node's results computed from rows t of its operands alone, whatever their place?"""
        signature = self.signatures.get(node)
        if signature is None or self.loses(node):
            return False
        if signature.reshape:
            return not self.of(node) or bool(self.of(tensor_operands(node)[0]))
        pairs = zip(tensor_operands(node), signature.operands)
        read = {labels[dim] for operand, labels in pairs for dim in self.of(operand)}
        made = {label for labels in signature.outputs for label in labels if label is not None}
        if self.of(node) and not tensor_operands(node):
            return signature.uniform
        return read <= made and not any(label == signature.rows or signature.mixes(label) for label in read)

    def tied(self, node: Node, signature: Signature) -> None:
        """Propagate marks between equally labelled dimensions."""
        operands = tensor_operands(node)
        if signature.reshape:
            return self.tie_reshape(node, operands[0])
        places: dict[object, list[tuple[Slot, int, int]]] = {}
        if node in self.known.written:
            self.tie_written((node, -1), slot_of(self.known.written[node]))
        given, made = signature.blocks
        ends = [(slot_of(a), labels, given) for a, labels in zip(operands, signature.operands)]
        ends += [((node, o), labels, made) for o, labels in zip(outputs_of(node), signature.outputs)]
        for slot, labels, block in ends:
            for dim, label in enumerate(labels):
                if label is not None:
                    places.setdefault(label, []).append((slot, dim, block))
        for tied in places.values():
            marked = ((slot, dim, block) for slot, dim, block in tied if dim in self.marks.get(slot, {}))
            source = next(marked, None)
            if source is not None:
                found, own = self.marks[source[0]][source[1]], source[2]
                for slot, dim, block in tied:
                    same = found if block == own else found.grouped(block)
                    self.place(node, slot, same.moved(dim))

    def tie_written(self, result: Slot, base: Slot) -> None:
        """Propagate marks through a write among rows, which leaves all other rows in their place."""
        for source, target in ((result, base), (base, result)):
            for mark in tuple(self.marks.get(source, {}).values()):
                self.place(result[0], target, mark)

    def tie_reshape(self, node: Node, operand: Node) -> None:
        ends = ((slot_of(operand), shape_of(operand)), ((node, -1), shape_of(node)))
        for (source, old), (target, new) in (ends, ends[::-1]):
            found = [(mark, reshaped(mark, old, new)) for mark in self.marks.get(source, {}).values()]
            if len({moved.dim for _, moved in found if moved is not None}) < sum(
                moved is not None for _, moved in found
            ):
                self.merging[node] = None
                self.lost[node] = (
                    f"This reshape from {list(old)} to {list(new)} merges the query and the key dimension"
                )
                continue
            for _, moved in found:
                if moved is None and source != (node, -1):
                    self.lost[node] = (
                        f"This reshape from {list(old)} to {list(new)} splits the token dimension"
                    )
                self.place(node, target, moved)

    # Which of two token dimensions holds the keys

    def pairs(self, slot: Slot) -> bool:
        return len(self.marks.get(slot, {})) == 2

    def place_keys(self, slot: Slot, dim: int) -> None:
        self.keys[slot] = dim
        self.wake(slot)

    def orient(self, node: Node, signature: Signature) -> None:
        """Propagate the places of keys between equally labelled dimensions."""
        operands = [slot_of(a) for a in tensor_operands(node)]
        if signature.reshape:
            self.orient_reshape(operands[0], (node, -1), shape_of(tensor_operands(node)[0]), shape_of(node))
            return
        slots = [
            *zip(operands, signature.operands),
            *(((node, o), labels) for o, labels in zip(outputs_of(node), signature.outputs)),
        ]
        label = signature.keys
        if label is None:
            told = (labels[self.keys[s]] for s, labels in slots if s in self.keys)
            label = next((label for label in told if label is not None), None)
        if label is None:
            return
        for slot, labels in slots:
            open_ = slot not in self.keys and self.pairs(slot) and label in labels
            if open_ and labels.index(label) in self.marks[slot]:
                self.place_keys(slot, labels.index(label))

    def orient_reshape(self, source: Slot, target: Slot, old, new) -> None:
        for a, b, x, y in ((source, target, old, new), (target, source, new, old)):
            if a in self.keys and self.pairs(b) and b not in self.keys:
                moved = reshaped(self.marks[a][self.keys[a]], x, y)
                if moved is not None:
                    self.place_keys(b, moved.dim)

    def turned(self, node: Node, signature: Signature) -> bool:
        """Do matrices of tokens by tokens meet in a node, one with its keys where another has its rows?"""
        operands, outputs = tensor_operands(node), outputs_of(node)
        slots = [*map(slot_of, operands), *((node, o) for o in outputs)]
        if signature.reshape:
            source, target = slots
            old, new = shape_of(operands[0]), shape_of(node)
            if source not in self.keys or target not in self.keys:
                return False
            moved = reshaped(self.marks[source][self.keys[source]], old, new)
            return moved is not None and moved.dim != self.keys[target]
        found = set()
        for slot, labels in zip(slots, (*signature.operands, *signature.outputs)):
            rows, key = self.rows(slot), self.key(slot)
            if rows is not None and key is not None and labels[rows.dim] is not None:
                found.add((labels[rows.dim], labels[key.dim]))
        of_rows = signature.keys is not None and any(row == signature.keys for row, _ in found)
        return of_rows or any((key, row) in found for row, key in found)

    def rows(self, slot: Slot) -> Mark | None:
        return next((m for d, m in self.marks.get(slot, {}).items() if d != self.keys.get(slot)), None)

    def mark(self, slot: Slot) -> Mark:
        """Return the mark of the rows of a value that is known to have some."""
        mark = self.rows(slot)
        assert mark is not None, f"{slot[0]} has no rows"
        return mark

    def key(self, slot: Slot) -> Mark | None:
        return self.marks[slot][self.keys[slot]] if slot in self.keys else None


def has_tensors(node: Node) -> bool:
    return isinstance(value_of(node), (torch.Tensor, tuple, list))


def product(sizes) -> int:
    return math.prod(sizes)


def reshaped(mark: Mark, old: tuple[int, ...], new: tuple[int, ...]) -> Mark | None:
    """Find the mark of a token dimension after a reshape, or None. It is the place with the same rows before
    it and after it. There is none in an empty value, where all places are alike, nor in one that is too
    short to hold a row of it."""
    if 0 in old or old[mark.dim] < mark.step:
        return None
    length = old[mark.dim] // mark.step
    before = product(old[: mark.dim]) * mark.outer
    after = mark.inner * product(old[mark.dim + 1 :])
    for dim, size in enumerate(new):
        ahead = product(new[:dim])
        if before % ahead or size == 1 and length != 1:
            continue
        outer = before // ahead
        if size % (outer * length):
            continue
        inner = size // (outer * length)
        if inner * product(new[dim + 1 :]) == after:
            return Mark(dim, outer, inner, mark.block)
    return None

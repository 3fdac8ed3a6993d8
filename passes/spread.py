"""Where tokens go: marks, spread over a graph.

Tokens spread from the seeds along equally labelled dimensions, in both directions: from inputs to what is made of them, and
from readers back to creation ops, whose sizes alone never say which dimension carries tokens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from .ir import CannotStream, Mark, Signature, refuse, shape_of, tensor_operands, value_of
from .rules import rule_of

Slot = tuple[Node, int]  # a node and which of its outputs; -1 for a node that is one value


def outputs_of(node: Node) -> tuple[int, ...]:
    value = value_of(node)
    return tuple(range(len(value))) if isinstance(value, (tuple, list)) else (-1,)


def slot_of(node: Node) -> Slot:
    return (node.args[0], node.args[1]) if node.target is operator.getitem else (node, -1)


class Spread:
    """Marks, spread to a fixpoint. ``marks[slot][dim]`` is the mark of that dimension."""

    def __init__(self, graph: Graph, seeds: Mapping[Node, tuple[Mark, ...]]):
        self.graph = graph
        self.marks: dict[Slot, dict[int, Mark]] = {}
        self.signatures: dict[Node, Signature] = {}
        self.missing: dict[Node, CannotStream] = {}
        self.lost: dict[Node, str] = {}
        self.keys: dict[Slot, int] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem and has_tensors(node):
                try:
                    self.signatures[node] = rule_of(node).signature(node)
                except CannotStream as refusal:
                    self.missing[node] = refusal
                except Exception as error:  # a rule that does not fit this call; harmless unless tokens come here
                    self.missing[node] = refuse(node, f"its rule fails on these arguments ({error})", "Please report this call")
        for node, marks in seeds.items():
            for mark in marks:
                self.marks.setdefault(slot_of(node), {})[mark.dim] = mark
        while self.sweep():
            pass
        while self.orient() or self.orient_one():
            pass

    def of(self, node: Node) -> dict[int, Mark]:
        return self.marks.get(slot_of(node), {})

    def add(self, slot: Slot, mark: Mark | None) -> bool:
        if mark is None:
            return False
        known = self.marks.setdefault(slot, {})
        if mark.dim in known:
            return False
        known[mark.dim] = mark
        return True

    def sweep(self) -> bool:
        changed = False
        for order in (self.graph.nodes, reversed(self.graph.nodes)):
            for node in order:
                if node in self.signatures:
                    changed |= self.tie(node, self.signatures[node])
        return changed

    def tie(self, node: Node, signature: Signature) -> bool:
        operands = tensor_operands(node)
        if signature.reshape:
            return self.tie_reshape(node, operands[0])
        places: dict[object, list[tuple[Slot, int]]] = {}
        for operand, labels in zip(operands, signature.operands):
            for dim, label in enumerate(labels):
                if label is not None:
                    places.setdefault(label, []).append((slot_of(operand), dim))
        for output, labels in zip(outputs_of(node), signature.outputs):
            for dim, label in enumerate(labels):
                if label is not None:
                    places.setdefault(label, []).append(((node, output), dim))
        changed = False
        for tied in places.values():
            found = next((self.marks[slot][dim] for slot, dim in tied if dim in self.marks.get(slot, {})), None)
            if found is not None:
                for slot, dim in tied:
                    changed |= self.add(slot, Mark(dim, found.outer, found.inner))
        return changed

    def tie_reshape(self, node: Node, operand: Node) -> bool:
        changed = False
        ends = ((slot_of(operand), shape_of(operand)), ((node, -1), shape_of(node)))
        for (source, old), (target, new) in (ends, ends[::-1]):
            found = [(mark, reshaped(mark, old, new)) for mark in self.marks.get(source, {}).values()]
            if len({moved.dim for _, moved in found if moved is not None}) < sum(moved is not None for _, moved in found):
                self.lost[node] = f"{list(old)} → {list(new)} merges rows and keys"
                continue
            for _, moved in found:
                if moved is None and source != (node, -1):
                    self.lost[node] = f"{list(old)} → {list(new)} splits the token dimension"
                changed |= self.add(target, moved)
        return changed

    # Which of two token dimensions holds the keys

    def pairs(self, slot: Slot) -> bool:
        return len(self.marks.get(slot, {})) == 2

    def orient(self) -> bool:
        changed = False
        for order in (self.graph.nodes, reversed(self.graph.nodes)):
            for node in order:
                signature = self.signatures.get(node)
                if signature is None:
                    continue
                operands = [slot_of(a) for a in tensor_operands(node)]
                if signature.reshape:
                    changed |= self.orient_reshape(operands[0], (node, -1), shape_of(tensor_operands(node)[0]), shape_of(node))
                    continue
                slots = [*zip(operands, signature.operands),
                         *(((node, o), labels) for o, labels in zip(outputs_of(node), signature.outputs))]
                label = signature.keys
                if label is None:
                    label = next((labels[self.keys[s]] for s, labels in slots if s in self.keys and labels[self.keys[s]] is not None), None)
                if label is None:
                    continue
                for slot, labels in slots:
                    if slot not in self.keys and self.pairs(slot) and label in labels and labels.index(label) in self.marks[slot]:
                        self.keys[slot] = labels.index(label)
                        changed = True
        return changed

    def orient_reshape(self, source: Slot, target: Slot, old, new) -> bool:
        for a, b, x, y in ((source, target, old, new), (target, source, new, old)):
            if a in self.keys and self.pairs(b) and b not in self.keys:
                moved = reshaped(self.marks[a][self.keys[a]], x, y)
                if moved is not None:
                    self.keys[b] = moved.dim
                    return True
        return False

    def orient_one(self) -> bool:
        """Nothing tells rows from keys: by custom, keys come last."""
        for slot, marks in self.marks.items():
            if len(marks) == 2 and slot not in self.keys:
                self.keys[slot] = max(marks)
                return True
        return False

    def rows(self, slot: Slot) -> Mark | None:
        return next((m for d, m in self.marks.get(slot, {}).items() if d != self.keys.get(slot)), None)

    def key(self, slot: Slot) -> Mark | None:
        return self.marks[slot][self.keys[slot]] if slot in self.keys else None


def has_tensors(node: Node) -> bool:
    return isinstance(value_of(node), (torch.Tensor, tuple, list))


def product(sizes) -> int:
    return math.prod(sizes)


def reshaped(mark: Mark, old: tuple[int, ...], new: tuple[int, ...]) -> Mark | None:
    """Where a token dimension goes in a reshape: the place with the same rows before it and after it."""
    length = old[mark.dim] // (mark.outer * mark.inner)
    before = product(old[:mark.dim]) * mark.outer
    after = mark.inner * product(old[mark.dim + 1:])
    for dim, size in enumerate(new):
        ahead = product(new[:dim])
        if before % ahead or size == 1 and length != 1:
            continue
        outer = before // ahead
        if size % (outer * length):
            continue
        inner = size // (outer * length)
        if inner * product(new[dim + 1:]) == after:
            return Mark(dim, outer, inner)
    return None

"""Alignment of values: the token that row 0 of every value belongs to.

A slice shifts a value against the others (labels against logits, a convolution's padding). The tokens of
its rows follow from the values that it meets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch.fx import Graph, Node

from .ir import (
    Mark,
    Signature,
    Size,
    bytes_of,
    hint,
    is_tensor,
    shape_of,
    tensor_operands,
    value_of,
)
from .phases import check_time
from .token_propagation import TokenPropagation, has_tensors, outputs_of, product, slot_of

Tie = tuple[Node, Node, int]


class Alignment:
    """The token of row 0 of every value, for values that slicing shifts against one another.

    Slices keep the token of every row, and rows that meet in an operation must belong to the same token.
    Values with features are aligned among themselves first, starting with those that have all T rows,
    then the values computed from them. Values with one number per token (labels, masks) follow, by a
    shift. Where neighbouring tokens meet, not all values can agree: the widest ones do, so that narrow
    ones and inputs are shifted.

    with_features  values with more than one number per token
    from_features  these, and the values computed from them
    """

    def __init__(self, graph: Graph, propagation: TokenPropagation, length: Size):
        self.propagation, self.length = propagation, length
        self.parent: dict[Node, tuple[Node, int]] = {}
        self.root_low: dict[Node, int] = {}
        self.uniform: set[Node] = set()
        self.from_features: set[Node] = set()
        self.with_features: set[Node] = set()
        self.batch = self.numbers_without_features(graph)
        for node in graph.nodes:
            self.classify(node)
        self.place_whole_values(graph)
        for among in (self.with_features, self.from_features):
            check_time()
            ties = [tie for node in graph.nodes for tie in self.ties(node, among)]
            for tie in sorted(ties, key=lambda tie: self.weight(tie[1]), reverse=True):
                self.tie(*tie)
        for node in graph.nodes:
            if node.op == "placeholder" and node in self.from_features and self.is_whole(node):
                self.root_low.setdefault(self.find(node)[0], -self.find(node)[1])

    def place_whole_values(self, graph: Graph) -> None:
        """Assign token 0 to row 0 of values with features that have a row for each token."""
        whole = [n for n in graph.nodes if n in self.with_features and is_tensor(n) and self.is_whole(n)]
        for node in whole:
            self.tie(node, whole[0], 0)
        if whole:
            self.fix(whole[0], 0)

    def is_whole(self, node: Node) -> bool:
        return self.rows(node) == self.propagation.mark(slot_of(node)).count(hint(self.length))

    def rows(self, node: Node) -> int:
        mark = self.propagation.mark(slot_of(node))
        return shape_of(node)[mark.dim] // mark.step

    @staticmethod
    def weight(operand: Node) -> int:
        """Count the bytes that must exist at full length, or be recomputed, if an operand is read shifted."""
        return 0 if operand.op == "placeholder" or not is_tensor(operand) else bytes_of(value_of(operand))

    def numbers_without_features(self, graph: Graph) -> int | None:
        """Count the numbers per token of integer inputs (ids, labels, masks), which is the batch size.
        Returns None if there are no such inputs."""
        given = [
            n
            for n in graph.find_nodes(op="placeholder")
            if is_tensor(n)
            and not value_of(n).dtype.is_floating_point
            and len(self.propagation.of(n)) == 1
            and self.propagation.mark((n, -1)).dim == len(shape_of(n)) - 1
        ]
        inner = {n: self.propagation.mark((n, -1)).inner for n in given}
        return max((product(shape_of(n)) // (self.rows(n) * inner[n]) for n in given), default=None)

    def has_features(self, shape: Sequence[int], mark: Mark) -> bool:
        """Does a value have several numbers per token? They lie behind the token dimension (``[B, T, D]``, or
        ``[B, T D]``), or before it, if there are more of them than the batch (``[B, V, T]``). A reshape
        does not change the answer."""
        behind = mark.inner > 1 or product(shape) > product(shape[: mark.dim + 1])
        rows = shape[mark.dim] // mark.step
        return behind or self.batch is not None and product(shape) > rows * self.batch

    def classify(self, node: Node) -> None:
        signature = self.propagation.signatures.get(node)
        if node.target is operator.getitem:
            if node.args[0] in self.from_features:
                self.from_features.add(node)
            return
        marked = [a for a in tensor_operands(node) if self.propagation.of(a)]
        if signature is not None:
            others = [a for a in tensor_operands(node) if a not in marked]
            if (
                signature.uniform
                or marked
                and all(a in self.uniform for a in marked)
                and not others
                or (not marked and others and all(a in self.uniform for a in others))
            ):
                self.uniform.add(node)
                return
        slots = (
            [slot for slot in ((node, o) for o in outputs_of(node)) if self.propagation.marks.get(slot)]
            if has_tensors(node)
            else []
        )
        features = False
        for slot in slots:
            mark, value = (
                self.propagation.mark(slot),
                value_of(node) if slot[1] == -1 else value_of(node)[slot[1]],
            )
            features |= self.has_features([hint(s) for s in value.shape], mark)
        if slots and (features or any(a in self.from_features for a in marked)):
            self.from_features.add(node)
            if features:
                self.with_features.add(node)

    def find(self, node: Node) -> tuple[Node, int]:
        """Find the root of a node and the difference d in ``low(node) = low(root) + d``. Nodes on the way are
        tied to the root itself."""
        way: list[Node] = []
        while node in self.parent:
            way.append(node)
            node = self.parent[node][0]
        delta = 0
        for passed in reversed(way):
            delta += self.parent[passed][1]
            self.parent[passed] = (node, delta)
        return node, delta

    def tie(self, a: Node, b: Node, difference: int) -> None:
        """Record that ``low(a) = low(b) + difference``, unless the two are tied already."""
        (ra, da), (rb, db) = self.find(a), self.find(b)
        if ra is not rb:
            self.parent[ra] = (rb, db + difference - da)

    def ties(self, node: Node, among: set[Node]) -> Iterator[Tie]:
        """Yield the ties between values whose rows meet in an op: ``(a, b, low(a) - low(b))``."""
        signature = self.propagation.signatures.get(node)
        if node.target is operator.getitem and node in among:
            yield node, node.args[0], 0
        if signature is None:
            return
        operands = tensor_operands(node)
        if signature.reshape:
            if node in among and operands[0] in among:
                yield node, operands[0], 0
            return
        row = row_label(node, operands, signature, self.propagation)
        met = [
            (a, offset(signature, row, i))
            for i, (a, labels) in enumerate(zip(operands, signature.operands))
            if a in among
            and row is not None
            and row in labels
            and self.propagation.of(a).get(labels.index(row)) is not None
        ]
        if node in among and any(row in labels for labels in signature.outputs):
            yield from ((node, operand, shift) for operand, shift in met)
        yield from ((a, b, y - x) for (a, x), (b, y) in zip(met, met[1:]))

    def low(self, node: Node) -> int | None:
        """Return the token of row 0, or None if nothing has fixed it yet."""
        root, delta = self.find(node)
        return None if root not in self.root_low else self.root_low[root] + delta

    def fix(self, node: Node, low: int) -> None:
        root, delta = self.find(node)
        self.root_low.setdefault(root, low - delta)


def row_label(node: Node, operands, signature: Signature, propagation: TokenPropagation):
    """Find the label along which rows run through a node, or None."""
    if signature.rows is not None:
        return signature.rows
    slots = [((node, o), labels) for o, labels in zip(outputs_of(node), signature.outputs)]
    slots += [(slot_of(a), labels) for a, labels in zip(operands, signature.operands)]
    pairs = [(s, labels) for s, labels in slots if propagation.key(s) is not None]
    for slot, labels in (*pairs, *slots):
        mark = propagation.rows(slot)
        if mark is not None and labels[mark.dim] is not None:
            return labels[mark.dim]
    return None


def offset(signature: Signature, label: object, operand: int) -> int:
    offsets = signature.offsets.get(label, ())
    return offsets[operand] if operand < len(offsets) else 0

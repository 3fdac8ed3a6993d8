"""The token axis of a model: which dimension of its inputs carries tokens, and where those go in the Dynamo graph.

The forward is captured once, every candidate is spread over it, and the one that reaches the rows of attention wins; sizes are never
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from . import internals
from .passes.ir import Mark, Size, bytes_of, hint, is_tensor, tensor_operands, value_of
from .passes.normalize import normalize
from .passes.plan import PRODUCTS, is_one_of
from .passes.spread import Spread
from .passes.unsort import unsort
from .pipeline import outputs_of

SHORTEST_STREAMED = 8  # tokens; below, a graph for this very length is compiled whole, and nothing is lost


@dataclass(frozen=True)
class Axis:
    """The token axis of a model: its length, and the marks of every value of the Dynamo graph.

    mixing  nodes that let one token see another
    light   nodes that are neither products nor random
    """

    length: Size
    marks: dict[Node, tuple[Mark, ...]]
    mixing: frozenset[Node]
    light: frozenset[Node]


def fake_of(node: Node):
    return node.meta.get("example_value", node.meta.get("val"))


def storage_of(node: Node) -> int | None:
    """Whose memory the value of a node is; equal numbers, the same memory."""
    fake = fake_of(node)
    return fake.untyped_storage()._cdata if isinstance(fake, torch.Tensor) else None


def find_axis(module: GraphModule, fakes: Sequence[object]) -> Axis | None:
    """The dimension of the inputs along which tokens run: the one that reaches the rows of attention; else the widest.

    The whole forward is captured once and every candidate (a dimension of a data input) is spread over it; sizes are never compared.
    """
    captured_for: dict[Node, set[str]] = {}
    made: list[tuple[Node, int]] = []

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node):
            before, _ = internals.captured_after(None)
            result = super().run_node(n)
            captured_for[n] = set(internals.captured_after(before)[1])
            if isinstance(result, torch.Tensor) and n.op not in ("output",):
                made.append((n, result))
            return result

    results: list[Node] = []

    def run(*args):
        made.clear()
        Recorder(module).run(*args)
        results[:] = [n for n, _ in made]
        return [t for _, t in made]

    captured = unsort(normalize(internals.capture(run, fakes)), probing=True)
    graph = captured.graph
    values = {n: v for n, v in zip(results, outputs_of(captured)) if isinstance(v, Node)}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    candidates = []
    for node, fake in zip(placeholders, fakes):
        if isinstance(fake, torch.Tensor) and not is_parameter(fake):
            candidates += [(node, d, s) for d, s in enumerate(fake.shape) if hint(s) > 1 and fake.dim() <= 3]
    found: list[Candidate] = []
    for node, dim, length in candidates:
        if any(dim in c.spread.marks.get((node, -1), {}) for c in found):
            continue
        spread = Spread(graph, {node: (Mark(dim),)})
        mixers = sum(1 for n in graph.nodes if mixes(n, spread))
        width = sum(bytes_of(value_of(n)) for n in graph.nodes if is_tensor(n) and spread.of(n)
                    and value_of(n).dtype.is_floating_point)
        if width:
            found.append(Candidate(mixers, width, lost_bytes(graph, spread) / width, length, spread))
    chosen = preferred(found)
    if chosen is None:
        return None
    spread = chosen.spread
    for node, fake in zip(placeholders, fakes):
        for mark in spread.of(node).values():
            fix_sizes(fake.shape[:mark.dim])
    marks = {n: tuple(spread.of(v).values()) for n, v in values.items() if spread.of(v)}
    mixers = {n.meta.get("replaces", n.name) for n in graph.nodes if mixes(n, spread) or n in spread.missing and touches(n, spread)
              and is_tensor(n) and value_of(n).dtype.is_floating_point}
    mixing = frozenset(n for n, names in captured_for.items() if names & mixers)
    heavy = {n.meta.get("replaces", n.name) for n in graph.nodes if n in spread.missing or is_one_of(n, PRODUCTS) or internals.draws_random(n)}
    light = frozenset(n for n, names in captured_for.items() if not names & heavy)
    return Axis(chosen.length, marks, mixing, light)


def fix_sizes(sizes: Sequence[Size]) -> None:
    """The batch, whose rows lie among those of tokens, becomes a constant of this graph: Dynamo compiles another for another batch."""
    for size in sizes:
        int(size)


@dataclass(frozen=True)
class Candidate:
    """A dimension of an input, spread over the graph: how many ops mix its rows, the bytes that carry it, the part of them that loses it."""

    mixers: int
    bytes: int
    lost: float
    length: Size
    spread: Spread


def preferred(found: Sequence[Candidate]) -> Candidate | None:
    """The most mixers; of those that carry about as many bytes and lose about as few, the most rows.

    In a head without attention the batch carries the same values as the tokens do, and a few numbers per sequence besides; features and
    classes carry much, but products and the softmax lose them.
    """
    found = [c for c in found if hint(c.length) >= SHORTEST_STREAMED] or found
    for good in (lambda c, rivals: c.mixers == max(r.mixers for r in rivals),
                 lambda c, rivals: c.lost <= 2 * min(r.lost for r in rivals) + 1 / 8,
                 lambda c, rivals: 2 * c.bytes >= max(r.bytes for r in rivals)):
        found = [c for c in found if good(c, found)]
    return max(found, key=lambda c: hint(c.length), default=None)


def lost_bytes(graph: Graph, spread: Spread) -> int:
    """Bytes of values whose marked dimension ends in a reader: contracted, normalised over, or looked up."""
    lost = 0
    for node, signature in spread.signatures.items():
        if signature.reshape or not is_tensor(node):
            continue
        outputs = {label for labels in signature.outputs for label in labels}
        for operand, labels in zip(tensor_operands(node), signature.operands):
            ends = any(labels[d] is None or labels[d] not in outputs or labels[d] == signature.keys for d in spread.of(operand))
            if ends and value_of(operand).dtype.is_floating_point and signature.rows is None and len(spread.of(operand)) < 2:
                lost += bytes_of(value_of(operand))
    return lost


def is_parameter(fake: object) -> bool:
    """A weight, declared or not. Hidden states may be leaves that want gradients too, but they come as ``[B, T, d]``."""
    return isinstance(fake, torch.nn.Parameter) or getattr(fake, "_is_param", False) or (
        isinstance(fake, torch.Tensor) and fake.is_leaf and fake.requires_grad and fake.dtype.is_floating_point and fake.dim() != 3)


def touches(node: Node, spread: Spread) -> bool:
    return any(spread.of(a) for a in tensor_operands(node))


def mixes(node: Node, spread: Spread) -> bool:
    """Does this op let one token see another: attention over rows, a product that contracts keys, a scan along tokens?"""
    signature = spread.signatures.get(node)
    if signature is None or signature.reshape:
        return False
    operands = tensor_operands(node)
    if signature.rows is not None:
        return any(labels[d] == signature.rows for a, labels in zip(operands, signature.operands) for d in spread.of(a))
    if any(labels[d] in signature.reach for a, labels in zip(operands, signature.operands) for d in spread.of(a)):
        return value_of(node).dtype.is_floating_point
    pairs = [a for a in operands if len(spread.of(a)) == 2]
    return bool(pairs) and is_tensor(node) and len(spread.of(node)) == 1 and value_of(node).dtype.is_floating_point and len(operands) > 1

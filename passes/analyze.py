"""Facts and reaches of every value, forward and backward alike.

`TokenPropagation` says which dimensions carry tokens, `Alignment` which token has row 0. What a node does
with its rows, and how it reads
each operand, then follows from where its labels went.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping

import torch
from torch.fx import Graph, Node

from .alignment import Alignment, offset
from .ir import (
    EVERYWHERE,
    HERE,
    Analysis,
    Edge,
    Fact,
    Mark,
    Reach,
    Shared,
    Signature,
    Size,
    Summed,
    Tokens,
    hint,
    is_tensor,
    refuse,
    shape_of,
    tensor_operands,
    value_of,
)
from .key_ranges import key_ranges
from .mask_analysis.evaluation import evaluate
from .stages import checkpoint
from .token_propagation import Signatures, Slot, TokenPropagation, has_tensors, outputs_of, product, slot_of


def analyze(
    graph: Graph,
    length: Size,
    seeds: Mapping[Node, tuple[Mark, ...]],
    checkable: Container[Node] = (),
    known: Signatures | None = None,
) -> Analysis:
    """Facts, edges and kinds of every node.

    length     number of tokens T (int or symbol)
    seeds      placeholder → the marks it carries
    checkable  placeholders of masks that each call may be checked for: keys may be left out under conditions
               on them
    known      what the rules say of this graph, if that was read before
    Raises `CannotStream` at the first node whose rows cannot be told.
    """
    propagation = TokenPropagation(graph, seeds, known)
    masks = evaluate(graph, {n for n in seeds if n in checkable})
    reader = Reader(propagation, length, Alignment(graph, propagation, length))
    for node in graph.nodes:
        checkpoint()
        reader.visit(node)
    reaches, conditions = key_ranges(
        graph, reader.facts, reader.kinds, propagation.signatures, masks, checkable
    )
    return Analysis(length, reader.facts, reader.edges, reader.kinds, reaches, conditions)


class Reader:
    """One pass in order: facts from marks, edges and kinds from labels."""

    def __init__(self, propagation: TokenPropagation, length: Size, alignment: Alignment):
        self.propagation, self.length, self.alignment = propagation, length, alignment
        self.facts: dict[Node, Fact | tuple[Fact, ...]] = {}
        self.edges: dict[Node, tuple[Edge, ...]] = {}
        self.kinds: dict[Node, str] = {}
        self.uniform = alignment.uniform

    def fact(self, node: Node, output: int = -1) -> Fact:
        fact = self.facts[node]
        return fact[output] if isinstance(fact, tuple) else fact

    def visit(self, node: Node) -> None:
        if node.op == "output":
            return
        if node.op in ("placeholder", "get_attr"):
            self.facts[node] = self.placeholder(node)
            self.edges[node], self.kinds[node] = (
                (),
                "rows" if isinstance(self.facts[node], Tokens) else "whole",
            )
            return
        if node.target is operator.getitem:
            source = node.args[0]
            self.facts[node] = self.fact(source, node.args[1])
            kind = self.kinds[source]
            fact = self.facts[node]
            if kind == "mixed":
                kind = "rows" if node.args[1] == 0 else "keysum" if isinstance(fact, Tokens) else "sum"
            self.kinds[node] = kind
            self.edges[node] = (Edge(source, "rows" if isinstance(fact, Tokens) else "whole"),)
            return
        operands = tensor_operands(node)
        if not has_tensors(node):  # a size
            self.facts[node], self.edges[node], self.kinds[node] = Shared(), (), "whole"
            return
        touched = any(self.propagation.of(a) for a in operands) or any(
            self.propagation.marks.get((node, o)) for o in outputs_of(node)
        )
        if not touched:
            summed = any(isinstance(self.facts[a], Summed) for a in node.all_input_nodes if a in self.facts)
            fact = Summed() if summed else Shared()
            several = isinstance(value_of(node), (tuple, list))
            self.facts[node] = tuple(fact for _ in value_of(node)) if several else fact
            self.edges[node] = tuple(Edge(a, "whole") for a in operands)
            self.kinds[node] = "whole"
            return
        if node in self.propagation.missing:
            raise self.propagation.missing[node]
        if node in self.propagation.lost:
            raise refuse(node, self.propagation.lost[node], "Keep the tokens in a dimension of their own")
        for output in outputs_of(node):
            if len(self.propagation.marks.get((node, output), {})) > 2:
                raise refuse(
                    node, "a value with three token dimensions", "Write it with one row and one key dimension"
                )
        self.derive(node, operands, self.propagation.signatures[node])

    def placeholder(self, node: Node) -> Fact:
        if not is_tensor(node) or not self.propagation.of(node):
            return Shared()
        slot = (node, -1)
        rows, key = self.propagation.rows(slot), self.propagation.key(slot)
        if (
            key is not None
        ):  # a stored mask, perhaps for more tokens than there are: it is cut before it is read
            return Tokens(rows, key)
        lo = self.alignment.low(node) or 0
        return Tokens(rows, key, lo, lo + self.excess(node, node.meta["val"].shape, rows))

    def excess(self, node: Node, shape, mark: Mark) -> int:
        """Rows beyond T (negative: missing)."""
        size = hint(shape[mark.dim]) // (mark.outer * mark.inner)
        excess = size - hint(self.length)
        if not isinstance(self.length, int):
            exact = shape[mark.dim] - (self.length + excess) * mark.outer * mark.inner
            if not isinstance(exact, int) and exact.node.expr != 0 and not is_now(shape[mark.dim], exact):
                raise refuse(
                    node,
                    f"{shape[mark.dim]} rows are not T plus a constant",
                    "Pass a length that divides evenly",
                )
        return excess

    def derive(self, node: Node, operands: tuple[Node, ...], signature: Signature) -> None:
        if signature.reshape and not isinstance(self.facts[operands[0]], Tokens):
            raise refuse(
                node,
                "makes rows of tokens out of what has none",
                "Nothing, if these are patches of an image: what makes them runs whole",
            )
        row, key, kind = self.roles(node, operands, signature)
        slots = [(node, o) for o in outputs_of(node)]
        tokens = [bool(self.propagation.marks.get(s)) for s in slots]
        facts_in = [self.facts[a] for a in operands]
        if key is not None and any(isinstance(f, Tokens) and (f.lo, f.hi) != (0, 0) for f in facts_in):
            raise refuse(
                node,
                "its keys are those of a shifted sequence",
                "Attend over all tokens, and slice what comes after",
            )
        if any(isinstance(f, Tokens) and f.keys is not None for f in facts_in) and any(
            r.lo == r.hi != 0 for label, r in signature.reach.items() if label in (row, key)
        ):
            raise refuse(
                node,
                "moves rows or keys of a matrix of tokens by tokens",
                "Compute it from positions, where it is read",
            )
        if (
            any(isinstance(f, Tokens) and f.keys is not None for f in facts_in)
            and signature.rows is None
            and row in signature.reach
        ):
            raise refuse(
                node,
                "scans the rows of a matrix of tokens by tokens",
                "Scan values with a row for each token",
            )
        if names_keys(node, operands, signature, self.propagation):
            raise refuse(
                node,
                "names keys by their place, which a chunk counts from its first",
                "Use amax for the value alone",
            )
        low = self.alignment.low(node) if node in self.alignment.heavy else None
        if low is None:
            low = self.first_row(node, operands, signature, row)
            if node in self.alignment.heavy:
                self.alignment.settle(node, low)
        facts = []
        for (_, output), carries in zip(slots, tokens):
            if not carries:
                facts.append(Summed())
                continue
            slot = (node, output)
            value = value_of(node) if output == -1 else value_of(node)[output]
            mark = self.propagation.rows(slot)
            is_key = kind in ("keysum", "mixed") and row is not None and output > 0 or kind == "keysum"
            excess = self.excess(node, value.shape, mark)
            start = 0 if is_key else low
            facts.append(Tokens(mark, self.propagation.key(slot), start, excess + start))
        edges = []
        for i, (operand, labels) in enumerate(zip(operands, signature.operands)):
            edges.append(self.edge(node, i, operand, labels, signature, row, key, low))
        if any(e.role == "halo" and e.reach.lo != e.reach.hi and row in signature.reach for e in edges):
            kind = "all"  # a scan along tokens that share their dimension
        if kind == "all":
            edges = [e if e.role == "whole" else Edge(e.operand, "halo", EVERYWHERE) for e in edges]
        self.facts[node] = tuple(facts) if slots[0][1] != -1 else facts[0]
        self.edges[node], self.kinds[node] = tuple(edges), kind

    def roles(self, node: Node, operands, signature: Signature) -> tuple[object, object, str]:
        """The label of rows, the label of keys, and what becomes of the rows."""
        if signature.reshape:
            return "reshape", None, "rows"
        propagation = self.propagation

        def label_at(slot: Slot, labels, mark: Mark | None):
            return None if mark is None else labels[mark.dim]

        outs = [
            (slot, labels, propagation.rows(slot), propagation.key(slot))
            for slot, labels in ((((node, o), ls) for o, ls in zip(outputs_of(node), signature.outputs)))
        ]
        ins = [
            (slot_of(a), labels, propagation.rows(slot_of(a)), propagation.key(slot_of(a)))
            for a, labels in zip(operands, signature.operands)
        ]
        if signature.rows is not None:
            marked = any(label_at(s, ls, m) == signature.rows for s, ls, m, _ in ins)
            if not marked:
                raise refuse(
                    node, "queries carry no tokens but keys do", "Chunk over the queries' own sequence"
                )
            return signature.rows, signature.keys, "mixed" if len(outs) == 3 else "rows"
        pair_out = next(
            ((label_at(s, ls, r), label_at(s, ls, k)) for s, ls, r, k in outs if k is not None), None
        )
        pair_in = next(
            ((label_at(s, ls, r), label_at(s, ls, k)) for s, ls, r, k in ins if k is not None), None
        )
        single = next((label_at(s, ls, r) for s, ls, r, k in outs if r is not None), None)
        has_out = any(r is not None for _, _, r, _ in outs)
        if pair_out is not None:
            if None in pair_out:
                return None, None, "all"
            return (*pair_out, "rows")
        if has_out:
            if single is None:
                return None, None, "all"
            if signature.keys is not None and single == signature.keys:
                raise refuse(
                    node, "normalises over tokens", "Only matrices of scores are normalised over their keys"
                )
            if pair_in is not None and single == pair_in[1]:
                if signature.contracts != "sum":
                    return None, None, "all"
                return pair_in[0], single, "keysum"
            return single, pair_in[1] if pair_in else None, "rows"
        contracted = (
            pair_in[0] if pair_in else next(label_at(s, ls, r) for s, ls, r, _ in ins if r is not None)
        )
        return (
            contracted,
            pair_in[1] if pair_in else None,
            "sum" if signature.contracts in ("sum", "picked") else "all",
        )

    def first_row(self, node: Node, operands, signature: Signature, row: object) -> int:
        """The token of output row 0: that of the widest operand whose rows it has."""
        if signature.reshape:
            fact = self.facts[operands[0]]
            return fact.lo if isinstance(fact, Tokens) else 0
        best, low = (-1, -1), 0
        for i, (operand, labels) in enumerate(zip(operands, signature.operands)):
            fact = self.facts[operand]
            if (
                not isinstance(fact, Tokens)
                or fact.rows.dim >= len(labels)
                or labels[fact.rows.dim] != row
                or row is None
            ):
                continue
            size = (
                operand in self.alignment.heavy,
                0 if operand in self.uniform else product(shape_of(operand)),
            )
            if size > best:
                best, low = size, fact.lo + offset(signature, row, i)
        return low

    def edge(self, node, i, operand, labels, signature: Signature, row, key, low: int) -> Edge:
        fact = self.facts[operand]
        if not isinstance(fact, Tokens):
            return Edge(operand, "whole")
        if signature.reshape or fact.keys is not None:
            return Edge(operand, "rows")
        label = labels[fact.rows.dim]
        if label is not None and label == row:
            shift = 0 if operand in self.uniform else offset(signature, row, i) + fact.lo - low
            reach = signature.reach.get(label, HERE) + Reach(shift, shift)
            if math.isinf(reach.hi - reach.lo) and not shift and fact.rows.outer == fact.rows.inner == 1:
                return Edge(operand, "carry", reach)
            return Edge(operand, "rows" if reach == HERE else "halo", reach)
        if label is not None and label == key:
            if fact.rows.inner != 1:
                raise refuse(
                    node,
                    "its keys are several rows for each token",
                    "Give them a dimension of their own, or make them before the layer",
                )
            return Edge(operand, "keys", signature.reach.get(key, EVERYWHERE))
        return Edge(operand, "halo", EVERYWHERE)


def is_now(size: Size, difference: torch.SymInt) -> bool:
    """Is a difference nothing at the lengths of now (``n - max(0, n - T) - T``)? Dynamo then guards on it;
    not on a size that is a number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number and bool(difference == 0)


PLACES = {
    torch.ops.aten.argmax.default: -1,
    torch.ops.aten.argmin.default: -1,
    torch.ops.aten.max.dim: 1,
    torch.ops.aten.min.dim: 1,
    torch.ops.aten.topk.default: 1,
    torch.ops.aten.sort.default: 1,
    torch.ops.aten.sort.stable: 1,
}  # op → its output of indices


def names_keys(
    node: Node, operands: tuple[Node, ...], signature: Signature, propagation: TokenPropagation
) -> bool:
    """Does an op give the places of keys to somebody?"""
    if node.target not in PLACES or propagation.key(slot_of(operands[0])) is None:
        return False
    place = PLACES[node.target]
    named = signature.operands[0][propagation.key(slot_of(operands[0])).dim] not in signature.outputs[0]
    return named and (place == -1 or any(user.args[1] == place and user.users for user in node.users))

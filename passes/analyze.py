"""Facts and reaches of every value, for forward and backward alike.

`TokenPropagation` finds the dimensions that carry tokens, and `Alignment` the token of row 0. The kind
of every node, and the edges to its operands, then follow from the labels that carry tokens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .alignment import Alignment, offset
from .ir import (
    EVERYWHERE,
    HERE,
    Analysis,
    Contraction,
    Edge,
    Fact,
    Kind,
    Label,
    Labels,
    Mark,
    Reach,
    Role,
    Shared,
    Signature,
    Size,
    Summed,
    Tokens,
    draws_random,
    is_equal,
    is_tensor,
    refuse,
    shape_of,
    tensor_operands,
    value_of,
)
from .key_ranges import key_ranges
from .mask_analysis.domains import Abstract
from .mask_analysis.evaluation import evaluate
from .phases import check_time
from .rules import communicates, merge_of, rule_of, scan_of
from .token_propagation import Signatures, Slot, TokenPropagation, has_tensors, outputs_of, product, slot_of


def analyze(
    graph: Graph,
    length: Size,
    input_marks: Mapping[Node, tuple[Mark, ...]],
    checkable: Container[Node] = (),
    known: Signatures | None = None,
    masks: Mapping[Node, Abstract] | None = None,
) -> Analysis:
    """Derive the facts, edges and kinds of every node.

    length       number of tokens T (int or symbol)
    input_marks  placeholder → the marks it carries
    checkable    placeholders of masks that may be checked in each call: keys may be left out under
                 conditions on them
    known        the signatures of this graph, if they were read before
    masks        the abstract values of its masks, if they were evaluated before

    Raises `CannotStream` at the first node whose rows cannot be determined.
    """
    propagation = TokenPropagation(graph, input_marks, known)
    masks = evaluate(graph, {n for n in input_marks if n in checkable}) if masks is None else masks
    reader = Reader(propagation, length, Alignment(graph, propagation, length))
    for node in graph.nodes:
        check_time()
        reader.visit(node)
    reaches, conditions = key_ranges(
        graph, reader.facts, reader.kinds, propagation.signatures, masks, checkable
    )
    return Analysis(length, reader.facts, reader.edges, reader.kinds, reaches, conditions)


@dataclass(frozen=True)
class Labelling:
    """The labels of rows and of keys in a node, and the kind of its result."""

    row: Label
    key: Label
    kind: Kind


class Reader:
    """One pass over the nodes in order: facts follow from marks, edges and kinds from labels."""

    def __init__(self, propagation: TokenPropagation, length: Size, alignment: Alignment):
        self.propagation, self.length, self.alignment = propagation, length, alignment
        self.facts: dict[Node, Fact | tuple[Fact, ...]] = {}
        self.edges: dict[Node, tuple[Edge, ...]] = {}
        self.kinds: dict[Node, Kind] = {}
        self.uniform = alignment.uniform

    def fact(self, node: Node, output: int = -1) -> Fact:
        fact = self.facts[node]
        return fact[output] if isinstance(fact, tuple) else fact

    def visit(self, node: Node) -> None:
        if node.op == "output":
            return
        if node.op in ("placeholder", "get_attr"):
            fact = self.placeholder(node)
            self.enter(node, fact, (), Kind.ROWS if isinstance(fact, Tokens) else Kind.WHOLE)
        elif node.target is operator.getitem:
            self.item(node)
        elif not has_tensors(node):  # a size
            self.enter(node, Shared(), (), Kind.WHOLE)
        elif not self.is_touched(node):
            self.without_tokens(node)
        else:
            self.check_propagation(node)
            self.derive(node, tensor_operands(node), self.propagation.signatures[node])

    def enter(self, node: Node, fact: Fact | tuple[Fact, ...], edges: tuple[Edge, ...], kind: Kind) -> None:
        self.facts[node], self.edges[node], self.kinds[node] = fact, edges, kind

    def item(self, node: Node) -> None:
        """Enter one output of a node that has several."""
        source, output = node.args[0], node.args[1]
        fact, kind = self.fact(source, output), self.kinds[source]
        if kind is Kind.MIXED:
            kind = Kind.ROWS if output == 0 else Kind.KEYSUM if isinstance(fact, Tokens) else Kind.SUM
        self.enter(node, fact, (Edge(source, Role.ROWS if isinstance(fact, Tokens) else Role.WHOLE),), kind)

    def is_touched(self, node: Node) -> bool:
        """Do operands or outputs of this node carry tokens?"""
        return any(self.propagation.of(a) for a in tensor_operands(node)) or any(
            self.propagation.marks.get((node, o)) for o in outputs_of(node)
        )

    def without_tokens(self, node: Node) -> None:
        """Enter a node without token dimensions, whose operands are shared values or sums. Raises
        `CannotStream` for one that draws random numbers."""
        if draws_random(node):
            raise refuse(
                node,
                "The backward cannot draw the random numbers of this operation again",
                "Draw them outside the compiled function and pass them as an input",
            )
        summed = any(isinstance(self.facts[a], Summed) for a in node.all_input_nodes if a in self.facts)
        fact = Summed() if summed else Shared()
        value = value_of(node)
        facts = tuple(fact for _ in value) if isinstance(value, (tuple, list)) else fact
        edges = tuple(Edge(a, Role.WHOLE) for a in tensor_operands(node))
        self.enter(node, facts, edges, Kind.WHOLE)

    def check_propagation(self, node: Node) -> None:
        """Refuse a node whose rows cannot be followed. It has no rule that fits, loses tokens, reads rows in
        two orders, reads a matrix both by rows and by columns, or has more than two token dimensions."""
        if node in self.propagation.missing:
            raise self.propagation.missing[node]
        if node in self.propagation.lost:
            raise refuse(
                node,
                self.propagation.lost[node],
                "Keep the token dimension separate from the other dimensions",
            )
        if node in self.propagation.crossed:
            raise refuse(
                node,
                "This operation reads rows of tokens in two different orders",
                "Bring both to the same order before they meet",
            )
        if self.propagation.turned(node, self.propagation.signatures[node]):
            raise refuse(
                node,
                "This operation reads a [tokens, tokens] matrix by columns that is read by rows elsewhere",
                "Compute the matrix once for what reads its rows, and once for what reads its columns",
            )
        if any(len(self.propagation.marks.get((node, output), {})) > 2 for output in outputs_of(node)):
            raise refuse(
                node,
                "This value has three token dimensions, and at most two (queries and keys) are supported",
                "Rewrite it with one dimension of queries and one of keys",
            )

    def placeholder(self, node: Node) -> Fact:
        if not is_tensor(node) or not self.propagation.of(node):
            return Shared()
        slot = (node, -1)
        rows, key = self.propagation.mark(slot), self.propagation.key(slot)
        if (
            key is not None
        ):  # a stored mask, perhaps for more tokens than there are: it is sliced before it is read
            return Tokens(rows, key)
        return self.located(node, node.meta["val"].shape[rows.dim], rows, key, self.alignment.low(node) or 0)

    def located(self, node: Node, size: Size, mark: Mark, key: Mark | None, low: int) -> Tokens:
        """Build the fact of a value whose row 0 is of token ``low``. Raises `CannotStream` if its rows are
        not T plus a constant."""
        rows, excess, rest = mark.located(size, self.length)
        if isinstance(rest, torch.SymInt) and not is_equal(rest, 0) and not is_now(size, rest, rows.block):
            raise refuse(
                node,
                f"This value has {size} rows, which is not the number of tokens plus a constant",
                "Choose a sequence length that the split or pooling divides evenly",
            )
        return Tokens(rows, key, low, low + excess)

    def derive(self, node: Node, operands: tuple[Node, ...], signature: Signature) -> None:
        if signature.reshape and not isinstance(self.facts[operands[0]], Tokens):
            raise refuse(
                node,
                "This reshape creates the token dimension",
                "Nothing to do for image patches: the patch embedding runs unchunked",
            )
        labels = self.labelling(node, operands, signature)
        self.check_matrices(node, operands, signature, labels)
        sizes = self.sizes_where_shared(node, operands, signature, labels.row)
        moved = any(signature.offsets.get(labels.row, ()))
        if (len(sizes) > 1 and signature.blocks == (1, 1)) or sizes and moved:
            raise refuse(
                node,
                "This operation cuts or pads a dimension that holds more than the tokens of one sequence",
                "Reshape it first, so that the tokens have a dimension of their own",
            )
        low = self.alignment.low(node) if node in self.alignment.from_features else None
        if low is None:
            low = self.first_row(node, operands, signature, labels.row)
            if node in self.alignment.from_features:
                self.alignment.fix(node, low)
        edges = [
            self.edge(node, i, operand, dims, signature, labels, low)
            for i, (operand, dims) in enumerate(zip(operands, signature.operands))
        ]
        kind = labels.kind
        halos = any(e.role is Role.HALO and e.reach.lo != e.reach.hi for e in edges)
        if (halos and not rule_of(node).around or sizes) and labels.row in signature.reach:
            kind = Kind.ALL  # no range of tokens holds the rows that it reads, or no rule reads one
        if labels.row in signature.placed and communicates(node):
            kind = Kind.ALL  # other processes exchange all rows at once
        if kind is Kind.ALL:
            edges = [e if e.role is Role.WHOLE else Edge(e.operand, Role.HALO, EVERYWHERE) for e in edges]
        facts = tuple(self.output_fact(node, o, labels, low) for o in outputs_of(node))
        several = isinstance(value_of(node), (tuple, list))
        self.enter(node, facts if several else facts[0], tuple(edges), kind)

    def sizes_where_shared(
        self, node: Node, operands: tuple[Node, ...], signature: Signature, row: Label
    ) -> set[int]:
        """Collect the sizes of the row label's dimensions where tokens share a dimension. They share it with
        other sequences, or each token has several rows. Returns no sizes otherwise."""
        slots = [*zip(map(slot_of, operands), signature.operands)]
        slots += [((node, o), labels) for o, labels in zip(outputs_of(node), signature.outputs)]
        found = [(slot, labels.index(row)) for slot, labels in slots if row in labels]
        marks = [self.propagation.marks.get(slot, {}).get(dim) for slot, dim in found]
        if all(mark is None or mark.step == 1 for mark in marks):
            return set()
        return {shape_of(node, None if output == -1 else output)[dim] for (node, output), dim in found}

    def check_matrices(
        self, node: Node, operands: tuple[Node, ...], signature: Signature, labels: Labelling
    ) -> None:
        """Refuse operations on keys, or on matrices of tokens by tokens, that a chunk cannot compute."""
        facts = [fact for a in operands if isinstance(fact := self.facts[a], Tokens)]
        if labels.key is not None and any((f.lo, f.hi) != (0, 0) for f in facts):
            raise refuse(
                node,
                "The keys of this product are a piece of the sequence that does not begin with its first "
                "token",
                "Where a loop goes over blocks of tokens, pad to whole blocks; otherwise attend over all "
                "tokens, and slice the result",
            )
        if any(f.keys is not None for f in facts):
            if labels.kind is not Kind.ALL and self.reads_other_rows(operands, signature, labels.row):
                raise refuse(
                    node,
                    "This operation moves rows of a [tokens, tokens] matrix",
                    "Move the rows of the queries, before the product",
                )
            moved = [signature.reach[label] for label in (labels.row, labels.key) if label in signature.reach]
            if any(r.lo == r.hi != 0 for r in moved):
                raise refuse(
                    node,
                    "This operation shifts the rows or columns of a [tokens, tokens] matrix",
                    "Compute the matrix from token positions where it is used",
                )
            if signature.rows is None and labels.row in signature.reach:
                raise refuse(
                    node,
                    "This scan runs along the rows of a [tokens, tokens] matrix",
                    "Scan a value that has one row per token",
                )

    def reads_other_rows(self, operands: tuple[Node, ...], signature: Signature, row: Label) -> bool:
        """Do the rows of a [tokens, tokens] operand run along another label than the rows of the result?"""
        if signature.reshape:
            return False
        found = [(self.facts[a], dims) for a, dims in zip(operands, signature.operands)]
        matrices = [(f, dims) for f, dims in found if isinstance(f, Tokens) and f.keys is not None]
        return any(dims[f.rows.dim] not in (row, None) for f, dims in matrices)

    def output_fact(self, node: Node, output: int, labels: Labelling, low: int) -> Fact:
        """Build the fact of one output. Its row 0 is of token ``low``; of token 0, if its rows are keys."""
        slot = (node, output)
        mark = self.propagation.rows(slot)
        if not self.propagation.marks.get(slot) or mark is None:
            return Summed()
        mixed = labels.kind is Kind.MIXED and labels.row is not None and output > 0
        start = 0 if mixed or labels.kind is Kind.KEYSUM else low
        value = value_of(node) if output == -1 else value_of(node)[output]
        return self.located(node, value.shape[mark.dim], mark, self.propagation.key(slot), start)

    def labelling(self, node: Node, operands: tuple[Node, ...], signature: Signature) -> Labelling:
        """Choose the labels of rows and keys in a node, and its kind."""
        if signature.reshape:
            return Labelling("reshape", None, Kind.ROWS)
        outs = [self.labelled((node, o), ls) for o, ls in zip(outputs_of(node), signature.outputs)]
        ins = [self.labelled(slot_of(a), ls) for a, ls in zip(operands, signature.operands)]
        if signature.rows is not None:
            found = {label for label, _ in filter(None, ins)}
            if signature.rows in found:
                return Labelling(signature.rows, signature.keys, Kind.MIXED if len(outs) == 3 else Kind.ROWS)
            row, of_mask = next(iter(found)), {signature.rows, signature.keys}
            needed = [*signature.outputs, *(o for o in signature.operands if not of_mask.issubset(o))]
            if len(found) > 1 or any(row not in labels for labels in needed):
                raise refuse(
                    node,
                    "The keys or heads of this attention are tokens of the sequence, but its queries are not",
                    "Pass a mask of the keys in place of is_causal, or attend from queries of the sequence",
                )
            return Labelling(row, None, Kind.ROWS)  # each token has an attention of its own
        pair = next((pair for pair in filter(None, ins) if pair[1] is not NO_KEYS), None)
        if any(outs):
            return self.kept(node, signature, list(filter(None, outs)), list(filter(None, ins)), pair)
        row, key = pair or next(filter(None, ins))
        added = signature.contracts in (Contraction.SUM, Contraction.PICKED) or row in signature.sums
        summable = added or merge_of(node) is not None
        return Labelling(row, None if key is NO_KEYS else key, Kind.SUM if summable else Kind.ALL)

    def labelled(self, slot: Slot, labels: Labels) -> tuple[Label, Label] | None:
        """Return the labels of a value's rows and keys (or `NO_KEYS`), or None if it has no tokens."""
        rows, keys = self.propagation.rows(slot), self.propagation.key(slot)
        if rows is None:
            return None
        return labels[rows.dim], NO_KEYS if keys is None else labels[keys.dim]

    def kept(
        self,
        node: Node,
        signature: Signature,
        outs: list[tuple[Label, Label]],
        ins: list[tuple[Label, Label]],
        pair: tuple[Label, Label] | None,
    ) -> Labelling:
        """Choose the labels and the kind of a node whose outputs have tokens.

        pair  the labels of the first operand with keys
        """
        pair_out = next((out for out in outs if out[1] is not NO_KEYS), None)
        if pair_out is not None:
            return Labelling(None, None, Kind.ALL) if None in pair_out else Labelling(*pair_out, Kind.ROWS)
        single = outs[0][0]
        if single in signature.indexed:
            added = next((row for row, _ in ins if row in signature.sums), None)
            return Labelling(None, None, Kind.ALL) if added is None else Labelling(added, single, Kind.KEYSUM)
        if single is None:
            return Labelling(None, None, Kind.ALL)
        if signature.keys is not None and single == signature.keys:
            raise refuse(
                node,
                "This operation normalises over the token dimension, which needs all tokens at once",
                "Normalise over features, or attention scores over their keys",
            )
        if pair is not None and single == pair[1]:
            if signature.contracts is not Contraction.SUM and pair[0] not in signature.sums:
                return Labelling(None, None, Kind.ALL)
            return Labelling(pair[0], single, Kind.KEYSUM)
        return Labelling(single, pair[1] if pair else None, Kind.ROWS)

    def first_row(self, node: Node, operands, signature: Signature, row: object) -> int:
        """Find the token of output row 0. It follows from the widest operand that has the output's rows;
        operands with features, or computed from such, come first."""
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
                operand in self.alignment.from_features,
                0 if operand in self.uniform else product(shape_of(operand)),
            )
            if size > best:
                best, low = size, fact.lo + offset(signature, row, i)
        return low

    def edge(
        self,
        node: Node,
        i: int,
        operand: Node,
        dims: Labels,
        signature: Signature,
        labels: Labelling,
        low: int,
    ) -> Edge:
        """Build the edge from a node, whose row 0 is of token ``low``, to its operand number ``i``."""
        fact = self.facts[operand]
        if not isinstance(fact, Tokens):
            return Edge(operand, Role.WHOLE)
        if signature.reshape or fact.keys is not None:
            return Edge(operand, Role.ROWS)
        label = dims[fact.rows.dim]
        if label is not None and label == labels.row:
            shift = 0 if operand in self.uniform else offset(signature, label, i) + fact.lo - low
            reach = signature.reach.get(label, HERE) + Reach(shift, shift)
            alone = not shift and fact.rows.step == 1
            if math.isinf(reach.hi - reach.lo) and alone and scan_of(node) is not None:
                return Edge(operand, Role.CARRY, reach)
            return Edge(operand, Role.ROWS if reach == HERE else Role.HALO, reach)
        if label is not None and label == labels.key:
            if fact.rows.inner != 1 or fact.rows.block != 1:
                raise refuse(
                    node,
                    "Each token has several keys along one dimension",
                    "Give the keys of a token a dimension of their own, or compute them before the layer",
                )
            if fact.rows.outer != 1:
                raise refuse(
                    node,
                    "Several sequences along one dimension read one another",
                    "Give sequences a dimension of their own; attention merges by log-sum-exps",
                )
            return Edge(operand, Role.KEYS, signature.reach.get(label, EVERYWHERE))
        return Edge(operand, Role.HALO, EVERYWHERE)


NO_KEYS: Label = object()  # in place of the label of keys, where a value has none


def is_now(size: Size, difference: torch.SymInt, block: int) -> bool:
    """Is a difference zero at the current lengths (``n - max(0, n - T) - T``)? Dynamo then guards on it. The
    answer is no for a plain number of tokens. A number of blocks is plain where a loop over them is unrolled:
    Dynamo guards on it anyway."""
    plain = not isinstance(size, torch.SymInt) or size.node.expr.is_number
    return (block > 1 or not plain) and bool(difference == 0)

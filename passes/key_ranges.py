"""Ranges of keys that a row can reach, as masks prove them, and the conditions of these proofs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from .ir import (
    EVERYWHERE,
    Condition,
    Contraction,
    DocumentMask,
    EveryRowHasVisibleKey,
    Fact,
    KeyMask,
    Kind,
    Mark,
    MaskedOutsideBand,
    PositionsIncrease,
    Reach,
    Signature,
    Tokens,
    ancestors,
    arguments,
    is_tensor,
    is_view,
    parts_of,
    shape_of,
    tensor_operands,
)
from .mask_analysis.domains import EMPTY, Abstract, Band, is_empty_outside, is_zero_outside, stored_mask
from .phases import check_time
from .rules import form_of, merge_of, rule_of
from .rules.facets import Form
from .rules.scans import state_of_no_rows
from .token_propagation import has_tensors

Facts = Mapping[Node, Fact | tuple[Fact, ...]]
IsCheap = Callable[[Node, int], bool]  # (mask, entries of one stored mask) → may each call be checked for it?
TEMPORARY = 2  # values on the way to a checked mask may be twice as large as it: two halves put together


@dataclass(frozen=True)
class Proof:
    """The range of keys that a mask leaves to a row, and the conditions on a call for it."""

    reach: Reach
    conditions: tuple[Condition, ...] = ()


UNPROVED = Proof(EVERYWHERE)


def key_ranges(
    graph: Graph,
    facts: Facts,
    kinds: Mapping[Node, Kind],
    signatures: Mapping[Node, Signature],
    masks: Mapping[Node, Abstract],
    checkable: Container[Node],
) -> tuple[dict[Node, Reach], tuple[Condition, ...]]:
    """Find the keys that a row can reach, for every node that relates rows to keys, and the conditions.

    masks      the abstract values of `mask_analysis`
    checkable  placeholders of masks that may be checked in each call
    """
    is_cheap = functools.cache(lambda mask, entries: is_cheap_to_check(mask, entries, checkable))
    nodes = [
        n for n in graph.nodes if signatures.get(n) is not None and kinds.get(n, Kind.WHOLE) is not Kind.WHOLE
    ]
    proofs, ranges = [], {}
    for node in nodes:
        if signatures[node].rows is not None:
            proof = proof_of_attention(node, masks, is_cheap)
            own = signatures[node].reach[signatures[node].keys]
            ranges[node] = Reach(max(own.lo, proof.reach.lo), min(own.hi, proof.reach.hi))
            proofs.append(proof)
    scores = [
        n
        for n in graph.nodes
        if n in facts and has_keys(n, facts) and signatures.get(n) is not None and n not in ranges
    ]
    if scores:
        found = proofs_of_scores(scores, facts, signatures, masks, is_cheap)
        found += proofs_of_outputs(graph, facts, masks, is_cheap)
        proofs += [proof for proof, _ in found]
        reaches = [*ranges.values(), *(reach for _, reach in found)]
        joined = functools.reduce(Reach.join, reaches) if reaches else EVERYWHERE
        # A sweep has one range of keys, so it must also hold those that fused attention beside scores reads.
        ranges.update(dict.fromkeys((*ranges, *scores), joined))
    pruned = any(reach != EVERYWHERE for reach in ranges.values())
    return ranges, conditions_of(proofs) if pruned else ()


def proof_of_attention(node: Node, masks: Mapping[Node, Abstract], is_cheap: IsCheap) -> Proof:
    """Return the proof that the mask of a fused attention gives."""
    mask = arguments(node).get("mask")
    if not isinstance(mask, Node):
        return UNPROVED
    band = masks.get(mask) or stored_mask(mask)
    return proof_of(band, is_cheap) if is_empty_outside(band) else UNPROVED


def proofs_of_scores(
    scores: Iterable[Node],
    facts: Facts,
    signatures: Mapping[Node, Signature],
    masks: Mapping[Node, Abstract],
    is_cheap: IsCheap,
) -> list[tuple[Proof, Reach]]:
    """Prove a range of keys for every exit of the score matrices. Returns a proof for each exit, and its
    reach over the node's own rows and keys. Score matrices that feed one another share one range. It may
    be narrowed only if every exit (a softmax over keys, a product that contracts rows or keys) is proved
    empty outside the band."""
    found = []
    for node in scores:
        check_time()
        operands = exits(node, facts, signatures[node])
        if operands is None:
            continue
        origins = [unfolded(a, facts, masks) for a in operands]
        bands = ((facts[a], band) for a in origins if isinstance(band := masks.get(a), Band))
        fact, band = next(
            ((f, b) for f, b in bands if ignores_outside(b, node, signatures[node])), (None, None)
        )
        if band is None or not isinstance(fact, Tokens) or fact.keys is None:
            found.append((UNPROVED, EVERYWHERE))
        else:
            proof = proof_of(band, is_cheap)
            found.append((proof, along(proof.reach, band, fact.rows, fact.keys)))
    return found


def proofs_of_outputs(
    graph: Graph, facts: Facts, masks: Mapping[Node, Abstract], is_cheap: IsCheap
) -> list[tuple[Proof, Reach]]:
    """Prove a range of keys for every output that is a matrix of rows and keys. Such an output is the
    gradient of a table. Its entries that no chunk writes have to be zero. Returns pairs as
    `proofs_of_scores` does."""
    found = []
    output = next((n for n in reversed(graph.nodes) if n.op == "output"), None)
    for node in () if output is None else output.all_input_nodes:
        fact = facts.get(node)
        if node.op == "placeholder" or not isinstance(fact, Tokens) or fact.keys is None:
            continue
        source = unfolded(node, facts, masks)
        band, whole = masks.get(source), facts[source]
        if is_zero_outside(band) and isinstance(whole, Tokens) and whole.keys is not None:
            proof = proof_of(band, is_cheap)
            found.append((proof, along(proof.reach, band, whole.rows, whole.keys)))
        else:
            found.append((UNPROVED, EVERYWHERE))
    return found


def proof_of(band: Abstract, is_cheap: IsCheap) -> Proof:
    """Return the reach of a band and its conditions, or `UNPROVED` if these are not cheap to check."""
    if not isinstance(band, Band) or band.visibility_masks is None:
        return UNPROVED
    reach = Reach(band.lo, band.hi)
    needed: list[Condition] = [
        PositionsIncrease(a) if isinstance(a, DocumentMask) else MaskedOutsideBand((a,), reach)
        for a in band.assumes
    ]
    if band.visibility_masks:
        needed.append(EveryRowHasVisibleKey(band.visibility_masks, reach))
    cheap = all(is_cheap(node, entries) for condition in needed for node, entries in read_by(condition))
    return Proof(reach, tuple(needed)) if cheap else UNPROVED


def read_by(condition: Condition) -> Iterator[tuple[Node, int]]:
    """Yield each node that a check of a condition reads, and the entries of one mask (0: not stored)."""
    if isinstance(condition, PositionsIncrease):
        yield from ((node, 0) for node in condition.nodes)
        return
    for mask in condition.key_masks:
        yield from ((node, mask.entries if isinstance(mask, KeyMask) else 0) for node in mask.nodes)


def conditions_of(proofs: Iterable[Proof]) -> tuple[Condition, ...]:
    """Collect the conditions of all proofs that narrow a range, each once. Conditions of equal ranges are
    placed together."""
    by_reach: dict[Reach, dict[Condition, None]] = {}
    for proof in proofs:
        if proof.reach != EVERYWHERE:
            by_reach.setdefault(proof.reach, {}).update(dict.fromkeys(proof.conditions))
    return tuple(condition for found in by_reach.values() for condition in found)


def along(reach: Reach, band: Band, rows: Mark, keys: Mark) -> Reach:
    """Return the reach of a band over the rows and keys of a value. It is transposed where the keys of the
    band are the rows of the value. Conditions describe masks as they are stored, so only a band without
    conditions is transposed."""
    if (band.row, band.key) == (rows.dim, keys.dim):
        return reach
    turned = (band.key, band.row) == (rows.dim, keys.dim) and not band.assumes and not band.visibility_masks
    return -reach if turned else EVERYWHERE


def is_cheap_to_check(mask: Node, entries: int, checkable: Container[Node]) -> bool:
    """Can a mask be computed from checkable inputs, without values much larger than the mask? The limit is
    `TEMPORARY` times the largest input or the mask itself. For a stored mask of ``entries`` entries, the
    mask does not count, and the largest input must have as many entries."""
    needed = ancestors([mask])
    given = [n for n in needed if n.op == "placeholder" and is_tensor(n)]
    stored = max((math.prod(shape_of(n)) for n in given), default=0)
    size = stored if entries else max(stored, math.prod(shape_of(mask)))
    computed = [n for n in needed if n.op == "call_function" and has_tensors(n) and not is_view(n)]
    return (
        bool(given)
        and stored >= entries
        and all(n in checkable for n in given)
        and all(is_tensor(n) and math.prod(shape_of(n)) <= TEMPORARY * size for n in computed)
    )


def unfolded(node: Node, facts: Facts, masks: Mapping[Node, Abstract]) -> Node:
    """Find the score matrix with a band that a node is a view or copy of, with all its entries. A band has
    two dimensions, and is lost where rows are folded with heads. The row and the key of each entry stay
    the same. Returns the node itself if there is no such matrix."""
    start = node
    while not isinstance(masks.get(node), Band):
        source = node.args[0] if is_view(node) or form_of(node) is Form.COPY else None
        if not isinstance(source, Node) or math.prod(shape_of(source)) != math.prod(shape_of(node)):
            return start
        fact = facts.get(source)
        if not isinstance(fact, Tokens) or fact.keys is None:
            return start
        node = source
    return node


def has_keys(node: Node, facts: Facts) -> bool:
    """Does the node, or one of its operands, have a row and a key dimension? Scores, probabilities and masks
    have both."""
    flat = [f for n in (node, *tensor_operands(node)) for f in parts_of(facts[n])]
    return any(isinstance(f, Tokens) and f.keys is not None for f in flat)


def exits(node: Node, facts: Facts, signature: Signature) -> list[Node] | None:
    """List the score operands through which a node could read entries outside the band. Returns None if the
    node is no exit."""
    pairs = [a for a in tensor_operands(node) if isinstance(f := facts[a], Tokens) and f.keys is not None]
    if not pairs:
        return None
    if signature.keys is not None:  # a softmax reads a whole row; its gradient a whole row of products
        return pairs
    if signature.reach:  # a scan over keys also reads those that are left out
        return pairs
    out = facts[node]
    keeps = isinstance(out, Tokens) and out.keys is not None
    return None if keeps else pairs


def ignores_outside(band: Band, node: Node, signature: Signature) -> bool:
    """Does the node ignore entries outside the band: empty scores in a softmax, zeros in a sum?"""
    if counts_keys(node, signature):
        return False
    if rule_of(node).visible_only:
        return band.outside in EMPTY
    return is_zero_outside(band) and adds_up(node, signature)


def counts_keys(node: Node, signature: Signature) -> bool:
    """Does a node take or return places of keys, which are counted from the first key of all?"""
    places = rule_of(node).positions
    read = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    return bool(signature.indexed) or any(place == -1 or place in read for place in places)


def adds_up(node: Node, signature: Signature) -> bool:
    """Can zero entries be skipped without changing the result? They can if the node sums its operands along
    rows or keys, if it is a merge or a scan that begins with zero, or if it takes missing entries as zero."""
    rule, merge = rule_of(node), merge_of(node)
    if rule.by_place or merge is not None:
        return merge is None or merge.identity == 0
    kept = {label for labels in signature.outputs for label in labels}
    contracted = {label for labels in signature.operands for label in labels if label is not None} - kept
    sums = signature.contracts is Contraction.SUM or contracted <= signature.sums
    return sums and rule.linear is not None and state_of_no_rows(node) == 0

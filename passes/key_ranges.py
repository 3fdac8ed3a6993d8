"""Which keys a row can reach: what the masks prove, and under which conditions."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping

from torch.fx import Graph, Node

from .ir import (
    EVERYWHERE,
    Condition,
    DocumentMask,
    EveryRowHasVisibleKey,
    Fact,
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
from .mask_analysis.domains import EMPTY, Abstract, Band, is_zero_outside, stored_mask
from .phases import check_time
from .rules import rule_of
from .rules.scans import state_of_no_rows
from .token_propagation import has_tensors

Facts = Mapping[Node, Fact | tuple[Fact, ...]]


def key_ranges(
    graph: Graph,
    facts: Facts,
    kinds: Mapping[Node, Kind],
    signatures: Mapping[Node, Signature],
    bands: Mapping[Node, Abstract],
    checkable: Container[Node],
) -> tuple[dict[Node, Reach], tuple[Condition, ...]]:
    """For every node that meets keys: the keys a row can reach, as far as the masks prove it; and the
    conditions of those proofs.

    Score matrices that feed one another share one range, and it may be narrowed only if every way out of them
    (a softmax over
    keys, a product that contracts rows or keys) is proved empty outside the band.
    """
    ranges: dict[Node, Reach] = {}
    conditions: dict[Reach, tuple[Condition, ...]] = {}
    checked_light = functools.cache(lambda mask, cells: is_light(mask, cells, checkable))

    def proved(band: object) -> Reach:
        """The reach of a band, if what it rests on can be checked."""
        if not isinstance(band, Band) or band.visibility_masks is None:
            return EVERYWHERE
        reach = Reach(band.lo, band.hi)
        needed: list[Condition] = [
            PositionsIncrease(a) if isinstance(a, DocumentMask) else MaskedOutsideBand((a,), reach)
            for a in band.assumes
        ]
        needed += [EveryRowHasVisibleKey(band.visibility_masks, reach)] * bool(band.visibility_masks)
        masks = [
            (s.node, s.entries) for c in needed if not isinstance(c, PositionsIncrease) for s in c.key_masks
        ]
        masks += [(node, 0) for c in needed if isinstance(c, PositionsIncrease) for node in c.nodes]
        if not all(checked_light(node, cells) for node, cells in masks):
            return EVERYWHERE
        conditions[reach] = tuple(dict.fromkeys((*conditions.get(reach, ()), *needed)))
        return reach

    def left_by(leaf: Node, reader: Node) -> Reach | None:
        """The reach of a score operand that is proved empty outside a band, as its reader sees it."""
        band, fact = bands.get(leaf), facts[leaf]
        if not isinstance(band, Band) or not closes(band, reader):
            return None
        assert isinstance(fact, Tokens) and fact.keys is not None
        return along(proved(band), band, fact.rows, fact.keys)

    for node in graph.nodes:
        signature = signatures.get(node)
        if signature is None or node not in kinds or kinds[node] is Kind.WHOLE:
            continue
        if signature.rows is not None:
            reach = signature.reach[signature.keys]
            mask = arguments(node).get("mask")
            if mask is not None:
                band = bands.get(mask) or stored_mask(mask)
                left = proved(band) if isinstance(band, Band) and band.outside in EMPTY else EVERYWHERE
                reach = Reach(max(reach.lo, left.lo), min(reach.hi, left.hi))
            ranges[node] = reach
    paired = [
        n
        for n in graph.nodes
        if n in facts and meets_pair(n, facts) and signatures.get(n) is not None and n not in ranges
    ]
    if paired:
        found = list(ranges.values())  # masks of fused attention need the keys that it reads
        for node in paired:
            check_time()
            leaves = exits(node, facts, signatures[node])
            if leaves is None:
                continue
            found.append(next((r for a in leaves if (r := left_by(a, node)) is not None), EVERYWHERE))
        reach = functools.reduce(Reach.join, found) if found else EVERYWHERE
        for node in paired:
            ranges[node] = reach
    pruned = any(reach != EVERYWHERE for reach in ranges.values())
    return ranges, tuple(
        c for reach, found in conditions.items() for c in found if pruned and reach != EVERYWHERE
    )


def along(reach: Reach, band: Band, rows: Mark, keys: Mark) -> Reach:
    """The reach of a band over the rows and keys of a value; transposed, where its keys are the rows.

    Conditions speak of masks as they are stored, so that only what needs none is transposed.
    """
    if (band.row, band.key) == (rows.dim, keys.dim):
        return reach
    turned = (band.key, band.row) == (rows.dim, keys.dim) and not band.assumes and not band.visibility_masks
    return -reach if turned else EVERYWHERE


def is_light(mask: Node, cells: int, checkable: Container[Node]) -> bool:
    """Is a mask made of inputs that may be checked, all the way from them no larger than itself, or, of so
    many cells, than what is stored?"""
    known = ancestors([mask])
    given = [n for n in known if n.op == "placeholder" and is_tensor(n)]
    stored = max((math.prod(shape_of(n)) for n in given), default=0)
    size = stored if cells else max(stored, math.prod(shape_of(mask)))
    made = [n for n in known if n.op == "call_function" and has_tensors(n) and not is_view(n)]
    return (
        bool(given)
        and stored >= cells
        and all(n in checkable for n in given)
        and all(is_tensor(n) and math.prod(shape_of(n)) <= 2 * size for n in made)
    )


def meets_pair(node: Node, facts: Facts) -> bool:
    flat = [f for n in (node, *tensor_operands(node)) for f in parts_of(facts[n])]
    return any(isinstance(f, Tokens) and f.keys is not None for f in flat)


def exits(node: Node, facts: Facts, signature: Signature) -> list[Node] | None:
    """The score operands of a node through which entries outside the band could be seen, or None if it is no
    way out."""
    pairs = [a for a in tensor_operands(node) if isinstance(f := facts[a], Tokens) and f.keys is not None]
    if not pairs:
        return None
    if signature.keys is not None:  # a softmax reads a whole row; its gradient a whole row of products
        return pairs
    if signature.reach:  # a scan over keys reads those that are left out
        return pairs
    out = facts[node]
    keeps = isinstance(out, Tokens) and out.keys is not None
    return None if keeps else pairs


def closes(band: Band, node: Node) -> bool:
    """Is what lies outside harmless to this reader: empty to a softmax, zero to a sum?"""
    if rule_of(node).visible_only:
        return band.outside in EMPTY
    return is_zero_outside(band) and state_of_no_rows(node) == 0

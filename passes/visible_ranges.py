"""Attention reads ranges of keys in place of masks that show each row consecutive keys.

Padding and packed documents are such masks, alone or beside causality. With a mask, a kernel computes all
scores and then hides some; by ranges, it computes those that a row sees. What a mask hides must be known
completely, and each call checks that the keys that it shows are consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from torch.fx import Graph, Node

from .ir import (
    Condition,
    DocumentMask,
    KeyMask,
    Mark,
    PositionsIncrease,
    Ranges,
    Size,
    VisibleRanges,
    arguments,
    hint,
    is_equal,
    shape_of,
    value_of,
)
from .key_ranges import is_cheap_to_check
from .mask_analysis.domains import Abstract, Band, is_empty_outside
from .rules import form_of
from .rules.facets import Form
from .token_propagation import TokenPropagation


def read_ranges(
    graph: Graph,
    propagation: TokenPropagation,
    length: Size,
    masks: Mapping[Node, Abstract],
    given: Node,
    checkable: Container[Node],
) -> Ranges:
    """Let attention read ranges of keys from an input of the graph where its mask shows such ranges.

    masks      the abstract values of `mask_analysis`
    given      the input
    checkable  placeholders of masks that may be checked in each call
    """
    slots, conditions = dict[VisibleRanges, int](), dict[Condition, None]()
    for node in graph.nodes:
        if form_of(node) not in (Form.ATTENTION, Form.ATTENTION_BACKWARD):
            continue
        band = known_band(arguments(node)["mask"], masks)
        if band is None:
            continue
        visible = VisibleRanges(band.key_masks or (), band.hi > 0, band.outside == "min")
        if not has_tokens_as_rows(node, propagation, length, visible.same_for_all_rows):
            continue
        if not all(is_cheap_to_check(n, 0, checkable) for n in visible.nodes):
            continue
        slot = slots.setdefault(visible, len(slots))
        conditions.update((PositionsIncrease(a), None) for a in band.assumes if isinstance(a, DocumentMask))
        schema = [a.name for a in node.target._schema.arguments]
        new = arguments(node) | dict(mask=None, causal=band.hi == 0, ranges=given, slot=slot)
        node.args = tuple(new[name] for name in schema[: schema.index("kernel")])
    return Ranges(tuple(slots), tuple(conditions))


def has_tokens_as_rows(node: Node, propagation: TokenPropagation, length: Size, any_keys: bool) -> bool:
    """Are queries of an attention node the tokens, each with one row, and so are its keys?

    any_keys  keys may also be those of another sequence, which are read whole
    """
    query, key = (arguments(node)[name] for name in ("query", "key"))
    if any_keys and not propagation.of(key):
        return is_token_row(query, propagation, length)
    return all(is_token_row(n, propagation, length) for n in (query, key))


def is_token_row(node: Node, propagation: TokenPropagation, length: Size) -> bool:
    """Has a value ``[B, H, T, D]`` one row for each token?"""
    return list(propagation.of(node).values()) == [Mark(2)] and is_equal(value_of(node).shape[2], length)


def known_band(mask: object, masks: Mapping[Node, Abstract]) -> Band | None:
    """Return the band of an additive mask if all that hides keys in it is known; otherwise None. That may be
    causality, masks of keys, and documents."""
    if not isinstance(mask, Node):
        return None
    band = masks.get(mask)
    if not is_empty_outside(band) or not band.zero_inside or not band.key_masks:
        return None
    whole = (band.row, band.key) == (2, 3) and band.lo == -math.inf and band.hi in (0, math.inf)
    if not whole or not all(isinstance(a, DocumentMask) for a in band.assumes):
        return None
    return band if all(shows_ranges(key_mask, band, mask) for key_mask in band.key_masks) else None


def shows_ranges(mask: KeyMask | DocumentMask, band: Band, whole: Node) -> bool:
    """Can a mask be read as a range of keys for each row, the same for all heads?

    whole  the mask of attention that it is a part of, ``[B or 1, H or 1, T, S]``
    """
    if isinstance(mask, DocumentMask):
        if len(mask.ordered) > (band.hi == 0) or mask.key_masks != () or mask.negated:
            return False
    elif mask.row is not None:
        return False
    sequences, heads = value_of(whole).shape[:2]
    several = [size for size in mask.others if hint(size) > 1]
    if is_equal(heads, 1):
        return all(is_equal(size, sequences) for size in several)
    return not several or all(len(shape_of(n)) == 4 and shape_of(n)[1] == 1 for n in mask.nodes)

"""The keys that masks show each row, as ranges, computed in every call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..passes.ir import DocumentMask, KeyMask, VisibleRanges
from .mask_conditions import by_query, consistent, pairs_of, visible


def ranges_of(condition: VisibleRanges, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the range of keys that masks show each row, and whether masks are such ranges.

    Ranges are ``[masks, rows, 2]``, or one row for all: the first key, and the one behind the last. Rows
    without keys have two zeros.

    values  of the nodes that the condition names
    """
    given = iter(values)
    read = [(mask, [next(given) for _ in mask.nodes]) for mask in condition.key_masks]
    documents = [(mask, own) for mask, own in read if isinstance(mask, DocumentMask)]
    key_masks = [(mask, own[0]) for mask, own in read if isinstance(mask, KeyMask)]
    first, last, holds = runs_of(documents, condition.ahead) if documents else whole(*key_masks[0], condition)
    stop = last + 1
    if key_masks:
        shown = functools.reduce(torch.logical_and, (shown_by(*key_mask) for key_mask in key_masks))
        holds += [numbers_only_hide(*key_mask) for key_mask in key_masks]
        first, stop, found = narrowed(first, last, shown)
        holds.append(found)
    if condition.all_rows:
        holds.append((stop > first).all())
    return torch.stack(holds).all(), torch.stack((first, stop), -1)


def whole(mask: KeyMask, value: Tensor, condition: VisibleRanges) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the first and the last key of each row, ``[1, rows or 1]``, where there are no documents."""
    index = torch.arange(value.shape[mask.key], device=value.device)[None]
    last = index[:, -1:] if condition.ahead else index
    return torch.zeros_like(last), last, []


def runs_of(
    documents: Sequence[tuple[DocumentMask, list[Tensor]]], ahead: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the first and the last key of each row's document, ``[masks, rows]``, up to the row's own unless
    ``ahead``. Also returns conditions: documents are consecutive, and positions in them never decrease."""
    holds, changes, steps = [], [], []
    for mask, own in documents:
        pairs, count = pairs_of(own), len(mask.equal)
        holds += consistent(pairs, count)
        for i, (_, keys) in enumerate(pairs):
            keys = keys.reshape(-1, keys.shape[-1])
            if i < count:
                changes.append(keys[:, 1:] != keys[:, :-1])
                kinds = keys.sort(-1).values
                holds.append(((kinds[:, 1:] != kinds[:, :-1]).sum(-1) == changes[-1].sum(-1)).all())
            else:
                steps.append(keys[:, 1:] >= keys[:, :-1])
    rows = pairs_of(documents[0][1])[0][1].shape[-1]
    index = torch.arange(rows, device=documents[0][1][0].device)
    none = torch.zeros((1, rows - 1), dtype=torch.bool, device=index.device)
    change = functools.reduce(torch.logical_or, changes, none)
    holds += [(step | change).all() for step in steps]
    first = torch.where(pad(change, (1, 0)), index, 0).cummax(-1).values
    if not ahead:
        return first, index.expand_as(first), holds
    return first, next_of(pad(change, (0, 1), value=True), index, rows), holds


def next_of(chosen: Tensor, index: Tensor, none: int) -> Tensor:
    """Find the next chosen entry at or behind each one; ``none`` where there is none."""
    return torch.where(chosen, index, none).flip(-1).cummin(-1).values.flip(-1)


def narrowed(first: Tensor, last: Tensor, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Narrow ranges of keys, both ends included, to the keys that are shown, ``[masks, keys]``. Returns the
    first key, the one behind the last, and whether all keys between them are shown."""
    masks, keys = max(len(first), len(shown)), shown.shape[1]
    first, last, shown = first.expand(masks, -1), last.expand(masks, -1), shown.expand(masks, -1)
    index, count = torch.arange(keys, device=shown.device), pad(shown.cumsum(-1), (1, 0))
    inside = count.gather(1, last + 1) - count.gather(1, first)
    begin = next_of(shown, index, keys).gather(1, first)
    end = torch.where(shown, index, -1).cummax(-1).values.gather(1, last) + 1
    empty, zero = inside == 0, torch.zeros_like(begin)
    holds = (empty | (end - begin == inside)).all()
    return torch.where(empty, zero, begin), torch.where(empty, zero, end), holds


def shown_by(mask: KeyMask, value: Tensor) -> Tensor:
    """Find the keys that a mask shows, ``[masks, keys]``."""
    return visible(by_query(value, mask), mask.masked_value).squeeze(1)


def numbers_only_hide(mask: KeyMask, value: Tensor) -> Tensor:
    """Does a mask of numbers only hide keys or show them? Numbers that are added must be zero where they show
    a key; others must be zeros and ones."""
    if mask.masked_value is None:
        return ((value == 0) | ~visible(value, None)).all()
    return ((value == 0) | (value == 1)).all()

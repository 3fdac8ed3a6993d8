"""Conditions on the masks of a call, as expressions on their device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..passes.ir import (
    Condition,
    DocumentMask,
    EveryRowHasVisibleKey,
    KeyMask,
    PositionsIncrease,
    Reach,
)


def holds(condition: Condition, masks: Sequence[Tensor]) -> Tensor:
    """Do the masks of a call satisfy a condition? The answer is a boolean on their device."""
    if isinstance(condition, PositionsIncrease):
        equal = 2 * len(condition.document_mask.equal)
        return positions_increase(masks[:equal], masks[equal:])
    if isinstance(condition, EveryRowHasVisibleKey):
        return every_row_has_visible_key(condition, masks)
    (stored,) = condition.key_masks
    shown = visible(by_query(masks[0], stored), stored.masked_value)
    return (allowed(shown, condition.band) | ~shown).all()


def every_row_has_visible_key(condition: EveryRowHasVisibleKey, values: Sequence[Tensor]) -> Tensor:
    """Do masks leave every row a visible key inside a band? With document masks, the key must be in the run
    of tokens that ends with the row: a search of whole documents would take an entry for every row and
    key."""
    given, found, keys_seen, runs = iter(values), [], [], []
    for mask in condition.key_masks:
        own = [next(given) for _ in mask.nodes]
        if isinstance(mask, DocumentMask):
            starts, same_values = starts_of_runs(mask, own)
            runs.append(starts)
            found.append(same_values)
            continue
        entries = by_query(own[0], mask)
        keys_seen.append(visible(entries, mask.masked_value))
        if mask.masked_value is None:  # an entry this large may outweigh the lowest number
            found.append((entries < far(entries)).all())
        elif entries.dtype is not torch.bool:
            found.append(((entries == 0) | (entries == 1)).all())
    band, first = condition.band, None
    if runs:
        band, first = Reach(band.lo, min(band.hi, 0)), functools.reduce(torch.maximum, runs)
        keys_seen = keys_seen or [torch.ones_like(first, dtype=torch.bool)[:, None]]
    joint = functools.reduce(both_visible, keys_seen)
    if any(mask.by_row for mask in condition.key_masks if isinstance(mask, KeyMask)):
        inside = allowed(joint, band) & joint
        if first is not None:
            inside = inside & (torch.arange(joint.shape[-1], device=joint.device) >= first[..., None])
        found.append(inside.any(-1).all())
    else:
        found.append(every_row_sees(joint, band, first))
    return torch.stack(found).all()


def starts_of_runs(mask: DocumentMask, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Find the start of the run of tokens that ends with each row, ``[masks, rows]``. A row sees all keys of
    its run. Also returns whether rows and keys have the same values, without overflow."""
    pairs = pairs_of(values)
    count = len(mask.equal)
    ends = [keys[..., 1:] != keys[..., :-1] for _, keys in pairs[:count]]
    ends += [keys[..., 1:] < keys[..., :-1] for _, keys in pairs[count:]]
    starts = torch.nn.functional.pad(functools.reduce(torch.logical_or, ends), (1, 0))
    index = torch.arange(starts.shape[-1], device=starts.device)
    first = torch.where(starts, index, 0).cummax(-1).values
    return first.reshape(-1, first.shape[-1]), torch.stack(consistent(pairs, count)).all()


LARGEST_POSITION = 2**62  # differences of 64-bit positions below it do not overflow


def positions_increase(equal: Sequence[Tensor], ordered: Sequence[Tensor]) -> Tensor:
    """Does one of the values ``ordered`` increase with every token while those of ``equal`` stay the same?
    Those of ``equal`` must never return to a value that they left. Each value comes twice: for the rows
    ``[.., T, 1]``, and for the keys ``[.., 1, T]`` or ``[T]``."""
    pairs = pairs_of((*equal, *ordered))
    # compare neighbours: differences of unsigned or boolean values would wrap
    steps = [(keys[..., :-1], keys[..., 1:]) for _, keys in pairs]
    documents, positions = steps[: len(equal) // 2], steps[len(equal) // 2 :]
    no_start = torch.zeros((), dtype=torch.bool, device=pairs[0][0].device)
    starts = functools.reduce(torch.logical_or, [after > before for before, after in documents], no_start)
    never_return = [(after >= before).all() for before, after in documents]
    increase = torch.stack([((after > before) | starts).all() for before, after in positions]).any()
    return torch.stack([increase, *never_return, *consistent(pairs, len(documents))]).all()


def pairs_of(values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Reshape values of rows ``[.., T, 1]`` and keys ``[.., 1, T]`` or ``[T]`` to ``[.., T]`` each."""
    return [
        (rows.squeeze(-1), keys if keys.dim() == 1 else keys.squeeze(-2))
        for rows, keys in zip(values[::2], values[1::2])
    ]


def consistent(pairs: Sequence[tuple[Tensor, Tensor]], documents: int) -> list[Tensor]:
    """Check that values of rows equal those of keys, and that differences of positions fit 64 bits.

    documents  how many pairs come before those of positions
    """
    found = [(rows == keys).all() for rows, keys in pairs]
    for _, keys in pairs[documents:]:
        if may_overflow(keys):
            found.append(((keys > -LARGEST_POSITION) & (keys < LARGEST_POSITION)).all())
    return found


def may_overflow(positions: Tensor) -> bool:
    """Must differences of these positions be checked for overflow? Only int64 needs it: differences in other
    dtypes may wrap in every call, and are not taken for an order."""
    return positions.dtype is torch.int64


def by_query(mask: Tensor, key_mask: KeyMask) -> Tensor:
    """Reshape a mask to ``[masks, rows or 1, keys]``."""
    if key_mask.row is None:
        mask = mask.movedim(key_mask.key, -1).unsqueeze(-2)
    else:
        mask = mask.movedim((key_mask.row, key_mask.key), (-2, -1))
    return mask.flatten(0, -3) if mask.dim() > 2 else mask[None]


def both_visible(a: Tensor, b: Tensor) -> Tensor:
    """Combine the keys that both masks leave visible, mask by mask. Where the numbers of masks differ, every
    pair is combined."""
    paired = a.shape[0] == b.shape[0] or 1 in (a.shape[0], b.shape[0])
    return a & b if paired else (a[:, None] & b).flatten(0, 1)


def allowed(like: Tensor, band: Reach) -> Tensor:
    """Compute the keys that a band allows each row, ``[rows, keys]``."""
    rows, keys = (torch.arange(like.shape[d], device=like.device) for d in (-2, -1))
    distance = keys - rows[:, None]
    inside = [distance >= band.lo] * (band.lo != -math.inf) + [distance <= band.hi] * (band.hi != math.inf)
    return functools.reduce(torch.logical_and, inside, torch.ones((), dtype=torch.bool, device=like.device))


def every_row_sees(keys: Tensor, band: Reach, start: Tensor | None) -> Tensor:
    """Is at least one of the keys that the band allows visible, for each row?

    keys   ``[masks, 1, keys]``
    start  ``[masks, rows]``: the first key that counts, by which the band is narrowed; None: all do
    """
    count, length = torch.nn.functional.pad(keys.cumsum(-1), (1, 0)), keys.shape[-1]
    rows = torch.arange(length, device=keys.device)
    first = (rows + max(band.lo, -length)).clamp(0, length).long()
    last = (rows + min(band.hi, length) + 1).clamp(0, length).long()
    if start is None:
        return (count[..., last] > count[..., first]).all()
    first = torch.maximum(first, start)
    shape = (max(len(keys), len(start)), length)
    count = count.squeeze(1).expand(shape[0], -1)
    return (count.gather(1, last.expand(shape)) > count.gather(1, first.expand(shape))).all()


def visible(mask: Tensor, masked_value: bool | None) -> Tensor:
    """Find the keys that a mask leaves visible. An additive mask does so where its numbers are not close to
    the lowest."""
    return mask != masked_value if masked_value is not None else ~(mask <= -far(mask))


def far(mask: Tensor) -> float:
    """Return a quarter of the largest number, the bound of entries that mask a key additively."""
    return torch.finfo(mask.dtype).max / 4

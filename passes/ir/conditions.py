"""Conditions on a call under which the facts of a graph hold, and the masks that they speak of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from .facts import EVERYWHERE, PAST, Reach
from .values import Size, hint, shape_of, value_of


@dataclass(frozen=True)
class KeyMask:
    """A mask whose entries are known only while the graph runs: a padding mask, or a stored attention mask.

    node          a boolean tensor, one of zeros and ones, or (``masked_value`` is None) an additive
                  mask, which masks an entry where its number is nearly the lowest of its dtype
    row           its dimension of rows (queries); None for a padding mask, which is the same for every
                  row
    key           its dimension of keys
    masked_value  the boolean value that masks a key
    """

    node: Node
    row: int | None
    key: int
    masked_value: bool | None

    @property
    def by_row(self) -> bool:
        """Does the mask hide different keys from different rows?"""
        return self.row is not None

    @property
    def entries(self) -> int:
        """Entries of one stored mask, rows times keys; 0 for a padding mask."""
        return 0 if self.row is None else shape_of(self.node)[self.row] * shape_of(self.node)[self.key]

    @property
    def others(self) -> list[Size]:
        """Sizes of the dimensions beside rows and keys."""
        return [s for d, s in enumerate(value_of(self.node).shape) if d not in (self.row, self.key)]

    @property
    def batch(self) -> int:
        """The number of masks in the tensor."""
        return math.prod(map(hint, self.others))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


def band_text(band: Reach) -> str:
    """Describe the keys of a band, as a phrase that follows "visible" or "a key"."""
    if band == PAST:
        return "up to its own position"
    if band.hi == 0:
        return f"among the last {int(1 - band.lo)} positions up to its own"
    return "at any position" if band == EVERYWHERE else f"at a distance in {band} from its own position"


@dataclass(frozen=True)
class EveryRowHasVisibleKey:
    """A condition on a call: these masks leave every row at least one visible key inside a band. An additive
    mask of lowest finite numbers (not ``-inf``) hides the keys outside the band only beside a visible key.
    A softmax over a row without a visible key weighs all keys alike."""

    key_masks: tuple[KeyMask | DocumentMask, ...]
    band: Reach

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for mask in self.key_masks for node in mask.nodes)

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(node.name for node in self.nodes))
        return f"every row has a visible key {band_text(self.band)} (mask: {names})"


@dataclass(frozen=True)
class MaskedOutsideBand:
    """A condition on a call: a stored mask masks all keys outside a band."""

    key_masks: tuple[KeyMask]
    band: Reach

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.key_masks[0].node,)

    def __str__(self) -> str:
        return f"{self.nodes[0].name} shows each row only keys {band_text(self.band)}"


Pair = tuple[Node, Node]


@dataclass(frozen=True)
class DocumentMask:
    """A boolean over rows and keys that compares per-token values of packed sequences.

    These values are sequence ids or position ids. Wherever the boolean is true, all its comparisons hold
    (with ``negated``: wherever it is false). Other masks may remove more entries.

    equal      pairs (value of the row, value of the key) that are equal; each value is ``[.., T]``, or
               has dimensions of size one in place of these
    ordered    pairs in which the key's value is at most the row's
    key_masks  the only masks that hide other entries; ``None`` where they are unknown
    """

    equal: tuple[Pair, ...] = ()
    ordered: tuple[Pair, ...] = ()
    negated: bool = False
    key_masks: tuple[KeyMask | DocumentMask, ...] | None = None

    @property
    def by_row(self) -> bool:
        return True

    @property
    def others(self) -> list[Size]:
        """Sizes of the dimensions beside rows and keys, of all tensors."""
        return [size for node in self.nodes for size in value_of(node).shape[:-2]]

    @property
    def batch(self) -> int:
        """The number of masks in the tensors."""
        return max(math.prod(shape_of(node)[:-2]) for node in self.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for pair in (*self.equal, *self.ordered) for node in pair)


@dataclass(frozen=True)
class PositionsIncrease:
    """A condition on a call: per-token values agree for rows and keys, and increase along each document. The
    document mask then shows no later key."""

    document_mask: DocumentMask
    band: Reach = PAST

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.document_mask.nodes

    def __str__(self) -> str:
        positions, documents = (
            ", ".join(row.name for row, _ in pairs)
            for pairs in (self.document_mask.ordered, self.document_mask.equal)
        )
        return f"{positions} increases from token to token" + (
            f" while {documents} stays the same" if documents else ""
        )


@dataclass(frozen=True)
class VisibleRanges:
    """A condition on a call: the keys that a mask shows each row are consecutive, among those of a band.

    Attention then reads a first and a last key for each row in place of the mask. Padding and packed
    documents are such masks.

    key_masks  the only masks that hide keys inside the band; those of pairs of tokens compare documents
    ahead      may a row see later keys than its own?
    all_rows   must every row see a key? A mask of lowest numbers shows a row without one all keys alike
    """

    key_masks: tuple[KeyMask | DocumentMask, ...]
    ahead: bool
    all_rows: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for mask in self.key_masks for node in mask.nodes)

    @property
    def same_for_all_rows(self) -> bool:
        """Does each row of a sequence see the same keys?"""
        return self.ahead and all(isinstance(mask, KeyMask) for mask in self.key_masks)

    @property
    def batch(self) -> Size:
        """The number of different masks, as a size of the graph: one, or one for each sequence."""
        return next((size for mask in self.key_masks for size in mask.others if hint(size) > 1), 1)

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(node.name for node in self.nodes))
        return f"each row sees consecutive keys (mask: {names})"


Condition = EveryRowHasVisibleKey | MaskedOutsideBand | PositionsIncrease | VisibleRanges


@dataclass(frozen=True)
class Ranges:
    """The masks that attention reads as ranges of keys, and conditions on a call for that.

    visible     for each slot of the ranges, the condition that its mask shows consecutive keys
    conditions  further conditions
    """

    visible: tuple[VisibleRanges, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.visible)

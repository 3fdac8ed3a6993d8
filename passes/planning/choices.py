"""Free choices for a region: they change the time and memory of a step, but not its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """A region's choices between memory and time.

    chunk_size   tokens per chunk of every sweep; None: each sweep has its own
    chunk_bytes  the most bytes that a chunk may hold at its widest moment; sequences of a batch that do not
                 meet then run one at a time; None: a share of the device's memory
    keep         how many of the values worth keeping for the backward are kept, best first
    slack        where memory is to spare: the share of a sweep's best time that may be lost to shorter
                 chunks, and again to fewer sequences of the batch at a time; None: memory is not to spare,
                 and the usual share applies
    """

    chunk_size: int | None = None
    chunk_bytes: int | None = None
    keep: int = 0
    slack: float | None = None

    @property
    def memory_to_spare(self) -> bool:
        """May chunks be as long as the sequence, and may attention's backward take all heads in one call?"""
        return self.slack is not None


DEFAULT = Choices()

"""What may be chosen freely for a region: none of it changes what is computed, all of it what that takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """How a region spends memory and time.

    chunk_size   tokens per chunk of every sweep; None: each sweep has its own
    chunk_bytes  the most bytes that the widest moment of a chunk may take, and sequences of a batch that do
                 not meet run one at a time; None: as the device has it
    keep         how many of the values worth keeping for the backward are kept, best first
    slack        the share of a sweep's best time that is given up for shorter chunks, and as much for fewer
                 sequences of the batch at a time, where memory is to spare; None: the usual one, where it is
                 not
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

"""Places in a step: the drivers report which region, sweep, chunk and value they work on to an observer.

Nothing is recorded unless a simulation of memory asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ..passes.ir import Program


@dataclass(frozen=True)
class InBackward:
    """The whole backward."""


@dataclass(frozen=True)
class InLink:
    """The forward of one region of the chain, by its index there.

    region  the report of that region
    """

    index: int
    region: object


@dataclass(frozen=True)
class InRegion:
    """The driver of a streamed region, in the direction ``forward`` or ``backward``.

    region  the report of that region
    """

    region: object
    direction: str


@dataclass(frozen=True)
class InSweep:
    """One sweep of a program, by its index there."""

    program: Program
    step: int


class Watch(Protocol):
    """An observer of the places that a step enters and leaves."""

    def enter(self, place: object) -> None: ...

    def leave(self) -> None: ...


class Watched:
    """The current observer, if any."""

    by: Watch | None = None


class within:
    """Context in which the step works on ``place``. A place is one of the classes of this module, a chunk, a
    binding of a chunk body, or a node that is computed at full length."""

    __slots__ = ("place", "watch")

    def __init__(self, place: object) -> None:
        self.place, self.watch = place, Watched.by

    def __enter__(self) -> None:
        if self.watch is not None:
            self.watch.enter(self.place)

    def __exit__(self, *_error: object) -> None:
        if self.watch is not None:
            self.watch.leave()


@contextlib.contextmanager
def watched(by: Watch) -> Iterator[None]:
    """Report every place of a step to ``by``, inside the context."""
    before, Watched.by = Watched.by, by
    try:
        yield
    finally:
        Watched.by = before

"""The stages of a compilation: what is being done, what becomes of an error in it, and how long it may take.

An unexpected error in a stage, or too much time, is a defect of this package. It must cost memory, loudly,
and not the run: it becomes a refusal that names the stage. Loops call `checkpoint`, which reads a clock;
there are no threads and no signals.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from .ir import CannotStream, Refusal

SLOW = 10.0  # seconds of analysis after which the user is told what takes so long


class Abandoned(CannotStream):
    """A stage failed, or took too long: a defect or a limit of this package, not a property of the model."""


class Watch:
    """How long the analysis of one graph has taken.

    limit  seconds of work of its thread (not of waiting: how busy the machine is must not decide), after
           which the graph is compiled whole
    tell   is called once, with a sentence, when the user has waited for `SLOW` seconds
    """

    def __init__(self, limit: float, tell: Callable[[str], None]):
        self.limit, self.tell = limit, tell
        self.started, self.worked, self.told = time.monotonic(), time.thread_time(), False

    def check(self) -> None:
        if time.thread_time() - self.worked > self.limit:
            raise Abandoned(
                Refusal(
                    "graph",
                    f"The analysis reached its limit of {self.limit:g} seconds while {STAGE.get()}",
                    'Raise the limit with options={"analysis_seconds": ...}, or report this model',
                )
            )
        if not self.told and time.monotonic() - self.started > SLOW:
            self.told = True
            self.tell(
                f"The analysis has taken {SLOW:g} seconds and is still {STAGE.get()}. It stops after "
                f"{self.limit:g} seconds, and the graph is then compiled whole; "
                'options={"analysis_seconds": ...} changes this limit'
            )


STAGE: ContextVar[str] = ContextVar("stage", default="analysing the graph")
WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What happens inside is this stage. An unexpected error becomes `Abandoned`; want of memory does not."""
    before = STAGE.set(name)
    try:
        checkpoint()
        yield
    except (CannotStream, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        raise abandoned(name, error) from error
    finally:
        STAGE.reset(before)


def abandoned(name: str, error: Exception) -> Abandoned:
    """An unexpected error as a refusal."""
    return Abandoned(
        Refusal(
            "graph",
            f"An internal error occurred while {name} ({summary(error)})",
            "Please report this bug of streambp with the code at this line. "
            'TORCH_LOGS="+streambp_compile" prints the traceback',
        )
    )


def summary(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def watched(limit: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Bound the time that is spent inside: `checkpoint` raises `Abandoned` after ``limit`` seconds."""
    before = WATCH.set(Watch(limit, tell))
    try:
        yield
    finally:
        WATCH.reset(before)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What happens inside does not count: it is not analysis (Inductor at work)."""
    watch, begun, working = WATCH.get(), time.monotonic(), time.thread_time()
    before = WATCH.set(None)
    try:
        yield
    finally:
        WATCH.reset(before)
        if watch is not None:
            watch.started += time.monotonic() - begun
            watch.worked += time.thread_time() - working


def checkpoint() -> None:
    """Called in every loop whose length a model decides. Raises `Abandoned` when the time is up."""
    watch = WATCH.get()
    if watch is not None:
        watch.check()

"""Phases of a compilation: their names, the treatment of errors in them, and their time limit.

An unexpected error in a phase, or too much time, is a defect of this package. It must not end the run:
it becomes a refusal that names the phase, costs memory and is reported. Loops call `check_time`, which
reads a clock; there are no threads and no signals.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from .ir import CannotStream, Refusal

SLOW = 10.0  # seconds of analysis after which the user is told what takes so long
BETWEEN_CHECKS = 0.01  # seconds: reading the clock of a thread is a system call, too slow for loops


class Abandoned(CannotStream):
    """A phase that failed or took too long. This is a defect or a limit of this package, not a property of
    the model."""


class SizeFixed(Exception):
    """The size of the batch must be a constant of the graph that is compiled, which is analysed again."""


FIXES_SIZES: ContextVar[bool] = ContextVar("fixes sizes", default=False)


@contextlib.contextmanager
def may_fix_sizes() -> Iterator[None]:
    """Let the code inside raise `SizeFixed`."""
    before = FIXES_SIZES.set(True)
    try:
        yield
    finally:
        FIXES_SIZES.reset(before)


class Timer:
    """The time that the analysis of one graph has taken.

    limit  seconds of work of its thread, after which the graph is compiled whole. Waiting does not
           count, because the load of the machine must not decide
    tell   called once, with a sentence, when the user has waited for `SLOW` seconds
    """

    def __init__(self, limit: float, tell: Callable[[str], None]):
        self.limit, self.tell = limit, tell
        self.started, self.worked, self.told = time.monotonic(), time.thread_time(), False
        self.checked = self.started

    def check(self) -> None:
        now = time.monotonic()
        if now - self.checked < BETWEEN_CHECKS:
            return
        self.checked = now
        if time.thread_time() - self.worked > self.limit:
            raise Abandoned(
                Refusal(
                    "graph",
                    f"The analysis reached its limit of {self.limit:g} seconds while {PHASE.get()}",
                    'Raise the limit with options={"analysis_seconds": ...}, or report this model',
                )
            )
        if not self.told and now - self.started > SLOW:
            self.told = True
            self.tell(
                f"The analysis has taken {SLOW:g} seconds and is still {PHASE.get()}. It stops after "
                f"{self.limit:g} seconds, and the graph is then compiled whole; "
                'options={"analysis_seconds": ...} changes this limit'
            )


PHASE: ContextVar[str] = ContextVar("phase", default="analysing the graph")
TIMER: ContextVar[Timer | None] = ContextVar("timer", default=None)


class Clock:
    """Seconds of each stage of a compilation, by its name; a nested stage counts for itself alone.

    seconds  the mapping that seconds are added to
    """

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.stage, self.since = seconds, "", time.monotonic()

    def enter(self, stage: str) -> str:
        """Count time for this stage from now on. Returns the stage before."""
        now, before = time.monotonic(), self.stage
        if before:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self.since
        self.stage, self.since = stage, now
        return before


CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)
REWRITES = "rewrites"
STAGES = {  # phase → stage; all other phases are rewrites of Dynamo's graph
    "preparing the joint graph": "analysis",
    "normalising the joint graph": "analysis",
    "following tokens through the joint graph": "analysis",
    "looking at the sequences of the batch": "analysis",
    "assigning operations to sweeps": "planning",
    "choosing chunk lengths": "planning",
    "writing chunk bodies": "chunk bodies",
    "compiling chunk bodies": "Inductor",
}


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time inside for this stage, if a `Clock` runs."""
    clock = CLOCK.get()
    before = clock.enter(name) if clock else ""
    try:
        yield
    finally:
        if clock:
            clock.enter(before)


@contextlib.contextmanager
def clocked(seconds: dict[str, float]) -> Iterator[None]:
    """Add the seconds of all stages inside to ``seconds``; time outside all stages counts as rewrites."""
    before = CLOCK.set(Clock(seconds))
    try:
        with stage(REWRITES):
            yield
    finally:
        CLOCK.reset(before)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Run the code inside as this phase. An unexpected error becomes `Abandoned`. Refusals, restarts,
    warnings and lack of memory are raised as they are."""
    before = PHASE.set(name)
    try:
        check_time()
        with stage(STAGES.get(name, REWRITES)):
            yield
    except (CannotStream, SizeFixed, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        raise abandoned(name, error) from error
    finally:
        PHASE.reset(before)


def abandoned(name: str, error: Exception) -> Abandoned:
    """Describe an unexpected error as a refusal."""
    return Abandoned(
        Refusal(
            "graph",
            f"An internal error occurred while {name} ({summary(error)})",
            "Please report this bug of streambp with the code at this line. "
            'TORCH_LOGS="+streambp_compile" prints the traceback',
        )
    )


def summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def time_limit(limit: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Limit the time that is spent inside: `check_time` raises `Abandoned` after ``limit`` seconds."""
    before = TIMER.set(Timer(limit, tell))
    try:
        yield
    finally:
        TIMER.reset(before)


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Exclude the time inside from the limit, because it is not analysis (Inductor at work)."""
    timer, begun, working = TIMER.get(), time.monotonic(), time.thread_time()
    before = TIMER.set(None)
    try:
        yield
    finally:
        TIMER.reset(before)
        if timer is not None:
            timer.started += time.monotonic() - begun
            timer.worked += time.thread_time() - working


def check_time() -> None:
    """Raise `Abandoned` when the time is up. Every loop calls it whose length depends on the model."""
    timer = TIMER.get()
    if timer is not None:
        timer.check()

"""Progress of simulation and compilation on stderr, where that is a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

WIDTH = 24  # characters of the bar
PATIENCE = 5.0  # seconds of compiling before anything is said
TICK = 0.5  # seconds between two versions of the line


class Progress:
    """A bar of a known number of steps, which is written to terminals only.

    total  steps expected; a few more or less do no harm
    """

    def __init__(self, total: int, out: TextIO | None = None):
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.out = sys.stderr if out is None else out
        self.shown = self.out.isatty()

    def __call__(self, text: str) -> None:
        """Begin the next step."""
        self.total = max(self.total, self.done + 1)
        self.write(text)
        self.done += 1

    def write(self, text: str) -> None:
        if self.shown:
            full = WIDTH * self.done // self.total
            seconds = time.monotonic() - self.began
            bar = "█" * full + "·" * (WIDTH - full)
            self.out.write(f"\r\x1b[K{bar} {seconds:4.0f} s  {text}")
            self.out.flush()

    def close(self) -> None:
        if self.shown:
            self.out.write("\r\x1b[K")
            self.out.flush()


class Compiling:
    """A line that shows which region is being compiled, and for how long. It appears after `PATIENCE`
    seconds. A thread updates it, because compilers do not return for long. If it appeared, ``last`` is
    written in its place at the end."""

    active = threading.Lock()  # a compilation within another one has no line

    def __init__(self, out: TextIO | None = None):
        self.out, self.began, self.text = out or sys.stderr, time.monotonic(), "reading the graph"
        self.ended, self.thread = threading.Event(), threading.Thread(target=self.run, daemon=True)
        self.shown, self.last = False, ""

    def __enter__(self) -> Compiling:
        self.mine = self.out.isatty() and self.active.acquire(blocking=False)
        if self.mine:
            self.thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.mine:
            self.ended.set()
            self.thread.join()
            self.active.release()
        if self.shown:
            self.write(self.last and f"{self.last}, compiled in {self.seconds:.0f} s\n")

    def region(self, index: int, total: int, where: str) -> None:
        """Begin the next region: its index among all, and its first line in the user's code."""
        self.text = f"region {index + 1} of {total}, {where}"

    def run(self) -> None:
        wait = PATIENCE
        while not self.ended.wait(wait):
            wait, self.shown = TICK, True
            text = f"streambp: compiling {self.text}, {self.seconds:.0f} s"
            self.write(text[: shutil.get_terminal_size().columns - 1])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def write(self, text: str) -> None:
        """Replace the current line."""
        self.out.write(f"\r\x1b[K{text}")
        self.out.flush()

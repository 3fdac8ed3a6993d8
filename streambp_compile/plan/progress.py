"""A bar on stderr that tells what is being simulated."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24  # characters of the bar


class Progress:
    """A bar of a known number of steps; it is written to terminals alone.

    total  steps expected; a few more or less do no harm
    """

    def __init__(self, total: int, out: TextIO | None = None):
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.out = sys.stderr if out is None else out
        self.shown = self.out.isatty()

    def __call__(self, text: str) -> None:
        """The next step begins."""
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

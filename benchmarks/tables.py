"""Markdown tables, and the circumstances under which they were measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

MIB, GIB = 2**20, 2**30


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table; its first ``texts`` columns are aligned to the left, the others, of numbers, to the right."""
    lines = [list(heads), *([cell.replace("|", "¦") for cell in row] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(heads))]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))
        ]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * w if i < texts else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

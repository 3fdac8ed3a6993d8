"""A report as a dictionary of numbers and texts, which the page shows and scripts read."""

from __future__ import annotations

from typing import Any

from .memory import memory_of
from .regions import region_data
from .shown import Shown


def data_of(report: Shown) -> dict[str, Any]:
    """Convert a report to a dictionary. Bytes are integers, the user's lines are ``file:line: code``.

    headline  the first lines of the printed report
    chain     for every region of the model in turn, its index in ``regions``
    memory    of the step (`memory_of`), or None
    """
    return {
        "headline": str(report).split("\n\n")[0].splitlines(),
        "tokens": [str(length) for length in report.lengths],
        "peak": None if report.peak is None else str(report.peak),
        "chain": list(report.order),
        "regions": [region_data(region) for region in report.regions],
        "memory": memory_of(report),
        "notes": list(report.notes),
    }

"""A report as a file; the end of its name says of which kind."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

from ..report import Report
from ..runtime.memory_timeline import Timeline
from .snapshot import snapshot_of


def save(report: Report, path: Path) -> None:
    """Raises ValueError where the name does not say which kind of file, or the report lacks what it holds."""
    if path.suffix not in KINDS:
        raise ValueError(f"A report is saved as a file whose name ends in {' or '.join(KINDS)}; got {path}")
    KINDS[path.suffix](report, path)


def timeline_of(report: Report) -> Timeline:
    if report.timeline is None:
        raise ValueError(
            "This report has no timeline of memory, because the peak of its step was not predicted. Remove "
            "graph breaks from the function, or save the report as a page"
        )
    return report.timeline


def save_snapshot(report: Report, path: Path) -> None:
    """A snapshot for memory viewers, which read no newer protocol."""
    path.write_bytes(pickle.dumps(snapshot_of(timeline_of(report)), protocol=4))


KINDS: Mapping[str, Callable[[Report, Path], None]] = {".pickle": save_snapshot}

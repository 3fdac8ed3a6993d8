"""A report as a file, whose suffix tells its kind."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ... import internals
from ...runtime.memory_timeline import Timeline
from .data import data_of
from .html import page_of
from .shown import Shown
from .snapshot import snapshot_of

Reports = Sequence[Shown]


def save(reports: Reports, names: Sequence[str], path: Path) -> None:
    """Write one report, or two side by side. Raises ValueError where the name of the file has an unknown
    suffix, or a report lacks the contents of such a file."""
    if path.suffix not in KINDS:
        raise ValueError(f"A report is saved as a file whose name ends in {' or '.join(KINDS)}; got {path}")
    KINDS[path.suffix](reports, names, path)


def save_page(reports: Reports, names: Sequence[str], path: Path) -> None:
    path.write_text(page_of([data_of(r) for r in reports], names, path.stem), encoding="utf-8")


def save_data(reports: Reports, names: Sequence[str], path: Path) -> None:
    data = {"names": list(names), "reports": [data_of(r) for r in reports]}
    path.write_text(json.dumps(data), encoding="utf-8")


def trace(report: Shown) -> None:
    """Write the data of the page to the structured trace, if the trace is on."""
    internals.trace_artifact(
        "streambp_report_data", lambda: json.dumps(data_of(report), indent=1), "json", compiling=False
    )


def save_snapshot(reports: Reports, names: Sequence[str], path: Path) -> None:
    """Write a snapshot for memory viewers, which read no newer protocol; one device for each report."""
    path.write_bytes(pickle.dumps(snapshot_of([timeline_of(r) for r in reports]), protocol=4))


def timeline_of(report: Shown) -> Timeline:
    if report.timeline is None:
        raise ValueError(
            "This report has no timeline of memory, because the peak of its step was not predicted. Remove "
            "graph breaks from the function, or save the report as a page"
        )
    return report.timeline


KINDS: Mapping[str, Callable[[Reports, Sequence[str], Path], None]] = {
    ".html": save_page,
    ".json": save_data,
    ".pickle": save_snapshot,
}

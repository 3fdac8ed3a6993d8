"""The properties of a report that the page reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...reporting.region_report import RegionReport
from ...runtime.memory_simulation import Peak
from ...runtime.memory_timeline import Timeline


class Shown(Protocol):
    """A report: see `streambp_compile.Report`. The first lines of its text are the page's."""

    @property
    def regions(self) -> Sequence[RegionReport]: ...

    @property
    def order(self) -> Sequence[int]: ...

    @property
    def lengths(self) -> Sequence[object]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def peak(self) -> Peak | None: ...

    @property
    def timeline(self) -> Timeline | None: ...

"""What became of each region, as a value that prints itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from .passes.ir import Refusal
from .pipeline import StreamedRegion


class NotStreamed(UserWarning, RuntimeError):
    """A region was compiled whole: the warning (or, under ``strict``, the error) says why, what it costs, and what to do."""


def megabytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def warn_refused(refusal: Refusal, cost: int | None) -> None:
    price = f" Its largest value takes {megabytes(cost)} at full length." if cost else ""
    warnings.warn(f"streambp compiles a region whole: {refusal}.{price} Gradients stay exact.", NotStreamed, stacklevel=2)


@dataclass
class RegionReport:
    """One distinct region: its graphs, and how it is streamed or why not."""

    split: GraphModule
    joint: GraphModule | None = None
    streamed: StreamedRegion | None = None
    refusal: Refusal | None = None


@dataclass
class Report:
    """All regions of one compiled graph, in order."""

    regions: list[RegionReport] = field(default_factory=list)

    def finish(self, module: GraphModule, regions: Sequence) -> None:
        self.regions = [r for r, _ in regions]

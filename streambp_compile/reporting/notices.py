"""Warnings that a user sees besides the report."""

from __future__ import annotations

import warnings

from ..passes.ir import Refusal


class NotStreamed(UserWarning, RuntimeError):
    """A region runs unchunked; under ``strict`` this is an error. The text says why, what it costs, and what
    to do."""


class PlansDiffer(RuntimeError):
    """Processes that compute together have planned a region differently, and would wait for each other."""


class StreamHint(UserWarning):
    """Memory or time that the user can save outside this package; the text says how."""


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def warn_refused(refusal: Refusal, cost: int | None) -> None:
    price = f", and its largest value takes {mebibytes(cost)} at full length" if cost else ""
    warnings.warn(
        f"streambp cannot stream a region: {refusal}. The region runs unchunked{price}; "
        "gradients stay exact.",
        NotStreamed,
        stacklevel=2,
    )

"""Exact backpropagation in chunks of tokens, as a ``torch.compile`` backend (StreamBP, arXiv 2506.03077).

    step = torch.compile(lambda batch: model(**batch).loss, backend="streambp")
    step(batch).backward()

Using the backend needs no import of this package: torch finds it through its entry point. This module
holds the rest of the public API.
"""

# ruff: noqa: E402, I001
from .supported import check_torch

check_torch()  # before anything that needs torch's internals

from .explain import explain
from .reporting.notices import NotStreamed, PlansDiffer, StreamHint
from .passes.ir import EVERYWHERE, FUTURE, PAST, Reach, Signature
from .passes.rules import rule
from .passes.rules.facets import Merge, Scan
from .passes.rules.signatures import equation
from .reporting.report import Report

__all__ = [
    "EVERYWHERE",
    "FUTURE",
    "Merge",
    "PAST",
    "PlansDiffer",
    "NotStreamed",
    "Reach",
    "Report",
    "Scan",
    "Signature",
    "StreamHint",
    "equation",
    "explain",
    "rule",
]

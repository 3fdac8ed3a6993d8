"""Exact backpropagation in chunks of tokens, as a ``torch.compile`` backend (StreamBP, arXiv 2506.03077).

    step = torch.compile(lambda batch: model(**batch).loss, backend="streambp")
    step(batch).backward()

No import is needed for that: the backend is found through its entry point. This module holds what one may
want besides.
"""

# ruff: noqa: E402, I001
from .supported import check_torch

check_torch()  # before anything that needs torch's internals

from .explain import explain
from .notices import NotStreamed, StreamHint
from .passes.ir import EVERYWHERE, FUTURE, PAST, Reach, Signature
from .passes.rules import rule
from .passes.rules.facets import Merge, Scan
from .passes.rules.signatures import equation
from .report import Report

__all__ = [
    "EVERYWHERE",
    "FUTURE",
    "Merge",
    "PAST",
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

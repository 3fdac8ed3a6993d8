"""The structured trace, which ``tlparse`` shows.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import trace_structured


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to the structured trace, which ``tlparse`` shows."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)

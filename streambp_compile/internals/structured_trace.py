"""The structured trace, which ``tlparse`` shows.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import trace_structured


def trace_artifact(
    name: str, text: Callable[[], str], encoding: str = "string", compiling: bool = True
) -> None:
    """Write a text to the structured trace, which ``tlparse`` shows.

    text       is called only if the trace is on
    encoding   ``"string"`` or ``"json"``
    compiling  belongs to the compilation of Dynamo that runs now
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=text,
        expect_trace_id=compiling,
    )

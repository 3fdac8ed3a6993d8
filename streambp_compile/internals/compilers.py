"""The compiler that Inductor calls.

Tested with torch 2.13.
"""

from __future__ import annotations

from torch._inductor import exc
from torch._inductor.cpp_builder import get_cpp_compiler


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor finds, as a command; None where it finds none."""
    try:
        return get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        return None

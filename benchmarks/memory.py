"""Live memory of a computation, as the package measures it."""

from streambp_compile.tools.live_memory import held_in, live_memory, peak, profiled

__all__ = ["held_in", "live_memory", "peak", "profiled"]

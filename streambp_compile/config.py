"""The options of the backend, frozen and validated."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .device.target_device import free_memory
from .passes.planning.devices import named

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which Inductor would record CUDA graphs
ANALYSIS_SECONDS = 120.0  # a region of a thousand nodes takes one or two

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def budget_of(given: object) -> int | float:
    """Parse a memory budget: bytes, or a share of free memory. Raises ValueError."""
    number: object = given
    if isinstance(given, str) and (read := re.fullmatch(r"\s*([\d.]+)\s*(\w*)\s*", given)):
        digits, unit = read.groups()
        with contextlib.suppress(KeyError, ValueError):
            number = int(float(digits) * UNITS[unit.upper()]) if unit else float(digits)
    if isinstance(number, float) and 0 < number <= 1:
        return number
    if isinstance(number, int | float) and not isinstance(number, bool) and 1 < number < math.inf:
        return int(number)
    raise ValueError(
        "memory_budget must be a number of bytes, a text such as '60GiB' or '400MiB', or a share of the "
        f"device's free memory such as 0.8; got {given!r}"
    )


@dataclass(frozen=True)
class Config:
    """Options of ``torch.compile(..., backend="streambp", options={...})``.

    chunk_size        tokens per chunk in every sweep; None lets each sweep choose
    strict            raise where a region cannot be streamed, instead of a warning
    device            the device to plan for, such as ``"H100"`` or ``"A100-40"``; None takes the device
                      of the tensors
    analysis_seconds  time limit of the analysis of a region or graph, in seconds of processor time; one
                      that takes longer runs unchunked
    memory_budget     limit of a step's memory above weights and their gradients: bytes, a text such as
                      ``"60GiB"``, or a share of the device's free memory between 0 and 1. The fastest
                      plan that fits is found; None takes the default plan
    offload           whether layer inputs wait for the backward in host memory; None lets a budget
                      decide
    lossy             may layer inputs wait for the backward in 8 bits a number? Gradients are not exact
                      then. Without a budget all of them do, unless ``offload`` sends them to the host
                      as they are; with one, only where the default plan does not fit
    cache             keep compiled chunk bodies on disk beside Inductor's cache, where Inductor's
                      settings allow one, so that the next process compiles none of them again
    mode              Inductor's mode for chunk bodies (the ``mode=`` of ``torch.compile``), without
                      CUDA graphs
    """

    chunk_size: int | None = None
    strict: bool = False
    device: str | None = None
    analysis_seconds: float = ANALYSIS_SECONDS
    memory_budget: int | float | str | None = None
    offload: bool | None = None
    lossy: bool = False
    cache: bool = True
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_size is not None and (
            isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1
        ):
            raise ValueError(
                f"chunk_size must be None or a number of tokens, at least 1; got {self.chunk_size!r}"
            )
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict must be True or False; got {self.strict!r}")
        if self.device is not None:
            named(self.device)
        seconds = self.analysis_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"analysis_seconds must be a positive number of seconds; got {seconds!r}")
        if self.memory_budget is not None:
            budget_of(self.memory_budget)
        if self.offload is not None and not isinstance(self.offload, bool):
            raise ValueError(f"offload must be None, True or False; got {self.offload!r}")
        if not isinstance(self.cache, bool):
            raise ValueError(f"cache must be True or False; got {self.cache!r}")
        if not isinstance(self.lossy, bool):
            raise ValueError(f"lossy must be True or False; got {self.lossy!r}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}; got {self.mode!r}")

    def budget(self, values: Sequence[object]) -> int | None:
        """Compute the bytes that a step on the device of these values may take; None without a limit."""
        if self.memory_budget is None:
            return None
        found = budget_of(self.memory_budget)
        return int(found * free_memory(self.device, values)) if isinstance(found, float) else found

    def on_every_process(self) -> Config:
        """Remove the limit of analysis time, so that it cannot make processes plan differently."""
        return replace(self, analysis_seconds=math.inf)

    @staticmethod
    def of(mode: str | None, options: Mapping[str, Any] | None) -> Config:
        """Validate the mode and options that ``torch.compile`` passes. Raises ValueError for an option that
        does not exist or a bad value."""
        valid = [f.name for f in fields(Config) if f.name != "mode"]
        for name in options or {}:
            if name not in valid:
                close = difflib.get_close_matches(str(name), valid, n=1)
                guess = f". Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"Unknown streambp option {name!r}; valid options are {', '.join(valid)}{guess}"
                )
        return Config(mode=mode, **(options or {}))

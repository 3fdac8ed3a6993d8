"""The options of the backend, frozen and validated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .passes.planning.devices import named

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which Inductor would record CUDA graphs
ANALYSIS_SECONDS = 120.0  # a region of a thousand nodes takes one or two


@dataclass(frozen=True)
class Config:
    """Options of ``torch.compile(..., backend="streambp", options={...})``.

    chunk_size        tokens per chunk in every sweep; None lets each sweep choose
    strict            raise where a region cannot be streamed, instead of a warning
    device            the device to plan for, such as ``"H100"`` or ``"A100-40"``; None takes the device of
                      the tensors
    analysis_seconds  time limit of the analysis of a region or graph, in seconds of processor time; beyond
                      it, it runs unchunked
    mode              Inductor's mode for chunk bodies (the ``mode=`` of ``torch.compile``), without CUDA
                      graphs
    """

    chunk_size: int | None = None
    strict: bool = False
    device: str | None = None
    analysis_seconds: float = ANALYSIS_SECONDS
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
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}; got {self.mode!r}")

    @staticmethod
    def of(mode: str | None, options: Mapping[str, Any] | None) -> Config:
        """From what ``torch.compile`` hands over. Raises ValueError for an option that does not exist or a
        bad value."""
        valid = [f.name for f in fields(Config) if f.name != "mode"]
        for name in options or {}:
            if name not in valid:
                close = difflib.get_close_matches(str(name), valid, n=1)
                guess = f". Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"Unknown streambp option {name!r}; valid options are {', '.join(valid)}{guess}"
                )
        return Config(mode=mode, **(options or {}))

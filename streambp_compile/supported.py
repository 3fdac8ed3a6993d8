"""The versions of torch that this package runs with."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 11)  # as in pyproject.toml
NEWEST = (2, 13)  # the newest that the tests have run with; newer ones are not refused


def numbers(version: str) -> tuple[int, ...]:
    """Parse the major and minor number of a version such as ``2.13.0+cpu``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_torch(version: str = torch.version.__version__) -> None:
    """Raise ImportError for a torch whose internals this package does not know."""
    if numbers(version) < OLDEST:
        raise ImportError(
            f"streambp_compile needs torch {dotted(OLDEST)} or newer, and this is torch {version}. "
            "Install a newer one: pip install --upgrade torch"
        )

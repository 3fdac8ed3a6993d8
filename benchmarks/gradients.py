"""How far gradients are from one another."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients of all parameters that have one, in order."""
    return [p.grad.detach().clone() for p in module.parameters() if p.grad is not None]


def largest_difference(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """The largest relative difference over all parameters: norm of the difference, over the norm of what is
    expected."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        difference, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
        worst = max(worst, difference / size if size else difference)
    return worst

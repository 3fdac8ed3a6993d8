"""Symbolic sizes as numbers, solved from the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from ..passes.ir import Size, parted, value_of


class Sizes:
    """Sizes of this call, derived from the sizes of its inputs."""

    def __init__(self, inputs: Mapping[Node, Any], fake_of: Callable[[Node], object] = value_of):
        self.known: dict[object, int] = {}
        for node, value in inputs.items():
            fake = fake_of(node)
            if isinstance(fake, torch.Tensor):
                for size, actual in zip(fake.shape, value.shape):
                    self.learn(size, actual)
            elif isinstance(fake, torch.SymInt):
                self.learn(fake, value)

    def learn(self, size: Size, actual: int) -> None:
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            part, factor, rest = parted(size.node.expr)
            self.known[part] = (actual - rest) // factor

    def __call__(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        return self.known[expr] if expr in self.known else int(expr.subs(self.known))

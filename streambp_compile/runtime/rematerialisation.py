"""Recomputation of embeddings in the backward: autograd keeps a recipe of ids and weights instead of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Recipe:
    """Recipe to recompute the outputs of a cheap region.

    call      the compiled region
    inputs    its arguments: inputs of the graph, which are alive in any case
    versions  their autograd versions at that time
    """

    call: Callable
    inputs: tuple[object, ...]
    versions: tuple[int | None, ...]

    @staticmethod
    def of(call: Callable, inputs: Sequence[object]) -> Recipe:
        return Recipe(call, tuple(inputs), versions_of(inputs))

    def output(self, index: int) -> torch.Tensor:
        """Recompute one output. Raises RuntimeError if an input was changed in place, as autograd would."""
        if versions_of(self.inputs) != self.versions:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an inplace "
                "operation: an input of the embeddings, which the backward recomputes. Change it after the "
                "backward, or pass a copy of it to the model."
            )
        with torch.no_grad():
            return self.call(*self.inputs)[index]


def versions_of(inputs: Sequence[object]) -> tuple[int | None, ...]:
    return tuple(v._version if isinstance(v, torch.Tensor) and not v.is_inference() else None for v in inputs)


@dataclass(frozen=True)
class Again:
    """One output of a recipe, which autograd keeps instead of a tensor."""

    recipe: Recipe
    index: int

    def restored(self) -> torch.Tensor:
        return self.recipe.output(self.index)


class Restored(Protocol):
    """An object that autograd keeps instead of a tensor."""

    def restored(self) -> torch.Tensor: ...


Leave = Callable[[torch.Tensor], Restored | None]


@contextlib.contextmanager
def saved_as(recipes: Sequence[tuple[torch.Tensor, Again]], leave: Leave | None = None) -> Iterator[None]:
    """Save recipes instead of these values in autograd, inside the context.

    leave  returns the object to keep instead of any other value, or None for the value itself
    """
    here = list(recipes)

    def pack(kept: torch.Tensor) -> object:
        again = next((again for value, again in here if same_view(kept, value)), None)
        left = leave(kept) if again is None and leave is not None else None
        return again or left or kept

    @torch.compiler.disable  # Dynamo would trace it where a compiled function calls `loss.backward()`
    def unpack(kept: object) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.restored()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            here.clear()  # autograd holds on to `pack`


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )

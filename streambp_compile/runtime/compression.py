"""Layer inputs that wait for the backward in 8 bits a number: lossy, and only at the user's request.

Every row (all numbers of a token) has a scale of its own, its largest magnitude over 127, and numbers
are rounded to the nearest multiple of it (as Mesa, arXiv 2111.11124, keeps activations). The forward is
exact; the backward is that of slightly different layer inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .offload import may_leave
from .places import within
from .rematerialisation import Leave

LEVELS = 127  # of each sign
AT_ONCE = 1 << 20  # numbers rounded at a time, so that rounding needs no second copy of a whole value


class Compressed:
    """A value ``[..., features]`` as autograd keeps it: 8 bits a number, and a scale for each row."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        with within(self):
            self.numbers = torch.empty(value.shape, dtype=torch.int8, device=value.device)
            self.scales = torch.empty((*value.shape[:-1], 1), dtype=torch.float32, device=value.device)
        for some, numbers, scales in parts_of(value, self.numbers, self.scales):
            scales.copy_(some.abs().amax(-1, keepdim=True)).div_(LEVELS)
            numbers.copy_(some.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_())

    def restored(self) -> torch.Tensor:
        """Restore the rounded value."""
        with within(self):
            value = torch.empty(self.shape, dtype=self.dtype, device=self.numbers.device)
        for some, numbers, scales in parts_of(value, self.numbers, self.scales):
            some.copy_(numbers.float().mul_(scales))
        return value


def parts_of(*values: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Split all values into parts of the same rows, and yield them together."""
    count = max(1, AT_ONCE // values[0].shape[-1])
    return zip(*(value.view(-1, value.shape[-1]).split(count) for value in values))


class Compression:
    """One forward's layer inputs in 8 bits.

    given  inputs of the forward, which stay as they are
    """

    def __init__(self, given: Iterable[object]) -> None:
        self.given = weakref.WeakSet(v.untyped_storage() for v in given if isinstance(v, torch.Tensor))
        self.known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def of(self, inputs: Iterable[object]) -> Leave:
        """Build the function that compresses values saved by autograd, if they are among these inputs. The
        same memory is compressed once, however many regions read it."""
        storages = weakref.WeakSet(
            v.untyped_storage()
            for v in inputs
            if isinstance(v, torch.Tensor) and v.requires_grad and is_compressible(v)
        )

        def leave(value: torch.Tensor) -> Compressed | None:
            storage = value.untyped_storage()
            if storage not in storages or storage in self.given or not is_compressible(value):
                return None
            found = self.known.get(storage)
            if found is None or (found.shape, found.dtype) != (value.shape, value.dtype):
                found = self.known[storage] = Compressed(value.detach())
            return found

        return leave


def is_compressible(value: torch.Tensor) -> bool:
    """Has a value many rows of floating-point numbers, dense and alone in its memory?"""
    return value.is_floating_point() and value.dim() > 1 and value.is_contiguous() and may_leave(value)

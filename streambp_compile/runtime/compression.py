"""Layer inputs wait for the backward in 8 bits a number: lossy, and only where the user asks for it.

Every row (all numbers of a token) has a scale of its own, its largest magnitude over 127, and numbers are
rounded to the nearest multiple of it (as Mesa, arXiv 2111.11124, keeps activations). The forward is exact;
the backward is that of slightly different layer inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .offload import may_leave
from .places import within
from .rematerialisation import Leave

LEVELS = 127  # of each sign
AT_ONCE = 1 << 20  # numbers that are rounded at a time: no second copy of a value exists while it is


class Compressed:
    """What autograd keeps in place of a value ``[..., features]``: 8 bits a number, a scale for each row."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        with within(self):
            self.numbers = torch.empty(value.shape, dtype=torch.int8, device=value.device)
            self.scales = torch.empty((*value.shape[:-1], 1), dtype=torch.float32, device=value.device)
        for some, numbers, scales in parts_of(value, self.numbers, self.scales):
            scales.copy_(some.abs().amax(-1, keepdim=True)).div_(LEVELS)
            numbers.copy_(some.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_())

    def restored(self) -> torch.Tensor:
        """The value, rounded."""
        with within(self):
            value = torch.empty(self.shape, dtype=self.dtype, device=self.numbers.device)
        for some, numbers, scales in parts_of(value, self.numbers, self.scales):
            some.copy_(numbers.float().mul_(scales))
        return value


def parts_of(*values: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Some rows of every value at a time."""
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
        """For one region: compresses what autograd saves, if it is one of these inputs. The same memory is
        compressed once, however many regions read it."""
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
    """Are these rows of floating-point numbers, dense, alone in their memory, and many?"""
    return value.is_floating_point() and value.dim() > 1 and value.is_contiguous() and may_leave(value)

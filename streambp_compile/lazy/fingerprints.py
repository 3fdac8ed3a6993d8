"""Checks whether tensors still have their old contents: lazy values read inputs later than eager code.

A version counter does not see every write: not ``p.data.mul_()``, not numpy, not an optimizer's own
kernel. So the bits themselves are summed up, each 32-bit word times an odd number of its own, modulo
2^64. A change of one word is always seen, other changes are missed with a probability of about 2^-32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import internals

BLOCKS = 64  # parts in which a tensor is summed: few launches, and temporary memory of a sixteenth of it
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class TensorContents:
    """The contents of some tensors at one time.

    Making one and checking it reads the watched tensors once each (for a head of 151936 words by 4096 in
    bfloat16, 0.3 ms at 5 TB/s). On a GPU neither synchronises: a change that only the bits show stops
    the program by an assertion on the device.

    tensors   as they are known outside
    memory    the memory that they had, kept alive so that no other tensor gets it
    bytes     its size
    versions  their version counters
    sums      `fingerprints` of those that are watched, ``[watched]``, or None
    watched   their positions
    """

    tensors: tuple[Tensor, ...]
    memory: tuple[torch.UntypedStorage, ...]
    bytes: tuple[int, ...]
    versions: tuple[int, ...]
    sums: Tensor | None
    watched: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], watched: Sequence[int] | None = None) -> TensorContents:
        """Record the contents of tensors. Unwatched tensors, which no caller can reach, are compared by
        version only."""
        places = tuple(range(len(tensors)) if watched is None else watched)
        memory = tuple(t.untyped_storage() for t in tensors)
        sums = fingerprints([tensors[i] for i in places]) if places else None
        versions = tuple(map(version_of, tensors))
        return TensorContents(
            tuple(tensors), memory, tuple(m.nbytes() for m in memory), versions, sums, places
        )

    def check(self) -> None:
        """Check that all contents are unchanged. Raises RuntimeError otherwise."""
        for tensor, memory, size, version in zip(self.tensors, self.memory, self.bytes, self.versions):
            now, what = tensor.untyped_storage(), f"a tensor of shape {tuple(tensor.shape)}"
            if version_of(tensor) != version:
                raise RuntimeError(message(what, "changed in place"))
            if now._cdata != memory._cdata or now.nbytes() != size:
                raise RuntimeError(message(what, "given other memory (p.data = ...)"))
        if self.sums is not None:
            same = (fingerprints([self.tensors[i] for i in self.watched]) == self.sums).all()
            how = "overwritten without autograd's notice (.data, numpy, or a kernel)"
            internals.assert_on_device(same, message("a tensor", how))


def message(what: str, how: str) -> str:
    return (
        f"Logits were read after {what} that they depend on was {how}. Read the logits, and all that is "
        "computed from them, before that change (before optimizer.step())."
    )


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Compute ``[tensors]`` of int64 on the device of the first."""
    found = [fingerprint(t) for t in tensors]
    return torch.stack([f.to(found[0].device) for f in found])


def fingerprint(tensor: Tensor) -> Tensor:
    """Sum a tensor's bits, weighted by their place, as an int64 on its device. A subclass (a quantised
    weight) is summed over the tensors that it is made of."""
    parts = [p for p in internals.parts_of(tensor.detach()) if isinstance(p, Tensor)]
    found = torch.stack(list(map(fingerprint_of_part, parts)))
    return (found * odd_numbers(len(found), 0, found.device)).sum()


def fingerprint_of_part(tensor: Tensor) -> Tensor:
    words = words_of(tensor)
    length = max(1 << 14, math.ceil(words.numel() / BLOCKS))
    weights = odd_numbers(min(length, words.numel()), 0, tensor.device)
    sums = torch.stack([(part * weights[: part.numel()]).sum() for part in words.split(length)])
    return (sums * odd_numbers(len(sums), length, tensor.device)).sum()


def words_of(tensor: Tensor) -> Tensor:
    """View the bits of a tensor as a row of whole numbers, without a copy where it is dense."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    flat = tensor.permute(order).reshape(-1)
    size = math.gcd(4, flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size())
    return flat.view(torch.uint8).view(WORDS[size])


def odd_numbers(count: int, start: int, device: torch.device) -> Tensor:
    """Generate pseudorandom odd 64-bit numbers, always the same (SplitMix64; Steele, Lea and Flood 2014)."""
    mixed = torch.arange(start, start + count, device=device).mul_(-7046029254386353131)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31).bitwise_or_(1)

"""Inputs of a region that it writes into."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...passes.ir import Layout
from ...passes.rules.forward import mutated
from ...passes.split import Region
from ..reading.values import fake_of, storage_of, wants_gradient


def written_storages(region: Region) -> set[int]:
    """Find the memory of a region's inputs that it writes into. Examples are an average kept in a buffer,
    and a weight clamped in place."""
    given = {storage_of(n) for n in region.inputs} - {None}
    return {storage_of(target) for target in map(mutated, region.nodes) if target is not None} & given


def written_buffers(region: Region) -> tuple[Node, ...]:
    """List the inputs without gradients that a region writes into. It returns their new contents after its
    own outputs. The region works on a copy, and the chain writes the contents back. A write in place would
    change values that autograd keeps for the backward. Memory that also comes in as another input, or goes
    out as a view of other sizes, is left to AOTAutograd."""
    storages = written_storages(region)

    def has_memory_of_its_own(node: Node) -> bool:
        views = [
            n
            for n in (*region.inputs, *region.outputs)
            if n is not node and storage_of(n) == storage_of(node)
        ]
        return all(n not in region.inputs and same_layout(fake_of(n), fake_of(node)) for n in views)

    return tuple(
        n
        for n in region.inputs
        if n.op == "placeholder"
        and storage_of(n) in storages
        and not wants_gradient(n)
        and is_dense(fake_of(n))
        and has_memory_of_its_own(n)
    )


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


def is_dense(fake: object) -> bool:
    return not isinstance(fake, torch.Tensor) or Layout.of(fake) is not None

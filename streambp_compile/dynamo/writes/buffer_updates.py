"""Buffers that a forward updates: averages, counters, power iterations, biases of a router.

Between its regions the chain keeps two versions of such a buffer. Regions read a copy that is never
written into. So the backward, of this step or after further forwards, computes with the values that the
forward read. A region that updates the buffer returns its new contents, and the chain writes them into
the caller's buffer. This costs one copy of each updated buffer per call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from ...passes.split import Region
from ...runtime.sizes import Sizes
from ..reading.values import fake_of, storage_of
from .written_inputs import is_dense, same_layout, written_buffers


class Buffers:
    """The inputs of a chain that its regions update, and the values that share their memory."""

    def __init__(self, regions: Sequence[Region]):
        self.written = {region: written_buffers(region) for region in regions}
        owner = {storage_of(n): n for found in self.written.values() for n in found}
        nodes = {n for region in regions for n in (*region.inputs, *region.outputs)} if owner else set()
        self.owner = {n: owner[storage_of(n)] for n in nodes if storage_of(n) in owner}

    def of_call(self, values: dict[Node, object]) -> BufferState:
        """Create the state of the buffers for one call. If gradients are enabled, tensors made under
        ``inference_mode`` (masks) are replaced by tensors on the same memory that autograd can save."""
        if torch.is_grad_enabled():
            values.update(
                {
                    n: ordinary(v)
                    for n, v in values.items()
                    if isinstance(v, torch.Tensor) and v.is_inference() and n not in self.owner
                }
            )
        return BufferState(self, values)


class BufferState:
    """The values of one call, with the current contents of each updated buffer."""

    def __init__(self, buffers: Buffers, values: dict[Node, object]):
        self.buffers, self.values = buffers, values
        self.contents: dict[Node, torch.Tensor] = {}

    def read(self, node: Node) -> object:
        """Return the value that a region reads. For an updated buffer it is its current contents, in memory
        of their own."""
        buffer = self.buffers.owner.get(node)
        if buffer is None:
            return self.values[node]
        if buffer not in self.contents:
            self.contents[buffer] = self.values[buffer].detach().clone()
        contents, fake = self.contents[buffer], fake_of(node)
        return contents if same_layout(fake, fake_of(buffer)) else self.part(contents, fake)

    def part(self, contents: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        """Take a view of a buffer, made dense as all values between regions are."""
        sizes = Sizes({n: v for n, v in self.values.items() if n.op == "placeholder"}, fake_of)
        shape, strides = ([sizes(s) for s in part] for part in (fake.shape, fake.stride()))
        view = contents.as_strided(shape, strides, sizes(fake.storage_offset()))
        return view if is_dense(fake) else view.contiguous()

    def write(self, region: Region, contents: Sequence[torch.Tensor]) -> None:
        """Update the buffers that a region writes into with the contents that it returned."""
        with torch.no_grad():
            for buffer, new in zip(self.buffers.written[region], contents):
                self.values[buffer].copy_(new)
                self.contents[buffer] = new

    def returned(self, node: Node) -> object:
        """Return an output as the caller gets it: the updated buffer itself, not a copy."""
        buffer = self.buffers.owner.get(node)
        whole = buffer is not None and same_layout(fake_of(node), fake_of(buffer))
        return self.values[buffer if whole else node]


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap the memory of an inference tensor in a tensor that autograd can save."""
    with torch.no_grad():
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

"""A step simulated under a mode that sees every call in which the host would synchronise with its GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from streambp_compile import Report, internals
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.runtime import memory_simulation

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.equal,  # values
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
}  # sizes that depend on values


class Synchronises(AssertionError):
    """The host would have to wait for the device."""


class Watching(memory_simulation.Ledger):
    """Raises where a call reads values of a tensor, or copies from one device to another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        devices = {
            t.device.type for t in tensors if t.dim() or is_copy(func)
        }  # a CPU's number is an argument
        if func.overloadpacket in READS or len(devices) > 1:
            raise Synchronises(f"{func} of {sorted(devices)}")
        return result


def is_copy(func) -> bool:
    return func.overloadpacket in (aten._to_copy, aten.copy_, aten.copy)


class Mixture(torch.nn.Module):
    """Tokens routed to two of eight experts, dropout, and a head with its loss."""

    def __init__(self, device: str):
        super().__init__()
        sizes = dict(embed=(256, 64), router=(8, 64), up=(8, 64, 128), down=(8, 128, 64), head=(256, 64))
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(size, device=device, dtype=torch.bfloat16)))

    def forward(self, ids):
        x = F.embedding(ids, self.embed).flatten(0, 1)
        weights, expert = F.linear(x, self.router).softmax(-1).topk(2)
        ordered, order = expert.flatten().sort()
        ends = torch.histc(ordered.float(), bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
        made = F.grouped_mm(F.silu(F.grouped_mm(x[order // 2], self.up, offs=ends)), self.down, offs=ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        x = x + F.dropout((made[places].unflatten(0, (-1, 2)) * weights.unsqueeze(-1)).sum(1), 0.1)
        return F.cross_entropy(F.linear(x, self.head)[:-1], ids.flatten()[1:])


class Attending(torch.nn.Module):
    """A layer of causal attention and a head with its loss; its sequences do not meet."""

    def __init__(self, device: str):
        super().__init__()
        sizes = dict(embed=(256, 64), qkv=(192, 64), out=(64, 64), head=(256, 64))
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(size, device=device, dtype=torch.bfloat16)))

    def forward(self, ids):
        x = F.embedding(ids, self.embed)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in F.linear(x, self.qkv).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.out)
        return F.cross_entropy(F.linear(x, self.head)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def simulated(device: str, monkeypatch, model: type = Mixture, sequences: int = 1) -> Report:
    """Simulate a step on fake tensors of a device.

    Raises `Synchronises`.
    """
    report = Report()

    def without_a_call(graph, inputs):
        Chain(graph, inputs, Config(chunk_size=128, strict=True), report).compiled()
        return graph.forward

    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.empty(sequences, 512, dtype=torch.int64, device=device)
        torch.compile(model(device), backend=without_a_call)(ids)
    monkeypatch.setattr(memory_simulation, "Ledger", Watching)
    assert memory_simulation.simulate(*report.steps[0]).backward
    return report


def operators(report: Report) -> set[str]:
    """Those of all chunk bodies."""
    schedules = [s for region in report.regions for s in (region.forward, region.backward) if s]
    return {str(n.target) for s in schedules for body in s.bodies for n in body.graph.graph.nodes}

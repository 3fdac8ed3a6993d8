"""DTensors: each process's part, their meshes of devices, and whether processes plan alike.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

import torch.distributed as dist
from torch.distributed import distributed_c10d


def is_sharded(value: object) -> bool:
    """Is this a DTensor? None exists where its module was never imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: object) -> object:
    """Return this process's part of a DTensor; any other value is itself."""
    return value._local_tensor if is_sharded(value) else value


def with_local(value: object, local: object) -> object:
    """Build a DTensor like ``value`` whose part on this process is ``local``; else return ``local``."""
    return type(value)(local, value._spec, requires_grad=value.requires_grad) if is_sharded(value) else local


def mesh_of(value: object) -> object | None:
    """Return a mesh of devices, or the mesh behind Dynamo's stand-in for one; None for any other value."""
    module = sys.modules.get("torch.distributed.device_mesh")
    found = getattr(value, "real_obj", None) if type(value).__name__ == "FakeScriptObject" else value
    return found if module is not None and isinstance(found, module.DeviceMesh) else None


def is_uneven(value: object) -> bool:
    """Do processes hold parts of a DTensor that differ in size?"""
    if not is_sharded(value):
        return False
    parts = [1] * value.dim()
    for placement, processes in zip(value.placements, value.device_mesh.shape):
        dim = getattr(placement, "dim", None)  # only shards have one
        if dim is not None:
            parts[dim] *= processes
    return any(bool(size % count != 0) for size, count in zip(value.shape, parts) if count > 1)


def this_process() -> str:
    """Return ``" on rank 1"`` where several processes compute together; an empty text where one does."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return f" on rank {dist.get_rank()}" if several else ""


KNOWN: Counter[str] = Counter()
"""How often this process has compiled a region, by its key; other processes count theirs alike."""


def others_with_another(key: str, group: str, plan: str) -> list[int]:
    """List the processes of a group that have compiled the same region with another plan. No process waits,
    because processes need not compile at the same time: each leaves its plan in the store of the process
    group, and reads the plans that are there. The last one sees the plans of all."""
    if dist.get_backend() == "fake":  # its processes do not exist
        return []
    me, store = dist.get_rank(), distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(distributed_c10d._resolve_process_group(group))
    key = f"{key} {ranks}"
    KNOWN[key] += 1
    name = f"streambp/{hashlib.sha256(f'{key} {KNOWN[key]}'.encode()).hexdigest()}"
    mine = hashlib.sha256(plan.encode()).digest()
    store.set(f"{name}/{me}", mine)
    there = [r for r in ranks if r != me and store.check([f"{name}/{r}"])]
    return [r for r in there if store.get(f"{name}/{r}") != mine]

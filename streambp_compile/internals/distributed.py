"""DistributedDataParallel, FSDP2 and DeepSpeed's ZeRO-3.

DistributedDataParallel's optimizer cuts Dynamo's graphs at its gradient buckets. FSDP2 (`fully_shard`)
and ZeRO-3 gather weights and free them.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch.distributed import _composable_state as composable
from torch.fx import GraphModule

from .joint_graphs import tracing_of


def keep_ddp_graphs_whole(package: str) -> None:
    """Make the optimizer of DistributedDataParallel pass whole graphs to the backends of a package. It cuts a
    graph at the limits of gradient buckets: all gradients of one compiled graph arrive together. Regions
    are autograd nodes of their own: their gradients arrive one layer after another. Torch (2.11 to 2.13)
    has this switch for all backends of a process only."""
    cut = DDPOptimizer.compile_fn
    if hasattr(cut, "__wrapped__"):
        return

    @functools.wraps(cut)
    def compile_fn(optimizer: DDPOptimizer, module: GraphModule, inputs: Sequence[object], **options):
        if defined_in(optimizer.backend_compile_fn, package):
            return optimizer.backend_compile_fn(module, inputs, **options)
        return cut(optimizer, module, inputs, **options)

    DDPOptimizer.compile_fn = compile_fn


def defined_in(backend: Callable, package: str) -> bool:
    """Is a backend, behind the wrappers of torch.compile, a function of this package?"""
    for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
        inner = getattr(backend, name, None)
        if inner is not None:
            return defined_in(inner, package)
    return (getattr(backend, "__module__", None) or "").startswith(f"{package}.")


def is_ddp_piece() -> bool:
    """Is this graph a piece that the optimizer of DistributedDataParallel cut out?"""
    context = TracingContext.try_get()
    return context is not None and context.ddp_optimizer_ctx is not None


@contextlib.contextmanager
def apart_from_ddp():
    """Compile several graphs of AOTAutograd for one piece, of which that optimizer expects exactly one."""
    counts = counters["aot_autograd"]
    before = counts["total"]
    with tracing_of(TracingContext.get().fake_mode):
        yield
    counts["total"] = before


class Engine(enum.Enum):
    """An engine that shards weights, gathers them for a forward or backward, and frees them after it."""

    FSDP2 = "FSDP2"
    ZERO3 = "ZeRO-3"


def fsdp_state_type() -> type | tuple:
    """Return the class of FSDP2's states; an empty tuple where FSDP2 is not in use."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return getattr(module, "FSDPState", ())


def is_fsdp_hook(hook: Callable) -> bool:
    """Is this the hook by which FSDP2 gathers weights before a backward? It does not read the gradient."""
    return isinstance(getattr(hook, "__self__", None), fsdp_state_type())


def fsdp_states() -> Iterator:
    """Yield the states of all modules that `fully_shard` was called for."""
    for found in list(composable._module_state_mapping.values()):
        state = found() if isinstance(found, weakref.ref) else found
        if isinstance(state, fsdp_state_type()):
            yield state


def groups_of(state: object) -> Sequence:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # up to torch 2.11
        groups = [g for g in [state._fsdp_param_group] if g is not None]
    return groups


def is_gathered_by(group: object, weight: object) -> bool:
    return any(getattr(p, "_unsharded_param", None) is weight for p in group.fsdp_params)


def freed_by(weight: torch.Tensor) -> Engine | None:
    """Find the engine that frees this gathered weight when the forward of its module ends, if any does."""
    if hasattr(weight, "ds_status"):  # DeepSpeed has gathered it
        return None if weight.ds_persist else Engine.ZERO3
    groups = (group for state in fsdp_states() for group in groups_of(state))
    freed = any(group._reshard_after_forward and is_gathered_by(group, weight) for group in groups)
    return Engine.FSDP2 if freed else None


@dataclass(frozen=True)
class HeadApart:
    """A linear layer that FSDP2 gathers in a group without the module that calls it.

    Dynamo ends a graph there to run the hooks of the group, and does not trace the forward of a torch.nn
    module.

    takes, makes  features
    kept          does the gathered weight stay until the backward?
    group         gathers the weight; held weakly, as compiled code outlives models
    """

    takes: int
    makes: int
    kept: bool
    group: weakref.ref

    def is_differentiated(self) -> bool:
        """Has the backward of this step gone through the head?"""
        group = self.group()
        return group is not None and group._training_state.name in ("PRE_BACKWARD", "POST_BACKWARD")


def heads_apart(weights: Sequence[object]) -> list[HeadApart]:
    """List such heads of the model that has one of these weights, without those whose forward is compiled."""
    owners = (
        state
        for state in fsdp_states()
        if any(is_gathered_by(group, weight) for group in groups_of(state) for weight in weights)
    )
    owner = next(owners, None)
    return [
        HeadApart(
            module.in_features, module.out_features, not group._reshard_after_forward, weakref.ref(group)
        )
        for state in (owner._state_ctx.all_states if owner else ())
        for group in groups_of(state)
        for module in group.modules
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is torch.nn.Linear.forward
        and "forward" not in vars(module)
    ]

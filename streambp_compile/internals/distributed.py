"""The optimizer of DistributedDataParallel, which cuts Dynamo's graphs at its gradient buckets.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch.fx import GraphModule

from .joint_graphs import tracing_of


def keep_ddp_graphs_whole(package: str) -> None:
    """Have the optimizer of DistributedDataParallel hand over whole graphs to the backends of a package.

    It cuts a graph at the limits of gradient buckets: all gradients of one compiled graph arrive together.
    Regions are autograd nodes of their own: their gradients arrive one layer after another. Torch (2.11 to
    2.13) has this switch for all backends of a process only.
    """
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
    """Is a backend, behind what torch.compile wraps around it, a function of this package?"""
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

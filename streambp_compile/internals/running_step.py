"""Queries to torch by a running step.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils import checkpoint


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError if a boolean is false; on a GPU the device itself stops, without synchronisation."""
    torch._assert_async(condition, text)


def graph_is_kept() -> bool:
    """Does the running backward keep its graph (``retain_graph=True``), and so the saved values?"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """Does a backward run in this thread?"""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(then: Callable[[], None]) -> None:
    """Call a function when the running backward has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def use_counts(value: torch.Tensor) -> tuple[int, int]:
    """Count the references to a tensor from C++, and to its memory; a view or ``detach()`` adds one."""
    return value._use_count(), torch._C._storage_Use_Count(value.untyped_storage()._cdata)


def in_custom_forward() -> bool:
    """Does the forward of a `torch.autograd.Function` run? It switches off both modes of gradients, reverse
    and forward. Only inference mode does so as well, and it is excluded
    (torch/csrc/autograd/python_function.cpp)."""
    either = torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled()
    return not either and not torch.is_inference_mode_enabled()


def are_saved_tensors_packed() -> bool:
    """Does other code (a checkpoint, an offloader) pack the tensors that autograd saves?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def apart_from_checkpoint() -> contextlib.AbstractContextManager:
    """Keep the tensors that autograd saves inside the context, so that no checkpoint recomputes them.
    Streamed regions recompute by chunks in any case. A checkpoint would count the tensors that its second
    run keeps, and stop where they are fewer (torch/utils/checkpoint.py)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != checkpoint.__name__:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)

"""One line for trainers whose own switch for ``torch.compile`` does not take every backend."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from .config import Config
from .reporting.notices import StreamHint
from .tools.tiled_heads import trace_formulas

Target = TypeVar("Target")
MODELS = ("model", "ref_model")  # attributes of trainers that hold a model
# Arguments that hold a cache of earlier tokens; transformers renamed all others to ``cache`` in version 5.
CACHES = ("past_key_values", "cache", "cache_params")


def enable(target: Target, **options: Any) -> Target:
    """Stream a model, or the models of a trainer (Hugging Face, TRL, Accelerate, Lightning), in place.

    target   a module, or an object with one as its ``model``; a ``ref_model`` beside it streams too
    options  the ``options=`` of the backend, such as ``chunk_size``

    Names of parameters and checkpoints stay as they are, and the model may be wrapped, sharded or given
    adapters before or after. A call with a cache of earlier tokens (generation: ``past_key_values``,
    ``cache`` or ``cache_params``) runs eagerly. A head that a trainer computes in tiles of its own (TRL)
    streams by its formula.

    Returns the target. Raises ValueError for an unknown option, TypeError where no model is found.
    """
    Config.of(None, options)
    models = [target] if isinstance(target, nn.Module) else [getattr(target, n, None) for n in MODELS]
    found = [m for m in models if isinstance(m, nn.Module)]
    if not found:
        raise TypeError(
            f"A torch.nn.Module or a trainer with a model is required; got {type(target).__name__}"
        )
    for model in found:
        model._compiled_call_impl = unless_generating(model, options)
    return target


def unless_generating(model: nn.Module, options: dict[str, Any]) -> Callable:
    """Build the call that replaces a module's ``forward`` and hooks, as `torch.nn.Module.compile` does. A
    call with a cache of earlier tokens runs eagerly."""
    compiled = torch.compile(model._call_impl, backend="streambp", options=options)
    traced = functools.cache(lambda code: trace_heads(model))

    @functools.wraps(model._call_impl)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in CACHES):
            return model._call_impl(*args, **kwargs)
        if not torch.compiler.is_compiling():
            # At the call, because a trainer may give the model a forward after `enable`, or for each call.
            traced(getattr(vars(model).get("forward"), "__code__", None))
        return compiled(*args, **kwargs)

    return call


def trace_heads(model: nn.Module) -> None:
    """Trace the tiled heads of a trainer by their formulas, and warn of those that are not known."""
    for name in trace_formulas(model):
        warnings.warn(
            f"streambp: The forward that a trainer gave this model calls {name}, which breaks the graph, so "
            "that a head in it runs eagerly. Use a version of the trainer that docs/trainers.md names, or a "
            "loss of the logits.",
            StreamHint,
            stacklevel=2,
        )

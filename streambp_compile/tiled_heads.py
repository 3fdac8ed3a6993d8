"""Heads that a library computes in tiles by hand, traced as the formula that they are.

A trainer may give a model a forward of its own, which multiplies hidden states by the weight of the head tile
by tile, in an autograd function. Dynamo does not trace such a function (it writes into parts of a buffer, or
calls kernels), so the graph would break in front of the head. While Dynamo traces for this backend, the
formula is traced in its place, and streams. Eager calls, and those of other backends, run the library's own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import internals

PACKAGE = __package__
PER_TOKEN = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = PER_TOKEN,
) -> tuple[Tensor | None, ...]:
    """What TRL's trainers know of each token: the log-probability of its target, ``[N]`` in float32, and what
    is wanted of `PER_TOKEN` (entropy in nats, the log of the summed squares of probabilities, the mean logit,
    is the target the most likely word?).

    hidden      ``[N, H]``
    weight      ``[V, H]``, with its bias ``[V]``
    chunk_size  words in a tile of TRL's own, of no use here
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = F.linear(hidden, weight.to(hidden.dtype), bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    logits = logits * (1 / temperature)
    log_p = F.log_softmax(logits, -1)
    found = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    wanted: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1).float(),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * log_p.detach(), -1).float(),
        "mean_logits": lambda: logits.detach().mean(-1).float(),
        "is_top1": lambda: logits.detach().argmax(-1) == targets,
    }
    return found.float(), *(value() if name in outputs else None for name, value in wanted.items())


@dataclass(frozen=True)
class TiledHead:
    """A head that a library computes in tiles.

    name      of its autograd function, with its module
    formula   what it computes, a function of the same arguments
    example   makes arguments on which the two are compared
    switches  functions that the forward asks what the tiles need → what they answer the formula
    """

    name: str
    formula: Callable
    example: Callable[[], tuple]
    switches: Mapping[str, object] = field(default_factory=dict)


def three_of_five_words() -> tuple:
    """Arguments of `log_probabilities`: a tile of two words, a softcap, a scale and a temperature."""
    hidden, weight = (
        torch.linspace(-1, 1, rows * 4, device="cpu", dtype=torch.float32).sin().view(rows, 4)
        for rows in (3, 5)
    )
    targets = torch.tensor([0, 4, 2], device="cpu")
    given = (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        weight.detach()[:, 0].requires_grad_(),
        targets,
    )
    return (*given, 0.7, 2, 3.0, 1.5, PER_TOKEN)


HEADS = (
    # Positions without a label are left out in front of kernels, by an index that would break the graph.
    TiledHead(
        "trl.kernels.chunked_logprob.ChunkedLogProbFunction",
        log_probabilities,
        three_of_five_words,
        {"_use_triton": False},
    ),
)


def trace_formulas(model: nn.Module) -> list[str]:
    """Have Dynamo trace formulas for the tiled heads that forwards of a model call.

    Returns the names of autograd functions that such a forward calls and that are not known.
    """
    unknown = []
    for forward in given_forwards(model):
        names = forward.__globals__
        for name in forward.__code__.co_names:
            function = names.get(name)
            if not isinstance(function, type) or not issubclass(function, torch.autograd.Function):
                continue
            head = known(function)
            if head is None or not head.switches.keys() <= names.keys():
                unknown.append(qualified(function))
                continue
            names[name] = traced_as(function, head.formula)
            for switch, answer in head.switches.items():
                names[switch] = answering(names[switch], answer)
    return unknown


def given_forwards(model: nn.Module) -> Iterator[types.FunctionType]:
    """The Python functions that were set as the ``forward`` of single modules, and what those wrap."""
    for module in model.modules():
        forward = vars(module).get("forward")
        while forward is not None:
            function = getattr(forward, "__func__", forward)
            if isinstance(function, types.FunctionType):
                yield function
            forward = getattr(function, "__wrapped__", None)


def qualified(function: type) -> str:
    return f"{function.__module__}.{function.__name__}"


def known(function: type[torch.autograd.Function]) -> TiledHead | None:
    """The row of `HEADS` for a function, if it computes that formula: another version may not."""
    head = next((h for h in HEADS if h.name == qualified(function)), None)
    if head is None:
        return None
    try:
        with torch.enable_grad():
            results = [values_and_gradients(call, head.example()) for call in (function.apply, head.formula)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    except Exception:
        internals.log.debug("%s does not compute its formula", head.name, exc_info=True)
        return None
    return head


def values_and_gradients(call: Callable, arguments: tuple) -> list[Tensor]:
    values = list(call(*arguments))
    inputs = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    total = torch.stack([v.cos().sum() for v in values if v.requires_grad]).sum()
    return [*values, *torch.autograd.grad(total, inputs)]


def traced_as(function: type[torch.autograd.Function], formula: Callable) -> type:
    """What stands for an autograd function where a forward looks it up."""

    def apply(*args: object, **kwargs: object) -> object:
        if internals.is_traced_for(PACKAGE):
            return formula(*args, **kwargs)
        return function.apply(*args, **kwargs)

    return type(function.__name__, (), {"apply": staticmethod(apply), "__module__": function.__module__})


def answering(function: Callable, answer: object) -> Callable:
    """A function with another answer while Dynamo traces for this backend."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return answer if internals.is_traced_for(PACKAGE) else function(*args, **kwargs)

    return call

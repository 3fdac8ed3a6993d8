"""Heads that a library computes in tiles by hand, traced as the formula that they compute.

A trainer may give a model a forward of its own, which multiplies hidden states by the weight of the head
tile by tile, in an autograd function. Dynamo does not trace such a function (it writes into parts of a
buffer, or calls kernels), so the graph would break in front of the head. While Dynamo traces for this
backend, the formula is traced instead, and streams. Eager calls, and those of other backends, run the
library's own function.

Here alone a function is known by its name. What its tiles compute stands in no graph, so its form cannot
be recognised; its values and gradients are compared with the formula's before it is replaced.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import internals

PACKAGE = __name__.partition(".")[0]
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
    """Compute the values of each token that TRL's trainers read.

    The first is the log-probability of its target, ``[N]`` in float32. Then come those of `PER_TOKEN`
    that ``outputs`` names: entropy in nats, the log of the summed squares of probabilities, the mean
    logit, and whether the target is the most likely word.

    hidden      ``[N, H]``
    weight      ``[V, H]``, with its bias ``[V]``
    chunk_size  words in one of TRL's tiles, not used here
    """
    logits = logits_of(hidden, weight, bias, temperature, logit_scale, final_logit_softcapping)
    log_p = F.log_softmax(logits, -1)
    found = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    wanted: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1).float(),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * log_p.detach(), -1).float(),
        "mean_logits": lambda: logits.detach().mean(-1).float(),
        "is_top1": lambda: logits.detach().argmax(-1) == targets,
    }
    return found.float(), *(value() if name in outputs else None for name, value in wanted.items())


def divergences(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the divergence and entropy of each token that TRL's distillation reads.

    The divergence is the generalised Jensen-Shannon divergence of a student's words from a teacher's
    (https://arxiv.org/abs/2306.13649). The entropy is the student's, without gradient. Each is ``[N]``
    in nats, in float32.

    hidden  ``[N, H]``, of another H for the teacher
    weight  ``[V, H]``, with its bias ``[V]``
    beta    0 is the forward KL divergence, 1 the reverse one
    """
    scale, cap = student_logit_scale, student_final_logit_softcapping
    log_p = logits_of(student_hidden, student_weight, student_bias, temperature, scale, cap).log_softmax(-1)
    scale, cap = teacher_logit_scale, teacher_final_logit_softcapping
    log_q = logits_of(teacher_hidden, teacher_weight, teacher_bias, temperature, scale, cap).log_softmax(-1)
    log_q = log_q.detach()
    p, q = log_p.exp(), log_q.exp()
    entropy = -(p * log_p).sum(-1).detach()
    if beta == 0:
        found = q * (log_q - log_p)
    elif beta == 1:
        found = p * (log_p - log_q)
    else:
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        found = beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
    return found.sum(-1).float(), entropy.float()


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float, cap: float | None
) -> Tensor:
    """Compute logits ``[N, V]`` in float32 or wider, scaled, capped and divided by the temperature."""
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits * (1 / temperature)


@dataclass(frozen=True)
class TiledHead:
    """A head that a library computes in tiles.

    name      of its autograd function, with its module
    formula   the function that it computes, with the same arguments
    examples  builds arguments on which the two are compared; each call builds the same ones anew
    switches  functions that the forward calls to learn the tiles' needs → their answers for the formula
    """

    name: str
    formula: Callable
    examples: Callable[[], Sequence[tuple]]
    switches: Mapping[str, object] = field(default_factory=dict)


def head_of_five_words(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Build hidden states of three tokens, a weight and a bias."""
    hidden, weight = (
        torch.linspace(-1, width, rows * width, device="cpu", dtype=torch.float32).sin().view(rows, width)
        for rows in (3, 5)
    )
    return hidden.requires_grad_(), weight.requires_grad_(), weight.detach()[:, 0].requires_grad_()


def three_targets() -> list[tuple]:
    """Build arguments of `log_probabilities`: a tile of two words, a softcap, a scale and a temperature."""
    targets = torch.tensor([0, 4, 2], device="cpu")
    return [(*head_of_five_words(4), targets, 0.7, 2, 3.0, 1.5, PER_TOKEN)]


def three_divergences() -> list[tuple]:
    """Build arguments of `divergences`: all kinds of them, with another softcap and scale of the teacher."""
    teacher = [t.detach() for t in head_of_five_words(3)]
    return [(*head_of_five_words(4), *teacher, beta, 0.7, 1.5, 3.0, 0.8, 2.0) for beta in (0.0, 0.3, 1.0)]


HEADS = (
    # In front of Triton kernels, positions without a label are dropped by an index that breaks the graph.
    TiledHead(
        "trl.kernels.chunked_logprob.ChunkedLogProbFunction",
        log_probabilities,
        three_targets,
        {"_use_triton": False},
    ),
    TiledHead(
        "trl.kernels.chunked_divergence.ChunkedDivergenceFunction",
        divergences,
        three_divergences,
        {"_use_triton": False},
    ),
)


def trace_formulas(model: nn.Module) -> list[str]:
    """Replace the tiled heads that a model's forwards call, so that Dynamo traces their formulas. Returns the
    names of autograd functions that such a forward calls and that are not known."""
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
    """Yield the Python functions set as the ``forward`` of single modules, and the functions that they
    reach."""
    for module in model.modules():
        yield from reached(vars(module).get("forward"))


def reached(forward: object) -> Iterator[types.FunctionType]:
    """Yield a Python function, the one that it wraps, and those of its package that it holds or names."""
    waiting, seen = [forward], set()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        yield function
        named = map(function.__globals__.get, function.__code__.co_names)
        others = (*named, *map(contents, function.__closure__ or ()))
        waiting += [f for f in others if package_of(f) == package_of(function)]
        waiting.append(getattr(function, "__wrapped__", None))


def contents(cell: types.CellType) -> object:
    """Return the value that a function holds in a cell of its closure; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def package_of(value: object) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def qualified(function: type) -> str:
    return f"{function.__module__}.{function.__name__}"


def known(function: type[torch.autograd.Function]) -> TiledHead | None:
    """Find the row of `HEADS` for a function, if it computes that formula: another version may not."""
    head = next((h for h in HEADS if h.name == qualified(function)), None)
    if head is None:
        return None
    try:
        with torch.enable_grad():
            calls = (function.apply, head.formula)
            results = [[values_and_gradients(call, given) for given in head.examples()] for call in calls]
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
    """Build the stand-in for an autograd function in the globals of a forward."""

    def apply(*args: object, **kwargs: object) -> object:
        if internals.is_traced_for(PACKAGE):
            return formula(*args, **kwargs)
        return function.apply(*args, **kwargs)

    return type(function.__name__, (), {"apply": staticmethod(apply), "__module__": function.__module__})


def answering(function: Callable, answer: object) -> Callable:
    """Wrap a function to return another answer while Dynamo traces for this backend."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return answer if internals.is_traced_for(PACKAGE) else function(*args, **kwargs)

    return call

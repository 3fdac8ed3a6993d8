"""Python floats that change from step to step are inputs: they stream, and another value compiles nothing."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Layer, worst_error
from torch import nn

from streambp_compile import NotStreamed, StreamHint

VOCABULARY, TOKENS = 32, 40
EXACT = 1e-10


class Model(nn.Module):
    """A decoder whose loss is given by a function of logits, targets and a number."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, 32), Layer(32, 2)
        self.head, self.loss = nn.Linear(32, VOCABULARY, bias=False), loss

    def forward(self, ids, number):
        return self.loss(self.head(self.layer(self.embed(ids))), ids.roll(-1, 1), number)


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def temperature(logits, targets, t):
    return token_loss(logits / t, targets)


def mixture(logits, targets, t):
    return (1 - t) * token_loss(logits, targets) + t**2 * logits.logsumexp(-1).pow(2).mean()


def functions(logits, targets, t):
    return token_loss(logits * math.sqrt(max(t, 0.5)), targets) * min(t, 2.0)


def in_place(logits, targets, t):
    logits = logits.clone()
    logits *= t
    return token_loss(logits, targets)


def whole_numbers(logits, targets, t):
    return token_loss(logits, targets) + (targets * t).mean() * logits.mean()


def as_constant(logits, targets, t):
    """``label_smoothing`` takes a number and no tensor."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=t / 10)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(model, function, ids, number):
    model.zero_grad()
    loss = function(ids, number)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


def check(loss, numbers, dynamic=None, lengths=(TOKENS,)) -> list[int]:
    """Every call streams and is exact; returns the number of graphs after each."""
    torch.manual_seed(0)
    truth = Model(loss).double()
    model = copy.deepcopy(truth)
    compiled = torch.compile(model, backend="streambp", dynamic=dynamic, options={"chunk_size": 16})
    torch._dynamo.utils.counters.clear()
    seen = []
    for number in numbers:
        for length in lengths:
            ids = torch.randint(0, VOCABULARY, (2, length))
            with warnings.catch_warnings():
                warnings.simplefilter("error", NotStreamed)
                found = trained(model, compiled, ids, number)
            assert worst_error(found, trained(truth, truth, ids, number)) < EXACT
        seen.append(graphs())
    return seen


@pytest.mark.parametrize(
    "loss",
    [
        mixture,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (in_place, temperature, functions, whole_numbers)),
    ],
)
def test_a_third_value_compiles_nothing(loss, interpreted):
    constant, symbolic, again = check(loss, (1.25, 1.5, 1.75))
    assert (constant, symbolic, again) == (1, 2, 2)


def test_what_takes_numbers_only_has_them_as_constants(interpreted):
    assert check(as_constant, (0.25, 0.5, 0.75)) == [1, 2, 3]


@pytest.mark.parametrize("loss", [temperature, pytest.param(mixture, marks=pytest.mark.slow)])
def test_all_sizes_and_numbers_symbolic_from_the_start(loss, interpreted):
    seen = check(loss, (1.25, 1.5), dynamic=True, lengths=(TOKENS, 24))
    assert seen[0] == seen[1], "neither another number nor another length compiles anything"


@pytest.mark.slow
def test_symbolic_lengths_and_numbers_in_compiled_bodies(fresh_dynamo):
    """A mean over all tokens divides by an expression of the length, whose symbols the body needs as well."""
    check(mixture, (1.25, 1.5), lengths=(TOKENS, 56))


def divided_by_itself(logits, targets, _):
    loss = token_loss(logits, targets)
    return loss / loss.item()


def scaled(logits, targets, _):
    largest = logits.abs().max().item()
    return token_loss(logits / largest, targets) * largest


def filled(logits, targets, _):
    """``full`` takes a number and no tensor."""
    return token_loss(logits / torch.full((1,), logits.abs().max().item(), dtype=logits.dtype), targets)


def factor_of_a_sum(logits, targets, _):
    return token_loss(torch.add(logits, logits, alpha=logits.abs().max().item()), targets)


def size(logits, targets, _):
    return token_loss(logits, targets) * torch.ones(targets.max().item() + 1, dtype=logits.dtype).sum()


def branch(logits, targets, _):
    loss = token_loss(logits, targets)
    return loss if loss.item() < 3 else loss * 2


READING = (divided_by_itself, scaled, filled, factor_of_a_sum, size, branch)


@pytest.mark.parametrize("loss", READING, ids=lambda loss: loss.__name__)
def test_numbers_that_the_graph_computes(loss, interpreted):
    """A number has no gradient. Where a reader takes no tensor, the graph breaks as it does by default."""
    model, ids = Model(loss).double(), torch.randint(VOCABULARY, (2, TOKENS))
    expected = torch.autograd.grad(model(ids, 0.0), list(model.parameters()))
    with torch._dynamo.config.patch(capture_scalar_outputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamHint)  # of a break behind the head
        step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
        found = torch.autograd.grad(step(ids, 0.0), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert worst_error(dict(zip(names, found)), dict(zip(names, expected))) < EXACT

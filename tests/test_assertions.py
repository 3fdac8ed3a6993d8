"""The user's assertions on values: they raise, and cost no memory.

The model is in another file, because pytest rewrites assertions in this one.
"""

from functools import partial

import pytest
import torch
from models import Asserting, Plain, gradients, ids_of, worst_error

from benchmarks.memory import peak

pytestmark = pytest.mark.usefixtures("interpreted")


def test_what_is_true_changes_nothing():
    """A warning is an error here."""
    model, ids = Asserting(1000).double(), ids_of(2, 43)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16}, fullgraph=True)
    expected = gradients(model, lambda: model(ids, ids))
    assert worst_error(gradients(model, lambda: step(ids, ids)), expected) < 1e-10


@pytest.mark.parametrize("grad", (True, False))
def test_what_is_false_raises(grad):
    model, ids = Asserting(20), ids_of(2, 43)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="labels"):
        step(ids, ids)


def test_it_raises_in_a_later_call():
    """And not in one before: what is asserted is no constant."""
    model, ids = Asserting(1000), ids_of(2, 43)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    step(ids, ids).backward()
    with torch.no_grad():
        model.head.bias[3] = torch.inf
    with pytest.raises(RuntimeError, match="logits"):
        step(ids, ids)


def test_beside_outputs_that_are_views():
    def function(x, weight):
        y = x @ weight
        torch._assert(y.isfinite().all(), "rows")
        return y, y.view(-1), x.mT

    x, weight = torch.randn(2, 40, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    found = torch.compile(function, backend="streambp")(x, weight)
    assert len(found) == 3
    for ours, expected in zip(found, function(x, weight)):
        torch.testing.assert_close(ours, expected)


def test_no_logits_of_all_tokens_exist():
    model, ids = Asserting(1000, vocabulary=4096), ids_of(2, 1024)
    step = torch.compile(model, backend="streambp")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(ids, ids).backward()
    assert peak(lambda: step(ids, ids).backward()) < 2 * 1024 * 4096 * 4 / 2


@pytest.mark.parametrize(
    "check", (torch._check_tensor_all, partial(torch._check_tensor_all_with, ValueError))
)
def test_torch_checks_of_values_break_no_graph(check):
    """Hugging Face's multimodal models check so that there are as many image tokens as features. An assertion
    raises RuntimeError, a check what it names; a stock backend raises it between two graphs."""
    model, ids = Plain().double(), ids_of(2, 43)

    def loss_of(model, limit):
        check(ids < limit)
        return model(ids, ids)

    step = torch.compile(loss_of, backend="streambp", options={"chunk_size": 16}, fullgraph=True)
    expected = gradients(model, lambda: loss_of(model, 1000))
    assert worst_error(gradients(model, lambda: step(model, 1000)), expected) < 1e-10
    with pytest.raises(RuntimeError, match="not all values are true"):
        step(model, 3)
    torch._dynamo.reset()
    with pytest.raises((ValueError, RuntimeError)):
        torch.compile(loss_of, backend="eager")(model, 3)

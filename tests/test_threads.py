"""Several threads that compile and train at once, each a model of its own or all the same one."""

import threading

import pytest
import torch
from models import Plain, ids_of
from torch._dynamo.convert_frame import compile_lock
from torch.fx._symbolic_trace import Tracer

from streambp_compile.runtime.gradient_ownership import plain_references

pytestmark = pytest.mark.usefixtures("interpreted")
LENGTHS = (61, 43)


def model_of(seed: int) -> Plain:
    torch.manual_seed(seed)
    return Plain(256, 16, 2, 1).double()


def gradients(model: Plain, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def loss_of(model: Plain, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, ids)


def loss_of_logits(model: Plain, ids: torch.Tensor) -> torch.Tensor:
    """Of logits that are computed later, behind a break of the graph."""
    logits = model.head(model.norm(model.layers[0](model.embed(ids))))
    torch._dynamo.graph_break()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(function, ids: dict[int, torch.Tensor], models: list[Plain]) -> list[list]:
    """The gradients of all models and lengths, each model trained by a thread of its own."""
    found: list = [None] * len(models)
    together = threading.Barrier(len(models))

    def train(i: int) -> None:
        together.wait()
        found[i] = [gradients(models[i], function(models[i], ids[n])) for n in LENGTHS]

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.long
@pytest.mark.inductor  # `torch.fx.Interpreter`, which interprets bodies in other tests, is for one thread
@pytest.mark.parametrize(
    "models", [[0, 1], pytest.param([0, 0], marks=pytest.mark.slow)], ids=["each", "one"]
)
def test_gradients_are_those_of_eager(models):
    made = {seed: model_of(seed) for seed in models}
    models, ids = [made[seed] for seed in models], {n: ids_of(2, n) for n in LENGTHS}
    expected = [[gradients(m, loss_of(m, ids[n])) for n in LENGTHS] for m in models]
    found = trained(torch.compile(loss_of, backend="streambp", options={"chunk_size": 16}), ids, models)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "function, options",
    [
        (loss_of, {}),
        pytest.param(loss_of, {"memory_budget": "1MiB"}, marks=pytest.mark.slow),
        pytest.param(loss_of_logits, {}, marks=pytest.mark.slow),
    ],
)
def test_what_is_traced_while_a_step_runs_holds_the_lock_of_dynamo(function, options, monkeypatch):
    """Tracing patches `torch.nn.Module` for all threads, and so for one that Dynamo traces."""
    held, trace = [], Tracer.trace

    def watched(self, *args, **kwargs):
        held.append(compile_lock._is_owned())
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(Tracer, "trace", watched)
    plain_references.cache_clear()
    step = torch.compile(function, backend="streambp", options={"chunk_size": 16, **options})
    model = model_of(0)
    for length in (3, 61):  # three tokens run unchunked, and their backward is compiled when it is first run
        gradients(model, step(model, ids_of(2, length)))
    assert len(held) > 1
    assert all(held)

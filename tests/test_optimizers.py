"""What is no training graph, as eager and silent: optimizers, averages, clipping, transforms of torch.func.

All of torch's list of optimizers is slow; `python -m benchmarks.torch_lists optim_db` makes a page of it.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import torch_lists
from streambp_compile import NotStreamed, backend, explain, internals
from streambp_compile.internals.fake_tensors import RealTensorRead

pytest.importorskip("expecttest")  # of torch's lists
pytestmark = pytest.mark.usefixtures("interpreted")

LIST = torch_lists.entries("optim_db")


@pytest.fixture(autouse=True)
def float64():
    """Step counters have the default dtype, and compiled code computes with them."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CASES = {f"{entry}: {case.name}": case for entry, cases in LIST.items() for case in cases()}
SOME = {
    "AdamW: foreach=False",
    "Adam: weight_decay=0.1, amsgrad=True, foreach=True",
    "NAdam: groups=2, foreach=False",
    "SGD: momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False",
    "RMSprop: weight_decay=0.1, centered=True, momentum=0.1, foreach=False",
    "Muon: default",
}
assert SOME <= set(CASES), SOME - set(CASES)


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_three_steps_of_an_optimizer(name):
    found, why = torch_lists.verdict(CASES[name])
    assert found not in (torch_lists.WRONG, torch_lists.CRASH), why
    assert name not in SOME or found == torch_lists.EQUAL, why


def weights_with_gradients() -> list[Tensor]:
    weights = [nn.Parameter(torch.randn(s)) for s in ((5, 3), (7,))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def clipped_norms():
    weights = weights_with_gradients()
    return lambda: nn.utils.clip_grad_norm_(weights, 0.5), lambda: [w.grad for w in weights]


def zeroed():
    weights = weights_with_gradients()
    optimizer = torch.optim.SGD(weights, 0.1)
    return lambda: optimizer.zero_grad(set_to_none=False), lambda: [w.grad for w in weights]


def moving_average():
    model = nn.Linear(8, 8)
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update() -> None:
        for a, w in zip(average.parameters(), model.parameters()):
            a.lerp_(w, 0.1)

    return update, lambda: list(average.parameters())


def averaged_model():
    model = nn.Linear(8, 8)
    multi = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi)
    return lambda: average.update_parameters(model), lambda: [*average.parameters(), *average.buffers()]


def scaled():
    weights = weights_with_gradients()
    optimizer, scaler = torch.optim.AdamW(weights, 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    def step() -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        scaler.step(optimizer)
        scaler.update()

    return step, lambda: weights


def counted():
    right, logits, labels = torch.zeros(()), torch.randn(4, 20, 9), torch.arange(20) % 9

    @torch.no_grad()
    def count() -> Tensor:
        right.add_((logits.argmax(-1) == labels).sum())
        return right / labels.numel()

    return count, lambda: [right]


def batch_statistics():
    norm, x = nn.BatchNorm1d(8), torch.randn(16, 8)
    return torch.no_grad()(lambda: norm(x)), lambda: list(norm.buffers())


def whole_step():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
    optimizer, ids = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), torch.randint(0, 11, (2, 33))

    def step() -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: list(model.parameters())


UPDATES = (clipped_norms, zeroed, moving_average, scaled, counted, batch_statistics)


def after_three(make, backend: str | None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    run, state = make()
    run = torch.compile(run, backend=backend) if backend else run
    results = [run() for _ in range(3)]
    return [v.detach().clone() for v in (*results, *state()) if isinstance(v, Tensor)]


@pytest.mark.filterwarnings("error::streambp_compile.StreamHint")
@pytest.mark.parametrize("make", [*UPDATES, pytest.param(averaged_model, marks=pytest.mark.slow)])
def test_updates_of_state(make):
    torch.testing.assert_close(after_three(make, "streambp"), after_three(make, None), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore::streambp_compile.StreamHint")  # loss.backward() breaks the graph
def test_a_whole_step_in_one_function():
    torch.testing.assert_close(
        after_three(whole_step, "streambp"), after_three(whole_step, None), rtol=1e-9, atol=1e-12
    )


def test_an_update_has_nothing_to_stream():
    update, _ = moving_average()
    (region,) = explain(update).regions
    assert region.has_nothing_to_stream and "only writes into its inputs" in str(region)


# Analysis changes nothing


def test_an_analysis_that_fails_has_changed_nothing(monkeypatch):
    def fails_late(module, fakes):
        find_axes(module, fakes)
        raise AssertionError("a defect")

    find_axes = backend.find_axes
    monkeypatch.setattr(backend, "find_axes", fails_late)
    weight, seen = nn.Parameter(torch.ones(4)), torch.zeros(())

    def loss(x: Tensor) -> Tensor:
        seen.add_(1)
        return (x * weight).square().sum()

    with pytest.warns(NotStreamed, match="a defect"):
        torch.compile(loss, backend="streambp")(torch.ones(3, 12, 4)).backward()
    assert seen == 1 and torch.equal(weight.grad, torch.full_like(weight, 72))


def test_no_tensor_of_the_user_reaches_an_operator():
    weight, constant = torch.ones(4), torch.ones(())
    with internals.NothingReal([weight]):
        made = torch.zeros(4) + constant
        made.add_(constant)
        for refused in (weight.sin, lambda: weight[1:].add_(made[1:])):
            with pytest.raises(RealTensorRead, match="a tensor of the user reached"):
                refused()
        with pytest.raises(RealTensorRead, match="writes into a constant"):
            constant.add_(1)
    assert torch.equal(weight, torch.ones(4)) and constant == 1


def test_attributes_of_a_graph_are_inputs():
    """Dynamo hands weights of an optimizer over as attributes of the graph."""
    weight = nn.Parameter(torch.randn(6, 6))
    optimizer, x = torch.optim.SGD([weight], 0.1), torch.randn(2, 24, 6)

    def loss() -> Tensor:
        (w,) = optimizer.param_groups[0]["params"]
        return F.gelu(x @ w).square().mean()

    compiled = torch.compile(loss, backend="streambp", options={"chunk_size": 8})
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        expected = weight.grad.clone()
        optimizer.zero_grad()
        compiled().backward()
        torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-14)
        optimizer.step()


# Transforms of torch.func


def squares(x: Tensor) -> Tensor:
    return F.gelu(x).square().sum()


def rows(x: Tensor) -> Tensor:
    return torch.stack([(x[0] * x[1]).sin(), x.square().sum()])


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(squares)(x),
    "grad of grad": lambda x: torch.func.grad(lambda y: torch.func.grad(squares)(y).sin().sum())(x),
    "grad for each": lambda x: torch.func.vmap(torch.func.grad(squares))(torch.stack([x, x.sin()])),
    "vmap": lambda x: torch.func.vmap(torch.sin)(x[None]),
    "jvp": lambda x: torch.func.jvp(squares, (x,), (x.cos(),))[1],
    "vjp": lambda x: torch.func.vjp(squares, x)[1](x.sum())[0],
    "jacrev": lambda x: torch.func.jacrev(rows)(x),
    "jacfwd": lambda x: torch.func.jacfwd(rows)(x),
    "hessian": lambda x: torch.func.hessian(squares)(x),
}


SLOW = {"hessian", "jacfwd", "grad of grad"}


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TRANSFORMS]
)
def test_transforms_run_as_inductor_runs_them(name):
    x = torch.randn(12)
    found = torch.compile(TRANSFORMS[name], backend="streambp")(x)
    torch.testing.assert_close(found, TRANSFORMS[name](x), rtol=1e-10, atol=1e-12)

"""Buffers that a forward updates, weights of tensor subclasses, transforms of torch.func: as eager."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, Layer, ids_of, worst_error
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from streambp_compile import NotStreamed, explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
OPTIONS = {"chunk_size": 16}


class Model(nn.Module):
    """Layers that go by themselves, and the loss."""

    def __init__(self, layers, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


class Routed(Layer):
    """A mixture of two experts, balanced by a bias that the forward updates (DeepSeek-V3)."""

    def __init__(self):
        super().__init__(32, 2)
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        scores = self.gate(x).softmax(-1)
        chosen = F.one_hot((scores + self.bias).argmax(-1), 2).to(x.dtype)
        load = chosen.mean((0, 1))
        with torch.no_grad():
            self.bias += 0.1 * (load.mean() - load).sign()
        return x + sum((chosen * scores)[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Counting(Layer):
    def __init__(self):
        super().__init__(32, 2)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + 1 / (1 + self.count))


class Averaging(Layer):
    """Reads its running average before it updates it."""

    def __init__(self):
        super().__init__(32, 2)
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.average)
        self.average.lerp_(y.detach().mean((0, 1)), 0.1)
        return y


class Normed(Layer):
    def __init__(self):
        super().__init__(32, 2)
        self.batch_norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x))


class Clamped(Layer):
    """Clamps its weights before it reads them, by all names that they have."""

    def __init__(self):
        super().__init__(32, 2)
        self.mix, self.turn = (nn.Parameter(torch.randn(32, 32) * 0.2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mix.data.clamp_(-0.1, max=0.1)
        self.turn.data.clamp_(max=0.1)
        return y + y @ self.mix @ self.turn


class Carrying(Model):
    """Layers hand something on in a buffer."""

    def __init__(self):
        super().__init__([Layer(32, 2) for _ in range(2)])
        self.register_buffer("last", torch.zeros(32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) * (1 + self.last)
            self.last.copy_(x.detach()[:, -1].mean(0))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


def spectral() -> Model:
    model = Model([Layer(32, 2)])
    nn.utils.parametrizations.spectral_norm(model.layers[0].up)
    nn.utils.spectral_norm(model.head)
    return model


STATES = {
    "spectral norm": spectral,
    "router": lambda: Model([Routed()]),
    "counter": lambda: Model([Counting()]),
    "clamped weights": lambda: Model([Clamped(), Clamped()]),
    "average": lambda: Model([Averaging()]),
    "batch norm": lambda: Model([Normed()]),
    "between layers": Carrying,
}


def step(model: nn.Module, losses) -> dict[str, Tensor]:
    """Gradients and buffers after a backward of all losses together, and one step of plain descent."""
    model.zero_grad()
    sum(losses()).backward()
    found = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return {**found, **{n: b.double().clone() for n, b in model.named_buffers()}}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")  # batch norm: sums over tokens
@pytest.mark.parametrize("name", STATES)
def test_state_that_the_forward_updates(name):
    """Two steps, and a third of two forwards before their backward, which sees what each of them has read."""
    truth = STATES[name]().double()
    model, batches = copy.deepcopy(truth), [ids_of(2, 37) for _ in range(4)]
    buffers = dict(model.named_buffers())
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    for used in (batches[:1], batches[1:2], batches[2:]):
        found = step(model, lambda: [compiled(ids) for ids in used])
        expected = step(truth, lambda: [truth(ids) for ids in used])
        for key in {k for k, v in expected.items() if v.norm() < 1e-12}:
            assert found.pop(key).norm() < 1e-12 and expected.pop(key).norm() < 1e-12
        assert worst_error(found, expected) < EXACT
    assert all(buffers[n] is b for n, b in model.named_buffers())


@pytest.mark.long
@pytest.mark.filterwarnings("error::streambp_compile.NotStreamed")
def test_weights_that_are_clamped_before_their_use_stream():
    report = explain(Model([Clamped(), Clamped()]), ids_of(2, 37))
    assert all(region.streamed for region in report.regions)


@pytest.mark.filterwarnings("ignore::streambp_compile.StreamHint")  # logits leave the function
def test_state_beside_logits_is_updated_once():
    """A head whose weight is normed in the forward is not recomputed when its logits are read."""

    class Returning(Model):
        def forward(self, ids):
            return self.head(self.norm(self.layers[0](self.embed(ids))))

    truth = Returning([Layer(32, 2)])
    nn.utils.spectral_norm(truth.head)
    truth = truth.double()
    model, ids = copy.deepcopy(truth), ids_of(2, 37)
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)

    def losses(function):
        return lambda: [function(ids).logsumexp(-1).mean(), function(ids).pow(2).mean()]

    for _ in range(2):
        found, expected = step(model, losses(compiled)), step(truth, losses(truth))
        assert worst_error(found, expected) < EXACT


# Weights of other classes


class Scaled(torch.Tensor):
    """A quantised weight: bytes and a scale."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=scale.dtype, device=values.device
        )

    def __init__(self, values: Tensor, scale: Tensor):
        self.values, self.scale = values, scale

    @staticmethod
    def of(weight: Tensor) -> nn.Parameter:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        values = (weight.detach() / scale).round().to(torch.int8)
        return nn.Parameter(Scaled(values, scale), requires_grad=False)

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Scaled(parts["values"], parts["scale"])

    def __repr__(self):  # torch's own asks for values, which a fake has none of
        return f"Scaled({self.values}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale)
        return func(*pytree.tree_map_only(Scaled, lambda t: t.values * t.scale, args), **(kwargs or {}))


class Held(torch.Tensor):
    """As a DTensor is: what is made of it is of its class."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Held(parts["inner"])

    def __repr__(self):
        return f"Held({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(Held, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Held, func(*args, **kwargs))


class Adapted(nn.Module):
    """A frozen quantised projection and a low-rank one that learns."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.weight, self.bias = Scaled.of(plain.weight), plain.bias
        self.down = nn.Linear(plain.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, plain.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.up(self.down(x))


def quantised() -> Model:
    torch.manual_seed(0)
    model = Model([Layer(32, 2) for _ in range(2)]).double()
    for layer in model.layers:
        layer.qkv, layer.up = Adapted(layer.qkv), Adapted(layer.up)
    model.head.weight = Scaled.of(model.head.weight)
    return model


@pytest.mark.long
@pytest.mark.quick
def test_quantised_weights_stream():
    truth, model, ids = quantised(), quantised(), ids_of(2, 37)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        compiled = torch.compile(model, backend="streambp", options=OPTIONS)
        for _ in range(2):
            found, expected = (step(m, lambda: [f(ids)]) for m, f in ((model, compiled), (truth, truth)))
            assert worst_error(found, expected) < EXACT
        assert "predicted peak of a step" in str(explain(model, ids, streambp_options=OPTIONS))


class WithoutViews(Scaled):
    """As torchao's weights are: its dimensions cannot be put in another order."""

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return WithoutViews(parts["values"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.permute.default:
            raise NotImplementedError
        if func is torch.ops.aten.detach.default:
            return WithoutViews(args[0].values, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_logits_of_a_quantised_head_are_read_later():
    """And what it is made of may not change before."""
    model, ids = quantised(), ids_of(2, 37)
    model.head.weight = nn.Parameter(
        WithoutViews(*(getattr(model.head.weight, n) for n in ("values", "scale")))
    )
    model.head.weight.requires_grad_(False)
    truth = model.logits(ids).detach()
    compiled = torch.compile(model.logits, backend="streambp", options=OPTIONS)
    torch.testing.assert_close(compiled(ids).detach(), truth, rtol=EXACT, atol=EXACT)
    logits = compiled(ids)
    model.head.weight.scale.data.mul_(2)
    with pytest.raises(RuntimeError, match="overwritten"):
        logits.sum().item()


@pytest.mark.long
def test_hidden_states_of_a_subclass_are_refused_by_name():
    model = Model([Layer(32, 2)]).double()
    model.embed.weight = nn.Parameter(Held(model.embed.weight.detach()))
    ids = ids_of(2, 37)
    with pytest.warns(NotStreamed, match="hidden states are Held, a tensor subclass"):
        loss = torch.compile(model, backend="streambp")(ids)
    torch.testing.assert_close(loss.inner.detach(), model(ids).inner.detach(), rtol=EXACT, atol=0)


# Transforms, inference mode


class Spelt(Layer):
    """Attention without a kernel, which torch can differentiate twice."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(ahead, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.long
def test_the_gradient_of_a_model_streams_and_other_transforms_are_refused_by_name():
    model, ids = Model([Spelt(32, 2)]).double(), ids_of(2, 37)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (ids,))

    gradient = torch.func.grad(loss)
    expected = gradient(weights)
    found = torch.compile(gradient, backend="streambp", options={"chunk_size": 8, "strict": True})(weights)
    assert worst_error(found, expected) < EXACT

    def backward(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        value, of = torch.func.vjp(loss, weights)
        return of(torch.ones_like(value))[0]

    with pytest.warns(NotStreamed, match="torch.func") as told:
        found = torch.compile(backward, backend="streambp")(weights)
    assert len([w for w in told if issubclass(w.category, NotStreamed)]) == 1
    assert worst_error(found, expected) < EXACT
    with pytest.raises(Exception, match="torch.func"):
        torch._dynamo.reset()
        torch.compile(backward, backend="streambp", options={"strict": True})(weights)


@pytest.mark.long
def test_a_mask_made_in_inference_mode():
    class Masked(Layer):
        def forward(self, x, mask):
            batch, length, width = x.shape
            parts = self.qkv(self.norm1(x)).split(width, -1)
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    class Given(Model):
        def forward(self, ids, mask):
            x = self.layers[0](self.embed(ids), mask)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())

    truth, ids = Given([Masked(32, 2)]).double(), ids_of(2, 37)
    model = copy.deepcopy(truth)
    with torch.inference_mode():
        mask = torch.ones(37, 37, dtype=torch.bool).tril()[None, None]
    compiled = torch.compile(model, backend="streambp", options=OPTIONS)
    for ahead in (False, True):
        with torch.inference_mode():
            mask[0, 0, 3, 30] = ahead
        found, expected = step(model, lambda: [compiled(ids, mask)]), step(truth, lambda: [truth(ids, mask)])
        assert worst_error(found, expected) < EXACT


def overwritten(y: Tensor, rows: Tensor) -> None:
    y.copy_(torch.where(rows > 0, rows, y))


def added_to(y: Tensor, rows: Tensor) -> Tensor:
    y.mul_(2).add_(rows)
    return y.sin()


def scattered(y: Tensor, rows: Tensor) -> None:
    y[:, 3:20] = rows[:, 3:20] + y[:, :17]


@pytest.mark.parametrize("write", [overwritten, added_to, scattered])
def test_inputs_that_are_written_into_pass_gradients_on(write):
    """Hidden states that another function computed: a layer with a graph break gets such inputs."""
    x, weight = torch.randn(2, 43, 8).double().requires_grad_(), torch.randn(8, 8).double().requires_grad_()

    def gradients_by(called):
        y = x * 2
        result = called(y, (x @ weight).tanh())
        loss = y.square().sum() + (0 if result is None else result.sum())
        return torch.autograd.grad(loss, (x, weight))

    expected = gradients_by(write)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients_by(torch.compile(write, backend="streambp", options=OPTIONS))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def of_input(y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return y.view(-1, 8), (y + weight.sum()).sum()


def of_output(y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    made = y * 3 + weight.sum()
    return made[:, 3:].transpose(0, 1), made, made.sum()


@pytest.mark.parametrize("function", [of_input, of_output])
def test_what_is_written_into_a_returned_view_is_written_into_its_base(function):
    x, weight = torch.randn(2, 43, 8).double().requires_grad_(), torch.randn(8, 8).double().requires_grad_()

    def gradients_by(called):
        y = x * 2
        view, *others = called(y, weight)
        view.mul_(2).add_(1)
        loss = sum(other.sin().sum() for other in (y, *others))
        return loss, *torch.autograd.grad(loss, (x, weight))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients_by(torch.compile(function, backend="streambp", options=OPTIONS))
    for a, b in zip(found, gradients_by(function), strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)

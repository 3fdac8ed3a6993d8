"""Whole models: streamed gradients equal eager ones, whatever surrounds the compiled function.

`make test` compiles the bodies of tests marked ``inductor``, `make test-compiled` those of all.
"""

import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import LlamaLike, Plain, gradients, hugging_face, ids_of, total_error, truth_of, worst_error
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from streambp_compile import NotStreamed, StreamHint, internals
from streambp_compile.backend import streambp
from streambp_compile.runtime.rematerialisation import Again, Recipe, saved_as

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
LOG = logging.getLogger("loss")


def compiled(function, chunk_size: int | None = 32, **options):
    return torch.compile(function, backend="streambp", options={"chunk_size": chunk_size, **options})


def bodies() -> int:
    return counters["streambp"]["bodies"]


@torch.library.custom_op("streambp_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * x.cos()


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


opaque.register_autograd(
    lambda ctx, grad: grad * (ctx.saved_tensors[0].cos() - ctx.saved_tensors[0] * ctx.saved_tensors[0].sin()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize(
    "chunk", [1, 7, pytest.param(32, marks=[pytest.mark.inductor, pytest.mark.slow]), 97]
)
def test_plain_model(chunk):
    model, ids = Plain(layers=3).double(), ids_of(length=min(97, 9 * chunk + 4))
    labels = ids.clone()
    labels[:, :3] = -100
    step = compiled(model, chunk)
    assert (
        worst_error(gradients(model, lambda: step(ids, labels)), gradients(model, lambda: model(ids, labels)))
        < EXACT
    )
    assert bodies() > 0
    torch.testing.assert_close(step(ids, labels), model(ids, labels), rtol=1e-12, atol=0)


@pytest.mark.slow
def test_a_batch_of_another_size_streams_too():
    model = Plain().double()
    step = compiled(model)
    for batch, length in ((3, 97), (2, 61), (3, 64)):
        ids = ids_of(batch, length)
        assert (
            worst_error(gradients(model, lambda: step(ids, ids)), gradients(model, lambda: model(ids, ids)))
            < EXACT
        )


def bodies_for(layers: int) -> int:
    before, ids = bodies(), ids_of(2, 61)
    step = compiled(Plain(layers=layers).double(), 16, cache=False)
    step(ids, ids).backward()
    return bodies() - before


def test_the_first_layer_shares_its_bodies_with_the_others(monkeypatch):
    monkeypatch.setattr(internals.chunk_bodies, "COMPILED", {})  # nothing that an earlier test has compiled
    first = bodies_for(2)
    torch._dynamo.reset()
    assert first > 0 and bodies_for(5) == 0


def test_a_value_kept_as_a_recipe_is_freed_and_made_again_as_often_as_wanted():
    weight = torch.randn(4, requires_grad=True)
    recipe = Recipe.of(lambda w: (w * 3,), (weight,))
    (x,) = recipe.call(weight)
    with saved_as([(x, Again(recipe, 0))]):
        y = x.square().sum()
    alive = weakref.ref(x)
    del x
    assert alive() is None
    y.backward(retain_graph=True)
    y.backward()
    torch.testing.assert_close(weight.grad, 2 * 18 * weight.detach())


def test_embeddings_made_again_twice():
    model, ids = Plain().double(), ids_of()
    step = compiled(model)

    def twice():
        loss = step(ids, ids)
        loss.backward(retain_graph=True)
        loss.backward()

    found = gradients(model, twice)
    assert (
        worst_error(found, {n: 2 * g for n, g in gradients(model, lambda: model(ids, ids)).items()}) < EXACT
    )


def test_weights_changed_between_forward_and_backward_are_an_error_as_in_autograd():
    model, ids = Plain().double(), ids_of()
    loss = compiled(model)(ids, ids)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.quick
def test_llama_like_model_with_aligned_targets():
    model, ids, y = LlamaLike().double(), ids_of(), ids_of()
    step = compiled(model)
    assert (
        worst_error(gradients(model, lambda: step(ids, y)), gradients(model, lambda: model(ids, y))) < EXACT
    )


@pytest.mark.parametrize(
    "name, options, padding",
    [
        pytest.param("Llama", {}, "left", marks=pytest.mark.slow),
        pytest.param("Qwen3", {}, "right", marks=[pytest.mark.inductor, pytest.mark.slow]),
        ("Mistral", {"sliding_window": 20}, None),
        pytest.param("GPT2", {}, None, marks=pytest.mark.slow),
        pytest.param("Gemma2", {}, None, marks=pytest.mark.slow),
    ],
)
def test_hugging_face(name, options, padding):
    model, ids, extra = hugging_face(name, **options), ids_of(), {}
    labels = ids.clone()
    if padding:
        seen = torch.ones_like(ids)
        seen[1, slice(-30, None) if padding == "right" else slice(30)] = 0
        labels[seen == 0] = -100
        extra["attention_mask"] = seen

    def loss(ids, labels, **extra):
        return model(input_ids=ids, labels=labels, **extra).loss

    step = compiled(loss)
    truth = gradients(model, lambda: loss(ids, labels, **extra))
    assert worst_error(gradients(model, lambda: step(ids, labels, **extra)), truth) < 1e-5


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(32, marks=[pytest.mark.inductor, pytest.mark.slow]),
        97,
    ],
)
def test_bfloat16_is_as_good_as_eager(chunk):
    model, ids = Plain().bfloat16(), ids_of()
    truth = truth_of(model, lambda m: m(ids, ids))
    eager = total_error(gradients(model, lambda: model(ids, ids)), truth)
    step = compiled(model, chunk)
    assert total_error(gradients(model, lambda: step(ids, ids)), truth) <= 1.05 * eager


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.quick
def test_autocast_is_as_good_as_eager(place):
    model, ids = Plain(), ids_of()

    def inside(ids):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, ids)

    def outside(step):
        with torch.autocast("cpu", torch.bfloat16):
            return step(ids, ids)

    truth = truth_of(model, lambda m: m(ids, ids))
    eager = total_error(gradients(model, lambda: inside(ids)), truth)
    step = compiled(inside if place == "inside" else model)
    ours = gradients(model, lambda: step(ids) if place == "inside" else outside(step))
    assert total_error(ours, truth) <= 1.05 * eager


@pytest.mark.slow
def test_autocast_casts_for_attention_where_rotary_tables_widen_queries():
    model, ids = hugging_face("Llama", num_hidden_layers=1).float(), ids_of()

    def loss(ids):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    truth = truth_of(model, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)
    eager = total_error(gradients(model, lambda: loss(ids)), truth)
    step = compiled(loss)
    assert total_error(gradients(model, lambda: step(ids)), truth) <= 1.05 * eager


@pytest.mark.inductor
@pytest.mark.slow
def test_lengths_share_bodies():
    model = Plain(width=48).double()  # a width of its own: equal bodies are shared between tests
    step, counts, before = compiled(model), [], bodies()
    for length in (97, 64, 130, 33):
        ids = ids_of(length=length)
        assert (
            worst_error(gradients(model, lambda: step(ids, ids)), gradients(model, lambda: model(ids, ids)))
            < EXACT
        )
        counts.append(bodies())
    assert before < counts[0] and counts[1] == counts[2] == counts[3]


@pytest.mark.slow
def test_lengths_share_a_graph():
    """The number of tokens is a symbol from the second length on, and nothing that looks for the tokens makes
    a number of it."""
    model = hugging_face("Qwen3", vocab_size=272)

    def loss(ids, labels, seen):
        return model(input_ids=ids, labels=labels, attention_mask=seen).loss

    graphs, counts = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return streambp(graph, inputs, options={"chunk_size": 32})

    step = torch.compile(loss, backend=backend)
    for length in (97, 64, 33):
        ids = ids_of(length=length)
        seen = torch.ones_like(ids)
        seen[1, -9:] = 0
        batch = ids, ids.masked_fill(seen == 0, -100), seen
        assert (
            worst_error(gradients(model, lambda: step(*batch)), gradients(model, lambda: loss(*batch))) < 1e-5
        )
        counts.append((len(graphs), bodies()))
    assert [n for n, _ in counts] == [1, 2, 2] and counts[1] == counts[2]


def test_tied_frozen_accumulated():
    model, ids = Plain().double(), ids_of()
    model.head.weight = model.embed.weight
    model.layers[1].requires_grad_(False)
    model.layers[0].up.weight.requires_grad_(False)
    step = compiled(model)

    def twice(f):
        f(ids, ids).backward()
        f(ids.flip(0), ids).backward()

    ours, truth = gradients(model, lambda: twice(step)), gradients(model, lambda: twice(model))
    assert worst_error(ours, truth) < EXACT
    assert "layers.1.up.weight" not in ours and "layers.0.up.weight" not in ours


@pytest.mark.parametrize("kind", ["checkpoint", "graph break"])
def test_functions_around_layers(kind):
    model, ids = Plain().double(), ids_of()

    def loss(ids):
        x = model.embed(ids)
        for i, layer in enumerate(model.layers):
            x = checkpoint(layer, x, use_reentrant=False) if kind == "checkpoint" else layer(x)
            if kind == "graph break" and i == 0:
                torch._dynamo.graph_break()
        return model.loss(x, ids)

    step = compiled(loss)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids, ids))) < EXACT


@pytest.mark.parametrize("inside", [False, True])
def test_a_break_before_the_loss_is_named(inside):
    """Logits then exist; the hint says where, why, and what torch says to do about it."""
    model, ids = Plain().double(), ids_of()

    def said(logits):
        LOG.warning("here")
        return logits

    def loss(ids):
        logits = model.head(model.norm(model.layers[0](model.embed(ids))))
        if inside:
            logits = said(logits)
        else:
            LOG.warning("here")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with pytest.warns(
        StreamHint, match=r"breaks at .*test_gradients.py:\d+ \(logging.Logger.*logits take .*ignore_logg"
    ):
        ours = gradients(model, lambda: compiled(loss)(ids))
    assert worst_error(ours, gradients(model, lambda: loss(ids))) < EXACT


def test_backward_twice_and_scaled():
    model, ids = Plain().double(), ids_of()
    step, truth = compiled(model), gradients(model, lambda: model(ids, ids))

    def retained():
        loss = step(ids, ids)
        loss.backward(retain_graph=True)
        loss.backward()

    assert worst_error(gradients(model, retained), {n: 2 * g for n, g in truth.items()}) < EXACT
    assert (
        worst_error(gradients(model, lambda: 3 * step(ids, ids)), {n: 3 * g for n, g in truth.items()})
        < EXACT
    )


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.quick
def test_no_grad(trained_before):
    model, ids = Plain().double(), ids_of()
    step = compiled(model)
    if trained_before:
        step(ids, ids).backward()
    with torch.no_grad():
        ours = step(ids, ids)
        torch.testing.assert_close(ours, model(ids, ids), rtol=1e-12, atol=0)
    assert not ours.requires_grad


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"chunksize": 3},
            "analysis_seconds, memory_budget, offload, lossy, cache. Did you mean 'chunk_size'?",
        ),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"chunk_size": True}, "chunk_size must be"),
        ({"strict": 1}, "strict must be"),
        ({"offload": 1}, "offload must be"),
        ({"device": torch.device("cpu")}, "known devices are CPU, B200"),
    ],
)
@pytest.mark.quick
def test_bad_options(options, said):
    with pytest.raises((ValueError, BackendCompilerFailed)) as caught:
        torch.compile(Plain(), backend="streambp", options=options)(ids_of(), ids_of())
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, ValueError) and said in str(error)


class WithOpaque(Plain):
    def forward(self, ids, labels):
        x = self.layers[0](self.embed(ids))
        return self.loss(self.layers[1](x + opaque(x)), labels)


def test_unknown_operator_warns_and_stays_exact():
    model, ids = WithOpaque().double(), ids_of()
    step = compiled(model)
    with pytest.warns(NotStreamed, match="opaque"):
        ours = gradients(model, lambda: step(ids, ids))
    assert worst_error(ours, gradients(model, lambda: model(ids, ids))) < EXACT


def test_unknown_operator_raises_under_strict():
    model, ids = WithOpaque().double(), ids_of()
    with pytest.raises((NotStreamed, BackendCompilerFailed)) as caught:
        compiled(model, strict=True)(ids, ids)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, NotStreamed) and "opaque" in str(error)


def test_logits_of_hugging_face_are_deferred():
    model, ids = hugging_face("Qwen3"), ids_of()
    truth = gradients(model, lambda: model(input_ids=ids, labels=ids).loss)
    both = gradients(
        model, lambda: (lambda o: o.loss + o.logits.pow(2).mean())(model(input_ids=ids, labels=ids))
    )
    logits, step = model(input_ids=ids).logits, compiled(model)
    out = step(input_ids=ids, labels=ids)
    assert type(out.logits).__name__ == "LazyOutput" and isinstance(out.logits, torch.Tensor)
    assert (
        out.logits.shape == logits.shape
        and out.logits.dtype == logits.dtype
        and "not computed" in repr(out.logits)
    )
    assert worst_error(gradients(model, lambda: out.loss), truth) < 1e-5
    assert out.logits.cached is None
    torch.testing.assert_close(out.logits.detach() + 0, logits.detach())

    def reading():
        out = step(input_ids=ids, labels=ids)
        return out.loss + out.logits.pow(2).mean()

    assert worst_error(gradients(model, reading), both) < 1e-5


def test_hooks_may_keep_gradients():
    model, ids = Plain().double(), ids_of()
    step, kept, copies = compiled(model), [], []

    def keep(grads):
        kept.extend(g for g in grads if g is not None)
        copies.extend(g.clone() for g in grads if g is not None)

    truth = gradients(model, lambda: model(ids, ids))
    loss = step(ids, ids)
    stack, nodes = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            if "AccumulateGrad" not in node.name():
                node.register_prehook(keep)
            stack.extend(f for f, _ in node.next_functions)
    assert worst_error(gradients(model, lambda: loss), truth) < EXACT
    assert len(kept) >= 4 and any(g.dim() == 3 for g in kept)
    for held, copy in zip(kept, copies):
        assert torch.equal(held, copy)


def test_given_gradient_of_hidden_states_is_unchanged():
    """A region that returns hidden states must not overwrite the gradient that its caller made and still
    holds."""
    model = Plain().double()
    x, given = torch.randn(2, 97, 64, dtype=torch.float64), torch.randn(2, 97, 64, dtype=torch.float64)
    copy = given.clone()

    def layers(x):
        for layer in model.layers:
            x = layer(x)
        return F.layer_norm(x, (64,))

    step = compiled(layers)
    ours = gradients(model, lambda: step(x).backward(given))
    assert torch.equal(given, copy)
    truth = gradients(model, lambda: layers(x).backward(given))
    assert worst_error(ours, truth) < EXACT


def test_logits_read_after_a_graph_break():
    model, ids = Plain(layers=1).double(), ids_of()

    def loss(ids):
        logits = model.head(model.norm(model.layers[0](model.embed(ids))))
        total = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        torch._dynamo.graph_break()
        return total + logits.float().mean()

    step = compiled(loss)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: loss(ids))) < 1e-5


def test_logits_and_a_second_sum_before_a_graph_break():
    model, ids = Plain(layers=1).double(), ids_of()

    def loss(ids):
        x = model.norm(model.layers[0](model.embed(ids)))
        logits, mean = model.head(x), x.mean()
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + mean

    step = compiled(loss)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: loss(ids))) < 1e-5


class Dropping(Plain):
    """Dropout on the embedding, in attention, and behind every layer."""

    def forward(self, ids, labels):
        x = F.dropout(self.embed(ids), 0.1, self.training)
        for layer in self.layers:
            y = layer.norm1(x)
            scores = y @ y.transpose(1, 2) * 0.1
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            scores = F.dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1), 0.2, self.training)
            x = F.dropout(layer(x) + scores @ y, 0.3, self.training)
        return self.loss(x, labels)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::streambp_compile.NotStreamed")
def test_dropout_draws_the_same_bits_in_chunks_of_any_length():
    model, ids, found = Dropping().double(), ids_of(length=30), {}
    for chunk in (30, 7):
        torch._dynamo.reset()
        step = compiled(model, chunk)
        torch.manual_seed(3)
        found[chunk] = gradients(model, lambda: step(ids, ids))
    assert worst_error(found[7], found[30]) < EXACT
    torch.manual_seed(4)
    assert worst_error(gradients(model, lambda: step(ids, ids)), found[30]) > 0.01

    def along(distance: float) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction):
                p.add_(d, alpha=distance)
            torch.manual_seed(3)
            value = step(ids, ids).item()
            for p, d in zip(model.parameters(), direction):
                p.sub_(d, alpha=distance)
        return value

    direction = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((found[30][n] * d).sum().item() for (n, _), d in zip(model.named_parameters(), direction))
    assert abs((along(1e-6) - along(-1e-6)) / 2e-6 - slope) < 1e-6 * abs(slope)
    model.eval()
    torch.testing.assert_close(step(ids, ids), model(ids, ids), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("error::streambp_compile.NotStreamed")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
def test_logits_to_keep(dtype):
    """The head reads the last rows of the hidden states: their gradient lies rows further on in the last
    layer."""
    model, ids = hugging_face("Llama").to(dtype), ids_of()
    weights = torch.linspace(-1, 1, 40, dtype=dtype)

    def loss(model):
        logits = model(input_ids=ids, logits_to_keep=41).logits[:, :-1]
        return (F.log_softmax(logits, -1).gather(-1, ids[:, -40:, None]).squeeze(-1) * weights).sum()

    step = compiled(lambda: loss(model))
    assert total_error(gradients(model, step), truth_of(model, loss)) < 1e-5

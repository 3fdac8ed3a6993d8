"""Graph breaks between a head and its loss: a library that logs makes none, the user's own and functions that
are compiled apart leave lazy logits, which stream with what follows."""

import functools
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import Plain, gradients, ids_of, worst_error
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import peak
from streambp_compile import NotStreamed, StreamHint, explain, internals

LOG = logging.getLogger("loss")

EXACT = 1e-10

SIZES = {
    "GPT2": dict(n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False),
    "Bert": dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
    ),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT2", pytest.param("Bert", marks=pytest.mark.slow)])
def test_a_warning_of_transformers_breaks_no_graph(name, interpreted):
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    model, ids = getattr(transformers, CLASSES[name])(config), torch.randint(0, 64, (2, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        warnings.simplefilter("error", StreamHint)
        report = explain(lambda ids: model(input_ids=ids, labels=ids).loss, ids)
    assert len(report.steps) == 1, "one graph holds the step"


def test_a_compilation_logs_no_error(interpreted):
    """torch before 2.13 cannot write its own settings to its log once a function is among them."""
    records = []

    class Noting(logging.Handler):
        def emit(self, record):
            records.append(record)

    noting = Noting(logging.ERROR)
    logger = logging.getLogger("torch._dynamo.metrics_context")
    logger.addHandler(noting)
    try:
        torch._dynamo.reset()
        model = Plain(layers=1)
        torch.compile(lambda ids: model(ids, ids), backend="streambp")(ids_of(1, 40)).backward()
    finally:
        logger.removeHandler(noting)
    assert not [record.getMessage() for record in records]


def test_a_library_that_is_imported_after_the_backend_breaks_no_graph(monkeypatch, interpreted):
    """It adds a method to loggers, which Dynamo could not trace."""
    model, ids = Plain(layers=1), ids_of(1, 32)

    def loss(ids):
        logits = model.head(model.norm(model.layers[0](model.embed(ids))))
        LOG.warning_once("here")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    internals.ignore_library_logging_from_now_on()  # as the backend does when it is imported
    method = functools.lru_cache(None)(lambda self, *args: None)
    monkeypatch.setattr(logging.Logger, "warning_once", method, raising=False)
    step = torch.compile(loss, backend="streambp", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamHint)
        step(ids).backward()


def test_a_question_for_the_module_of_a_parameter_breaks_no_graph():
    """PEFT asks it in every DoRA layer; Dynamo knows the text, and not its methods."""
    weight = torch.nn.Parameter(torch.ones(3, 3))

    def product(x):
        return x if type(weight).__module__.startswith("torchao.") else x @ weight

    x = torch.ones(2, 3)
    internals.trace_methods_of_attributes()  # as the backend does when it is imported
    torch.testing.assert_close(torch.compile(product, backend="eager", fullgraph=True)(x), product(x))


def test_a_compiled_step_with_its_backward(interpreted):
    """Dynamo breaks at the backward, and traces what Python code runs in it: none of ours."""
    model, ids = Plain(layers=1).double(), ids_of(2, 32)

    def loss():
        return model(ids, ids)

    def step():
        loss().backward()

    torch._dynamo.utils.counters.clear()
    found = gradients(model, torch.compile(step, backend="streambp", options={"chunk_size": 16}))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1 and "Tensor.backward()" in next(iter(breaks))
    assert worst_error(found, gradients(model, loss)) < EXACT


class Model(torch.nn.Module):
    """A layer, a head, and a loss behind whatever happens between the two."""

    def __init__(self, between):
        super().__init__()
        self.body, self.between = Plain(512, width=16, heads=2, layers=1), between

    def logits(self, ids):
        return self.body.head(self.body.norm(self.body.layers[0](self.body.embed(ids))))

    def forward(self, ids):
        logits = self.logits(ids)
        self.between(logits)
        return shifted_loss(logits, ids)


def shifted_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def changed_in_place(logits, ids):
    logits = logits * 1.0
    logits /= 0.8
    return shifted_loss(logits, ids)


def read_twice(logits, ids):
    batch, length, _ = logits.shape
    weight = (ids > 3).sum() / (batch * length)
    return shifted_loss(logits, ids) * weight + logits.logsumexp(-1).square().mean()


BETWEEN = {
    "print": lambda logits: print("a step", logits.shape),
    "logging": lambda logits: logging.getLogger(__name__).info("a step"),
    "break": lambda logits: torch._dynamo.graph_break(),
}


def check_step(model, step, truth):
    """Equal to eager with and without gradients, streamed without a warning, and no logits at full length."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        warnings.simplefilter("error", StreamHint)
        for length in (17, 17, 23):
            ids = ids_of(2, length)
            found, expected = (gradients(model, lambda: f(ids)) for f in (step, truth))
            assert worst_error(found, expected) < EXACT
        ours, eager = (peak(lambda: gradients(model, lambda: f(ids))) for f in (step, truth))
        assert ours < 0.7 * eager
        with torch.no_grad():
            torch.testing.assert_close(step(ids), truth(ids), rtol=EXACT, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "between", ["print", *(pytest.param(n, marks=pytest.mark.slow) for n in ("logging", "break"))]
)
def test_a_break_before_the_loss(between, chunk, interpreted):
    model = Model(BETWEEN[between]).double()
    check_step(model, torch.compile(model, backend="streambp", options={"chunk_size": chunk}), model)


@pytest.mark.long
@pytest.mark.parametrize(
    "loss", [changed_in_place, *(pytest.param(f, marks=pytest.mark.slow) for f in (shifted_loss, read_twice))]
)
@pytest.mark.parametrize("backend", ["streambp", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_loss_that_is_compiled_apart(loss, backend, interpreted):
    model = Model(None).double()
    logits_of = torch.compile(model.logits, backend="streambp", options={"chunk_size": 7})
    compiled = torch.compile(loss, backend=backend)
    check_step(model, lambda ids: compiled(logits_of(ids), ids), lambda ids: loss(model.logits(ids), ids))


class Narrow(Model):
    """A break inside an MLP, whose hidden values the next graph reads."""

    def forward(self, ids):
        x = self.body.embed(ids)
        layer = self.body.layers[0]
        wide = layer.up(x)
        self.between(wide)
        return self.body.loss(layer.down(F.gelu(wide)), ids)


@pytest.mark.filterwarnings("ignore::streambp_compile.StreamHint")
def test_a_break_inside_a_layer_leaves_tensors(interpreted):
    seen = []
    model = Narrow(lambda wide: (torch._dynamo.graph_break(), seen.append(type(wide)))).double()
    step, ids = torch.compile(model, backend="streambp", options={"chunk_size": 7}), ids_of(2, 25)
    found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT
    assert set(seen) == {torch.Tensor}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_break_inside_a_layer_is_named_with_its_cost(checkpointed, interpreted):
    """Rows that an expert takes are counted while the layer runs; what the break hands over is kept."""
    width, tokens = 16, 24
    inner, expert = torch.nn.Linear(width, width).double(), torch.nn.Linear(width, width).double()
    x = torch.randn(2, tokens, width, dtype=torch.float64, requires_grad=True)

    def layer(x):
        h, gate = inner(x.cumsum(1)), x.sigmoid()
        rows = (x.detach().sum(-1) > 0).flatten().nonzero().flatten()
        if rows.numel() == 0:
            return h
        taken = expert(h.flatten(0, 1)[rows])
        return torch.zeros_like(x).flatten(0, 1).index_add(0, rows, taken).view_as(x) * gate + h

    def loss(x):
        kept = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return kept.square().sum() + x.sin().sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found,) = torch.autograd.grad(torch.compile(loss, backend="streambp")(x), x)
    (truth,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(found, truth, rtol=EXACT, atol=EXACT)
    texts = [str(w.message) for w in caught if issubclass(w.category, StreamHint)]
    told = [t for t in texts if "inside a layer" in t]
    assert not told if checkpointed else told and "test_graph_breaks.py" in told[0]

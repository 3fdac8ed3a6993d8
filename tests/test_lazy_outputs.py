"""Logits that leave the compiled function: what is done to them outside is exact, and small results
stream."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from models import Plain, Tripled, ids_of, worst_error
from selection import representatives
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import peak
from streambp_compile.lazy.outputs import LazyOutput

pytestmark = pytest.mark.usefixtures("interpreted_together")
EXACT = 1e-10
VOCABULARY = 1024


class Head(nn.Module):
    """One attention layer's worth of hidden states and a head; returns logits alone."""

    def __init__(self, vocabulary: int = VOCABULARY):
        super().__init__()
        self.body = Plain(vocabulary, width=16, heads=2, layers=1)

    def forward(self, ids):
        return self.body.head(self.body.norm(self.body.layers[0](self.body.embed(ids))))


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = Head().double()
    made.step = torch.compile(made.forward, backend="streambp", options={"chunk_size": 5})
    yield made
    torch._dynamo.reset()


IDS = torch.randint(0, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(0))
TARGETS = IDS.roll(-1, 1)
WEIGHTS = torch.linspace(0.1, 1, 3 * 41, dtype=torch.float64).view(3, 41)
MASK = WEIGHTS > 0.4


def rows_one_by_one(logits):
    """TRL's `selective_log_softmax` for half precision."""
    return torch.stack(
        [F.log_softmax(row, -1).gather(-1, i) for row, i in zip(logits, TARGETS.unsqueeze(-1))]
    ).squeeze(-1)


def selected(logits):
    """TRL's `selective_log_softmax` for single precision."""
    index = TARGETS.unsqueeze(-1)
    return torch.gather(logits, -1, index).squeeze(-1) - torch.stack(
        [torch.logsumexp(row, dim=-1) for row in logits]
    )


def entropy_in_parts(logits):
    """TRL's `entropy_from_logits`."""
    parts = []
    for part in logits.reshape(-1, logits.shape[-1]).split(32, dim=0):
        logps = F.log_softmax(part, dim=-1)
        parts.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def changed_in_place(logits):
    logits.div_(0.7)
    logits *= 0.5
    logits += 1
    return logits.log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0]


def temperature(logits):
    return F.cross_entropy((logits / WEIGHTS.unsqueeze(-1)).flatten(0, 1), TARGETS.flatten())


def labels_changed_later(logits):
    labels = TARGETS.clone()
    scaled = logits.masked_fill(labels[..., None] == 3, 0.5)
    labels.fill_(3)
    return scaled.logsumexp(-1)


def of_the_detached(logits):
    with torch.no_grad():
        p = (2 * logits).softmax(-1)
    return -(p * logits.log_softmax(-1)).sum(-1) * WEIGHTS


SMALL = {
    "gather": lambda x: x.log_softmax(-1).gather(-1, TARGETS[..., None]).squeeze(-1),
    "shifted": lambda x: torch.gather(x[:, :-1].log_softmax(-1), 2, TARGETS[:, :-1, None]),
    "last rows": lambda x: x[:, -20:].float().logsumexp(-1),
    "entropy": lambda x: -(x.softmax(-1) * F.log_softmax(x, -1)).sum(-1) * WEIGHTS,
    "cross-entropy": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), TARGETS.view(-1)),
    "cross-entropy of shifted": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCABULARY), IDS[..., 1:].reshape(-1)
    ),
    "loss module": lambda x: nn.CrossEntropyLoss(reduction="none")(x.transpose(1, 2), TARGETS),
    "temperature per row": temperature,
    "topk": lambda x: x.topk(3, -1).values.sum(),
    "mean of squares": lambda x: x.pow(2).mean(),
    "other way round": lambda x: (1 - x).mean(-1) + (2 / (3 + x.sigmoid())).sum(-1),
    "rows one by one": rows_one_by_one,
    "stacked": selected,
    "in parts": entropy_in_parts,
    "in one part": lambda x: torch.cat([p.logsumexp(-1) for p in x.flatten(0, 1).split(500)]),
    "in place": changed_in_place,
    "labels changed later": labels_changed_later,
    "of the detached": of_the_detached,
    "half of the batch": lambda x: x[:2].logsumexp(-1).sum() + x[2:, :5].logsumexp(-1).sum(),
    "last token": lambda x: x[:, -1].logsumexp(-1),
    "where": lambda x: torch.where(MASK[..., None], x, x * 2).logsumexp(-1),
    "rows of a mask": lambda x: x[MASK].logsumexp(-1),
    "cross-entropy of a mask": lambda x: F.cross_entropy(x[:, :-1][MASK[:, 1:]], IDS[:, 1:][MASK[:, 1:]]),
    "flat rows of a mask": lambda x: (
        (x.float() / 0.7)
        .view(-1, VOCABULARY)[MASK.view(-1)]
        .log_softmax(-1)
        .gather(-1, TARGETS[MASK][:, None])
    ),
    "a row of each": lambda x: x[torch.arange(3), torch.tensor([40, 3, 7])].logsumexp(-1),
}
WHOLE = {
    "read": lambda x: x * WEIGHTS[..., None],
    "one row": lambda x: x[1].logsumexp(-1),
    "over the tokens": lambda x: x.cumsum(1).tanh(),
    "written into": lambda x: (x.__setitem__((slice(None), 0), 0.0), x.logsumexp(-1))[1],
    "a view changed": lambda x: (x[:, :-1].mul_(2), x.logsumexp(-1))[1],
    "changed after a view": lambda x: (lambda view: (x.div_(3), view.logsumexp(-1))[1])(x[:, 1:]),
    "changed after something was made of it": lambda x: (
        lambda p: (x.clamp_(0, 1), x.__setitem__(0, 1.0), (p * x).sum(-1))[2]
    )(x.softmax(-1)),
    "to the end": lambda x: sum(F.cross_entropy(row, i) for row, i in zip(x, TARGETS)),
    "parts of a loop out of order": lambda x: torch.stack([x[i].logsumexp(-1) for i in (1, 0, 2)]) * WEIGHTS,
    "one part left out": lambda x: torch.cat([p.sum(-1) for p in x.split(1)[:2]]),
    "sums along the rows of parts": lambda x: torch.stack([row.logsumexp(0) for row in x]),
}


# Where Dynamo has seen several lengths, targets of one length are compiled whole beside them (README,
# limits).
CONSTANT = pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")


def outcome(model, logits_of, then, ids=IDS):
    """Value and gradients of something made of logits."""
    model.zero_grad()
    value = then(logits_of(ids))
    value.backward(torch.ones_like(value) / 7)
    return value.detach().clone(), {n: p.grad.clone() for n, p in model.named_parameters()}


CHOSEN = {
    "gather",
    "shifted",
    "cross-entropy of shifted",
    "loss module",
    "temperature per row",
    "rows one by one",
    "in parts",
    "in place",
    "labels changed later",
    "of the detached",
    "where",
    "flat rows of a mask",
    "read",
    "written into",
    "a view changed",
    "to the end",
    "parts of a loop out of order",
}


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")  # sums along rows are not streamed
@pytest.mark.parametrize("name", representatives([*SMALL, *WHOLE], CHOSEN))
def test_equals_eager(model, name):
    then = {**SMALL, **WHOLE}[name]
    assert isinstance(model.step(IDS), LazyOutput)
    (value, gradients), (truth, true_gradients) = (
        outcome(model, model.step, then),
        outcome(model, model, then),
    )
    torch.testing.assert_close(value, truth, rtol=1e-6 if value.dtype == torch.float32 else EXACT, atol=1e-12)
    assert worst_error(gradients, true_gradients) < (1e-5 if value.dtype == torch.float32 else EXACT)


STREAMING = (
    "gather",
    "cross-entropy of shifted",
    "rows one by one",
    "stacked",
    "in parts",
    "in one part",
    "in place",
    "rows of a mask",
    "cross-entropy of a mask",
    "flat rows of a mask",
)


@pytest.mark.parametrize(
    "name",
    representatives(STREAMING, {"gather", "rows one by one", "in parts", "in place", "flat rows of a mask"}),
)
def test_small_results_stream(model, name):
    """Forward and backward, without gradients, and for the second time: nothing new is compiled."""

    def step():
        value = SMALL[name](model.step(IDS))
        value.sum().backward()

    step()
    before = counters["streambp"]["bodies"]
    one = 3 * 41 * VOCABULARY * 8
    assert peak(step) < one
    assert counters["streambp"]["bodies"] == before
    with torch.no_grad():
        SMALL[name](model.step(IDS))
        assert peak(lambda: SMALL[name](model.step(IDS))) < 0.6 * one


@pytest.mark.long
def test_masks_of_any_number_of_rows(model):
    """As many rows are made as are read, and what was compiled serves any number."""

    def loss(logits, mask):
        return F.cross_entropy(logits[mask], TARGETS[mask])

    counted = []
    for share in (0.3, 0.5, 0.6, 0.4, 0.8):
        mask = torch.rand(3, 41, generator=torch.Generator().manual_seed(0)) < share
        ours, truth = (outcome(model, f, lambda x: loss(x, mask)) for f in (model.step, model))
        torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
        assert worst_error(ours[1], truth[1]) < EXACT
        counted.append(counters["stats"]["unique_graphs"])
    assert counted[-1] == counted[2]


@pytest.mark.long
@pytest.mark.quick
def test_integers_and_pairs(model):
    with torch.no_grad():
        truth, logits = model(IDS), model.step(IDS)
        for function in (
            lambda x: x.argmax(-1),
            lambda x: x.topk(2).indices,
            lambda x: (x[:, :-1].argmax(-1) == IDS[:, 1:]).float().mean(),
            lambda x: x.max(-1).indices,
            lambda x: (x > 0.5).sum(-1),
        ):
            assert torch.equal(function(logits), function(truth))
        assert logits.cached is None


@pytest.mark.long
def test_two_tensors_of_logits(model):
    """A student and its teacher: one pass over both."""
    torch.manual_seed(1)
    teacher = Head().double()
    compiled = torch.compile(teacher.forward, backend="streambp", options={"chunk_size": 8})

    def distilled(student_logits, teacher_logits):
        with torch.no_grad():
            target = teacher_logits(IDS)
        return F.kl_div(
            (student_logits(IDS) / 2).log_softmax(-1),
            (target / 2).log_softmax(-1),
            log_target=True,
            reduction="none",
        ).sum(-1)

    ours = outcome(model, model.step, lambda x: distilled(lambda ids: x, compiled))
    truth = outcome(model, model, lambda x: distilled(lambda ids: x, teacher))
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT
    assert peak(lambda: distilled(model.step, compiled).sum().backward()) < 0.6 * peak(
        lambda: distilled(model, teacher).sum().backward()
    )


def test_inputs_of_expressions_get_gradients(model):
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weight = torch.linspace(1, 2, VOCABULARY, dtype=torch.float64).requires_grad_()
    gradients = [
        torch.autograd.grad((x(IDS) / temperature * weight).logsumexp(-1).sum(), (temperature, weight))
        for x in (model.step, model)
    ]
    for ours, truth in zip(*gradients):
        torch.testing.assert_close(ours, truth, rtol=EXACT, atol=1e-12)


class Squares(torch.autograd.Function):
    """A kernel that takes logits as they are."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.pow(2).sum(-1)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient.unsqueeze(-1)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.mark_dirty(logits)
        return logits.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(
    "then",
    [
        Squares.apply,
        lambda x: Squares.apply(x[:, 1:] / 0.7),
        lambda x: Tripled.apply(x).logsumexp(-1),
        lambda x: Squares.apply(x) + x.logsumexp(-1),
    ],
    ids=["logits", "scaled", "recorded operators", "two readers"],
)
def test_custom_autograd_functions(model, then):
    ours, truth = outcome(model, model.step, then), outcome(model, model, then)
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT


class Remade(torch.autograd.Function):
    """Keeps nothing of a model and runs it again in the backward, as reversible layers do; ``within`` makes
    the outputs."""

    @staticmethod
    def forward(ctx, weight, call, within):
        ctx.call = call
        return within(call, weight)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.call(None), gradient)
        return None, None, None


def with_its_graph(call, weight):
    with torch.enable_grad():
        return call(weight).detach()


@pytest.mark.parametrize(
    "within", [lambda call, weight: call(weight), with_its_graph], ids=["plain", "graph"]
)
@pytest.mark.parametrize(
    "then", [*map(SMALL.get, ("gather", "cross-entropy")), torch.sin, lambda x: changed_in_place(x.clone())]
)
def test_logits_that_a_custom_function_returns(model, within, then):
    def around(run):
        # The weight ties the function to the graph; its gradient comes from the backward inside.
        return lambda ids: Remade.apply(model.body.head.weight, lambda _: run(ids), within)

    ours, truth = outcome(model, around(model.step), then), outcome(model, around(model), then)
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT


def test_custom_functions_that_write_into_logits(model):
    with pytest.raises(RuntimeError, match="changes logits of shape .* in place"):
        InPlace.apply(model.step(IDS) * 1.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_under_a_checkpoint(model, reentrant):
    def then(x):
        return checkpoint(lambda logits: logits.logsumexp(-1), x, use_reentrant=reentrant)

    ours, truth = outcome(model, model.step, then), outcome(model, model, then)
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT


def test_stays_a_tensor(model):
    logits, truth = model.step(IDS), model(IDS)
    assert (
        isinstance(logits, torch.Tensor)
        and logits.requires_grad
        and not logits.is_leaf
        and "not computed" in repr(logits)
    )
    assert (
        len(logits) == 3
        and logits.shape == truth.shape
        and logits.stride() == truth.stride()
        and logits.float().dtype == torch.float32
    )
    assert logits.double() is logits and logits.contiguous() is logits and not logits.detach().requires_grad
    assert logits.cached is None
    torch.save(model.step(IDS), file := io.BytesIO())
    file.seek(0)
    for copied in (
        pickle.loads(pickle.dumps(model.step(IDS))),
        torch.load(file),
        copy.deepcopy(model.step(IDS).detach()),
        torch.stack([row.detach() for row in model.step(IDS)]),
        torch.from_numpy(model.step(IDS).detach().numpy()),
        torch.tensor(model.step(IDS).tolist(), dtype=torch.float64),
    ):
        torch.testing.assert_close(copied, truth.detach(), rtol=EXACT, atol=1e-12)
    assert abs(model.step(IDS)[0, 0, 0].item() - truth[0, 0, 0].item()) < 1e-12


def test_read_before_and_after_backward(model):
    logits, truth = model.step(IDS), model(IDS)
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
    assert logits.cached is None
    torch.testing.assert_close(logits.detach() + 0, truth, rtol=EXACT, atol=1e-12)


def test_read_after_a_step_of_the_optimizer(model):
    logits = model.step(IDS)
    with torch.no_grad():
        model.body.head.weight.mul_(1)
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        logits.logsumexp(-1)


UNSEEN = {  # what no version counter sees
    "through .data": lambda p: p.data.mul_(0.5),
    "signs": lambda p: p.data.neg_(),
    "other memory": lambda p: setattr(p, "data", p.data.clone()),
    "through numpy": lambda p: p.detach().numpy().__setitem__((3, 1), 0.25),
}


@pytest.mark.long
@pytest.mark.parametrize("how", UNSEEN)
def test_read_after_a_write_that_autograd_does_not_see(how):
    model = Head(64).double()
    logits = torch.compile(model.forward, backend="streambp")(IDS % 64)
    with torch.no_grad():
        logits[:, :1].clone()  # recorded; read later
        UNSEEN[how](model.body.head.weight)
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        logits.logsumexp(-1)
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        logits.tolist()
    torch.testing.assert_close(
        torch.compile(model.forward, backend="streambp")(IDS % 64) + 0,
        model(IDS % 64),
        rtol=EXACT,
        atol=1e-12,
    )


def test_weights_that_logits_do_not_read_may_change(model):
    logits, truth = model.step(IDS), model(IDS).logsumexp(-1)
    weight = model.body.layers[0].up.weight
    weight.data.mul_(2)
    torch.testing.assert_close(logits.logsumexp(-1), truth, rtol=EXACT, atol=1e-12)
    weight.data.div_(2)


def test_a_tensor_beside_logits_that_changes_unseen(model):
    weights = torch.rand(3, 41, VOCABULARY, dtype=torch.float64)
    weighed = model.step(IDS) * weights
    weights.numpy()[0, 0, 0] += 1
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        weighed.logsumexp(-1)


def test_gradients_in_logits(model):
    """Where they were never made they are refused by name, with the way out."""
    for ask in (
        lambda loss, x: torch.autograd.grad(loss, x),
        lambda loss, x: torch.autograd.grad(loss, inputs=[x]),
        lambda loss, x: x.sum().backward(inputs=[x]),
        lambda loss, x: x.backward(torch.ones(()), inputs=(x,)),
    ):
        logits = model.step(IDS)
        with pytest.raises(RuntimeError, match="retain_grad"):
            ask(logits.logsumexp(-1).sum(), logits)
    made = []
    for f in (model.step, model):
        logits = f(IDS)
        logits.retain_grad()
        logits.logsumexp(-1).sum().backward()
        made.append(logits.grad)
    torch.testing.assert_close(*made, rtol=EXACT, atol=1e-12)
    model.zero_grad()


@pytest.mark.parametrize(
    "write",
    [lambda x: x.mul_(0.5), lambda x: x.clamp_(-0.1, 0.1), lambda x: x.__setitem__(0, 0.5)],
    ids=["scaled", "clamped", "written into"],
)
def test_gradients_pass_by_what_is_written_without_them(model, write):
    def then(logits):
        with torch.no_grad():
            write(logits)
        return logits.pow(2).sum(-1)

    ours, truth = outcome(model, model.step, then), outcome(model, model, then)
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT


@pytest.mark.slow
def test_lengths_share_what_was_compiled(model):
    def step(ids):
        logits = model.step(ids)[:, -(ids.shape[1] - 3) :] / 1.3
        return torch.gather(logits.log_softmax(-1), -1, ids[:, 3:, None]).sum()

    for length in (41, 37, 53):
        step(ids_of(3, length)).backward()
    before = counters["stats"]["unique_graphs"]
    for length in (61, 33):
        ids = ids_of(3, length)
        truth = torch.gather((model(ids)[:, 3:] / 1.3).log_softmax(-1), -1, ids[:, 3:, None]).sum()
        torch.testing.assert_close(step(ids), truth, rtol=EXACT, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.long
@CONSTANT
def test_autocast():
    torch.manual_seed(0)
    model = Head()
    compiled = torch.compile(model.forward, backend="streambp", options={"chunk_size": 8})

    def loss(logits_of):
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(IDS)
            assert logits.dtype == torch.bfloat16
            inside = logits.log_softmax(-1).gather(-1, TARGETS[..., None])
        outside = logits.float().logsumexp(-1)
        return (outside.sum() - inside.sum()) / 100  # of one sign

    values, gradients = zip(*[outcome(model, lambda ids: None, lambda _: loss(f)) for f in (compiled, model)])
    torch.testing.assert_close(*values, rtol=2e-2, atol=0)
    assert worst_error(*gradients) < 0.1


@CONSTANT
def test_given_to_another_compiled_function(model):
    other = torch.compile(
        lambda x: x.log_softmax(-1).gather(-1, TARGETS[..., None]).sum(), backend="aot_eager"
    )
    ours, truth = outcome(model, model.step, other), outcome(model, model, other)
    torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
    assert worst_error(ours[1], truth[1]) < EXACT


def running_sums(logits, top, total):
    """A loop's own accumulators, written in place, as TRL's fused head has them."""
    new = torch.maximum(top, logits.amax(-1))
    total.mul_(torch.exp(top - new)).add_(torch.exp(logits - new.unsqueeze(-1)).sum(-1))
    top.copy_(new)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.quick
def test_accumulators_of_the_caller_are_written(grad):
    logits = torch.randn(97, 64)
    ours, truth = ((torch.full((97,), -1.0), torch.zeros(97)) for _ in range(2))
    with torch.set_grad_enabled(grad):
        torch.compile(running_sums, backend="streambp")(logits, *ours)
        running_sums(logits, *truth)
    torch.testing.assert_close(ours, truth)


# Logits that a model hands over in pieces, as litgpt and torchtune do


class Pieces(nn.Module):
    """Hidden states of one layer, and a head that is applied to some rows at a time."""

    def __init__(self, cut, vocabulary: int = VOCABULARY):
        super().__init__()
        self.body, self.cut = Plain(vocabulary, width=16, heads=2, layers=1), cut

    def forward(self, ids):
        hidden = self.body.norm(self.body.layers[0](self.body.embed(ids)))
        return [self.body.head(rows) for rows in self.cut(hidden)]


def entropies(pieces, targets, **kwargs):
    targets = targets.split([p.shape[1] for p in pieces], 1)
    return [F.cross_entropy(p.flatten(0, 1), t.flatten(), **kwargs) for p, t in zip(pieces, targets)]


IN_PIECES = {
    "joined logits": lambda p, t: F.cross_entropy(torch.cat(p, 1).flatten(0, 1), t.flatten()),
    "joined losses": lambda p, t: torch.cat(entropies(p, t, reduction="none")).sum() / t.numel(),
    "mean of joined losses": lambda p, t: torch.cat(entropies(p, t, reduction="none")).mean(),
    "added": lambda p, t: sum(entropies(p, t, reduction="sum")) / t.numel(),
}
CUTS = {"split": lambda hidden: hidden.split(16, 1), "chunk": lambda hidden: hidden.chunk(4, 1)}


@pytest.mark.parametrize(
    "of",
    representatives(
        [(cut, name) for cut in CUTS for name in IN_PIECES],
        {("split", "joined losses"), ("chunk", "joined logits")},
    ),
    ids=" ".join,
)
def test_logits_in_pieces_stream_at_any_length(fresh_dynamo, of):
    """A region that does not stream warns, and a warning is an error here."""
    torch.manual_seed(0)
    cut, name = of
    model, loss = Pieces(CUTS[cut]).double(), IN_PIECES[name]
    step = torch.compile(model, backend="streambp", options={"chunk_size": 5})
    for length in (41, 57):
        ids = ids_of(3, length)
        ours, truth = (outcome(model, f, lambda p, t=ids: loss(p, t), ids) for f in (step, model))
        torch.testing.assert_close(ours[0], truth[0], rtol=EXACT, atol=1e-12)
        assert worst_error(ours[1], truth[1]) < EXACT
        peaks = [peak(lambda f=f, i=ids: loss(f(i), i).backward()) for f in (step, model)]
        assert peaks[0] < 0.6 * peaks[1]


def test_one_of_several_pieces_is_read_whole(fresh_dynamo):
    torch.manual_seed(0)
    model = Pieces(CUTS["split"]).double()
    pieces, truth = torch.compile(model, backend="streambp")(IDS), model(IDS)
    assert all(isinstance(p, LazyOutput) for p in pieces)
    assert [p.shape for p in pieces] == [p.shape for p in truth]
    torch.testing.assert_close(pieces[1].square().sum(), truth[1].square().sum(), rtol=EXACT, atol=1e-12)
    torch.testing.assert_close(torch.cat(pieces[1:], 1), torch.cat(truth[1:], 1), rtol=EXACT, atol=1e-12)
    joined = torch.cat(pieces, 1)
    joined.mul_(2)  # a copy, as in eager code
    torch.testing.assert_close(pieces[0] + 0, truth[0], rtol=EXACT, atol=1e-12)

"""Rows that a mask picks: experts in a Python loop, and what else is done to picked rows."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Layer, Plain, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile import explain, internals
from streambp_compile.dynamo.rows.mapped_functions import traced

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH, EXPERTS = 32, 3


def places(x, gates, chosen, e, f, out):
    rows, slot = torch.where(chosen == e)
    out.index_add_(0, rows, f(x[rows]) * gates[rows, slot, None])


def of_functional_sum(x, gates, chosen, e, f, out):
    rows, slot = (chosen == e).nonzero(as_tuple=True)
    return out.index_add(0, rows, f(x.index_select(0, rows)) * gates[rows, slot].unsqueeze(-1))


def slots_first(x, gates, chosen, e, f, out):
    """As transformers writes it: a one-hot mask of ``[experts, slots, tokens]``."""
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    slot, rows = torch.where(mask[e] == 1)
    current = x[None, rows].reshape(-1, x.shape[-1])
    out.index_add_(0, rows, f(current) * gates[rows, slot, None])


def assigned(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    out[mask] = f(x[mask]) * gates[mask, 0, None]


def added(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    out[mask] += f(x[mask]) * gates[:, :1][mask]


def squeezed(x, gates, chosen, e, f, out):
    rows = torch.nonzero((chosen == e).any(-1)).squeeze(-1)
    weight = (gates * (chosen == e)).sum(-1)
    out[rows] = out[rows] + f(x[rows]) * weight[rows][:, None]


def put(x, gates, chosen, e, f, out):
    rows = (chosen == e).any(-1).nonzero().flatten()
    return torch.index_put(out, (rows,), f(x[rows]), accumulate=True)


SPELLINGS = {f.__name__: f for f in (places, of_functional_sum, slots_first, assigned, added, squeezed, put)}


class Experts(nn.Module):
    """A linear layer for each expert, applied by ``apply`` to the tokens that chose it."""

    def __init__(self, apply, flat: bool = True):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        self.apply_to, self.flat = apply, flat

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, WIDTH) if self.flat else x
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            made = self.apply_to(x, gates, chosen, e, expert, out)
            out = out if made is None else made
        return out.view(shape)


class Mixture(Plain):
    """Attention, then experts, in every layer."""

    def __init__(self, apply, flat: bool = True):
        super().__init__(width=WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(Layer(WIDTH, 4), Residual(Experts(apply, flat))) for _ in range(2)
        )


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(F.layer_norm(x, x.shape[-1:]))


def error_of(model: nn.Module, *lengths: int, **options) -> float:
    """The largest error over calls of these lengths, one after the other."""
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, **options})
    worst = 0.0
    for length in lengths:
        ids = ids_of(2, length)
        expected = gradients(model, lambda: model(ids, ids))
        worst = max(worst, worst_error(gradients(model, lambda: step(ids, ids)), expected))
    return worst


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(SPELLINGS, {"places"}))
def test_experts_in_a_loop_stream(name):
    """All of them, at two lengths: a warning is an error here."""
    assert error_of(Mixture(SPELLINGS[name]).double(), 43, 40) < EXACT


def test_masks_over_batch_and_tokens_stream():
    def apply(x, gates, chosen, e, f, out):
        mask = chosen[..., 0] == e
        out[mask] = f(x[mask]) * gates[..., 0][mask][:, None]

    assert error_of(Mixture(apply, flat=False).double(), 43) < EXACT


@pytest.mark.long
@pytest.mark.inductor
def test_experts_in_a_loop_stream_in_compiled_bodies():
    assert error_of(Mixture(places).double(), 43) < EXACT


def test_an_expert_that_nobody_chooses():
    model = Mixture(places).double()
    with torch.no_grad():
        for _, experts in model.layers:
            experts.inner.gate.weight[0] = 0
            experts.inner.gate.weight[1:] *= 100
            experts.inner.gate.weight[2] = experts.inner.gate.weight[1]
    assert error_of(model, 43) < EXACT


def test_all_layers_and_the_head_are_streamed():
    model, ids = Mixture(places), ids_of(2, 64)
    report = explain(model, ids, ids)
    assert all(r.streamed for r in report.regions)


def test_autocast_rounds_as_eager_does():
    def cast(x, gates, chosen, e, f, out):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, (f(x[rows]) * gates[rows, slot, None]).to(out.dtype))

    model, ids = Mixture(cast), ids_of(2, 43)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})

    def run(called):
        with torch.autocast("cpu", torch.bfloat16):
            return called(ids, ids)

    truth = gradients(model.double(), lambda: model(ids, ids))
    rounded = worst_error(gradients(model.float(), lambda: run(model)), truth)
    assert worst_error(gradients(model, lambda: run(step)), truth) < 2 * rounded


class Dropout(Experts):
    """Experts with dropout inside."""

    def __init__(self):
        super().__init__(places)
        for expert in self.experts:
            expert.insert(2, nn.Dropout(0.3))


@pytest.mark.long
def test_dropout_of_picked_rows():
    """Random bits are not eager's. They are the same in chunks of any length, and the gradient is that of the
    loss: the slope between two steps with the same bits."""

    model, ids = Plain(width=WIDTH).double(), ids_of(2, 43)
    model.layers = nn.ModuleList(
        nn.Sequential(Layer(WIDTH, 4), Residual(Dropout())) for _ in range(2)
    ).double()

    def run(step):
        torch.manual_seed(3)
        return step(ids, ids)

    steps = [torch.compile(model, backend="streambp", options={"chunk_size": n}) for n in (16, 43)]
    short, long = (gradients(model, lambda: run(step)) for step in steps)
    assert worst_error(short, long) < EXACT
    direction, size = {n: torch.randn_like(g) for n, g in short.items()}, 1e-6
    with torch.no_grad():
        losses = []
        for sign in (1, -2):
            for name, parameter in model.named_parameters():
                parameter += sign * size * direction[name]
            losses.append(run(steps[0]))
    slope = (losses[0] - losses[1]) / (2 * size)
    assert torch.isclose(slope, sum((short[n] * direction[n]).sum() for n in short), rtol=1e-5)
    assert not torch.isclose(losses[0], steps[0](ids, ids), rtol=1e-7)  # other bits: something is dropped


def mixing(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    rows = f(x[mask])
    out[mask] = rows * rows.mean(0)


def normalised(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    out[mask] = f(x[mask].softmax(0))


def detached(x, gates, chosen, e, f, out):
    mask = chosen[:, 0] == e
    out[mask] = f(x[mask].detach())


def numbered(x, gates, chosen, e, f, out):
    rows = torch.where(chosen[:, 0] == e)[0]
    out.index_add_(0, rows, f(x[rows]) * rows[:, None])


def shifted(x, gates, chosen, e, f, out):
    """Rows of the tokens before those that were picked."""
    out, x = out.view(2, -1, WIDTH), x.view(2, -1, WIDTH)
    rows, place = torch.where(chosen[:, 0].view(2, -1) == e)
    gates = gates.view(2, -1, 2)[rows, place, :1]
    out[rows, place] = f(x[rows, (place - 1).clamp(min=0)]) * gates


def written(x, gates, chosen, e, f, out):
    rows = torch.where(chosen[:, 0] == e)[0]
    before = out[rows].clone()
    out.mul_(2)
    out.index_add_(0, rows, f(x[rows]) + before)


def dropped(x, gates, chosen, e, f, out):
    rows = torch.where(chosen[:, 0] == e)[0]
    out.index_add_(0, rows, f(x[rows]).clone().requires_grad_() * x[rows].relu_())


def listed(x, gates, chosen, e, f, out):
    """A Python list of numbers that depend on how many rows there are: no graph can hold it."""
    rows = torch.where(chosen[:, 0] == e)[0]
    sizes = torch.unique_consecutive(rows // 16, return_counts=True)[1]
    for part in rows.split(sizes.tolist()):
        out.index_add_(0, part, f(x[part]))


OTHERS = {f.__name__: f for f in (mixing, normalised, detached, numbered, shifted, written, dropped, listed)}


@pytest.mark.parametrize("name", representatives(OTHERS, {"mixing", "normalised"}))
def test_what_is_no_function_of_rows_stays_exact(name):
    """The graph breaks there, as it does by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error_of(Mixture(OTHERS[name]).double(), 43) < EXACT


class Head(Plain):
    """A loss of the hidden states that a mask picks."""

    def __init__(self, reduce, **given):
        super().__init__(width=WIDTH, **given)
        self.reduce = reduce

    def loss(self, x, labels):
        return self.reduce(self.head, self.norm(x), labels > 100, labels)


def picked_logits(head, x, mask, y):
    return F.cross_entropy(head(x)[mask], y[mask])


def picked_states(head, x, mask, y):
    return F.cross_entropy(head(x[mask]), y[mask])


def by_place(head, x, mask, y):
    rows = torch.where(mask)
    return F.cross_entropy(head(x[rows]), y[rows])


def as_transformers_did(head, x, mask, y):
    logits = head(x)[:, :-1][mask[:, 1:]].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.shape[-1]) / 0.7, y[:, 1:][mask[:, 1:]].view(-1))


def on_their_devices(head, x, mask, y):
    """As Qwen2-Audio has it: the mask is moved to each device by itself."""
    logits, mask = head(x), mask.long()[:, 1:]
    picked = logits[:, :-1][mask.to(logits.device) != 0].contiguous()
    return F.cross_entropy(picked, y[:, 1:][mask.to(y.device) != 0].contiguous().to(picked.device))


def of_one_sequence(head, x, mask, y):
    mask = mask.flatten()
    loss = F.cross_entropy(
        head(x).flatten(0, 1)[mask], y.flatten()[mask], label_smoothing=0.1, reduction="sum"
    )
    return loss / mask.sum()


def of_classes(head, x, mask, y):
    weight = torch.linspace(0.5, 2, head.weight.shape[0], dtype=x.dtype)
    return F.nll_loss(head(x).log_softmax(-1)[mask], y[mask], weight)


def two_masks(head, x, mask, y):
    return F.cross_entropy(head(x)[mask], y[mask]) + F.cross_entropy(head(x)[~mask], y[~mask])


def of_a_mask_that_changes(head, x, mask, y):
    """Two masks of one text: what they are computed from is written into in between."""
    seen = mask.clone()
    first = head(x)[seen == 1].square().mean()
    seen[:, ::2] = True
    return first + head(x)[seen == 1].square().mean()


def counted(head, x, mask, y):
    rows = head(x)[mask]
    return -rows.log_softmax(-1).gather(-1, y[mask][:, None]).sum() / rows.shape[0]


def distilled(head, x, mask, y):
    teacher = head(x.flip(1))[mask].detach()
    return F.kl_div(head(x)[mask].log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def compared(head, x, mask, y):
    rows = x[mask]
    right = (head(rows).argmax(-1) == y[mask]).to(x.dtype).mean()
    return rows.square().mean() * (1 + right)


def pooled(head, x, mask, y):
    return head(x[mask].mean(0)).logsumexp(-1)


def each_sequence(head, x, mask, y):
    return sum(head(x[i][mask[i]]).square().mean() for i in range(2))


def selected(head, x, mask, y):
    losses = F.cross_entropy(head(x).transpose(1, 2), y, reduction="none")
    return losses.masked_select(mask).mean()


LOSSES = {
    f.__name__: f
    for f in (
        picked_logits,
        picked_states,
        by_place,
        as_transformers_did,
        on_their_devices,
        of_one_sequence,
        of_classes,
    )
    + (two_masks, of_a_mask_that_changes, counted, distilled, compared, pooled, each_sequence, selected)
}


@pytest.mark.parametrize("name", representatives(LOSSES, {"picked_logits", "picked_states", "compared"}))
def test_losses_of_picked_rows_stream(name):
    """A warning is an error here. The mask is the same for both lengths, but for what it picks."""
    assert error_of(Head(LOSSES[name]).double(), 43, 40) < EXACT


def test_what_has_no_gradient_in_eager_code_has_none():
    """Targets are detached: the weight that made them gets no gradient, and not one of zeros."""

    class Student(Head):
        def __init__(self):
            super().__init__(None)
            self.teacher = nn.Linear(WIDTH, WIDTH)

        def loss(self, x, labels):
            mask = labels > 100
            return F.mse_loss(self.head(x)[mask], self.head(self.teacher(x))[mask].detach())

    model, ids = Student(), ids_of(2, 43)
    torch.compile(model, backend="streambp", options={"chunk_size": 16})(ids, ids).backward()
    assert model.teacher.weight.grad is None


@pytest.mark.parametrize("reduce", (picked_logits, picked_states), ids=lambda f: f.__name__)
def test_no_logits_of_all_tokens_exist(reduce):
    """A step takes less than half of the logits of all tokens."""
    model, ids = Head(reduce, vocabulary=4096), ids_of(2, 1024)
    step = torch.compile(model, backend="streambp")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(ids, ids).backward()
    logits = 2 * 1024 * 4096 * 4
    assert peak(lambda: step(ids, ids).backward()) < logits / 2


def test_a_reduction_that_is_no_sum_stays_exact():
    """The graph breaks there, and the message does not advise what this backend does already."""

    def largest(head, x, mask, y):
        return head(x)[mask].amax(0).sum()

    model = Head(largest)
    model.head = nn.Linear(WIDTH, 4 * WIDTH)  # not so wide that it is computed later
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert error_of(model.double(), 43) < EXACT
    texts = [str(w.message) for w in found if "graph breaks" in str(w.message)]
    assert texts and not any("capture_dynamic_output_shape_ops" in text for text in texts)


def test_functions_that_differ_with_the_number_of_rows_are_refused():
    def create(count):
        return [torch.empty(count, 2)]

    grown = traced(lambda count, x: [x.new_zeros(2 * count + 1)], create)
    assert [grown(count, torch.ones(count, 2))[0].shape[0] for count in (0, 1, 5)] == [1, 3, 11]
    with pytest.raises(internals.NotForAnyCount, match="some counts"):
        traced(lambda count, x: [x if count % 2 == 0 else -x], create)

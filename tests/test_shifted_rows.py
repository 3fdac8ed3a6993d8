"""Rows that read their neighbours: token shifts and short convolutions, in the spellings that people use."""

import pytest
import torch
import torch.nn.functional as F
from graphs import traced
from models import VOCABULARY, Layer, counted, gradients, ids_of, total_error, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile import NotStreamed
from streambp_compile.passes.normalization.normalize import normalize

EXACT = 1e-10
WIDTH, LENGTH = 32, 61
streambp = torch.ops.streambp


class Mixed(nn.Module):
    """Layers of one mixer each: ``x + out(mix(into(x)))``, an attention layer between them."""

    def __init__(self, mix):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.into, self.out = (nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]) for _ in range(2))
        self.mixers, self.attention = nn.ModuleList([mix() for _ in range(3)]), Layer(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, (into, mix, out) in enumerate(zip(self.into, self.mixers, self.out)):
            x = x + out(F.silu(mix(into(x))))
            x = self.attention(x) if i == 1 else x
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Shift(nn.Module):
    def __init__(self, before):
        super().__init__()
        self.before, self.blend = before, nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.before(x) - x) * self.blend


def joined(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :2]), x[:, :-2]), 1)


SHIFTS = {
    "one padding": lambda x: F.pad(x, (0, 0, 1, -1)),
    "padded, then cut": lambda x: F.pad(x, (0, 0, 3, 0))[:, :-3],
    "joined": joined,
    "ahead": lambda x: F.pad(x[:, 2:], (0, 0, 0, 2)),
    "zeros in a module": nn.ZeroPad2d((0, 0, 1, -1)),
    "both ways": lambda x: F.pad(x, (0, 0, 1, -1)) + F.pad(x, (0, 0, -1, 1)),
}


class Convolution(nn.Module):
    """``[B, T, d]`` in and out, as it stands in ``made(x)`` of ``[B, d, T]``."""

    def __init__(self, *, before: int = 0, cut: bool = False, **given):
        super().__init__()
        self.filter, self.before, self.cut = nn.Conv1d(WIDTH, WIDTH, **given), before, cut

    def forward(self, x: Tensor) -> Tensor:
        x, length = x.transpose(1, 2), x.shape[1]
        x = self.filter(F.pad(x, (self.before, 0)) if self.before else x)
        return (x[..., :length] if self.cut else x).transpose(1, 2)


class Chain(nn.Module):
    """Filters one behind another, which use up the zeros in front of the first."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 3, groups=4, dilation=2),
            nn.Conv1d(WIDTH, WIDTH, 2, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.filters(F.pad(x.transpose(1, 2), (6, 0))).transpose(1, 2)


CONVOLUTIONS = {
    "depthwise, cut behind": dict(kernel_size=4, groups=WIDTH, padding=3, cut=True),
    "padded in front": dict(kernel_size=3, groups=WIDTH, before=2),
    "dense": dict(kernel_size=3, padding=2, cut=True, bias=False),
    "dilated": dict(kernel_size=3, groups=WIDTH, dilation=4, padding=8, cut=True),
    "both sides": dict(kernel_size=5, groups=WIDTH, padding=2),
    "same": dict(kernel_size=3, padding="same"),
    "one tap": dict(kernel_size=1),
    "one tap, in groups": dict(kernel_size=1, groups=4),
    "long, in groups": dict(kernel_size=24, groups=4, padding=12, cut=True),
    "long, depthwise": dict(kernel_size=31, groups=WIDTH, padding=15),
    "long, ahead of all": dict(kernel_size=20, before=19),
    "few groups, dilated": dict(kernel_size=3, groups=2, dilation=2, before=4, bias=False),
}

MIXERS = {
    **{name: lambda before=before: Shift(before) for name, before in SHIFTS.items()},
    **{name: lambda given=given: Convolution(**given) for name, given in CONVOLUTIONS.items()},
    "one behind another": Chain,
}


def compiled(model: nn.Module):
    return torch.compile(model, backend="streambp", options={"chunk_size": 16})


def narrow(x: Tensor) -> Tensor:
    """``[B, T, d]`` → ``[B, 8 T, d / 8]``: eight rows for each token."""
    return x.reshape(x.shape[0], -1, WIDTH // 8)


SHARED = {
    "padded": lambda x: F.pad(narrow(x), (0, 0, 1, -1)),
    "padded, then cut": lambda x: F.pad(narrow(x), (0, 0, 5, 0))[:, :-5],
    "by a whole token": lambda x: F.pad(narrow(x), (0, 0, 8, -8)),
    "ahead": lambda x: F.pad(narrow(x)[:, 2:], (0, 0, 0, 2)),
    "joined": lambda x: joined(narrow(x)),
    "differences": lambda x: F.pad(narrow(x)[:, 1:] - narrow(x)[:, :-1], (0, 0, 1, 0)),
    "sums": lambda x: narrow(x).cumsum(1) / 100,
    "rolled": lambda x: narrow(x).roll(3, 1),
    "sequences in one": lambda x: F.pad(x.flatten(0, 1), (0, 0, 1, -1)),
    "sequences in one, joined": lambda x: joined(x.flatten(0, 1)[None]),
    "convolution": lambda x: F.conv1d(
        narrow(x).transpose(1, 2), torch.ones(WIDTH // 8, 1, 3).to(x), padding=1, groups=WIDTH // 8
    ).transpose(1, 2),
}


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize("name", representatives(SHARED, {"padded", "padded, then cut", "sequences in one"}))
def test_rows_that_share_the_dimension_of_the_tokens_are_no_tokens(name, interpreted):
    """A shift by a row is no shift by a token there, and chunks at any place must not be told otherwise."""
    mix = SHARED[name]
    model, ids = Mixed(lambda: Shift(lambda x: mix(x).reshape_as(x))).double(), ids_of(2, LENGTH)
    step = compiled(model)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


CHOSEN = {
    "one padding",
    "both ways",
    "depthwise, cut behind",
    "dense",
    "long, in groups",
    "one behind another",
}


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(MIXERS, CHOSEN))
def test_neighbours_stream(name, interpreted):
    """All of it: a region that is compiled whole warns, and a warning is an error here."""
    model, ids = Mixed(MIXERS[name]).double(), ids_of(2, LENGTH)
    step = compiled(model)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(("one padding", "dense", "long, in groups"), {"dense"}))
def test_lengths_share_a_graph(name, interpreted):
    model = Mixed(MIXERS[name]).double()
    step, graphs = counted(model, 16)
    for length in (LENGTH, 40, 50):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT
    assert len(graphs) == 2


LOOK_UPS = {
    "positions": lambda table, ids: F.embedding(torch.arange(ids.shape[1]), table),
    "positions, by index": lambda table, ids: table[torch.arange(ids.shape[1])],
    "counted from one": lambda table, ids: F.embedding(ids.clamp(min=1) - 1, table),
}


class LookedUp(nn.Module):
    """A convolution over rows that are looked up: those before the first have no index of their own."""

    def __init__(self, look_up):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.look_up, self.table = look_up, nn.Parameter(torch.randn(max(LENGTH, VOCABULARY), WIDTH))
        self.filter = Convolution(kernel_size=3, padding=2, cut=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.look_up(self.table, ids)
        x = x + self.filter(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("name", representatives(LOOK_UPS, {"positions"}))
def test_rows_before_the_first_look_nothing_up(name, interpreted):
    model, ids = LookedUp(LOOK_UPS[name]).double(), ids_of(2, LENGTH)
    step = compiled(model)
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT
    with torch.no_grad():
        torch.testing.assert_close(step(ids), model(ids), rtol=EXACT, atol=0)


BEYOND = ("padded, then cut", "depthwise, cut behind", "dilated", "long, in groups")


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.slow
@pytest.mark.parametrize("name", BEYOND)
def test_texts_shorter_than_what_a_row_looks_back(name, interpreted):
    model = Mixed(MIXERS[name]).double()
    step = compiled(model)
    for length in (40, LENGTH, 2, 3):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


class Late(nn.Module):
    """Cut in front: every row reads what comes after it, and the pattern of a causal filter does not fit."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(x.transpose(1, 2))[..., 2:].transpose(1, 2)


@pytest.mark.quick
def test_other_convolutions_are_whole_and_exact(interpreted):
    model, ids = Mixed(Late).double(), ids_of(2, LENGTH)
    step = compiled(model)
    with pytest.warns(NotStreamed, match="convolution"):
        found = gradients(model, lambda: step(ids))
    assert worst_error(found, gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depthwise, cut behind", "long, in groups"])
def test_compiled_by_inductor_under_autocast(name):
    """The CPU's kernel for long filters in groups rounds partial sums to bfloat16: eager's own gradients are
    a quarter off there, and other parts of rows give other roundings."""
    model, ids = Mixed(MIXERS[name]), ids_of(2, 130)

    def loss(f):
        with torch.autocast("cpu", torch.bfloat16):
            return f(ids)

    truth = gradients(model, lambda: model(ids))
    eager, ours = (gradients(model, lambda: loss(f)) for f in (model, compiled(model)))
    slack = 1.25 if name == "long, in groups" else 1.05
    assert total_error(ours, truth) <= slack * total_error(eager, truth)


def shifts_of(function, *inputs) -> list[tuple]:
    return [
        n.args[1:]
        for n in normalize(traced(function, *inputs)).graph.find_nodes(
            op="call_function", target=streambp.shifted.default
        )
    ]


def test_only_what_keeps_every_row_but_those_moved_out_is_a_shift():
    x = torch.randn(2, 9, 4)
    assert shifts_of(lambda x: F.pad(x, (0, 0, 2, -2)), x) == [(1, 2)]
    assert shifts_of(lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)), x) == [(1, -1)]
    assert shifts_of(lambda x: torch.cat((x[:, :1], x[:, :-1]), 1), x) == [(1, 1)]
    assert shifts_of(lambda x: F.pad(F.pad(x, (0, 0, 2, 0))[:, :-1], (0, 0, -1, 0))[:, :9], x) == [(1, 1)]
    for other in (
        lambda x: F.pad(x, (0, 0, 2, -2), value=1.0),
        lambda x: F.pad(x[:, :-2], (0, 0, 1, 1)),
        lambda x: F.pad(x[:, 2:], (0, 0, 2, 0)),
        lambda x: F.pad(x, (1, -1, 1, -1)),
        lambda x: F.pad(x[:, ::2], (0, 0, 2, 2)),
        lambda x: F.pad(x.long(), (0, 0, 1, -1)),
        lambda x: F.pad(x.sum(-1), (1, -1)),
        lambda x: torch.cat((x[:, :1], x[:, 1:]), 1),
        lambda x: torch.cat((x[:, :2], x[:, :-2]), 1),
    ):
        assert shifts_of(other, x) == []


@pytest.mark.parametrize("by", [1, -2, 4, 5, -7])
def test_the_operator_is_a_padding(by):
    x = torch.randn(2, 5, 3)
    expected = torch.zeros_like(x) if abs(by) > 5 else F.pad(x, (0, 0, by, -by))
    torch.testing.assert_close(streambp.shifted(x, 1, by), expected, rtol=0, atol=0)


FILTERS = {"dense": (6, 4, 3, 1, 1, 1), "in groups": (6, 2, 4, 2, 1, 2), "dilated": (4, 1, 3, 4, 2, 4)}


@pytest.mark.parametrize("name", FILTERS)
def test_the_filter_is_a_convolution(name):
    made, given, taps, before, dilation, groups = FILTERS[name]
    x, weight = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(made, given, taps, dtype=torch.float64)
    rows = F.pad(x, (before, dilation * (taps - 1) - before))
    expected = F.conv1d(rows, weight, dilation=dilation, groups=groups)
    how = (before, dilation, groups)
    torch.testing.assert_close(streambp.filtered(x, weight, *how), expected)
    wanted = (x.requires_grad_(), weight.requires_grad_())
    torch.autograd.gradcheck(lambda x, weight: streambp.filtered(x, weight, *how), wanted)


class Drafts(nn.Module):
    """A draft layer unrolled over three steps: targets and ids move on by one token each time, and a step
    attends to its own keys of the steps before, in columns behind those of all tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def layer(self, x: Tensor, past: list) -> tuple[Tensor, list]:
        tokens, q = x.shape[1], self.q(x)
        past = [*past, (self.k(x), self.v(x))]
        scores = q @ past[0][0].mT + torch.full((tokens, tokens), -torch.inf, dtype=x.dtype).triu(1)
        for k, _ in past[1:]:
            scores = torch.cat((scores, (q * k).sum(-1, keepdim=True)), -1)
        shares = scores.softmax(-1)
        out = shares[..., :tokens] @ past[0][1]
        for i, (_, v) in enumerate(past[1:]):
            out = out + shares[..., tokens + i, None] * v
        return x + out, past

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        past, loss = [], 0.0
        for _ in range(3):
            x, past = self.layer(x + self.embed(ids), past)
            ids = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), 1)
            loss = loss + F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss


@pytest.mark.long
def test_unrolled_drafts_stream(interpreted):
    model = Drafts().double()
    step = compiled(model)
    for length in (LENGTH, 40):
        x, ids = torch.randn(2, length, WIDTH).double(), ids_of(2, length)
        truth = gradients(model, lambda x=x, ids=ids: model(x, ids))
        assert worst_error(gradients(model, lambda x=x, ids=ids: step(x, ids)), truth) < EXACT


@pytest.mark.filterwarnings("ignore::streambp_compile.NotStreamed")
@pytest.mark.parametrize("padding", [(1, 0), (3, 4), (-2, 3), (2, -3)])
def test_gradients_of_values_padded_along_the_tokens(padding):
    """No value has features, so that nothing tells which token is row 0 of the incoming gradient."""

    def pad(x):
        return F.pad(x, padding)

    x = torch.randn(2, 3, 40, dtype=torch.float64, requires_grad=True)
    expected = pad(x)
    gradient = torch.randn_like(expected)
    found = torch.compile(pad, backend="streambp", options={"chunk_size": 8})(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, x, gradient)[0] for y in (found, expected)), rtol=0, atol=0
    )

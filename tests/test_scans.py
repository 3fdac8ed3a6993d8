"""Scans over tokens: linear attention, gated recurrences in log space, running means, counted positions."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from graphs import Written, traced
from models import VOCABULARY, Layer, counted, gradients, ids_of, total_error, truth_of, worst_error
from torch import Tensor, nn

import streambp_compile
from benchmarks.memory import peak
from streambp_compile import NotStreamed, internals
from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import Mark
from streambp_compile.passes.normalization.normalize import normalize
from streambp_compile.passes.partition import partition
from streambp_compile.passes.planning import chunk_length
from streambp_compile.passes.planning.choices import DEFAULT
from streambp_compile.passes.verify import IllegalResult, verify_program

aten, streambp = torch.ops.aten, torch.ops.streambp
EXACT = 1e-10
WIDTH, HEADS, LENGTH = 32, 4, 61


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Scanned(nn.Module):
    """Two layers that mix tokens by a scan, an attention layer between them."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.into, self.out = (
            nn.ModuleList([nn.Linear(a * WIDTH, b * WIDTH) for _ in range(2)]) for a, b in ((1, 3), (1, 1))
        )
        self.norms, self.attention = (
            nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)]),
            Layer(WIDTH, HEADS),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, (norm, into, out) in enumerate(zip(self.norms, self.into, self.out)):
            x = x + out(self.mix(*into(norm(x)).chunk(3, -1)))
            x = self.attention(x) if i == 0 else x
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def linear_attention(q, k, v):
    q, k, v = heads(F.elu(q) + 1), heads(F.elu(k) + 1), heads(v)
    state = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    mixed = torch.einsum("bhtd,bhtde->bhte", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)
    return mixed.transpose(1, 2).flatten(2)


def gated_in_log_space(gate, hidden, _):
    """minGRU (arXiv 2410.01201): ``h = (1 - z) h + z g(x)``, all tokens at once."""
    decays = -F.softplus(gate)
    values = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden)) - F.softplus(-gate)
    total = decays.cumsum(1)
    return (total + (values - total).logcumsumexp(1)).exp()


def decaying_state(q, k, v):
    """A state that decays by a gate of its own for each head."""
    decay = F.logsigmoid(heads(v).mean(-1, keepdim=True) + 4).cumsum(2)
    state = torch.einsum("bhtd,bhte->bhtde", heads(k) * (-decay).exp(), heads(v)).cumsum(2)
    return torch.einsum("bhtd,bhtde->bhte", heads(q) * decay.exp(), state).transpose(1, 2).flatten(2)


def decaying_scores(q, k, v):
    """The same as a matrix of decays (Mamba-2's dual form): a scan beside attention."""
    decay = F.logsigmoid(heads(v).mean(-1) + 2).cumsum(2)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    matrix = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    return ((heads(q) @ heads(k).transpose(-1, -2) * matrix) @ heads(v)).transpose(1, 2).flatten(2)


def both_ways(q, k, v):
    return q.cumsum(1).tanh() + k.flip(1).cumsum(1).flip(1).tanh() + v


def of_a_scan(q, k, v):
    return (q.cumsum(1).tanh() * k).cumsum(1).tanh() * v


def positions_counted_by_content(q, k, v):
    """CoPE (arXiv 2405.18719): positions are gates, added up over keys from each row back."""
    scores = heads(q) @ heads(k).transpose(-1, -2)
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    places = scores.sigmoid().masked_fill(later, 0).flip(-1).cumsum(-1).flip(-1)
    scores = (scores + places.sin()).masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(2)


MIXERS = {
    "linear attention": linear_attention,
    "minGRU": gated_in_log_space,
    "decaying state": decaying_state,
    "decaying scores": decaying_scores,
    "both ways": both_ways,
    "scan of a scan": of_a_scan,
    "CoPE": positions_counted_by_content,
    "running mean": lambda q, k, v: q.cumsum(1) / torch.arange(1, q.shape[1] + 1)[:, None] * k + v,
}


def step(model: nn.Module, chunk: int = 16):
    return torch.compile(model, backend="streambp", options={"chunk_size": chunk})


@pytest.mark.parametrize(
    "name, chunk, length",
    [
        ("minGRU", 7, LENGTH),
        *(
            pytest.param(name, 7, LENGTH, marks=pytest.mark.slow)
            for name in (
                "linear attention",
                "both ways",
                "CoPE",
                "decaying state",
                "decaying scores",
                "scan of a scan",
                "running mean",
            )
        ),
        ("both ways", 1, 9),
        pytest.param("linear attention", 100, LENGTH, marks=pytest.mark.slow),
        pytest.param("linear attention", 1, 9, marks=pytest.mark.slow),
        pytest.param("both ways", 100, LENGTH, marks=pytest.mark.slow),
    ],
)
def test_a_scan_streams(name, chunk, length, interpreted):
    """All of it: a region that is compiled whole warns, and a warning is an error here."""
    model, ids = Scanned(MIXERS[name]).double(), ids_of(2, length)
    streamed = step(model, chunk)
    assert worst_error(gradients(model, lambda: streamed(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.slow
def test_lengths_share_what_is_compiled(interpreted):
    model = Scanned(linear_attention).double()
    streamed, graphs = counted(model, 16)
    for length in (LENGTH, 40, 33, 65):
        ids = ids_of(2, length)
        if len(graphs) == 2:
            known = set(internals.chunk_bodies.COMPILED)
        assert (
            worst_error(gradients(model, lambda: streamed(ids)), gradients(model, lambda: model(ids))) < EXACT
        )
    assert len(graphs) == 2 and known == set(internals.chunk_bodies.COMPILED)


@pytest.mark.quick
@pytest.mark.slow
def test_without_gradients(interpreted):
    model, ids = Scanned(linear_attention).double(), ids_of(2, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(step(model)(ids), model(ids), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("mix", [pytest.param(linear_attention, marks=pytest.mark.slow), gated_in_log_space])
@pytest.mark.slow
def test_half_precision_is_no_less_exact_than_eager(mix, interpreted):
    model, ids = Scanned(mix), ids_of(2, 100)
    model.to(torch.bfloat16)
    truth = truth_of(model, lambda m: m(ids))
    streamed = step(model, 32)
    assert total_error(gradients(model, lambda: streamed(ids)), truth) <= 1.05 * total_error(
        gradients(model, lambda: model(ids)), truth
    )


class Behind(Scanned):
    """The scan's rows begin with the second token: what is cut off in front is no part of its sums."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.embed(ids))[:, 1:]
        return F.cross_entropy(self.head(x.cumsum(1).tanh() + x).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 16])
def test_rows_that_do_not_count_are_no_part_of_a_sum(chunk, interpreted):
    model = Behind(None).double()
    streamed = step(model, chunk)
    for length in (LENGTH, 45):
        ids = ids_of(2, length)
        assert (
            worst_error(gradients(model, lambda: streamed(ids)), gradients(model, lambda: model(ids))) < EXACT
        )


def scan_and_back() -> tuple[Written, dict, tuple]:
    """``y = tanh(scan(x w))`` of five tokens and its gradients: what comes back from the rows of the scan is
    a scan the other way."""
    write = Written()
    x, w, dy = (
        write.given("x", torch.randn(5, 8)),
        write.given("w", torch.randn(8, 8)),
        write.given("dy", torch.randn(5, 8)),
    )
    state = write("state", aten.cumsum.default, write("rows", aten.mm.default, x, w), 0)
    y = write("y", aten.tanh.default, state)
    dstate = write("dstate", aten.tanh_backward.default, dy, y)
    drows = write("drows", streambp.reverse_scan.default, dstate, 0, "cumsum")
    dw = write("dw", aten.mm.default, write("rows_first", aten.permute.default, x, [1, 0]), drows)
    dx = write("dx", aten.mm.default, drows, write("turned", aten.permute.default, w, [1, 0]))
    write.graph.output((y, dx, dw))
    return write, {x: (Mark(0),), dy: (Mark(0),)}, (y, dx, dw)


FORWARD = """
ascending: 3 ops; reads x, w; writes y; carries state
returns y
"""
BACKWARD = """
ascending: 2 ops; reads x, w; carries state; saves states of state
full length: turned
descending: 8 ops; reads x, w, dy, turned; writes dx; carries drows; restores states of state; adds up dw
returns dx, dw
"""


@pytest.mark.quick
def test_the_sweeps_of_a_scan_and_its_gradient():
    write, seeds, (y, *grads) = scan_and_back()
    analysis = analyze(write.graph, 5, seeds)
    forward, backward = partition(write.graph, analysis, (y,)), partition(write.graph, analysis, grads)
    verify_program(backward, analysis)
    assert (str(forward), str(backward)) == (FORWARD.strip(), BACKWARD.strip())
    forgetful = replace(backward, sweeps=(replace(backward.sweeps[0], saved_states=()), backward.sweeps[1]))
    with pytest.raises(IllegalResult, match="no sweep saves the states"):
        verify_program(forgetful, analysis)


def test_sweeps_that_share_states_share_the_length_of_chunks(monkeypatch):
    """The shortest of theirs."""
    write, seeds, (_, *grads) = scan_and_back()
    analysis = analyze(write.graph, 5, seeds)
    program = partition(write.graph, analysis, grads)
    own = {program.sweeps[0].nodes: 48, program.sweeps[1].nodes: 32}
    monkeypatch.setattr(chunk_length, "length_for", lambda work, sweep, *_: own[sweep.nodes])
    assert chunk_length.chunk_lengths(program, analysis, DEFAULT) == (32, 32)
    apart = replace(
        program, sweeps=tuple(replace(s, saved_states=(), restored_states=()) for s in program.sweeps)
    )
    assert chunk_length.chunk_lengths(apart, analysis, DEFAULT) == (48, 32)


def test_layers_stay_whole_and_equal(interpreted):
    """No cut goes between the scans of a layer, where its state of every token would be alive; and the report
    shows the state."""

    class Layers(Scanned):
        def forward(self, ids):
            x = self.embed(ids)
            for norm, into, out in zip(self.norms, self.into, self.out):
                x = x + out(self.mix(*into(norm(x)).chunk(3, -1)))
            return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    model, ids = Layers(linear_attention), ids_of(2, LENGTH)
    report = streambp_compile.explain(model, ids)
    assert [(r.times, r.streamed is not None) for r in report.regions] == [(1, True), (2, True), (1, True)]
    layer = report.regions[1]
    assert len(layer.forward.program.sweeps[0].scans) == 2 and "carries" in str(layer)


class Alone(nn.Module):
    """A short convolution, then a decaying state: a layer that FSDP2 and torchtitan compile by itself."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, groups=3 * WIDTH, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.taps(self.into(x).mT)[..., : x.shape[1]].mT
        return x + self.out(linear_attention(*mixed.chunk(3, -1)))


def test_a_layer_that_comes_alone_is_not_cut_inside(interpreted):
    """Nothing around it tells how wide the place between layers is; what comes in does."""
    model, x = Alone().double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    report = streambp_compile.explain(model, x)
    assert len(report.regions) == 1 and report.regions[0].streamed is not None
    streamed = step(model, 16)

    def loss(f) -> Tensor:
        return f(x).square().sum()

    found, truth = (torch.autograd.grad(loss(f), (x, *model.parameters())) for f in (streamed, model))
    assert all(torch.allclose(a, b, rtol=EXACT, atol=EXACT) for a, b in zip(found, truth, strict=True))


@pytest.mark.slow
def test_no_state_exists_for_every_token(fresh_dynamo):
    """All states of one layer take 2 * 2048 * 4 * 8 * 8 * 4 bytes: eager holds several of them. Compiled for
    real."""
    model, ids = Scanned(linear_attention), ids_of(2, 2048)
    streamed = step(model, 32)
    assert worst_error(gradients(model, lambda: streamed(ids)), gradients(model, lambda: model(ids))) < 1e-4

    def measured(f) -> int:
        f(ids).backward()
        return peak(lambda: f(ids).backward())

    ours, states = measured(streamed), 2 * 2048 * HEADS * (WIDTH // HEADS) ** 2 * 4
    assert ours < 1.5 * states < measured(model) / 4


def scans_of(function, *inputs) -> list:
    return [
        n.args[1:]
        for n in normalize(traced(function, *inputs)).graph.find_nodes(
            op="call_function", target=streambp.reverse_scan.default
        )
    ]


def test_a_scan_between_flips_goes_the_other_way():
    x = torch.randn(2, 9, 4)
    assert scans_of(lambda x: x.flip(1).cumsum(1).flip(1), x) == [(1, "cumsum")]
    assert scans_of(lambda x: x.flip(-1).logcumsumexp(-1).flip(2), x) == [(2, "logcumsumexp")]
    assert scans_of(lambda x: x.flip(1).flip(1).cumsum(1).flip(1).flip(1), x) == []
    for other in (
        lambda x: x.flip(1).cumsum(2).flip(1),
        lambda x: x.flip(1, 2).cumsum(1).flip(1, 2),
        lambda x: x.cumsum(1).flip(1),
        lambda x: x.flip(1).cumsum(1),
        lambda x: x.flip(1).cumsum(1, dtype=torch.float64).flip(1),
    ):
        assert scans_of(other, x) == []


@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "logcumsumexp"])
def test_the_operator_is_a_scan_of_flipped_rows(kind):
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(
        streambp.reverse_scan(x, 1, kind), getattr(torch, kind)(x.flip(1), 1).flip(1), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "scan, told",
    [
        (lambda s: s.cumsum(-2), "scans the rows of a matrix"),
        pytest.param(lambda s: s.cumsum(-1), None, marks=pytest.mark.slow),
        pytest.param(lambda s: s.logcumsumexp(-1), None, marks=pytest.mark.slow),
    ],
    ids=["rows", "keys", "keys in log space"],
)
def test_scans_of_scores_read_what_they_need(scan, told, interpreted):
    """A scan over keys before the window is cut out of it: no key may be left out."""

    def mix(q, k, v):
        place = torch.arange(q.shape[1])
        distance = place[:, None] - place
        scores = scan(heads(q) @ heads(k).transpose(-1, -2) / 8).masked_fill(
            (distance < 0) | (distance > 5), -math.inf
        )
        return (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(2)

    model, ids = Scanned(mix).double(), ids_of(2, LENGTH)
    streamed = step(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotStreamed)
        found = gradients(model, lambda: streamed(ids))
    assert worst_error(found, gradients(model, lambda: model(ids))) < EXACT
    refusals = [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]
    assert bool(refusals) == bool(told) and all(told in r for r in refusals)

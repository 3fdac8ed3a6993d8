"""What is computed together at full length: which nodes, exactness, and what it saves."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from graphs import Written
from torch import nn

from benchmarks.memory import peak
from benchmarks.objectives import error_of
from streambp_compile import explain
from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import Fusion, Mark
from streambp_compile.passes.lower import fused_body
from streambp_compile.passes.partition import partition
from streambp_compile.passes.planning import fusions
from streambp_compile.passes.planning.plan import plan
from streambp_compile.passes.verify import IllegalResult, verify_fused_body, verify_plan

aten = torch.ops.aten
VOCABULARY, WIDTH = 4096, 128
WEIGHT = VOCABULARY * WIDTH * 8  # bytes in float64


class Cosines(nn.Module):
    """A layer whose weight is masked, and a head of normalised weights: arithmetic on weights alone, forward
    and backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8 * WIDTH, dtype=torch.double)
        self.back = nn.Linear(8 * WIDTH, WIDTH, dtype=torch.double)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.double)

    def forward(self, x, labels, scale):
        masked = self.layer.weight * (self.layer.weight.abs() > 0.01).double() * scale
        x = x + self.back(F.gelu(x @ masked.T))
        cosines = F.normalize(x, dim=-1) @ F.normalize(self.head.weight, dim=-1).T
        return F.cross_entropy((cosines / 0.07).flatten(0, 1), labels.flatten())


def inputs_of(batch, length):
    torch.manual_seed(batch)
    x = torch.randn(batch, length, WIDTH, dtype=torch.double, requires_grad=True)
    return x, torch.randint(VOCABULARY, (batch, length)), torch.tensor(1.5, dtype=torch.double)


def gradients(model, step, given):
    model.zero_grad()
    given[0].grad = None
    loss = step(*given)
    loss.backward()
    return [loss.detach(), given[0].grad, *(p.grad for p in model.parameters())]


def check_exact(model, step, given):
    for ours, truth in zip(gradients(model, step, given), gradients(model, model, given)):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.inductor
def test_arithmetic_on_weights_is_exact_and_holds_little(fresh_dynamo):
    model = Cosines()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32})
    for batch, length in ((2, 100), (3, 70)):
        check_exact(model, step, inputs_of(batch, length))
    given = inputs_of(2, 100)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    # the normalised weight and its gradient, then that and the weight's gradient; one by one, eight of them
    assert peak(lambda: step(*given).backward()) < 4 * WEIGHT


def test_which_values_are_computed_together(interpreted):
    model, given = Cosines(), inputs_of(2, 100)
    report = explain(model, *given)
    (before,), (after,) = (
        [part for part in parts if isinstance(part, Fusion)]
        for parts in report.regions[0].streamed.forward.plan.full_length
    )
    shapes = [tuple(n.meta["val"].shape) for n in after.results]
    # the loss and the gradients of both weights; what their arithmetic makes on the way is in no memory
    assert sorted(shapes) == [(), (8 * WIDTH, WIDTH), (VOCABULARY, WIDTH)]
    assert sum(n.meta["val"].numel() >= VOCABULARY * WIDTH for n in before.results) == 1


def test_everything_fused_is_exact(interpreted, monkeypatch):
    """Whatever its size: masks, positions, tails of losses."""
    monkeypatch.setattr(fusions, "LARGE", 1)
    model = Cosines()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 32})
    check_exact(model, step, inputs_of(2, 100))


@pytest.mark.slow
@pytest.mark.inductor
def test_parts_of_what_was_made_otherwise_than_traced(fresh_dynamo, monkeypatch):
    """When traced, the last scores are a part of all scores; when run, they are all that exists. And rows of
    the hidden states are picked beside them."""
    monkeypatch.setattr(fusions, "LARGE", 1)
    error, _ = error_of("reward model, one row of all")
    assert error < 1e-12


def weights_and_rows(width):
    """``a = |w|; e = exp(a); b = a @ e; s = sin(a + b); y = x @ s; z = x @ s.T``, with ``w`` a square."""
    write = Written()
    x, w = write.given("x", torch.randn(5, width)), write.given("w", torch.randn(width, width))
    a = write("a", aten.abs.default, w)
    e = write("e", aten.exp.default, a)
    b = write("b", aten.mm.default, a, e)
    c = write("c", aten.add.Tensor, a, b)
    s = write("s", aten.sin.default, c)
    d = write("d", aten.t.default, s)
    outputs = (write("y", aten.mm.default, x, s), write("z", aten.mm.default, x, d))
    return write, {x: (Mark(0),)}, outputs


def planned(width=1024):
    write, seeds, outputs = weights_and_rows(width)
    analysis = analyze(write.graph, 5, seeds)
    program = partition(write.graph, analysis, outputs)
    return program, plan(program, analysis)


def test_products_part_fusions_and_views_stay_outside():
    program, found = planned()
    names = [[n.name for n in p.nodes] if isinstance(p, Fusion) else p.name for p in found.full_length[0]]
    assert names == [["a", "e"], "b", ["c", "s"], "d"]
    assert [[n.name for n in f.results] for f in found.fusions] == [["a", "e"], ["s"]]
    verify_plan(found, program)
    for fusion in found.fusions:
        verify_fused_body(fused_body(fusion), fusion)


def test_small_values_are_not_worth_compiling():
    _, found = planned(width=64)
    assert not found.fusions and len(found.full_length[0]) == 6


def test_what_is_not_worth_compiling_waits_for_the_views_that_it_reads():
    """A view that others read stays outside of functions, which make it again; single nodes cannot."""
    write = Written()
    weight, few = write.given("weight", torch.randn(1024, 512)), write.given("few", torch.randn(4, 3))
    large = write("large", aten.mm.default, weight, write("turned", aten.t.default, weight))
    doubled = write("doubled", aten.mul.Tensor, few, 2.0)
    seen = write("seen", aten.view.default, doubled, [12])
    less = write("less", aten.neg.default, seen)
    nodes = [n for n in write.graph.nodes if n.op == "call_function"]
    order = list(fusions.parts_of_step(nodes, {large, seen, less}))
    assert order.index(doubled) < order.index(seen) < order.index(less)


def test_a_fusion_that_hides_a_value_is_illegal():
    program, found = planned()
    first, *others = found.full_length[0]
    rest = found.full_length[1:]
    without = replace(found, full_length=((replace(first, results=first.results[1:]), *others), *rest))
    with pytest.raises(IllegalResult, match="from inside a compiled function"):
        verify_plan(without, program)
    late = replace(found, full_length=((*others, first), *rest))
    with pytest.raises(IllegalResult, match="before what it reads"):
        verify_plan(late, program)
    lost = replace(found, full_length=(others, *rest))
    with pytest.raises(IllegalResult, match="before what it reads|never computed"):
        verify_plan(lost, program)
    body = fused_body(replace(found.fusions[0], results=()))
    with pytest.raises(IllegalResult, match="results of a function are missing"):
        verify_fused_body(body, found.fusions[0])

"""Which op runs in which sweep: the programs of small graphs as text."""

import itertools
import operator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from graphs import Written, causal_layer
from torch.fx import Graph

from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import CannotStream, Direction, Mark
from streambp_compile.passes.normalization.separate_views import separate_views
from streambp_compile.passes.partition import assignments, partition, programs
from streambp_compile.passes.partition.assembly import Assembly
from streambp_compile.passes.partition.crossing import narrowest_crossing
from streambp_compile.passes.partition.full_length import find_full_length
from streambp_compile.passes.partition.levels import levels_of, sink
from streambp_compile.passes.partition.problem import Problem
from streambp_compile.passes.verify import verify_program
from streambp_compile.regions.region_programs import returning

aten, streambp = torch.ops.aten, torch.ops.streambp
LENGTH = 5


def program(write: Written, seeds, outputs, movable=()) -> str:
    analysis = analyze(write.graph, LENGTH, seeds)
    found = partition(write.graph, analysis, outputs, movable=movable)
    verify_program(found, analysis)
    return str(found)


FORWARD = """
ascending, keys [-inf,0]: 8 ops; reads x, w; writes y; appends keys
returns y
"""
BACKWARD = """
descending: 3 ops; reads x, w; writes keys
full length: turned
descending, keys [-inf,0]: 19 ops; reads x, keys, dy, turned; writes dx over dy; adds up dw; completes dk, dv
returns dx, dw
"""


def test_what_a_later_sweep_writes_over_is_not_handed_on():
    """A forward that returns its keys as well is another program where its last sweep took their memory."""
    write, seeds, y, _ = causal_layer(causal=False)
    analysis = analyze(write.graph, LENGTH, seeds)
    forward = partition(write.graph, analysis, (y,))
    keys = next(n for n in forward.sweeps[0].writes)
    over = replace(forward.sweeps[1], in_place=((y, keys),))
    region = SimpleNamespace(graph=write.graph, forward=(y,))
    handing_on = returning(region, analysis, replace(forward, sweeps=(forward.sweeps[0], over)), (keys,))
    verify_program(handing_on, analysis)
    assert handing_on.outputs == (y, keys)
    assert returning(region, analysis, forward, (keys,)).sweeps is forward.sweeps


def test_a_causal_layer_is_one_sweep_forward_and_two_backward():
    write, seeds, y, gradients = causal_layer()
    dy = next(n for n in seeds if n.name == "dy")
    assert program(write, seeds, (y,)) == FORWARD.strip()
    assert program(write, seeds, gradients, movable=(dy,)) == BACKWARD.strip()


BOTH_WAYS_FORWARD = """
ascending: 3 ops; reads x, w; writes keys
ascending: 5 ops; reads x, keys; writes y
returns y
"""
BOTH_WAYS_BACKWARD = """
ascending: 3 ops; reads x, w; writes keys
ascending: 11 ops; reads x, keys, dy; writes beside; adds up per key dk, dv
full length: turned
ascending: 8 ops; reads x, dk, dv, turned, beside; writes dx over beside; adds up dw
returns dx, dw
"""


def test_a_bidirectional_layer_is_two_sweeps_forward_and_three_backward():
    write, seeds, y, gradients = causal_layer(causal=False)
    assert program(write, seeds, (y,)) == BOTH_WAYS_FORWARD.strip()
    assert program(write, seeds, gradients) == BOTH_WAYS_BACKWARD.strip()
    dy = next(n for n in seeds if n.name == "dy")
    over = BOTH_WAYS_BACKWARD.replace("writes beside;", "writes beside over dy;")
    assert program(write, seeds, gradients, movable=(dy,)) == over.strip()


@pytest.mark.parametrize("causal", [True, False])
def test_directions_that_make_no_difference_are_tried_once(causal):
    """The cheapest of the programs that are assembled is the cheapest of those of all directions."""
    write, seeds, _, gradients = causal_layer(causal)
    dy = next(n for n in seeds if n.name == "dy")
    analysis = analyze(write.graph, LENGTH, seeds)
    problem = Problem(write.graph, analysis, gradients, frozenset(), frozenset({dy}), frozenset())
    choice = find_full_length(problem)
    count = len(partition(write.graph, analysis, gradients, movable=(dy,)).sweeps)
    found, tried = [], list(assignments(problem, choice, count))
    for directions in itertools.product(Direction, repeat=count):
        levels = levels_of(problem, choice, directions)
        for each in () if levels is None else (levels, sink(problem, choice, levels)):
            found += [Assembly(problem, choice, each, over).program() for over in (False, True)]
    assert len(tried) < len(found) / 2
    cost, program = min(found, key=lambda each: each[0])
    (_, cheapest), same = min(programs(problem, choice, count), key=lambda each: each[0])
    assert (cheapest, str(same)) == (cost, str(program))


def test_a_sweep_keeps_what_spares_the_most_of_the_narrowest_values():
    """Attention's result a is kept, or what is made of it: c is as wide as a and further on, b is wider."""
    graph = Graph()
    a, b, c, d = (graph.placeholder(name) for name in "abcd")
    reads = {a: (), b: (a,), c: (b,), d: ()}
    sizes = {a: 8, b: 16, c: 8, d: 0}
    assert narrowest_crossing(reads, {a, d}, {c, d}, sizes) == {c, d}
    assert narrowest_crossing(reads, {a, d}, {b, c, d}, sizes) == {a, d}
    assert narrowest_crossing(reads, {a, d}, {c, d}, {**sizes, c: None}) == {a, d}
    assert narrowest_crossing(reads, {a, d}, {c, d}, dict.fromkeys(reads)) == set()


def test_the_gradient_of_a_bias_leaves_the_incoming_gradient_free_to_be_written_over():
    write = Written()
    x, w, dy = (
        write.given("x", torch.randn(LENGTH, 8)),
        write.given("w", torch.randn(8, 8)),
        write.given("dy", torch.randn(1, LENGTH, 8)),
    )
    rows, squares = write("rows", aten.view.default, dy, [LENGTH, 8]), write("squares", aten.mul.Tensor, x, x)
    dx = write("dx", aten.view.default, write("product", aten.mm.default, rows, w), [1, LENGTH, 8])
    dw = write("dw", aten.mm.default, write("turned", aten.permute.default, squares, [1, 0]), rows)
    db = write("db", aten.sum.dim_IntList, rows, [0])
    write.graph.output((dx, dw, db))
    separate_views(write.graph)
    seeds = {x: (Mark(0),), dy: (Mark(1),)}
    assert "dx over dy" in program(write, seeds, (dx, dw, db), movable=(dy,))


def head(separable: bool):
    """A head and the sum of its squares; or the logarithm of that sum, whose gradient reads the sum."""
    write = Written()
    x, w, dloss = (
        write.given("x", torch.randn(LENGTH, 8)),
        write.given("w", torch.randn(8, 16)),
        write.given("dloss", torch.ones(())),
    )
    logits = write("logits", aten.mm.default, x, w)
    loss = write("total", aten.sum.default, write("squares", aten.mul.Tensor, logits, logits))
    if separable:
        scale = dloss
    else:
        scale = write("scale", aten.div.Tensor, dloss, loss)
        loss = write("loss", aten.log.default, loss)
    dlogits = write("dlogits", aten.mul.Tensor, logits, scale)
    dx = write("dx", aten.mm.default, dlogits, write("turned", aten.permute.default, w, [1, 0]))
    dw = write("dw", aten.mm.default, write("rows_first", aten.permute.default, x, [1, 0]), dlogits)
    write.graph.output((loss, dx, dw))
    return write, {x: (Mark(0),)}, (loss, dx, dw)


SEPARABLE = """
full length: turned
ascending: 7 ops; reads x, w, dloss, turned; writes dx; adds up total, dw
returns total, dx, dw
"""
SUMMED = """
ascending: 3 ops; reads x, w; adds up total
full length: turned, scale
ascending: 5 ops; reads x, w, scale, turned; writes dx; adds up dw
full length: loss
returns loss, dx, dw
"""


def test_a_separable_loss_is_one_sweep_and_one_that_looks_at_its_sum_is_two():
    assert program(*head(separable=True)) == SEPARABLE.strip()
    assert program(*head(separable=False)) == SUMMED.strip()


SHARED = """
ascending: 9 ops; reads x, w, v; adds up second, both
full length: twice
returns both, twice
"""


def test_sums_that_are_only_added_to_one_another_share_an_accumulator():
    write = Written()
    x, w, v = (
        write.given("x", torch.randn(LENGTH, 8)),
        write.given("w", torch.randn(8, 8)),
        write.given("v", torch.randn(8, 8)),
    )
    turned = write("turned", aten.permute.default, x, [1, 0])
    first, second, third, fourth = (
        write(name, aten.mm.default, turned, write(f"{name}_rows", aten.mm.default, x, weight))
        for name, weight in (("first", w), ("second", v), ("third", w), ("fourth", v))
    )
    both = write("both", aten.add.Tensor, write("one", aten.add.Tensor, first, third), fourth)
    twice = write("twice", aten.add.Tensor, second, second)
    write.graph.output((both, twice))
    assert program(write, {x: (Mark(0),)}, (both, twice)) == SHARED.strip()


def test_only_what_the_outputs_need_is_run():
    write, seeds, y, (dx, dw) = causal_layer()
    assert "dw" not in program(write, seeds, (dx,))
    assert (
        program(write, seeds, (next(n for n in write.graph.nodes if n.name == "turned"),))
        == "full length: turned\nreturns turned"
    )


def test_a_gradient_that_somebody_else_reads_is_not_overwritten():
    write, seeds, _, (dx, dw) = causal_layer()
    dy = next(n for n in seeds if n.name == "dy")
    with write.graph.inserting_before(next(iter(reversed(write.graph.nodes)))):
        write("copied", aten.clone.default, dy)
    assert "over dy" in program(write, seeds, (dx, dw), movable=(dy,))
    assert "over" not in program(write, seeds, (dx, dw, dy), movable=(dy,))
    assert "over" not in program(write, seeds, (dx, dw))


def test_more_than_six_sweeps_are_refused():
    write = Written()
    x = write.given("x", torch.randn(1, 1, LENGTH, 8))
    y = x
    for i in range(7):
        pair = write(f"attend{i}", streambp.attention.default, y, y, y, None, False, 1.0, 0)
        y = write(f"out{i}", operator.getitem, pair, 0)
    with pytest.raises(CannotStream):
        program(write, {x: (Mark(2),)}, (y,))


def test_the_graph_is_left_alone():
    write, seeds, y, gradients = causal_layer()
    before = str(write.graph)
    first, second = (program(write, seeds, gradients) for _ in range(2))
    assert first == second and str(write.graph) == before


def weights_before_and_after():
    """``y = f(x @ n)`` of a normalised weight ``n``, and ``z``, a gradient that looks at the weight again."""
    write = Written()
    x, w = write.given("x", torch.randn(LENGTH, 4)), write.given("w", torch.randn(4, 6))
    size = write("size", aten.sum.default, w)
    n = write("n", aten.div.Tensor, w, size)
    y = write("y", aten.mm.default, x, n)
    again = write("again", aten.exp.default, w)
    turned = write("turned", aten.permute.default, again, [1, 0])
    total = write("total", aten.mm.default, write("xt", aten.permute.default, x, [1, 0]), y)
    large = write("large", aten.mul.Tensor, total, 2.0)
    z = write("z", aten.mul.Tensor, write("read", aten.mm.default, total, turned), size)
    return write, {x: (Mark(0),)}, (y, large, z)


PLACED = """
full length: size, n
ascending: 3 ops; reads x, n; writes y; adds up total
full length: again, turned, large, read, z
returns y, large, z
"""


def test_values_of_weights_wait_until_they_are_read():
    """``again`` is of the weight alone. ``size`` is read before, and so is ``n``."""
    assert program(*weights_before_and_after()) == PLACED.strip()


def test_a_value_does_not_wait_with_something_larger():
    """``few`` is small, and what it is computed from would be held until it is."""
    write = Written()
    x, w = write.given("x", torch.randn(LENGTH, 4)), write.given("w", torch.randn(4, 6))
    large = write("large", aten.exp.default, w)
    few = write("few", aten.sum.default, large)
    y = write("y", aten.mm.default, x, large)
    total = write("total", aten.mm.default, write("xt", aten.permute.default, x, [1, 0]), y)
    z = write("z", aten.mul.Tensor, total, few)
    text = program(write, {x: (Mark(0),)}, (z,))
    assert text.splitlines()[0] == "full length: large, few"

"""Every clause of what is legal after a pass, broken once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphs import Written, causal_layer
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import (
    HERE,
    Analysis,
    Binding,
    BindingRole,
    Body,
    CannotStream,
    Direction,
    Edge,
    Kind,
    Mark,
    Plan,
    Program,
    Reach,
    Role,
    Signature,
    Summed,
    Tokens,
)
from streambp_compile.passes.lower import lower
from streambp_compile.passes.partition import partition
from streambp_compile.passes.planning.choices import Choices
from streambp_compile.passes.planning.plan import plan
from streambp_compile.passes.verify import (
    IllegalResult,
    verify_analysis,
    verify_body,
    verify_bound,
    verify_chunks,
    verify_normalized,
    verify_plan,
    verify_program,
)

aten, streambp = torch.ops.aten, torch.ops.streambp
LENGTH, CHUNK = 5, 2


class Layer:
    """The backward of a causal layer after each pass; its values by name."""

    def __init__(self):
        write, seeds, _, gradients = causal_layer()
        self.graph = write.graph
        self.nodes = {n.name: n for n in write.graph.nodes}
        self.analysis = analyze(write.graph, LENGTH, seeds)
        dy = self.nodes["dy"]
        self.program = partition(write.graph, self.analysis, gradients, movable=(dy,))
        self.plan = plan(self.program, self.analysis, Choices(CHUNK))
        self.bodies = lower(self.program, self.analysis, self.plan)

    def with_fact(self, name: str, fact) -> Analysis:
        return replace(self.analysis, facts={**self.analysis.facts, self.nodes[name]: fact})

    def with_kind(self, name: str, kind: Kind) -> Analysis:
        return replace(self.analysis, kinds={**self.analysis.kinds, self.nodes[name]: kind})

    def with_edges(self, name: str, *edges: Edge) -> Analysis:
        return replace(self.analysis, edges={**self.analysis.edges, self.nodes[name]: edges})

    def with_sweep(self, at: int, **changes) -> Program:
        sweeps = list(self.program.sweeps)
        sweeps[at] = replace(sweeps[at], **changes)
        return replace(self.program, sweeps=tuple(sweeps))

    def binding(self, role: BindingRole) -> int:
        """The place of the first binding of a role in the last body."""
        return next(i for i, b in enumerate(self.bodies[-1].bindings) if b.role is role)

    def with_binding(self, of: BindingRole, **changes) -> Body:
        bindings, at = list(self.bodies[-1].bindings), self.binding(of)
        bindings[at] = replace(bindings[at], **changes)
        return replace(self.bodies[-1], bindings=tuple(bindings))


@pytest.fixture
def layer() -> Layer:
    return Layer()


def test_what_the_passes_make_is_legal(layer):
    verify_normalized(layer.graph)
    verify_analysis(layer.graph, layer.analysis)
    verify_program(layer.program, layer.analysis)
    verify_plan(layer.plan, layer.program)
    verify_chunks(layer.plan, layer.program, layer.analysis)
    for body, sweep in zip(layer.bodies, layer.program.sweeps):
        verify_body(body, sweep, layer.analysis)


# Normal graphs


def no_value(write: Written) -> None:
    del write("double", aten.mul.Tensor, write.given("x", torch.ones(3)), 2).meta["val"]


def writes_in_place(write: Written) -> None:
    write("added", aten.add_.Tensor, write.given("x", torch.ones(3)), 1)


def calls_a_method(write: Written) -> None:
    write.graph.call_method("double", (write.given("x", torch.ones(3)),))


@pytest.mark.parametrize(
    "spoil, message",
    [(no_value, "no fake value"), (writes_in_place, "writes into"), (calls_a_method, "call_method node")],
)
def test_an_illegal_normal_graph(spoil: Callable[[Written], None], message: str):
    write = Written()
    spoil(write)
    with pytest.raises(IllegalResult, match=message):
        verify_normalized(write.graph)


# Analyses

ROWS = Tokens(Mark(0))
ILLEGAL_ANALYSES: dict[str, Callable[[Layer], Analysis]] = {
    "y: 2 rows, but its fact says": lambda layer: layer.with_fact("y", ROWS),
    "dw is a sum, and has rows": lambda layer: layer.with_fact("dw", Tokens(Mark(0), lo=0, hi=3)),
    "y is rows, and has no rows": lambda layer: layer.with_fact("y", Summed()),
    "y has edges": lambda layer: layer.with_edges("y", *layer.analysis.edges[layer.nodes["y"]][:1]),
    "y reads rows of w": lambda layer: layer.with_edges(
        "y", Edge(layer.nodes["w"], Role.ROWS), Edge(layer.nodes["w"], Role.ROWS)
    ),
    "out reads rows of both, and no item of it": lambda layer: layer.with_edges(
        "out", Edge(layer.nodes["both"], Role.HALO, Reach(1, 1))
    ),
    "dx has no fact": lambda layer: replace(
        layer.analysis, facts={n: f for n, f in layer.analysis.facts.items() if n.name != "dx"}
    ),
}


@pytest.mark.parametrize("message", ILLEGAL_ANALYSES)
def test_an_illegal_analysis(layer, message):
    analysis = ILLEGAL_ANALYSES[message](layer)
    if message.startswith("y reads"):
        layer.nodes["y"].args = (layer.nodes["w"], layer.nodes["w"])
    with pytest.raises(IllegalResult, match=message):
        verify_analysis(layer.graph, analysis)


def test_random_numbers_are_drawn_by_their_place_or_refused():
    """A chunk, and the backward, must be able to draw the same numbers again."""
    write = Written()
    x = write.given("x", torch.randn(LENGTH, 8))
    noise = write("noise", aten.randn.default, [8])
    write.graph.output((write("y", aten.mul.Tensor, x, noise),))
    with pytest.raises(CannotStream, match="random numbers"):
        analyze(write.graph, LENGTH, {x: (Mark(0),)})
    noise.target, noise.args = aten.zeros.default, ([8],)
    analysis = analyze(write.graph, LENGTH, {x: (Mark(0),)})
    noise.target = aten.randn.default
    with pytest.raises(IllegalResult, match="not by their place"):
        verify_analysis(write.graph, analysis)


def test_a_reshape_keeps_its_rows():
    write = Written()
    x = write.given("x", torch.randn(LENGTH, 8))
    y = write("y", aten.view.default, x, [LENGTH, 2, 4])
    write.graph.output((y,))
    analysis = analyze(write.graph, LENGTH, {x: (Mark(0),)})
    verify_analysis(write.graph, analysis)
    moved = replace(analysis, facts={**analysis.facts, x: Tokens(Mark(0), lo=1, hi=1)})
    with pytest.raises(IllegalResult, match="y has other rows than x"):
        verify_analysis(write.graph, moved)
    shifted = {**analysis.edges, y: (Edge(x, Role.HALO, Reach(1, 1)),)}
    verify_analysis(write.graph, replace(moved, edges=shifted))


def test_rows_keep_their_order():
    write = Written()
    x, other = (write.given(name, torch.randn(4 * LENGTH)) for name in ("x", "other"))
    y = write("y", aten.view.default, x, [4, LENGTH])
    z = write("z", aten.mul.Tensor, x, other)
    write.graph.output((y, z))
    marks = (Mark(0, outer=4),)
    analysis = analyze(write.graph, LENGTH, {x: marks, other: marks})
    verify_analysis(write.graph, analysis)
    turned = Tokens(Mark(0, inner=4))
    with pytest.raises(IllegalResult, match="y has rows in another order than x"):
        verify_analysis(write.graph, replace(analysis, facts={**analysis.facts, x: turned}))
    with pytest.raises(IllegalResult, match="z meets rows in different orders"):
        verify_analysis(write.graph, replace(analysis, facts={**analysis.facts, other: turned}))


def test_rows_in_two_orders_do_not_meet():
    write = Written()
    x = write.given("x", torch.randn(LENGTH, 4, 8))
    rows = write("rows", aten.view.default, x, [4 * LENGTH, 8])
    turned = write("turned", aten.permute.default, x, [1, 0, 2])
    turned = write("flat", aten.reshape.default, turned, [4 * LENGTH, 8])
    write.graph.output((write("met", aten.add.Tensor, rows, turned),))
    with pytest.raises(CannotStream, match="two different orders"):
        analyze(write.graph, LENGTH, {x: (Mark(0),)})


# Programs

ILLEGAL_PROGRAMS: dict[str, Callable[[Layer], Program]] = {
    "turned before it exists": lambda layer: replace(layer.program, full_length=((), (), ())),
    "dw is never computed": lambda layer: layer.with_sweep(1, sums=()),
    "keys before it exists": lambda layer: layer.with_sweep(0, writes=()),
    "dk before it is final": lambda layer: layer.with_sweep(1, final_keysums=()),
    "final in descending sweeps alone": lambda layer: layer.with_sweep(1, direction=Direction.ASCENDING),
    "a sweep writes what it lacks": lambda layer: layer.with_sweep(
        0, nodes=layer.program.sweeps[0].nodes[:-1]
    ),
    "appends what it does not write": lambda layer: layer.with_sweep(1, appended=(layer.nodes["keys"],)),
    "x before it exists": lambda layer: layer.with_sweep(  # its memory was taken over
        0, in_place=((layer.nodes["keys"], layer.nodes["x"]),)
    ),
    "grads is kept, and is no value": lambda layer: replace(layer.program, kept=(layer.nodes["grads"],)),
    "both is kept, and is no value": lambda layer: layer.with_sweep(0, writes=(layer.nodes["both"],)),
    "no sweep saves the states": lambda layer: layer.with_sweep(1, restored_states=(layer.nodes["keys"],)),
}


@pytest.mark.parametrize("message", ILLEGAL_PROGRAMS)
def test_an_illegal_program(layer, message):
    with pytest.raises(IllegalResult, match=message):
        verify_program(ILLEGAL_PROGRAMS[message](layer), layer.analysis)


def forward() -> tuple[Layer, Program]:
    layer = Layer()
    return layer, partition(layer.graph, layer.analysis, (layer.nodes["y"],))


def symbolic(*sizes: int) -> GraphModule:
    """The graph of a function of a tensor of these sizes, which are symbols."""
    return make_fx(lambda x: (x / x.shape[0]).sum(), tracing_mode="symbolic")(torch.ones(sizes))


def test_the_inputs_of_a_program_tell_its_sizes(layer):
    size = next(iter(symbolic(6).graph.nodes)).meta["val"].shape[0]
    with pytest.raises(IllegalResult, match="no input of a program tells the sizes"):
        verify_program(layer.program, replace(layer.analysis, length=size))


def test_keys_of_the_same_sweep_are_appended():
    layer, program = forward()
    verify_program(program, layer.analysis)
    spoilt = replace(program, sweeps=(replace(program.sweeps[0], appended=()),))
    with pytest.raises(IllegalResult, match="reads keys beyond its chunk"):
        verify_program(spoilt, layer.analysis)


def test_a_sum_is_read_after_its_sweep():
    layer, program = forward()
    spoilt = replace(program, sweeps=(replace(program.sweeps[0], sums=(layer.nodes["mixed"],)),))
    with pytest.raises(IllegalResult, match="unfinished sum mixed"):
        verify_program(spoilt, layer.analysis)


def test_a_scan_has_a_state():
    layer, program = forward()
    mixed = layer.nodes["mixed"]
    analysis = layer.with_edges("mixed", Edge(layer.analysis.edges[mixed][0].operand, Role.CARRY, HERE))
    with pytest.raises(IllegalResult, match="scan without a state"):
        verify_program(program, analysis)


# Plans


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda found: replace(found, chunks=found.chunks[:1]), "1 chunk lengths"),
        (lambda found: replace(found, chunks=(2, 0)), "chunks of"),
        (lambda found: replace(found, kernels={}), "has no kernel"),
    ],
)
def test_an_illegal_plan(layer, spoil: Callable[[Plan], Plan], message: str):
    with pytest.raises(IllegalResult, match=message):
        verify_plan(spoil(layer.plan), layer.program)


def test_chunks_that_part_blocks(layer):
    node = layer.program.sweeps[0].nodes[0]
    blocks = layer.with_fact(node.name, Tokens(Mark(1, block=CHUNK + 1)))
    with pytest.raises(IllegalResult, match="part blocks"):
        verify_chunks(layer.plan, layer.program, blocks)


def test_sweeps_that_share_states_cut_alike(layer):
    first, second = layer.program.sweeps
    keys = (layer.nodes["keys"],)
    shared = (replace(first, saved_states=keys), replace(second, restored_states=keys))
    with pytest.raises(IllegalResult, match="saved and restored"):
        verify_plan(replace(layer.plan, chunks=(2, 3)), replace(layer.program, sweeps=shared))


# Chunk bodies


def added(body: Body, target, *args) -> Body:
    """The body with one more call before its output."""
    graph = body.graph.graph
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        graph.call_function(target, args)
    return body


def placeholder(body: Body, name: str):
    return next(n for n in body.graph.graph.nodes if n.op == "placeholder" and n.target == name)


def a_value(body: Body):
    return next(n for n in body.graph.graph.nodes if n.op == "call_function")


def returning(body: Body) -> Body:
    body.graph.graph.output_node().args = ((a_value(body),),)
    return body


def with_constant(body: Body) -> Body:
    graph = body.graph.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.get_attr("weight")
    return body


def full_length_buffer(body: Body) -> Body:
    with body.graph.graph.inserting_before(next(iter(reversed(body.graph.graph.nodes)))):
        twice = body.graph.graph.call_function(operator.mul, (placeholder(body, "length"), 2))
    return added(body, aten.empty.memory_format, [twice, 8])


def with_unbound_size(body: Body) -> Body:
    """With an input that is twice a size, and none that is this size."""
    graph, size = body.graph.graph, next(iter(symbolic(6).graph.nodes)).meta["val"].shape[0]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        graph.placeholder("twice")
    twice = Binding(BindingRole.SCALAR, None, "twice", size=2 * size)
    return replace(body, bindings=(*body.bindings, twice))


ILLEGAL_BODIES: dict[str, Callable[[Layer], Body]] = {
    "inputs for": lambda layer: replace(layer.bodies[-1], bindings=layer.bodies[-1].bindings[1:]),
    "has a constant": lambda layer: with_constant(layer.bodies[-1]),
    "no input of compiled code binds the sizes": lambda layer: with_unbound_size(layer.bodies[-1]),
    "returns something": lambda layer: returning(layer.bodies[-1]),
    "comes in at full length": lambda layer: layer.with_binding(BindingRole.KEYS, role=BindingRole.WHOLE),
    "as long as all tokens": lambda layer: full_length_buffer(layer.bodies[-1]),
    "which is its own": lambda layer: added(layer.bodies[-1], aten.zero_.default, a_value(layer.bodies[-1])),
    "which is only read": lambda layer: layer.with_binding(BindingRole.TOTAL, role=BindingRole.WHOLE),
    "is never written": lambda layer: layer.with_binding(
        BindingRole.KEYS, role=BindingRole.WRITE, mark=Mark(2)
    ),
}


@pytest.mark.parametrize("message", ILLEGAL_BODIES)
def test_an_illegal_chunk_body(layer, message):
    with pytest.raises(IllegalResult, match=message):
        verify_body(ILLEGAL_BODIES[message](layer), layer.program.sweeps[-1], layer.analysis)


def test_the_inputs_of_compiled_graphs_bind_all_sizes():
    """A tensor of ``2 s`` rows tells ``s``, but no code generator asks it."""
    graph = symbolic(6, 3).graph
    verify_bound(graph)
    given = next(iter(graph.nodes))
    with given.meta["val"].fake_mode:
        given.meta["val"] = torch.cat((given.meta["val"], given.meta["val"]))
    with pytest.raises(IllegalResult, match="no input of compiled code binds the sizes"):
        verify_bound(graph)


def test_a_misspelt_contraction_fails_on_its_line():
    with pytest.raises(ValueError, match="summ"):
        Signature((), (), contracts="summ")

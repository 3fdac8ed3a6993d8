"""Chunk bodies against the whole: every op that has a rule, streamed alone along every dimension it has."""

import operator
from dataclasses import replace

import pytest
import torch
from graphs import Written, causal_layer, eagerly
from samples import UNFILLED, cases, sample_of
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from streambp_compile import internals
from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import CannotStream, Mark, tensor_operands
from streambp_compile.passes.kernels.attention import Target
from streambp_compile.passes.lower import lower
from streambp_compile.passes.lower.reading import Inputs
from streambp_compile.passes.partition import partition
from streambp_compile.passes.planning.choices import Choices
from streambp_compile.passes.planning.plan import kernel_for, plan
from streambp_compile.pipeline import Machine, stream
from streambp_compile.regions.joint_regions import Ends, JointInputs

aten = torch.ops.aten


def behind_a_product(sample):
    """The sample's graph with every wide float operand computed (times one), so that none is simply given."""
    graph, node = sample.graph, sample.node
    for operand in dict.fromkeys(tensor_operands(node)):
        value = operand.meta["val"]
        if value.is_floating_point():
            with graph.inserting_before(node):
                made = graph.call_function(aten.mul.Tensor, (operand, 1.0))
            made.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(
                value
            )
            node.replace_input_with(operand, made)
    return graph


def outputs(graph, node):
    value = node.meta["val"]
    if not isinstance(value, tuple):
        return (node,), (value,)
    found = []
    for k, part in enumerate(value):
        found.append(graph.call_function(operator.getitem, (node, k)))
        found[-1].meta["val"] = part
    return tuple(found), value


@pytest.mark.parametrize("computed", (False, True), ids=("given", "computed"))
@pytest.mark.parametrize("name,number", cases())
def test_an_op_streams_exactly_or_is_refused(name, number, computed):
    sample = sample_of(name, number, 0)
    if sample.target in (
        *UNFILLED,
        aten.squeeze.default,
    ):  # run node by node it would squeeze a chunk of one row: see test_spellings
        return
    for operand, value in enumerate(sample.operands):
        for dim in range(value.dim()):
            if value.shape[dim] > 1:
                for chunk in (1, 2, 64):
                    check(name, number, computed, operand, dim, chunk)


def check(name, number, computed, operand, dim, chunk):
    sample = sample_of(name, number, 0)
    graph = behind_a_product(sample) if computed else sample.graph
    nodes, wanted = outputs(graph, sample.node)
    graph.output(nodes)
    length = sample.operands[operand].shape[dim]
    try:
        region = stream(
            GraphModule({}, graph),
            Ends(len(nodes)),
            JointInputs(length, {operand: (Mark(dim),)}),
            Choices(chunk),
            Machine(eagerly),
        )
    except CannotStream:
        return
    got = region.forward.runner(dict(zip(region.placeholders, sample.operands)))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(
            a,
            b,
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m: f"operand {operand} along {dim}, chunks of {chunk}: {m}",
        )


def test_a_body_names_its_kernel_and_says_why():
    """The choice is made for the target that is given, which need not be there; a CPU's operands are a CPU's
    whatever the target."""
    write, marks, y, grads = causal_layer()
    analysis = analyze(write.graph, 5, marks, ())
    program = partition(write.graph, analysis, (y,))
    bodies = lower(program, analysis, plan(program, analysis))
    (call,) = [
        n for b in bodies for n in b.graph.graph.nodes if n.target is torch.ops.streambp.attention.default
    ]
    assert call.kwargs == {"kernel": "flash_cpu"} and [
        kernel.name for b in bodies for kernel in b.kernels
    ] == ["flash_cpu"]
    query = next(n for n in write.graph.nodes if n.name == "query")
    attention = next(n for n in query.users if n.target is torch.ops.streambp.attention.default)
    with internals.FakeTensorMode():
        query.meta["val"] = torch.empty(2, 1, 5, 8, dtype=torch.bfloat16, device="cuda")
    assert kernel_for(attention, Target("cuda", (9, 0))).kernel.name == "cudnn"
    assert kernel_for(attention, Target("cpu")).kernel.name == "composed"


def test_results_that_exchange_memory_are_copied_first():
    """Each result is the rows of a gradient, which the other one is stored over."""
    write = Written()
    x, y = write.given("x", torch.randn(2, 5, 8)), write.given("y", torch.randn(2, 5, 8))
    zeros = write("zeros", aten.full.default, [2, 5, 8], 0.0)
    first, second = (
        write(f"rows_of_{given}", aten.slice_scatter.default, zeros, given, 1, 0, 5) for given in (y, x)
    )
    write.graph.output((first, second))
    analysis = analyze(write.graph, 5, {x: (Mark(1),), y: (Mark(1),)}, ())
    found = partition(write.graph, analysis, (first, second), movable=(x, y))
    (sweep,) = found.sweeps
    assert {source for _, source in sweep.in_place} == {x, y}
    exchanged = replace(found, sweeps=(replace(sweep, in_place=((first, x), (second, y))),))
    (body,) = lower(exchanged, analysis, plan(exchanged, analysis))
    memory = {n: n.meta["val"].clone() for n in (x, y)}
    counts = {"rows": 5, "length": 5, "offset": 0}
    body.graph(*(counts[b.name] if b.source is None else memory[b.source] for b in body.bindings))
    assert torch.equal(memory[x], y.meta["val"]) and torch.equal(memory[y], x.meta["val"])


def test_attention_that_runs_whole_gets_a_kernel_too():
    write = Written()
    x, row = write.given("x", torch.randn(2, 5, 8)), write.given("rows", torch.randn(2, 1, 3, 8))
    both = write("both", torch.ops.streambp.attention.default, row, row, row, None, False, 1.0, 0)
    shared = write("sum", aten.sum.default, write("out", operator.getitem, both, 0))
    y = write("y", aten.mul.Tensor, x, shared)
    write.graph.output((y,))
    analysis = analyze(write.graph, 5, {x: (Mark(1),)}, ())
    assert plan(partition(write.graph, analysis, (y,)), analysis).kernels[both].name == "flash_cpu"


def test_a_size_in_which_all_symbols_cancel_is_a_constant():
    """As an input it would be a number that tracing makes a symbol of, which no size of an input tells."""
    with internals.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        env = mode.shape_env
        symbol = env.create_symbol(12, ConstantSource("length"), dynamic_dim=DimDynamic.DYNAMIC)
        length = env.create_symintnode(symbol, hint=12, source=ConstantSource("length"))
    cancelled = (2 * length) // length
    assert isinstance(cancelled, torch.SymInt) and Inputs().symbol(cancelled) == 2

"""Every facet of every row against what its op does, and no knowledge of ops outside the rows' folder."""

import ast
import functools
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from graphs import traced
from samples import SAMPLES, UNFILLED, Sample, listed, sample_of
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from streambp_compile.passes.ir import arguments
from streambp_compile.passes.rules import (
    TABLE,
    Rule,
    cost_of,
    filling_of,
    for_any_layout,
    indices_of,
    is_random,
    linear_of,
    merge_of,
    overload,
    scan_of,
    windows_of,
)
from streambp_compile.passes.rules.facets import CostClass, Form

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
EXACT = dict(rtol=1e-10, atol=1e-10)


def rows_with(facet: str) -> list[str]:
    """The names of the rows that have a facet, by their samples."""
    absent = getattr(Rule(lambda node: None), facet)
    return [name for name in SAMPLES if getattr(TABLE[overload(name)], facet) != absent]


def sampled(facet: str) -> list:
    return [
        pytest.param(name, number, id=f"{name}-{number}")
        for name in rows_with(facet)
        for number in range(len(SAMPLES[name]))
    ]


def given(sample: Sample) -> dict:
    """The arguments of a sample by name, as values."""
    values = dict(zip([n for n in sample.graph.nodes if n.op == "placeholder"], sample.operands))
    return tree_map(lambda a: values.get(a, a) if isinstance(a, Node) else a, arguments(sample.node))


def called(sample: Sample, values: dict) -> list:
    """The op with other arguments, given by name."""
    schema = sample.target._schema.arguments
    args = [values[a.name] for a in schema if not a.kwarg_only]
    return listed(sample.target(*args, **{a.name: values[a.name] for a in schema if a.kwarg_only}))


# Linearity


def varied(values: dict, names: tuple, change) -> dict:
    """The arguments with those named changed, tensor by tensor; numbers beside them are zero."""

    def changed(leaf):
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        return 0 if isinstance(leaf, (int, float)) else leaf

    return {k: tree_map(changed, v) if k in names else v for k, v in values.items()}


def is_float(value) -> bool:
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return all(v.is_floating_point() or v.is_complex() for v in leaves if isinstance(v, torch.Tensor))


def assert_linear(sample: Sample, names: tuple) -> None:
    """Doubled and added operands give doubled and added results."""
    values = given(sample)
    seed = random.randint(0, 1 << 30)

    def drawn(leaf):
        return torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.manual_seed(seed + leaf.numel()))

    one = called(sample, varied(values, names, lambda v: v))
    two = called(sample, varied(values, names, drawn))
    both = called(sample, varied(values, names, lambda v: 2 * v - 3 * drawn(v)))
    for a, b, c in zip(one, two, both):
        torch.testing.assert_close(c.to(a.dtype), 2 * a - 3 * b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name,number", sampled("linear"))
def test_linear_rows_are(name, number):
    sample = sample_of(name, number, 0)
    terms = linear_of(sample.node)
    if terms is None or not all(is_float(given(sample)[n]) for n in terms.names):
        return
    for names in itertools.product(*terms.terms):
        assert_linear(sample, names)


NOT_DECLARED = {"aten::cumprod", "aten::scatter_reduce.two"}  # linear for some of their arguments


@pytest.mark.parametrize("name", [n for n in SAMPLES if SAMPLES[n] and n not in rows_with("linear")])
def test_no_linear_row_is_missed(name):
    """An op that is linear in its first operand, whatever the others are, says so."""
    sample = sample_of(name, 0, 0)
    first = next(iter(given(sample)), None)
    if (
        first is None
        or not isinstance(given(sample)[first], torch.Tensor)
        or filling_of(sample.node) is not None
    ):
        return
    if sample.target in UNFILLED or not is_float(given(sample)[first]) or name in NOT_DECLARED:
        return
    with pytest.raises((AssertionError, RuntimeError)):
        assert_linear(sample, (first,))


# Costs


# What the cost model counts as a kernel although Inductor can fuse it: looked-up and joined values are
# mostly read more than once, and then written. The chunk lengths are calibrated with that.
HELD = {"aten::embedding", "aten::cat"}
REPRESENTATIVES = (
    "aten::add.Tensor",
    "aten::where.self",
    "aten::sum.dim_IntList",
    "aten::_softmax",
    "aten::gather",
    "aten::view",
    "aten::permute",
    "aten::slice.Tensor",
    "aten::mm",
    "aten::addmm",
    "aten::cumsum",
    "aten::sort",
    "aten::topk",
    "aten::embedding",
    "aten::cat",
)


def generated(name: str) -> str:
    """The code of Inductor's wrapper for an op between two pointwise ops; no kernel of it is compiled."""
    sample = sample_of(name, 0, 0)

    def between(*operands):
        before = [o.sin() if o.is_floating_point() else o for o in operands]
        return [o.cos() if o.is_floating_point() else o for o in sample.run(before)]

    mode = FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(o) for o in sample.operands]
    module = make_fx(between, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *sample.operands
    )
    graph = GraphLowering(module, example_inputs=fakes, shape_env=mode.shape_env)
    with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        graph.run(*fakes)
        text = graph.codegen()[0].value
    return text[text.index("def call(") :]


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_what_costs_a_kernel_is_one(name):
    """Fused ops and views leave one kernel; the others are calls of their own, or cut the kernel in two."""
    text = generated(name)
    calls = len(re.findall(r"\bcpp_fused\w*\(|extern_kernels\.|torch\.ops\.", text))
    cost = cost_of(sample_of(name, 0, 0).node)
    fused = cost in (CostClass.FUSED, CostClass.VIEW) or name in HELD
    assert (calls == 1) == fused, f"{cost}: {calls} kernels and calls"


# Scans


@pytest.mark.parametrize("name,number", sampled("scan"))
def test_scans_go_on_from_their_state(name, number):
    """A chunk that is joined to the state of the rows before it is a piece of the whole; no rows change
    nothing."""
    sample = sample_of(name, number, 0)
    scan = scan_of(sample.node)
    if scan.state is not None:  # test_token_loops.py
        return
    (operand,), (whole,) = sample.operands, sample.outputs
    ((dim, reach),) = sample.signature.reach.items()
    dim, size = dim % operand.dim(), operand.shape[dim]
    parts = [(0, 2), (2, size - 2)] if reach.looks_back() else [(2, size - 2), (0, 2)]
    shape = [scan.rows if d == dim else n for d, n in enumerate(operand.shape)]
    state = torch.full(shape, scan.identity, dtype=operand.dtype)
    back = reach.looks_back()
    for start, length in parts:
        given = operand.narrow(dim, start, length)
        if scan.window:
            read = torch.cat((state, given) if back else (given, state), dim)
            rows = sample.run([read])[0].narrow(dim, scan.window if back else 0, length)
            state = read.narrow(dim, length if back else 0, scan.window)
        else:
            rows = scan.join(sample.run([given])[0], state)
            state = rows.narrow(dim, length - 1 if back else 0, 1)
        torch.testing.assert_close(rows, whole.narrow(dim, start, length), **EXACT)


# Places, random numbers, fillings, windows, layouts


@pytest.mark.parametrize("name", [n for n in SAMPLES if SAMPLES[n]])
def test_outputs_of_places_are_declared(name):
    """Whole numbers that come out of numbers are places, unless they were asked for."""
    sample = sample_of(name, 0, 0)
    found = TABLE[sample.target]
    if found.form is Form.COUNT or not sample.operands or not all(map(is_float, sample.operands)):
        return
    whole = [k for k, out in enumerate(sample.outputs) if out.dtype is torch.int64]
    assert [k % len(sample.outputs) for k in found.positions] == whole
    for k in whole:
        rows = max(sample.operands[0].shape)
        assert ((0 <= sample.outputs[k]) & (sample.outputs[k] < rows)).all()


@pytest.mark.parametrize("name,number", sampled("merge"))
def test_results_of_parts_merge(name, number):
    """The results of two parts of what is reduced, and of no rows, merge to the result of all."""
    sample = sample_of(name, number, 0)
    merge, operand = merge_of(sample.node), sample.operands[0]
    (labels,), outputs = sample.signature.operands, sample.signature.outputs
    lost = [d for d, label in enumerate(labels) if all(label not in out for out in outputs)]
    for dim in lost:
        parts = [sample.run([part])[0] for part in operand.tensor_split(2, dim) if part.numel()]
        nothing = torch.full_like(parts[0], merge.identity_of(parts[0].dtype))
        merged = functools.reduce(merge.join, parts, nothing)
        torch.testing.assert_close(merged, sample.outputs[0], **EXACT)


@pytest.mark.parametrize("name", [n for n in SAMPLES if SAMPLES[n]])
def test_random_ops_are_declared(name):
    sample = sample_of(name, 0, 0)
    if sample.target in UNFILLED:
        return
    again = sample.run(sample.operands)
    same = all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(sample.outputs, again))
    assert same != is_random(sample.node)


@pytest.mark.parametrize("name", rows_with("filling"))
def test_fillings_fill(name):
    sample = sample_of(name, 0, 0)
    (out,) = sample.outputs
    assert torch.equal(out, torch.full_like(out, filling_of(sample.node)))


@pytest.mark.parametrize("name,number", sampled("writes"))
def test_what_is_written_into_is_kept_elsewhere(name, number):
    """An entry of the argument written into moves no entry of the result but its own."""
    sample, at = sample_of(name, number, 0), TABLE[overload(name)].writes
    base = sample.operands[at]
    assert sample.outputs[0].shape == base.shape
    for place in range(min(base.numel(), 12)):
        operands = list(sample.operands)
        operands[at] = base.clone(memory_format=torch.contiguous_format)
        operands[at].view(-1)[place] += 1
        moved = (sample.run(operands)[0] != sample.outputs[0]).reshape(-1)
        assert not moved[[k for k in range(base.numel()) if k != place]].any()


WINDOWS = {
    "pad": lambda x: aten.constant_pad_nd(x, [0, 0, 2, -2]),
    "pad one side": lambda x: aten.constant_pad_nd(x, [0, 0, 3, 0]),
    "slice": lambda x: aten.slice(x, 1, 1, 4),
    "slice from the end": lambda x: aten.slice(x, 1, -3),
    "put": lambda x: aten.slice_scatter(torch.zeros(2, 9, 3, dtype=x.dtype), x, 1, 2, 7),
    "join": lambda x: aten.cat([torch.zeros(2, 2, 3, dtype=x.dtype), x], 1),
}


@pytest.mark.parametrize("function", WINDOWS.values(), ids=WINDOWS)
def test_windows_are_moved_rows(function):
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    graph = traced(lambda x: (function(x),), x).graph
    node = next(n for n in reversed(graph.nodes) if n.op == "output").args[0][0]
    ((dim, window),) = windows_of(node)
    assert window.source.op == "placeholder"
    out = function(x)
    expected = torch.zeros_like(out)
    for row in range(window.low, window.high):
        expected.select(dim, row).copy_(x.select(dim, row - window.by))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", rows_with("nonnegative"))
def test_nothing_of_a_nonnegative_op_is_negative(name):
    assert all((output >= 0).all() for output in sample_of(name, 0, 0).outputs)


@pytest.mark.parametrize("name,number", sampled("indices"))
def test_limits_of_indices_are_what_an_op_allows(name, number):
    """At both limits it runs; beyond the greater it raises, or adds nothing to zeros."""
    sample = sample_of(name, number, 0)
    places = [n for n in sample.graph.nodes if n.op == "placeholder"]

    def result(node: Node, index: int) -> torch.Tensor:
        values = dict(zip(places, sample.operands))
        values[node] = torch.full_like(values[node], index)
        args = tree_map(lambda a: values.get(a, a) if isinstance(a, Node) else a, sample.node.args)
        return sample.target(*args, **sample.node.kwargs)

    for node, (least, greatest) in indices_of(sample.node).items():
        result(node, least)
        result(node, greatest)
        if name == "aten::embedding_dense_backward":
            assert not result(node, greatest + 1).any()
        else:
            with pytest.raises((IndexError, RuntimeError)):
                result(node, greatest + 1)


@pytest.mark.parametrize("name", rows_with("any_layout"))
def test_an_op_for_any_layout_gives_the_same(name):
    op, twin = overload(name), for_any_layout(overload(name))
    x = torch.randn(4, 6)
    assert torch.equal(op(x, [2, 12]), twin(x, [2, 12]))
    assert torch.equal(op(x.t().contiguous(), [3, 8]), twin(x.t(), [3, 8]))


# Knowledge of ops stands in the rows


HOMES = ("passes/rules/", "passes/kernels/")
SPELLED = ("aten.", "prims.", "streambp.", "torch.ops.", "torch.nn.functional.", "F.", "torch.Tensor.")
FUNCTIONS = {*dir(torch.ops.aten), *dir(torch), *dir(torch.nn.functional)} | {
    name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name, None))
}
ALLOWED = {  # at most ten
    "flash_attn.METHODS": "what flash_attn's own Python asks of a tensor before its kernel is called",
    "aten_graphs.LIFTS": "how torch's tracer writes a constant down",
    "memory_simulation.NUMBERS": "ops that the simulated device answers itself",
    "memory_simulation.WIDENING": "fake kernels of overloads for which torch has none",
    "outputs.DESCRIPTIONS": "attributes of a lazy output that its shape alone answers",
    "outputs.AS_FUNCTIONS": "how Python reads a tensor's attributes, as the functions that they are",
}


def names_an_op(node: ast.expr) -> bool:
    if isinstance(node, ast.Starred):
        return names_an_op(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.split("::")[-1].split(".")[0] in FUNCTIONS
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith(SPELLED)


def entries(value: ast.expr) -> list[ast.expr]:
    """What a collection is written down with, however it is wrapped."""
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    if isinstance(value, ast.Dict):
        return [key for key in value.keys if key is not None]
    return value.elts if isinstance(value, (ast.Tuple, ast.List, ast.Set)) else []


def tables(source: str) -> list[str]:
    """Names of a module's collections of ops or of torch functions: more than half of their entries are."""
    found = []
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            listed_ops = [names_an_op(e) for e in entries(statement.value)]
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and 2 * sum(listed_ops) > len(listed_ops) > 1:
                found.append(target.id)
    return found


def test_the_search_for_tables_finds_them():
    source = "A = {aten.mm.default: 1, aten.bmm.default: 2}; B = frozenset(('cumsum', 'add')); C = ('rows',)"
    assert tables(source) == ["A", "B"]


def test_knowledge_of_ops_stands_in_the_rows():
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "streambp_compile").rglob("*.py")]
    places = {p.resolve().relative_to(ROOT).as_posix(): p for p in files}
    found = {
        f"{path.stem}.{name}"
        for place, path in places.items()
        if not place.startswith(HOMES)
        for name in tables(path.read_text())
    }
    assert found == ALLOWED.keys() and len(ALLOWED) <= 10

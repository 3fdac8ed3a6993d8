"""What passes through the door to torch: artifacts in the structured trace, and regions that are kept
whole."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from graphs import joint_of, traced
from models import Plain, gradients, ids_of, worst_error
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from streambp_compile import NotStreamed, Report, StreamHint, explain, internals
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.passes.ir import Analysis, Binding, BindingRole, Body, Mark
from streambp_compile.passes.verify import verify_bound

NAMES = ("split", "joint", "normalized", "facts", "forward", "forward_body_0")


@pytest.mark.quick
def test_every_graph_of_every_region_goes_to_the_structured_trace(monkeypatch, interpreted):
    artifacts = {}
    monkeypatch.setattr(
        internals.structured_trace,
        "trace_structured",
        lambda _kind, metadata_fn, payload_fn, **_: artifacts.update({metadata_fn()["name"]: payload_fn}),
    )
    model, ids = Plain(layers=3), ids_of(1, 64)
    report = explain(lambda ids: model(ids, ids), ids)
    for i, region in enumerate(report.regions):
        assert {f"streambp_region_{i}_{name}" for name in NAMES} <= artifacts.keys()
        assert (f"streambp_region_{i}_backward_body_0" in artifacts) == bool(
            region.backward and region.backward.bodies
        )
    assert "streambp.attention" in artifacts["streambp_region_1_forward_body_0"]()
    assert "tangents_1" in artifacts["streambp_region_1_joint"]()
    assert "b [t] d" in artifacts["streambp_region_1_facts"]()
    assert artifacts["streambp_region_1_backward"]().startswith(("full length:", "ascending", "descending"))
    assert "3 distinct" in artifacts["streambp_report"]()


def test_nothing_is_written_down_unless_a_trace_is_on(monkeypatch, interpreted):
    monkeypatch.setattr(
        internals.structured_trace, "trace_structured", lambda _kind, metadata_fn, payload_fn, **_: None
    )
    monkeypatch.setattr(Analysis, "table", None)
    monkeypatch.setattr(Report, "__str__", None)
    model, ids = Plain(layers=1), ids_of(1, 64)
    explain(lambda ids: model(ids, ids), ids)


@pytest.mark.slow
def test_a_trace_folder_receives_them(tmp_path):
    script = """
import torch, models
from benchmarks import zoo
zoo.interpret_bodies()
torch.compile(models.Plain(layers=1), backend="streambp")(*2 * [models.ids_of(1, 64)])
"""
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=os.path.dirname(__file__),
        check=True,
    )
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"name": "streambp_report"' in written and '"name": "streambp_region_0_joint"' in written


def test_a_whole_region_with_attention_keeps_its_inputs_alone():
    """Its kernels are tagged as random, but without dropout they draw nothing, and what they made need not be
    kept."""

    def attend(x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 2, heads, heads, is_causal=True).exp()

    joint, outputs, tangents = joint_of(attend, torch.randn(1, 6, 8, requires_grad=True))
    values = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    forward, _ = internals.keep_inputs_partition(
        joint, (values[:-tangents], values[-tangents:]), num_fwd_outputs=outputs
    )
    returned = next(n for n in forward.graph.nodes if n.op == "output").args[0]
    assert [n.op for n in returned[outputs:]] == ["placeholder"]


@pytest.mark.parametrize("once", [False, True])
def test_the_backward_of_a_whole_region_gets_the_sizes_that_its_tensors_do_not_have(once):
    """It keeps padded rows alone, of whose sizes none is the number of tokens."""
    with enable_python_dispatcher(), internals.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        env, source = mode.shape_env, ConstantSource("length")
        symbol = env.create_symbol(12, source, dynamic_dim=DimDynamic.DYNAMIC)
        x = torch.empty(2, env.create_symintnode(symbol, hint=12, source=source), 4)
        rows = F.pad(x, (0, 0, 0, -x.shape[1] % 8)).requires_grad_()

    def cut(joint, inputs, **kwargs):
        forward, backward = internals.keep_inputs_partition(joint, inputs, once=once, **kwargs)
        verify_bound(forward.graph)
        verify_bound(backward.graph)
        return forward, backward

    compiler = dict.fromkeys(("fw_compiler", "bw_compiler"), lambda module, inputs: module)
    module = torch.fx.symbolic_trace(lambda x, rows: (x.new_zeros(()) + (rows * rows.cos()).sin(),))
    with internals.tracing_of(mode):
        internals.aot_autograd(**compiler, partition_fn=cut)(module, [x, rows])


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces an inverse without its check")
def test_an_op_with_effects_keeps_its_region_whole_and_exact(interpreted):
    model, ids = Plain(layers=1).double(), ids_of(1, 64)

    def loss(ids):  # an inverse checks for errors, which is an effect
        x = model.layers[0](model.embed(ids))
        return model.loss(
            x + torch.linalg.inv(x.transpose(1, 2) @ x + torch.eye(64, dtype=x.dtype)).sum(), ids
        )

    with pytest.warns(NotStreamed, match="_linalg_check_errors.* has a side effect"):
        found = gradients(model, lambda: torch.compile(loss, backend="streambp")(ids))
    assert worst_error(found, gradients(model, lambda: loss(ids))) < 1e-8


@pytest.mark.quick
def test_numbers_that_a_scatter_puts_keep_their_digits():
    """Labels that are smoothed by hand, for which Inductor writes a choice between numbers of the default
    dtype."""

    def smoothed(ids):
        return torch.full((*ids.shape, 11), 0.01, dtype=torch.float64).scatter(-1, ids[..., None], 0.9)

    ids = torch.randint(11, (2, 9))
    graph = traced(smoothed, ids)
    internals.inductor.rewrite(graph)
    assert torch.ops.aten.scatter.value not in {n.target for n in graph.graph.nodes}
    assert torch.equal(graph(ids), smoothed(ids))


def doubling_body(width: int) -> Body:
    """``y = x * 2`` by rows of ``width`` numbers."""
    graph = Graph()
    fake = torch.empty(64, width, device="meta")
    source, made = Graph().placeholder("x"), Graph().placeholder("y")
    source.meta["val"] = made.meta["val"] = fake
    bindings = (
        Binding(BindingRole.SCALAR, None, "rows"),
        Binding(BindingRole.SCALAR, None, "length"),
        Binding(BindingRole.ROWS, source, "x_rows", Mark(0)),
        Binding(BindingRole.WRITE, made, "y_write", Mark(0)),
    )
    _, _, x, y = (graph.placeholder(b.name) for b in bindings)
    graph.call_function(
        torch.ops.aten.copy_.default, (y, graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
    )
    graph.output(())
    return Body(GraphModule({}, graph), bindings)


@pytest.mark.quick
def test_a_body_is_compiled_again_where_its_indices_would_overflow(monkeypatch):
    """As Inductor does for a GPU: 32-bit indices if the hints fit, and a guard that its caller has to
    evaluate."""
    compiled, ran = [], []

    def with_short_indices(module, inputs):
        short = bool(inputs[2].numel() <= 2**31 - 1)
        compiled.append(short)
        return lambda args: ran.append((args[0], short))

    monkeypatch.setattr(internals.inductor, "compile_fx_inner", with_short_indices)
    monkeypatch.setattr(internals.chunk_bodies, "COMPILED", {})
    run = internals.compile_body(doubling_body(4096), 256)
    other = internals.compile_body(doubling_body(4096), 128)
    for rows in (1, 256, 2**19 - 1, 2**19, 3 * 2**19, 1):
        full = torch.empty(rows, 4096, device="meta")
        run([rows, rows, full, full])
    other([2**20, 2**20, *2 * [torch.empty(2**20, 4096, device="meta")]])
    assert compiled == [True, False]
    assert ran == [
        (1, True),
        (256, True),
        (2**19 - 1, True),
        (2**19, False),
        (3 * 2**19, False),
        (1, True),
        (2**20, False),
    ]


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_transposed_rows_are_added_where_they_belong(several_threads):
    """With Inductor's own kernel, the heap is overwritten."""

    def added(x):
        places = torch.arange(2)[:, None], torch.arange(40)
        return (torch.zeros(2, 40, 16).index_put(places, x.transpose(1, 2) * 2, accumulate=True),)

    x = torch.randn(2, 16, 40)
    torch.testing.assert_close(
        internals.compile_function(added, [FakeTensorMode().from_tensor(x)])(x), added(x)
    )


@pytest.mark.quick
def test_code_that_fixes_a_size_is_code_for_that_size(monkeypatch):
    """Where a size of a call equals a constant of the graph, tracing takes it for that constant. Not more
    often than so many times."""
    compiled, said = [], []

    def with_sizes_fixed_above_100(module, inputs):
        compiled.append(None if inputs[2].shape[0] <= 100 else int(inputs[2].shape[0]))
        return torch.fx.Interpreter(module).boxed_run

    monkeypatch.setattr(internals.inductor, "compile_fx_inner", with_sizes_fixed_above_100)
    monkeypatch.setattr(internals.chunk_bodies, "COMPILED", {})
    run = internals.compile_body(doubling_body(4), 64, tell=said.append)
    most = internals.chunk_bodies.MOST_ARTIFACTS
    rows = [50, 128, 60, 128, *range(129, 129 + most)]
    for n in rows:
        x, y = torch.rand(n, 4), torch.empty(n, 4)
        run([n, n, x, y])
        assert torch.equal(y, 2 * x)
    assert compiled == [None, *range(128, 127 + most)]
    assert len(said) == 2 and f"{most} ranges of sizes have code of their own" in said[0]


@pytest.mark.long
def test_a_body_that_cannot_be_compiled_again_runs_operator_by_operator(monkeypatch, interpreted):
    """Its first artifact fits no call, and no second one is to be had."""
    once = internals.chunk_bodies.compile_once

    def fails_again(body, inputs, again=False, store=True):
        if again:
            raise AssertionError("sizes were fixed")
        return [replace(artifact, holds=lambda args: False) for artifact in once(body, inputs)]

    monkeypatch.setattr(internals.chunk_bodies, "compile_once", fails_again)
    model, ids = Plain().double(), ids_of(2, 61)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    with pytest.warns(StreamHint, match="could not be compiled for sizes"):
        found = gradients(model, lambda: step(ids, ids))
    assert worst_error(found, gradients(model, lambda: model(ids, ids))) < 1e-10


@pytest.mark.parametrize(
    "mode, said", [(None, 0), ("reduce-overhead", 1), ("max-autotune", 1), ("max-autotune-no-cudagraphs", 0)]
)
def test_bodies_have_no_cuda_graphs_and_the_report_says_so(mode, said):
    assert internals.body_options(mode)["triton.cudagraphs"] is False
    assert internals.body_options(mode).get("max_autotune", False) == (mode or "").startswith("max-autotune")
    graph = Graph()
    graph.output((graph.placeholder("x"),))
    with (
        pytest.warns(StreamHint, match="no CUDA graphs")
        if mode == "reduce-overhead"
        else contextlib.nullcontext()
    ):
        chain = Chain(GraphModule({}, graph), [torch.ones(2)], Config(mode=mode))
    assert sum("no CUDA graphs" in note for note in chain.report.notes) == said

"""Peak memory of one training step, counted to the byte; no times."""

import pytest
import torch
from models import LlamaLike, Plain, ids_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import peak
from streambp_compile import NotStreamed, explain
from streambp_compile.backend import Reporting
from streambp_compile.config import Config
from streambp_compile.passes.ir import PAST, EveryRowHasVisibleKey, KeyMask, MaskedOutsideBand
from streambp_compile.passes.kernels.products import copied_operands
from streambp_compile.reporting.report import Report
from streambp_compile.runtime.mask_guards import Guard
from streambp_compile.runtime.memory_simulation import Ledger, simulate

LENGTH, VOCABULARY = 2048, 4096


def step_peak(model, loss, ids) -> int:
    """The peak of a step after a first one, with gradients allocated."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step():
        loss(ids).backward()

    step()
    return peak(step)


@pytest.mark.long
def test_peak_of_a_step(fresh_dynamo):
    model = Plain(VOCABULARY, 128, 4, 4)
    ids = ids_of(1, LENGTH)

    def checkpointed(ids):
        x = model.embed(ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.loss(x, ids)

    streamed = torch.compile(lambda ids: model(ids, ids), backend="streambp", options={"chunk_size": 128})
    ours, theirs = step_peak(model, streamed, ids), step_peak(model, checkpointed, ids)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    logits = LENGTH * VOCABULARY * 4
    print(
        f"streamed {ours / 2**20:.1f} MiB, checkpointed {theirs / 2**20:.1f} MiB, logits "
        f"{logits / 2**20:.0f} MiB, parameters {parameters / 2**20:.1f} MiB"
    )
    assert 0 < ours < theirs / 3
    assert ours < logits + parameters


@pytest.mark.parametrize(
    "kind, length",
    [
        pytest.param(Plain, 1000, marks=pytest.mark.slow),
        pytest.param(Plain, 3000, marks=pytest.mark.slow),
        pytest.param(LlamaLike, 1000, marks=pytest.mark.slow),
        pytest.param(LlamaLike, 3000, marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_of_a_step_is_the_measured(kind, length, fresh_dynamo):
    model, ids = kind(), ids_of(2, length)
    report = explain(lambda ids: model(ids, ids), ids)
    measured = step_peak(model, torch.compile(lambda ids: model(ids, ids), backend="streambp"), ids)
    assert report.peak.backward and f"{report.peak.bytes / 2**20:.1f} MiB" in str(report)
    assert abs(report.peak.bytes - measured) < measured / 10


@pytest.mark.slow
def test_what_runs_between_graphs_is_not_predicted(fresh_dynamo):
    model, ids = Plain(layers=1), ids_of(1, 64)

    def step(ids):
        x = model.embed(ids)
        torch._dynamo.graph_break()
        return model.loss(model.layers[0](x), ids)

    assert explain(step, ids).peak is None


def test_compiling_an_unchunked_backward_is_not_counted(interpreted):
    """It is compiled when it first runs, which is in the simulation."""
    embed, weight = torch.nn.Embedding(97, 64), torch.randn(64, 64, requires_grad=True)
    ids = ids_of(2, 300) % 97

    def step(ids):
        x = embed(ids)
        return ((torch.linalg.qr(x @ weight)[0] + x) ** 2).sum()

    with pytest.warns(NotStreamed):
        report = explain(step, ids)
    embed.weight.grad, weight.grad = torch.zeros_like(embed.weight), torch.zeros_like(weight)
    compiled = torch.compile(step, backend="streambp")
    with pytest.warns(NotStreamed):
        compiled(ids).backward()
    measured = peak(lambda: compiled(ids).backward())
    assert abs(report.peak.bytes - measured) < measured / 10
    assert report.timeline.held()[report.timeline.peak] == report.peak.bytes


@pytest.mark.quick
def test_a_forward_alone_is_predicted_without_gradients(fresh_dynamo):
    model, ids = Plain(layers=1), ids_of(1, 64)
    with torch.no_grad():
        report = explain(lambda ids: model(ids, ids), ids)
    assert not report.peak.backward and "of the forward" in str(report)


def test_a_check_of_a_stored_mask_takes_no_memory_of_its_size():
    """Compiled once for all lengths: one pass over the mask, the padding beside it included."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), Graph()
    placeholders = [graph.placeholder(name) for name in ("mask", "keep")]
    for node, shape in zip(placeholders, ((64, 64), (2, 64))):
        node.meta["val"] = mode.from_tensor(torch.ones(shape, dtype=torch.bool))
    hidden = graph.call_function(torch.ops.aten.logical_not.default, (placeholders[0],))
    graph.output((hidden,))
    GraphModule({}, graph)
    triangle, padding = KeyMask(hidden, 0, 1, True), KeyMask(placeholders[1], None, 1, False)
    with mode:
        guard = Guard(
            placeholders,
            [MaskedOutsideBand((triangle,), PAST), EveryRowHasVisibleKey((triangle, padding), PAST)],
        )
    for length in (1000, 2048):
        mask, keep = (
            torch.ones(length, length, dtype=torch.bool).tril(),
            torch.ones(2, length, dtype=torch.bool),
        )
        assert guard.answers((mask, keep))[0].tolist() == [True, True]
        assert peak(lambda: guard.answers((mask, keep))) < mask.numel() / 50
        mask[3, -1] = True
        assert guard.answers((mask, keep))[0].tolist() == [False, True]
        keep[1, 0] = False
        assert guard.answers((mask, keep))[0].tolist() == [False, False]


@pytest.mark.long
def test_a_body_that_ran_before_takes_as_much_again(fresh_dynamo):
    """A simulation runs each chunk body once for inputs of the same sizes; all of them would say the same."""

    class RunsAll(Ledger):
        """A ledger of its own class runs every body."""

    model, report = Plain(256, 64, 4, 3), Report()
    reporting = Reporting(Config(chunk_size=100), report)
    torch.compile(lambda ids: model(ids, ids), backend=reporting)(ids_of(1, 350))
    counted, found = (simulate(*report.steps[0], counting=kind).bytes for kind in (None, RunsAll))
    assert counted == found > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_that_a_batch_of_products_copies_are_counted(dtype):
    """oneDNN copies keys that are cut from a longer buffer; its own scratch is small beside them."""
    rows, buffer = torch.randn(8, 96, 64).to(dtype), torch.randn(8, 2048, 64).to(dtype)
    keys, out = buffer[:, :2016].mT, torch.empty(8, 96, 2016, dtype=dtype)
    torch.bmm(rows, keys, out=out)
    counted, found = copied_operands(rows, keys), peak(lambda: torch.bmm(rows, keys, out=out))
    assert counted <= found <= counted + 0.05 * keys.numel() * keys.itemsize
    assert copied_operands(rows, keys.contiguous()) == 0

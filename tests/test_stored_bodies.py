"""Compiled chunk bodies on disk: what finds an entry, what does not, and that a hit changes nothing."""

import multiprocessing
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.fx import Graph, GraphModule

from streambp_compile import NotStreamed, internals
from streambp_compile.config import Config
from streambp_compile.internals import chunk_bodies, kernel_builds, stored_bodies
from tests.test_internals import doubling_body


@pytest.fixture
def another_process(monkeypatch, tmp_path, fresh_dynamo):
    """A function that forgets what this process has compiled; entries are in a folder of the test."""
    monkeypatch.setattr(stored_bodies, "folder", lambda: tmp_path)

    def begin() -> None:
        torch._dynamo.reset()
        monkeypatch.setattr(chunk_bodies, "COMPILED", {})
        counters["streambp"].clear()

    begin()
    return begin


def doubled(width: int = 4, chunk: int = 64, **options) -> tuple[int, int]:
    """Compile and run a body; how many were compiled and how many were read."""
    before = counters["streambp"]["bodies"], counters["streambp"]["bodies_loaded"]
    x, y = torch.rand(chunk, width), torch.empty(chunk, width)
    internals.compile_body(doubling_body(width), chunk, **options)([chunk, chunk, x, y])
    assert torch.equal(y, 2 * x)
    return counters["streambp"]["bodies"] - before[0], counters["streambp"]["bodies_loaded"] - before[1]


MISS, HIT = (1, 0), (0, 1)


def entries(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]


def loss_of(x, weight, head, labels):
    """A layer of attention and a head."""
    q, k, v = (x @ weight).chunk(3, -1)
    x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
    return F.cross_entropy((x @ head).flatten(0, 1), labels.flatten())


def gradients(length: int = 48, strict: bool = True) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x, labels = torch.randn(2, length, 8), torch.randint(0, 11, (2, length))
    weights = [torch.randn(8, n, requires_grad=True) for n in (24, 11)]
    compiled = torch.compile(loss_of, backend="streambp", options={"chunk_size": 20, "strict": strict})
    return torch.autograd.grad(compiled(x, *weights, labels), weights)


def test_a_second_process_reads_all_bodies_and_computes_the_same_bits(another_process):
    first = gradients()
    compiled = counters["streambp"]["bodies"]
    another_process()
    second = gradients()
    assert counters["streambp"]["bodies"] == 0 < compiled == counters["streambp"]["bodies_loaded"]
    assert all(map(torch.equal, first, second))


def test_a_second_length_compiles_no_body_again(another_process):
    gradients(48)
    compiled = counters["streambp"]["bodies"]
    gradients(71)
    assert counters["streambp"]["bodies"] == compiled


@pytest.mark.quick
def test_what_an_entry_depends_on(another_process, monkeypatch):
    assert doubled() == MISS
    another_process()
    assert doubled() == HIT
    for change in (dict(width=5), dict(chunk=96), dict(mode="max-autotune-no-cudagraphs"), dict(store=False)):
        another_process()
        assert doubled(**change) == MISS, change
    another_process()
    with inductor_config.patch({"cpp.simdlen": 1}):
        assert doubled() == MISS
    another_process()
    monkeypatch.setattr(stored_bodies, "own_key", lambda: "other sources")
    assert doubled() == MISS


@pytest.mark.quick
def test_conditions_on_sizes_hold_after_a_hit_as_before(another_process, monkeypatch):
    monkeypatch.setattr(chunk_bodies, "conditions_of", lambda inputs: "args[0] < 100")
    assert doubled() == MISS
    another_process()
    run = internals.compile_body(doubling_body(4), 64)
    assert (counters["streambp"]["bodies"], counters["streambp"]["bodies_loaded"]) == HIT
    for rows, compiled in ((99, 0), (128, 1)):
        x, y = torch.rand(rows, 4), torch.empty(rows, 4)
        run([rows, rows, x, y])
        assert torch.equal(y, 2 * x) and counters["streambp"]["bodies"] == compiled


@pytest.mark.quick
@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps("no body"), pickle.dumps((None, "True"))], ids=range(4)
)
def test_what_cannot_be_read_is_missing_and_written_again(another_process, tmp_path, content):
    doubled()
    (path,) = entries(tmp_path)
    path.write_bytes(content)
    another_process()
    assert doubled() == MISS
    another_process()
    assert doubled() == HIT


@pytest.mark.quick
@pytest.mark.parametrize("option", ["force_disable_caches", "fx_graph_cache"])
def test_no_entry_where_inductor_keeps_none(another_process, tmp_path, option):
    with inductor_config.patch({option: option == "force_disable_caches"}):
        assert doubled() == MISS
    assert not entries(tmp_path)


@pytest.mark.quick
def test_a_folder_that_cannot_be_written_changes_nothing(another_process, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(stored_bodies, "folder", lambda: tmp_path / "file")
    assert doubled() == MISS


def write_often(folder, key: str, entry: tuple) -> None:
    stored_bodies.folder = lambda: folder
    for _ in range(200):
        internals.stored_bodies.write_atomic(
            str(stored_bodies.path_of(key)), pickle.dumps(entry), make_dirs=True
        )


def test_processes_that_write_one_entry_at_once_leave_a_whole_one(another_process, tmp_path):
    doubled()
    (path,) = entries(tmp_path)
    entry = pickle.loads(path.read_bytes())
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(tmp_path, path.name, entry)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert pickle.loads(path.read_bytes())[1] == entry[1]
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert entries(tmp_path) == [path]
    another_process()
    assert doubled() == HIT


def test_torch_carries_entries_to_another_machine(another_process, tmp_path):
    doubled()
    saved, _ = torch.compiler.save_cache_artifacts()
    for path in entries(tmp_path):
        path.unlink()
    torch.compiler.load_cache_artifacts(saved)
    another_process()
    assert doubled() == HIT


@pytest.mark.long
def test_kernels_that_cannot_be_built_leave_the_region_unchunked(another_process, monkeypatch):
    def broken(kernels):
        raise RuntimeError("the compiler failed")

    monkeypatch.setattr(kernel_builds.Kernels, "wait", broken)
    with pytest.warns(NotStreamed, match="the compiler failed"):
        found = gradients(strict=False)
    another_process()
    monkeypatch.undo()
    torch.testing.assert_close(found, gradients())


@pytest.mark.quick
def test_the_text_of_a_body_has_no_names_and_nothing_that_is_not_read():
    body = doubling_body(4).graph
    renamed = doubling_body(4).graph
    first = next(n for n in renamed.graph.nodes if n.op == "call_function")
    with renamed.graph.inserting_before(first):
        x = first.args[0]
        alias = renamed.graph.call_function(torch.ops.aten.alias.default, (x,))
        renamed.graph.call_function(torch.ops.aten.neg.default, (x,))
    first.args = (alias, 2)
    assert chunk_bodies.text_of(renamed) == chunk_bodies.text_of(body)
    first.args = (alias, 3)
    assert chunk_bodies.text_of(renamed) != chunk_bodies.text_of(body)


def writing_body(steps: str, graph: Graph) -> str:
    """The text of a body that takes the steps in this order: a reads memory, b writes into it, c does
    neither."""
    memory, x, *results = map(graph.placeholder, ("memory", "x", "first", "second"))
    aten = torch.ops.aten
    call = graph.call_function
    take = {
        "a": lambda: call(
            aten.copy_.default, (results[0], call(aten.neg.default, (call(aten.t.default, (memory,)),)))
        ),
        "b": lambda: call(aten.copy_.default, (memory, call(aten.exp.default, (x,)))),
        "c": lambda: call(aten.cos.default, (x,)),
    }
    done = {step: take[step]() for step in steps}
    call(aten.copy_.default, (results[1], done["c"]))
    graph.output(())
    return chunk_bodies.text_of(GraphModule({}, graph))


@pytest.mark.quick
def test_the_text_of_a_body_has_the_order_of_writes_and_of_nothing_else():
    texts = {steps: writing_body(steps, Graph()) for steps in ("abc", "acb", "cab", "bac", "bca")}
    assert texts["abc"] == texts["acb"] == texts["cab"]
    assert texts["bac"] == texts["bca"] != texts["abc"]


@pytest.mark.quick
def test_cache_is_true_or_false():
    with pytest.raises(ValueError, match="cache must be True or False"):
        Config.of(None, {"cache": "no"})

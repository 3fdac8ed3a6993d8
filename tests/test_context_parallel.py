"""Tokens, or experts, split over processes: what streams, and with which exchanges between processes."""

import pytest
import torch
from selection import representatives
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.setups import context_parallel, expert_parallel
from benchmarks.setups.measurement import Row, measured
from benchmarks.zoo import interpret_bodies
from streambp_compile import internals
from streambp_compile.dynamo.reading.processes import routed
from streambp_compile.passes.analyze import analyze
from streambp_compile.passes.ir import EVERYWHERE, Kind, Mark
from streambp_compile.passes.normalization.normalize import normalize
from streambp_compile.passes.rules import along_of, communicates

c10d, streambp = torch.ops._c10d_functional, torch.ops.streambp
SETUPS = context_parallel.SETUPS | expert_parallel.SETUPS
RING, GATHERED = "Context parallel, ring", "Context parallel, keys gathered"
EQUAL = "Expert parallel, equal parts"
CHOSEN = {RING, GATHERED, EQUAL, expert_parallel.ROUTED}
CUT_AROUND = {context_parallel.HALVES, expert_parallel.ROUTED, "Expert parallel, exchange not compiled"}


def row_of(name: str) -> Row:
    """In a process of the group."""
    interpret_bodies()
    family = context_parallel if name in context_parallel.SETUPS else expert_parallel
    return measured(SETUPS[name], (64,), truth=family.unparallel)


def check(name: str, rows: list[Row]) -> None:
    for row in rows:
        assert row.error < 1e-12
        assert row.collectives == rows[0].collectives
        if name not in CUT_AROUND:
            assert row.layers and row.head and row.notes == ()


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(SETUPS, CHOSEN))
def test_gradients_are_those_of_the_model_that_is_not_split(name, ranks):
    check(name, ranks.run(row_of, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_on_four_processes(name, four_ranks):
    check(name, four_ranks.run(row_of, name))


@pytest.mark.slow
def test_tokens_are_routed_once(ranks):
    """The backward sends gradients back, and no tokens again: processes cut their tokens differently."""
    for row in ranks.run(row_of, expert_parallel.ROUTED):
        assert row.collectives == row.expected


def exchange(received: list[int], sent: list[int]) -> list[torch.fx.Node]:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    return [graph.call_function(c10d.all_to_all_single.default, (given, received, sent, "0"))]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("received", "sent", "by_routing"),
    [([4, 4], [4, 4], False), ([0, 8, 0], [0, 0, 8], False), ([3, 5], [4, 4], True), ([0, 5], [4, 1], True)],
)
def test_sizes_that_data_decides_are_told_from_equal_parts_and_rings(received, sent, by_routing):
    nodes = exchange(received, sent)
    assert routed(nodes) is (nodes[0] if by_routing else None)


@pytest.mark.quick
def test_slices_are_parts_of_what_is_scattered():
    """As ``chunk`` has them in the backward of a gather."""

    def scattered(whole):
        parts = torch.cat([whole[:, 0:4], whole[:, 4:8]])
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(parts, "sum", 2, "0"))

    def in_another_order(whole):
        parts = torch.cat([whole[:, 4:8], whole[:, 0:4]])
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(parts, "sum", 2, "0"))

    for function, dim in ((scattered, 1), (in_another_order, 0)):
        with internals.FakeTensorMode():
            graph = normalize(make_fx(function)(torch.empty(2, 8, 4))).graph
        assert [along_of(n) for n in graph.nodes if n.target is streambp.scattered.default] == [dim]


@pytest.mark.quick
def test_an_exchange_and_its_wait_are_one_operation_of_all_rows():
    def there(x):
        return c10d.wait_tensor(c10d.all_to_all_single(x.neg(), [1, 1], [1, 1], "0"))

    with internals.FakeTensorMode():
        graph = normalize(make_fx(there)(torch.empty(2, 8, 3))).graph
    (got,) = graph.output_node().all_input_nodes
    assert got.target is streambp.exchanged.default and communicates(got)
    assert tuple(got.meta["val"].shape) == (2, 8, 3)
    found = analyze(graph, 8, {graph.find_nodes(op="placeholder")[0]: (Mark(1),)})
    assert found.kinds[got.args[0]] is Kind.ROWS and found.kinds[got] is Kind.ALL
    assert found.tokens_of(got).rows == Mark(1)
    assert found.edges[got][0].reach == EVERYWHERE

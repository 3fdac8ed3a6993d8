"""A report as files: the timeline of memory, the snapshot for memory viewers, the page."""

import pickle
import pickletools

import pytest
import torch
from models import LlamaLike, Plain, ids_of
from torch.cuda import _memory_viz

from streambp_compile import explain
from streambp_compile.page.areas import Area, Holders
from streambp_compile.page.snapshot import Addresses

# The codes of pickle that MemoryViz.js, the viewer of PyTorch, reads.
READ_BY_VIEWERS = set(
    "PROTO FRAME MEMOIZE MARK STOP APPEND APPENDS BINGET LONG_BINGET BINPUT LONG_BINPUT BININT BININT1 "
    "BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE DICT LIST SETITEM "
    "SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 NEWTRUE NEWFALSE NONE".split()
)


@pytest.fixture
def report(interpreted):
    model, ids = LlamaLike(), ids_of(2, 300)
    return explain(lambda ids: model(ids, ids), ids, streambp_options={"chunk_size": 64})


def test_the_timeline_adds_up_to_the_predicted_peak(report):
    timeline = report.timeline
    held = timeline.held()
    assert max(held) == report.peak.bytes == held[timeline.peak]
    assert sum(a.bytes for a in timeline.alive(timeline.peak)) == report.peak.bytes
    assert all(0 <= a.start < a.end <= timeline.end for a in timeline.allocations)


def test_every_allocation_knows_what_holds_it(report):
    holders, found = Holders(), {}
    for allocation in report.timeline.allocations:
        holder = holders.of(allocation)
        found.setdefault(holder.area, set()).add((holder.name, holder.pattern))
    hidden = 2 * 300 * 64 * 4
    layer = report.regions[1].streamed
    keys = {(b.node.name, "b h [t] e") for b in layer.forward.bodies[0].bindings if b.role.value == "append"}
    assert keys and keys <= found[Area.KEYS]
    assert found[Area.KEY_GRADIENTS] == {
        (n.name, "b h [t] e") for n in layer.backward.program.sweeps[-1].keysums
    }
    assert {pattern for _, pattern in found[Area.SUMS]} == {"sum"}
    assert {pattern for _, pattern in found[Area.INPUTS]} == {"b [t] d"}
    assert found[Area.HEAD] and found[Area.CHUNK]
    at_peak = [a for a in report.timeline.alive(report.timeline.peak) if holders.of(a).area is Area.INPUTS]
    assert at_peak and all(a.bytes == hidden for a in at_peak)
    assert all("models.py" in holders.of(a).where for a in at_peak)


def test_backwards_belong_to_their_own_region_of_the_chain(report):
    visits = [v for v in report.timeline.visits if getattr(v.place, "direction", "") == "backward"]
    assert [v.link for v in visits] == sorted((v.link for v in visits), reverse=True)
    assert {v.link for v in visits} <= set(range(len(report.order)))


def test_a_recomputed_embedding_says_so(report):
    holders = Holders()
    again = [a for a in report.timeline.allocations if holders.of(a).recomputed]
    assert again and all("backward" not in holders.of(a).stage for a in again)


def test_the_snapshot_is_what_memory_viewers_read(report, tmp_path):
    path = tmp_path / "timeline.pickle"
    report.save(path)
    snapshot = pickle.loads(path.read_bytes())
    assert {code.name for code, _, _ in pickletools.genops(path.read_bytes())} <= READ_BY_VIEWERS
    (events,) = snapshot["device_traces"]
    held = peak = 0
    for event in events:
        held += {"alloc": 1, "free_requested": 0, "free_completed": -1}[event["action"]] * event["size"]
        peak = max(peak, held)
    assert peak == report.peak.bytes <= snapshot["segments"][0]["total_size"]
    assert {e["category"] for e in events} <= {"unknown", *map(str, Area)}
    assert _memory_viz.trace_plot(snapshot) and _memory_viz.trace(snapshot)


def test_addresses_do_not_overlap():
    heap, held = Addresses(), {}
    torch.manual_seed(0)
    for size in torch.randint(1, 50, (300,)).tolist():
        if held and size % 3 == 0:
            address = min(held, key=lambda a: (a * 7919) % 101)
            heap.give(address, held.pop(address))
        address = heap.take(size)
        assert all(address + size <= a or a + s <= address for a, s in held.items())
        held[address] = size
    for address, size in list(held.items()):
        heap.give(address, size)
    assert heap.free == [(0, heap.end)]


def test_a_report_without_a_predicted_peak_has_no_timeline(interpreted, tmp_path):
    model, ids = Plain(layers=1), ids_of(1, 64)

    def step(ids):
        x = model.embed(ids)
        torch._dynamo.graph_break()
        return model.loss(model.layers[0](x), ids)

    report = explain(step, ids)
    assert report.timeline is None
    with pytest.raises(ValueError, match="no timeline"):
        report.save(tmp_path / "timeline.pickle")
    with pytest.raises(ValueError, match="ends in"):
        report.save(tmp_path / "timeline.pdf")


def test_an_ordinary_simulation_is_not_watched(report):
    from streambp_compile.runtime.places import Watched

    assert report.timeline and Watched.by is None

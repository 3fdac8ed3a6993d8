"""A report as files: the timeline of memory, the snapshot for memory viewers, the page."""

import functools
import json
import logging
import pickle
import pickletools
import re
from pathlib import Path

import pytest
import torch
from models import LlamaLike, Plain, ids_of
from torch.cuda import _memory_viz

import streambp_compile
from streambp_compile import explain
from streambp_compile.tools.page import html
from streambp_compile.tools.page.areas import Area, Holders
from streambp_compile.tools.page.data import data_of
from streambp_compile.tools.page.files import trace
from streambp_compile.tools.page.memory import chosen
from streambp_compile.tools.page.snapshot import Addresses

# The codes of pickle that MemoryViz.js, the viewer of PyTorch, reads.
READ_BY_VIEWERS = set(
    "PROTO FRAME MEMOIZE MARK STOP APPEND APPENDS BINGET LONG_BINGET BINPUT LONG_BINPUT BININT BININT1 "
    "BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE DICT LIST SETITEM "
    "SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 NEWTRUE NEWFALSE NONE".split()
)


@functools.cache
def made():
    model, ids = LlamaLike(), ids_of(2, 300)
    return explain(lambda ids: model(ids, ids), ids, streambp_options={"chunk_size": 64})


@pytest.fixture
def report(interpreted):
    """Of one model; made once."""
    return made()


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


def test_areas_add_up_and_every_buffer_of_the_peak_is_listed(report):
    data = json.loads(json.dumps(data_of(report)))["memory"]
    moments, at = data["moments"], data["peak"]
    assert data["bytes"] == report.peak.bytes == sum(area[at] for area in data["held"])
    held = report.timeline.held()
    assert [sum(area[i] for area in data["held"]) for i in range(len(moments))] == [held[m] for m in moments]
    listed = [b for b in data["buffers"] if b[1] <= moments[at] < b[2]]
    assert sorted(b[0] for b in listed) == sorted(a.bytes for a in report.timeline.alive(moments[at]))
    for area in range(len(data["areas"])):
        mine = [b[0] for b in listed if data["holders"][b[4]][0] == area]
        assert sum(mine) == data["held"][area][at]
    backward = next(v for v in data["visits"] if v[0] == "backward")
    assert all(v[3] >= backward[3] for v in data["visits"] if v[2] == "backward")


def test_moments_that_are_drawn_hold_every_peak():
    torch.manual_seed(0)
    held = torch.randint(0, 1000, (1234,)).tolist()
    moments = chosen(held, 100)
    assert len(moments) <= 100 and moments == sorted(moments)
    assert max(held[m] for m in moments) == max(held)
    assert chosen([3], 100) == [0]


def test_regions_show_sweeps_keys_values_and_passes(report):
    layer = data_of(report)["regions"][1]
    forward, backward = layer["schedules"]
    (sweep,) = forward["sweeps"]
    assert (sweep["chunk"], sweep["count"]) == (64, 5) and len(backward["sweeps"]) == 2
    keys = sweep["keys"]
    assert keys["chunks"][1] == (64, 128, 0, 128) and 0.5 < keys["read"] < 0.7 and "causal" in keys["proof"]
    passes = {p["title"]: p for p in layer["passes"]}
    assert [*passes][:5] == ["Dynamo's graph", "Joint graph", "Normal form", "Facts", "Sweeps"]
    body = passes["Chunk body, forward"]["code"]
    attention = next(line for line in body if "streambp.attention" in line[0])
    assert "F.scaled_dot_product_attention" in attention[2]
    normal = next(line for line in passes["Normal form"]["code"] if "streambp.attention" in line[0])
    assert normal[1] == "b h [t] e | b h [t]"
    reads = {v[0]: v[4] for v in passes["Facts"]["values"]}
    assert "keys [-inf,0]" in reads["attention"]


def test_a_refusal_shows_its_cost_and_remedy(interpreted):
    weight = torch.randn(8, 8, requires_grad=True)

    def step(x):
        return (torch.linalg.qr(x @ weight)[0] * x).sum()

    with pytest.warns(streambp_compile.NotStreamed):
        report = explain(step, torch.randn(1, 64, 8))
    refusals = [r["refusal"] for r in data_of(report)["regions"] if r["refusal"]]
    assert refusals and all(r["remedy"] and r["reason"] and r["cost"] > 0 for r in refusals)


def test_the_page_is_one_file_that_loads_nothing(report, tmp_path):
    report.save(tmp_path / "report.html", beside=report, names=("</script>", "after"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "/*{" not in page and page.count("</script>") == 3
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|\bfetch\(|XMLHttpRequest|import\(""", page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert (
        data["names"] == ["</script>", "after"]
        and data["reports"] == [json.loads(json.dumps(data_of(report)))] * 2
    )


def test_files_of_the_page_are_installed():
    root = Path(html.__file__).parent
    project = (root.parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    globs = json.loads(re.search(r'^"streambp_compile.tools.page" = (\[.*\])$', project, re.MULTILINE)[1])
    packed = {p for pattern in globs for p in root.glob(pattern)}
    assert {root / "page.html", *(root / file for file in html.PARTS.values())} <= packed
    assert (root / "vendor" / "uPlot.LICENSE") in packed


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
    report.save(tmp_path / "report.html")
    assert data_of(report)["memory"] is None


def test_the_structured_trace_receives_the_data_of_the_page(report):
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append((record.metadata, record.payload))

    handler, log = Handler(), torch._logging._internal.trace_log
    log.addHandler(handler)
    try:
        trace(report)
    finally:
        log.removeHandler(handler)
    found = {m["artifact"]["name"]: (m["artifact"], payload) for m, payload in records if "artifact" in m}
    artifact, payload = found["streambp_report_data"]
    assert artifact["encoding"] == "json" and json.loads(payload) == json.loads(json.dumps(data_of(report)))


def test_an_ordinary_simulation_is_not_watched(report):
    from streambp_compile.runtime.places import Watched

    assert report.timeline and Watched.by is None

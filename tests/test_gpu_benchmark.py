"""The parts of benchmarks/gpu.py that decide something: the search for the longest sequence, what is made of
times, and a run whose workers die."""

import dataclasses
import json
import sys
import types

import pytest

from benchmarks.on_gpu import attention, capacity, correctness, profiling, runner, timing
from benchmarks.on_gpu.scale import QWEN3_8B

CAPACITY = 10_000


def lengths_tried(peak_of, first=(10, 20), grain=1):
    tried = list(
        capacity.search(
            lambda tokens: peak if (peak := peak_of(tokens)) <= CAPACITY else None, first, CAPACITY, grain
        )
    )
    fitted = max((tokens for tokens, peak in tried if peak is not None), default=None)
    return fitted, tried


@pytest.mark.parametrize(
    "peak_of",
    [
        lambda t: 500 + 9 * t,  # a line
        lambda t: 500 + 9 * t + 700 * (t > 300),  # a step upwards on the way
        lambda t: 500 + 9 * t - 300 * (t % 2),  # not monotonic
        lambda t: max(3000, 15 * t),  # flat at the beginning
    ],
    ids=["line", "step", "uneven", "flat"],
)
def test_the_search_ends_close_to_the_longest_that_fits(peak_of):
    longest = max(t for t in range(2000) if peak_of(t) <= CAPACITY)
    fitted, tried = lengths_tried(peak_of)
    assert fitted >= longest * (1 - 2 * capacity.PRECISION) and len(tried) <= 12


def test_the_search_tries_multiples_of_the_grain_and_stops_where_the_first_length_fails():
    fitted, tried = lengths_tried(lambda t: 50 * t, first=(64, 128), grain=64)
    assert fitted == 192 and all(tokens % 64 == 0 for tokens, _ in tried)
    assert lengths_tried(lambda t: 10**6) == (None, [(10, None)])


def test_times_of_two_depths_give_a_layer_and_the_whole_model():
    layer, model = timing.whole(deep=1.0, bare=0.2, timed=4, layers=36)
    assert (layer, model) == pytest.approx((0.2, 7.4))
    rounds = {
        timing.DEEP: {"ours": [1.0, 0.8, 1.2], "reference": [2.0, 1.6, 2.4]},
        timing.BARE: {"ours": [0.2], "reference": [0.4]},
    }
    found = {
        "case": {"method": "streambp", "tokens": 32768},
        "layers": 4,
        "first": 60.0,
        "peak": 2**30,
        "chunks": [2048, 4096],
        **rounds,
    }
    cells = timing.row(found, QWEN3_8B)
    assert cells == [
        "streambp",
        "2048, 4096",
        "32768",
        "1.000",
        "2.000",
        "0.500",
        "200.0",
        "0.500",
        "200.0",
        "7.40",
        "0.500",
        "1",
        "–",
        "60.0",
    ]


def test_idle_time_and_kinds_of_kernels():
    assert profiling.busy([(0, 10), (5, 12), (20, 30), (22, 25)]) == 22
    names = {
        "nvjet_hsh_128x256": "products",
        "flash_fwd_kernel": "attention",
        "triton_poi_fused_add_copy_0": "Triton",
        "Memcpy DtoD (Device -> Device)": "copies",
        "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>": "additions",
        "aten::mm": "products",
        "aten::addmm_": "products",
        "Memset (Device)": "fills",
        "softmax_warp_forward": "other",
    }
    assert {name: profiling.kind_of(name) for name in names} == names


def test_a_thinned_curve_keeps_its_peak():
    curve = [(float(i), i % 977) for i in range(20_000)]
    thin = profiling.thinned(curve)
    assert len(thin) <= 2 * profiling.POINTS and max(held for _, held in thin) == 976 and thin == sorted(thin)


WORKER = """
import json, os, sys
request = json.loads(sys.stdin.readline())
for number, case in enumerate(request["cases"]):
    print(json.dumps({"started": number}), flush=True)
    if case["do"] == "die":
        print("the last words", file=sys.stderr)
        os._exit(3)
    if case["do"] == "hang":
        sys.stdin.read()
    print(json.dumps({"found": {"value": case["do"]}}), flush=True)
    print(json.dumps({"finished": number}), flush=True)
"""


def settings_for(folder, kind="cpu"):
    return runner.Settings(
        **dict(
            kind=kind,
            scale="TINY",
            minutes=1.0,
            rounds=1,
            beside=1,
            threads=1,
            interpret=True,
            only=(),
            folder=folder,
            worker=(sys.executable, "-c", WORKER),
            command="the command",
            machine="the machine",
        )
    )


def run_of(folder, *jobs):
    part = types.SimpleNamespace(
        __name__="part", jobs=lambda settings: jobs, tables=lambda findings, settings: json.dumps(findings)
    )
    return runner.run(part, "part", settings_for(folder))


def test_a_worker_that_dies_costs_one_case(tmp_path):
    cases = tuple({"do": name} for name in ("one", "die", "two"))
    found = run_of(tmp_path, runner.Job("job", cases, 60))
    assert [f.get("value") or runner.why(f) for f in found] == [
        "one",
        "ended with status 3: the last words",
        "two",
    ]
    assert json.loads((tmp_path / "gpu-part.md").read_text().split("\n\n")[2]) == found
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == found


def test_jobs_beside_one_another_leave_what_they_find_one_after_another(tmp_path):
    jobs = [runner.Job(f"job {n}", ({"do": "one"}, {"do": "die"}, {"do": "two"}), 60) for n in range(4)]
    part = types.SimpleNamespace(
        __name__="part",
        ANY_NUMBER_AT_A_TIME=True,
        jobs=lambda settings: jobs,
        tables=lambda findings, settings: json.dumps(findings),
    )
    found = runner.run(part, "part", dataclasses.replace(settings_for(tmp_path), beside=3))
    for job in jobs:
        mine = [f for f in found if f["job"] == job.name]
        assert [f.get("value", "failed") for f in mine] == ["one", "failed", "two"]
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == found


def test_a_worker_that_hangs_is_stopped_and_what_it_leaves_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.1)
    monkeypatch.setattr(runner, "SLOWER", 1)
    hanging, next_one = (
        runner.Job("slow", ({"do": "hang"}, {"do": "one"}), 2.0),
        runner.Job("next", ({"do": "two"},), 20),
    )
    found = run_of(tmp_path, hanging, next_one)
    assert ["value" in f for f in found] == [False, False, True]
    assert runner.why(found[0]).startswith("stopped: no answer within")
    assert runner.why(found[1]) == "not run: more than 2 s"


@pytest.mark.parametrize(
    "part",
    [correctness, capacity, timing, profiling, attention],
    ids=lambda part: part.__name__.rpartition(".")[2],
)
@pytest.mark.parametrize("kind", ["cuda", "fake", "cpu"])
def test_every_part_has_jobs_and_a_table_when_nothing_ran(part, kind, tmp_path):
    settings = settings_for(tmp_path, kind)
    jobs = part.jobs(settings)
    left = [
        {"job": job.name, "case": case, "left": "not run: no time left"} for job in jobs for case in job.cases
    ]
    assert len({job.name for job in jobs}) == len(jobs) and "not run" in part.tables(left, settings)

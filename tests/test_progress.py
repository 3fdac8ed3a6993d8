"""What is told while a function is compiled, and when it is done."""

import io
import logging
import time

import pytest
import torch
from models import Plain, ids_of

from streambp_compile import explain, internals
from streambp_compile.passes import phases
from streambp_compile.reporting import progress

pytestmark = pytest.mark.usefixtures("interpreted")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    for name in ("PATIENCE", "TICK"):
        monkeypatch.setattr(progress, name, 0.01)


def test_a_terminal_shows_a_line_that_ends_as_a_summary(impatient):
    out = Terminal()
    with progress.Compiling(out) as line:
        line.region(2, 8, "model.py:7")
        while "region 3 of 8, model.py:7, 0 s" not in out.getvalue():
            time.sleep(0.01)
        with progress.Compiling(inner := Terminal()):
            time.sleep(0.05)
        line.last = "streambp: 8 of 8 regions streamed"
    assert out.getvalue().endswith("\r\x1b[Kstreambp: 8 of 8 regions streamed, compiled in 0 s\n")
    assert not inner.getvalue()
    assert progress.Compiling.active.acquire(blocking=False)
    progress.Compiling.active.release()


def test_nothing_is_shown_elsewhere_or_early(monkeypatch):
    for out in (io.StringIO(), Terminal()):
        with progress.Compiling(out):
            pass
        assert not out.getvalue()


@pytest.mark.quick
def test_the_log_has_one_line_at_the_end(caplog, monkeypatch):
    model, ids = Plain(), ids_of(2, 64)
    told = []
    monkeypatch.setattr(internals.log, "isEnabledFor", lambda level: level == logging.INFO)
    monkeypatch.setattr(internals.log, "info", lambda text, *args: told.append(text % args))
    torch.compile(model, backend="streambp")(ids, ids).backward()
    (line,) = [text for text in told if "regions streamed" in text]
    assert line.startswith("streambp: 4 of 4 regions streamed; predicted peak of a step")
    assert "compiled in" in line and "AOTAutograd" in line and "\n" not in line


@pytest.mark.quick
def test_explain_runs_nothing_and_times_the_stages(monkeypatch):
    model = Plain()
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    ran = []
    monkeypatch.setattr(internals.chunk_bodies.CompiledBody, "__call__", lambda self, args: ran.append(args))
    report = explain(lambda ids: model(ids, ids).sin(), ids := ids_of(2, 64))
    assert all(internals.is_fake(v) for args in ran for v in args if isinstance(v, torch.Tensor))
    assert {"Dynamo", "rewrites", "AOTAutograd", "analysis", "planning", "Inductor"} <= set(report.seconds)
    assert all(seconds >= 0 for seconds in report.seconds.values()) and ids.shape == (2, 64)


def test_the_largest_region_comes_first():
    model = Plain(vocabulary=4096)
    report = explain(lambda ids: model(ids, ids) + torch.ones(3).sum(), ids_of(1, 64))
    text = str(report)
    order = sorted((r for r in report.regions if r.streamed), key=lambda r: text.index(f"\n{r.name}  "))
    assert [r.bytes for r in order] == sorted((r.bytes for r in order), reverse=True)
    assert order != [r for r in report.regions if r.streamed]


def test_stages_within_stages_count_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now[0])
    seconds: dict[str, float] = {}
    with phases.clocked(seconds):
        now[0] = 1
        with phases.stage("AOTAutograd"):
            now[0] = 3
            with phases.phase("choosing chunk lengths"):
                now[0] = 7
            now[0] = 8
    assert seconds == {"rewrites": 1, "AOTAutograd": 3, "planning": 4}

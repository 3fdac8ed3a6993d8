"""What `python -m streambp_compile.doctor` says, and which versions of torch are supported."""

import re
from pathlib import Path

import pytest
import torch

from streambp_compile import doctor, internals, supported

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def small(monkeypatch, interpreted):
    for name, size in dict(VOCABULARY=512, WIDTH=32, HEADS=2, LAYERS=2, TOKENS=600).items():
        monkeypatch.setattr(doctor, name, size)
    monkeypatch.setattr(doctor, "WORSE", 100)  # so few numbers say little about rounding


@pytest.mark.quick
def test_all_works_here(small, capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "Everything works" in out and f"torch             {torch.__version__}" in out
    assert re.search(r"^streambp +[\d.]+ +0\.\d", out, re.MULTILINE), "less memory than eager"
    assert re.search(r"(\d) of \1 regions streamed", out) and "predicted peak of a step" in out
    assert "warning" not in out


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(internals, "cpp_compiler", lambda: None)
    assert doctor.main() == 1
    assert "torch.compile finds no C++ compiler. Install g++ or clang, or set CXX" in capsys.readouterr().out


def test_no_compiler_is_found_where_there_is_none():
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert internals.cpp_compiler() is None
    assert internals.cpp_compiler()


def test_an_error_of_a_step_is_shown_with_its_traceback(small, monkeypatch, capsys):
    def failing(*_args):
        raise RuntimeError("no step today")

    monkeypatch.setattr(doctor, "measured", failing)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "Traceback" in out and "(RuntimeError: no step today)" in out


@pytest.mark.parametrize(
    "streamed, regions, sentence",
    [
        ((10, 1e-7), 0, "No part of the small model streams"),
        ((10, 1e-3), 2, "less exact than those of eager"),
        ((10, float("nan")), 2, "less exact than those of eager"),
        ((90, 1e-7), 2, "no less memory than eager"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(streamed, regions, sentence):
    with pytest.raises(doctor.NotWorking, match=sentence):
        doctor.check(doctor.Measured(1, 1, *streamed), doctor.Measured(1, 1, 80, 1e-7), regions)


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_an_older_torch_is_refused(version):
    with pytest.raises(
        ImportError, match=rf"needs torch 2\.11 or newer, and this is torch {re.escape(version)}"
    ):
        supported.check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0.dev20261101", "3.0.0"])
def test_a_newer_torch_is_not(version):
    supported.check_torch(version)


def test_supported_versions_are_the_same_everywhere():
    """The table of the README, pyproject.toml, the Makefile and the check on import."""
    oldest, newest = map(supported.dotted, (supported.OLDEST, supported.NEWEST))
    read = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "pyproject.toml", "Makefile")
    }
    assert f'"torch>={oldest}"' in read["pyproject.toml"]
    assert f"TORCH_CUDA ?= {oldest}." in read["Makefile"] and f"TORCH ?= {newest}." in read["Makefile"]
    assert re.search(rf"^\| torch \| {oldest} to {newest}", read["README.md"], re.MULTILINE)

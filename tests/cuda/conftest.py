"""Each architecture is compiled for the pretend GPU once per run, with nothing compiled before it."""

import functools
import os
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from architectures import ARCHITECTURES, report_of
from torch._inductor.codecache import PyCodeCache

from streambp_compile import internals
from streambp_compile.reporting.report import Report


@pytest.fixture(scope="session", autouse=True)
def nothing_compiled_before(tmp_path_factory):
    """Caches of this run alone, so that every kernel is compiled for this device."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))


@dataclass(frozen=True)
class Compiled:
    """A training step compiled for the pretend GPU.

    report    what became of it
    bodies    how many chunk bodies were compiled for it
    wrappers  the Python modules that Inductor wrote meanwhile: one per body and per region compiled whole
    """

    report: Report
    bodies: int
    wrappers: tuple[ModuleType, ...]


@pytest.fixture(scope="session")
def compiled():
    """Name of an architecture → its `Compiled`; each is compiled once."""
    return functools.cache(compile_for_device)


def compile_for_device(name: str) -> Compiled:
    known, bodies = set(PyCodeCache.modules), len(internals.chunk_bodies.COMPILED)
    report = report_of(ARCHITECTURES[name], "cuda")
    written = (m for m in PyCodeCache.modules if m not in known and hasattr(m, "call"))
    return Compiled(report, len(internals.chunk_bodies.COMPILED) - bodies, tuple(written))


@pytest.fixture(scope="session")
def capability() -> int:
    """Of the pretend GPU: 80 for sm_80."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor

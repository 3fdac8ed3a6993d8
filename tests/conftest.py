"""Every test starts from the same seed; all workers together have two threads.

Chunk bodies run node by node where a test, or its file, asks for the fixture `interpreted`: most of the time
goes into code generation otherwise. Tests marked ``inductor`` compile them all the same, one or two of each
kind, and ``--inductor`` compiles those of every test, as ``make test-compiled`` does for whole models.
"""

import copy
import gc
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Bodies by their text, as `internals.chunk_bodies.COMPILED` holds those that Inductor compiled.
INTERPRETED: dict = {}

collect_ignore = (
    [] if os.environ.get("PRETEND_GPU") else ["cuda"]
)  # which want a CUDA build of torch: make test-cuda
if find_spec("peft") is None:
    collect_ignore.append("trainers")  # which want packages of others: make test-trainers


def pytest_addoption(parser):
    parser.addoption(
        "--inductor", action="store_true", help="compile all chunk bodies by Inductor, interpret none"
    )


# Files of which every test that is not slow belongs to `make test-quick`; single tests elsewhere are marked.
QUICK = {
    "test_analyze.py",
    "test_compiled_region.py",
    "test_region_drivers.py",
    "test_planning.py",
    "test_fingerprints.py",
    "test_layering.py",
    "test_normalize.py",
    "test_operators.py",
    "test_partition.py",
    "test_split.py",
}


# Files of tests that train whole models, but for tests that read a report and run nothing.
MODELS = {"test_gradients.py", "test_objectives.py"}
REPORTS = {"test_sweeps", "test_no_logits_at_full_length"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in QUICK:
            item.add_marker("quick")
        if item.path.name in MODELS and item.originalname not in REPORTS:
            item.add_marker("models")


def pytest_collection_finish():
    """What is imported stays: the collector need not visit it again and again while tests trace graphs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    torch.set_num_threads(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True, scope="session")
def own_stored_bodies(tmp_path_factory):
    """Tests read no chunk body that an earlier run has stored."""
    from streambp_compile.internals import stored_bodies

    place = tmp_path_factory.mktemp("bodies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_bodies, "folder", lambda: place)
        yield


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_hint_at_time(monkeypatch):
    """How busy the machine is decides no test: many make every warning an error."""
    from streambp_compile.passes import phases

    monkeypatch.setattr(phases, "SLOW", math.inf)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before; what is compiled here is forgotten after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(request, monkeypatch, fresh_dynamo):
    """Chunk bodies run node by node, not compiled: for what is about their analysis.

    Without effect in tests marked ``inductor``, and under ``--inductor``.
    """
    if request.config.getoption("--inductor") or request.node.get_closest_marker("inductor"):
        return
    interpret(monkeypatch)


@pytest.fixture
def take_turns(monkeypatch):
    """A function that makes so many sequences of a batch run at a time, wherever that may be, whatever it
    saves."""
    from streambp_compile.regions import batch_parts

    def take(at_once: int) -> None:
        monkeypatch.setattr(batch_parts, "WORTH", 10**9)
        monkeypatch.setattr(batch_parts, "sequences_at_once", lambda *_: at_once)

    return take


@pytest.fixture(scope="module")
def interpreted_together():
    """`interpreted`, for a file whose tests share what was compiled."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield
    torch._dynamo.reset()


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Run bodies node by node as they were lowered: most of the time goes into tracing them for Inductor."""
    from benchmarks import zoo
    from streambp_compile import internals

    patch.setattr(internals.chunk_bodies, "function_of", as_lowered)
    patch.setattr(internals.inductor, "compile_fx_inner", internals.inductor.compile_fx_inner)
    patch.setattr(internals.chunk_bodies, "COMPILED", INTERPRETED)
    patch.setattr(internals.stored_bodies, "is_on", lambda: False)
    patch.setattr(internals, "prepare_compiler", lambda: None)
    zoo.interpret_bodies()


@pytest.fixture(scope="session")
def ranks():
    """Two processes of one gloo group."""
    from benchmarks.ranks import Ranks

    group = Ranks(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def four_ranks():
    """Four processes of one gloo group."""
    from benchmarks.ranks import Ranks

    group = Ranks(4)
    yield group
    group.close()


def as_lowered(body, inputs):
    """In place of `internals.chunk_bodies.function_of`."""
    from torch._dynamo.utils import counters

    counters["streambp"]["bodies"] += 1
    interpreter = torch.fx.Interpreter(body.graph)
    return lambda args: copy.copy(interpreter).boxed_run(args)  # of its own for each of several threads


@pytest.fixture(autouse=True)
def no_function_given_up():
    """Models of tests share forwards, and a function that breaks its graph once breaks it again."""
    picked = sys.modules.get("streambp_compile.internals.row_picking")
    for functions in () if picked is None else (picked.BROKEN_THERE, picked.BRANCHING_THERE):
        functions.clear()

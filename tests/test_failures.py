"""What happens when something fails: in any stage of a compilation, and while a compiled body runs."""

import itertools
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F
from streambp_compile.passes.ir import CannotStream

from streambp_compile import backend, compiled_region, internals, pipeline, runtime
from streambp_compile.report import NotStreamed

TOKENS, WIDTH = 16, 8
pytestmark = pytest.mark.usefixtures("interpreted")


class Broken(Exception):
    pass


def loss_of(x, weight, head, labels):
    """A layer of attention and a head."""
    q, k, v = (x @ weight).split(WIDTH, -1)
    x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
    return F.cross_entropy((x @ head).flatten(0, 1), labels.flatten())


def inputs():
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    weight, head = (torch.randn(WIDTH, n, dtype=torch.float64, requires_grad=True) for n in (3 * WIDTH, 11))
    return x, weight, head, torch.randint(0, 11, (2, TOKENS))


def refusals(function, given, **options) -> list[str]:
    """The warnings of a compilation, whose gradients must be those of eager."""
    wanted = torch.autograd.grad(function(*given), given[1:3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(function, backend="streambp", options={"chunk_size": 5, **options})
        found = torch.autograd.grad(compiled(*given), given[1:3])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    return [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]


def failing(function, error: type[BaseException] = Broken):
    """The function, but for its first call."""
    calls = itertools.count()

    def fail(*args, **kwargs):
        if next(calls) == 0:
            raise error("a defect")
        return function(*args, **kwargs)

    return fail


def rewrites_with(index: int):
    return tuple((failing(rewrite) if i == index else rewrite, doing) for i, (rewrite, doing) in enumerate(backend.REWRITES))


BEFORE_REGIONS = {  # what fails → the stage that the warning names
    "find_axes": "finding the token dimension", "weight_views": "cutting the graph", "traits_of": "cutting the graph",
    "split": "cutting the graph", "postpone": "cutting the graph", "build_region": "linking regions", "region_text": "linking regions",
    "linked": "linking regions",
}
IN_A_REGION = {
    (pipeline, "normalize"): "normalising the joint graph", (pipeline, "unsort"): "normalising the joint graph",
    (pipeline, "Spread"): "following tokens", (pipeline, "analyze"): "following tokens", (pipeline, "verify_analysis"): "following tokens",
    (pipeline, "partition"): "assigning operations to sweeps", (pipeline, "is_linear"): "assigning operations to sweeps",
    (pipeline, "verify_program"): "writing chunk bodies", (pipeline, "lower"): "writing chunk bodies",
    (pipeline, "chunk_lengths"): "writing chunk bodies", (pipeline, "Runner"): "preparing the joint graph",
    (internals, "compile_body"): "compiling chunk bodies", (compiled_region, "cannot_tell"): "preparing the joint graph",
    (internals, "inline_numbers"): "preparing the joint graph", (compiled_region, "one_call"): "compiling the region",
    (internals, "aot_autograd"): "tracing the region", (internals, "decompositions"): "finding the token dimension",
}


def is_told(texts: list[str], stage: str) -> None:
    text, = texts
    assert stage in text and "Broken: a defect" in text and "please report" in text and "test_failures.py" in text


@pytest.mark.parametrize("index", range(len(backend.REWRITES)), ids=[doing for _, doing in backend.REWRITES])
def test_a_rewrite_that_fails_leaves_the_graph_to_inductor(monkeypatch, index):
    monkeypatch.setattr(backend, "REWRITES", rewrites_with(index))
    is_told(refusals(loss_of, inputs()), backend.REWRITES[index][1])


@pytest.mark.parametrize("name", BEFORE_REGIONS)
def test_what_fails_before_there_are_regions_leaves_the_graph_to_inductor(monkeypatch, name):
    monkeypatch.setattr(backend, name, failing(getattr(backend, name)))
    is_told(refusals(loss_of, inputs()), BEFORE_REGIONS[name])


@pytest.mark.parametrize("owner, name", IN_A_REGION, ids=[name for _, name in IN_A_REGION])
def test_what_fails_in_a_region_leaves_it_whole(monkeypatch, owner, name):
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    is_told(refusals(loss_of, inputs()), IN_A_REGION[owner, name])

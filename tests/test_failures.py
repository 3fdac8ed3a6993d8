"""What happens when something fails: in any stage of a compilation, and while a compiled body runs."""

import itertools
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_compile import NotStreamed, backend, internals, pipeline
from streambp_compile.regions import (
    candidate,
    compiled_region,
    joint_regions,
    region_drivers,
    region_programs,
)
from streambp_compile.runtime import runner

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
    return tuple(
        (failing(rewrite) if i == index else rewrite, doing)
        for i, (rewrite, doing) in enumerate(backend.REWRITES)
    )


BEFORE_REGIONS = {  # what fails → the phase that the warning names
    "find_axes": "finding the token dimension",
    "early_views": "cutting the graph",
    "traits_of": "cutting the graph",
    "split": "cutting the graph",
    "lazy_regions": "cutting the graph",
    "build_region": "linking regions",
    "region_text": "linking regions",
    "linked": "linking regions",
}
IN_A_REGION = {
    (pipeline, "normal_form"): "normalising the joint graph",
    (joint_regions, "TokenPropagation"): "following tokens",
    (joint_regions, "analyze"): "following tokens",
    (pipeline, "verify_analysis"): "following tokens",
    (region_programs, "partition"): "assigning operations to sweeps",
    (region_programs, "is_linear"): "assigning operations to sweeps",
    (pipeline, "verify_normalized"): "normalising the joint graph",
    (pipeline, "verify_program"): "assigning operations to sweeps",
    (pipeline, "plan"): "choosing chunk lengths",
    (pipeline, "verify_plan"): "choosing chunk lengths",
    (pipeline, "lower"): "writing chunk bodies",
    (pipeline, "verify_body"): "writing chunk bodies",
    (pipeline, "Runner"): "preparing the joint graph",
    (internals, "compile_body"): "compiling chunk bodies",
    (candidate, "cannot_tell"): "preparing the joint graph",
    (compiled_region, "target_of"): "preparing the joint graph",
    (region_drivers, "one_call"): "compiling the region",
    (internals, "aot_autograd"): "tracing the region",
    (internals.aten_graphs, "decompositions"): "finding the token dimension",
}


def is_told(texts: list[str], phase: str) -> None:
    (text,) = texts
    assert phase in text and "Broken: a defect" in text
    assert "Please report" in text and "test_failures.py" in text


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


@pytest.mark.quick
def test_strict_raises_and_keeps_the_cause(monkeypatch):
    monkeypatch.setattr(pipeline, "lower", failing(pipeline.lower))
    with pytest.raises(Exception, match="writing chunk bodies .Broken: a defect") as raised:
        refusals(loss_of, inputs(), strict=True)
    assert "NotStreamed" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("owner, name", [(backend, "split"), (pipeline, "lower")])
@pytest.mark.quick
def test_what_is_no_defect_is_not_swallowed(monkeypatch, owner, name, error):
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), error))
    with pytest.raises(BaseException) as raised:
        refusals(loss_of, inputs())
    assert error.__name__ in "".join(traceback.format_exception(raised.value))


def test_what_inductor_cannot_compile_either_is_the_users_own_error(monkeypatch):
    def broken(*args, **kwargs):
        raise Broken("no kernel")

    monkeypatch.setattr(internals.inductor, "compile_fx_inner", broken)
    monkeypatch.setattr(internals.chunk_bodies, "function_of", broken)
    monkeypatch.setattr(internals.chunk_bodies, "COMPILED", {})  # nothing that an earlier test has compiled
    with pytest.raises(Exception, match="no kernel"):
        refusals(loss_of, inputs())


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("error", [Broken, torch.OutOfMemoryError])
def test_an_error_of_a_running_body_names_tokens_region_and_lines(monkeypatch, error, direction):
    given = inputs()
    compiled = torch.compile(loss_of, backend="streambp", options={"chunk_size": 5})
    compiled(*given).backward()
    cut = runner.cut

    def broken(binding, source, chunk):
        if chunk.start == 5:
            raise error("in a kernel")
        return cut(binding, source, chunk)

    loss = compiled(*given) if direction == "backward" else None
    monkeypatch.setattr(runner, "cut", broken)
    with pytest.raises(error, match="in a kernel") as raised:
        loss.backward() if direction == "backward" else compiled(*given)
    notes = "\n".join(raised.value.__notes__)
    assert "tokens 5 to 9 of 16" in notes and f"in the {direction} of region" in notes
    assert "test_failures.py" in notes


def test_before_python_3_11_a_note_is_a_line_of_the_message(monkeypatch):
    class Old(RuntimeError):
        @property
        def add_note(self):
            raise AttributeError

    error = Old("out of memory", 3)
    runner.note(error, "in region 1")
    assert error.args == ("out of memory\nin region 1", 3)


def test_a_repeated_value_is_as_contiguous_as_that_of_eager():
    """Its decomposition once was an expanded view, and what viewed it failed while the region was traced."""

    def function(x, weight, head, labels):
        y = (x @ head).permute(1, 0, 2).unsqueeze(0).repeat(2, 1, 1, 1).view(-1, 2, 11)
        return loss_of(x, weight, head, labels) + y.square().sum()

    assert not any("internal error" in text for text in refusals(function, inputs()))


LAYOUTS = [
    lambda x: x,
    lambda x: x.permute(2, 0, 1),
    lambda x: x[:, ::2],
    lambda x: x[:, :1].expand(-1, 4, -1),
]
OPS = [
    lambda x: x.repeat(2, 1, 3),
    lambda x: x.repeat(2, 1, 1, 1),
    lambda x: x.mean((0, 1)),
    lambda x: x.mean(1, True),
    lambda x: x.var((0, 1)),
    lambda x: torch.var_mean(x, (0, 2))[0],
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_decompositions_of_ours_lay_values_out_as_the_ops_do(layout, op):
    x = layout(torch.randn(3, 4, 5))
    ours = make_fx(op, decomposition_table=internals.decompositions())(x)(x)
    torch.testing.assert_close(ours, op(x))
    assert ours.stride() == op(x).stride()


@pytest.mark.quick
def test_a_length_that_the_compiler_must_not_know_is_refused_by_name():
    x, weight = torch.randn(2, 20, 8, requires_grad=True), torch.randn(30, 8)

    def function(x):
        return (x @ weight.t()).logsumexp(-1).mean()

    (truth,) = torch.autograd.grad(function(x), x)
    torch._dynamo.decorators.mark_unbacked(x, 1)
    with pytest.warns(NotStreamed, match="A size is known only while the graph runs"):
        value = torch.compile(function, backend="streambp")(x)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], truth)


@torch.library.custom_op("streambp_tests::of_unknown_tokens", mutates_args=())
def of_unknown_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).cos()


@of_unknown_tokens.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("words, warned", [(11, True), (40000, False)])
def test_what_costs_little_of_a_step_is_in_the_report_alone(words, warned):
    """Beside the gradient of a wide head, a layer of some kilobytes is worth no warning."""

    def function(x, weight, head, labels):
        return loss_of(x + of_unknown_tokens(x), weight, head[:, :11], labels) + head.mean()

    x, weight, _, labels = inputs()
    head = torch.randn(WIDTH, words, dtype=torch.float64, requires_grad=True)
    assert bool(refusals(function, (x, weight, head, labels))) is warned
    with pytest.raises(BackendCompilerFailed, match="NotStreamed"):
        refusals(function, (x, weight, head, labels), strict=True)


@pytest.mark.parametrize("places", [lambda labels: labels, lambda labels: (labels + 1) % 11])
def test_a_weight_that_is_renormalised_before_it_is_read_is_no_layer_that_changes_its_input(places):
    def function(x, weight, table, labels):
        return loss_of(
            x + F.embedding(places(labels), table, max_norm=1.0), weight, x[0].mT[:, :11].clone(), labels
        )

    x, weight, _, labels = inputs()
    table = torch.randn(11, WIDTH, dtype=torch.float64, requires_grad=True)
    assert not [told for told in refusals(function, (x, weight, table, labels)) if "in place" in told]


def test_a_last_block_that_is_shorter_is_told_to_be_padded():
    def function(x, weight, head, labels):
        q, k, v = (x @ weight).split(WIDTH, -1)
        blocks = [(k[:, i : i + 5], v[:, i : i + 5], q[:, i : i + 5]) for i in range(0, TOKENS, 5)]
        done = [(b @ a.mT).tril() @ c for a, c, b in blocks]
        return F.cross_entropy((torch.cat(done, 1) @ head).flatten(0, 1), labels.flatten())

    (told,) = refusals(function, inputs())
    assert "a piece of the sequence" in told and "pad to whole blocks" in told

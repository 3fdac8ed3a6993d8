"""The planner: what a few layers say of a whole model, what training keeps, and what the command answers."""

import json
import re

import pytest
import torch
from models import Plain, ids_of
from torch import nn

from benchmarks.memory import peak
from streambp_compile.passes.planning.devices import REFERENCE_CPU, named
from streambp_compile.tools.plan.budgets import all_plans, fastest_within, frontier, longest
from streambp_compile.tools.plan.commands import main
from streambp_compile.tools.plan.fake_steps import simulating
from streambp_compile.tools.plan.fronts import Front, draw, text_of_front, values_of_front
from streambp_compile.tools.plan.layer_stacks import pattern, stack_of
from streambp_compile.tools.plan.options import tokens_of
from streambp_compile.tools.plan.sources import source_of, source_of_function
from streambp_compile.tools.plan.tables import Answer
from streambp_compile.tools.plan.training import SteadyBytes, freeze, state_of
from streambp_compile.tools.plan.whole_model import Prediction, Setting, Streaming, checkpointing

LENGTH, LAYERS, WIDTH, VOCABULARY = 300, 6, 64, 256
pytestmark = pytest.mark.usefixtures("interpreted")


class Causal(nn.Module):
    """`models.Plain` with its loss, as a user's function returns it."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.model = Plain(VOCABULARY, WIDTH, 4, layers)

    def forward(self, ids):
        return self.model(ids, ids)


def step(batch=1, tokens=LENGTH):
    return Causal(), torch.zeros((batch, tokens), dtype=torch.int64)


def setting(**changes):
    return Setting(source_of_function("step", step), REFERENCE_CPU, LENGTH, chunk_size=100, **changes)


def silent(text):
    """Tells nobody."""


@pytest.fixture
def streaming():
    with simulating(REFERENCE_CPU):
        yield Streaming(setting(), silent)


@pytest.mark.slow
def test_three_layers_tell_the_peak_of_six(streaming):
    assert streaming.setting.depths() == (2, 3)
    model, ids = Causal(), ids_of(1, LENGTH)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 100})
    measured = peak(lambda: compiled(ids).backward())
    assert abs(streaming.default.peak - measured) <= 0.02 * measured


@pytest.mark.slow
def test_plans_trade_memory_for_time(streaming):
    kept = streaming.keeping(len(streaming.levels))
    assert kept.peak > streaming.default.peak > streaming.offloaded.peak
    assert kept.seconds < streaming.default.seconds <= streaming.offloaded.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "offloaded", "kept"])
def test_a_few_layers_tell_what_all_layers_take(name, monkeypatch):
    def found():
        with simulating(REFERENCE_CPU):
            streaming = Streaming(setting(), silent)
            return streaming.keeping(2) if name == "kept" else getattr(streaming, name)

    few = found()
    monkeypatch.setattr("streambp_compile.tools.plan.layer_stacks.Stack.depths", lambda stack: (stack.depth,))
    whole = found()
    assert abs(few.peak - whole.peak) <= 0.002 * whole.peak
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-6)


def test_three_checkpointed_layers_tell_the_peak_of_six(monkeypatch):
    few = checkpointing(setting(), silent)
    monkeypatch.setattr("streambp_compile.tools.plan.layer_stacks.Stack.depths", lambda stack: (stack.depth,))
    whole = checkpointing(setting(), silent)
    assert few.peak == whole.peak and few.seconds == pytest.approx(whole.seconds, rel=1e-6)


@pytest.mark.parametrize(
    "kinds, found",
    [
        ("aaaaaaaa", (0, 1)),
        ("ddaaaaaa", (2, 1)),
        ("aabaabaa", (0, 3)),
        ("daabaabaab", (1, 3)),
        ("abcd", (3, 1)),
    ],
)
def test_the_pattern_of_layers(kinds, found):
    prefix, period = pattern(list(kinds))
    assert (prefix, period) == found


def test_layers_that_differ_in_a_number_are_of_another_kind():
    model = Causal(8)
    for i, layer in enumerate(model.model.layers):
        layer.window, layer.index = 128 if i % 4 < 3 else 0, i
    stack = stack_of(model)
    assert (stack.path, stack.depth, stack.prefix, stack.period) == ("model.layers", 8, 0, 4)


def test_state_is_counted_term_by_term():
    model = Causal().bfloat16()
    stack, elements = stack_of(model), sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = elements - LAYERS * layer
    assert state_of(model, stack, "adamw", 1) == SteadyBytes(
        2 * elements, 2 * elements, 4 * elements, 0, 0, *[elements] * 2
    )
    assert state_of(model, stack, "adamw32", 1).optimizer == 12 * elements
    shared = state_of(model, stack, "none", 4)
    assert shared.weights == -(-2 * elements // 4) and shared.optimizer == 0
    assert (shared.gathered, shared.reduced) == (2 * outside + 2 * 2 * layer, 2 * layer)


@pytest.mark.parametrize(
    "how, share", [("full", 1.0), ("head", 0.06), ("lora:4", 0.1), ("names:embed", 0.06)]
)
def test_what_is_trained(how, share):
    model = Causal()
    freeze(model, stack_of(model), how)
    learn, rest = ([p.numel() for p in model.parameters() if p.requires_grad is r] for r in (True, False))
    assert sum(learn) / (sum(learn) + sum(rest)) == pytest.approx(share, rel=0.5)


@pytest.mark.parametrize("optimum", [100, 700, 4096, 100_000])
@pytest.mark.parametrize("curve", [lambda t: 5 * t, lambda t: 300 + t + t * t / 50_000])
def test_the_search_ends_close_to_the_longest(optimum, curve):
    tried = []

    def peak_of(tokens):
        tried.append(tokens)
        return curve(tokens)

    found = longest(peak_of, int(curve(optimum)), 2048, 1)
    assert curve(found) <= curve(optimum) and curve(found) >= 0.98 * curve(optimum) and len(tried) <= 12


def test_a_plan_that_another_beats_is_not_on_the_frontier():
    plans = [
        Prediction(str(i), peak, seconds)
        for i, (peak, seconds) in enumerate([(1, 9), (3, 5), (2, 9), (4, 6), (5, 4)])
    ]
    assert [p.name for p in frontier(plans)] == ["0", "1", "4"]


def test_ways_to_say_a_number_of_tokens():
    assert [tokens_of(t) for t in ("512", "128k", "1M", "131_072")] == [512, 131072, 1 << 20, 131072]


TINY = dict(
    model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=128,
)  # fmt: skip


def test_the_command_line_answers_for_a_gpu_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    asked = [str(tmp_path), "--tokens", "300", "--gpu", "a100-40", "--optimizer", "none", "--shards", "2"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "A100-40" and found["dtype"] == "bfloat16"
    assert [plan["name"] for plan in found["plans"]] == ["checkpointing", "streambp"]
    assert all(plan["fits"] and plan["seconds"] > 0 for plan in found["plans"])
    assert any("128 positions" in note for note in found["notes"])


@pytest.mark.slow
def test_the_command_line_writes_a_page_of_the_whole_step(tmp_path, capsys):
    """All layers, each in the chain; and rounded layer inputs in a column that says what they are."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    page = tmp_path / "page.html"
    asked = [str(tmp_path), "--tokens", "300", "--gpu", "a100-40", "--no-checkpointing", "--lossy", "--json"]
    assert main([*asked, "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    default, rounded = found["plans"]
    assert rounded["name"] == "streambp, 8 bits" and rounded["peak"] <= default["peak"]
    assert any("gradients are not exact" in note for note in found["notes"])
    text = page.read_text(encoding="utf-8")
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["reports"]
    repeated = max(set(shown["chain"]), key=shown["chain"].count)
    assert shown["chain"].count(repeated) == TINY["num_hidden_layers"]
    assert shown["memory"]["bytes"] == default["peak"]


def test_names_of_models(tmp_path):
    pytest.importorskip("transformers")
    assert source_of("Qwen3Config").title == "Qwen3Config (qwen3)"
    assert source_of("qwen3").dtype is torch.bfloat16
    (tmp_path / "mine.py").write_text("def build():\n    return None\n")
    with pytest.raises(ValueError, match="must return a module and its inputs"):
        source_of(f"{tmp_path / 'mine.py'}:build").make(1, 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["qwen3", "--gpu", "h9000"], "Unknown device 'h9000'"),
        (["nowhere/config.json"], "does not exist"),
        (["qwen33"], "no model type 'qwen33'. Did you mean qwen3"),
        (["no_such_module:build"], "cannot be imported"),
        (["json:nothing"], "no function 'nothing'"),
        (["qwen3", "--memory", "much"], "memory must be a size"),
        (["qwen3", "--batch", "0"], "batch must be at least 1"),
        (["qwen3", "--html", "page.pdf"], "name of a page ends in .html; got page.pdf"),
        (["qwen3", "--html", "a.html", "--compare", "h100,h200,t4"], "one GPU, or two side by side; got 3"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("plan: ") and message in told and len(told.splitlines()) == 1


def no_loss(tokens):
    return nn.Linear(8, 8), torch.zeros((1, tokens, 8))


def nothing_streams(tokens):
    return nn.Sequential(nn.Linear(8, 1), nn.Flatten(0), nn.Softmax(0)), torch.zeros((1, 8))


def test_a_module_without_a_loss_is_told():
    with pytest.raises(ValueError, match="does not return a loss"), simulating(REFERENCE_CPU):
        Streaming(Setting(source_of_function("no_loss", no_loss), REFERENCE_CPU, 64), silent)


def fixed():
    return Causal(), torch.zeros((1, 8), dtype=torch.int64)


def test_a_function_without_lengths_has_no_longest(monkeypatch, capsys):
    monkeypatch.setattr("streambp_compile.tools.plan.sources.function_of", lambda *_: fixed)
    assert main(["mine:fixed", "--longest"]) == 2
    assert "takes no tokens" in capsys.readouterr().err


def test_kernels_of_a_gpu_are_chosen_on_fake_tensors():
    with simulating(named("H100")):
        streaming = Streaming(
            Setting(source_of_function("step", step), named("H100"), 512, dtype=torch.bfloat16), silent
        )
        assert "attention kernel: cudnn (" in str(streaming.deepest.report)


class Known:
    """Plans as `Streaming` has them, with peaks and seconds that are known."""

    levels = range(3)
    offloaded, default = Prediction("offload", 40, 12.0), Prediction("default", 100, 10.0)

    def shorter(self, part):
        return Prediction(f"1/{part}", 30 - part, 12.0 + part)

    def keeping(self, count):
        return Prediction(f"{count} kept", 100 + 50 * count, 10.0 - count)


@pytest.mark.parametrize(
    "room, seconds", [(1000, 7.0), (200, 8.0), (175, 8.5), (100, 10.0), (70, 11.0), (28, 14.0), (15, 28.0)]
)
def test_the_fastest_plan_within_a_budget(room, seconds):
    found = fastest_within(Known(), room)
    assert found.seconds == pytest.approx(seconds, abs=0.01) and found.peak <= room
    assert found.options[0][0] == "memory_budget"


def test_no_plan_is_within_too_small_a_budget():
    assert fastest_within(Known(), 13) is None


def test_all_plans_are_printed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plans = (Prediction("checkpointing", 300, 9.0), *all_plans(Known()))
    front = Front(Answer(setting(), 200, 0, ()), plans, tuple(frontier(list(plans))))
    assert [p.name for p in front.best[-3:]] == ["1 kept", "2 kept", "3 kept"]
    lines = text_of_front(front).splitlines()
    assert any(line.startswith("checkpointing  ") and "*" not in line for line in lines)
    assert any(line.startswith("3 kept") and "*" in line and "█" in line for line in lines)
    assert sum(p["best"] for p in values_of_front(front)["plans"]) == len(front.best)
    draw([front], str(tmp_path / "front.svg"))
    assert (tmp_path / "front.svg").read_text().count("<svg") == 1

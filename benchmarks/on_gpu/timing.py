"""Seconds of a step, every method beside checkpointing in the same process, round by round in turn.

A model of a few layers is timed, and the same model without layers: their difference over the number of
layers is the time of a layer, the second the time of embedding, head and loss. Both together give the time of
the whole model, marked as an estimate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import CHECKPOINTING, LIGER, METHODS, STREAMBP, Step, method_of
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage, allocate_gradients, twin
from benchmarks.on_gpu.worker import Order
from benchmarks.tables import GIB, markdown

DEEP, BARE = "layers and head", "head alone"
LIMITS = {STREAMBP: 150, "flash": 80, LIGER: 80, "inductor": 130}  # seconds; a fixed chunk length gets 70


def jobs(settings: Settings) -> list[Job]:
    """In order of worth: the two that matter on all shapes, then fixed chunk lengths, Liger and Inductor on
    the main shape."""
    scale = getattr(scales, settings.scale)
    main, others = scale.shapes[0], scale.shapes[1:]
    both = [(STREAMBP, main), ("flash", main), *((STREAMBP, shape) for shape in others), (LIGER, main)]
    both += [(f"{STREAMBP}:chunk_size={chunk}", main) for chunk in scale.chunks]
    both += [("inductor", main), *((name, shape) for shape in others for name in ("flash", LIGER))]
    return [
        job(name, shape, scale)
        for name, shape in both
        if settings.kind == "cuda" or name != "flash" or settings.kind == "fake"
    ]


def job(method: str, shape: scales.Shape, scale: scales.Scale) -> Job:
    lengths = scale.lengths if method in METHODS else scale.chunk_lengths
    cases = tuple({"shape": shape.name, "method": method, "tokens": tokens} for tokens in lengths)
    return Job(f"{shape.name} {method}", cases, LIMITS.get(method, 70))


class Contender:
    """A method on a model of some layers and on the same model without layers."""

    def __init__(self, stage: Stage, name: str, model, make: Callable, depth: int):
        self.steps = {
            DEEP: Step(stage, method_of(name), twin(model, lambda: make(depth))),
            BARE: Step(stage, method_of(name), twin(model, lambda: make(0))),
        }


class Session:
    """One method and the reference beside it, on one model."""

    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage
        self.model = None

    def prepare(self, case: dict) -> None:
        shape = next(s for s in self.order.scale.shapes if s.name == case["shape"])
        longest = max(self.order.scale.lengths)

        def make(layers: int):
            from transformers import Qwen3ForCausalLM

            return Qwen3ForCausalLM(shape.config(layers, longest)).train()

        self.shape = shape
        model = self.stage.build(lambda: make(shape.timed), torch.bfloat16)
        with self.stage.inside():
            allocate_gradients(model)
        self.ours = Contender(self.stage, case["method"], model, make, shape.timed)
        self.reference = Contender(self.stage, CHECKPOINTING, model, make, shape.timed)
        self.model = model  # last: a method that is not here fails in every case

    def run(self, case: dict) -> Iterator[dict]:
        if self.model is None:
            self.prepare(case)
        elif method_of(case["method"]).compiler == "streambp":
            for step in self.ours.steps.values():
                step.compile()
        self.model.zero_grad(set_to_none=False)
        ids = self.stage.ids(self.shape.vocabulary, case["tokens"])
        deep, found = self.ours.steps[DEEP], {"layers": self.shape.timed}
        if not self.stage.executes:
            found |= {
                "peak": deep.predicted(ids),
                "predicted": True,
                "reference_peak": self.reference.steps[DEEP].predicted(ids),
            }
        else:
            found["first"] = self.stage.seconds(lambda: deep.take(ids))
            found["peak"] = self.stage.peak(lambda: deep.take(ids), self.model)
            found |= self.beside(ids)
        yield found | {"chunks": deep.chunk_lengths()}

    def beside(self, ids: torch.Tensor) -> dict:
        """Seconds of both methods, at both depths; the reference's layers alone where its logits do not
        fit."""
        found: dict = {}
        steps = {
            depth: {"ours": functools.partial(step.take, ids)} for depth, step in self.ours.steps.items()
        }
        deep = self.reference.steps[DEEP]
        peak = self.reference_peak(deep, ids)
        if peak is None:  # what the failed step held is free only now
            self.stage.release()
            found["reference_headless"] = True
            steps[DEEP]["reference"] = functools.partial(deep.take, ids, deep.layers_alone)
            steps[DEEP]["reference"]()
        else:
            found["reference_peak"] = peak
            for depth, step in self.reference.steps.items():
                steps[depth]["reference"] = functools.partial(step.take, ids)
        for step in steps[BARE].values():
            step()
        return found | {depth: self.alternating(steps[depth]) for depth in (DEEP, BARE)}

    def reference_peak(self, step: Step, ids: torch.Tensor) -> int | None:
        try:
            return self.stage.peak(lambda: step.take(ids), self.model)
        except torch.OutOfMemoryError:
            return None

    def alternating(self, steps: dict[str, Callable]) -> dict[str, list[float]]:
        """Seconds of every step, once a round, every second round in reverse; fewer rounds where time runs
        out."""
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(self.order.rounds):
            if number and self.order.left() <= 0:
                break
            for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
                seconds[name].append(self.stage.seconds(steps[name]))
        return seconds


# Tables


def whole(deep: float, bare: float, timed: int, layers: int) -> tuple[float, float]:
    """Seconds of a layer, and of a model of ``layers`` layers, from those of ``timed`` layers with head and
    of the head alone."""
    layer = (deep - bare) / timed
    return layer, bare + layers * layer


def tables(findings: list[dict], settings: Settings) -> str:
    scale = getattr(scales, settings.scale)
    return "\n\n".join(
        table([f for f in findings if f["case"]["shape"] == shape.name], shape) for shape in scale.shapes
    )


def table(findings: list[dict], shape: scales.Shape) -> str:
    heads = [
        "method",
        "rows per chunk",
        "tokens",
        "step s",
        "checkpointing s",
        "ratio",
        "layer ms",
        "its ratio",
        "head and loss ms",
        f"{shape.layers} layers s",
        "its ratio",
        "peak GiB",
        "checkpointing GiB",
        "first step s",
    ]
    order = sorted(findings, key=lambda f: f["case"]["tokens"])  # stable: methods stay in order of worth
    rows = [row(f, shape) for f in order if not why(f)]
    notes = [
        f"- {method_of(f['case']['method']).title}, {f['case']['tokens']} tokens: {why(f)}"
        for f in order
        if why(f)
    ]
    headless = any(f.get("reference_headless") for f in findings)
    about = (
        f"{shape.name}, bfloat16, one sequence; steps of {shape.timed} layers and of none, "
        f"medians of rounds in turn with {METHODS[CHECKPOINTING].title}, the reference of every ratio; "
        f"{shape.layers} layers are an estimate from the two. "
        "Peaks are above weights and gradients."
        + " Where the reference's logits do not fit, only its layers are timed."
        * headless
    )
    return "\n\n".join([about, markdown(heads, rows, texts=2), *(["\n".join(notes)] if notes else [])])


def row(found: dict, shape: scales.Shape) -> list[str]:
    case = found["case"]
    named = [
        method_of(case["method"]).title,
        ", ".join(map(str, found.get("chunks", ()))) or "–",
        str(case["tokens"]),
    ]
    if DEEP not in found:
        peaks = [gib(found, "peak"), gib(found, "reference_peak")]
        return [*named, *["–"] * 8, *peaks, "–"]
    ours = {depth: statistics.median(found[depth]["ours"]) for depth in (DEEP, BARE)}
    layer, model = whole(ours[DEEP], ours[BARE], found["layers"], shape.layers)
    return [
        *named,
        f"{ours[DEEP]:.3f}",
        *compared(found, ours, layer, model, shape),
        gib(found, "peak"),
        gib(found, "reference_peak"),
        f"{found['first']:.1f}",
    ]


def gib(found: dict, key: str) -> str:
    return "–" if found.get(key) is None else f"{found[key] / GIB:.4g}"


def compared(found: dict, ours: dict, layer: float, model: float, shape: scales.Shape) -> list[str]:
    """Columns from the reference's step to the whole model's ratio."""
    bare = f"{1e3 * ours[BARE]:.1f}"
    deep = statistics.median(found[DEEP]["reference"])
    if found.get("reference_headless"):
        reference = deep / found["layers"]
        return ["–", "–", f"{1e3 * layer:.1f}", f"{layer / reference:.3f}", bare, f"{model:.2f}", "–"]
    reference, all_of_it = whole(
        deep, statistics.median(found[BARE]["reference"]), found["layers"], shape.layers
    )
    pairs = [a / b for a, b in zip(found[DEEP]["ours"], found[DEEP]["reference"])]
    return [
        f"{deep:.3f}",
        f"{statistics.median(pairs):.3f}",
        f"{1e3 * layer:.1f}",
        f"{layer / reference:.3f}",
        bare,
        f"{model:.2f}",
        f"{model / all_of_it:.3f}",
    ]

"""The duel: streambp beside what people use instead, on the same weights in one process, step by step.

Every contender takes steps of a model of a few layers and of the same model without layers. Their difference
over the number of layers is the time of a layer. What a layer holds from its forward to its backward is
measured too, so that time and memory of the whole model follow, marked as estimates: a contender that keeps
everything is fast in few layers, and does not fit in many. ``--only whole`` takes steps of the whole model
instead, in the memory of an H100 whatever the GPU is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import CHECKPOINTING, LIGER, STREAMBP, NotHere, Step, method_of
from benchmarks.on_gpu.profiling import on_gpu
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage, allocate_gradients, twin
from benchmarks.on_gpu.worker import Order, shortened
from benchmarks.tables import GIB, markdown
from streambp_compile.memory.spare_memory import UNSEEN

PEERS = (CHECKPOINTING, LIGER, "layers-liger", "budget-0.5", "kept-liger", "flash-liger")
PROFILED = (STREAMBP, f"{STREAMBP}:", "layers-liger")
H100 = int(79.2 * GIB)  # bytes that torch finds on one
RATE = 790e12  # FLOP per second of a large product in bfloat16, as an H100 was measured


def jobs(settings: Settings) -> list[Job]:
    """The duel of a few layers; that of the whole model if it is named."""
    scale = getattr(scales, settings.scale)
    kept = f"{STREAMBP}:memory_budget={scale.kept}"
    ours = (STREAMBP, kept, f"{kept},chunk_size={scale.duelled // 2}")
    found = [Job("layers", ({"layers": scale.duel.timed, "methods": (*ours, *PEERS)},), 400)]
    if "whole" in settings.only:
        found = [Job("whole", ({"layers": scale.duel.layers, "methods": (STREAMBP, *PEERS)},), 480)]
    return found


class Contender:
    """A method on the model, and on the same model without layers."""

    def __init__(self, stage: Stage, name: str, model, make, depth: int):
        self.name, self.found = name, {"method": name}
        self.steps = {
            "deep": Step(stage, method_of(name), twin(model, lambda: make(depth))),
            "bare": Step(stage, method_of(name), twin(model, lambda: make(0))),
        }
        self.seconds: dict[str, list[float]] = {depth: [] for depth in self.steps}


class Session:
    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage
        self.shape, self.tokens = order.scale.duel, order.scale.duelled
        torch._dynamo.config.recompile_limit = 64  # every contender compiles the same code for itself

    def run(self, case: dict) -> Iterator[dict]:
        from transformers import Qwen3ForCausalLM

        def make(layers: int):
            return Qwen3ForCausalLM(self.shape.config(layers, self.tokens)).train()

        if self.stage.kind == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, H100 / total))
        self.model = self.stage.build(lambda: make(case["layers"]), torch.bfloat16)
        with self.stage.inside():
            allocate_gradients(self.model)
        self.ids = self.stage.ids(self.shape.vocabulary, self.tokens)
        there: list[Contender] = []
        for name in case["methods"]:
            try:
                there.append(Contender(self.stage, name, self.model, make, case["layers"]))
            except NotHere as missing:
                yield {"method": name, "missing": str(missing)}
        if not self.stage.executes:
            for contender in there:
                contender.steps["deep"].compile()
                yield {"method": contender.name, "predicted": contender.steps["deep"].predicted(self.ids)}
            return
        for contender in list(there):
            if self.order.left() < 60:
                there.remove(contender)
                yield {"method": contender.name, "left": "not run: no time left"}
            elif not self.begins(contender):
                there.remove(contender)
                yield contender.found
            else:
                yield contender.found
        for number in range(self.order.rounds):
            for contender in there if number % 2 == 0 else reversed(there):
                self.stage.release()  # nobody is timed while it gives back what another's sizes left
                for depth, step in contender.steps.items():
                    step.take(self.ids)
                    contender.seconds[depth].append(self.stage.seconds(lambda: step.take(self.ids)))
            if self.order.left() <= 20:
                break
        for contender in there:
            yield {"method": contender.name, "layers": case["layers"], **contender.seconds}
        for contender in there:
            if contender.name.startswith(PROFILED) and self.stage.kind == "cuda" and self.order.left() > 15:
                yield {"method": contender.name, **on_gpu(contender.steps["deep"], self.ids)}

    def begins(self, contender: Contender) -> bool:
        """Compile a contender and measure its memory. Did it run?"""
        step, found = contender.steps["deep"], contender.found
        try:
            found["first"] = self.stage.seconds(lambda: step.take(self.ids))
            if step.report is not None:
                for _ in range(UNSEEN):  # after so many steps, streambp takes what it has seen to be free
                    step.take(self.ids)
            found["peak"] = self.stage.peak(lambda: step.take(self.ids), self.model)
            for _ in range(UNSEEN * (step.report is not None)):
                contender.steps["bare"].take(self.ids)
            found["saved"] = self.saved(contender)
            found["chunks"] = step.chunk_lengths()
            found["notes"] = [] if step.report is None else list(step.report.notes)
        except Exception as error:  # noqa: BLE001 (whatever the reason, it is a row of the table)
            found["failed"] = shortened(error)
            error.__traceback__ = None
        self.model.zero_grad(set_to_none=False)
        self.stage.release()
        return "failed" not in found

    def saved(self, contender: Contender) -> int:
        """Bytes that wait for the backward when the forward has ended, without those of the bare model."""
        return self.waiting(contender.steps["deep"]) - self.waiting(contender.steps["bare"])

    def waiting(self, step: Step) -> int:
        if self.stage.kind != "cuda":
            return 0
        before = torch.cuda.memory_allocated()
        with step.attending(), step.budgeted():
            loss = step.loss(self.ids)
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        return held


# Tables


def flop_of(shape: scales.Shape, tokens: int, layers: int) -> float:
    """FLOP of a step as the model defines them, nothing recomputed: six for each weight and token, and for
    attention three times the two products over half of all pairs."""
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    layer = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.feed_forward
    attention = 3 * 2 * tokens**2 * queries
    return 6 * tokens * (layers * layer + shape.hidden * shape.vocabulary) + layers * attention


def tables(findings: list[dict], settings: Settings) -> str:
    scale = getattr(scales, settings.scale)
    shape, tokens = scale.duel, scale.duelled
    methods = list(dict.fromkeys(f["method"] for f in findings if "method" in f))
    merged = {m: {k: v for f in findings if f.get("method") == m for k, v in f.items()} for m in methods}
    rows = sorted((m for m in merged if merged[m].get("deep")), key=lambda m: of_whole(merged[m], shape)[0])
    reference = merged.get(CHECKPOINTING, {})
    heads = [
        "method",
        "step s",
        "layer ms",
        "head and loss ms",
        f"{shape.layers} layers s",
        "its ratio",
        f"% of {RATE / 1e12:.0f} TFLOP/s",
        "peak GiB",
        "a layer keeps GiB",
        f"{shape.layers} layers GiB",
        "first step s",
        "rows per chunk",
    ]
    layers = next((f["layers"] for f in findings if "layers" in f), shape.timed)
    about = (
        f"{shape.name}, bfloat16, one sequence of {tokens} tokens, loss and backward; steps of {layers} "
        "layers and of none, every contender once a round, every second round in reverse, medians. The whole "
        "model is an estimate from the two where fewer layers were timed; its ratio is to checkpointing. "
        "Peaks are above weights and gradients, for which the whole model takes "
        f"{held(shape) / GIB:.1f} GiB more."
    )
    texts = [row(m, merged[m], reference, shape, tokens) for m in rows]
    notes = [f"- {method_of(m).title}: {why(f)}" for m, f in merged.items() if why(f)]
    notes += [f"- {method_of(m).title}: {note}" for m, f in merged.items() for note in f.get("notes", ())]
    parts = [about, markdown(heads, texts), "\n".join(notes)]
    for m in methods:
        if "kernels" in merged[m]:
            parts += [profile(m, merged[m])]
    return "\n\n".join(filter(None, parts))


def held(shape: scales.Shape) -> int:
    """Bytes of weights and gradients in bfloat16."""
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    layer = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.feed_forward
    return 4 * (shape.layers * layer + (1 if shape.tied else 2) * shape.vocabulary * shape.hidden)


def of_whole(found: dict, shape: scales.Shape) -> tuple[float, float, float]:
    """Seconds of the whole model, of a layer, and of the head."""
    deep, bare = (statistics.median(found[key]) for key in ("deep", "bare"))
    layer = (deep - bare) / found["layers"]
    return bare + shape.layers * layer, layer, bare


def row(method: str, found: dict, reference: dict, shape: scales.Shape, tokens: int) -> list[str]:
    whole, layer, bare = of_whole(found, shape)
    kept = found["saved"] / found["layers"]
    ratio = f"{whole / of_whole(reference, shape)[0]:.3f}" if reference.get("deep") else "–"
    return [
        method_of(method).title,
        f"{statistics.median(found['deep']):.3f}",
        f"{1e3 * layer:.1f}",
        f"{1e3 * bare:.1f}",
        f"{whole:.3f}",
        ratio,
        f"{100 * flop_of(shape, tokens, shape.layers) / whole / RATE:.1f}",
        f"{found['peak'] / GIB:.2f}",
        f"{kept / GIB:.3f}",
        f"{(found['peak'] + (shape.layers - found['layers']) * kept) / GIB:.1f}",
        f"{found['first']:.1f}",
        ", ".join(map(str, found.get("chunks", ()))) or "–",
    ]


def profile(method: str, found: dict) -> str:
    kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in found["kinds"].items())
    idle = 100 * (1 - found["busy"] / found["span"])
    kernels = [
        [name, f"{ms:.2f}", f"{100 * ms / found['total']:.1f} %", str(calls)]
        for name, ms, calls in found["kernels"]
    ]
    return "\n\n".join(
        [
            f"{method_of(method).title}, one step of {found['layers']} layers: {found['span']:.1f} ms from "
            f"the first kernel to the last, idle {idle:.1f} %, {found['launches']} launches; milliseconds by "
            f"kind: {kinds}.",
            markdown(["kernel", "ms", "share", "calls"], kernels),
        ]
    )

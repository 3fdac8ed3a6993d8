"""Where the time and the memory of one step go: kernels, idle time, launches, and a picture of the memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import CHECKPOINTING, STREAMBP, Step, method_of
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage, allocate_gradients
from benchmarks.on_gpu.worker import Order
from benchmarks.tables import GIB, MIB, markdown

SHOWN = 25  # kernels in a table
POINTS = 3000  # of a memory curve that are kept
KINDS = (  # a kernel is of the first kind whose pattern its name matches
    ("attention", r"flash|fmha|sdpa|attention|mha_"),
    ("products", r"gemm|cutlass|cublas|nvjet|xmma|splitk|gemv|(^|:)(add|b?b?)mm"),
    ("Triton", r"^triton_"),
    ("copies", r"memcpy|copy|catarray|(^|:)(cat|clone)$"),
    ("fills", r"memset|fill|zero"),
    ("additions", r"functor_add|addfunctor|(^|:)add_?$|add_kernel"),
)


def jobs(settings: Settings) -> list[Job]:
    return [Job(name, ({"method": name},), 240) for name in (STREAMBP, CHECKPOINTING)]


class Session:
    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage
        self.shape, self.tokens = order.scale.shapes[0], order.scale.profiled

    def run(self, case: dict) -> Iterator[dict]:
        from transformers import Qwen3ForCausalLM

        config = self.shape.config(self.shape.timed, self.tokens)
        model = self.stage.build(lambda: Qwen3ForCausalLM(config).train(), torch.bfloat16)
        with self.stage.inside():
            allocate_gradients(model)
        step = Step(self.stage, method_of(case["method"]), model)
        ids = self.stage.ids(self.shape.vocabulary, self.tokens)
        if not self.stage.executes:
            predicted = step.predicted(ids)
            yield {"predicted": predicted, "chunks": step.chunks()}
            return
        for _ in range(2):
            step.take(ids)
        found = {"seconds": self.stage.seconds(lambda: step.take(ids)), "chunks": step.chunks()}
        yield found | (on_gpu(step, ids) if self.stage.kind == "cuda" else on_cpu(step, ids))
        from benchmarks.memory import live_memory

        yield {"curve": thinned(live_memory(lambda: step.take(ids), self.stage.device))}


def on_gpu(step: Step, ids: torch.Tensor) -> dict:
    """Every kernel of one step, from the device's own record; the host's side is not recorded, so that it
    takes its usual time."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.take(ids)
        torch.cuda.synchronize()
    events = [
        e
        for e in profile.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()
    ]
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        times[event.name()] += event.duration_ns() / 1e6
        calls[event.name()] += 1
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
    return {
        "launches": len(events),
        "busy": busy(spans) / 1e6,
        "span": (max(e for _, e in spans) - spans[0][0]) / 1e6 if spans else 0.0,
        **shares(times, calls),
    }


def on_cpu(step: Step, ids: torch.Tensor) -> dict:
    """The operators of one step, by the time that each takes itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step.take(ids)
    rows = profile.key_averages()
    return shares(
        Counter({row.key: row.self_cpu_time_total / 1e3 for row in rows}),
        Counter({row.key: row.count for row in rows}),
    )


def busy(spans: list[tuple[int, int]]) -> int:
    """Nanoseconds in which at least one of the spans, sorted by their starts, is open."""
    total, end = 0, 0
    for start, stop in spans:
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


def shares(times: Counter, calls: Counter) -> dict:
    """The kernels that take longest, and milliseconds by kind."""
    kinds: Counter[str] = Counter()
    for name, milliseconds in times.items():
        kinds[kind_of(name)] += milliseconds
    return {
        "kernels": [
            [name[:120], milliseconds, calls[name]] for name, milliseconds in times.most_common(SHOWN)
        ],
        "kinds": dict(kinds.most_common()),
        "total": sum(times.values()),
    }


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most twice `POINTS` of a curve, its highest and lowest moments among them."""
    size = max(1, -(-len(curve) // POINTS))
    groups = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [
        point
        for group in groups
        for point in sorted({max(group, key=lambda p: p[1]), min(group, key=lambda p: p[1])})
    ]


# Tables and the picture


def tables(findings: list[dict], settings: Settings) -> str:
    scale = getattr(scales, settings.scale)
    shape = scale.shapes[0]
    curves = {f["job"]: f["curve"] for f in findings if "curve" in f}
    drawn = picture(curves, settings.folder / "gpu-memory.png") if curves else "No memory was recorded."
    about = (
        f"{shape.name}, {shape.timed} layers with head and loss, bfloat16, {scale.profiled} tokens, "
        "one step after three. "
        "Idle: the part of the time between the first and the last kernel in which none runs."
    )
    rows = [summary(f) for f in findings if "curve" not in f]
    heads = [
        "method",
        "step ms",
        "idle",
        "launches",
        "chunks",
        "launches per chunk",
        *(kind for kind, _ in KINDS),
        "other",
        "predicted MiB",
    ]
    parts = [about, markdown(heads, rows), drawn]
    for f in findings:
        if "kernels" in f:
            kernels = [
                [name, f"{ms:.2f}", f"{100 * ms / f['total']:.1f} %", str(calls)]
                for name, ms, calls in f["kernels"]
            ]
            parts += [f"{method_of(f['job']).title}:", markdown(["kernel", "ms", "share", "calls"], kernels)]
    return "\n\n".join(parts)


def summary(f: dict) -> list[str]:
    title = method_of(f["job"]).title + f": {why(f)}" * bool(why(f))
    launches, chunks, total = f.get("launches"), f.get("chunks"), f.get("total")
    kinds = [
        f"{100 * f['kinds'].get(kind, 0.0) / total:.1f} %" if total else "–"
        for kind in (*(kind for kind, _ in KINDS), "other")
    ]
    return [
        title,
        f"{1e3 * f['seconds']:.1f}" if "seconds" in f else "–",
        f"{100 * (1 - f['busy'] / f['span']):.1f} %" if f.get("span") else "–",
        str(launches or "–"),
        str(chunks or "–"),
        f"{launches / chunks:.1f}" if launches and chunks else "–",
        *kinds,
        f"{f['predicted'] / MIB:.1f}" if f.get("predicted") is not None else "–",
    ]


def picture(curves: dict[str, list], path: Path) -> str:
    """Draw live memory over a step, above weights and gradients; returns what the page says of it."""
    try:
        import matplotlib
    except ImportError:
        return "The picture of the memory needs matplotlib; the curves are in gpu.jsonl."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, curve in curves.items():
        seconds, held = zip(*curve)
        peak = max(held) / GIB
        (line,) = axes.plot(
            seconds,
            [h / GIB for h in held],
            drawstyle="steps-post",
            linewidth=1,
            label=f"{method_of(name).title}: {peak:.3g} GiB",
        )
        axes.fill_between(
            seconds, [h / GIB for h in held], step="post", alpha=0.25, color=line.get_color(), linewidth=0
        )
    axes.set(xlabel="seconds into the step", ylabel="live memory above weights and gradients, GiB")
    axes.set_xlim(left=0)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"![live memory over a step]({path.name})"

"""The longest sequence that fits under a cap, found by search, and the peak that a simulation predicts beside
the measured one.

The peak of a step grows along a straight line with its tokens, so the search goes where the line through the
shortest and the longest step that fitted meets the cap, and closes in from both sides. Its long steps are cut
short once the last two layers have gone backward: by then every moment that could be the highest has passed,
because the layers before them hold less. The longest one is then taken whole, if time is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import CHECKPOINTING, LIGER, STREAMBP, Step, method_of
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage, allocate_gradients
from benchmarks.on_gpu.worker import Order
from benchmarks.tables import GIB, MIB, markdown

PREDICTION = "prediction"
IN_MEMORY = f"{STREAMBP}:offload=False"  # the default plan: nothing on the host, nothing kept beyond it
PRECISION = (
    0.02  # the search ends when the shortest length that failed is so close to the longest that fitted
)
LIMITS = {STREAMBP: 270, CHECKPOINTING: 80, LIGER: 120}  # seconds


def jobs(settings: Settings) -> list[Job]:
    searches = [Job(name, ({"method": name},), LIMITS[name]) for name in (STREAMBP, CHECKPOINTING, LIGER)]
    return [*searches, Job(PREDICTION, ({"method": PREDICTION},), 180)]


class Enough(Exception):
    """Raised by a hook to end a step whose highest moment has passed."""


def next_length(fits: dict[int, int], failed: int | None, capacity: int, grain: int) -> int | None:
    """The next length to try, a multiple of ``grain`` tokens; None if the search is over.

    fits      length → peak bytes of the steps that fitted, at least two
    failed    the shortest length that did not fit
    capacity  bytes that a peak may reach
    """
    best = max(fits)
    if failed is not None and failed - best <= max(grain, PRECISION * best):
        return None
    shortest = min(fits)
    slope = max((fits[best] - fits[shortest]) / (best - shortest), 0.1 * fits[best] / best)
    guess = int((best + (capacity - fits[best]) / slope) * (1 - PRECISION / 4)) // grain * grain
    if guess <= best:  # it fitted where the line said that it would be full: look a little further
        guess = best + max(int(PRECISION * best), grain) // grain * grain
    if failed is not None and guess >= failed:
        guess = (best + failed) // 2 // grain * grain
    return max(guess, best + grain)


def search(
    attempt: Callable[[int], int | None], first: tuple[int, int], capacity: int, grain: int
) -> Iterator[tuple[int, int | None]]:
    """Try lengths until the longest that fits is known; yields each with its peak, None if it did not fit."""
    fits: dict[int, int] = {}
    failed: int | None = None
    for tokens in first:
        peak = attempt(tokens)
        yield tokens, peak
        if peak is None:
            return
        fits[tokens] = peak
    while (tokens := next_length(fits, failed, capacity, grain)) is not None:
        peak = attempt(tokens)
        yield tokens, peak
        if peak is None:
            failed = tokens
        else:
            fits[tokens] = peak


class Session:
    """One method's search, or the predictions for the lengths that streambp's search measured."""

    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage
        self.shape = order.scale.shapes[0]

    def run(self, case: dict) -> Iterator[dict]:
        if case["method"] == PREDICTION:
            yield from self.predictions()
        elif not self.stage.executes:
            yield {
                "tokens": self.order.scale.first[0],
                "layers": 2,
                "predicted": predicted(
                    self.shape,
                    self.order.scale.first[0],
                    2,
                    IN_MEMORY if case["method"] == STREAMBP else case["method"],
                ),
            }
        else:
            yield from self.lengths(case["method"])

    def lengths(self, name: str) -> Iterator[dict]:
        self.prepare(name)
        yield {"held": self.held, "cap": self.cap}
        best = None
        trials = search(self.attempt, self.order.scale.first, self.cap - self.held, self.order.scale.grain)
        for tokens, peak in trials:
            if peak is not None:
                best = tokens
            yield {
                "tokens": tokens,
                "peak": peak,
                "reserved": self.stage.reserved(),
                "whole": not self.cut,
                "seconds": self.seconds,
            }
            if self.order.left() <= self.seconds:  # the next one takes about as long
                return
        if best is not None and self.cut_once and self.order.left() > 5 * self.seconds:
            peak = self.attempt(best, whole=True)
            yield {
                "tokens": best,
                "peak": peak,
                "reserved": self.stage.reserved(),
                "whole": True,
                "seconds": self.seconds,
            }

    def prepare(self, name: str) -> None:
        from transformers import Qwen3ForCausalLM

        self.cap = self.order.scale.cap
        if self.stage.kind == "cuda":
            whole = torch.cuda.get_device_properties(0).total_memory
            self.cap = min(self.cap, whole)  # a GPU of 80 GB has a little less
            torch.cuda.set_per_process_memory_fraction(self.cap / whole)
        config = self.shape.config(self.shape.layers, 1 << 20)
        self.model = self.stage.build(lambda: Qwen3ForCausalLM(config).train(), torch.bfloat16)
        allocate_gradients(self.model)
        self.held = 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.step = Step(self.stage, method_of(IN_MEMORY if name == STREAMBP else name), self.model)
        self.cut = self.cut_once = False
        self.seconds = 0.0
        watched = self.model.model.layers[-2].input_layernorm.weight
        watched.register_post_accumulate_grad_hook(self.stop_here)

    def stop_here(self, _weight: torch.Tensor) -> None:
        if self.cut:
            raise Enough

    def attempt(self, tokens: int, whole: bool = False) -> int | None:
        """The peak of a step above weights and gradients; None where it does not fit under the cap."""
        self.cut = not whole and tokens not in self.order.scale.first
        self.cut_once |= self.cut
        self.stage.release()
        peak: list[int] = []

        def step() -> None:
            peak.append(self.stage.peak(lambda: self.take(tokens), self.model))

        try:
            self.seconds = self.stage.seconds(step)
        except torch.OutOfMemoryError:
            return None
        return peak[0] if self.held + peak[0] <= self.cap else None

    def take(self, tokens: int) -> None:
        ids = self.stage.ids(self.shape.vocabulary, tokens)
        try:
            self.step.take(ids)
        except Enough:
            pass

    def predictions(self) -> Iterator[dict]:
        """The peak of the whole model, for the shortest and the longest step of streambp that fitted."""
        measured = [
            f["tokens"] for f in self.order.known if f["job"] == STREAMBP and f.get("peak") is not None
        ]
        for tokens in sorted({min(measured), max(measured)}) if measured else self.order.scale.first:
            yield {"tokens": tokens, "predicted": whole_peak(self.shape, tokens)}


def whole_peak(shape: scales.Shape, tokens: int) -> int:
    """The predicted peak of all layers, from models of a few.

    Once one more layer adds at least its saved input, the peak lies where the saved inputs of all layers are
    alive, and equal layers add equal bytes: the rest is a straight line.
    """
    less = predicted(shape, tokens, 1)
    for layers in range(2, shape.layers + 1):
        more = predicted(shape, tokens, layers)
        if more - less >= 2 * tokens * shape.hidden:
            return more + (shape.layers - layers) * (more - less)
        less = more
    return less


def predicted(shape: scales.Shape, tokens: int, layers: int, method: str = IN_MEMORY) -> int | None:
    """Bytes above weights and gradients that a step will hold, without running it: on fake tensors, of a GPU
    where torch has one."""
    from transformers import Qwen3ForCausalLM

    stage = Stage("fake", "cuda" if torch.cuda.is_available() else "cpu")
    model = stage.build(lambda: Qwen3ForCausalLM(shape.config(layers, 1 << 20)).train(), torch.bfloat16)
    torch._dynamo.reset()
    with stage.inside():
        allocate_gradients(model)
    return Step(stage, method_of(method), model).predicted(stage.ids(shape.vocabulary, tokens))


# Tables


def tables(findings: list[dict], settings: Settings) -> str:
    scale = getattr(scales, settings.scale)
    shape = scale.shapes[0]
    rows = [summary(name, findings) for name in (STREAMBP, CHECKPOINTING, LIGER)]
    cap = next((f["cap"] for f in findings if "cap" in f), scale.cap)
    about = (
        f"{shape.name}, {shape.layers} layers, bfloat16, one sequence, loss and backward; all memory of "
        f"the process under {cap / GIB:.4g} GiB, weights and gradients included. *Does not fit*: the "
        "shortest length that was tried and did not. Other columns are of the longest that fitted; its "
        "peak is above weights and gradients, and the prediction was made without running anything."
    )
    heads = [
        "method",
        "longest, tokens",
        "does not fit",
        "× checkpointing",
        "peak GiB",
        "predicted GiB",
        "predicted / measured",
        "held GiB",
        "reserved GiB",
        "step s",
    ]
    ratios(rows)
    return "\n\n".join([about, markdown(heads, rows), "Every step:", trials(findings)])


def summary(name: str, findings: list[dict]) -> list[str]:
    mine = [f for f in findings if f["job"] == name]
    steps = [f for f in mine if f.get("tokens") and "predicted" not in f]
    fitted = [f for f in steps if f["peak"] is not None]
    title = method_of(name).title + ", see below" * any(map(why, mine))
    if not fitted:
        return [title, *["–"] * 9]
    best = max(fitted, key=lambda f: (f["tokens"], f["whole"]))
    too_long = min((f["tokens"] for f in steps if f["peak"] is None), default=None)
    foreseen = next(
        (f["predicted"] for f in findings if f["job"] == PREDICTION and f.get("tokens") == best["tokens"]),
        None,
    )
    foreseen = foreseen if name == STREAMBP else None
    held = next(f["held"] for f in mine if "held" in f)
    return [
        title,
        str(best["tokens"]),
        str(too_long or "not reached"),
        "–",
        f"{best['peak'] / GIB:.4g}",
        f"{foreseen / GIB:.4g}" if foreseen else "–",
        f"{foreseen / best['peak']:.3f}" if foreseen else "–",
        f"{held / GIB:.4g}",
        f"{best['reserved'] / GIB:.4g}" if best["reserved"] else "–",
        f"{best['seconds']:.1f}" if best["whole"] else "cut short",
    ]


def ratios(rows: list[list[str]]) -> None:
    """Fill in each longest length as a multiple of checkpointing's."""
    reference = rows[1][1]
    for row in rows:
        if reference.isdigit() and row[1].isdigit() and row is not rows[1]:
            row[3] = f"{int(row[1]) / int(reference):.2f}"


def trials(findings: list[dict]) -> str:
    rows = []
    for f in findings:
        if f.get("tokens"):
            peak = f.get("peak", f.get("predicted"))
            kind = "whole" if f.get("whole") else "cut short"
            if "predicted" in f:
                kind = f"predicted, {f.get('layers', 'all')} layers"
            rows.append(
                [
                    f["job"],
                    str(f["tokens"]),
                    "does not fit" if peak is None and "peak" in f else f"{peak / MIB:.1f}" if peak else "–",
                    kind,
                    f"{f['seconds']:.1f}" if "seconds" in f else "–",
                ]
            )
    notes = [f"- {f['job']}: {why(f)}" for f in findings if why(f)]
    return "\n\n".join(
        [
            markdown(["job", "tokens", "peak MiB", "step", "seconds"], rows),
            *(["\n".join(notes)] if notes else []),
        ]
    )

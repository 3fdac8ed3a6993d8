"""Gradients against a float64 truth: every dtype and kernel, and what else must hold on a GPU.

The models are small and random (benchmarks/zoo.py builds them), the truth is eager's float64 gradient of the
same weights, computed on the same device. An error is the norm of the difference over the norm of the truth,
over all parameters together.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import Compiled, NotHere, compile_streamed, predicted_by
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage
from benchmarks.on_gpu.worker import Order
from benchmarks.tables import MIB, markdown
from streambp_compile.reporting.report import Report

ANY_NUMBER_AT_A_TIME = True  # its jobs, as no seconds are measured
ALLOWED = 1.05  # of eager's own error in the same dtype
SAME_BITS = 1e-4  # float32 gradients that differ by no more than this drew the same dropout
SCALED = {"float16": 256.0}  # losses are scaled where small gradients would be rounded to zero
DTYPES = ("bfloat16", "float32", "float16")
OWN = "its own choice"
KERNELS = {
    OWN: None,
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "composed": "MATH",
}


@dataclass(frozen=True)
class Model:
    """A model of the zoo: family, its model class, what its batch holds, settings beside the common ones;
    ``own`` is hand-written."""

    family: str
    head: str | None = None
    batch: Callable = zoo.bare
    settings: tuple[tuple[str, object], ...] = ()
    own: bool = False

    def build(self, scale: scales.Scale, tokens: int):
        """The model, the arguments of a batch, and the function from both to the loss."""
        if self.own:
            return zoo.own(self.family)(tokens)
        hidden, feed_forward, width = scale.width
        common = dict(hidden_size=hidden, intermediate_size=feed_forward, num_attention_heads=hidden // width)
        heads = (
            dict(num_key_value_heads=max(hidden // width // 2, 1), head_dim=width)
            if self.head is None
            else {}
        )
        return zoo.hugging_face(
            self.family, self.head, batch=self.batch, **common, **heads, **dict(self.settings)
        )(tokens)


# All experts are asked, so that a rounded router cannot send a token elsewhere: no two precisions could be
# compared otherwise.
EXPERTS = (("num_experts_per_tok", 4), ("moe_intermediate_size", 64))
MODELS = {
    "Llama": Model("llama"),
    "Qwen3 with padding": Model("qwen3", batch=zoo.texts),
    "Gemma 3 with a window": Model("gemma3_text"),
    "Qwen3 mixture of experts": Model("qwen3_moe", settings=EXPERTS),
    "bidirectional BERT": Model("bert", "BertForMaskedLM", batch=zoo.texts),
    "hand-written nanoGPT": Model("nanogpt", own=True),
}
DROPPING = Model("phi", settings=(("resid_pdrop", 0.1), ("embd_pdrop", 0.1)))


def jobs(settings: Settings) -> list[Job]:
    """The main model under every kernel first, a job for each dtype, then the checks, then the other
    models."""
    main, *others = MODELS
    by_dtype = [
        Job(f"{main} {dtype}", tuple(case for case in cases(main, settings) if case["dtype"] == dtype), 240)
        for dtype in DTYPES
    ]
    checks = Job("checks", tuple({"check": name} for name in CHECKS), 240)
    return [*by_dtype, checks, *(Job(name, cases(name, settings), 240) for name in others)]


def cases(name: str, settings: Settings) -> tuple[dict, ...]:
    """Its dtypes with streambp's own kernel, then every other kernel that takes them.

    A CPU has one, which nothing switches off. Where nothing runs or models are tiny, the first model alone is
    done in every way.
    """
    first = name == next(iter(MODELS))
    dtypes = DTYPES if first or settings.scale == "REAL" else DTYPES[:1]
    kernels = ("flash", "cudnn", "efficient", "composed") if settings.kind != "cpu" else ()
    plain = [(dtype, OWN) for dtype in dtypes]
    forced = [(dtype, kernel) for kernel in kernels for dtype in dtypes if takes(kernel, dtype)]
    if not first:
        forced = [
            (dtype, kernel) for dtype, kernel in forced if dtype == "bfloat16" and settings.scale == "REAL"
        ]
    return tuple({"model": name, "dtype": dtype, "kernel": kernel} for dtype, kernel in (*plain, *forced))


def takes(kernel: str, dtype: str) -> bool:
    return dtype != "float32" or kernel not in ("flash", "cudnn")


class Trial:
    """A model in some dtype, ready for steps; its losses are scaled."""

    def __init__(
        self, stage: Stage, scale: scales.Scale, model: Model, dtype: str, tokens: int | None = None
    ):
        self.stage, self.scale, self.kind = stage, scale, model
        with stage.outside():
            module, batch, self.loss = model.build(scale, tokens or scale.checked[0])
            module.train().to(getattr(torch, dtype))
        self.model = stage.placed(module)
        self.data = stage.batch(batch)
        self.factor = SCALED.get(dtype, 1.0)

    def batch(self, tokens: int) -> dict:
        with self.stage.outside():
            batch = self.kind.build(self.scale, tokens)[1]
        return self.stage.batch(batch)

    def loss_of(self, **batch) -> Tensor:
        return self.loss(self.model, **batch) * self.factor

    def truth(self, *batches: dict) -> list[Tensor]:
        """Eager's gradients in float64 of the same weights, added up over batches."""
        double = copy.deepcopy(self.model).double()
        if hasattr(getattr(double, "config", None), "_experts_implementation"):
            double.config._experts_implementation = "batched_mm"  # grouped products have no float64
        return gradients(double, lambda **batch: self.loss(double, **batch) * self.factor, *batches)

    def eager(self, *batches: dict) -> list[Tensor]:
        return gradients(self.model, self.loss_of, *batches)

    def streamed(self, chunk: int | None = None, kernel: str = OWN) -> Streamed:
        return Streamed(self.stage, self.loss_of, self.model, chunk or self.scale.chunk, kernel)


class Streamed:
    """A loss compiled by streambp, with the report and the warnings of its compilation."""

    def __init__(self, stage: Stage, loss: Callable, model: nn.Module, chunk: int, kernel: str = OWN):
        self.stage, self.model, self.kernel = stage, model, kernel
        torch._dynamo.reset()
        self.loss, self.report = compile_streamed(stage, loss, chunk_size=chunk)
        self.warned: list[str] = []

    def gradients(self, *batches: dict) -> list[Tensor]:
        with warnings.catch_warnings(record=True) as caught, attending(self.stage, self.kernel):
            warnings.simplefilter("always")
            found = gradients(self.model, self.loss, *batches)
        self.warned += [zoo.shortened(str(w.message)) for w in caught if w.category.__name__ == "NotStreamed"]
        return found

    def facts(self) -> dict:
        return facts_of(self.report) | {"warned": list(dict.fromkeys(self.warned))}


def facts_of(report: Report) -> dict:
    """How much streams, and by which kernels."""
    done = sum(r.times for r in report.regions if r.streamed is not None or r.joint is None)
    return {"streamed": f"{done}/{sum(r.times for r in report.regions)}", "kernels": kernels_of(report)}


def attending(stage: Stage, kernel: str):
    """Leaves one kernel of ``scaled_dot_product_attention`` switched on, which is what streambp's choice of
    kernels heeds as well; and plain products, for calls with a mask that it does not take."""
    if KERNELS[kernel] is None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, KERNELS[kernel]), SDPBackend.MATH])


def kernels_of(report: Report) -> list[str]:
    """The kernels that attend in chunk bodies, by the name that the operators take."""
    found: dict[str, None] = {}
    for region in report.regions:
        for schedule in filter(None, (region.forward, region.backward)):
            for body in schedule.bodies:
                for node in body.graph.graph.nodes:
                    if "attention" in str(node.target):
                        found.update(dict.fromkeys(a for a in node.args if isinstance(a, str)))
    return list(found)


def gradients(model: nn.Module, loss: Callable, *batches: dict) -> list[Tensor]:
    """The gradients of all parameters after a step for each batch."""
    model.zero_grad()
    for batch in batches:
        loss(**batch).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    difference = sum(
        (f.double() - t.double()).square().sum().item() for f, t in zip(found, truth, strict=True)
    )
    return math.sqrt(difference / sum(t.double().square().sum().item() for t in truth))


def compared(truth: list[Tensor], eager: list[Tensor], ours: list[Tensor]) -> dict:
    """Both errors, over all parameters and of the worst one."""
    found = {
        "eager": error(eager, truth),
        "ours": error(ours, truth),
        "eager_worst": zoo.largest_error(eager, truth),
        "ours_worst": zoo.largest_error(ours, truth),
    }
    return found | {"passed": found["ours"] <= ALLOWED * found["eager"]}


class Session:
    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage

    def run(self, case: dict) -> Iterator[dict]:
        """The findings of one case; where nothing runs, what is known once the model has been compiled."""
        try:
            with self.stage.inside():
                yield self.found(case)
        except Compiled as end:
            yield facts_of(end.report) | {"predicted": predicted_by(end.report)}

    def found(self, case: dict) -> dict:
        if "check" in case:
            return CHECKS[case["check"]](self.stage, self.order.scale)
        trial = Trial(self.stage, self.order.scale, MODELS[case["model"]], case["dtype"])
        ours = trial.streamed(kernel=case["kernel"])
        found = ours.gradients(trial.data)
        return compared(trial.truth(trial.data), trial.eager(trial.data), found) | ours.facts()


# Checks: each a function of stage and sizes, which returns whether it passed and one line of what was seen.


def no_synchronisation(stage: Stage, scale: scales.Scale) -> dict:
    """The second step of three models under torch's debug mode, which raises where the host waits for the
    device."""
    if stage.kind == "cpu":
        raise NotHere("a CPU is never waited for")
    failed = []
    for name in ("Llama", "Qwen3 with padding", "Qwen3 mixture of experts"):
        trial = Trial(stage, scale, MODELS[name], "bfloat16")
        ours = trial.streamed()
        ours.gradients(trial.data)
        stage.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours.gradients(trial.data)
        except RuntimeError as problem:
            failed.append(f"{name}: {str(problem).splitlines()[0]}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": not failed, "seen": "; ".join(failed) or "three models, none waits"}


def three_lengths(stage: Stage, scale: scales.Scale) -> dict:
    """Lengths behind the second, at which torch makes the length a symbol, compile no chunk body, and all are
    as exact as the first."""
    from torch._dynamo.utils import counters

    trial = Trial(stage, scale, MODELS["Llama"], "bfloat16")
    ours, counts, errors = trial.streamed(), [], []
    for tokens in (*scale.checked, scale.checked[0] - 7):
        batch = trial.batch(tokens)
        found = ours.gradients(batch)
        counts.append(counters["streambp"]["bodies"])
        errors.append(compared(trial.truth(batch), trial.eager(batch), found))
    return errors[1] | {
        "passed": counts[1] == counts[2] and all(e["passed"] for e in errors),
        "seen": f"bodies compiled after each of three lengths: {counts}",
    }


def same_dropout(stage: Stage, scale: scales.Scale) -> dict:
    """Two chunk lengths draw the same bits from the same seed, another seed draws others."""
    trial, found = Trial(stage, scale, DROPPING, "float32"), []
    for chunk, seed in ((scale.chunk, 3), (scale.other_chunk, 3), (scale.other_chunk, 4)):
        ours = trial.streamed(chunk)
        torch.manual_seed(seed)
        found.append(ours.gradients(trial.data))
    same, other = error(found[1], found[0]), error(found[2], found[0])
    return {
        "passed": same < SAME_BITS < other,
        "seen": f"difference {same:.1e}, with another seed {other:.1e}",
        **ours.facts(),
    }


def under_autocast(stage: Stage, scale: scales.Scale) -> dict:
    """Weights in float32, products in bfloat16."""
    trial = Trial(stage, scale, MODELS["Llama"], "float32")
    plain = trial.loss_of

    def loss_of(**batch):
        with torch.autocast(stage.device, torch.bfloat16):
            return plain(**batch)

    ours = Streamed(stage, loss_of, trial.model, scale.chunk)
    found = ours.gradients(trial.data)
    return (
        compared(trial.truth(trial.data), gradients(trial.model, loss_of, trial.data), found) | ours.facts()
    )


def accumulation(stage: Stage, scale: scales.Scale) -> dict:
    """Two batches add up in the gradients before they are read."""
    trial = Trial(stage, scale, MODELS["Llama"], "bfloat16")
    batches, ours = (trial.data, trial.batch(scale.checked[1])), trial.streamed()
    found = ours.gradients(*batches)
    return compared(trial.truth(*batches), trial.eager(*batches), found) | ours.facts()


class Head(nn.Module):
    """A head and its loss; the hidden states are a parameter, so that their gradient is compared as well."""

    def __init__(self, rows: int, width: int, words: int):
        super().__init__()
        make = torch.Generator().manual_seed(5)
        self.hidden = nn.Parameter(torch.randn(1, rows, width, generator=make))
        self.weight = nn.Parameter(torch.randn(words, width, generator=make) / math.sqrt(width))

    def forward(self, labels: Tensor) -> Tensor:
        logits = nn.functional.linear(self.hidden, self.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)


def wide_head(stage: Stage, scale: scales.Scale) -> dict:
    """A head of 151936 words with its loss, alone."""
    rows, width, words = scale.head
    with stage.outside():
        head = Head(rows, width, words).bfloat16()
        labels = torch.randint(words, (rows,), generator=torch.Generator().manual_seed(6))
    model, labels = stage.placed(head), stage.batch({"labels": labels})
    ours = Streamed(stage, lambda labels: model(labels), model, scale.chunk)
    found = ours.gradients(labels)
    double = copy.deepcopy(model).double()

    def truth(labels: Tensor) -> Tensor:  # `Head.forward` rounds logits to float32
        return nn.functional.cross_entropy((double.hidden @ double.weight.T).flatten(0, 1), labels)

    return compared(gradients(double, truth, labels), gradients(model, model, labels), found) | ours.facts()


CHECKS: dict[str, Callable[[Stage, scales.Scale], dict]] = {
    "second step without synchronisation": no_synchronisation,
    "a third length compiles no body": three_lengths,
    "head and loss, 151936 words": wide_head,
    "autocast": under_autocast,
    "gradients added up over two batches": accumulation,
    "dropout, two chunk lengths": same_dropout,
}


# Tables


def tables(findings: list[dict], settings: Settings) -> str:
    scale = getattr(scales, settings.scale)
    about = (
        f"{scale.checked[0]} tokens in chunks of {scale.chunk}, two sequences. "
        "Errors of all gradients together against eager in float64; "
        f"passed means at most {ALLOWED} times eager's own error in the same dtype."
    )
    rows = [model_row(f) for f in findings if "model" in f["case"]]
    checks = [check_row(f) for f in findings if "check" in f["case"]]
    heads = [
        "model",
        "dtype",
        "kernel asked for",
        "kernels taken",
        "passed",
        "eager's error",
        "streambp's error",
        "ratio",
        "worst, eager",
        "worst, streambp",
        "regions streamed",
        "notes",
    ]
    failed = [f for f in findings if f.get("passed") is False or "failed" in f]
    verdict = f"{len(findings)} rows, {len(failed)} failed or not passed."
    return "\n\n".join(
        [
            about,
            verdict,
            markdown(heads, rows, texts=5),
            markdown(["check", "passed", "seen"], checks, texts=3),
        ]
    )


def model_row(f: dict) -> list[str]:
    case = f["case"]
    notes = "; ".join(filter(None, (why(f), *f.get("warned", ()), predicted_text(f))))
    return [
        case["model"],
        case["dtype"],
        case["kernel"],
        ", ".join(f.get("kernels", ())) or "–",
        passed(f),
        *errors(f),
        f.get("streamed", "–"),
        notes,
    ]


def errors(f: dict) -> list[str]:
    if "ours" not in f:
        return ["–"] * 5
    return [
        f"{f['eager']:.2e}",
        f"{f['ours']:.2e}",
        f"{f['ours'] / f['eager']:.3f}" if f["eager"] else "–",
        f"{f['eager_worst']:.1e}",
        f"{f['ours_worst']:.1e}",
    ]


def check_row(f: dict) -> list[str]:
    seen = [
        f.get("seen", ""),
        f"errors {f['eager']:.2e} eager, {f['ours']:.2e} streambp" if "ours" in f else "",
        why(f),
        *f.get("warned", ()),
        predicted_text(f),
    ]
    return [f["case"]["check"], passed(f), "; ".join(filter(None, seen))]


def predicted_text(f: dict) -> str:
    if f.get("predicted") is None:
        return ""
    return f"compiled, predicted peak {f['predicted'] / MIB:.1f} MiB"


def passed(f: dict) -> str:
    return {True: "yes", False: "**no**", None: "**no**" if "failed" in f else "–"}[f.get("passed")]

"""Every class of transformers' auto mappings: exact or not, streamed or not, at what cost, and why not.

    python benchmarks/transformers_classes.py                            what has not run yet, then the page
    python benchmarks/transformers_classes.py --only causal              one kind
    python benchmarks/transformers_classes.py --only masked/bert,t5      some of their families
    python benchmarks/transformers_classes.py --jobs 8 --limit 90        eight processes, 90 seconds each
    python benchmarks/transformers_classes.py --page                     only the page, of what has run

A class is built from its own configuration, the smallest that builds and that eager runs. Its inputs follow
from the signature of its forward. Both are tried in turn, so that no more is known here of one family than
settings that `benchmarks.zoo` has for it. What eager cannot run is a row too.

Each class is a process of its own. Answers are appended to a file of JSON lines, and what stands there does
not run again. Chunk bodies run node by node, so that peaks are upper bounds. *Error*: the largest relative
difference of a gradient from eager's in float64, over two lengths, of which chunks divide neither. *Graphs*:
how many Dynamo makes, and at how many places it breaks them, beside those of ``aot_eager``. *Peak*: of one
step at a third length, as a part of eager's and of eager's with every layer checkpointed. *First call*:
seconds of the processor, beside ``aot_eager``'s, which compiles nothing either. ``--limit`` counts the same.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import zoo  # noqa: E402
from benchmarks.processes import first_line  # noqa: E402
from benchmarks.tables import markdown  # noqa: E402

LENGTHS, LONG, CHUNK = (77, 53), 512, 24
BUSY = 20  # by how much other processes may slow a row down
LARGEST = 50_000_000  # parameters of a model that is built
KINDS = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "sequence-to-sequence": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "sequence-classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "question-answering": ("QUESTION_ANSWERING",),
    "multiple-choice": ("MULTIPLE_CHOICE",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "video-classification": ("VIDEO_CLASSIFICATION",),
    "image-text-to-text": ("IMAGE_TEXT_TO_TEXT",),
    "speech": ("SPEECH_SEQ_2_SEQ",),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "ctc": ("CTC",),
    "time-series": ("TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION", "TIME_SERIES_CLASSIFICATION"),
}
# What encoders of images and sound have in their configurations, beside what `zoo.SMALL` names.
ENCODERS = dict(
    image_size=32,
    patch_size=8,
    depth=2,
    embed_dim=64,
    out_hidden_size=64,
    projection_dim=64,
    num_frames=4,
    max_source_positions=64,
    num_mel_bins=16,
    prediction_length=16,
    context_length=64,
)
# What a width for each stage is called, and the largest that stays: float64 convolutions are slow.
WIDTHS, WIDEST = ("_dim", "_dims", "_sizes", "_channels"), 64
FEW = dict(num_hidden_layers=2, num_layers=2, vocab_size=1024, use_cache=False)


@dataclass(frozen=True)
class Class:
    """A model class, as the auto mapping of a kind names it for a family."""

    kind: str
    family: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.family}/{self.name}"


def classes() -> list[Class]:
    from transformers.models.auto import modeling_auto

    found = []
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            named = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
            for family, names in named.items():
                names = names if isinstance(names, tuple) else (names,)
                found += [Class(kind, family, name) for name in names]
    return list(dict.fromkeys(found))


def in_turn(rows: Sequence[Class]) -> list[Class]:
    """Order classes so that each family runs once before any runs twice, and kinds take turns."""
    of_family, of_kind = Counter[str](), Counter[tuple[int, str]]()
    places = {}
    for row in rows:
        nth = of_family[row.family]
        places[row] = (nth, of_kind[nth, row.kind])
        of_family[row.family] += 1
        of_kind[nth, row.kind] += 1
    return sorted(rows, key=places.__getitem__)


# Models


def configurations(configuration) -> Iterator:
    """Configurations of a class, the smallest first."""
    family = {**zoo.DENSE, **zoo.MOE, **zoo.RECURRENT}.get(configuration.model_type, {})
    given = {k: v for k, v in family.items() if k != "experts"}
    try:
        small = shrunk(configuration, ENCODERS, widths=True)
    except Exception as error:  # noqa: BLE001 (not even the defaults of some are sound)
        raise zoo.NotRun(first_line(error)) from error
    yield lambda: configuration(**{**small, **given})
    yield lambda: configuration(**shrunk(configuration, ENCODERS))
    for fewer in without_one(small):
        yield functools.partial(configuration, **fewer)
    yield lambda: configuration(**shrunk(configuration, {}))
    yield lambda: configuration(**{k: v for k, v in FEW.items() if hasattr(configuration(), k)})
    yield configuration


def shrunk(configuration, encoders: dict, widths: bool = False) -> dict:
    """Settings of a configuration and of those in it; ``widths``: those that differ between parts, too."""
    known = configuration()
    given = {k: v for k, v in encoders.items() if isinstance(getattr(known, k, None), int)}
    if widths:
        given |= {k: narrowed(v) for k, v in vars(known).items() if is_listed(k, v)}
        given |= {k: small_of(k) for k, v in vars(known).items() if type(v) is int and small_of(k)}
    found = zoo.settings(configuration, given)
    for name in getattr(configuration, "sub_configs", {}):
        part = getattr(known, name, None)
        if part is not None:
            found[name] = {**shrunk(type(part), encoders, widths), "model_type": part.model_type}
    return found


def is_listed(name: str, values: object) -> bool:
    """Is this setting a width for each stage, or another of `zoo.SMALL` that differs between layers?"""
    if not isinstance(values, (tuple, list)) or not values or any(type(v) is not int for v in values):
        return False
    return name in zoo.SMALL or name.endswith(WIDTHS)


def narrowed(widths: Sequence[int]) -> list[int]:
    """Widths divided by one power of two, so that what divides one of them still does."""
    halvings = max(0, (max(widths) - 1) // WIDEST).bit_length()
    return [width >> halvings or 1 for width in widths]


def small_of(name: str) -> int | None:
    """What `zoo.SMALL` has for a setting of a part: ``encoder_layers`` for ``speech_encoder_layers``."""
    names = (small for small in zoo.SMALL if "_" in small and name.endswith(f"_{small}"))
    found = zoo.SMALL.get(max(names, key=len, default=""))
    return found if type(found) is int and name not in zoo.SMALL else None


def without_one(settings: dict) -> Iterator[dict]:
    """Settings that lack one of these, or of those in one: a part may demand what it has by default."""
    for name, value in settings.items():
        yield {k: v for k, v in settings.items() if k != name}
        if isinstance(value, dict):
            yield from ({**settings, name: part} for part in without_one(value) if "model_type" in part)


def model_of(row: Class, make: Callable):
    """The model of a configuration, in training mode. Raises ValueError where it is too large."""
    import torch
    import transformers

    config = make()
    for part in (config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))):
        if part is not None:
            complete(part)
    built = getattr(transformers, row.name)
    if built.config_class is getattr(config, "sub_configs", {}).get("text_config"):
        config = config.get_text_config()
    with torch.device("meta"):
        count = sum(p.numel() for p in built(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return built(config).train()


def complete(config) -> None:
    """What no configuration needs to be built, and a model to run."""
    config.use_cache = False
    for name in [n for n in vars(config) if n.endswith("layerdrop")]:
        setattr(config, name, 0.0)  # layers that are skipped by chance differ from step to step
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 1
    rotary = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rotary:  # which share the dimensions of a head
        half = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
        rotary["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


# Inputs


def setting(config, *names: str, default: object = None) -> object:
    """The first of some settings that a configuration, or one in it, has."""
    parts = [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))]
    found = (getattr(part, name, None) for name in names for part in parts if part is not None)
    return next((value for value in found if value is not None), default)


def batches(row: Class, model, length: int, size: int = 2) -> Iterator[dict]:
    """Inputs of a model, by the signature of its forward, in the layouts that there are for them."""
    import torch

    make, config = torch.Generator().manual_seed(2), model.config
    known, main = set(inspect.signature(model.forward).parameters), model.main_input_name
    if row.kind in ("image-text-to-text", "causal") and "input_ids" in known:
        main = "input_ids"
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[-1, -length // 4 :] = 0
    image = setting(config, "image_size", "input_size", default=32)
    height, width = image if isinstance(image, (tuple, list)) else (image, image)
    channels = setting(config, "num_channels", "in_channels", default=3)
    mels = setting(
        config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim"
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    layouts: dict[str, list[Callable]] = {
        "input_ids": [lambda: torch.randint(3, words(config), (size, length), generator=make)],
        "pixel_values": [
            lambda: normal(size, channels, height, width),
            lambda: normal(size, setting(config, "num_frames", default=4), channels, height, width),
        ],
        "pixel_values_videos": [
            lambda: normal(size, setting(config, "frames_per_clip", default=4), 3, height, width)
        ],
        "input_features": [
            lambda: normal(size, mels or 80, length * 2),
            lambda: normal(size, length, mels or 80),
            lambda: normal(size, mels or 80, 2 * setting(config, "max_source_positions", default=length)),
        ],
        "input_values": [
            lambda: normal(size, length * math.prod(setting(config, "conv_stride", default=(320,))) + 160),
            lambda: normal(size, setting(config, "max_length", default=length), mels or 80),
        ],
        "past_values": [
            lambda: normal(size, past(config), setting(config, "num_input_channels", default=1)),
            lambda: normal(size, past(config)),
        ],
    }
    if main not in layouts:
        raise ValueError(f"no inputs are known for {main}")
    for layout in layouts[main]:
        batch = {main: layout()}
        if main == "input_ids" and row.kind == "multiple-choice":
            batch = {main: batch[main].unsqueeze(1).repeat(1, 2, 1)}
        if "attention_mask" in known and main == "input_ids":
            batch["attention_mask"] = (
                mask.view(size, 1, -1).repeat(1, 2, 1) if batch[main].dim() == 3 else mask
            )
        for other in sorted(needed(model) & set(layouts) - {main}):
            batch[other] = layouts[other][0]()
        if "bbox" in known:
            corner = torch.randint(0, 300, (size, length, 2), generator=make)
            batch["bbox"] = torch.cat((corner, corner + 20), -1)
        if main == "past_values":
            batch |= beside_past(config, known, batch[main], normal)
        batch |= labels(row, known, model, batch[main], mask, make)
        yield batch
        if "attention_mask" in batch:
            yield {k: v for k, v in batch.items() if k != "attention_mask"}


def needed(model) -> set[str]:
    """Inputs that the forward of a model asks for by its signature."""
    given = inspect.signature(model.forward).parameters.values()
    return {p.name for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


def words(config) -> int:
    return setting(config, "vocab_size", default=1024)


def past(config) -> int:
    lags = setting(config, "lags_sequence", default=(0,))
    return setting(config, "context_length", default=64) + max(lags)


def beside_past(config, known: set[str], values, normal: Callable) -> dict:
    """Time features and masks of a series, and its future."""
    import torch

    steps, ahead = values.shape[1], setting(config, "prediction_length", default=16)
    features = setting(config, "num_time_features", default=0)
    found = dict(
        past_time_features=normal(len(values), steps, features),
        future_time_features=normal(len(values), ahead, features),
        past_observed_mask=torch.ones_like(values),
        future_values=normal(len(values), ahead, *values.shape[2:]),
    )
    return {name: value for name, value in found.items() if name in known}


def labels(row: Class, known: set[str], model, values, mask, make) -> dict:
    """What a kind of model is told to learn."""
    import torch

    size, kinds = len(values), setting(model.config, "num_labels", default=2)
    if row.kind == "question-answering":
        found = dict(start_positions=torch.arange(1, size + 1), end_positions=torch.arange(4, size + 4))
    elif row.kind == "multiple-choice":
        found = dict(labels=torch.arange(size) % 2)
    elif row.kind == "token-classification":
        found = dict(labels=torch.randint(0, kinds, mask.shape, generator=make))
    elif row.kind == "ctc" or row.kind == "speech":
        found = dict(labels=torch.randint(3, words(model.config), (size, mask.shape[1] // 6), generator=make))
    elif row.kind.endswith("-classification"):
        found = dict(labels=torch.arange(size) % kinds)
    elif values.dtype is torch.int64:
        found = dict(labels=values.masked_fill(mask == 0, -100))
    else:
        found = {}
    return {name: value for name, value in found.items() if name in known}


def loss_of(model, **batch):
    """The model's own loss, or the mean square of its first result."""
    result = model(**batch)
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss.sum()
    first = result[0]
    return (first if not isinstance(first, (tuple, list)) else first[0]).square().mean()


@dataclass
class Chosen:
    """A model that eager runs, with inputs of two lengths, or of two sizes of the batch; ``long`` where it
    can be long, too."""

    model: object
    batches: list[dict]
    long: dict | None
    notes: list[str]


def chosen(row: Class) -> Chosen:
    """The smallest model that eager runs. Raises `zoo.NotRun`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reasons = []
    for make in configurations(CONFIG_MAPPING[row.family]):
        try:
            model = model_of(row, make)
            layouts = list(batches(row, model, LENGTHS[0]))
        except Exception as error:  # noqa: BLE001 (a smaller or larger one may build)
            reasons.append(first_line(error))
            continue
        for i, batch in enumerate(layouts):
            try:
                seconds = eager_seconds(model, batch)
            except Exception as error:  # noqa: BLE001 (another layout may fit)
                reasons.append(first_line(error))
                continue
            found = at_other_lengths(row, model, batch, i)
            found.notes += ["a step of eager takes more than a second"] if seconds > 1 else []
            return found
    raise zoo.NotRun("; ".join(dict.fromkeys(reasons)))


def at_other_lengths(row: Class, model, batch: dict, layout: int) -> Chosen:
    def runs(length: int, size: int = 2) -> dict | None:
        try:
            other = list(batches(row, model, length, size))[layout]
            eager_seconds(model, other)
        except Exception:  # noqa: BLE001
            return None
        return other

    second, notes = runs(LENGTHS[1]), []
    if second is None:
        second, notes = runs(LENGTHS[0], 3), ["one length, two sizes of the batch"]
    elif all(second[k].shape == v.shape for k, v in batch.items() if v.dim() > 1):
        second, notes = runs(LENGTHS[0], 3) or second, ["one length"]
    long = None if notes else runs(LONG)
    if row.kind == "image-text-to-text" and not any("pixel" in name for name in batch):
        notes.append("a text without images")
    return Chosen(model, [b for b in (batch, second) if b is not None], long, notes)


def eager_seconds(model, batch: dict) -> float:
    start = time.process_time()
    loss_of(model, **batch).backward()
    model.zero_grad()
    return time.process_time() - start


# A row


def measure(row: Class) -> dict:
    """All columns of a row."""
    import torch

    torch.set_num_threads(1)
    found = chosen(row)
    model, notes = found.model.double(), found.notes
    inputs = [zoo.widened(b, model) for b in found.batches]

    def eager(**batch):
        return loss_of(model, **batch)

    try:
        truths = [zoo.gradients(model, eager, b) for b in inputs]
        if zoo.largest_error(zoo.gradients(model, eager, inputs[0]), truths[0]) > 1e-12:
            model.eval()
            notes.append("in eval mode, since training draws random numbers")
            truths = [zoo.gradients(model, eager, b) for b in inputs]
    except Exception as error:  # noqa: BLE001
        model, inputs = found.model.float(), found.batches
        notes.append(f"in float32: {first_line(error)}")
        truths = [zoo.gradients(model, eager, b) for b in inputs]
    answer = dict(eager=True, lengths=len(inputs), notes=notes)
    answer["aot_eager"] = traced(lambda: torch.compile(eager, backend="aot_eager"), model, inputs, truths)
    answer |= streamed(model, eager, inputs, truths)
    if found.long is not None and "crash" not in answer:
        try:
            answer |= peaks(model, eager, answer.pop("step"), zoo.widened(found.long, model))
        except Exception as error:  # noqa: BLE001
            answer["crash"] = f"at a third length: {first_line(error)}"
    answer.pop("step", None)
    return answer


def traced(compiled: Callable, model, inputs: list[dict], truths: list[list]) -> dict:
    """What Dynamo makes of a step, its error, and the seconds of the first call and of the next."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    step, seconds, error = compiled(), [], 0.0
    found: dict = {}
    for batch, truth in zip(inputs, truths):
        start = time.process_time()
        try:
            made = zoo.gradients(model, step, batch)
        except Exception as failure:  # noqa: BLE001 (the table says what broke)
            found["crash"] = first_line(failure)
            break
        seconds.append(round(time.process_time() - start, 2))
        error = max(error, zoo.largest_error(made, truth))
    found |= dict(error=error, seconds=seconds, graphs=counters["stats"]["unique_graphs"])
    found["breaks"] = sum(counters["graph_break"].values())
    return found


def streamed(model, eager: Callable, inputs: list[dict], truths: list[list]) -> dict:
    import torch

    from streambp_compile.backend import Reporting
    from streambp_compile.config import Config
    from streambp_compile.reporting.report import Report

    report, step = Report(), None

    def compiled() -> Callable:
        nonlocal step
        step = torch.compile(eager, backend=Reporting(Config(chunk_size=CHUNK), report))
        return step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = traced(compiled, model, inputs, truths)
    if answer["error"] > bound_of(model) and "crash" not in answer:
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        answer["noise"] = 0.0
        for seed, (batch, truth) in itertools.product(range(3), zip(inputs, truths)):
            answer["noise"] = max(answer["noise"], zoo.rounding(model, eager, batch, truth, seed))
            model.load_state_dict(kept)
    told = [str(w.message) for w in caught if str(w.message).startswith("streambp")]
    regions = report.regions
    return answer | dict(
        step=step,
        regions=sum(r.times for r in regions),
        streamed=sum(r.times for r in regions if is_streamed(r)),
        reasons=list(dict.fromkeys(map(zoo.shortened, told))),
    )


def is_streamed(region) -> bool:
    """Does all of a region stream, or is there nothing in it to stream?"""
    return region.has_nothing_to_stream or region.streamed is not None and not region.at_full_length


def bound_of(model) -> float:
    """The largest error that passes: many models compute in float32 inside."""
    return 1e-5 if next(model.parameters()).dtype.itemsize == 8 else 1e-3


def peaks(model, eager: Callable, step: Callable, batch: dict) -> dict:
    from benchmarks.memory import peak

    for parameter in model.parameters():
        parameter.grad = parameter.new_zeros(parameter.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(**batch).backward()
        found = dict(peak=peak(lambda: step(**batch).backward()))
    found["eager_peak"] = peak(lambda: eager(**batch).backward())
    zoo.checkpoint_layers(model)
    try:
        eager(**batch).backward()
    except RuntimeError:  # layers that write into a cache cannot run twice
        return found
    return found | dict(checkpointed_peak=peak(lambda: eager(**batch).backward()))


def serve(row: Class, send, log: str, limit: float) -> None:
    """Answer for a row in a process of its own, which ends after ``limit`` seconds of the processor; what
    libraries print goes to a file."""
    import traceback

    from streambp_compile.passes import phases

    spent = math.ceil(time.process_time() + limit)
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    zoo.interpret_bodies()
    phases.SLOW = math.inf  # how busy the machine is tells nothing of a class
    try:
        answer = measure(row)
    except zoo.NotRun as missing:
        answer = dict(missing=str(missing)[:400])
    except Exception as error:  # noqa: BLE001 (the table says what broke)
        traceback.print_exc()
        answer = dict(failed=first_line(error))
    send.send(answer)


# The table's process


def run(rows: Sequence[Class], jobs: int, limit: float, tell: Callable[[Class, dict], None]) -> None:
    """Run rows, some at a time, each in a process that starts with all libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "transformers", "streambp_compile.backend", "benchmarks.zoo"]
    )
    waiting, running = list(rows), {}
    logs = ROOT / "out" / "classes"
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            row = waiting.pop(0)
            take, send = context.Pipe(duplex=False)
            log = logs / f"{row.key.replace('/', ',')}.log"
            process = context.Process(target=serve, args=(row, send, str(log), limit), daemon=True)
            process.start()
            send.close()
            running[row] = process, take, time.perf_counter()
        for row, (process, take, start) in list(running.items()):
            seconds = time.perf_counter() - start
            if take.poll(0.1):
                try:
                    answer = take.recv()
                except EOFError:
                    process.join()
                    slow = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
                    why = f"more than {limit:.0f} seconds"
                    answer = dict(failed=why if slow else f"its process ended with {process.exitcode}")
            elif seconds > BUSY * limit:
                answer = dict(failed=f"more than {BUSY * limit:.0f} seconds")
            else:
                continue
            process.kill()
            process.join()
            del running[row]
            tell(row, dict(answer, took=round(seconds, 1)))


# The page


def is_exact(answer: dict) -> bool:
    bound = 1e-3 if any(n.startswith("in float32") for n in answer.get("notes", ())) else 1e-5
    return answer.get("error", math.inf) <= max(bound, answer.get("noise", 0.0))


def crash_of(answer: dict) -> str:
    """An error of ours: where ``aot_eager`` fails too, it is none."""
    if "failed" in answer:
        return answer["failed"]
    return "" if "crash" in answer.get("aot_eager", ()) else answer.get("crash", "")


def is_whole(answer: dict) -> bool:
    ran = "crash" not in answer and answer.get("regions", 0) > 0
    return ran and answer["streamed"] == answer["regions"]


HEADS = ["class", "family", "error", "exact", "streamed", "graphs, breaks", "aot_eager's", "peak / eager's"]
HEADS += ["/ checkpointed", "first call, s", "aot_eager's, s", "why not, and notes"]


def line_of(row: Class, answer: dict) -> list[str]:
    other, seconds = answer.get("aot_eager", {}), answer.get("seconds") or ["–"]
    told = [*answer.get("reasons", ()), *answer.get("notes", ())]
    told += [answer[k] for k in ("crash", "failed", "missing") if answer.get(k)]
    if other.get("crash"):
        told.append(f"aot_eager: {other['crash']}")

    def ratio(name: str) -> str:
        return f"{answer['peak'] / answer[name]:.2f}" if name in answer else "–"

    ran, fails = "error" in answer and "crash" not in answer, bool(crash_of(answer))
    return [
        row.name,
        row.family,
        f"{answer['error']:.0e}" if "error" in answer else "–",
        "**crash**" if fails else "–" if not ran else "yes" if is_exact(answer) else "**no**",
        f"{answer['streamed']}/{answer['regions']}" if "regions" in answer else "–",
        f"{answer['graphs']}, {answer['breaks']}" if "graphs" in answer else "–",
        f"{other['graphs']}, {other['breaks']}" if "graphs" in other else "–",
        ratio("eager_peak"),
        ratio("checkpointed_peak"),
        str(seconds[0]),
        str((other.get("seconds") or ["–"])[0]),
        "; ".join(" ".join(text.split())[:240] for text in told),
    ]


def summary(rows: Sequence[Class], answers: dict[str, dict]) -> str:
    ran = [answers[row.key] for row in rows]
    able = [a for a in ran if "missing" not in a]
    exact = sum(is_exact(a) and "crash" not in a for a in able)
    crashed = sum(bool(crash_of(a)) for a in able)
    return (
        f"{len(ran)} classes ran, {len(able)} of them in eager: {exact} exact, {crashed} crash or time out, "
        f"{sum(map(is_whole, able))} with all regions streamed."
    )


def causes(answers: dict[str, dict]) -> str:
    """Why regions are not streamed, the commonest first."""
    count = Counter(
        cause
        for a in answers.values()
        for cause in {reason.split(": ", 1)[-1].split(". ")[0][:120] for reason in a.get("reasons", ())}
    )
    return markdown(["classes", "told"], [[str(n), cause] for cause, n in count.most_common(20)])


def page(rows: Sequence[Class], answers: dict[str, dict]) -> str:
    """The page: a table for each kind, what fails, and the commonest causes."""
    import torch
    import transformers

    ran = [row for row in rows if row.key in answers]
    parts = [
        "`python benchmarks/transformers_classes.py`",
        f"torch {torch.__version__}, transformers {transformers.__version__}; lengths {LENGTHS[0]} and "
        f"{LENGTHS[1]}, peaks at {LONG}. {len(ran)} of {len(rows)} classes have run.",
        summary(ran, answers),
        "What regions that run unchunked, and hints, say:",
        causes({row.key: answers[row.key] for row in ran}),
    ]
    for kind in KINDS:
        of_kind = [row for row in ran if row.kind == kind]
        if of_kind:
            table = markdown(HEADS, [line_of(row, answers[row.key]) for row in of_kind], texts=2)
            parts += [f"## {kind}", summary(of_kind, answers), table]
    return "\n\n".join(parts) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="A,B,...", help="kinds, families, or kind/family (all)")
    parser.add_argument("--jobs", type=int, default=1, help="classes that run at a time (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds of the processor for a class (%(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="run what has run already, too")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument(
        "--answers",
        type=Path,
        default=zoo.RESULTS / "transformers-classes.jsonl",
        help="what has run, one class a line; older lines have peaks as shares of eager's (%(default)s)",
    )
    parser.add_argument(
        "--save", metavar="NAME", default="transformers-classes", help="of the page (%(default)s)"
    )
    return parser.parse_args()


def asked(rows: Sequence[Class], only: str) -> list[Class]:
    parts = [part.strip() for part in only.split(",") if part.strip()]
    if not parts:
        return list(rows)
    return [r for r in rows if {r.kind, r.family, r.name, f"{r.kind}/{r.family}"}.intersection(parts)]


def main() -> int:
    given = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(zoo.MAPPED))
    rows = classes()
    given.answers.parent.mkdir(parents=True, exist_ok=True)
    answers = {}
    if given.answers.exists():
        lines = map(json.loads, given.answers.read_text(encoding="utf-8").splitlines())
        answers = {line.pop("class"): line for line in lines}

    def tell(row: Class, answer: dict) -> None:
        answers[row.key] = answer
        with given.answers.open("a", encoding="utf-8") as file:
            print(json.dumps({"class": row.key, **answer}), file=file)
        print(" ".join(line_of(row, answer)), file=sys.stderr, flush=True)

    if not given.page:
        waiting = [r for r in asked(rows, given.only) if given.again or r.key not in answers]
        run([r for r in in_turn(rows) if r in waiting], given.jobs, given.limit, tell)
    zoo.RESULTS.mkdir(exist_ok=True)
    text = page(rows, answers)
    (zoo.RESULTS / f"{given.save}.md").write_text(text, encoding="utf-8")
    wrong = [k for k, a in answers.items() if "missing" not in a and (crash_of(a) or not is_exact(a))]
    print("\n".join([summary([r for r in rows if r.key in answers], answers), *wrong]))
    return min(len(wrong), 100)


if __name__ == "__main__":
    sys.exit(main())

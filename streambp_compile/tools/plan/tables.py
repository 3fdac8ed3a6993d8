"""Answers as a table, and as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .training import OPTIMIZERS, SteadyBytes
from .whole_model import Prediction, Setting

GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """Predictions for one setting.

    memory   bytes that training may take
    reserve  bytes of it for memory that is not simulated: the CUDA context, workspaces of libraries,
             fragments
    notes    sentences on the assumptions of the figures
    """

    setting: Setting
    memory: int
    reserve: int
    columns: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()

    def total(self, column: Prediction) -> int:
        return self.setting.state.bytes + self.reserve + column.peak

    @property
    def room(self) -> int:
        """Bytes that a step may take above weights and gradients."""
        return self.memory - self.reserve - self.setting.state.bytes


def text_of(answer: Answer) -> str:
    rows = [["GiB", *(c.name for c in answer.columns)]]
    rows += [[name, *[gib(size)] * len(answer.columns)] for name, size in terms(answer)]
    rows += [
        ["step above these, simulated", *(gib(c.peak) for c in answer.columns)],
        ["total", *(gib(answer.total(c)) for c in answer.columns)],
        [f"fits into {gib(answer.memory)} GiB", *(fit(answer, c) for c in answer.columns)],
        ["seconds a step, estimated", *(number(c.seconds, "{:.2f}") for c in answer.columns)],
        ["tokens a second and device", *(number(rate(answer, c), "{:,.0f}") for c in answer.columns)],
    ]
    if any(c.host for c in answer.columns):
        rows.append(["in host memory", *(gib(c.host) for c in answer.columns)])
    notes = [f"note: {note}" for note in answer.notes]
    return "\n".join([headline(answer), "", *aligned(rows), *([""] if notes else []), *notes])


def headline(answer: Answer, lengths: bool = True) -> str:
    setting, state = answer.setting, answer.setting.state
    learn = "" if state.trained == state.elements else f", of which {count(state.trained)} learn"
    sharded = f", state on {setting.shards} devices" if setting.shards > 1 else ""
    depth = "" if setting.stack is None else f"{setting.stack.depth} layers, "
    length = f"{setting.tokens:,} tokens" if lengths else "sequence"
    return (
        f"{setting.source.title}: {depth}{count(state.elements)} weights{learn}\n"
        f"{setting.batch} × {length}, {dtype_of(setting)}, train {setting.trained}, "
        f"{OPTIMIZERS[setting.optimizer][2]}{sharded}\n{setting.device}"
    )


def terms(answer: Answer) -> list[tuple[str, int]]:
    """List the memory besides the step, by name."""
    state: SteadyBytes = answer.setting.state
    shared = f", 1/{answer.setting.shards}" if answer.setting.shards > 1 else ""
    found = [
        (f"weights{shared}", state.weights),
        (f"gradients{shared}", state.gradients),
        (f"optimizer{shared}", state.optimizer),
        ("gathered: two layers, and all outside", state.gathered),
        ("gradients of a layer before they are summed", state.reduced),
        ("context and workspaces, assumed", answer.reserve),
    ]
    return [*found[:3], *((name, size) for name, size in found[3:] if size)]


def fit(answer: Answer, column: Prediction) -> str:
    left = answer.memory - answer.total(column)
    return f"yes, {gib(left)} left" if left >= 0 else f"no, {gib(-left)} over"


def rate(answer: Answer, column: Prediction) -> float | None:
    rows = answer.setting.batch * answer.setting.tokens
    return rows / column.seconds if column.seconds else None


def values_of(answer: Answer) -> dict:
    """Convert an answer to values for scripts, in bytes and seconds."""
    setting = answer.setting
    return dict(
        model=setting.source.title,
        batch=setting.batch,
        tokens=setting.tokens,
        device=setting.device.name,
        memory=answer.memory,
        dtype=dtype_of(setting),
        train=setting.trained,
        optimizer=setting.optimizer,
        shards=setting.shards,
        state=asdict(setting.state),
        reserve=answer.reserve,
        plans=[plan_values(answer, column) for column in answer.columns],
        notes=list(answer.notes),
    )


def plan_values(answer: Answer, column: Prediction) -> dict:
    total = answer.total(column)
    return dict(
        name=column.name,
        peak=column.peak,
        total=total,
        fits=total <= answer.memory,
        host=column.host,
        seconds=column.seconds,
        terms=asdict(column.cost) if column.cost is not None else None,
        options=dict(column.options),
    )


@dataclass(frozen=True)
class Longest:
    """The longest sequences that fit.

    found  for each way to run a step: tokens, and the prediction at that length; None where none fits
    """

    answer: Answer
    found: tuple[tuple[int, Prediction] | None, ...]


def text_of_longest(longest: Longest) -> str:
    answer, base = longest.answer, None
    on_host = any(column and column[1].host for column in longest.found)
    sizes = ["step, GiB", "total, GiB", *["in host memory"] * on_host]
    rows = [["longest sequence", "tokens", *sizes, "seconds a step", "× first"]]
    for column in longest.found:
        if column is None:
            rows.append(["none fits", *["–"] * (len(rows[0]) - 1)])
            continue
        tokens, plan = column
        base = base or tokens
        sizes = [gib(plan.peak), gib(answer.total(plan)), *[gib(plan.host)] * on_host]
        times = f"{tokens / base:.1f}"
        rows.append([plan.name, f"{tokens:,}", *sizes, number(plan.seconds, "{:.1f}"), times])
    state = [[name, gib(size)] for name, size in terms(answer)]
    notes = [f"note: {note}" for note in answer.notes]
    lines = [headline(answer, lengths=False), "", *aligned([["GiB", ""], *state]), "", *aligned(rows)]
    return "\n".join([*lines, "", f"within {gib(answer.memory)} GiB", *notes])


def values_of_longest(longest: Longest) -> dict:
    found = values_of(longest.answer)
    del found["tokens"], found["plans"]
    plans = [
        None if c is None else dict(tokens=c[0], **plan_values(longest.answer, c[1])) for c in longest.found
    ]
    return dict(**found, longest=plans)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows: the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def count(elements: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if elements >= size:
            return f"{elements / size:.2f} {name}"
    return f"{elements:,}"


def dtype_of(setting: Setting) -> str:
    dtype = setting.dtype or setting.source.dtype
    return "as given" if dtype is None else str(dtype).removeprefix("torch.")

"""Peak against time for all plans of a step: as a table with bars, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from .tables import GIB, Answer, aligned, gib, headline, number, plan_values, terms, values_of
from .whole_model import Prediction

BAR = 30  # characters of the longest bar


@dataclass(frozen=True)
class Front:
    """All plans of a setting.

    plans  in the order in which they were made, with plain checkpointing where it could be simulated
    best   those that no other beats in both peak and seconds
    """

    answer: Answer
    plans: tuple[Prediction, ...]
    best: tuple[Prediction, ...]


def text_of_front(front: Front) -> str:
    answer, most = front.answer, max(plan.peak for plan in front.plans)
    rows = [["plan", "", "step, GiB", "total, GiB", "seconds a step", "fits"]]
    for plan in sorted(front.plans, key=lambda p: p.peak):
        mark = "*" if plan in front.best else ""
        fits = "yes" if answer.total(plan) <= answer.memory else "no"
        rows.append(
            [plan.name, mark, gib(plan.peak), gib(answer.total(plan)), number(plan.seconds, "{:.2f}"), fits]
        )
    bars = [
        "",
        *("█" * max(1, round(BAR * p.peak / most)) for p in sorted(front.plans, key=lambda p: p.peak)),
    ]
    state = [[name, gib(size)] for name, size in terms(answer)]
    notes = [f"note: {note}" for note in answer.notes]
    table = [f"{line}  {bar}".rstrip() for line, bar in zip(aligned(rows), bars)]
    legend = "* no other plan takes less memory in as little time"
    return "\n".join([headline(answer), "", *aligned([["GiB", ""], *state]), "", *table, "", legend, *notes])


def values_of_front(front: Front) -> dict:
    found = values_of(front.answer)
    found["plans"] = [dict(**plan_values(front.answer, p), best=p in front.best) for p in front.plans]
    return found


def draw(fronts: Sequence[Front], path: str) -> None:
    """Write a picture of peak against seconds. Raises ValueError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "Drawing a picture needs the package matplotlib. Install it with pip install matplotlib, or give "
            "--pareto no file."
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for front in fronts:
        name = front.answer.setting.device.name
        line = axes.step(*curve(front, front.best), where="post", marker="o", label=f"{name}, best plans")[0]
        rest = [p for p in front.plans if p not in front.best]
        if rest:
            axes.scatter(*curve(front, rest), facecolors="none", edgecolors=line.get_color(), label="others")
        axes.axvline(front.answer.memory / GIB, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xlabel="peak of training, GiB", ylabel="estimated seconds a step", title=title_of(fronts[0]))
    axes.legend()
    figure.savefig(path)


def curve(front: Front, plans: Sequence[Prediction]) -> tuple[list[float], list[float]]:
    return [front.answer.total(p) / GIB for p in plans], [p.seconds or 0.0 for p in plans]


def title_of(front: Front) -> str:
    setting = front.answer.setting
    return f"{setting.source.title}, {setting.batch} × {setting.tokens:,} tokens, train {setting.trained}"

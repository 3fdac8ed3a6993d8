"""The questions of the command line: one setting, the longest sequence, all plans, or several devices."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...passes.phases import summary
from ...reporting.progress import Progress
from ..page.files import save
from .budgets import CLOSE, all_plans, fastest_within, frontier, longest
from .fake_steps import simulating
from .fronts import Front, draw, text_of_front, values_of_front
from .options import bytes_of_text, memory_of, parser, settings_of
from .tables import Answer, Longest, text_of, text_of_longest, values_of, values_of_longest
from .whole_model import Prediction, Setting, Streaming, checkpointing, report_of

INEXACT = "With layer inputs in 8 bits, gradients are not exact"
ESTIMATES = "Seconds are estimates by the device's data sheet, without optimizer and communication"
ROUND = 256  # tokens: tried lengths are multiples of it
Chosen = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer on stdout. Returns the exit status: 2 where the question is invalid."""
    chosen, progress = parser().parse_args(arguments), Progress(8)
    asked = "longest" if chosen.longest else "pareto" if chosen.pareto is not None else "plan"
    answer, text, values = WAYS[asked]
    try:
        with quiet():
            settings = settings_of(chosen)
            check_page(chosen, settings)
            answers = [answer(chosen, setting, progress) for setting in settings]
            if chosen.html:
                save_page(chosen.html, settings, progress)
        if chosen.pareto and asked == "pareto":
            draw(answers, chosen.pareto)
    except ValueError as error:
        progress.close()
        print(f"plan: {error}", file=sys.stderr)
        return 2
    progress.close()
    if chosen.json:
        found = list(map(values, answers))
        print(json.dumps(found if chosen.compare else found[0], indent=2))
    else:
        print("\n\n".join(map(text, answers)))
    return 0


def check_page(chosen: Chosen, settings: Sequence[Setting]) -> None:
    """Raise ValueError for a page that cannot be written, before any long computation."""
    if chosen.html and len(settings) > 2:
        raise ValueError(
            f"A page shows one GPU, or two side by side; got {len(settings)}. Name two with --compare."
        )
    if chosen.html and not chosen.html.endswith(".html"):
        raise ValueError(f"The name of a page ends in .html; got {chosen.html}")


def save_page(path: str, settings: Sequence[Setting], progress: Progress) -> None:
    """Write the files of `Report.save` for the step of each setting. Timelines are computed here, while
    kernels are those of the setting's device."""
    reports = []
    for setting in settings:
        with simulating(setting.device):
            reports.append(report_of(setting, progress))
            reports[-1].timeline  # noqa: B018 (made once, when first asked for)
    save(reports, [setting.device.name for setting in settings], Path(path))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of libraries about compilation, inside the context."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def answered(chosen: Chosen, setting: Setting, progress: Progress) -> Answer:
    memory, reserve = memory_of(chosen, setting.device)
    columns, notes = [], [ESTIMATES]
    with simulating(setting.device):
        if not chosen.no_checkpointing:
            found = beside(setting, progress)
            columns += [found] if isinstance(found, Prediction) else []
            notes += [found] if isinstance(found, str) else []
        streaming = Streaming(setting, progress)
        columns.append(streaming.default)
        if chosen.offload:
            columns.append(streaming.offloaded)
        if chosen.lossy:
            columns.append(streaming.rounded)
            notes.append(INEXACT)
        if chosen.budget:
            total = bytes_of_text("budget", chosen.budget)
            columns.append(within(streaming, total, reserve))
    return Answer(setting, memory, reserve, tuple(columns), (*notes, *notes_of(streaming)))


def beside(setting: Setting, progress: Progress) -> Prediction | str:
    """Estimate plain checkpointing, or return why that is impossible."""
    try:
        return checkpointing(setting, progress)
    except Exception as error:  # an operator that has no fake form
        return f"Plain checkpointing could not be simulated for this model ({summary(error)})"


def within(streaming: Streaming, total: int, reserve: int) -> Prediction:
    """Find the fastest plan for a budget of all that training takes. Raises ValueError if none fits."""
    room = total - reserve - streaming.setting.state.bytes
    found = fastest_within(streaming, room)
    if found is None:
        least = total - room + streaming.shorter(16).peak
        raise ValueError(
            f"No plan fits into the budget of {total / 2**30:.2f} GiB. The leanest takes {least / 2**30:.2f} "
            "GiB with weights, gradients and optimizer. Use a shorter sequence, more shards, a leaner "
            "optimizer, or train fewer weights."
        )
    return found


def longest_that_fits(chosen: Chosen, setting: Setting, progress: Progress) -> Longest:
    """Try lengths until one takes all but a hundredth of the memory."""
    if setting.source.fixed:
        raise ValueError(
            f"The longest sequence is unknown, because the function {setting.source.title} takes no tokens. "
            "Add a parameter tokens to it, and make inputs of that length."
        )
    memory, reserve = memory_of(chosen, setting.device)
    room = memory - reserve - setting.state.bytes
    ways: list[Callable[[Setting], Prediction]] = [lambda s: Streaming(s, progress).default]
    if chosen.offload:
        ways.append(lambda s: Streaming(s, progress).offloaded)
    if chosen.lossy:
        ways.append(lambda s: Streaming(s, progress).rounded)
    notes = [ESTIMATES, f"The longest takes at least {1 - CLOSE:.0%} of what a step may take"]
    notes += [INEXACT] if chosen.lossy else []
    with simulating(setting.device):
        beaten = None if chosen.no_checkpointing else beside(setting, progress)
        if isinstance(beaten, str):
            notes.append(beaten)
        elif beaten is not None:
            ways.insert(0, lambda s: checkpointing(s, progress))
        found = tuple(longest_by(way, setting, room) for way in ways)
    return Longest(Answer(setting, memory, reserve, (), tuple(notes)), found)


def longest_by(
    way: Callable[[Setting], Prediction], setting: Setting, room: int
) -> tuple[int, Prediction] | None:
    """Find the longest sequence of one way to run a step, and its prediction."""
    known: dict[int, Prediction] = {}

    def peak_of(tokens: int) -> int:
        known[tokens] = way(replace(setting, tokens=tokens))
        return known[tokens].peak

    tokens = longest(peak_of, room, setting.tokens, ROUND) if room > 0 else 0
    return (tokens, known[tokens]) if tokens else None


def notes_of(streaming: Streaming) -> list[str]:
    """List the limits of the figures of streaming."""
    setting = streaming.setting
    found = [
        f"A region runs unchunked, and its seconds are missing here: {refusal}"
        for refusal in streaming.deepest.refusals()
    ]
    if setting.source.fixed:
        found.append(
            f"The function {setting.source.title} takes no tokens, so its inputs are as they are. Tokens a "
            "second are of the length in the head of this table."
        )
    positions = setting.source.positions
    if positions is not None and setting.tokens > positions:
        found.append(
            f"The configuration states {positions:,} positions, and {setting.tokens:,} tokens are more. The "
            "figures hold if positions are extended."
        )
    return found


def front_of(chosen: Chosen, setting: Setting, progress: Progress) -> Front:
    """Estimate peak and seconds of every plan."""
    memory, reserve = memory_of(chosen, setting.device)
    with simulating(setting.device):
        beaten = None if chosen.no_checkpointing else beside(setting, progress)
        streaming = Streaming(setting, progress)
        plans = list(all_plans(streaming))
    notes = (*([beaten] if isinstance(beaten, str) else []), ESTIMATES, *notes_of(streaming))
    shown = [*plans, *([beaten] if isinstance(beaten, Prediction) else [])]
    return Front(Answer(setting, memory, reserve, (), notes), tuple(shown), tuple(frontier(shown)))


WAYS: dict[str, tuple[Callable, Callable, Callable]] = {
    "plan": (answered, text_of, values_of),
    "pareto": (front_of, text_of_front, values_of_front),
    "longest": (longest_that_fits, text_of_longest, values_of_longest),
}

"""Seconds until a model takes its first step, until it takes a step at a second length, and both again in a
second process, which finds the caches on disk.

    python benchmarks/start.py                     ten models, three contenders; results/start.md
    python benchmarks/start.py --only reference    some of them

Each model and contender begins with empty caches, in a process of its own, and a second process follows. A
call is a forward and a backward; where nothing compiles, it takes the seconds of the last column. *CPU* is
what the process and the compilers that it starts compute, and depends less on what else the machine does.

By phase: *Dynamo* with its guards, *rewrites* of Dynamo's graph and its cut into regions, *AOTAutograd*,
*analysis* (normal form, following tokens), *planning* (sweeps, chunk lengths, writing and measuring bodies),
*make_fx* of bodies, *Inductor* without its C++ compiler, or reading bodies from disk, *C++* (waiting for
kernels that are still built, or loading them), and *other*, which is mostly the step itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processes import last_answer  # noqa: E402
from benchmarks.tables import markdown, processor  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "start.md"
SMALL = (
    "nanogpt",
    "gpt2",
    "gpt_neox",
    "bert",
    "T5",
    "gemma3_text",
    "mixtral",
    "deepseek_v3",
    "linear attention",
)
MODELS = ("reference", *SMALL)
CONTENDERS = ("inductor", "inductor, checkpointing", "streambp")
LENGTHS = (1024, 712)  # tokens of the first call and of the second; of small models a quarter
PHASES = ("Dynamo", "rewrites", "AOTAutograd", "analysis", "planning", "make_fx", "Inductor", "C++", "other")
CALLS = ("first call", "second length")


# A process of one contender


class Phases:
    """Seconds of each phase; what a phase calls that is another one counts for that alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inside, self.since = ["other"], time.perf_counter()

    def enter(self, name: str | None) -> None:
        now = time.perf_counter()
        self.seconds[self.inside[-1]] += now - self.since
        self.since = now
        self.inside.pop() if name is None else self.inside.append(name)

    def watch(self, owner: object, attribute: str, name: str) -> None:
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(None)

        setattr(owner, attribute, timed)

    def taken(self) -> dict[str, float]:
        """The seconds since the last call of this."""
        self.enter(self.inside[-1])
        self.inside.pop(-2)
        taken, self.seconds = dict(self.seconds), Counter()
        return taken


def watched() -> Phases:
    from torch._dynamo import convert_frame

    from streambp_compile import backend, pipeline
    from streambp_compile.internals import chunk_bodies, inductor, kernel_builds, stored_bodies
    from streambp_compile.regions import compiled_region

    phases = Phases()
    phases.watch(convert_frame, "_compile", "Dynamo")
    for name in ("rewritten", "cut"):
        phases.watch(backend.Chain, name, "rewrites")
    phases.watch(compiled_region.CompiledRegion, "traced", "AOTAutograd")
    phases.watch(pipeline, "followed", "analysis")
    for name in ("by_batch", "assigned", "schedule"):
        phases.watch(pipeline, name, "planning")
    phases.watch(chunk_bodies, "function_of", "make_fx")
    phases.watch(stored_bodies, "read", "Inductor")
    phases.watch(inductor, "compile_ours", "Inductor")
    phases.watch(inductor, "compile_plainly", "Inductor")
    phases.watch(kernel_builds.Kernels, "wait", "C++")
    return phases


def step_of(name: str, contender: str):
    """A function of the length that takes a step."""
    import torch

    from benchmarks import zoo

    checkpointing = "checkpointing" in contender
    if name == "reference":
        from examples.long_context import build

        model = build(6, LENGTHS[0], 0)
        if checkpointing:
            model.gradient_checkpointing_enable()
        batch_of = lambda length: {"ids": torch.randint(0, 12288, (1, length))}  # noqa: E731
        loss = lambda model, ids: model(input_ids=ids, labels=ids).loss  # noqa: E731
    else:
        model, _, loss = zoo.built(zoo.ROWS[name], LENGTHS[0] // 4)
        batch_of = lambda length: zoo.built(zoo.ROWS[name], length // 4)[1]  # noqa: E731
        if checkpointing:
            zoo.checkpoint_layers(model)
    compiled = torch.compile(lambda **batch: loss(model, **batch), backend=contender.partition(",")[0])
    batches = {length: batch_of(length) for length in LENGTHS}
    return lambda length: compiled(**batches[length]).backward()


def serve(name: str, contender: str) -> None:
    """Seconds of the calls, as the last line of stdout."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    phases = watched() if contender == "streambp" else None
    step, answer = step_of(name, contender), {}
    for call, length in zip(("first call", "later step", "second length"), (LENGTHS[0], *LENGTHS)):
        before, begun = os.times(), time.perf_counter()
        if phases is not None:
            phases.taken()
        step(length)
        answer[call] = time.perf_counter() - begun
        answer[f"{call}, CPU"] = sum(os.times()[:4]) - sum(before[:4])
        if phases is not None:
            answer[f"{call}, phases"] = phases.taken()
    print(json.dumps(answer))


# The table's process


def measured(name: str, contender: str) -> list[dict]:
    """The answers of the first and of the second process."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            command = ["env", f"TORCHINDUCTOR_CACHE_DIR={folder}", sys.executable, __file__]
            answers.append(last_answer([*command, "--serve", name, contender], seconds=900))
    return answers


def cells(name: str, contender: str, answers: list[dict]) -> list[str]:
    def both(answer: dict, call: str) -> str:
        return f"{answer[call]:.1f} ({answer[f'{call}, CPU']:.1f})" if "failed" not in answer else "failed"

    step = answers[1].get("later step")
    calls = [both(answer, call) for answer in answers for call in CALLS]
    return [name, contender, *calls, "" if step is None else f"{step:.1f}"]


def phase_cells(name: str, answers: list[dict]) -> list[list[str]]:
    rows = []
    for process, answer in zip(("first", "second"), answers):
        for call in () if "failed" in answer else CALLS:
            taken = answer[f"{call}, phases"]
            rows.append([name, f"{process} process, {call}", *(f"{taken.get(p, 0):.1f}" for p in PHASES)])
    return rows


def page(command: str, found: dict[str, dict[str, list[dict]]], note: str) -> str:
    import torch

    heads = [f"{process} process: {call}, s (CPU s)" for process in ("first", "second") for call in CALLS]
    rows = [cells(n, c, answers) for n, by in found.items() for c, answers in by.items()]
    phases = [row for n, by in found.items() if "streambp" in by for row in phase_cells(n, by["streambp"])]
    usage, rest = __doc__.partition("\n\n    ")[0], __doc__.partition("\n\nEach")[2]
    told = f"{usage}\n\nEach{rest.rstrip()}"
    where = (
        f"{LENGTHS[0]} and {LENGTHS[1]} tokens for the reference (examples/long_context.py), a quarter for "
        f"the others (benchmarks/zoo.py); torch {torch.__version__}; {processor()}, two threads."
    )
    return "\n\n".join(
        [
            f"`{command}`",
            told,
            f"{where} {note}".strip(),
            markdown(["model", "contender", *heads, "a step, s"], rows, texts=2),
            "streambp by phase, seconds:",
            markdown(["model", "call", *PHASES], phases, texts=2) + "\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of models, with commas between")
    parser.add_argument("--note", default="", help="a sentence about the machine, for the page")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        return serve(*chosen.serve)
    found: dict[str, dict[str, list[dict]]] = {}
    command = " ".join(["python benchmarks/start.py", *(f"--only {chosen.only}" for _ in [0] if chosen.only)])
    for name in chosen.only.split(",") if chosen.only else MODELS:
        for contender in CONTENDERS:
            found.setdefault(name, {})[contender] = measured(name, contender)
            print(*cells(name, contender, found[name][contender]), sep=" | ", flush=True)
        PAGE.write_text(page(command, found, chosen.note), encoding="utf-8")


if __name__ == "__main__":
    main()

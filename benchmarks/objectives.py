"""Every objective of ``benchmarks/losses.py`` behind a head: sweeps, exactness, peak and time, in one table.

    python benchmarks/objectives.py                                          all, at 4096 tokens
    python benchmarks/objectives.py --only "GRPO;DPO" --tokens 8192 --batch 1 --vocabulary 151936

*Error*: largest relative error of a gradient in float64 against eager, at an odd length and chunk length.
*Peak*: allocator events of one step (loss and backward) above what is held before it, hidden states, weights
and allocated gradients; beside it the size of one logits tensor. *Time*: medians over ``--rounds``
alternating rounds of streambp against eager, against Inductor, and against Inductor with its auto_chunker (an
error where it fails); plain cross-entropy also against ``torch.nn.functional.linear_cross_entropy`` where
torch has it. Each objective is a process of its own.

A row fails whose error is over 1e-9, or whose peak is over half of one logits tensor. Such rows are listed at
the end, and their number is the exit status.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processes import first_line, last_answer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20
LENGTH, CHUNK = 53, 16  # of the exactness check
EXACT = 1e-9  # the largest error that passes
LIMIT = 3600.0  # seconds for one row
HALF = 0.5  # of one logits tensor: what the peak of a loss has to stay under
BOUNDED = ("cross-entropy, padded labels (Hugging Face)", "GRPO", "DPO", "distillation, forward KL")


def error_of(name: str) -> tuple[float, int]:
    """Largest relative error in float64, and the sweeps of forward and backward."""
    import torch

    from benchmarks.gradients import largest_difference
    from benchmarks.losses import OBJECTIVES, Batch, Heads
    from streambp_compile import explain

    torch.manual_seed(0)
    heads, batch = Heads(48, 320).double(), Batch(4, LENGTH, 48, 320)
    hidden = torch.randn(4, LENGTH, 48, dtype=torch.float64, requires_grad=True)
    options = {"chunk_size": CHUNK}

    def loss(h):
        return OBJECTIVES[name].loss(heads, h, batch)

    def gradients(step):
        heads.zero_grad()
        hidden.grad = None
        step(hidden).backward()
        found = [hidden.grad, *(p.grad for p in heads.parameters() if p.grad is not None)]
        return [g.clone() for g in found]

    truth = gradients(loss)
    ours = gradients(torch.compile(loss, backend="streambp", options=options))
    kept = [i for i, g in enumerate(truth) if g.norm() > 1e-12]  # the gradient of a bias may cancel out
    report = explain(loss, hidden, streambp_options=options)
    sweeps = sum(
        len(s.program.sweeps) for r in report.regions if r.streamed for s in (r.forward, r.backward) if s
    )
    torch._dynamo.reset()
    return largest_difference((ours[i] for i in kept), [truth[i] for i in kept]), sweeps


def linear_cross_entropy(heads, h, batch):
    import torch.nn.functional as F

    from benchmarks.losses import IGNORED

    labels = F.pad(batch.labels, (0, 1), value=IGNORED)[..., 1:]
    return (
        F.linear_cross_entropy(
            h.flatten(0, 1), heads.lm.weight, labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        / 100
    )


def measure(name: str, chosen: argparse.Namespace) -> dict:
    """One objective: error, sweeps, then peak and seconds per method."""
    import torch
    import torch.nn.functional as F
    from torch._inductor import config

    from benchmarks.losses import OBJECTIVES, Batch, Heads
    from benchmarks.memory import peak

    torch.set_num_threads(chosen.threads)
    error, sweeps = error_of(name)
    answer: dict = {"error": error, "sweeps": sweeps, "peak": {}, "seconds": {}, "errors": {}}
    torch.manual_seed(0)
    objective = OBJECTIVES[name]
    heads = Heads(chosen.width, chosen.vocabulary)
    batch = Batch(chosen.batch, chosen.tokens // chosen.batch, chosen.width, chosen.vocabulary, torch.float32)
    hidden = torch.randn(chosen.batch, chosen.tokens // chosen.batch, chosen.width).requires_grad_()
    for part in ("value", "extra"):
        if part not in objective.trains:
            getattr(heads, part).requires_grad_(False)
    for tensor in (hidden, *(p for p in heads.parameters() if p.requires_grad)):
        tensor.grad = torch.zeros_like(tensor)

    def loss(h):
        return objective.loss(heads, h, batch)

    def chunked(h):  # a function of its own, so that Dynamo keeps its graph apart
        return objective.loss(heads, h, batch)

    def inductor(h):
        return objective.loss(heads, h, batch)

    methods = {
        "streambp": torch.compile(loss, backend="streambp"),
        "eager": loss,
        "inductor": torch.compile(inductor),
        "chunker": torch.compile(chunked),
    }
    if name == BOUNDED[0] and hasattr(F, "linear_cross_entropy"):
        methods["linear"] = lambda h: linear_cross_entropy(heads, h, batch)
    for method, step in list(methods.items()):
        if method not in chosen.methods:
            del methods[method]
            continue
        try:
            with config.patch(
                {"auto_chunker.enable": method == "chunker"} if hasattr(config, "auto_chunker") else {}
            ):
                step(hidden).backward()
            answer["peak"][method] = peak(lambda step=step: step(hidden).backward())
        except Exception as failure:  # noqa: BLE001 (a method that fails, whatever the reason, is an entry of the table)
            answer["errors"][method] = first_line(failure)[:100]
            del methods[method]
    for number in range(chosen.rounds):
        for method in list(methods) if number % 2 == 0 else reversed(list(methods)):
            start = time.perf_counter()
            methods[method](hidden).backward()
            answer["seconds"].setdefault(method, []).append(time.perf_counter() - start)
    return answer


def serve(chosen: argparse.Namespace) -> None:
    """One row's answer as the last line of stdout."""
    try:
        answer = measure(chosen.one, chosen)
    except Exception as error:  # noqa: BLE001 (the table says what broke)
        traceback.print_exc()
        answer = {"failed": first_line(error)}
    print("\n" + json.dumps(answer))


def failures(answers: dict[str, dict], logits: float) -> list[str]:
    """What is wrong with each row that fails: no result, an error, or a peak over half of the logits.

    logits  MiB of one logits tensor
    """
    found = []
    for name, answer in answers.items():
        peak = answer.get("peak", {}).get("streambp")
        failed = answer.get("errors", {}).get("streambp")
        if "error" not in answer or failed:
            found.append(f"{name}: {answer.get('failed', failed)}")
        elif not answer["error"] <= EXACT:
            found.append(f"{name}: an error of {answer['error']:.0e}")
        elif peak is not None and peak >= HALF * logits * MIB:
            found.append(f"{name}: a peak of {peak / MIB:.0f} MiB, {peak / MIB / logits:.2f} of its logits")
    return found


def line(name: str, answer: dict, logits: float) -> list[str]:
    if "error" not in answer:
        return [name, answer["failed"], *[""] * 9]
    seconds = {m: statistics.median(s) for m, s in answer["seconds"].items()}

    def against(method: str) -> str:
        if method in answer["errors"]:
            return answer["errors"][method]
        return (
            f"{seconds['streambp'] / seconds[method]:.2f}"
            if method in seconds and "streambp" in seconds
            else "–"
        )

    def mebibytes(method: str) -> str:
        return f"{answer['peak'][method] / MIB:.0f}" if method in answer["peak"] else "–"

    return [
        name,
        str(answer["sweeps"]),
        f"{answer['error']:.0e}",
        mebibytes("streambp"),
        f"{logits:.0f}",
        f"{answer['peak']['streambp'] / MIB / logits:.2f}" if "streambp" in answer["peak"] else "–",
        mebibytes("inductor"),
        *(against(m) for m in ("eager", "inductor", "chunker", "linear")),
    ]


def main() -> None:
    from benchmarks.losses import OBJECTIVES

    methods = ("streambp", "eager", "inductor", "chunker", "linear")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for flag, default in (
        ("tokens", 4096),
        ("vocabulary", 32768),
        ("width", 512),
        ("batch", 2),
        ("rounds", 3),
        ("threads", 2),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default, help="%(default)s")
    parser.add_argument(
        "--only",
        type=lambda t: t.split(";"),
        default=list(OBJECTIVES),
        help="names of objectives, with semicolons between them",
    )
    parser.add_argument(
        "--methods", type=lambda t: t.split(","), default=list(methods), help=", ".join(methods)
    )
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        serve(chosen)
        return
    unknown = [n for n in chosen.only if n not in OBJECTIVES]
    if unknown:
        parser.error(f"unknown objective {unknown[0]!r}; there are {'; '.join(OBJECTIVES)}")
    logits = chosen.tokens * chosen.vocabulary * 4 / MIB
    rows = [
        [
            "objective",
            "sweeps",
            "error",
            "peak MiB",
            "logits MiB",
            "of the logits",
            "Inductor's peak",
            "time / eager",
            "/ Inductor",
            "/ auto_chunker",
            "/ linear_cross_entropy",
        ]
    ]
    answers: dict[str, dict] = {}
    for name in chosen.only:
        flags = [
            f"--{k}={getattr(chosen, k)}"
            for k in ("tokens", "vocabulary", "width", "batch", "rounds", "threads")
        ]
        command = [sys.executable, __file__, "--one", name, "--methods", ",".join(chosen.methods), *flags]
        answer = answers[name] = last_answer(command, LIMIT)
        rows.append(line(name, answer, logits))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    text = "\n".join(
        "| " + " | ".join(row) + " |" for row in (rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:])
    )
    about = (
        f"T={chosen.tokens}, B={chosen.batch}, V={chosen.vocabulary}, d={chosen.width}, float32, "
        f"{chosen.threads} threads; head and loss alone"
    )
    failed = failures(answers, logits)
    ending = "\n".join([f"{len(failed)} of {len(answers)} rows fail", *(f"- {row}" for row in failed)])
    print(f"\n{about}\n\n{text}\n\n{ending}")
    if chosen.save:
        RESULTS.mkdir(exist_ok=True)
        command = " ".join(["python benchmarks/objectives.py", *sys.argv[1:]])
        (RESULTS / f"{chosen.save}.md").write_text(
            f"`{command}`\n\n{about}\n\n{text}\n\n{ending}\n", encoding="utf-8"
        )
    sys.exit(min(len(failed), 100))


if __name__ == "__main__":
    main()

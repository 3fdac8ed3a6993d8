"""Random small models against eager: is each exact, does any crash, does any keep more than it may?

    python benchmarks/soak.py --count 2000 --jobs 2      seeds 0 to 1999
    python benchmarks/soak.py --start 500 --count 100    a hundred others
    python benchmarks/soak.py --seed 17                  one, with its source text
    python benchmarks/soak.py --count 2000 --save soak   also to benchmarks/results/soak.md
    python benchmarks/soak.py --in-turns                 sequences one at a time wherever they do not meet
    python benchmarks/soak.py --kind several             layers over prompts, patches, latents as well
    python benchmarks/soak.py --kind operators           chains of any operators along the tokens for layers
    python benchmarks/soak.py --kind padded              such chains on tokens that are padded to whole blocks

A seed determines a model (`benchmarks/random_models`), a loss, sizes, padding, precision and chunk length. It
is compiled once and takes three training steps, two at one length and one sometimes at another; some run
without gradients as well. Chunk bodies run node by node (``--inductor`` compiles them). *Exact*: in float64,
every gradient within 1e-9 of eager's; in lower precision, all gradients together no further from the truth in
float64 than three times eager's distance, and a few units in the last place. *Bound*: nothing that a streamed
region keeps at full length is wider per token than eight times the widest of its inputs, outputs and rows
looked up for token ids, and nothing has a row and a column per token. Refused regions are exact, and are
counted by their messages. What eager itself cannot run is passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 180.0
KINDS = ("usual", "several", "operators", "padded")


def serve(chosen: argparse.Namespace) -> None:
    """Answer seeds, one a line."""
    from benchmarks.processes import answers, send
    from benchmarks.random_models.trial import attempt

    stream = answers()
    prepare(chosen)
    for line in sys.stdin:
        seed, start = json.loads(line)["seed"], time.perf_counter()
        send(
            stream,
            dict(attempt(seed, chosen.kind), seed=seed, seconds=round(time.perf_counter() - start, 1)),
        )


def prepare(chosen: argparse.Namespace) -> None:
    """Make this process run models as it is asked to."""
    import torch

    from benchmarks.zoo import interpret_bodies
    from streambp_compile.regions import batch_parts

    torch.set_num_threads(1)
    if not chosen.inductor:
        interpret_bodies()
    if chosen.in_turns:  # whatever it saves, and whatever it costs
        batch_parts.WORTH = sys.maxsize
        batch_parts.sequences_at_once = lambda *_: 1


def soak(seeds: list[int], chosen: argparse.Namespace) -> list[dict]:
    """The answers of all seeds; every process takes the next that is left."""
    left, results, lock = iter(seeds), [], threading.Lock()
    end = time.monotonic() + 60 * chosen.minutes

    def work() -> None:
        worker, served = None, 0
        while True:
            with lock:
                seed = next(left, None) if time.monotonic() < end else None
            if seed is None:
                break
            if worker is None:
                worker, served = started(chosen), 0
            worker.ask(dict(seed=seed))
            answer = worker.answer(chosen.limit)
            served += 1
            if "error" in answer:
                answer = dict(
                    seed=seed, failures=[f"crash: {answer['error']}"], refusals=[], seconds=chosen.limit
                )
                worker.kill()
                worker = None
            elif served == 100:  # a process grows with what it has compiled
                worker.stop()
                worker = None
            with lock:
                results.append(answer)
                print(f"{len(results)}: seed {seed}, {answer['seconds']} s", file=sys.stderr, flush=True)
                for text in answer["failures"]:
                    print(f"seed {seed}: {text}", file=sys.stderr, flush=True)
                for text in set(map(shown, answer["refusals"])) if chosen.refusals else ():
                    print(f"seed {seed}: refused: {text}", file=sys.stderr, flush=True)
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=work) for _ in range(chosen.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def started(chosen: argparse.Namespace):
    from benchmarks.processes import start

    log = Path(tempfile.mkstemp(prefix="soak_", suffix=".log")[1])
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--serve",
        *(["--inductor"] if chosen.inductor else []),
        *(["--in-turns"] if chosen.in_turns else []),
        *("--kind", chosen.kind),
    ]
    return start(command, log, dict(os.environ, OMP_NUM_THREADS="1"))


def shown(text: str) -> str:
    """A message without what differs from model to model."""
    text = re.sub(r"streambp cannot stream a region: ", "", text)
    text = re.sub(r" at \S+:\d+: .*?: ", ": ", text, count=1)
    text = re.sub(r", and its largest value takes [\d.]+ MiB at full length", "", text)
    return re.sub(r"\d+(\.\d+)?", "N", text).split(". The region runs")[0][:150]


def without_folder(text: str) -> str:
    """A message without the folder and the name of the file that a model was written to for this run."""
    return re.sub(r"\S*soak_\d+_\d+\.py", "the model", text)


def summary(results: list[dict], count: int) -> str:
    failed = sorted((a for a in results if a["failures"]), key=lambda a: a["seed"])
    refusals, seeds = Counter(), defaultdict(list)
    for answer in results:
        for text in set(map(shown, answer["refusals"])):
            refusals[text] += 1
            seeds[text].append(answer["seed"])
    counts = ("streamed", "in_turns", "refused")
    streamed, in_turns, refused = (sum(a.get(k, 0) for a in results) for k in counts)
    lines = [
        f"{len(results)} of {count} models, {len(failed)} failed; {streamed} regions streamed"
        f"{f' ({in_turns} in turns)' if in_turns else ''}, {refused} refused; "
        f"{sum(a['seconds'] for a in results) / max(1, len(results)):.1f} seconds a model",
        "",
        *(f"- seed {a['seed']}: {without_folder('; '.join(a['failures']))}" for a in failed),
        "",
        "| models | message | seeds |",
        "| --- | --- | --- |",
    ]
    for text, number in refusals.most_common():
        lines.append(
            f"| {number} | {text.replace('|', '¦')} | {', '.join(map(str, sorted(seeds[text])[:4]))} |"
        )
    return "\n".join(lines)


def show(seed: int, chosen: argparse.Namespace) -> dict:
    """One seed in this process, with its source."""
    from benchmarks.random_models.model import example
    from benchmarks.random_models.trial import attempt

    prepare(chosen)
    print(example(seed, chosen.kind).source)
    answer = attempt(seed, chosen.kind)
    print(answer.pop("trace", ""))
    print("\n".join(answer["refusals"]))
    return dict(answer, seed=seed, seconds=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="number of seeds (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=int, help="run this one and print its source")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a model (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no model after so many minutes"
    )
    parser.add_argument("--refusals", action="store_true", help="print refusals as they come")
    parser.add_argument("--inductor", action="store_true", help="compile chunk bodies")
    parser.add_argument(
        "--in-turns", action="store_true", help="run sequences of a batch one at a time wherever that may be"
    )
    parser.add_argument("--kind", choices=KINDS, default="usual", help="of models (%(default)s)")
    parser.add_argument("--save", metavar="NAME", help="also write the summary to benchmarks/results/NAME.md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if chosen.serve:
        serve(chosen)
        return 0
    if chosen.seed is not None:
        answer = show(chosen.seed, chosen)
        print("\n".join(answer["failures"]) or "exact")
        return 1 if answer["failures"] else 0
    results = soak(list(range(chosen.start, chosen.start + chosen.count)), chosen)
    text = summary(results, chosen.count)
    print(text)
    if chosen.save:
        command = " ".join(["python benchmarks/soak.py", *sys.argv[1:]])
        (RESULTS / f"{chosen.save}.md").write_text(f"`{command}`\n\n{text}\n", encoding="utf-8")
    return 1 if any(a["failures"] for a in results) else 0


if __name__ == "__main__":
    sys.exit(main())

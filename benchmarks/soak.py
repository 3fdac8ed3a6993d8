"""Random small models against eager: is each exact, does any crash, does any keep more than it may?

    python benchmarks/soak.py --count 2000 --jobs 2      seeds 0 to 1999
    python benchmarks/soak.py --start 500 --count 100    a hundred others
    python benchmarks/soak.py --seed 17                  one, with its source text
    python benchmarks/soak.py --count 2000 --save soak   also to benchmarks/results/soak.md

A seed determines a model (`benchmarks/random_models`), a loss, sizes, padding, precision and chunk length. It
is compiled once and takes three training steps, two at one length and one sometimes at another; some run
without gradients as well. Chunk bodies run node by node (``--inductor`` compiles them). *Exact*: in float64,
every gradient within 1e-9 of eager's; in lower precision, all gradients together no further from the truth in
float64 than three times eager's distance, and a few units in the last place. *Bound*: nothing that a streamed
region keeps at full length is wider per token than eight times the widest of its inputs and outputs, and
nothing has a row and a column per token. Refused regions are exact, and are counted by their messages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXACT, FACTOR, LIMIT = 1e-9, 8, 180.0
SLOW = "The analysis has taken"  # what a busy machine makes it say
DEFECTS = ("An internal error occurred", "reached its limit")


# One model


def loaded(example):
    """The source as a module with a file of its own, which messages quote."""
    path = Path(tempfile.gettempdir()) / f"soak_{os.getpid()}_{example.seed}.py"
    path.write_text(example.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Dynamo looks it up
    spec.loader.exec_module(module)
    return module, path


def attempt(seed: int) -> dict:
    """Run one seed: ``failures``, ``refusals``, and counts."""
    import torch

    from benchmarks.random_models.model import example

    torch._dynamo.reset()
    torch.manual_seed(seed)
    found = example(seed)
    module, path = loaded(found)
    try:
        return Trial(module, found.settings).run()
    except Exception as error:  # noqa: BLE001 (whatever breaks is what the soak is for)
        where = [
            f.name for f in traceback.extract_tb(error.__traceback__) if "streambp_compile" in f.filename
        ]
        return dict(
            failures=[f"crash: {first_line(error)} in {' '.join(where[-2:])}"],
            refusals=[],
            trace=traceback.format_exc(),
        )
    finally:
        del sys.modules[module.__name__]
        path.unlink(missing_ok=True)


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


class Trial:
    """One model in its settings, eager and compiled."""

    def __init__(self, module, settings):
        import torch

        from streambp_compile.backend import Chain
        from streambp_compile.config import Config
        from streambp_compile.report import Report

        self.module, self.settings, self.report = module, settings, Report()
        self.dtype = getattr(torch, settings.dtype)
        self.model = module.Model().to(self.dtype)
        self.truth = module.Model().double()
        self.truth.load_state_dict(self.model.state_dict())
        config, report = Config(chunk_size=settings.chunk), self.report

        def backend(graph, inputs):
            return Chain(graph, inputs, config, report).compiled()

        self.compiled = torch.compile(self.stepped, backend=backend, dynamic=settings.dynamic)

    def stepped(self, **batch):
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.autocast):
            return self.model(**batch)

    def batch(self, length: int, dtype) -> dict:
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self.module.batch(length).items()
        }

    def run(self) -> dict:
        failures, low = [], self.settings.dtype != "float64"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for length in (self.settings.tokens, self.settings.tokens, self.settings.second):
                failures += self.differences(length, low)
            failures += [] if low or self.settings.tokens % 8 else self.without_gradients()
        texts = [
            str(w.message) for w in caught if "streambp" in str(w.message) and SLOW not in str(w.message)
        ]
        failures += [f"defect: {text}" for text in texts if any(d in text for d in DEFECTS)]
        failures += overweight(self.report)
        streamed = sum(r.times for r in self.report.regions if r.streamed is not None)
        refused = sum(r.times for r in self.report.regions if r.refusal is not None)
        return dict(
            failures=list(dict.fromkeys(failures)), refusals=texts, streamed=streamed, refused=refused
        )

    def differences(self, length: int, low: bool) -> list[str]:
        from benchmarks.zoo import largest_error

        batch = self.batch(length, self.dtype)
        truth = gradients(self.truth, lambda **b: self.truth(**b), self.batch(length, self.truth_dtype()))
        if not all(t.isfinite().all() for t in truth):
            return []
        ours = gradients(self.model, self.compiled, batch)
        if not low:
            error = largest_error(ours, truth)
            return [] if error <= EXACT else [f"wrong: {error:.0e} at {length} tokens"]
        import torch

        error = total_error(ours, truth)
        bound = 3 * total_error(gradients(self.model, self.stepped, batch), truth)
        unit = torch.finfo(torch.bfloat16 if self.settings.autocast else self.dtype).eps
        return (
            []
            if error <= bound + 8 * unit
            else [f"wrong: {error:.0e}, bound {bound:.0e}, at {length} tokens"]
        )

    def truth_dtype(self):
        import torch

        return torch.float64

    def without_gradients(self) -> list[str]:
        import torch

        batch = self.batch(self.settings.tokens, self.dtype)
        with torch.no_grad():
            ours, truth = self.compiled(**batch), self.model(**batch)
        close = torch.allclose(ours, truth, rtol=1e-9, atol=1e-12, equal_nan=True)
        return [] if close else ["wrong: the forward without gradients"]


def gradients(model, step, batch: dict) -> list:
    """The loss and the gradient of every parameter, zeros where there is none."""
    import torch

    model.zero_grad()
    value = step(**batch)
    value.backward()
    grads = (torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())
    return [value.detach(), *grads]


def total_error(found: list, truth: list) -> float:
    """The relative error of all gradients together."""
    wrong = sum((f.double() - t).norm() ** 2 for f, t in zip(found[1:], truth[1:], strict=True))
    return (wrong / sum(t.norm() ** 2 for t in truth[1:])).sqrt().item()


def overweight(report) -> list[str]:
    """What streamed regions keep at full length and should not."""
    return [text for region in report.regions if region.streamed is not None for text in kept_by(region)]


def kept_by(region) -> list[str]:
    from streambp_compile.passes.ir import Tokens, bytes_of, is_tensor, value_of
    from streambp_compile.pipeline import outputs_of

    streamed, found = region.streamed, []
    facts, outside = streamed.analysis.facts, {*streamed.placeholders, *outputs_of(streamed.joint)}
    rows = [n for n in outside if hasattr(n, "op") and isinstance(facts.get(n), Tokens) and is_tensor(n)]
    bound = FACTOR * max((bytes_of(value_of(n)) for n in rows), default=0)
    for schedule in filter(None, (streamed.forward, streamed.backward)):
        program = schedule.program
        written = {n for s in program.sweeps for n in (*s.writes, *s.keysums)}
        for node in written.union(*program.full_length).difference(outside):
            fact = facts.get(node)
            if (
                not isinstance(fact, Tokens)
                or not is_tensor(node)
                or not value_of(node).dtype.is_floating_point
            ):
                continue
            if fact.keys is not None and fact.rows is not None and not views(node):
                found.append(f"over its bound: {node.target} has a row and a column per token")
            if bytes_of(value_of(node)) > bound:
                found.append(
                    f"over its bound: {node.target} takes {bytes_of(value_of(node))} of {bound} bytes"
                )
    return found


def views(node) -> bool:
    """Is a value a view, which takes no memory?"""
    from streambp_compile.passes.rules import cost_of
    from streambp_compile.passes.rules.facets import CostClass

    return cost_of(node) is CostClass.VIEW


# Many of them


def serve(inductor: bool) -> None:
    """Answer seeds, one a line."""
    import torch

    from benchmarks.processes import answers, send
    from benchmarks.zoo import interpret_bodies

    stream = answers()
    torch.set_num_threads(1)
    if not inductor:
        interpret_bodies()
    for line in sys.stdin:
        seed, start = json.loads(line)["seed"], time.perf_counter()
        send(stream, dict(attempt(seed), seed=seed, seconds=round(time.perf_counter() - start, 1)))


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
    ]
    return start(command, log, dict(os.environ, OMP_NUM_THREADS="1"))


def shown(text: str) -> str:
    """A message without what differs from model to model."""
    text = re.sub(r"streambp cannot stream a region: ", "", text)
    text = re.sub(r" at \S+:\d+: .*?: ", ": ", text, count=1)
    text = re.sub(r", and its largest value takes [\d.]+ MiB at full length", "", text)
    return re.sub(r"\d+(\.\d+)?", "N", text).split(". The region runs")[0][:150]


def summary(results: list[dict], count: int) -> str:
    failed = sorted((a for a in results if a["failures"]), key=lambda a: a["seed"])
    refusals, seeds = Counter(), defaultdict(list)
    for answer in results:
        for text in set(map(shown, answer["refusals"])):
            refusals[text] += 1
            seeds[text].append(answer["seed"])
    streamed, refused = (sum(a.get(k, 0) for a in results) for k in ("streamed", "refused"))
    lines = [
        f"{len(results)} of {count} models, {len(failed)} failed; {streamed} regions streamed, "
        f"{refused} refused; "
        f"{sum(a['seconds'] for a in results) / max(1, len(results)):.1f} seconds a model",
        "",
        *(f"- seed {a['seed']}: {'; '.join(a['failures'])}" for a in failed),
        "",
        "| models | message | seeds |",
        "| --- | --- | --- |",
    ]
    for text, number in refusals.most_common():
        lines.append(
            f"| {number} | {text.replace('|', '¦')} | {', '.join(map(str, sorted(seeds[text])[:4]))} |"
        )
    return "\n".join(lines)


def show(seed: int, inductor: bool) -> dict:
    """One seed in this process, with its source."""
    import torch

    from benchmarks.random_models.model import example
    from benchmarks.zoo import interpret_bodies

    torch.set_num_threads(1)
    if not inductor:
        interpret_bodies()
    print(example(seed).source)
    answer = attempt(seed)
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
    parser.add_argument("--save", metavar="NAME", help="also write the summary to benchmarks/results/NAME.md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if chosen.serve:
        serve(chosen.inductor)
        return 0
    if chosen.seed is not None:
        answer = show(chosen.seed, chosen.inductor)
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

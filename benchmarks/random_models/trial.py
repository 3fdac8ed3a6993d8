"""One random model against eager: its gradients, its messages, and what its streamed regions keep."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from benchmarks.processes import first_line

EXACT, FACTOR = 1e-9, 8
SLOW = "The analysis has taken"  # what a busy machine makes it say
DEFECTS = ("An internal error occurred", "reached its limit")


def loaded(example):
    """The source as a module with a file of its own, which messages quote."""
    path = Path(tempfile.gettempdir()) / f"soak_{os.getpid()}_{example.seed}.py"
    path.write_text(example.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Dynamo looks it up
    spec.loader.exec_module(module)
    return module, path


def attempt(seed: int, kind: str = "usual") -> dict:
    """Run one seed: ``failures``, ``refusals``, and counts."""
    import torch

    from benchmarks.random_models.model import example

    torch._dynamo.reset()
    torch.manual_seed(seed)
    found = example(seed, kind)
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


class Trial:
    """One model in its settings, eager and compiled."""

    def __init__(self, module, settings):
        import torch

        from streambp_compile.backend import Reporting
        from streambp_compile.config import Config
        from streambp_compile.reporting.report import Report

        self.module, self.settings, self.report = module, settings, Report()
        self.dtype = getattr(torch, settings.dtype)
        self.model = module.Model().to(self.dtype)
        self.truth = module.Model().double()
        self.truth.load_state_dict(self.model.state_dict())
        backend = Reporting(Config(chunk_size=settings.chunk), self.report)
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
        regions, streamed = self.report.regions, [r for r in self.report.regions if r.streamed is not None]
        return dict(
            failures=list(dict.fromkeys(failures)),
            refusals=texts,
            streamed=sum(r.times for r in streamed),
            in_turns=sum(r.times for r in streamed if r.streamed.batch is not None),
            refused=sum(r.times for r in regions if r.refusal is not None),
        )

    def differences(self, length: int, low: bool) -> list[str]:
        import torch

        from benchmarks.zoo import largest_error

        batch = self.batch(length, self.dtype)
        try:
            truth = gradients(self.truth, lambda **b: self.truth(**b), self.batch(length, torch.float64))
        except RuntimeError:  # eager itself cannot: a padding takes more rows away than the text has
            return []
        if not all(t.isfinite().all() for t in truth):
            return []
        if not low:
            error = largest_error(gradients(self.model, self.compiled, batch), truth)
            return [] if error <= EXACT else [f"wrong: {error:.0e} at {length} tokens"]
        try:
            bound = 3 * total_error(gradients(self.model, self.stepped, batch), truth)
        except RuntimeError:  # eager itself cannot: the lowest float32, written into bfloat16 scores
            return []
        error = total_error(gradients(self.model, self.compiled, batch), truth)
        if bound != bound:  # eager itself has no finite gradients in this precision
            return []
        unit = torch.finfo(torch.bfloat16 if self.settings.autocast else self.dtype).eps
        return (
            []
            if error <= bound + 8 * unit
            else [f"wrong: {error:.0e}, bound {bound:.0e}, at {length} tokens"]
        )

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
    from streambp_compile.passes.ir import Tokens, bytes_of, is_tensor, outputs_of, value_of
    from streambp_compile.passes.width import needed_values

    streamed, found = region.streamed, []
    facts, outside = streamed.analysis.facts, {*streamed.placeholders, *outputs_of(streamed.joint)}
    for schedule in filter(None, (streamed.forward, streamed.backward)):
        program = schedule.program
        needed = {*outside, *needed_values(program, streamed.analysis)}
        rows = [n for n in needed if hasattr(n, "op") and isinstance(facts.get(n), Tokens) and is_tensor(n)]
        bound = FACTOR * max((bytes_of(value_of(n)) for n in rows), default=0)
        written = {n for s in program.sweeps for n in (*s.writes, *s.keysums)}
        for node in written.union(*program.full_length).difference(outside):
            fact = facts.get(node)
            if (
                not isinstance(fact, Tokens)
                or not is_tensor(node)
                or not value_of(node).dtype.is_floating_point
                or views(node)
            ):
                continue
            if fact.keys is not None and fact.rows is not None:
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

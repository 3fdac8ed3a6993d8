"""Runs the jobs of a part, each in a process of its own, within a time budget, and writes every finding as
soon as it is there."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from benchmarks import processes

GRACE = 10.0  # seconds between asking a process to stop and stopping it
EXIT = 5.0  # seconds that a process which has answered everything may take to end
RESERVE = 8.0  # seconds kept at the end of a part to write its tables
SLOWER = 6  # limits are for a GPU's machine; others take longer to compile, which is what a tiny model does


@dataclass(frozen=True)
class Job:
    """One process: a method, what it measures in order of worth, and its time limit in seconds."""

    name: str
    cases: tuple[dict, ...]
    limit: float


@dataclass(frozen=True)
class Settings:
    """
    kind       ``"cuda"``, ``"cpu"`` or ``"fake"``, see `benchmarks.on_gpu.stage`
    scale      name of a constant of `benchmarks.on_gpu.scale`
    minutes    for each part
    rounds     timed steps of each method at each length
    beside     jobs of the correctness part that run at the same time; all others run one after another
    threads    on a CPU
    interpret  run chunk bodies node by node, for what is about the measuring code and not about the bodies
    only       names of jobs to run, all if empty
    folder     where tables and findings are written
    worker     the command that starts a worker
    command    what the user typed
    machine    one line about the machine and the versions of its software
    """

    kind: str
    scale: str
    minutes: float
    rounds: int
    beside: int
    threads: int
    interpret: bool
    only: tuple[str, ...]
    folder: Path
    worker: tuple[str, ...]
    command: str
    machine: str


@dataclass
class Run:
    """One part being run; ``findings`` holds a dictionary for each thing measured, with its job and its
    case."""

    part: ModuleType
    name: str
    settings: Settings
    scratch: Path
    started: float = field(default_factory=time.monotonic)
    findings: list[dict] = field(default_factory=list)
    spare: processes.Worker | None = None
    workers: int = 0
    writing: threading.RLock = field(default_factory=threading.RLock)

    def left(self) -> float:
        return self.settings.minutes * 60 - RESERVE - (time.monotonic() - self.started)

    @property
    def beside(self) -> int:
        """How many jobs run at the same time: one where seconds or the device's memory are measured."""
        return self.settings.beside if getattr(self.part, "ANY_NUMBER_AT_A_TIME", False) else 1

    def jobs(self, jobs: list[Job]) -> None:
        try:
            if self.beside > 1:
                with ThreadPoolExecutor(self.beside) as pool:
                    list(pool.map(self.job, jobs))
            else:
                for job in jobs:
                    self.job(job)
        finally:
            if self.spare is not None:
                self.spare.kill()
            self.write()

    def job(self, job: Job) -> None:
        """Run a job's cases. After a process that died, another one goes on behind the case that it died
        of."""
        limit = job.limit * (1 if self.settings.kind == "cuda" else SLOWER)
        end = time.monotonic() + min(limit, max(self.left(), 0.0))
        cases = list(job.cases)
        while cases and end - time.monotonic() > GRACE:
            cases = cases[self.cases(job, cases, end) :]
        for case in cases:
            self.add(
                job,
                case,
                {
                    "left": "not run: no time left"
                    if self.left() <= GRACE
                    else f"not run: more than {limit:.0f} s"
                },
            )

    def cases(self, job: Job, cases: list[dict], end: float) -> int:
        """Let one process do cases; returns how many of them are settled."""
        worker, current = self.worker(), 0
        seconds = end - time.monotonic()
        told = {
            key: getattr(self.settings, key) for key in ("kind", "scale", "rounds", "threads", "interpret")
        }
        worker.ask(
            {
                "part": self.part.__name__,
                "job": job.name,
                "cases": cases,
                "seconds": seconds - GRACE,
                "known": self.findings,
                **told,
            }
        )
        if self.settings.kind == "cuda" and self.beside == 1:
            self.spare = self.start()  # it imports its libraries meanwhile
        while current < len(cases):
            answer = worker.answer(max(end - time.monotonic(), 0.1))
            if "found" in answer:
                self.add(job, cases[current], answer["found"])
                if "failed" in answer["found"]:
                    print(worker.tail(), file=sys.stderr, flush=True)
            elif "finished" in answer:
                current += 1
            elif answer.get("ended"):
                if worker.process.returncode == 0:  # it saw that no time is left
                    break
                if not self.failed(job, cases[current]):
                    self.add(job, cases[current], {"failed": answer["error"]})
                print(worker.tail(), file=sys.stderr, flush=True)
                return current + 1
        worker.stop(EXIT)
        return current

    def failed(self, job: Job, case: dict) -> bool:
        return any(f["job"] == job.name and f["case"] == case and "failed" in f for f in self.findings)

    def worker(self) -> processes.Worker:
        spare, self.spare = self.spare, None
        return spare or self.start()

    def start(self) -> processes.Worker:
        with self.writing:
            self.workers += 1
            log = self.scratch / f"{self.workers}.log"
        return processes.start(self.settings.worker, log)

    def add(self, job: Job, case: dict, found: dict) -> None:
        finding = {"part": self.name, "job": job.name, "case": case, **found}
        shown = {key: value for key, value in found.items() if not isinstance(value, list) or len(value) < 10}
        seconds = time.monotonic() - self.started
        print(
            f"[{seconds:4.0f} s] {self.name}: {job.name}: {json.dumps({**case, **shown})}",
            file=sys.stderr,
            flush=True,
        )
        with self.writing:
            self.findings.append(finding)
            with (self.settings.folder / "gpu.jsonl").open("a") as raw:
                print(json.dumps(finding), file=raw)
            self.write()

    def write(self) -> None:
        text = self.part.tables(self.findings, self.settings)
        page = f"`{self.settings.command}`\n\n{self.settings.machine}\n\n{text}\n"
        (self.settings.folder / f"gpu-{self.name}.md").write_text(page, encoding="utf-8")


def run(part: ModuleType, name: str, settings: Settings) -> list[dict]:
    """Run one part; returns its findings, which are in its table as well."""
    with tempfile.TemporaryDirectory(prefix="streambp-gpu-") as scratch:
        current = Run(part, name, settings, Path(scratch))
        current.jobs([job for job in part.jobs(settings) if not settings.only or job.name in settings.only])
    return current.findings


def why(finding: dict) -> str:
    """Why a finding holds no numbers; empty if it holds some."""
    return next((finding[key] for key in ("failed", "missing", "left") if key in finding), "")

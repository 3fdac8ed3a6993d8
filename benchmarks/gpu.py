"""What a machine with one GPU must show, in six parts: duel, correctness, memory, time, profile, attention.

    python benchmarks/gpu.py duel --minutes 6              beside the fastest alternatives
    python benchmarks/gpu.py duel --only whole             the same with all layers, in 79.2 GiB
    python benchmarks/gpu.py correctness --minutes 9
    python benchmarks/gpu.py memory --minutes 9
    python benchmarks/gpu.py time --minutes 9
    python benchmarks/gpu.py profile --minutes 9
    python benchmarks/gpu.py attention --minutes 2
    python benchmarks/gpu.py --all --minutes 9             all of them, in this order
    python benchmarks/gpu.py --all --minutes 9 time        from the time part on
    python benchmarks/gpu.py --dry-run                     on fake tensors: all is compiled, nothing runs
    python benchmarks/gpu.py --device cpu --tiny           everything runs, with tiny models

Every method is a process of its own with a time limit: one that fails costs its own rows, which say why.
Findings are written as they come, to ``gpu.jsonl`` and to a page of tables for each part, so that a run that
is stopped leaves what it has. They go to the folder ``$OUT`` if that is set, else to ``benchmarks/results``.
docs/gpu.md says what each part shows and what to send back.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from their configurations

from benchmarks.on_gpu.runner import Settings, run  # noqa: E402
from benchmarks.tables import processor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PARTS = {
    "duel": "duel",
    "correctness": "correctness",
    "memory": "capacity",
    "time": "timing",
    "profile": "profiling",
    "attention": "attention",
}  # in order of worth → module


def part_of(name: str):
    return importlib.import_module(f"benchmarks.on_gpu.{PARTS[name]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--all", action="store_true", help="go on with the parts behind PART")
    parser.add_argument("--minutes", type=float, default=None, help="for each part (9 on a GPU, else 60)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed steps of each method at each length (%(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="jobs of the correctness part that run at the same time (%(default)s)",
    )
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="A,B,...",
        help="jobs to run, by name",
    )
    parser.add_argument("--list", action="store_true", help="print the names of all jobs and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and lengths, which prove the measuring code"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="compile for fake tensors on a GPU, run nothing; tiny models, a scratch folder",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if chosen.minutes is None:
        chosen.minutes = 9 if chosen.device == "cuda" and not chosen.dry_run else 60
    if chosen.minutes <= 0 or min(chosen.rounds, chosen.threads, chosen.jobs) < 1:
        parser.error("--minutes must be more than 0, --rounds, --jobs and --threads 1 or more")
    if chosen.all and len(chosen.parts) > 1:
        parser.error("--all goes on from one part: name that one alone, or none")
    return chosen


def parts(chosen: argparse.Namespace) -> list[str]:
    """The parts to run, in order of worth."""
    names = list(PARTS)
    if chosen.all and chosen.parts:
        return names[names.index(chosen.parts[0]) :]
    return [name for name in names if not chosen.parts or name in chosen.parts]


def folder_of(chosen: argparse.Namespace) -> Path:
    """``$OUT`` or the results of this project; a scratch folder for a dry run and for tiny models."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    return Path(tempfile.mkdtemp(prefix="streambp-gpu-tables-")) if chosen.dry_run or chosen.tiny else RESULTS


def settings_of(chosen: argparse.Namespace) -> Settings:
    folder = folder_of(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return Settings(
        kind="fake" if chosen.dry_run else chosen.device,
        scale="TINY" if chosen.tiny or chosen.dry_run else "REAL",
        minutes=chosen.minutes,
        rounds=chosen.rounds,
        beside=chosen.jobs,
        threads=chosen.threads,
        interpret=interpreted(chosen),
        only=chosen.only,
        folder=folder,
        worker=(sys.executable, str(Path(__file__).resolve()), "--worker"),
        command=shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        machine=machine(chosen),
    )


def interpreted(chosen: argparse.Namespace) -> bool:
    """Tiny models on a CPU prove the measuring code: Inductor would take most of the time, and shows nothing
    more."""
    return chosen.tiny and chosen.device == "cpu"


def machine(chosen: argparse.Namespace) -> str:
    """One line that a reader needs to judge the numbers."""
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if chosen.device == "cpu":
        bodies = "; chunk bodies were interpreted: no number says anything about streambp" * interpreted(
            chosen
        )
        return (
            f"{processor()}, {chosen.threads} threads; every method attends by the one fused "
            f"kernel of CPUs; {versions}{bodies}"
        )
    if not torch.cuda.is_available():
        sys.exit("gpu.py: torch finds no GPU. Choose --device cpu --tiny to try the measuring code on a CPU.")
    properties = torch.cuda.get_device_properties(0)
    name = "nothing ran: fake tensors on " * chosen.dry_run + properties.name
    import triton

    return (
        f"{name}, {properties.total_memory / 2**30:.1f} GiB, "
        f"capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}; {versions}, triton {triton.__version__}"
    )


def main() -> int:
    chosen = arguments()
    if chosen.worker:
        from benchmarks.on_gpu.worker import serve

        serve()
        return 0
    try:
        import streambp_compile.backend  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"gpu.py: {error}. Install the project first: pip install --no-deps --no-build-isolation -e ."
        )
    settings = settings_of(chosen)
    if chosen.list:
        for name in parts(chosen):
            print("\n".join(f"{name}: {job.name}" for job in part_of(name).jobs(settings)))
        return 0
    failed = 0
    for name in parts(chosen):
        findings = run(part_of(name), name, settings)
        failed += sum("failed" in f or f.get("passed") is False for f in findings)
        print(f"\n# {name}\n\n{(settings.folder / f'gpu-{name}.md').read_text()}", flush=True)
    print(f"tables and findings are in {settings.folder}; {failed} findings failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

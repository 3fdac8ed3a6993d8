"""Engines and trainers: what streams, with which collectives, in how much memory. Each setup is trained
eagerly, with activation checkpointing and streamed.

    python -m benchmarks.engines                      # all setups whose packages are installed
    python -m benchmarks.engines --only "FSDP2*"      # some
    python -m benchmarks.engines --lengths 97,61,80   # over these lengths
    python -m benchmarks.engines --only "FSDP2*" --save   # renews these rows of the saved table

Chunk bodies are interpreted: compiling them takes minutes, and changes neither gradients nor peaks by much.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .ranks import Ranks
from .setups.measurement import Row, measured
from .tables import MIB, markdown

# Processes of each family of setups.
FAMILIES = {
    "ddp": 2,
    "fsdp2": 2,
    "deepspeed_zero": 2,
    "parallel": 2,
    "tensor_parallel": 4,
    "context_parallel": 2,
    "expert_parallel": 2,
    "compilation": 1,
    "adapters": 1,
    "quantized": 1,
    "trainers": 1,
    "trl_trainers": 1,
}
DIVIDED = {"tensor_parallel", "context_parallel"}  # of as many tokens as the processes divide evenly
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engines.md"
HEADS = (
    "setup",
    "error",
    "layers",
    "head",
    "graphs",
    "collectives",
    "eager's",
    "peak MiB",
    "checkpointed",
    "what it says",
)


def row_of(family: str, name: str, lengths: Sequence[int]) -> Row:
    """In a process of the group."""
    from . import zoo

    zoo.interpret_bodies()
    divisor = 2 * FAMILIES[family] if family in DIVIDED else 1
    return measured(setups_of(family)[name], [n - n % divisor for n in lengths])


def setups_of(family: str) -> dict:
    """The setups of a module; none where a package that it needs is missing."""
    try:
        return importlib.import_module(f"benchmarks.setups.{family}").SETUPS
    except ModuleNotFoundError as missing:
        print(f"{family}: left out, {missing.name} is not installed")
        return {}


def reasons(family: str) -> dict[str, str]:
    """Why something does not stream, of setups where this package has nothing to say about it."""
    return getattr(importlib.import_module(f"benchmarks.setups.{family}"), "REASONS", {})


def cells(name: str, row: Row, reason: str) -> list[str]:
    def text(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"

    return [
        name,
        f"{row.error:.0e}",
        "yes" if row.layers else "no",
        "yes" if row.head else "no",
        str(row.graphs),
        text(row.collectives),
        text(row.expected),
        f"{row.peak / MIB:.1f}",
        f"{row.checkpointed / MIB:.1f}",
        "; ".join(n.removeprefix("streambp: ").split(". ")[0].replace(f"{ROOT}/", "") for n in row.notes)
        or reason,
    ]


def failed(name: str, error: Exception) -> list[str]:
    return [name, *["-"] * (len(HEADS) - 2), f"failed: {str(error).strip().splitlines()[-1][:120]}"]


def run(pattern: str, lengths: Sequence[int], keep: Callable[[list[str]], object]) -> list[list[str]]:
    """A row of the table for each setup whose name matches; each is kept when it is there."""
    table = []
    for family, world in FAMILIES.items():
        names = [n for n in setups_of(family) if fnmatch.fnmatch(n, pattern)]
        ranks = Ranks(world) if names else None
        for name in names:
            try:
                row = joined(ranks.run(row_of, family, name, lengths))
                table.append(cells(name, row, reasons(family).get(name, "nothing")))
            except TimeoutError as error:
                table.append(failed(name, error))
                ranks = Ranks(world)
            except RuntimeError as error:
                table.append(failed(name, error))
            print(" | ".join(table[-1]), flush=True)
            keep(table[-1])
        if ranks is not None:
            ranks.close()
    return table


def joined(rows: Sequence[Row]) -> Row:
    """One row for all processes: of the one with the largest error, with all that any of them says.

    The stages of a pipeline have different layers, and one of them has the head.
    """
    return replace(
        max(rows, key=lambda row: row.error),
        layers=all(row.layers for row in rows),
        head=any(row.head for row in rows),
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="a pattern of setups' names")
    parser.add_argument("--lengths", default="97", help="numbers of tokens, with commas")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    chosen = parser.parse_args()
    lengths = [int(n) for n in chosen.lengths.split(",")]
    print(markdown(HEADS, run(chosen.only, lengths, save if chosen.save else lambda row: None)))


def save(row: list[str]) -> None:
    """Write the table with this row; those of other setups stay as they were saved."""
    known = {r[0]: r for r in (*saved(), row)}
    order = [name for family in FAMILIES for name in setups_of(family)]
    names = sorted(known, key=lambda n: order.index(n) if n in order else len(order))
    table = markdown(HEADS, [known[n] for n in names])
    RESULTS.write_text(f"{PREFACE}\n\n{table}\n")


def saved() -> list[list[str]]:
    """The rows of the saved table, as they were written."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


PREFACE = """# Engines and trainers

`python -m benchmarks.engines --save`: sequences of 97 tokens (96 where processes share them) in chunks of
16, small models on a CPU, chunk bodies interpreted. Rows are of several commits. *error*: the largest
relative error of a parameter's gradient (of its change after a step or two, for trainers and DeepSpeed)
against the same setup without streaming. Decoders of this repository are in float64, where ZeRO reduces
gradients in float32; models of Hugging Face compute norms and losses in float32, which is an error of about
1e-7 by itself. *layers*, *head*: do all layers, and the head with its loss, stream? *collectives*: of one
step. *what it says*: every warning, and in parentheses what is known of a part that does not stream without
one."""


if __name__ == "__main__":
    main()

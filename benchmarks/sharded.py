"""What each process of FSDP2 holds: a step with one, two and four processes, each on sequences of its own.

    python -m benchmarks.sharded               # prints the table
    python -m benchmarks.sharded --save        # and writes results/sharded.md
    python -m benchmarks.sharded --tokens 512

Chunk bodies are interpreted: compiling them takes minutes, and does not change peaks by much.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from .memory import peak
from .ranks import Ranks
from .tables import MIB, markdown

WORLDS = (1, 2, 4)
RESULTS = Path(__file__).parent / "results" / "sharded.md"
HEADS = ("processes", "way", "weights", "gradients", "peak of a step", "all of it", "of one process")


@dataclass(frozen=True)
class Held:
    """What a process holds, in bytes.

    weights    its parts of the weights
    gradients  its parts of the gradients, after a step
    peak       the most that a step takes beside the weights, its gradients included
    """

    weights: int
    gradients: int
    peak: int

    @property
    def total(self) -> int:
        return self.weights + self.peak


def held(way: str, tokens: int) -> Held:
    """In a process of the group."""
    from . import zoo
    from .setups.fsdp2 import fsdp2
    from .setups.measurement import Way

    zoo.interpret_bodies()
    job = fsdp2(Way(way))
    model = job.run
    assert isinstance(model, nn.Module)
    job.step(tokens)
    model.zero_grad()
    gc.collect()
    highest = peak(lambda: job.step(tokens))
    weights = list(model.parameters())
    return Held(
        sum(map(own_bytes, weights)),
        sum(own_bytes(p.grad) for p in weights if p.grad is not None),
        highest,
    )


def own_bytes(value: Tensor) -> int:
    """Bytes of the part of a DTensor that this process holds."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size()


def rows(tokens: int) -> list[list[str]]:
    """A row for each number of processes and way of training; of several processes, the one that holds
    most."""
    table, single = [], {}
    for world in WORLDS:
        ranks = Ranks(world)
        for way in ("checkpointed", "streamed"):
            most = max(ranks.run(held, way, tokens), key=lambda found: found.total)
            share = most.total / single.setdefault(way, most.total)
            sizes = (most.weights, most.gradients, most.peak, most.total)
            table.append([str(world), way, *(f"{size / MIB:.2f}" for size in sizes), f"{share:.2f}"])
            print(" | ".join(table[-1]), flush=True)
        ranks.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each sequence")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    chosen = parser.parse_args()
    table = markdown(HEADS, rows(chosen.tokens), texts=2)
    if chosen.save:
        RESULTS.write_text(f"{PREFACE.format(tokens=chosen.tokens)}\n\n{table}\n")
    print(table)


PREFACE = """# What each process of FSDP2 holds

`python -m benchmarks.sharded --save`: a small decoder in float64, every layer and the rest sharded, on gloo;
two sequences of {tokens} tokens for every process, chunks of 16, bodies interpreted. MiB of the process that
holds most. *peak of a step*: beside the weights, with its gradients. *of one process*: all of it against the
same way of training with one process."""


if __name__ == "__main__":
    main()

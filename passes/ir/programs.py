"""Programs: sweeps over chunks of tokens, and values computed at full length between them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .bodies import ChosenKernel
from .facts import EVERYWHERE, Reach
from .values import Size, hint

SHORTEST_CHUNK = 32  # tokens; shorter ones only where the user asks for them


class Direction(enum.Enum):
    """The order in which a sweep takes its chunks."""

    ASCENDING = "ascending"  # from the first token to the last
    DESCENDING = "descending"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Sweep:
    """One loop over chunks.

    nodes            what a chunk body computes, in graph order
    writes           token values written row by row into full-length buffers (outputs and kept values)
    appended         those of ``writes`` that later rows of the same sweep read as keys
    sums             values added up over chunks
    joined           value that is added up in the accumulator of one of ``sums`` → that one
    keysums          values added up per key
    final_keysums    those of ``keysums`` whose rows at a chunk's own tokens are final when the chunk is
                     reached
    in_place         written value → the value whose memory it takes over (an input, or from an earlier
                     sweep)
    keys             range of keys that rows of a chunk reach. It includes the chunk's own rows, so that
                     no chunk is without keys
    scans            scans whose state goes from chunk to chunk
    saved_states     those of ``scans`` whose state before each chunk is saved for a later sweep
    restored_states  scans of the opposite direction, which start each chunk from such a state
    """

    direction: Direction
    nodes: tuple[Node, ...]
    writes: tuple[Node, ...]
    appended: tuple[Node, ...]
    sums: tuple[Node, ...]
    keysums: tuple[Node, ...]
    final_keysums: tuple[Node, ...]
    in_place: tuple[tuple[Node, Node], ...] = ()
    keys: Reach = EVERYWHERE
    scans: tuple[Node, ...] = ()
    saved_states: tuple[Node, ...] = ()
    restored_states: tuple[Node, ...] = ()
    joined: tuple[tuple[Node, Node], ...] = ()

    @property
    def summed(self) -> tuple[Node, ...]:
        """The nodes of which a chunk adds a part to an accumulator."""
        totals = {total for _, total in self.joined}
        return (*(n for n in self.sums if n not in totals), *(n for n, _ in self.joined))

    def __str__(self) -> str:
        """Format the sweep: ``descending, keys [-inf,0]: 41 ops; reads x, w; writes y; adds up dw``. A value
        that is written over another one is ``dx over dy``."""
        inside, over = set(self.nodes), dict(self.in_place)
        lists = {
            "reads": dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside),
            "writes": [
                f"{n} over {over[n]}" if n in over else n for n in self.writes if n not in self.appended
            ],
            "appends": self.appended,
            "carries": self.scans,
            "saves states of": self.saved_states,
            "restores states of": self.restored_states,
            "adds up": self.sums,
            "completes": self.final_keysums,
            "adds up per key": [n for n in self.keysums if n not in self.final_keysums],
        }
        parts = [f"{what} {', '.join(map(str, values))}" for what, values in lists.items() if values]
        keys = "" if self.keys == EVERYWHERE else f", keys {self.keys}"
        return "; ".join([f"{self.direction}{keys}: {len(self.nodes)} ops", *parts])


@dataclass(frozen=True)
class Program:
    """The steps of a computation, in order: ``full_length[0]``, sweep 0, ``full_length[1]``, sweep 1, …

    inputs       nodes whose values come from outside (arguments, constants, and what the forward saved)
    full_length  nodes computed at once, before each sweep and after the last: values without tokens, and
                 values of a few bytes per token that are read beyond their rows
    kept         values of sweeps that are written at full length because later sweeps read them
    outputs      nodes (or constants) to return
    statistics   those of ``kept`` that are a few numbers per token, computed from many (a log-sum-exp)
    too_wide     values at full length that are wider than a streamed program may hold; the search found
                 no program without such values
    """

    inputs: tuple[Node, ...]
    full_length: tuple[tuple[Node, ...], ...]
    sweeps: tuple[Sweep, ...]
    kept: tuple[Node, ...]
    outputs: tuple[object, ...]
    statistics: tuple[Node, ...] = ()
    too_wide: tuple[Node, ...] = ()

    def __str__(self) -> str:
        lines = []
        for step, nodes in enumerate(self.full_length):
            lines += [f"full length: {', '.join(map(str, nodes))}"] if nodes else []
            lines += [str(self.sweeps[step])] if step < len(self.sweeps) else []
        return "\n".join([*lines, f"returns {', '.join(map(str, self.outputs))}"])


def computed_by(program: Program) -> list[Node]:
    """List all nodes that a program computes, at full length and in sweeps, each once."""
    parts = (*program.full_length, *(sweep.nodes for sweep in program.sweeps))
    return list(dict.fromkeys(n for part in parts for n in part))


@dataclass(frozen=True)
class Fusion:
    """Nodes at full length that one compiled function computes.

    results  those of ``nodes`` that something else reads; each is a tensor in memory of its own
    """

    nodes: tuple[Node, ...]
    results: tuple[Node, ...]


def part_nodes(part: Node | Fusion) -> tuple[Node, ...]:
    """Return the nodes of one part at full length: a single node, or those of a fusion."""
    return part.nodes if isinstance(part, Fusion) else (part,)


def part_results(part: Node | Fusion) -> tuple[Node, ...]:
    """Return the nodes of one part whose values other nodes may read."""
    return part.results if isinstance(part, Fusion) else (part,)


@dataclass(frozen=True)
class Plan:
    """The execution of a program on a device: chunk lengths, kernels and fusions.

    chunks       tokens per chunk of every sweep
    entries      numbers per token, all sequences together, for which these lengths were chosen: a call with
                 more of them has shorter chunks. Empty where the lengths are fixed
    kernels      attention node → the kernel that computes it
    full_length  for each step of the program's ``full_length``, in order: a node by itself, or several
                 together
    """

    chunks: tuple[int, ...]
    kernels: Mapping[Node, ChosenKernel]
    full_length: tuple[tuple[Node | Fusion, ...], ...]
    entries: tuple[Size, ...] = ()

    def chunk(self, step: int, block: int, sizes: Callable[[Size], int]) -> int:
        """Return the tokens per chunk of a sweep in one call: as many numbers per chunk as planned.

        block  tokens of which a chunk holds a multiple
        """
        planned = self.chunks[step]
        if not self.entries:
            return planned
        wanted = planned * hint(self.entries[step]) // max(1, sizes(self.entries[step]))
        return max(block, wanted // block * block)

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        return tuple(part for parts in self.full_length for part in parts if isinstance(part, Fusion))

"""Assign every node to a sweep: one loop over chunks of tokens, ascending or descending.

Inside one sweep an edge is satisfied when it reads the chunk's own rows, when it reads past keys while the
sweep ascends, when it reads what later rows added while the sweep descends, or when it is a scan's and the
sweep goes its way. Anything else (a sum that somebody reads, the wrong direction, both directions) puts the
reader into a later sweep. What crosses between sweeps is kept at full length if it is read beyond its own
rows, and recomputed otherwise; a scan, in a sweep of the other direction, from its state at the start of each
chunk.

The number of sweeps, their directions, and what is kept are found: the fewest sweeps, then the fewest kept
bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torch.fx import Graph, Node

from ..ir import Analysis, Direction, Program, refuse, tensor_operands
from ..rules.views import fills_with_zeros
from .assembly import Assembly, Cost
from .full_length import FullLength, find_full_length
from .levels import Levels, levels_of, sink
from .problem import Problem

MOST_SWEEPS = 4


def partition(
    graph: Graph,
    analysis: Analysis,
    outputs: Iterable[object],
    given: Iterable[Node] = (),
    movable: Iterable[Node] = (),
) -> Program:
    """The sweeps that compute ``outputs`` from the placeholders and ``given``.

    movable  inputs that this program may overwrite (incoming gradients)
    Raises `CannotStream` where no four sweeps do.
    """
    problem = Problem(graph, analysis, tuple(outputs), frozenset(given), frozenset(movable))
    choices = [find_full_length(problem)]
    if choices[0].has_scans:
        choices.append(find_full_length(problem, carry_all=True))
    for choice in choices:
        check_domains(problem, choice)
    streamed = choices[0].streamed
    for count in range(1 if streamed else 0, MOST_SWEEPS + 1):
        for choice in choices:
            best = min(programs(problem, choice, count), key=lambda found: found[0], default=None)
            if best is not None:
                check_appended(best[1], analysis)
                return best[1]
    raise refuse(
        streamed[0],
        f"This region would need more than {MOST_SWEEPS} sweeps over its tokens",
        "Please report this model with the region's graph, as printed by streambp_compile.explain",
    )


def programs(problem: Problem, choice: FullLength, count: int) -> Iterator[tuple[Cost, Program]]:
    """All programs of that many sweeps that keep no matrix of tokens by tokens, with what they cost."""
    for directions in itertools.product(Direction, repeat=count):
        levels = levels_of(problem, choice, directions)
        if levels is None:
            continue
        found: list[Levels] = [levels]
        if choice.scans:
            found.append(sink(problem, choice, levels))
        for candidate in found:
            cost, program = Assembly(problem, choice, candidate).program()
            if not any(map(problem.is_matrix, program.kept)):
                yield cost, program


def check_domains(problem: Problem, choice: FullLength) -> None:
    """Refuse what no sweep can write: matrices of tokens by tokens, and rows beyond the tokens that are no
    zeros."""
    for node in choice.streamed:
        is_output = node in problem.outputs
        if is_output and problem.is_matrix(node):
            raise refuse(
                node,
                "A [tokens, tokens] matrix is an output of this region",
                "Build masks where they are used, from positions and padding",
            )
        filled = is_output and fills_with_zeros(node) or node in problem.analysis.shifted_copies
        if problem.has_padding(node) and tensor_operands(node) and not filled:
            raise refuse(
                node,
                "This value has more rows than there are tokens",
                "Pad labels or masks instead of hidden states",
            )


def check_appended(program: Program, analysis: Analysis) -> None:
    """Refuse keys that have several places for each token."""
    for node in (n for sweep in program.sweeps for n in sweep.appended):
        if analysis.tokens_of(node).rows.outer != 1:
            raise refuse(
                node,
                "The keys of one token are stored in several separate places",
                "Keep the token dimension separate from the other dimensions",
            )

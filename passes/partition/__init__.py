"""Assign every node to a sweep: one loop over chunks of tokens, ascending or descending.

A sweep satisfies an edge in four cases: the edge reads the chunk's own rows; it reads past keys and the
sweep ascends; it reads sums over later rows and the sweep descends; or it belongs to a scan that runs in
the sweep's direction. Any other edge (a sum that another node reads, the wrong direction, both
directions) puts the reader into a later sweep.

A value that crosses between sweeps is kept at full length if it is read beyond its own rows or cannot be
recomputed from rows (results of attention). Otherwise it is recomputed. A scan that crosses into a sweep of
the other direction starts each chunk from its saved state.

The search finds the number of sweeps, their directions and the kept values. It takes the fewest sweeps of
which none holds a value too wide (`width.too_wide`), then the fewest kept bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from ..ir import Analysis, Direction, Kind, Program, bytes_of, refuse, value_of
from ..width import too_wide
from . import assembly
from .assembly import Assembly
from .full_length import FullLength, find_full_length
from .levels import Levels, levels_of, sink
from .placement import placed_late
from .problem import Problem
from .shared_totals import shared_totals

MOST_SWEEPS = 6
ENOUGH_SWEEPS = 4  # a program that holds a wide value is not given up for one of more sweeps than these
Cost = tuple[int, assembly.Cost]  # bytes of values that are too wide, then what an assembly costs


def partition(
    graph: Graph,
    analysis: Analysis,
    outputs: Iterable[object],
    given: Iterable[Node] = (),
    movable: Iterable[Node] = (),
    gradients: Iterable[object] = (),
) -> Program:
    """Partition the computation of ``outputs`` from the placeholders and ``given`` into sweeps.

    movable    inputs that this program may overwrite (incoming gradients)
    gradients  outputs that are gradients of inputs
    Raises `CannotStream` where six sweeps do not suffice.
    """
    wanted = (tuple(outputs), frozenset(given), frozenset(movable), frozenset(gradients))
    problem = Problem(graph, analysis, *wanted)
    choices = [find_full_length(problem)]
    if choices[0].has_scans:
        choices.append(find_full_length(problem, carry_all=True))
    for choice in choices:
        check_domains(problem, choice)
    best = search(problem, choices)
    if best is not None:
        check_appended(best, analysis)
        return shared_totals(placed_late(best))
    raise refuse(
        choices[0].streamed[0],
        f"This region would need more than {MOST_SWEEPS} sweeps over its tokens",
        "Please report this model with the region's graph, as printed by streambp_compile.explain",
    )


def search(problem: Problem, choices: Sequence[FullLength]) -> Program | None:
    """Find the program of the fewest sweeps that holds no value too wide. If there is none, return the
    program found that holds the fewest bytes of such values. Once a program is found, more than
    ``ENOUGH_SWEEPS`` sweeps are not tried. None if no program exists."""
    found: list[tuple[Cost, Program]] = []
    for count in range(1 if choices[0].streamed else 0, MOST_SWEEPS + 1):
        if found and count > ENOUGH_SWEEPS:
            break
        for choice in choices:
            best = min(programs(problem, choice, count), key=lambda each: each[0], default=None)
            if best is not None and not best[1].too_wide:
                return best[1]
            found += [] if best is None else [best]
    return min(found, key=lambda each: each[0][0], default=(None, None))[1]


def programs(problem: Problem, choice: FullLength, count: int) -> Iterator[tuple[Cost, Program]]:
    """Yield all programs of ``count`` sweeps that keep no matrix of tokens by tokens, with their costs."""
    over_inputs = (False, True) if problem.movable and count > 1 else (False,)
    for candidate, over in itertools.product(assignments(problem, choice, count), over_inputs):
        cost, program = Assembly(problem, choice, candidate, over).program()
        if not any(map(problem.is_matrix, program.kept)):
            wide = too_wide(program, problem.analysis)
            excess = sum(bytes_of(value_of(n)) for n in wide)
            yield (excess, cost), replace(program, too_wide=wide)


def assignments(problem: Problem, choice: FullLength, count: int) -> Iterator[Levels]:
    """Yield every way to assign nodes to ``count`` sweeps; directions that make no difference are tried once.
    A direction matters to a sweep with a scan, or with sums of keys, which are final only if it descends.
    Of directions that differ in other sweeps, the first is preferred by cost as well (`Assembly.program`)."""
    seen = set()
    for directions in itertools.product(Direction, repeat=count):
        levels = levels_of(problem, choice, directions)
        if levels is None:
            continue
        for candidate in (levels, sink(problem, choice, levels)) if count > 1 else (levels,):
            level = candidate.of
            bound = {level[n] for n in level if problem.analysis.kinds.get(n) is Kind.KEYSUM}
            bound |= set(range(count)) if choice.scans else set()
            key = (frozenset(level.items()), tuple(d for at, d in enumerate(directions) if at in bound))
            if key not in seen:
                seen.add(key)
                yield candidate


def check_domains(problem: Problem, choice: FullLength) -> None:
    """Refuse values that no sweep can write. These are returned matrices of tokens by tokens, gradients of
    tables over pairs of positions excepted, and values with rows beyond the tokens that are not zeros."""
    for node in choice.streamed:
        is_output = node in problem.outputs
        if is_output and problem.is_matrix(node) and not problem.is_table(node):
            remedy = (
                "Give a weight for pairs of positions one row and one column for each token"
                if node in problem.gradients
                else "Build masks where they are used, from positions and padding"
            )
            raise refuse(node, "A [tokens, tokens] matrix is an output of this region", remedy)
        if problem.has_unwritten_padding(node):
            raise refuse(
                node,
                "This value has more rows than there are tokens",
                "Pad labels or masks instead of hidden states",
            )


def check_appended(program: Program, analysis: Analysis) -> None:
    """Refuse keys whose rows of one token lie in several separate places."""
    for node in (n for sweep in program.sweeps for n in sweep.appended):
        if analysis.tokens_of(node).rows.outer != 1:
            raise refuse(
                node,
                "The keys of one token are stored in several separate places",
                "Keep the token dimension separate from the other dimensions",
            )

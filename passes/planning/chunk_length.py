"""Choose the chunk length of a sweep: the shortest that costs little time and memory.

The times come from the model in passes/planning/cost_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ..ir import SHORTEST_CHUNK, Analysis, Program, Sweep, hint
from ..width import widens
from .choices import Choices
from .cost_model import Cost, Work, work_of
from .devices import REFERENCE_CPU, Device

SLACK = 0.05  # share of the best time that a shorter chunk may lose: streaming is to save memory
LONGER = (0.03, 0.02, 0.01, 0.005)  # the same, where memory is to spare
FULL = 0.9  # share of their rate that products should reach, if the sequence is long and memory allows
SHARE = 64  # a chunk takes at most 1/SHARE of the device's memory at its widest moment
LARGER_SHARE = 16  # the same, where memory is to spare
FEWEST, SHORT = 4, 256  # the least chunks of a sequence, unless shorter than SHORT tokens: fewer save nothing
PART = 8  # a chunk of logits takes at most 1/PART of all logits at its widest moment


def chunk_lengths(
    program: Program,
    analysis: Analysis,
    choices: Choices,
    device: Device = REFERENCE_CPU,
    share: float = 1.0,
) -> tuple[int, ...]:
    """Choose the tokens per chunk of every sweep.

    Each length is a multiple of the blocks that rows come in. Sweeps that save states of a scan have the
    same length as those that restore them.

    share  sequences that run at a time, as a share of those that the program is written for
    """
    block = analysis.block(n for s in program.sweeps for n in s.nodes)
    works = [sweep_work(s, analysis).of_part(share) for s in program.sweeps]
    found = [length_for(w, s, program, analysis, choices, device) for w, s in zip(works, program.sweeps)]
    lengths = [-(-length // block) * block for length in found]
    shared = min(
        (c for s, c in zip(program.sweeps, lengths) if s.saved_states or s.restored_states), default=0
    )
    return tuple(
        shared if s.saved_states or s.restored_states else c for s, c in zip(program.sweeps, lengths)
    )


def length_for(
    work: Work, sweep: Sweep, program: Program, analysis: Analysis, choices: Choices, device: Device
) -> int:
    """Choose the shortest chunk whose products run at ``FULL`` and whose time is within ``SLACK`` of the
    best.

    The user's ``choices.chunk_size`` comes first. If no such length reaches ``FULL``, the best of their
    rates counts in its place. The candidates are multiples of the device's tile. Their widest moment
    fits into the ``SHARE`` of the device's memory and into ``choices.chunk_bytes``. They are at most a
    quarter of the sequence, and for logits at most their ``PART``. Where memory is to spare they may be
    longer (``device.fewest``). A smaller ``choices.slack`` makes chunks longer, but no value so large
    that the allocator maps it afresh for every chunk (``device.mapped``).

    work  of the sweep, for the whole batch or a part of it
    """
    if choices.chunk_size is not None:
        return choices.chunk_size
    spare = choices.memory_to_spare
    most_bytes = device.memory // (LARGER_SHARE if spare else SHARE)
    if choices.chunk_bytes is not None:
        most_bytes = min(most_bytes, choices.chunk_bytes)
    length = hint(analysis.length)
    fewest = device.fewest if spare else FEWEST
    longest = min(max(SHORT, length // fewest), most_bytes // work.widest)
    if not spare and widens(sweep, program, analysis):
        longest = min(longest, work.tokens * work.single // (PART * work.widest))
    lengths = {*lengths_up_to(longest, device.tile)}
    if spare:  # whole, halves, thirds, quarters: no short chunk is left over
        lengths |= {
            c for n in range(fewest, FEWEST + 1) if (c := rounded(length / n, device.tile)) <= longest
        }
    costs = {c: work.cost(c, device, one_call=spare) for c in sorted(lengths)}
    found = shortest(costs, SLACK)
    if choices.slack is None:
        return found
    longer = {c: cost for c, cost in costs.items() if c <= found or c * work.single < device.mapped}
    return max(found, shortest(longer, choices.slack))


def shortest(costs: Mapping[int, Cost], slack: float) -> int:
    """Find the shortest chunk length within ``slack`` of the best time at which products run fast."""
    most = (1 + slack) * min(cost.seconds for cost in costs.values())
    least = min(FULL, max(cost.efficiency for cost in costs.values() if cost.seconds <= most))
    return next(c for c, cost in costs.items() if cost.seconds <= most and cost.efficiency >= least)


def time_and_width(
    program: Program, analysis: Analysis, choices: Choices, device: Device, share: float = 1.0
) -> tuple[float, int]:
    """Estimate a program's seconds, and the bytes of a chunk at its widest moment.

    share  sequences that run at a time, as a share of those that the program is written for
    """
    chunks = chunk_lengths(program, analysis, choices, device, share)
    works = [sweep_work(sweep, analysis).of_part(share) for sweep in program.sweeps]
    spare = choices.memory_to_spare
    seconds = sum(work.cost(c, device, one_call=spare).seconds for work, c in zip(works, chunks))
    return seconds, max((work.widest * c for work, c in zip(works, chunks)), default=0)


def sequences_at_once(
    programs: Iterable[Program],
    analysis: Analysis,
    choices: Choices,
    device: Device,
    count: int,
    written_for: int | None = None,
) -> int:
    """Choose how many sequences of a batch run at a time: the fewest that cost little time.

    Turns may take ``SLACK`` longer than all sequences at once, or ``choices.slack`` longer where memory
    is to spare. The answer is one where ``choices.chunk_bytes`` says that memory is short.

    count        sequences of the batch
    written_for  the sequences that the programs are written for; None: all
    """
    if choices.chunk_bytes is not None:
        return 1
    works = [(sweep_work(s, analysis), s, p) for p in programs for s in p.sweeps]

    def seconds(at_once: int) -> float:
        total = 0.0
        for work, sweep, program in works:
            part = work.of_part(at_once / (written_for or count))
            chunk = length_for(part, sweep, program, analysis, choices, device)
            cost = part.cost(chunk, device, one_call=choices.memory_to_spare)
            total += cost.seconds * count / at_once
        return total

    most = (1 + (SLACK if choices.slack is None else choices.slack)) * seconds(count)
    return next(n for n in range(1, count + 1) if count % n == 0 and (n == count or seconds(n) <= most))


def rounded(length: float, tile: int) -> int:
    return math.ceil(length / tile) * tile


def lengths_up_to(longest: int, tile: int) -> Iterator[int]:
    """Yield multiples of a tile in ascending order, at least one. Long ones are a sixteenth apart."""
    length = shortest = rounded(SHORTEST_CHUNK, tile)
    while length <= max(longest, shortest):
        yield length
        length += max(tile, length // 16 // tile * tile)


def sweep_work(sweep: Sweep, analysis: Analysis) -> Work:
    return work_of(sweep.nodes, sweep.writes, sweep.summed, sweep.keysums, sweep.keys, analysis)


def program_cost(program: Program, analysis: Analysis, chunks: tuple[int, ...], device: Device) -> list[Cost]:
    """Estimate the cost of each sweep for chunks of the given lengths."""
    return [sweep_work(s, analysis).cost(c, device) for s, c in zip(program.sweeps, chunks)]

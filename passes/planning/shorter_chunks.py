"""Shorten chunks where a compiled body holds more memory than a loss may take.

Chunk lengths are chosen by a model of what Inductor fuses (`cost_model.Moments`). Values that it does not
fuse, above all the logits of several heads that one kernel writes at a time, are known only when the body is
compiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch.fx import Node

from ..ir import (
    SHORTEST_CHUNK,
    Analysis,
    Program,
    Sweep,
    Tokens,
    bytes_of,
    is_tensor,
    shape_of,
    total_dtype,
    value_of,
)
from ..width import widens
from .choices import Choices
from .chunk_length import sweep_work
from .devices import Device

HALF = 2  # a sweep and its results stay under 1/HALF of the widest value at full length
WORTH = 16  # chunks are shortened only if they may still take 1/WORTH of that value


def shorter_chunks(
    program: Program,
    analysis: Analysis,
    choices: Choices,
    device: Device,
    chunks: tuple[int, ...],
    held: Callable[[int, int], int],
) -> tuple[int, ...]:
    """Reduce the chunk lengths of a program's sweeps where a sweep of logits would take more than `HALF`.

    The lengths stay if the choices limit the size or the bytes of chunks, or say that memory is to spare.

    held  (number of a sweep, tokens) → bytes that its compiled body holds for such a chunk
    """
    chosen = (choices.chunk_size, choices.chunk_bytes, choices.slack)
    if any(choice is not None for choice in chosen):
        return chunks
    return tuple(
        shorter(sweep, program, analysis, device, chunk, functools.partial(held, at))
        for at, (sweep, chunk) in enumerate(zip(program.sweeps, chunks))
    )


def shorter(
    sweep: Sweep,
    program: Program,
    analysis: Analysis,
    device: Device,
    chunk: int,
    held: Callable[[int], int],
) -> int:
    """Choose the chunk length of one sweep."""
    tile = device.tile
    least = -(-SHORTEST_CHUNK // (tile * sequences(program, analysis))) * tile
    bound = chunk <= least or sweep.saved_states or sweep.restored_states
    if bound or not widens(sweep, program, analysis) or analysis.block(sweep.nodes) > 1:
        return chunk
    room, widest = room_for_chunks(sweep, program, analysis)
    if room * WORTH < widest or (taken := held(chunk)) < room:
        return chunk
    return max(least, chunk * room // taken // tile * tile)


def room_for_chunks(sweep: Sweep, program: Program, analysis: Analysis) -> tuple[int, int]:
    """Compute the bytes that a chunk may take, and those of the widest value at full length. The first number
    leaves room for all that the sweep adds up and writes."""
    work = sweep_work(sweep, analysis)
    widest = work.tokens * work.single
    results = [*sweep.sums, *sweep.keysums, *sweep.writes]
    return widest // HALF - sum(result_bytes(n) for n in results if is_tensor(n)), widest


def result_bytes(node: Node) -> int:
    """Count the bytes of a result at full length, in the dtype in which it may be added up."""
    value = value_of(node)
    return bytes_of(value) // value.dtype.itemsize * total_dtype(value.dtype).itemsize


def sequences(program: Program, analysis: Analysis) -> int:
    """Count the rows that an input has for each token, at least."""
    found = [
        math.prod(shape_of(node)[: fact.rows.dim]) * fact.rows.outer
        for node in program.inputs
        if isinstance(fact := analysis.facts[node], Tokens) and fact.keys is None
    ]
    return min(found, default=1)

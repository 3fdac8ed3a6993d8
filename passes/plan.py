"""Choose the chunk length of a sweep from the widths of what its body computes."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .ir import SHORTEST, Analysis, bytes_of, hint, is_row_wise, is_tensor, is_view, op_name, value_of
from .partition import Program, Sweep

CHUNK_BYTES = 24 << 20  # what one chunk's widest moment may take: past cache, so that matmuls run at speed, and well under any model
ATTENTION_BYTES = 30 << 20  # the same with attention inside: it reads all earlier keys again for every chunk, and so wants fewer
WIDE = 8 * CHUNK_BYTES  # a weight gradient beyond this takes more memory than its chunks do, and more time to walk over for each of them
LONGEST, STEP = 2048, 16
FEWEST, SHORT = 4, 256  # chunks of a sequence, unless they become shorter than this
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "attention", "attention_backward", "grouped_mm", "grouped_outer")
KERNELS = (*PRODUCTS, "embedding", "cat", "cumsum", "cumprod", "logcumsumexp", "reverse_scan")  # they read and write memory; the rest fuses


def row_bytes(sweep: Sweep, analysis: Analysis) -> int:
    """Bytes per token alive at the widest moment of a chunk body, as Inductor will hold them.

    It holds what a kernel reads or writes; what lies between is fused and made again from there. A fused value that is held is written
    over an equally wide one that nobody reads after it.
    """
    length = hint(analysis.length)
    holds: dict[Node, tuple[Node, ...]] = {}  # the values in memory that a read of this one reads
    widths: dict[Node, int] = {}
    steps = []  # what happens in order: who is made, from what
    widest = 1
    for node in sweep.nodes:
        sources = tuple(dict.fromkeys(s for operand in node.all_input_nodes for s in holds.get(operand, ())))
        holds[node] = sources
        if not is_row_wise(analysis.facts[node]):
            steps.append((None, sources))
        elif not is_alias(node):
            if is_tensor(node) and analysis.facts[node].keys is None:
                widest = max(widest, bytes_of(value_of(node)) // length)
            if is_one_of(node, KERNELS) or is_read_by_kernel(node):
                values = value_of(node) if isinstance(value_of(node), (tuple, list)) else (value_of(node),)
                widths[node] = sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor)) // length
                holds[node] = (node,)
                steps.append((node, sources))
    last = {source: i for i, (_, sources) in enumerate(steps) for source in sources}
    alive = most = 0
    for i, (made, sources) in enumerate(steps):
        ending = {widths[s] for s in sources if last[s] == i}
        alive += 0 if made is None else widths[made]
        overwrites = made is not None and not is_one_of(made, KERNELS) and widths[made] in ending
        most = max(most, alive - widths[made] if overwrites else alive)
        alive -= sum(widths[s] for s in sources if last[s] == i) + (widths[made] if made is not None and made not in last else 0)
    return max(most, widest)


def is_alias(node: Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def is_one_of(node: Node, names: tuple[str, ...]) -> bool:
    return op_name(node) in names


def is_read_by_kernel(node: Node) -> bool:
    return any(is_read_by_kernel(user) if is_alias(user) else is_one_of(user, KERNELS) for user in node.users)


def chunk_lengths(program: Program, analysis: Analysis, chosen: int | None) -> tuple[int, ...]:
    """Tokens per chunk of every sweep; the same for those that note a scan's states and those that go on from them."""
    lengths = [chunk_length(s, analysis, chosen) for s in program.sweeps]
    shared = min((c for s, c in zip(program.sweeps, lengths) if s.noted or s.resumed), default=0)
    return tuple(shared if s.noted or s.resumed else c for s, c in zip(program.sweeps, lengths))


def chunk_length(sweep: Sweep, analysis: Analysis, chosen: int | None) -> int:
    """Tokens per chunk: the user's word, or the most, in steps of 16, whose widest moment fits.

    It fits in `CHUNK_BYTES`, with attention in `ATTENTION_BYTES`; beside a `WIDE` gradient that the sweep adds up, in two thirds of that.
    """
    if chosen is not None:
        return chosen
    added = max((bytes_of(value_of(n)) for n in sweep.sums if is_tensor(n)), default=0)
    attends = any(edge.role == "keys" for node in sweep.nodes for edge in analysis.edges.get(node, ()))
    fits = (2 * added // 3 if added > WIDE else ATTENTION_BYTES if attends else CHUNK_BYTES) // row_bytes(sweep, analysis)
    quarter = max(SHORT, hint(analysis.length) // FEWEST)
    return max(SHORTEST, min(LONGEST, quarter, fits) // STEP * STEP)

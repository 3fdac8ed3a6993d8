"""Choose the chunk length of a sweep from the widths of what its body computes."""

from __future__ import annotations

import operator

import torch

from .ir import Analysis, Tokens, bytes_of, hint, is_tensor, value_of
from .partition import Sweep

CHUNK_BYTES = 20 << 20  # what one chunk's widest moment may take: well past cache, well under any model
WIDE = 8 * CHUNK_BYTES  # a weight gradient beyond this takes more memory than its chunks do, and more time to walk over for each of them
SHORTEST, LONGEST, STEP = 32, 1024, 16
MATERIALISED = ("mm", "addmm", "bmm", "baddbmm", "attention", "attention_backward", "embedding", "cat", "_log_softmax", "_softmax")


def row_bytes(sweep: Sweep, analysis: Analysis) -> int:
    """Bytes per token alive at the widest moment of a chunk body, counting what Inductor will not fuse away."""
    length = hint(analysis.length)
    last = {operand: i for i, node in enumerate(sweep.nodes) for operand in node.all_input_nodes}
    alive, most, ends = 0, 0, {}
    for i, node in enumerate(sweep.nodes):
        fact = analysis.facts[node]
        solid = getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in MATERIALISED
        if node.target is not operator.getitem and solid and any(
                isinstance(f, Tokens) for f in (fact if isinstance(fact, tuple) else (fact,))):
            values = value_of(node) if isinstance(value_of(node), (tuple, list)) else (value_of(node),)
            width = sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor)) // length
            alive += width
            ends.setdefault(read_until(node, last, i), []).append(width)
        most = max(most, alive)
        alive -= sum(ends.pop(i, ()))
    widest = max((bytes_of(value_of(n)) // length for n in sweep.nodes if is_tensor(n) and isinstance(analysis.facts[n], Tokens)
                  and analysis.facts[n].keys is None), default=1)
    return max(most, widest, 1)


def read_until(node, last, index: int) -> int:
    """The last reader of a value, seen through views and outputs of several."""
    end = last.get(node, index)
    for user in node.users:
        if user.target is operator.getitem or (isinstance(user.target, torch._ops.OpOverload) and user.target.is_view):
            end = max(end, read_until(user, last, index))
    return end


def chunk_length(sweep: Sweep, analysis: Analysis, chosen: int | None) -> int:
    """Tokens per chunk: the user's word, or the most, in steps of 16, whose widest moment fits.

    It fits in `CHUNK_BYTES`; beside a `WIDE` gradient that the sweep adds up, in two thirds of that.
    """
    if chosen is not None:
        return chosen
    added = max((bytes_of(value_of(n)) for n in sweep.sums if is_tensor(n)), default=0)
    fits = (2 * added // 3 if added > WIDE else CHUNK_BYTES) // row_bytes(sweep, analysis)
    return max(SHORTEST, min(LONGEST, fits // STEP * STEP))

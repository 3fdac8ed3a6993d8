"""Attention of a chunk: queries ``[start, start+C)`` against keys ``[0, S)``, by the chosen kernel.

A kernel that aligns causality at the bottom right covers a chunk in one call. One that aligns it at the
top left takes two: the rectangle of past keys without a mask, and the square of own keys, joined by
their log-sum-exps. The backward calls take the *joined* output and log-sum-exp, so ``dQ`` adds up, and
``dK``, ``dV`` land in their slices (exact to 1e-15 in float64). Nothing above the diagonal is computed.
Causality beside a mask is folded into the mask, in one call.

Where a mask shows each row consecutive keys, ranges of keys take its place (`ranges`): a call covers the
rows of one run, and no mask exists.

Shapes: query ``[B, Hq, C, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]``, mask broadcastable to
``[B, Hq, C, S]``, boolean (true where a row may attend) or additive; ``Hq`` is a multiple of ``Hkv``. A
row that sees no key gives zeros, ``-inf``, and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..grouped import fits_triton
from . import layout
from .masks import additive, hidden_rows
from .ranges import hides_nothing, runs, sequences
from .selection import COMPOSED, ROWS, Attention, Kernel, Target, choose


@dataclass(frozen=True)
class Piece:
    """A part of a chunk's scores that one kernel call (per group of heads) covers.

    diagonal  its row i sees none of its own keys behind ``diagonal + i``; None: it sees all of them
    again     its rows have met other keys before
    """

    rows: slice
    keys: slice
    diagonal: int | None
    again: bool = False


def pieces(rows: int, keys: int, diagonal: int | None, kernel: Kernel) -> tuple[Piece, ...]:
    """Split the scores of a chunk into pieces that fit a kernel's causal alignment. Row i of the chunk sees
    no key behind ``diagonal + i``."""
    every = slice(0, rows)
    if diagonal is None or diagonal >= keys - 1:
        return (Piece(every, slice(0, keys), None),)
    if kernel.diagonal == "any":
        return (Piece(every, slice(0, min(keys, diagonal + rows)), diagonal),)
    if kernel.diagonal == "top left":
        square = slice(diagonal, min(keys, diagonal + rows))
        past = (Piece(every, slice(0, diagonal), None),) if diagonal else ()
        if SMALLEST_SQUARE < rows <= kernel.whole_square and keys >= diagonal + rows:
            return (*past, *triangle(every, diagonal, diagonal > 0))
        return (*past, Piece(every, square, 0, again=diagonal > 0))
    stop = min(rows, keys - diagonal)  # rows behind it see all keys
    cut = (Piece(slice(0, stop), slice(0, diagonal + stop), diagonal),)
    return cut if stop == rows else (*cut, Piece(slice(stop, rows), slice(0, keys), None))


def pieces_of_runs(ranges: Tensor, kernel: Kernel) -> tuple[Piece, ...]:
    """Split the scores that ranges ``[C, 2]`` show into pieces. Rows without keys have none."""
    found = []
    for run in runs(ranges):
        count = run.rows.stop - run.rows.start
        for piece in pieces(count, run.keys, run.diagonal, kernel) if run.keys else ():
            rows, keys = moved(piece.rows, run.rows.start), moved(piece.keys, run.first)
            found.append(replace(piece, rows=rows, keys=keys))
    return tuple(found)


def moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


SMALLEST_SQUARE = 128  # rows of a square that is not cut further: a call costs more than it would save


def triangle(rows: slice, first: int, again: bool) -> Iterator[Piece]:
    """Yield the pieces of a causal square from key ``first`` on.

    A kernel would also compute the scores that causality hides. So the square is split into two smaller
    ones and the rectangle between them.

    again  its rows have met other keys before
    """
    count = rows.stop - rows.start
    if count <= SMALLEST_SQUARE:
        yield Piece(rows, slice(first, first + count), 0, again)
        return
    half = count // 2
    early, late = slice(rows.start, rows.start + half), slice(rows.start + half, rows.stop)
    yield from triangle(early, first, again)
    yield Piece(late, slice(first, first + half), None, again)
    yield from triangle(late, first + half, True)


@dataclass(frozen=True)
class PieceCall:
    """One kernel call of a piece, which takes operands from ``[B, Hkv, G, C, ...]`` and puts results back.

    heads    the one query of each key head that it covers, or None for all
    stacked  queries that share a key head meet it as more rows: faster, where nothing tells rows apart
    """

    piece: Piece
    bias: Tensor | None
    heads: int | None
    stacked: bool

    def take(self, t: Tensor) -> Tensor:
        t = layout.cut(t, 3, self.piece.rows)
        if self.heads is not None:
            return t.select(2, self.heads)
        return t.flatten(2, 3) if self.stacked else t.flatten(1, 2)

    def put(self, t: Tensor, shared: int) -> Tensor:
        """Return a result as ``[B, Hkv, G, C, ...]``. The result for one query of each key head stays ``[B,
        Hkv, C, ...]``."""
        if self.heads is not None:
            return t
        return t.unflatten(2, (shared, -1)) if self.stacked else t.unflatten(1, (-1, shared))

    def target(self, t: Tensor) -> Tensor:
        """Select the part of ``[B, Hkv, G, C, ...]`` where its results belong."""
        t = layout.cut(t, 3, self.piece.rows)
        return t.select(2, self.heads) if self.heads is not None else t


def calls(
    kernel: Kernel,
    parts: tuple[Piece, ...],
    shared: int,
    key_heads: int,
    bias: Tensor | None,
    apart: bool = False,
) -> Iterator[PieceCall]:
    """Yield kernel calls that cover a chunk, starting with the keys that all rows read.

    shared  query heads of a key head
    apart   call for one query of each key head at a time, although the kernel takes grouped heads
    """
    for piece in parts:
        if shared == 1 or kernel.grouped and not apart:
            yield PieceCall(piece, bias, None, False)
        elif not kernel.grouped and piece.diagonal is None and (bias is None or bias.shape[1:3] == (1, 1)):
            yield PieceCall(piece, bias, None, True)
        else:
            for g in range(shared):
                each = None if bias is None or bias.shape[1] == 1 else layout.by_key_head(bias, key_heads)
                yield PieceCall(piece, bias if each is None else each.select(2, g), g, False)


GROUPS_FILL = 1 << 15  # keys of all key heads that fill any GPU with one query of each: 256 blocks of 128


def goes_apart(kernel: Kernel, key: Tensor) -> bool:
    """Are grouped heads called one by one, so that no gradient of keys exists for every query head?"""
    return (
        kernel.expands and not kernel.one_call and key.shape[0] * key.shape[1] * key.shape[2] >= GROUPS_FILL
    )


@dataclass(frozen=True)
class Prepared:
    """A chunk in the form that its kernel takes.

    precise  operands are in float32, because two parts in half precision would be rounded before they
             are joined
    rows     rows of the chunk
    """

    kernel: Kernel
    parts: tuple[Piece, ...]
    bias: Tensor | None
    precise: bool
    rows: int

    @property
    def covers_all_rows(self) -> bool:
        """Does every row see a key?"""
        return sum(p.rows.stop - p.rows.start for p in self.parts if not p.again) == self.rows

    def operand(self, t: Tensor, width: int) -> Tensor:
        t = layout.widened(t.float() if self.precise else t, width)
        return layout.readable(t, self.kernel.multiple)


def kernel_named(name: str, query: Tensor, value: Tensor, mask: Tensor | None) -> Kernel:
    """Return the kernel of that name; without one, a kernel that any device of that type can run."""
    if name:
        return ROWS[name]
    asked = Attention(query.dtype, query.shape[3], value.shape[3], mask is not None)
    return choose(asked, Target(query.device.type)).kernel


def prepared(
    name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, start: int
) -> Prepared:
    kernel, diagonal = kernel_named(name, query, value, mask), start if causal else None
    rows, keys, bias = query.shape[2], key.shape[2], None
    parts = pieces(rows, keys, None if mask is not None else diagonal, kernel)
    if needs_more_keys(kernel, parts):
        kernel = COMPOSED
        parts = pieces(rows, keys, None if mask is not None else diagonal, kernel)
    if mask is not None:
        dtype = layout.statistics(query) if kernel.wide_bias else query.dtype
        bias = additive(mask, keys, rows, diagonal, dtype, kernel.bias_step)
    return Prepared(kernel, parts, bias, joins_in_half(kernel, parts, query), rows)


def prepared_by_ranges(name: str, query: Tensor, value: Tensor, ranges: Tensor) -> Prepared:
    """Prepare a chunk whose rows see ranges of keys, ``[C, 2]``, the same for all its sequences."""
    kernel = kernel_named(name, query, value, None)
    parts = pieces_of_runs(ranges, kernel)
    if needs_more_keys(kernel, parts):
        kernel, parts = COMPOSED, pieces_of_runs(ranges, COMPOSED)
    return Prepared(kernel, parts, None, joins_in_half(kernel, parts, query), query.shape[2])


def needs_more_keys(kernel: Kernel, parts: Sequence[Piece]) -> bool:
    return any(p.keys.stop - p.keys.start < kernel.fewest_keys for p in parts)


def joins_in_half(kernel: Kernel, parts: Sequence[Piece], query: Tensor) -> bool:
    """Are half-precision results joined, by a kernel that can give them in float32?"""
    return any(p.again for p in parts) and query.dtype.itemsize == 2 and torch.float32 in dict(kernel.dtypes)


def hiding_ranges(
    query: Tensor, key: Tensor, ranges: Tensor | None, slot: int, causal: bool, start: int
) -> Tensor | None:
    """Return the ranges of a call at ``slot``, ``[B, C, 2]``. None if they hide no more than causality."""
    if ranges is None:
        return None
    own = ranges[slot].expand(query.shape[0], query.shape[2], -1)
    return None if hides_nothing(own, key.shape[2], causal, start) else own


def by_sequences(ranges: Tensor, *operands: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the sequences that one call covers: their ranges ``[C, 2]``, and their part of operands."""
    for part in sequences(ranges):
        yield ranges[part.start], [layout.cut(t, 0, part) for t in operands]


def attention_forward(
    query,
    key,
    value,
    mask,
    causal: bool,
    scale: float,
    start: int,
    ranges: Tensor | None = None,
    slot: int = 0,
    kernel: str = "",
    uneven: str = "",
):
    """Compute the output, laid out as ``[B, C, Hq, Dv]``, and the log-sum-exp ``[B, Hq, C]``."""
    if not query.numel() or not key.shape[2]:
        out, lse = forward_meta(query, key, value, mask, causal, scale, start)
        return out.zero_(), lse.fill_(-math.inf)
    hiding = hiding_ranges(query, key, ranges, slot, causal, start)
    if hiding is not None:
        found = [
            attended(prepared_by_ranges(uneven or kernel, q, v, own), q, k, v, scale)
            for own, (q, k, v) in by_sequences(hiding, query, key, value)
        ]
        if len(found) == 1:
            return found[0]
        whole = forward_meta(query, key, value, mask, causal, scale, start)
        return tuple(put_in_order(t, parts) for t, parts in zip(whole, zip(*found)))
    chunk = prepared(kernel, query, key, value, mask, causal, start)
    out, lse = attended(chunk, query, key, value, scale)
    if chunk.bias is not None:
        hidden = hidden_rows(chunk.bias)
        out.masked_fill_(hidden.unsqueeze(-1), 0)
        lse.masked_fill_(hidden, -math.inf)
    return out, lse


def put_in_order(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Fill a value with those of its sequences, one by one."""
    for i, part in enumerate(parts):
        layout.put(whole[i : i + 1], part)
    return whole


def attended(
    chunk: Prepared, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    width, value_width = chunk.kernel.widths(query.shape[3], value.shape[3])
    operands = [chunk.operand(t, w) for t, w in ((query, width), (key, width), (value, value_width))]
    return joined(chunk, operands, scale, query, value.shape[3])


def joined(
    chunk: Prepared, operands: Sequence[Tensor], scale: float, query: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Join the outputs and log-sum-exps of a chunk's calls. The output is in the dtype of the query, without
    padded features."""
    q, k, v = operands
    batch, heads, rows, _ = query.shape
    shared, key_heads = heads // k.shape[1], k.shape[1]
    planned = list(calls(chunk.kernel, chunk.parts, shared, key_heads, chunk.bias))
    grouped = layout.by_key_head(q, key_heads)

    def part(call: PieceCall) -> tuple[Tensor, Tensor]:
        keys, values = (layout.cut(t, 2, call.piece.keys) for t in (k, v))
        queries, diagonal = call.take(grouped), call.piece.diagonal
        o, logsum = chunk.kernel.forward(queries, keys, values, call.bias, diagonal, scale)
        return layout.first(o, 3, width), logsum

    start = planned[0] if planned else None
    if start is not None and start.heads is None and not start.stacked and start.piece.rows == slice(0, rows):
        o, logsum = part(planned.pop(0))  # the others are joined to its result
        out, lse = layout.heads_put_last(o), layout.dense(logsum)
    else:
        out = layout.heads_last((batch, heads, rows, width), q if chunk.precise else query)
        lse = query.new_empty((batch, heads, rows), dtype=layout.statistics(query))
        if not chunk.covers_all_rows:
            out.zero_()
            lse.fill_(-math.inf)
    for call in planned:
        o, logsum = part(call)
        here, here_lse = (call.target(layout.by_key_head(t, key_heads)) for t in (out, lse))
        join(here, here_lse, call.put(o, shared), call.put(logsum, shared), call.piece.again)
    if chunk.precise:
        out = layout.put(layout.heads_last((batch, heads, rows, width), query), out)
    return out, lse


def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, again: bool) -> None:
    """Store the result of some keys, or join it to the result of other keys for the same rows."""
    if not again:
        layout.put(out, more)
        layout.put(lse, more_lse)
        return
    if fits_triton(out, more) and out.stride(-1) == more.stride(-1) == 1:
        flat = (t.flatten(1, 2) if lse.dim() == 4 else t for t in (out, lse, more, more_lse))
        torch.ops.streambp.join_triton_(*flat)
        return
    both = torch.logaddexp(lse, more_lse)
    before, now = ((t - both).exp().unsqueeze(-1) for t in (lse, more_lse))
    layout.put(out, out * before + more * now)
    layout.put(lse, both)


def attention_backward_(
    grad,
    query,
    key,
    value,
    out,
    lse,
    mask,
    causal: bool,
    scale: float,
    start: int,
    key_grad,
    value_grad,
    ranges: Tensor | None = None,
    slot: int = 0,
    kernel: str = "",
    uneven: str = "",
):
    """Compute ``dQ``, laid out as ``[B, C, Hq, D]``, and add ``dK`` and ``dV`` to accumulators. The
    accumulators are float32 (float64 for float64)."""
    if not query.numel() or not key.shape[2]:
        return backward_meta(grad, query).zero_()
    hiding = hiding_ranges(query, key, ranges, slot, causal, start)
    if hiding is not None:
        operands = (grad, query, key, value, out, lse, key_grad, value_grad)
        found = [
            gradients(prepared_by_ranges(uneven or kernel, q, v, own), g, q, k, v, o, logsum, scale, dk, dv)
            for own, (g, q, k, v, o, logsum, dk, dv) in by_sequences(hiding, *operands)
        ]
        return found[0] if len(found) == 1 else put_in_order(backward_meta(grad, query), found)
    chunk = prepared(kernel, query, key, value, mask, causal, start)
    if mask is not None:
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(score - inf) is 0: rows that see no key
    return gradients(chunk, grad, query, key, value, out, lse, scale, key_grad, value_grad)


def gradients(
    chunk: Prepared, grad, query, key, value, out, lse, scale: float, key_grad: Tensor, value_grad: Tensor
) -> Tensor:
    kernel, key_heads, width = chunk.kernel, key.shape[1], query.shape[3]
    wide, value_wide = kernel.widths(width, value.shape[3])
    k, v = chunk.operand(key, wide), chunk.operand(value, value_wide)
    rows = [chunk.operand(t, w) for t, w in ((grad, value_wide), (query, wide), (out, value_wide))]
    grouped = [layout.by_key_head(t, key_heads) for t in (*rows, lse)]
    shared = query.shape[1] // key_heads
    planned = list(calls(kernel, chunk.parts, shared, key_heads, chunk.bias, goes_apart(kernel, key)))

    def part(call: PieceCall) -> Tensor:
        g, q, o, logsum = map(call.take, grouped)
        keys, values, dk, dv = (layout.cut(t, 2, call.piece.keys) for t in (k, v, key_grad, value_grad))
        made = kernel.backward(g, q, keys, values, o, logsum, call.bias, call.piece.diagonal, scale, dk, dv)
        return layout.first(made, 3, width)

    if len(planned) == 1 and not planned[0].stacked and chunk.covers_all_rows:
        return layout.heads_put_last(part(planned[0]))
    dq = layout.heads_last(query.shape, k if chunk.precise else query)
    if not chunk.covers_all_rows:
        dq.zero_()
    for call in planned:
        more = call.put(part(call), shared)
        here = call.target(layout.by_key_head(dq, key_heads))
        here.add_(more) if call.piece.again else layout.put(here, more)
    return layout.put(layout.heads_last(query.shape, query), dq) if chunk.precise else dq


def attention_backward(
    grad,
    query,
    key,
    value,
    out,
    lse,
    mask,
    causal: bool,
    scale: float,
    ranges: Tensor | None = None,
    slot: int = 0,
    kernel: str = "",
    uneven: str = "",
):
    dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (key, value))
    options = (mask, causal, scale, 0, dk, dv, ranges, slot, kernel, uneven)
    dq = attention_backward_(grad, query, key, value, out, lse, *options)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def forward_meta(query, key, value, *_):
    batch, heads, rows, _ = query.shape
    return (
        layout.heads_last((batch, heads, rows, value.shape[-1]), query),
        query.new_empty((batch, heads, rows), dtype=layout.statistics(query)),
    )


def backward_meta(grad, query, *_):
    return layout.heads_last(query.shape, query)

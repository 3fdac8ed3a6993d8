"""The few operators that the algebra itself speaks, and that Inductor calls as they are.

``attention`` is one rectangle-plus-square step of causal attention: queries ``[start, start+C)`` against keys ``[0, S)``.
Where the kernel aligns causality at the top left, the rectangle of past keys (no mask) and the square of own keys (causal)
are two calls, merged by their log-sum-exp; the backward calls take the merged output and log-sum-exp, so ``dQ`` adds up and
``dK``, ``dV`` land in their slices (DESIGN: exact to 1e-15 in float64). Nothing above the diagonal is computed and no mask exists.

Shapes: query ``[B, Hq, C, D]``, key ``[B, Hkv, S, D]``, value ``[B, Hkv, S, Dv]``, mask (additive) broadcastable to
``[B, Hq, C, S]``; ``Hq`` is a multiple of ``Hkv``. A trailing underscore marks an op that adds into its last arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
LIBRARY = torch.library.Library("streambp", "DEF")
KERNELS: dict[torch._ops.OpOverload, object] = {}  # what runs when an operator is called

def define(schema: str, kernel, meta) -> None:
    tags = (torch.Tag.needs_exact_strides,) if hasattr(torch.Tag, "needs_exact_strides") else ()
    LIBRARY.define(schema, tags=tags)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, meta, "Meta")
    KERNELS[getattr(torch.ops.streambp, name).default] = kernel


def heads_last(batch, heads, rows, width, like: Tensor) -> Tensor:
    """Empty ``[B, H, T, D]`` laid out as ``[B, T, H, D]``, as the fused kernels return it and projections want it."""
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def statistics(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


# One kernel call: (out, lse) forward, (dq, dk, dv) backward. Equal numbers of heads.

def kernel_forward(q, k, v, mask, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    bias = None if mask is None else aligned_bias(mask, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def kernel_backward(grad, q, k, v, out, lse, mask, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    bias = None if mask is None else aligned_bias(mask, q, k)
    rows = q.shape[2]
    padded = lse.new_full((*lse.shape[:2], -(-rows // 32) * 32), float("inf"))  # the kernel wants rows in multiples of 32
    padded[:, :, :rows] = lse
    seed = torch.zeros((), dtype=torch.int64)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale)
    return dq, dk, dv


def flash_scratch(func, args: tuple) -> int:
    """Bytes that the CPU kernels take while they run: per thread a tile of scores or two, and gradients laid out anew."""
    if func not in FLASH_ON_CPU:
        return 0
    grad, query, key, lse = (None, *args[:2], None) if func is FLASH_ON_CPU[0] else (*args[:3], args[5])
    rows = query.shape[2]
    tile, keys = 256 if rows >= 768 else 64 if rows >= 192 else 32, min(512, key.shape[2])  # of FlashAttentionKernel.cpp
    tile = min(tile, rows)
    numbers = tile * (keys + 2 + query.shape[3]) if grad is None else 2 * tile * keys
    relaid = sum(t.numel() * t.dtype.itemsize for t in (grad, lse) if t is not None and not t.transpose(1, 2).is_contiguous())
    halves = tile * keys * (1 if grad is None else 2) * query.dtype.itemsize if query.dtype.itemsize == 2 else 0
    return torch.get_num_threads() * (numbers * statistics(query).itemsize + halves) + relaid


FLASH_ON_CPU = (aten._scaled_dot_product_flash_attention_for_cpu.default,
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


def aligned_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The efficient kernel reads bias rows at multiples of 16 bytes."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    step = 16
    room = mask.new_empty((*mask.shape[:-1], -(-shape[-1] // step) * step))
    room[..., : shape[-1]] = mask
    return room[..., : shape[-1]].to(q.dtype).expand(shape) if mask.dtype == q.dtype else aligned_bias(mask.to(q.dtype), q, k)


def aligns_bottom_right(q: Tensor, mask: Tensor | None) -> bool:
    """CUDA's flash kernel aligns causality at the bottom right and knows grouped heads: one call does it all."""
    return q.device.type == "cuda" and mask is None and q.dtype in (torch.float16, torch.bfloat16)


def pieces(rows: int, keys: int, start: int, causal: bool) -> list[tuple[slice, bool]]:
    """The key slices that a query chunk reads, and whether each is the causal square."""
    if not causal:
        return [(slice(0, keys), False)]
    square = (slice(start, start + rows), True)
    return [square] if start == 0 else [(slice(0, start), False), square]


def dense_last(t: Tensor | None) -> Tensor | None:
    """The kernels read features at stride one."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def rounds_twice(query: Tensor, start: int, causal: bool) -> bool:
    """Two calls in half precision would be rounded before they are added; they run in float32 instead."""
    return causal and start > 0 and query.dtype.itemsize == 2


def by_key_head(t: Tensor, key: Tensor) -> Tensor:
    """``[B, Hq, ...]`` as ``[B, Hkv, Hq / Hkv, ...]``: the queries that share a key head, beside one another."""
    return t.unflatten(1, (key.shape[1], t.shape[1] // key.shape[1]))


def calls(query: Tensor, key: Tensor, mask: Tensor | None, start: int, causal: bool):
    """Kernel calls that cover a chunk, in an order that starts with what all rows read: for each the keys, whether it is the causal square,
    how its operands are taken from ``[B, Hkv, G, C, ...]``, and how a result is put where it belongs.

    Queries that share a key head meet it as more rows of one call, which is faster, where neither causality nor a mask tells rows apart.
    """
    shared = query.shape[1] // key.shape[1]
    for keys, square in pieces(query.shape[2], key.shape[2], start, causal):
        if shared > 1 and not square and mask is None:
            yield keys, square, None, lambda t: t.flatten(2, 3), lambda t: t.unflatten(2, (shared, query.shape[2])), slice(None)
            continue
        for g in range(shared):
            m = mask if mask is None or mask.shape[1] == 1 else by_key_head(mask, key)[:, :, g]
            yield keys, square, m, lambda t, g=g: t[:, :, g], lambda t: t, g


def attention_forward(query, key, value, mask, causal: bool, scale: float, start: int):
    query, key, value, mask = map(dense_last, (query, key, value, mask))
    batch, heads, rows, _ = query.shape
    out = heads_last(batch, heads, rows, value.shape[-1], query)
    lse = query.new_empty((batch, heads, rows), dtype=statistics(query))
    if aligns_bottom_right(query, mask):
        stop = start + rows if causal else key.shape[2]
        o, logsum, *_ = aten._scaled_dot_product_flash_attention(
            query, key[:, :, :stop], value[:, :, :stop], 0.0, causal, False, scale=scale)
        return out.copy_(o), lse.copy_(logsum)
    rounded = out
    if rounds_twice(query, start, causal):
        query, key, value = query.float(), key.float(), value.float()
        out = torch.empty_like(rounded, dtype=torch.float32)
    grouped, total, total_lse = by_key_head(query, key), by_key_head(out, key), by_key_head(lse, key)
    for keys, square, m, taken, put, where in calls(query, key, mask, start, causal):
        o, logsum = map(put, kernel_forward(taken(grouped), key[:, :, keys], value[:, :, keys], m, square, scale))
        here, here_lse = total[:, :, where], total_lse[:, :, where]
        if keys.start == 0 or not causal:
            here.copy_(o)
            here_lse.copy_(logsum)
        else:
            merged = torch.logaddexp(here_lse, logsum)
            here.mul_((here_lse - merged).exp().unsqueeze(-1)).add_(o * (logsum - merged).exp().unsqueeze(-1))
            here_lse.copy_(merged)
    return rounded.copy_(out) if rounded is not out else out, lse


def attention_backward_(grad, query, key, value, out, lse, mask, causal: bool, scale: float, start: int, key_grad, value_grad):
    grad, query, key, value, out, mask = map(dense_last, (grad, query, key, value, out, mask))
    batch, heads, rows, width = query.shape
    dq = heads_last(batch, heads, rows, width, query)
    if aligns_bottom_right(query, mask):
        stop = start + rows if causal else key.shape[2]
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        a, b, c = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key[:, :, :stop], value[:, :, :stop], out, lse, None, None, rows, stop, 0.0, causal,
            torch.stack((seed, seed)), seed, scale=scale)
        key_grad[:, :, :stop].add_(b)
        value_grad[:, :, :stop].add_(c)
        return dq.copy_(a)
    rounded = dq
    if rounds_twice(query, start, causal):
        grad, query, key, value, out = (t.float() for t in (grad, query, key, value, out))
        dq = torch.empty_like(rounded, dtype=torch.float32)
    grouped, total = [by_key_head(t, key) for t in (grad, query, out, lse)], by_key_head(dq, key)
    for keys, square, m, taken, put, where in calls(query, key, mask, start, causal):
        g, q, o, logsum = map(taken, grouped)
        a, b, c = kernel_backward(g, q, key[:, :, keys], value[:, :, keys], o, logsum, m, square, scale)
        key_grad[:, :, keys].add_(b)
        value_grad[:, :, keys].add_(c)
        (total[:, :, where].copy_ if keys.start == 0 or not causal else total[:, :, where].add_)(put(a))
    return rounded.copy_(dq) if rounded is not dq else dq


def attention_backward(grad, query, key, value, out, lse, mask, causal: bool, scale: float):
    dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (key, value))
    dq = attention_backward_(grad, query, key, value, out, lse, mask, causal, scale, 0, dk, dv)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def forward_meta(query, key, value, mask, causal, scale, start):
    batch, heads, rows, _ = query.shape
    return (heads_last(batch, heads, rows, value.shape[-1], query),
            query.new_empty((batch, heads, rows), dtype=statistics(query)))


def backward_meta(grad, query, key, value, out, lse, mask, causal, scale, start, key_grad, value_grad):
    return heads_last(*query.shape, query)


def add_product_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """``total += left @ right`` with no partial result; half-precision operands are summed in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cuda":
        total.copy_(torch.addmm(total, left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def to_extreme(grad: Tensor, x: Tensor, dim: int, largest: bool) -> Tensor:
    """The gradient of ``x.max(dim)`` (or ``min``): zero but where the value was taken from. ``grad`` has one entry along ``dim``."""
    index = (torch.max if largest else torch.min)(x, dim, keepdim=True).indices
    return torch.zeros_like(x, dtype=grad.dtype).scatter(dim, index, grad)


def shifted(x: Tensor, dim: int, by: int) -> Tensor:
    """Row i is row ``i - by`` of ``x``; zero where there is none."""
    count = max(0, x.shape[dim] - abs(by))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out.narrow(dim, max(0, by) if count else 0, count).copy_(x.narrow(dim, max(0, -by) if count else 0, count))
    return out


def reverse_scan(x: Tensor, dim: int, kind: str) -> Tensor:
    """``cumsum`` (or another scan of ATen) from the last row to the first."""
    return getattr(aten, kind)(x.flip(dim), dim).flip(dim).contiguous()


def panels_mm(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight``: ``[C, K]``, ``[K, N]`` → ``[C, N]``, some columns at a time: a quarter faster in MKL where C is far below N."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for part, panel in zip(out.split(PANEL, 1), weight.split(PANEL, 1)):
        torch.mm(rows, panel, out=part)
    return out


PANEL = 2048  # columns


def sorted_groups(groups: Tensor, count: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """Rows in the order of their groups, and every group that has rows with the slice of them. Rows of no group come last, in no slice."""
    counts = groups.new_zeros(count + 1).scatter_add_(0, groups.clamp(0, count), torch.ones_like(groups))
    slices, start = [], 0
    for group, rows in enumerate(counts[:count].tolist()):
        if rows:
            slices.append((group, slice(start, start + rows)))
        start += rows
    return groups.argsort(stable=True), slices


def grouped_mm(rows: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
    """``rows[i] @ weight[groups[i]]``: ``[R, K]``, ``[G, K, N]``, ``[R]`` → ``[R, N]``; zero for a row of no group."""
    order, slices = sorted_groups(groups, weight.shape[0])
    ordered, made = rows[order], rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, part in slices:
        torch.mm(ordered[part], weight[group], out=made[part])
    return torch.empty_like(made).index_copy_(0, order, made)


def grouped_outer(left: Tensor, right: Tensor, groups: Tensor, count: int) -> Tensor:
    """The sum of ``left[i]ᵀ right[i]`` per group: ``[R, K]``, ``[R, N]``, ``[R]`` → ``[G, K, N]``."""
    total = left.new_zeros((count, left.shape[1], right.shape[1]), dtype=torch.promote_types(left.dtype, torch.float32))
    add_grouped_outer_(left, right, groups, total)
    return total.to(left.dtype)


def add_grouped_outer_(left: Tensor, right: Tensor, groups: Tensor, total: Tensor) -> None:
    order, slices = sorted_groups(groups, total.shape[0])
    left, right = left[order], right[order]
    for group, part in slices:
        add_product_(left[part].t(), right[part], total[group])


def add_rows_(index: Tensor, rows: Tensor, padding: int, total: Tensor) -> None:
    """``total[index[i]] += rows[i]``, leaving the row ``padding`` alone."""
    flat, values = index.reshape(-1), rows.reshape(-1, rows.shape[-1])
    if padding >= 0:
        values = values.masked_fill((flat == padding).unsqueeze(-1), 0)
    total.index_add_(0, flat, values.to(total.dtype))


def add_part_(part: Tensor, total: Tensor) -> None:
    total.add_(part)


def nothing(*_args) -> None:
    return None


def rows_at(full: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A copy of rows ``[start, start+length)``; opaque, so that the bounds stay symbols."""
    return full.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def rows_meta(full: Tensor, dim: int, start, length) -> Tensor:
    shape = list(full.shape)
    shape[dim] = length
    return full.new_empty(shape)


def write_rows_(rows: Tensor, dim: int, start: int, full: Tensor) -> None:
    full.narrow(dim, start, rows.shape[dim]).copy_(rows)


# Random numbers that depend on a seed and on their place among all tokens, and on nothing else: the forward, its recomputation, and chunks
# of every length see the same bits. The mixer is a 32-bit integer hash of multiply and shift (low-bias constants of the hash-prospector
# search); it is applied to both halves of place and seed. Products stay below 2**63, so that integers never overflow.

LOW = 0xFFFFFFFF


def mixed(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def uniform_at(place: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), 24 bits each: one for every place of a random stream.

    place  integers, the positions in the full value, in its order
    seed   one integer below 2**62
    """
    x = mixed((place & LOW) ^ ((seed + stream * 0x9E3779B1) & LOW))
    x = mixed((x + (place >> 32) + (seed >> 31)) & LOW)
    return ((x >> 8).to(torch.float32) * 2.0 ** -24).to(dtype)


def draw_seed(device: torch.device) -> Tensor:
    return torch.randint(1 << 62, (), dtype=torch.int64).to(device)


def uniform(seed: Tensor, size: list[int], stream: int, dtype: torch.dtype) -> Tensor:
    count = 1
    for s in size:
        count = count * s
    return uniform_at(torch.arange(count, device=seed.device).view(size), seed, stream, dtype)


MASKED = "Tensor query, Tensor key, Tensor value"
define(f"attention({MASKED}, Tensor? mask, bool causal, float scale, SymInt start) -> (Tensor, Tensor)",
       attention_forward, forward_meta)
define(f"attention_backward(Tensor grad, {MASKED}, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale)"
       " -> (Tensor, Tensor, Tensor)", attention_backward,
       lambda grad, q, k, v, *_: (heads_last(*q.shape, q), torch.empty_like(k), torch.empty_like(v)))
define(f"attention_backward_(Tensor grad, {MASKED}, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale,"
       " SymInt start, Tensor(a!) key_grad, Tensor(b!) value_grad) -> Tensor", attention_backward_, backward_meta)
define("add_product_(Tensor left, Tensor right, Tensor(a!) total) -> ()", add_product_, nothing)
define("panels_mm(Tensor rows, Tensor weight) -> Tensor", panels_mm,
       lambda rows, weight: rows.new_empty(rows.shape[0], weight.shape[1]))
define("to_extreme(Tensor grad, Tensor x, int dim, bool largest) -> Tensor", to_extreme,
       lambda grad, x, dim, largest: torch.empty_like(x, dtype=grad.dtype))
define("reverse_scan(Tensor x, int dim, str kind) -> Tensor", reverse_scan,
       lambda x, dim, kind: torch.empty_like(x, memory_format=torch.contiguous_format))
define("shifted(Tensor x, int dim, int by) -> Tensor", shifted,
       lambda x, dim, by: torch.empty_like(x, memory_format=torch.contiguous_format))
define("grouped_mm(Tensor rows, Tensor weight, Tensor groups) -> Tensor", grouped_mm,
       lambda rows, weight, groups: rows.new_empty(rows.shape[0], weight.shape[2]))
define("grouped_outer(Tensor left, Tensor right, Tensor groups, int count) -> Tensor", grouped_outer,
       lambda left, right, groups, count: left.new_empty(count, left.shape[1], right.shape[1]))
define("add_grouped_outer_(Tensor left, Tensor right, Tensor groups, Tensor(a!) total) -> ()", add_grouped_outer_, nothing)
define("add_rows_(Tensor index, Tensor rows, int padding, Tensor(a!) total) -> ()", add_rows_, nothing)
define("add_(Tensor part, Tensor(a!) total) -> ()", add_part_, nothing)
define("rows_at(Tensor full, int dim, SymInt start, SymInt length) -> Tensor", rows_at, rows_meta)
define("write_rows_(Tensor rows, int dim, SymInt start, Tensor(a!) full) -> ()", write_rows_, nothing)
define("seed(Device device) -> Tensor", draw_seed, lambda device: torch.empty((), dtype=torch.int64, device=device))
define("uniform(Tensor seed, SymInt[] size, int stream, ScalarType dtype) -> Tensor", uniform,
       lambda seed, size, stream, dtype: seed.new_empty(size, dtype=dtype))

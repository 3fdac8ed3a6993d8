"""Softmax attention as people write it: projections, positions, groups of heads, kernels, outputs."""

from __future__ import annotations

from .masks import Mask, bias, mask
from .writer import Writer


def attention(w: Writer, x: str) -> str:
    """``[B, T, D]`` → ``[B, T, D]``."""
    groups = w.pick(1, 1, 1, w.sizes.heads)
    q, k, v = projections(w, x, w.sizes.heads // groups)
    if w.chance(0.15):
        q, k = (normed(w, t) for t in (q, k))
    if w.chance(0.2):
        q, k = rotated(w, x, q, k)
    fused = w.chance(0.5)
    native = fused and w.chance(0.3)
    if groups > 1 and not native:
        k, v = (repeated(w, t, groups) for t in (k, v))
    if not (groups > 1 and native):
        v = mixed_values(w, v)
    more = ", enable_gqa=True" if groups > 1 and native else ""
    out = fused_kernel(w, x, q, k, v, more) if fused else written(w, x, q, k, v)
    if w.chance(0.15):
        gate = w.linear(x, w.sizes.width, w.sizes.heads, "gate")
        out = w.let(f"{out} * torch.sigmoid({gate}).transpose(1, 2).unsqueeze(-1)", "a")
    return output(w, out)


def projections(w: Writer, x: str, kept: int) -> tuple[str, str, str]:
    """Query ``[B, H, T, E]``, key and value ``[B, kept, T, E]``."""
    h, e, d = w.sizes.heads, w.sizes.head, w.sizes.width
    if kept == h and w.chance(0.6):
        both = w.linear(x, d, 3 * d, "qkv")
        split = w.pick(fused_chunk, fused_unbind, fused_permute, fused_rearranged)
        return split(w, both, h, e)
    parts = []
    for name, heads in (("q", h), ("k", kept), ("v", kept)):
        if w.chance(0.2):
            matrix = w.weight(d, heads, e)
            parts.append(w.let(f'torch.einsum("btd,dhe->bhte", {x}, {matrix})', name))
            continue
        flat = w.linear(x, d, heads * e, name)
        parts.append(w.let(split_heads(w, flat, heads, e), name))
    return parts[0], parts[1], parts[2]


def split_heads(w: Writer, flat: str, heads: int, e: int) -> str:
    return w.pick(
        f"{flat}.view({flat}.shape[0], {flat}.shape[1], {heads}, {e}).transpose(1, 2)",
        f"{flat}.unflatten(-1, ({heads}, {e})).permute(0, 2, 1, 3)",
        f"{flat}.reshape(*{flat}.shape[:2], {heads}, -1).transpose(1, 2)",
        f"torch.stack({flat}.split({e}, -1), 1)",
    )


def fused_chunk(w: Writer, both: str, h: int, e: int):
    names = [f"{n}{w.count + 1}" for n in "qkv"]
    w.count += 1
    w.do(f"{', '.join(names)} = {both}.{w.pick('chunk(3, -1)', f'split({h * e}, -1)')}")
    return tuple(w.let(split_heads(w, n, h, e), n[0]) for n in names)


def fused_unbind(w: Writer, both: str, h: int, e: int):
    names = [f"{n}{w.count + 1}" for n in "qkv"]
    w.count += 1
    w.do(f"{', '.join(names)} = {both}.view(*{both}.shape[:2], 3, {h}, {e}).unbind(2)")
    return tuple(w.let(f"{n}.transpose(1, 2)", n[0]) for n in names)


def fused_permute(w: Writer, both: str, h: int, e: int):
    names = [f"{n}{w.count + 1}" for n in "qkv"]
    w.count += 1
    w.do(f"{', '.join(names)} = {both}.reshape(*{both}.shape[:2], 3, {h}, {e}).permute(2, 0, 3, 1, 4)")
    return tuple(names)


def fused_rearranged(w: Writer, both: str, h: int, e: int):
    """Heads first, then query, key, value (GPT-NeoX)."""
    names = [f"{n}{w.count + 1}" for n in "qkv"]
    w.count += 1
    w.do(f"{', '.join(names)} = {both}.view(*{both}.shape[:2], {h}, {3 * e}).transpose(1, 2).chunk(3, -1)")
    return tuple(names)


def normed(w: Writer, t: str) -> str:
    e = w.sizes.head
    return w.let(
        w.pick(
            f"F.rms_norm({t}, ({e},), {w.vector(e)})",
            f"F.normalize({t}, dim=-1) * 2",
            f"{t} * torch.rsqrt({t}.pow(2).mean(-1, keepdim=True) + 1e-6)",
            f"F.layer_norm({t}, ({e},))",
        ),
        t[0],
    )


def rotated(w: Writer, x: str, q: str, k: str) -> tuple[str, str]:
    e = w.sizes.head
    if e % 2:
        return q, k
    place = w.let(f"torch.arange({x}.shape[1], device={x}.device, dtype={x}.dtype)", "place")
    speed = w.let(f"10.0 ** (-torch.arange({e // 2}, device={x}.device, dtype={x}.dtype))", "speed")
    angle = w.let(w.pick(f"{place}[:, None] * {speed}", f"torch.outer({place}, {speed})"), "angle")
    return tuple(w.let(rotation(w, t, angle), t[0]) for t in (q, k))


def rotation(w: Writer, t: str, angle: str) -> str:
    halves, pairs = f"{t}.chunk(2, -1)", f"{t}.unflatten(-1, (-1, 2)).unbind(-1)"
    w.do(f"left, right = {w.pick(halves, halves, pairs)}")
    w.do(f"cos, sin = {angle}.cos(), {angle}.sin()")
    parts = "left * cos - right * sin, right * cos + left * sin"
    return w.pick(f"torch.cat(({parts}), -1)", f"torch.stack(({parts}), -1).flatten(-2)")


def repeated(w: Writer, t: str, groups: int) -> str:
    return w.let(
        w.pick(
            f"{t}.repeat_interleave({groups}, dim=1)",
            f"{t}[:, :, None].expand(-1, -1, {groups}, -1, -1).flatten(1, 2)",
            f"{t}.repeat(1, {groups}, 1, 1)",
        ),
        t[0],
    )


def mixed_values(w: Writer, v: str) -> str:
    """Values mixed with those of the first layer."""
    if w.values and w.chance(0.3):
        share = w.vector(1)
        v = w.pick(
            w.let(f"{v} + {share} * {w.values[0]}", "v"),
            w.let(f"torch.lerp({v}, {w.values[0]}, {share})", "v"),
        )
    w.values.append(v)
    return v


def fused_kernel(w: Writer, x: str, q: str, k: str, v: str, more: str) -> str:
    call = f"F.scaled_dot_product_attention({q}, {k}, {v}"
    scale = ", scale=0.3" if w.chance(0.2) else ""
    if not w.padding and not w.packed and w.chance(0.5):
        return w.let(f"{call}, is_causal={w.pick('True', 'True', 'False')}{scale}{more})", "a")
    found = mask(w, x)
    if not found.seen:
        return w.let(f"{call}{scale}{more})", "a")
    given = found.seen
    if w.chance(0.4):
        zeros = f"torch.zeros({given}.shape, dtype={x}.dtype, device={x}.device)"
        given = w.let(f"{zeros}.masked_fill(~{given}, {lowest(w, x)})", "m")
        if found.triangle and w.chance(0.3):
            given = bias(w, given, x)
    return w.let(f"{call}, attn_mask={given}{scale}{more})", "a")


def lowest(w: Writer, x: str) -> str:
    return w.pick('float("-inf")', f"torch.finfo({x}.dtype).min", "-1e9")


def written(w: Writer, x: str, q: str, k: str, v: str) -> str:
    """Scores, masked, softmax, values."""
    e = w.sizes.head
    k, v, extra = memories(w, x, k, v)
    scores = w.let(
        w.pick(
            f"{q} @ {k}.transpose(-1, -2) / {e}**0.5",
            f"torch.matmul({q} * {e**-0.5:.3f}, {k}.mT)",
            f'torch.einsum("bhte,bhse->bhts", {q}, {k}) * {e**-0.5:.3f}',
        ),
        "s",
    )
    if not extra:
        scores = bias(w, scores, x)
    found = mask(w, x)
    scores = masked(w, x, scores, found, extra)
    if w.exact and not extra and w.chance(0.12):
        return few_keys(w, scores, v)
    if w.chance(0.1):
        sink = w.weight(w.sizes.heads)
        column = f"{sink}[:, None, None].expand({scores}.shape[0], -1, {scores}.shape[2], 1)"
        p = w.let(f"torch.cat(({scores}, {column}), -1).softmax(-1)[..., :-1]", "p")
    else:
        p = w.let(softmax(w, scores), "p")
    product = w.pick(f"{p} @ {v}", f'torch.einsum("bhts,bhse->bhte", {p}, {v})')
    return w.let(product, "a")


def few_keys(w: Writer, scores: str, v: str) -> str:
    """The largest few scores of a row, by their numbers or their places, or one of them. Positions keep equal
    tokens from having equal scores, of which rounding would choose one."""
    scores = w.let(f"{scores} + 0.01 * torch.arange({scores}.shape[-1]).to({scores})", "s")
    few = f"min({w.pick(1, 2, 3)}, {scores}.shape[-1])"
    kind = w.pick("threshold", "scattered", "added", "mask", "largest", "picked")
    if kind == "threshold":
        least = f"{scores}.topk({few}, -1).values[..., -1:]"
        p = w.let(f"{scores}.masked_fill({scores} < {least}, float('-inf')).softmax(-1)", "p")
    elif kind in ("scattered", "added"):
        w.do(f"large, places = {scores}.topk({few}, -1)")
        put = "scatter" if kind == "scattered" else "scatter_add"
        p = w.let(f"torch.zeros_like({scores}).{put}(-1, places, large.softmax(-1))", "p")
    elif kind == "mask":
        places = f"{scores}.detach().topk({few}, -1).indices"
        shown = w.let(f"torch.zeros_like({scores}, dtype=torch.bool).scatter(-1, {places}, True)", "shown")
        p = w.let(f"{scores}.masked_fill(~{shown}, float('-inf')).softmax(-1)", "p")
    elif kind == "largest":
        hard = f"F.one_hot({scores}.argmax(-1), {scores}.shape[-1]).to({scores})"
        p = w.let(f"{hard} * {scores}.softmax(-1)", "p")
    else:
        at = w.pick("0", "-1", f"{scores}.shape[-1] // 2")
        p = w.let(f"{scores}.softmax(-1)", "p")
        return w.let(f"{p} @ {v} * (1 + {p}[..., {at}].unsqueeze(-1))", "a")
    return w.let(f"{p} @ {v}", "a")


def memories(w: Writer, x: str, k: str, v: str) -> tuple[str, str, int]:
    """A few learned keys before those of the sequence, rarely."""
    if not w.chance(0.06):
        return k, v, 0
    h, e, n = w.sizes.heads, w.sizes.head, 2
    k, v = (
        w.let(f"torch.cat(({w.weight(h, n, e)}.expand({x}.shape[0], -1, -1, -1), {t}), 2)", t[0])
        for t in (k, v)
    )
    return k, v, n


def masked(w: Writer, x: str, scores: str, found: Mask, extra: int) -> str:
    if not found.seen:
        return scores
    seen = w.let(f"F.pad({found.seen}, ({extra}, 0), value=True)", "seen") if extra else found.seen
    low = lowest(w, x)
    spellings = [
        f"{scores}.masked_fill(~{seen}, {low})",
        f"torch.where({seen}, {scores}, {low})",
        f"{scores} + torch.zeros({seen}.shape, dtype={x}.dtype).masked_fill(~{seen}, {low})",
        f"{scores}.masked_fill({seen}.logical_not(), {low})",
    ]
    if low != 'float("-inf")':
        spellings.append(f"{scores} + (1 - {seen}.to({x}.dtype)) * {low}")
    return w.let(w.pick(*spellings), "s")


def softmax(w: Writer, scores: str) -> str:
    shifted = f"({scores} - {scores}.amax(-1, keepdim=True).detach()).exp()"
    if w.chance(0.1):
        e = w.let(shifted, "e")
        return w.pick(f"{e} / {e}.sum(-1, keepdim=True)", f"{e} / (1 + {e}.sum(-1, keepdim=True))")
    if w.chance(0.1):
        return f"({scores} - {scores}.logsumexp(-1, keepdim=True)).exp()"
    return w.pick(
        f"{scores}.softmax(-1)",
        f"F.softmax({scores}, dim=-1)",
        f"torch.softmax({scores}, 3, dtype={scores}.dtype)",
    )


def output(w: Writer, out: str) -> str:
    h, e, d = w.sizes.heads, w.sizes.head, w.sizes.width
    if w.chance(0.2):
        return w.let(f'torch.einsum("bhte,hed->btd", {out}, {w.weight(h, e, d)})', "o")
    merged = w.pick(
        f"{out}.transpose(1, 2).reshape({out}.shape[0], -1, {d})",
        f"{out}.permute(0, 2, 1, 3).flatten(2)",
        f"{out}.transpose(1, 2).contiguous().view({out}.shape[0], {out}.shape[2], {d})",
        f"torch.cat({out}.unbind(1), -1)",
    )
    return w.linear(w.let(merged, "a"), d, d, "o")

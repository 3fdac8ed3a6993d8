"""Which keys a query sees, in the spellings that people use, and biases that are added to scores."""

from __future__ import annotations

from dataclasses import dataclass

from .writer import Writer


@dataclass(frozen=True)
class Mask:
    """A boolean expression, True where a query sees a key, and whether each row surely sees one.

    ``triangle`` is the mask without padding and documents, ``[T, T]``.
    """

    seen: str
    triangle: str | None
    causal: bool


def mask(w: Writer, x: str) -> Mask:
    """A causal mask mostly; a window, a prefix, every second key, or none. With padding and documents."""
    triangle, causal = w.pick(*[causal_mask] * 6, window, prefix, strided, block, None), True
    if triangle is None:
        seen, causal = None, False
    else:
        w.do(f"i = torch.arange({x}.shape[1], device={x}.device)")
        seen = w.let(triangle(w, x), "seen")
        causal = triangle not in (prefix,)
    whole, parts = seen, []
    if w.padding:
        parts.append(w.pick("mask.bool()[:, None, None, :]", "(mask > 0.5)[:, None, None]"))
    if w.packed:
        parts.append("(document[:, :, None] == document[:, None, :])[:, None]")
    if parts:
        seen = w.let(" & ".join([*([seen] if seen else []), *parts]), "seen")
        seen = w.let(f"{seen} | torch.eye({x}.shape[1], dtype=torch.bool, device={x}.device)", "seen")
    return Mask(seen or "", whole if not parts else None, causal)


def causal_mask(w: Writer, x: str) -> str:
    ones = f"torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool, device={x}.device)"
    stored = w.buffer("torch.ones(64, 64, dtype=torch.bool).tril()") if w.chance(0.1) else None
    if stored:
        return f"{stored}[:{x}.shape[1], :{x}.shape[1]]"
    return w.pick(
        f"{ones}.tril()",
        f"~{ones}.triu(1)",
        "i[None, :] <= i[:, None]",
        "i[:, None] >= i",
        f"torch.tril({ones}) > 0",
        "(i.unsqueeze(1) - i.unsqueeze(0)) >= 0",
        f"torch.ones({x}.shape[1], {x}.shape[1], device={x}.device).tril() == 1",
    )


def window(w: Writer, x: str) -> str:
    n = w.pick(1, 2, 3, 5, 8)
    ones = f"torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool, device={x}.device)"
    return w.pick(
        f"(i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < {n})",
        f"{ones}.tril() & {ones}.triu({1 - n})",
        f"{ones}.tril().triu({-n})",
        f"({ones}.tril()) & ~({ones}.tril({-n}))",
    )


def prefix(w: Writer, x: str) -> str:
    n = w.pick(2, 4)
    return f"(i[None, :] <= i[:, None]) | (i[None, :] < {n})"


def strided(w: Writer, x: str) -> str:
    n = w.pick(2, 3)
    return f"(i[None, :] <= i[:, None]) & ((i[:, None] - i[None, :]) % {n} == 0)"


def block(w: Writer, x: str) -> str:
    n = w.pick(4, 6)
    return f"(i[None, :] <= i[:, None]) & (i[None, :] // {n} == i[:, None] // {n})"


def bias(w: Writer, scores: str, x: str) -> str:
    """A bias by distance, or none."""
    kind = w.pick(*["none"] * 4, "alibi", "relative", "capped", "table")
    if kind == "capped":
        return w.let(f"({scores} / 4).tanh() * 4", "s")
    if kind == "none":
        return scores
    w.do(f"i = torch.arange({x}.shape[1], device={x}.device)")
    if kind == "alibi":
        slopes = w.vector(w.sizes.heads)
        return w.let(f"{scores} - {slopes}[:, None, None] * (i[:, None] - i[None, :]).abs()", "s")
    reach = w.pick(4, 7)
    table = w.weight(2 * reach + 1, w.sizes.heads)
    place = w.let(f"(i[:, None] - i[None, :]).clamp(-{reach}, {reach}) + {reach}", "place")
    looked = w.pick(f"F.embedding({place}, {table})", f"{table}[{place}]")
    return w.let(f"{scores} + {looked}.permute(2, 0, 1)", "s")

"""Layers over another sequence than the tokens: behind a prompt, of and within patches, interleaved."""

from __future__ import annotations

from collections.abc import Callable

from .writer import Writer

Layers = Callable[[Writer, str], str]
Layout = Callable[[Writer, str, Layers], str]


def among_others(w: Writer, x: str, layers: Layers) -> str:
    """``[B, T, D]`` → ``[B, T, D]``, by layers over a sequence that is made of these rows, or of one that is
    made of such a sequence; sometimes with layers over the tokens themselves before or behind."""
    before, behind = w.chance(0.2), w.chance(0.3)
    x = layers(w, x) if before else x
    outer = list(w.layers) or [x]
    x = w.pick(*LAYOUTS)(w, x, nested(layers) if w.chance(0.25) else inside(layers))
    w.layers, w.values = outer, []
    return layers(w, x) if behind else x


def inside(layers: Layers) -> Layers:
    """Layers that know of no other hidden states than those of their own sequence."""

    def made(w: Writer, x: str) -> str:
        w.do("# another sequence")
        w.layers, w.values = [], []
        return layers(w, shifted(w, x) if w.chance(0.3) else x)

    return made


def nested(layers: Layers) -> Layers:
    """Layers over one more sequence, which is made of this one."""

    def made(w: Writer, x: str) -> str:
        return w.pick(prompted, registers, started, opened, halved)(w, x, inside(layers))

    return made


def shifted(w: Writer, x: str) -> str:
    """Half of the features from the row before."""
    w.do(f"here, before = {x}.chunk(2, -1)")
    moved = w.pick("F.pad(before, (0, 0, 1, -1))", "F.pad(before, (0, 0, 1, 0))[:, :-1]")
    return w.let(f"torch.cat((here, {moved}), -1)")


def rows(w: Writer, x: str, count: int) -> str:
    """Learned rows, the same for all sequences: ``[B, count, D]``."""
    learned = w.weight(count, w.sizes.width)
    return w.let(
        w.pick(f"{learned}.expand({x}.shape[0], -1, -1)", f"{learned}[None].repeat({x}.shape[0], 1, 1)"), "r"
    )


def prompted(w: Writer, x: str, layers: Layers) -> str:
    n = w.pick(1, 2, 5, 8)
    y = layers(w, w.let(f"torch.cat(({rows(w, x, n)}, {x}), 1)"))
    return w.let(w.pick(f"{y}[:, {n}:]", f"{y}[:, -{x}.shape[1]:]", f"{y}.split(({n}, {x}.shape[1]), 1)[1]"))


def registers(w: Writer, x: str, layers: Layers) -> str:
    """Learned rows behind the sequence."""
    n = w.pick(1, 3, 4)
    y = layers(w, w.let(f"torch.cat(({x}, {rows(w, x, n)}), 1)"))
    return w.let(w.pick(f"{y}[:, :-{n}]", f"{y}[:, :{x}.shape[1]]"))


def started(w: Writer, x: str, layers: Layers) -> str:
    """A start row, and no last one."""
    first = rows(w, x, 1)
    return layers(
        w, w.let(w.pick(f"torch.cat(({first}, {x}[:, :-1]), 1)", f"torch.cat(({first}, {x}), 1)[:, :-1]"))
    )


def opened(w: Writer, x: str, layers: Layers) -> str:
    """A start row; each row is told from the one before it."""
    y = layers(w, w.let(f"torch.cat(({rows(w, x, 1)}, {x}), dim=-2)"))
    return w.let(f"{y}[:, :-1] + {x}" if w.chance(0.5) else f"{y}[..., :-1, :]")


def halved(w: Writer, x: str, layers: Layers) -> str:
    """Layers over the second half of the features alone."""
    w.do(f"kept, {x}h = {x}.chunk(2, -1)")
    y = layers(w, w.let(f"torch.cat(({x}h, {x}h), -1)"))
    return w.let(f"{y} + torch.cat((kept, kept), -1)")


def patched(w: Writer, x: str, layers: Layers) -> str:
    """A row for each few tokens, joined or averaged, and back."""
    p, d = w.sizes.patch, w.sizes.width
    y = w.pick(joined_rows, joined_ids, averaged)(w, x, p)
    if w.chance(0.5):
        y = opened(w, y, layers)
    else:
        y = layers(w, y)
    if w.chance(0.3):
        back = w.pick(
            f"{y}.repeat_interleave({p}, 1)", f"{y}[:, :, None].expand(-1, -1, {p}, -1).flatten(1, 2)"
        )
    else:
        wide = w.linear(y, d, p * d, "wide")
        back = w.pick(
            f"{wide}.unflatten(-1, ({p}, {d})).flatten(1, 2)", f"{wide}.reshape({x}.shape[0], -1, {d})"
        )
    return w.let(f"{x} + {w.let(back)}")


def joined_rows(w: Writer, x: str, p: int) -> str:
    d = w.sizes.width
    wide = w.pick(f"{x}.reshape({x}.shape[0], -1, {p * d})", f"{x}.unflatten(1, (-1, {p})).flatten(2)")
    return w.linear(w.let(wide, "wide"), p * d, d)


def joined_ids(w: Writer, x: str, p: int) -> str:
    """Of embeddings of their own."""
    d, v = w.sizes.width, w.sizes.vocabulary
    ids = w.let(
        w.pick(f"ids.view({x}.shape[0], -1, {p})", f"F.pad(ids, (0, 0)).reshape({x}.shape[0], -1, {p})"), "i"
    )
    return w.linear(w.let(f"F.embedding({ids}, {w.weight(v, d)}).flatten(2)", "wide"), p * d, d)


def averaged(w: Writer, x: str, p: int) -> str:
    return w.let(w.pick(f"{x}.unflatten(1, (-1, {p})).mean(2)", f"{x}[:, ::{p}]", f"{x}[:, {p - 1}::{p}]"))


def within_patches(w: Writer, x: str, layers: Layers) -> str:
    """Each patch is a short sequence, sometimes behind a start row of its own."""
    p, d = w.sizes.patch, w.sizes.width
    y = w.let(w.pick(f"{x}.reshape(-1, {p}, {d})", f"{x}.unflatten(1, (-1, {p})).flatten(0, 1)"))
    if w.chance(0.5):
        y = layers(w, w.let(f"torch.cat(({rows(w, y, 1)}, {y}), 1)"))
        y = w.let(w.pick(f"{y}[:, 1:]", f"{y}[:, :-1]"))
    else:
        y = layers(w, y)
    return w.let(
        w.pick(f"{y}.reshape({x}.shape[0], -1, {d})", f"{y}.unflatten(0, ({x}.shape[0], -1)).flatten(1, 2)")
    )


def interleaved(w: Writer, x: str, layers: Layers) -> str:
    """Two rows for each token, of which one is read."""
    d = w.sizes.width
    other = w.linear(x, d, d, "other")
    y = layers(w, w.let(f"torch.stack(({x}, {other}), 2).flatten(1, 2)"))
    return w.let(
        w.pick(
            f"{y}[:, ::2]",
            f"{y}[:, 1::2]",
            f"{y}.unflatten(1, (-1, 2))[:, :, 0]",
            f"{y}.unflatten(1, (-1, 2)).sum(2)",
        )
    )


def latents(w: Writer, x: str, layers: Layers) -> str:
    """A few learned rows read the tokens, and the tokens read them."""
    d, n = w.sizes.width, w.pick(2, 4, 9)
    q = w.weight(n, d)
    y = layers(w, w.let(f"({q} @ {x}.mT / {d}**0.5).softmax(-1) @ {x}"))
    return w.let(f"{x} + ({w.linear(x, d, d, 'q')} @ {y}.mT / {d}**0.5).softmax(-1) @ {y}")


def beside(w: Writer, x: str, layers: Layers) -> str:
    """Layers over the text twice, one behind the other."""
    y = layers(w, w.let(f"torch.cat(({x}, {w.pick(x, f'{x}.flip(1)', f'{x} * 0.5')}), 1)"))
    return w.let(
        w.pick(f"{y}[:, :{x}.shape[1]]", f"{y}[:, {x}.shape[1]:]", f"{y}.chunk(2, 1)[0] + {y}.chunk(2, 1)[1]")
    )


LAYOUTS: tuple[Layout, ...] = (
    *[patched] * 4,
    *[within_patches] * 2,
    *[interleaved] * 2,
    *[prompted] * 2,
    registers,
    started,
    opened,
    halved,
    latents,
    beside,
)

"""A whole random model: sizes, embedding, layers, loss, and how it is run, all from a seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from .attention import attention
from .blocks import RESIDUALS, experts, feed_forward, norm
from .losses import BESIDE, LOSSES
from .mixers import MIXERS
from .operators import any_operator, padded_operators
from .sequences import among_others
from .writer import Sizes, Writer

PAGE = '''\
"""Seed {seed}. Run with {settings}."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH, VOCABULARY = {batch}, {vocabulary}


def weight(*shape):
    return nn.Parameter(torch.randn(shape) / (shape[-2] if len(shape) > 1 else 9) ** 0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {weights}

    def forward(self, {names}):
        {lines}


def batch(length):
    make = torch.Generator().manual_seed(length)
    return dict(
        {inputs},
    )
'''


@dataclass(frozen=True)
class Settings:
    """How a model is run.

    tokens, second  lengths of its batches
    chunk           tokens of a chunk, or None for the default
    dtype           of its weights; ``autocast`` to bfloat16 beside
    dynamic         of `torch.compile`
    """

    tokens: int
    second: int
    chunk: int | None
    dtype: str
    autocast: bool
    dynamic: bool | None


@dataclass(frozen=True)
class Example:
    """A model as source text, and how to run it."""

    seed: int
    source: str
    settings: Settings


def example(seed: int, kind: str = "usual") -> Example:
    """The model of a seed: the same for ever, as long as the generator stays as it is.

    kind  ``several``: with layers over other sequences than the tokens; ``operators``: with chains of any
          operators along the tokens for layers; ``padded``: with such chains, and blocks, on tokens that are
          padded to whole blocks
    """
    random = Random(seed)
    sizes = sizes_of(random)
    if kind == "padded":
        patch = random.choice((2, 3, 4, 5))
        first, second = (max(n, patch + 1) for n in (sizes.tokens, sizes.second))  # operators name row `n`
        sizes = replace(sizes, tokens=first, second=second, patch=patch)
    elif kind != "usual":
        sizes = in_patches(random, sizes)
    low = random.random() < 0.15 and kind not in ("operators", "padded")
    w = Writer(random, sizes, exact=not low)
    if kind == "several":
        w.do(f"return {loss(w, among_others(w, embedded(w), layers))}")
    elif kind == "operators":
        w.do(f"return {loss(w, layers(w, embedded(w), (any_operator,)))}")
    elif kind == "padded":
        w.do(f"return {loss(w, layers(w, embedded(w), (padded_operators,)))}")
    else:
        if random.random() < 0.25:
            w.padding = random.choice(("left", "right"))
        elif random.random() < 0.15:
            w.packed = True
        w.do(f"return {loss(w, layers(w, embedded(w)))}")
    settings = settings_of(random, sizes, low)
    text = "\n".join(w.lines)
    weights = [line for line in w.weights if reads(text, line)]
    inputs = {name: made for name, made in w.inputs.items() if reads(text, name)}
    source = PAGE.format(
        seed=seed,
        settings=settings,
        batch=sizes.batch,
        vocabulary=sizes.vocabulary,
        weights="\n        ".join(weights),
        names=", ".join(inputs),
        lines="\n        ".join(w.lines),
        inputs=",\n        ".join(f"{k}={v}" for k, v in inputs.items()),
    )
    return Example(seed, source, settings)


def reads(text: str, declared: str) -> bool:
    """Is a weight (its declaration) or an input (its name) used? Of several spellings only one is written."""
    name = re.search(r"self\.\w+|\w+", declared.replace('self.register_buffer("', "self."))
    return name is not None and re.search(rf"{re.escape(name[0])}\b", text) is not None


def sizes_of(random: Random) -> Sizes:
    """Lengths that often equal another size, and are sometimes tiny."""
    heads = random.choice((1, 2, 2, 4))
    width = heads * random.choice((4, 4, 6, 8))
    vocabulary = random.choice((11, 17, 32))
    batch = random.choice((1, 2, 2, 3))
    equal = min(48, random.choice((width, vocabulary, 2 * width, 3 * width, width // heads, batch * heads)))
    usual = random.randint(9, 31)
    tokens = random.choice((usual,) * 7 + (equal,) * 3 + (random.choice((1, 2, 3, 7)),))
    other = random.choice([n for n in range(9, 33) if n != tokens])
    second = other if random.random() < 0.15 else tokens  # another length is another analysis
    return Sizes(batch, tokens, second, width, heads, vocabulary)


def in_patches(random: Random, sizes: Sizes) -> Sizes:
    """Lengths that are whole patches."""
    patch = random.choice((2, 3, 4))
    first, second = (patch * random.randint(3, 28 // patch) for _ in range(2))
    second = first if sizes.second == sizes.tokens else second
    return replace(sizes, tokens=first, second=second, patch=patch)


def settings_of(random: Random, sizes: Sizes, low: bool) -> Settings:
    chunk = random.choice((1, 2, 3, 4, 5, 5, 7, 8, sizes.tokens, sizes.tokens + 3, None))
    dtype = random.choice(("float32", "bfloat16")) if low else "float64"
    dynamic = True if random.random() < 0.05 else None
    return Settings(sizes.tokens, sizes.second, chunk, dtype, low and random.random() < 0.3, dynamic)


def embedded(w: Writer) -> str:
    d, v = w.sizes.width, w.sizes.vocabulary
    w.weights.append(f"self.embedding = weight({v}, {d})")
    ids = w.given("ids", "torch.randint(VOCABULARY, (BATCH, length), generator=make)")
    if w.padding:
        order = "<" if w.padding == "right" else ">="
        bound = "length - length // 4" if w.padding == "right" else "length // 4"
        full = "length" if order == "<" else "0"
        edge = f"torch.where(torch.arange(BATCH)[:, None] == BATCH - 1, {bound}, {full})"
        w.given("mask", f"(torch.arange(length) {order} {edge}).long()")
    if w.packed:
        w.given("document", "(torch.arange(length) // (length // 3 + 1)).expand(BATCH, length).contiguous()")
    x = w.let(w.pick(f"F.embedding({ids}, self.embedding)", f"self.embedding[{ids}]"))
    positions = w.pick("none", "slice", "arange", "sinus")
    if positions == "slice":
        x = w.let(f"{x} + {w.weight(1, 64, d)}[:, :{x}.shape[1]]")
    if positions == "arange":
        x = w.let(f"{x} + F.embedding(torch.arange({x}.shape[1], device={x}.device), {w.weight(64, d)})")
    if positions == "sinus":
        place = f"torch.arange({x}.shape[1], dtype={x}.dtype)[:, None]"
        x = w.let(f"{x} + torch.sin({place} * torch.arange(1, {d + 1}, dtype={x}.dtype) / {d})")
    return w.let(f"{x} * {d}**0.5") if w.chance(0.2) else x


def layers(w: Writer, x: str, mixers: Sequence[Callable[[Writer, str], str]] = ()) -> str:
    """One to three layers, one mostly: a mixer and perhaps a feed-forward part, behind or beside it.

    mixers  what they are picked from; attention mostly where none are given
    """
    count = w.pick(*[1] * 9, 2, 2, 3)
    skips = count == 3 and w.chance(0.2)
    for number in range(count):
        w.do(f"# layer {number}")
        w.layers.append(x)
        if skips and number == 2:
            x = w.let(f"{x} + {w.layers[1]} * {w.vector(w.sizes.width)}")
        mixer = w.pick(*mixers) if mixers else attention if w.chance(0.55) else w.pick(*MIXERS)
        after = experts if w.chance(0.3) else feed_forward
        residual = w.pick(*RESIDUALS)
        if w.chance(0.1):
            x = residual(w, x, lambda w, y: w.let(f"{mixer(w, y)} + {after(w, y)}"))
        else:
            x = residual(w, x, mixer)
            x = residual(w, x, after) if w.chance(0.3) else x
        if w.chance(0.05):
            x = w.let(f"{x} * (1 - 0.1 * {x}.detach().tanh())")
    return norm(w, x) if w.chance(0.8) else x


def loss(w: Writer, x: str) -> str:
    w.do("# loss")
    total = w.pick(*LOSSES)(w, x)
    if w.chance(0.25):
        w.terms.append(w.pick(*BESIDE)(w, x))
    for term in w.terms:
        total = w.let(f"{total} + 0.1 * {term}", "loss")
    return total

"""Token mixers without a softmax over keys: linear attention, decays, convolutions, shifts, sums."""

from __future__ import annotations

from .writer import Writer


def linear_attention(w: Writer, x: str) -> str:
    """Keys and values as products of features, in one of the parallel spellings."""
    d = w.sizes.width
    q, k, v = (w.linear(x, d, d, n) for n in "qkv")
    feature = w.pick("F.elu({}) + 1", "F.softplus({})", "{}.exp()", "{}")
    q, k = (w.let(feature.format(t), t[0]) for t in (q, k))
    w.do(f"i = torch.arange({x}.shape[1], device={x}.device)")
    kind = w.pick("tril", "decay", "global", "summed", "strict")
    if kind == "global":
        return w.let(f"{q} @ ({k}.mT @ {v}) / {x}.shape[1]", "a")
    if kind == "summed":
        state = w.let(f"torch.einsum('btd,bte->btde', {k}, {v}).cumsum(1)", "state")
        return w.let(f"torch.einsum('btd,btde->bte', {q}, {state}) / (i + 1)[:, None]", "a")
    scores = w.let(f"{q} @ {k}.transpose(1, 2) / {d}", "s")
    if kind == "decay":
        rate = w.vector(1)
        scores = w.let(
            f"{scores} * torch.where(i[:, None] >= i, (-0.2 * {rate} * (i[:, None] - i).abs()).exp(), 0.0)",
            "s",
        )
        return w.let(f"{scores} @ {v}", "a")
    return w.let(f"{scores}.tril({-1 if kind == 'strict' else 0}) @ {v}", "a")


def convolution(w: Writer, x: str) -> str:
    d, n = w.sizes.width, w.pick(2, 3, 4)
    kernel = w.let(f"{w.weight(d, 1, n)}", "kernel")
    rows = w.let(f"{x}.transpose(1, 2)", "r")
    bias = f", {w.weight(d)}" if w.chance(0.4) else ", None"
    made = w.pick(
        f"F.conv1d(F.pad({rows}, ({n - 1}, 0)), {kernel}{bias}, groups={d})",
        f"F.conv1d({rows}, {kernel}{bias}, padding={n - 1}, groups={d})[..., :{x}.shape[1]]",
        f"F.conv1d({rows}, {w.weight(d, d, n)}{bias}, padding={n - 1})[..., : -({n} - 1)]",
    )
    if n == 3 and w.chance(0.3):
        made = f"F.conv1d({rows}, {kernel}{bias}, padding=1, groups={d})"
    return w.let(f"F.silu({made}).transpose(1, 2)", "c")


def shift(w: Writer, x: str) -> str:
    """The row before, in part."""
    n = w.pick(1, 1, 2)
    before = w.let(
        w.pick(
            f"F.pad({x}, (0, 0, {n}, -{n}))",
            f"F.pad({x}, (0, 0, {n}, 0))[:, :-{n}]",
            f"F.pad({x}[:, :-{n}], (0, 0, {n}, 0))",
            f"torch.cat((torch.zeros_like({x}[:, :{n}]), {x}[:, :-{n}]), 1)",
            f"nn.ZeroPad2d((0, 0, {n}, -{n}))({x})",
        ),
        "before",
    )
    share = w.vector(w.sizes.width)
    mixed = w.let(w.pick(f"{x} + ({before} - {x}) * {share}", f"torch.lerp({x}, {before}, {share})"), "m")
    return w.linear(mixed, w.sizes.width, w.sizes.width, "m")


def running_mean(w: Writer, x: str) -> str:
    w.do(f"i = torch.arange(1, {x}.shape[1] + 1, device={x}.device, dtype={x}.dtype)")
    mean = w.pick(
        f"{x}.cumsum(1) / i[:, None]",
        f"torch.cumsum({x}, dim=1) / torch.arange(1, {x}.shape[1] + 1)[None, :, None]",
        f"{x}.transpose(1, 2).cumsum(-1).transpose(1, 2) / i.unsqueeze(-1)",
        f"torch.ones({x}.shape[1], {x}.shape[1], dtype={x}.dtype).tril() @ {x} / i[:, None]",
    )
    return w.linear(w.let(mean, "mean"), w.sizes.width, w.sizes.width, "m")


def decayed_sum(w: Writer, x: str) -> str:
    """``s_t = a_t s_{t-1} + b_t`` by cumulative sums of logarithms."""
    d = w.sizes.width
    gate = w.linear(x, d, d, "gate")
    logs = w.let(f"-0.1 * F.softplus({gate})", "logs")
    total = w.let(f"{logs}.cumsum(1)", "total")
    return w.let(f"{total}.exp() * ({w.linear(x, d, d)} * (-{total}).exp()).cumsum(1)", "m")


def attention_free(w: Writer, x: str) -> str:
    """Weights of keys without queries (AFT): running sums of exponentials."""
    d = w.sizes.width
    k, v, gate = (w.linear(x, d, d, n) for n in ("k", "v", "gate"))
    e = w.let(f"{k}.tanh().exp()", "e")
    return w.let(f"torch.sigmoid({gate}) * ({e} * {v}).cumsum(1) / {e}.cumsum(1)", "m")


def pooled(w: Writer, x: str) -> str:
    """Every row sees a summary of all of them."""
    d = w.sizes.width
    one = w.pick(
        f"{x}.mean(1, keepdim=True)",
        f"{x}.sum(1, keepdim=True) / {x}.shape[1]",
        f"{x}[:, :1]",
        f"{x}[:, -1:]",
        f"{x}.amax(1, keepdim=True)",
        f"({x} @ {w.weight(d, 1)}).softmax(1).mul({x}).sum(1, keepdim=True)",
        f"{x}.logsumexp(1, keepdim=True) / 4",
    )
    return w.let(f"({w.let(one, 'one')} @ {w.weight(d, d)}).expand_as({x})", "m")


def spatial_gate(w: Writer, x: str) -> str:
    """A learned matrix of tokens by tokens (gMLP, mixers)."""
    d = w.sizes.width
    matrix = w.let(f"{w.weight(64, 64)}[:{x}.shape[1], :{x}.shape[1]].tril()", "matrix")
    return w.let(f"{w.linear(x, d, d)} * torch.einsum('ts,bsd->btd', {matrix}, {x})", "m")


MIXERS = (
    *[linear_attention] * 4,
    *[convolution] * 3,
    *[shift] * 3,
    *[running_mean] * 2,
    *[decayed_sum] * 2,
    attention_free,
    pooled,
    spatial_gate,
)

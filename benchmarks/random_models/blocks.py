"""Norms, feed-forward parts, experts, and the ways in which a layer joins its residual stream."""

from __future__ import annotations

from collections.abc import Callable

from .writer import Writer

Part = Callable[[Writer, str], str]


def norm(w: Writer, x: str) -> str:
    d = w.sizes.width
    g = w.vector(d)
    return w.let(
        w.pick(
            f"F.layer_norm({x}, ({d},), {g}, {w.weight(d)})",
            f"F.rms_norm({x}, ({d},), {g})",
            f"{g} * {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)",
            f"({x} - {x}.mean(-1, True)) / ({x}.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * {g}",
            f"({x} / ({x}.norm(dim=-1, keepdim=True) / {d}**0.5 + 1e-6)) * {g}",
            f"torch.tanh({x} * 0.7) * {g}",
            f"F.normalize({x}, dim=-1) * {g}",
            f"F.group_norm({x}.reshape(-1, {d}), 2).view_as({x}) * {g}",
        ),
        "n",
    )


def feed_forward(w: Writer, x: str) -> str:
    d = w.sizes.width
    f = w.pick(d, 2 * d, 3 * d)
    activation = w.pick(
        "F.gelu({})",
        "F.relu({})",
        "F.relu({}).square()",
        "F.silu({})",
        "{}.tanh()",
        "F.mish({})",
        'F.gelu({}, approximate="tanh")',
        "0.5 * {0} * (1 + torch.erf({0} / 2**0.5))",
    )
    if w.chance(0.5):
        up = w.let(activation.format(w.linear(x, d, f, "up")), "up")
        return w.linear(up, f, d, "down")
    if w.chance(0.5):
        both = w.linear(x, d, 2 * f, "both")
        gate, up = w.pick(
            (f"{both}[..., :{f}]", f"{both}[..., {f}:]"),
            (f"{both}[..., ::2]", f"{both}[..., 1::2]"),
            (f"{both}.chunk(2, -1)[0]", f"{both}.chunk(2, -1)[1]"),
        )
    else:
        gate, up = w.linear(x, d, f, "gate"), w.linear(x, d, f, "up")
    gate = w.let(gate, "gate")
    return w.linear(w.let(f"{activation.format(gate)} * {up}", "up"), f, d, "down")


def experts(w: Writer, x: str) -> str:
    """A few experts of one projection each: dense, chosen by masks or one-hot, or rows sorted by expert."""
    d, n = w.sizes.width, 3
    weights = w.let(f"({w.linear(x, d, n, 'router')}).softmax(-1)", "weights")
    up = w.weight(n, d, d)
    kind = w.pick("dense", "one-hot", "masks", "sorted", "picked") if w.exact else "dense"
    if kind == "dense":
        made = w.let(f'F.silu(torch.einsum("btd,nde->btne", {x}, {up}))', "made")
        return w.let(
            w.pick(
                f"({made} * {weights}.unsqueeze(-1)).sum(2)",
                f'torch.einsum("btne,btn->bte", {made}, {weights})',
            ),
            "m",
        )
    w.do(f"share, chosen = {weights}.topk(2, dim=-1)")
    if w.chance(0.5):
        w.do("share = share / share.sum(-1, keepdim=True)")
    if w.chance(0.4):
        hot = f"F.one_hot(chosen, {n}).to({x}.dtype).sum(2)"
        w.terms.append(w.let(f"{n} * ({hot}.mean((0, 1)) * {weights}.mean((0, 1))).sum()", "balance"))
    return chosen_experts(w, x, kind, up)


def chosen_experts(w: Writer, x: str, kind: str, up: str) -> str:
    d, n = w.sizes.width, 3
    if kind == "one-hot":
        gates = w.let(f'torch.einsum("btk,btkn->btn", share, F.one_hot(chosen, {n}).to({x}.dtype))', "gates")
        return w.let(
            f'torch.einsum("btne,btn->bte", torch.einsum("btd,nde->btne", {x}, {up}).relu(), {gates})', "m"
        )
    if kind == "masks":
        out = w.let(f"torch.zeros_like({x})", "m")
        for i in range(n):
            part = f"(share * (chosen == {i})).sum(-1, keepdim=True)"
            out = w.let(f"{out} + {part} * F.silu({x} @ {up}[{i}])", "m")
        return out
    if kind == "picked":
        w.do(f"rows = {up}[chosen]")
        return w.let(f'torch.einsum("btke,btk->bte", torch.einsum("btd,btkde->btke", {x}, rows), share)', "m")
    w.do(f"flat = {x}.reshape(-1, {d})")
    w.do("order = chosen.reshape(-1).argsort(stable=True)")
    w.do(f"rows = torch.bmm(flat[order // 2].unsqueeze(1), {up}[chosen.reshape(-1)[order]]).squeeze(1)")
    w.do("rows = rows * share.reshape(-1)[order].unsqueeze(-1)")
    return w.let(f"torch.zeros_like(flat).index_add(0, order // 2, rows).view_as({x})", "m")


# How a layer joins the residual stream


def pre(w: Writer, x: str, part: Part) -> str:
    return added(w, x, part(w, norm(w, x)))


def post(w: Writer, x: str, part: Part) -> str:
    return norm(w, added(w, x, part(w, x)))


def sandwich(w: Writer, x: str, part: Part) -> str:
    return added(w, x, norm(w, part(w, norm(w, x))))


def scaled(w: Writer, x: str, part: Part) -> str:
    """Layer scale, or a learned gate."""
    d = w.sizes.width
    made = part(w, norm(w, x))
    gate = w.pick(w.vector(d), w.vector(1), f"torch.sigmoid({w.linear(x, d, 1, 'gate')})")
    return w.let(w.pick(f"{x} + {gate} * {made}", f"torch.addcmul({x}, {made}, {gate}.expand_as({made}))"))


def from_embedding(w: Writer, x: str, part: Part) -> str:
    """The first hidden states mixed in again."""
    mixed = w.let(f"{w.vector(1)} * {x} + 0.5 * {w.layers[0]}")
    return added(w, mixed, part(w, norm(w, mixed)))


def streams(w: Writer, x: str, part: Part) -> str:
    """Hyper-connections: two streams, mixed by a small matrix around the layer."""
    s = w.let(
        w.pick(f"torch.stack(({x}, 0.5 * {x}), 2)", f"{x}.unsqueeze(2).expand(-1, -1, 2, -1)"), "streams"
    )
    one = w.let(f"({s} * {w.vector(2)}[:, None]).sum(2)")
    made = part(w, norm(w, one))
    s = w.let(f'torch.einsum("btsd,sr->btrd", {s}, {w.weight(2, 2)}) + {made}.unsqueeze(2)', "streams")
    return w.let(w.pick(f"{s}.sum(2)", f"{s}.mean(dim=2)"))


def added(w: Writer, x: str, made: str) -> str:
    if w.chance(0.1):  # in place, on a value that nobody else holds
        x = w.let(f"{x} * 1.0")
        w.do(w.pick(f"{x} += {made}", f"{x}.add_({made})"))
        return x
    return w.let(
        w.pick(f"{x} + {made}", f"{x} + {made}", f"torch.add({x}, {made}, alpha=0.7)", f"{made} + {x}")
    )


RESIDUALS = (*[pre] * 6, *[post] * 2, sandwich, sandwich, scaled, from_embedding, streams)

"""Losses of hidden states ``[B, T, D]``, in the layouts that people use. Each returns a number's name."""

from __future__ import annotations

from .writer import Writer

IDS = "torch.randint(VOCABULARY, (BATCH, length), generator=make)"
LABELS = f"torch.where(torch.rand(BATCH, length, generator=make) < 0.2, -100, {IDS})"
NUMBERS = "0.5 * torch.randn(BATCH, length, generator=make)"
PER_SEQUENCE = "torch.randn(BATCH, generator=make)"
COMPLETION = "(torch.arange(length) >= length // 3).expand(BATCH, length).float()"


def head(w: Writer, h: str, name: str = "logits") -> str:
    """Logits ``[B, T, V]``, sometimes of the embedding's own weight, sometimes scaled or capped."""
    v = w.sizes.vocabulary
    tied = w.pick(f"{h} @ self.embedding.t()", f"F.linear({h}, self.embedding)")
    logits = w.let(tied, name) if w.chance(0.3) else w.linear(h, w.sizes.width, v, name)
    return w.let(w.pick(f"{logits} / 2", f"5 * torch.tanh({logits} / 5)"), name) if w.chance(0.2) else logits


def cross_entropy(w: Writer, h: str) -> str:
    labels, v = w.given("labels", LABELS), w.sizes.vocabulary
    if w.chance(0.15):
        h = w.let(f"{h}[:, :-1]", "h")
        flat, seen = head(w, h), f"{labels}[:, 1:]"
    else:
        flat = head(w, h)
        seen, flat = w.pick(
            (labels, flat),
            (labels, flat),
            (f"{labels}[:, 1:]", f"{flat}[:, :-1]"),
            (f"{labels}[..., 1:].contiguous()", f"{flat}[..., :-1, :].contiguous()"),
            (f"F.pad({labels}[:, 1:], (0, 1), value=-100)", flat),
            (f"F.pad({labels}, (0, 1), value=-100)[:, 1:]", flat),
        )
    return spelled(w, w.let(flat, "logits"), w.let(seen, "targets"), v)


def spelled(w: Writer, logits: str, targets: str, v: int) -> str:
    more = w.pick("", "", "", ", label_smoothing=0.1", f", weight={w.buffer(f'torch.rand({v}) + 0.5')}")
    flat, rows = f"{logits}.reshape(-1, {v})", f"{targets}.reshape(-1)"
    kept = w.let(f"({targets} != -100)", "kept")
    count = f"{kept}.sum().clamp(min=1)"
    safe = f"{targets}.clamp(min=0)"
    ones = f"F.one_hot({safe}, {v}).to({logits}.dtype)"
    found = f"{logits}.gather(-1, {safe}[..., None])[..., 0]"
    each = f"F.cross_entropy({flat}, {rows}, reduction='none'{more})"
    return w.let(
        w.pick(
            f"F.cross_entropy({flat}, {rows}{more})",
            f"F.cross_entropy({flat}, {rows}, ignore_index=-100, reduction='sum'{more}) / {count}",
            f"F.cross_entropy({logits}.transpose(1, 2), {targets}{more})",
            f"F.cross_entropy({logits}.permute(0, 2, 1), {targets}, reduction='none'{more}).mean()",
            f"F.nll_loss(F.log_softmax({flat}, -1), {rows})",
            f"{each}.sum() / {count}",
            f"({each}.view_as({targets}).sum(1) / ({kept}.sum(1) + 1)).mean()",
            f"-({logits}.log_softmax(-1).gather(-1, {safe}.unsqueeze(-1))[..., 0] * {kept}).sum() / {count}",
            f"(({logits}.logsumexp(-1) - {found}) * {kept}).sum() / {count}",
            f"-({ones} * F.log_softmax({logits}, -1)).sum(-1).mul({kept}).mean()",
            f"torch.where({kept}, torch.logsumexp({logits}, 2) - {found}, 0.0).mean()",
        ),
        "loss",
    )


def log_probabilities(w: Writer, h: str) -> str:
    """``[B, T]``, of ``ids``."""
    logits = head(w, h)
    targets = w.given("targets", IDS)
    flat = f"{logits}.flatten(0, 1), {targets}.flatten()"
    row = "F.log_softmax(r, -1).gather(1, t[:, None])[:, 0]"
    return w.let(
        w.pick(
            f"{logits}.log_softmax(-1).gather(-1, {targets}.unsqueeze(-1)).squeeze(-1)",
            f"{logits}.gather(-1, {targets}[..., None]).squeeze(-1) - {logits}.logsumexp(-1)",
            f"-F.cross_entropy({flat}, reduction='none').view_as({targets})",
            f"torch.stack([{row} for r, t in zip({logits}, {targets})])",
        ),
        "lp",
    )


def policy_gradient(w: Writer, h: str) -> str:
    """Ratios per token, or per sequence; clipped; a divergence from a reference beside."""
    lp, old = log_probabilities(w, h), w.given("old", NUMBERS)
    m, advantage = w.given("completion", COMPLETION), w.given("advantage", PER_SEQUENCE)
    old = w.let(f"{old} - 2.0", "old")
    if w.chance(0.4):
        logs = w.let(f"(({lp} - {old}) * {m}).sum(1) / {m}.sum(1).clamp(min=1)", "logs")
        ratio = w.let(f"{logs}.exp()[:, None].expand_as({lp})", "ratio")
    else:
        ratio = w.let(f"({lp} - {old}).exp()", "ratio")
    gain = w.pick(
        f"torch.min({ratio} * {advantage}[:, None], {ratio}.clamp(0.8, 1.2) * {advantage}[:, None])",
        f"{ratio} * {advantage}[:, None]",
    )
    each = w.let(f"-({gain})", "each")
    if w.chance(0.4):
        ref = w.given("ref", NUMBERS)
        each = w.let(f"{each} + 0.1 * (({ref} - 2.0 - {lp}).exp() - ({ref} - 2.0 - {lp}) - 1)", "each")
    return w.let(
        w.pick(f"({each} * {m}).sum() / {m}.sum()", f"(({each} * {m}).sum(1) / {m}.sum(1)).mean()"), "loss"
    )


def preference(w: Writer, h: str) -> str:
    """Pairs of sequences compared by summed or mean log-probabilities; one sequence is compared with zero."""
    lp, m = log_probabilities(w, h), w.given("completion", COMPLETION)
    ref = w.given("reference", PER_SEQUENCE)
    score = w.let(w.pick(f"({lp} * {m}).sum(-1)", f"({lp} * {m}).sum(-1) / {m}.sum(-1)"), "score")
    gain = w.let(f"0.3 * ({score} - {ref})", "gain")
    if w.sizes.batch == 2:
        gain = w.let(
            w.pick(f"{gain}[0] - {gain}[1]", f"{gain}[:1] - {gain}[1:]", f"torch.sub(*{gain}.chunk(2))"),
            "gain",
        )
    return w.let(
        w.pick(
            f"-F.logsigmoid({gain}).mean()", f"({gain} - 0.5).square().mean()", f"F.relu(1 - {gain}).mean()"
        ),
        "loss",
    )


def distillation(w: Writer, h: str) -> str:
    """Against a teacher whose hidden states or probabilities are inputs."""
    d, v = w.sizes.width, w.sizes.vocabulary
    hidden = w.given("teacher", f"torch.randn(BATCH, length, {d}, generator=make)")
    theirs = w.buffer(f"torch.randn({d}, {v}) / {d}**0.5")
    with_grad = w.let(f"{hidden}.to({h}.dtype) @ {theirs}", "t")
    t, s = (w.let(f"F.log_softmax({n} / 1.5, -1)", k) for n, k in ((with_grad, "t"), (head(w, h), "s")))
    return w.let(
        w.pick(
            f"F.kl_div({s}, {t}, log_target=True, reduction='batchmean')",
            f"({t}.exp() * ({t} - {s})).sum(-1).mean()",
            f"F.kl_div({s}.flatten(0, 1), {t}.flatten(0, 1).exp(), reduction='sum') / {s}.shape[1]",
            f"({s}.exp() * ({s} - {t})).sum(-1).mean()",
            f"({s} - {t}).square().mean()",
        ),
        "loss",
    )


def regression(w: Writer, h: str) -> str:
    """A number per token."""
    aim = w.given("returns", NUMBERS)
    value = w.let(f"{w.linear(h, w.sizes.width, 1, 'value')}.{w.pick('squeeze(-1)', 'flatten(1)')}", "value")
    aim = w.let(f"{aim}.to({value}.dtype)", "aim")
    return w.let(
        w.pick(
            f"F.mse_loss({value}, {aim})",
            f"F.smooth_l1_loss({value}, {aim})",
            f"({value} - {aim}).square().sum(1).mean()",
            f"F.binary_cross_entropy_with_logits({value}, {aim}.sigmoid())",
        ),
        "loss",
    )


def pooled_head(w: Writer, h: str) -> str:
    """A class of the sequence, from one row or all of them."""
    d = w.sizes.width
    rows = w.let(
        w.pick(
            f"{h}.mean(1)",
            f"{h}[:, -1]",
            f"{h}[:, 0]",
            f"{h}.amax(1)",
            f"({h} * 0.1).sum(dim=1)",
            f"{h}[torch.arange(BATCH), {w.given('last', 'torch.randint(length, (BATCH,), generator=make)')}]",
        ),
        "pooled",
    )
    scores = w.let(f"{rows} @ {w.weight(d, 3)}", "scores")
    kind = w.given("kind", "torch.randint(3, (BATCH,), generator=make)")
    contrast = (
        f"F.cross_entropy(F.normalize({rows}, dim=-1) @ F.normalize({rows}, dim=-1).t(), torch.arange(BATCH))"
    )
    return w.let(w.pick(f"F.cross_entropy({scores}, {kind})", f"{scores}.square().mean()", contrast), "loss")


def entropy(w: Writer, h: str) -> str:
    logits = head(w, h)
    return w.let(
        w.pick(
            f"-({logits}.softmax(-1) * {logits}.log_softmax(-1)).sum(-1).mean()",
            f"1e-2 * {logits}.logsumexp(-1).square().mean()",
            f"({logits}.logsumexp(-1) - ({logits}.softmax(-1) * {logits}).sum(-1)).mean()",
        ),
        "loss",
    )


def ahead(w: Writer, h: str) -> str:
    """A second head that predicts one token further."""
    labels, d = w.given("labels", LABELS), w.sizes.width
    second = w.linear(w.let(f"{w.linear(h, d, d)}.tanh()", "h"), d, w.sizes.vocabulary, "logits")
    return w.let(f"F.cross_entropy({second}[:, :-2].flatten(0, 1), {labels}[:, 2:].flatten())", "loss")


def of_a_layer(w: Writer, h: str) -> str:
    """An auxiliary loss of hidden states in the middle."""
    return w.pick(cross_entropy, regression, pooled_head)(w, w.pick(*w.layers))


LOSSES = (
    *[cross_entropy] * 8,
    *[policy_gradient] * 3,
    *[preference] * 2,
    *[distillation] * 2,
    regression,
    pooled_head,
)
BESIDE = (entropy, entropy, regression, of_a_layer, of_a_layer, ahead, distillation, pooled_head)

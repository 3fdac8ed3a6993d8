"""Objectives that language models are trained with, as people write them: from a head, hidden states and a
batch to a number.

No line of the library knows any of them. ``benchmarks/objectives.py`` measures them and
``tests/test_objectives.py`` holds them exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


class Batch:
    """What every objective may read, for ``[B, T]`` tokens; B is even, and pairs are (chosen…, rejected…).

    labels    ``[B, T]`` integers, some ignored; ``targets`` the same without ignored ones
    mask      ``[B, T]`` completion mask, floating
    old, ref  ``[B, T]`` log-probabilities of an older and of a reference policy
    advantage, score  ``[B]``
    returns, values   ``[B, T]``
    teacher   ``[B, T, d]`` hidden states of a teacher
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        width: int,
        vocabulary: int,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ):
        make = torch.Generator().manual_seed(1)

        def normal(*shape):
            return torch.randn(*shape, generator=make).to(device, dtype)

        self.targets = torch.randint(vocabulary, (batch, tokens), generator=make).to(device)
        ignored = torch.rand(batch, tokens, generator=make) < 0.2
        ignored[:, : tokens // 5] = True
        self.labels = self.targets.masked_fill(ignored.to(device), IGNORED)
        self.mask = (~ignored).to(device, dtype)
        self.old, self.ref = -normal(batch, tokens).abs() - 3, -normal(batch, tokens).abs() - 3
        self.advantage, self.score = normal(batch), normal(batch)
        self.returns, self.values = normal(batch, tokens), normal(batch, tokens)
        self.teacher = normal(batch, tokens, width)
        self.ends = torch.randint(tokens // 2, tokens, (batch,), generator=make).to(device)
        self.weight = torch.rand(vocabulary, generator=make).to(device, dtype) + 0.5


class Heads(nn.Module):
    """The parameters that objectives read: a head, a value head, more heads, a teacher's head (frozen)."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.lm = nn.Linear(width, vocabulary, bias=False)
        self.value = nn.Linear(width, 1)
        self.extra = nn.ModuleList(nn.Linear(width, vocabulary, bias=False) for _ in range(2))
        self.teacher = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)


Loss = Callable[[Heads, Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Objective:
    """A loss, the sweeps that its forward and backward may take together (0: it reads so few rows that there
    is nothing to sweep), and what it trains."""

    loss: Loss
    sweeps: int
    trains: tuple[str, ...] = ("lm",)


OBJECTIVES: dict[str, Objective] = {}


def objective(name: str, sweeps: int = 1, trains: tuple[str, ...] = ("lm",)):
    def take(loss: Loss) -> Loss:
        OBJECTIVES[name] = Objective(loss, sweeps, trains)
        return loss

    return take


def shifted(h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, :-1], labels[:, 1:]


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def selective_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """As TRL writes it for float32: the chosen logit minus the log-sum-exp."""
    chosen = torch.gather(logits, -1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, -1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


# Supervised


@objective("cross-entropy, shifted slices")
def _(m, h, b):
    logits = m.lm(h)[:, :-1]
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), b.labels[:, 1:].reshape(-1), ignore_index=IGNORED
    )


@objective("cross-entropy, padded labels (Hugging Face)")
def _(m, h, b):
    labels = F.pad(b.labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    logits = m.lm(h)
    return (
        F.cross_entropy(
            logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED, reduction="sum"
        )
        / 100
    )


@objective("cross-entropy, rolled labels")
def _(m, h, b):
    labels = torch.roll(b.labels, -1, dims=1).clone()
    labels[:, -1] = IGNORED
    return F.cross_entropy(m.lm(h).transpose(1, 2), labels, ignore_index=IGNORED)


@objective("cross-entropy, hidden states shifted")
def _(m, h, b):
    hidden, labels = shifted(h, b.labels)
    return F.cross_entropy(m.lm(hidden).flatten(0, 1), labels.flatten())


@objective("cross-entropy, class weights")
def _(m, h, b):
    return F.cross_entropy(m.lm(h).flatten(0, 1), b.labels.flatten(), weight=b.weight)


@objective("cross-entropy, per token, weighted")
def _(m, h, b):
    loss = F.cross_entropy(m.lm(h).flatten(0, 1), b.labels.flatten(), reduction="none").view_as(b.mask)
    return ((loss * b.mask).sum(1) / b.mask.sum(1)).mean()


@objective("label smoothing")
def _(m, h, b):
    return F.cross_entropy(m.lm(h).flatten(0, 1), b.labels.flatten(), label_smoothing=0.1)


@objective("label smoothing (transformers)")
def _(m, h, b):
    logits, labels = m.lm(h)[..., :-1, :], b.labels[..., 1:].unsqueeze(-1)
    log_probs = -F.log_softmax(logits, dim=-1)
    padding = labels.eq(IGNORED)
    labels = labels.clamp(min=0)
    nll = log_probs.gather(dim=-1, index=labels).masked_fill(padding, 0.0)
    smoothed = log_probs.sum(dim=-1, keepdim=True).masked_fill(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smoothed.sum() / (count * log_probs.shape[-1])


@objective("z-loss")
def _(m, h, b):
    logits = m.lm(h).flatten(0, 1)
    keep = b.labels.flatten() != IGNORED
    z = torch.logsumexp(logits, -1) ** 2
    return F.cross_entropy(logits, b.labels.flatten()) + 1e-3 * (z * keep).sum() / keep.sum()


@objective("soft-capped and scaled logits")
def _(m, h, b):
    logits = 30 * torch.tanh(m.lm(h) * 0.3 / 30)
    return F.cross_entropy(logits.flatten(0, 1), b.labels.flatten())


@objective("focal")
def _(m, h, b):
    logp = token_logprobs(m.lm(h), b.targets)
    return masked_mean(-((1 - logp.exp()) ** 2) * logp, b.mask)


@objective("unlikelihood")
def _(m, h, b):
    p = m.lm(h).softmax(-1)
    repeated = p.gather(-1, b.targets.roll(1, 1).unsqueeze(-1)).squeeze(-1)
    return masked_mean(-token_logprobs(m.lm(h), b.targets) - (1 - repeated).clamp_min(1e-6).log(), b.mask)


@objective("entropy bonus")
def _(m, h, b):
    logp = m.lm(h).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return masked_mean(-logp.gather(-1, b.targets[..., None])[..., 0] - 0.01 * entropy, b.mask)


@objective("dynamic fine-tuning (probability-weighted)")
def _(m, h, b):
    logp = token_logprobs(m.lm(h), b.targets)
    return masked_mean(-logp * logp.detach().exp(), b.mask)


@objective("hardest quarter of tokens", sweeps=2)
def _(m, h, b):
    loss = F.cross_entropy(m.lm(h).flatten(0, 1), b.labels.flatten(), reduction="none")
    return loss.topk(loss.numel() // 4).values.mean()


@objective("tokens above the mean loss", sweeps=2)
def _(m, h, b):
    loss = -token_logprobs(m.lm(h), b.targets)
    chosen = (loss > loss.mean()).to(loss.dtype).detach()
    return masked_mean(loss, chosen)


@objective("metrics beside the loss")
def _(m, h, b):
    logits = m.lm(h)
    loss = F.cross_entropy(logits.flatten(0, 1), b.labels.flatten())
    with torch.no_grad():
        accuracy = ((logits.argmax(-1) == b.labels) & (b.labels != IGNORED)).sum() / (
            b.labels != IGNORED
        ).sum()
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    return loss + 0 * (accuracy + entropy + loss.detach().exp())


# Classes in the second dimension, torch's own layout for sequences


@objective("[B, V, T], shifted slices")
def _(m, h, b):
    return F.cross_entropy(m.lm(h)[:, :-1].transpose(1, 2), b.labels[:, 1:])


@objective("[B, V, T], shifted logits")
def _(m, h, b):
    return F.cross_entropy(m.lm(h).mT[..., :-1], b.labels[:, 1:], label_smoothing=0.1, weight=b.weight)


@objective("[B, V, T], padded labels")
def _(m, h, b):
    return F.cross_entropy(m.lm(h).transpose(1, 2), F.pad(b.labels[:, 1:], (0, 1), value=IGNORED))


@objective("[B, V, T], per token, weighted")
def _(m, h, b):
    loss = F.cross_entropy(m.lm(h).permute(0, 2, 1), b.labels, reduction="none", ignore_index=IGNORED)
    return masked_mean(loss, b.mask)


@objective("[B, V, T], nll_loss, shifted")
def _(m, h, b):
    return F.nll_loss(m.lm(h)[:, :-1].log_softmax(-1).transpose(1, 2), b.labels[:, 1:])


@objective("[B, V, T], soft targets, sliced")
def _(m, h, b):
    soft = m.teacher(b.teacher)[:, :-1].softmax(-1).transpose(1, 2)
    return F.cross_entropy(m.lm(h)[:, :-1].transpose(1, 2), soft)


@objective("[B, V, T], head as a convolution")
def _(m, h, b):
    logits = F.conv1d(h.transpose(1, 2), m.lm.weight.unsqueeze(-1))
    return F.cross_entropy(logits[..., :-1], b.labels[:, 1:])


# Policies


def policy(variant: str):
    def loss(m, h, b):
        logp = selective_logprobs(m.lm(h) / 0.7, b.targets)
        advantage = b.advantage.unsqueeze(1)
        log_ratio = logp - b.old
        ratio = log_ratio.exp()
        if variant == "cispo":
            per_token = -ratio.clamp(max=2.0).detach() * advantage * logp
        elif variant == "gspo":
            sequence = ((log_ratio * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1)).unsqueeze(-1)
            ratio = sequence.exp()
            per_token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).expand_as(logp)
        else:
            high = 0.28 if variant == "dapo" else 0.2
            per_token = -torch.min(ratio * advantage, ratio.clamp(1 - 0.2, 1 + high) * advantage)
        if variant == "grpo":
            per_token = per_token + 0.04 * ((b.ref - logp).exp() - (b.ref - logp) - 1)
            return ((per_token * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1)).mean()
        if variant == "dr-grpo":
            return (per_token * b.mask).sum() / (per_token.shape[0] * 4096)
        return masked_mean(per_token, b.mask)

    return loss


for _name in ("grpo", "dapo", "dr-grpo", "cispo"):
    objective(_name.upper())(policy(_name))
objective("GSPO", sweeps=2)(policy("gspo"))


@objective("GSPO, token level", sweeps=2)
def _(m, h, b):
    logp = token_logprobs(m.lm(h), b.targets)
    sequence = ((logp - b.old) * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True)
    ratio = (logp - logp.detach() + sequence.detach()).exp()
    return masked_mean(
        -torch.min(ratio * b.advantage[:, None], ratio.clamp(0.8, 1.2) * b.advantage[:, None]), b.mask
    )


@objective("PPO, value head, entropy", trains=("lm", "value"))
def _(m, h, b):
    logp_all = m.lm(h).log_softmax(-1)
    logp = logp_all.gather(-1, b.targets.unsqueeze(-1)).squeeze(-1)
    ratio = (logp - b.old).exp()
    surrogate = torch.max(-b.returns * ratio, -b.returns * ratio.clamp(0.8, 1.2))
    value = m.value(h).squeeze(-1)
    clipped = b.values + (value - b.values).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((value - b.returns) ** 2, (clipped - b.returns) ** 2)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    return (
        masked_mean(surrogate, b.mask)
        + 0.1 * masked_mean(value_loss, b.mask)
        - 0.01 * masked_mean(entropy, b.mask)
    )


@objective("whitened advantages", sweeps=2)
def _(m, h, b):
    logp = token_logprobs(m.lm(h), b.targets)
    gain = b.returns - 0.1 * (logp - b.ref)
    mean = masked_mean(gain, b.mask)
    propagation = masked_mean((gain - mean) ** 2, b.mask)
    return -masked_mean(logp * ((gain - mean) * (propagation + 1e-8).rsqrt()).detach(), b.mask)


@objective("REINFORCE, sequence reward")
def _(m, h, b):
    return -((token_logprobs(m.lm(h), b.targets) * b.mask).sum(1) * b.score).mean()


# Preferences


def sequences(m, h, b, average: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, mask = m.lm(h)[:, :-1], b.targets[:, 1:], b.mask[:, 1:]
    logp = (token_logprobs(logits, targets) * mask).sum(-1)
    if average:
        logp = logp / mask.sum(-1)
    half = logp.shape[0] // 2
    return logp[:half], logp[half:], (b.ref[:, 1:] * mask).sum(-1)


def preference(variant: str):
    def loss(m, h, b):
        average = variant in ("simpo", "orpo", "ipo")
        chosen, rejected, ref = sequences(m, h, b, average)
        half = ref.shape[0] // 2
        margin = (chosen - rejected) - (ref[:half] - ref[half:]) * (variant not in ("simpo", "orpo", "cpo"))
        if variant in ("dpo", "cpo"):
            nll = -chosen.mean() * 0.01 if variant == "cpo" else 0
            return -F.logsigmoid(0.1 * margin).mean() + nll
        if variant == "robust":
            return ((-F.logsigmoid(0.1 * margin) * 0.9 + F.logsigmoid(-0.1 * margin) * 0.1) / 0.8).mean()
        if variant == "ipo":
            return ((margin - 5) ** 2).mean()
        if variant == "hinge":
            return torch.relu(1 - 0.1 * margin).mean()
        if variant == "simpo":
            return -F.logsigmoid(2 * margin - 1).mean()
        if variant == "orpo":
            odds = margin - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()
        if variant == "apo":
            return (
                1 - torch.sigmoid(0.1 * (chosen - ref[:half])) + torch.sigmoid(0.1 * (rejected - ref[half:]))
            ).mean()
        drift = (chosen.detach().mean() - ref[:half].mean()).clamp(min=0)
        return (
            1
            - torch.sigmoid(0.1 * (chosen - ref[:half] - drift))
            + 1
            - torch.sigmoid(0.1 * (drift - rejected + ref[half:]))
        ).mean()

    return loss


for _name in ("dpo", "ipo", "hinge", "robust", "simpo", "cpo", "orpo", "apo", "kto"):
    objective(_name.upper(), sweeps=2)(preference(_name))


@objective("DPO, reference computed inside", sweeps=2)
def _(m, h, b):
    with torch.no_grad():
        ref = (token_logprobs(m.teacher(b.teacher), b.targets) * b.mask).sum(-1)
    logp = (token_logprobs(m.lm(h), b.targets) * b.mask).sum(-1) - ref
    half = logp.shape[0] // 2
    return -F.logsigmoid(0.1 * (logp[:half] - logp[half:])).mean()


@objective("DPO and SFT of the chosen", sweeps=2)
def _(m, h, b):
    chosen, rejected, ref = sequences(m, h, b)
    half = h.shape[0] // 2
    logits = m.lm(h)[:half, :-1]
    sft = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), b.labels[:half, 1:].reshape(-1))
    return sft - F.logsigmoid(0.1 * (chosen - rejected - ref[:half] + ref[half:])).mean()


# Distillation


@objective("distillation, forward KL")
def _(m, h, b):
    with torch.no_grad():
        teacher = m.teacher(b.teacher)
    kl = F.kl_div(m.lm(h).log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return masked_mean(kl, b.mask)


@objective("distillation, reverse KL")
def _(m, h, b):
    teacher = m.teacher(b.teacher).log_softmax(-1)
    student = m.lm(h).log_softmax(-1)
    return masked_mean((student.exp() * (student - teacher)).sum(-1), b.mask)


@objective("distillation, JSD")
def _(m, h, b):
    student, teacher = m.lm(h).log_softmax(-1), m.teacher(b.teacher).detach().log_softmax(-1)
    beta = torch.tensor(0.3, dtype=h.dtype, device=h.device)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    jsd = beta * kl_teacher + (1 - beta) * kl_student
    mask = b.labels != IGNORED
    return (jsd.sum(-1) * mask).sum() / mask.sum()


@objective("distillation, temperature, with labels")
def _(m, h, b):
    logits, teacher = m.lm(h), m.teacher(b.teacher)
    soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(logits.flatten(0, 1), b.labels.flatten())


@objective("distillation, top-k of the teacher")
def _(m, h, b):
    top, index = m.teacher(b.teacher).topk(8, dim=-1)
    student = m.lm(h).log_softmax(-1).gather(-1, index)
    return -masked_mean((top.softmax(-1) * student).sum(-1), b.mask)


# A teacher's layers in the same function, before the student's or after


def attend(h: Tensor) -> Tensor:
    """A layer, as far as the cut is concerned: tokens see those before them."""
    rows = h.unsqueeze(1)
    return h + F.scaled_dot_product_attention(rows, rows, rows, is_causal=True).squeeze(1)


def both(m, h, b, student_first: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of the student, and of a teacher that is computed before it or after it."""
    student = m.lm(attend(h)) if student_first else None
    with torch.no_grad():
        teacher = m.teacher(attend(attend(b.teacher)))
    return m.lm(attend(h)) if student is None else student, teacher


@objective("teacher inside, forward KL", sweeps=3)
def _(m, h, b):
    with torch.no_grad():
        teacher = m.teacher(attend(b.teacher)).log_softmax(-1)
    student = m.lm(attend(h)).log_softmax(-1)
    return masked_mean(F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1), b.mask)


@objective("teacher inside, reverse KL", sweeps=3)
def _(m, h, b):
    student, teacher = (logits.log_softmax(-1) for logits in both(m, h, b))
    return masked_mean((student.exp() * (student - teacher)).sum(-1), b.mask)


@objective("teacher inside, after the student, temperature", sweeps=3)
def _(m, h, b):
    student, teacher = both(m, h, b, student_first=True)
    soft = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1)
    return 4 * masked_mean(soft, b.mask) + F.cross_entropy(student.flatten(0, 1), b.labels.flatten())


@objective("teacher inside, top-k", sweeps=3)
def _(m, h, b):
    student, teacher = both(m, h, b)
    top, index = teacher.topk(8, dim=-1)
    chosen = student.log_softmax(-1).gather(-1, index)
    return -masked_mean((top.softmax(-1) * chosen).sum(-1), b.mask)


@objective("teacher inside, [B, V, T]", sweeps=3)
def _(m, h, b):
    student, teacher = both(m, h, b)
    return F.cross_entropy(student.transpose(1, 2), teacher.softmax(-1).transpose(1, 2))


@objective("reference inside, DPO", sweeps=3)
def _(m, h, b):
    student, teacher = (token_logprobs(logits, b.targets) * b.mask for logits in both(m, h, b))
    margin = (student - teacher).sum(-1)
    half = margin.shape[0] // 2
    return -F.logsigmoid(0.1 * (margin[:half] - margin[half:])).mean()


# Contrast over the vocabulary


@objective("contrast, cosine logits")
def _(m, h, b):
    cosines = F.normalize(h, dim=-1) @ F.normalize(m.lm.weight, dim=-1).T
    return F.cross_entropy((cosines / 0.07).flatten(0, 1), b.labels.flatten())


@objective("contrast, hardest negatives")
def _(m, h, b):
    logits, chosen = m.lm(h), b.targets.unsqueeze(-1)
    negatives = logits.scatter(-1, chosen, -torch.inf).topk(16, dim=-1).values
    return -masked_mean(torch.cat((logits.gather(-1, chosen), negatives), -1).log_softmax(-1)[..., 0], b.mask)


@objective("contrast, one against all (sigmoid)")
def _(m, h, b):
    logits = m.lm(h)
    own = logits.gather(-1, b.targets.unsqueeze(-1)).squeeze(-1)
    others = F.softplus(logits).sum(-1) - F.softplus(own)
    return masked_mean(F.softplus(-own) + others / logits.shape[-1], b.mask)


@objective("contrast, expert against amateur")
def _(m, h, b):
    expert, amateur = m.lm(h).log_softmax(-1), m.teacher(b.teacher).log_softmax(-1)
    likely = expert >= expert.amax(-1, keepdim=True) - 2.3
    return F.cross_entropy((expert - 0.5 * amateur * likely).flatten(0, 1), b.labels.flatten())


# Several heads, few rows


@objective("multi-token prediction heads", trains=("lm", "extra"))
def _(m, h, b):
    total = F.cross_entropy(m.lm(h)[:, :-1].flatten(0, 1), b.labels[:, 1:].flatten())
    for k, head in enumerate(m.extra):
        total = total + 0.3 * F.cross_entropy(
            head(h)[:, : -(k + 2)].flatten(0, 1), b.labels[:, k + 2 :].flatten()
        )
    return total


@objective("residual heads with one vocabulary (Medusa)", trains=("lm", "extra"))
def _(m, h, b):
    total = F.cross_entropy(m.lm(h)[:, :-1].transpose(1, 2), b.labels[:, 1:])
    for k, head in enumerate(m.extra):
        moved = h + F.silu(h @ head.weight[: h.shape[-1]])
        total = total + 0.8 ** (k + 1) * F.cross_entropy(
            m.lm(moved)[:, : -(k + 2)].transpose(1, 2), b.labels[:, k + 2 :]
        )
    return total


@objective("heads of one hidden state that agree", trains=("lm", "extra"))
def _(m, h, b):
    first, second = (head(h).log_softmax(-1) for head in m.extra)
    apart = 0.5 * (first.exp() - second.exp()) * (first - second)
    return masked_mean(apart.sum(-1) - token_logprobs(m.lm(h), b.targets), b.mask)


@objective("reward model, last token", trains=("value",), sweeps=2)
def _(m, h, b):
    reward = m.value(h).squeeze(-1)[torch.arange(h.shape[0], device=h.device), b.ends]
    half = h.shape[0] // 2
    return -F.logsigmoid(reward[:half] - reward[half:]).mean()


@objective("classification, pooled row", sweeps=0)
def _(m, h, b):
    pooled = h[torch.arange(h.shape[0], device=h.device), b.ends]
    return F.cross_entropy(m.lm(pooled), b.targets[:, 0])


@objective("reward model, one row of all", trains=("value",), sweeps=0)
def _(m, h, b):
    scores = m.value(torch.tanh(h)).squeeze(-1)
    half = h.shape[0] // 2
    return (
        -F.logsigmoid(scores[:half, -1] - scores[half:, -1]).mean() + 0.1 * torch.tanh(h)[:, 7].pow(2).mean()
    )


@objective("classification, mean of rows", sweeps=2)
def _(m, h, b):
    pooled = (h * b.mask.unsqueeze(-1)).sum(1) / b.mask.sum(1, keepdim=True)
    return F.cross_entropy(m.lm(pooled), b.targets[:, 0])


@objective("process rewards at marked steps", trains=("value",))
def _(m, h, b):
    score = m.value(h).squeeze(-1)
    return (
        F.binary_cross_entropy_with_logits(score, (b.returns > 0).to(score.dtype), reduction="none") * b.mask
    ).sum() / b.mask.sum()


@objective("logits to keep")
def _(m, h, b):
    kept = 2 * h.shape[1] // 3
    logits = m.lm(h[:, -kept - 1 :])[:, :-1]
    return -masked_mean(token_logprobs(logits, b.targets[:, -kept:]), b.mask[:, -kept:])


# Of our own invention


@objective("discounted returns, summed from the end")
def _(m, h, b):
    returns = (b.returns * b.mask).flip(1).cumsum(1).flip(1)
    return -masked_mean(
        token_logprobs(m.lm(h), b.targets) * (returns - returns.mean(1, keepdim=True)), b.mask
    )


@objective("actor and critic, one-step advantages", trains=("lm", "value"), sweeps=2)
def _(m, h, b):
    """Values of neighbouring tokens meet, one of them detached."""
    value = m.value(h).squeeze(-1)
    target = b.returns[:, :-1] + 0.99 * value[:, 1:].detach()
    advantage = (target - value[:, :-1]).detach()
    chosen = token_logprobs(m.lm(h)[:, :-1], b.targets[:, 1:])
    return -masked_mean(
        chosen * (advantage - advantage.mean()) / advantage.std(), b.mask[:, 1:]
    ) + F.mse_loss(value[:, :-1], target)


@objective("log-probability of every prefix", sweeps=2)
def _(m, h, b):
    prefix = token_logprobs(m.lm(h), b.targets).cumsum(1)
    return -masked_mean(F.logsigmoid(prefix / torch.arange(1, prefix.shape[1] + 1, device=h.device)), b.mask)


@objective("margin to the best other token")
def _(m, h, b):
    logits, chosen = m.lm(h), b.targets.unsqueeze(-1)
    other = logits.scatter(-1, chosen, -torch.inf).amax(-1)
    return masked_mean(F.relu(1 + other - logits.gather(-1, chosen).squeeze(-1)), b.mask)


@objective("mixture of softmaxes", trains=("extra", "value"))
def _(m, h, b):
    gate = torch.stack([m.value(h).squeeze(-1), h.sum(-1)], -1).log_softmax(-1)
    parts = torch.stack([token_logprobs(head(h), b.targets) for head in m.extra], -1)
    return -masked_mean(torch.logsumexp(gate + parts, -1), b.mask)


@objective("expected embedding of the next token")
def _(m, h, b):
    expected = m.lm(h).softmax(-1) @ m.teacher.weight
    return F.mse_loss(expected[:, :-1], h[:, 1:].detach()) - masked_mean(
        token_logprobs(m.lm(h), b.targets), b.mask
    )

"""The ways people write attention, positions, targets and losses: each streamed in float64 against eager.

Bodies run without Inductor here, so that many spellings can be tried; `test_gradients` compiles the real
thing.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from selection import representatives

from streambp_compile.backend import NotStreamed

BATCH, TOKENS, VOCAB, WIDTH, HEADS = 2, 13, 17, 8, 2
INF = float("-inf")


class Weights:
    """The weights of one layer and a tied head, in float64."""

    def __init__(self):
        torch.manual_seed(0)
        self.table, self.qkv, self.mix = (
            torch.randn(s, dtype=torch.float64) for s in ((VOCAB, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH))
        )
        self.qkv /= 3
        self.place = torch.randn(1, 20, WIDTH, dtype=torch.float64)
        self.exact_place = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
        for weight in vars(self).values():
            weight.requires_grad_()


IDIOMS = {}


def idiom(*flags):
    """Register a loss. ``streams``: it must not be refused (else it only must be exact); ``compiled``: only
    Inductor runs it right; ``sibling``: of the kind of another, left to `make test-all`."""

    def enter(function):
        IDIOMS[function.__name__] = (function, flags)
        return function

    return enter


def heads(x):
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def qkv(x, w):
    return (heads(t) for t in (x @ w.qkv).split(WIDTH, -1))


def attend(x, w, **kwargs):
    return merged(F.scaled_dot_product_attention(*qkv(x, w), **(kwargs or {"is_causal": True})))


def base(ids, w):
    x = F.embedding(ids, w.table)
    return x + attend(x, w)


def loss_of(x, ids, w):
    return F.cross_entropy((x @ w.table.t())[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def scores(x, w):
    q, k, v = qkv(x, w)
    return q @ k.transpose(-1, -2) / 2, v


def hidden():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


# Attention


@idiom("streams")
def fused_causal(ids, w):
    return loss_of(base(ids, w), ids, w)


@idiom("streams")
def fused_bidirectional(ids, w):
    x = F.embedding(ids, w.table)
    for _ in range(2):
        x = x + attend(x, w, is_causal=False)
    return loss_of(x, ids, w)


@idiom("streams", "sibling")
def qkv_by_permute(ids, w):
    x = F.embedding(ids, w.table)
    q, k, v = (x @ w.qkv).view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return loss_of(x + merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)), ids, w)


@idiom("streams")
def heads_from_and_to_a_list(ids, w):
    """Torch decomposes a stack into a join of tokens with heads: here heads have a dimension of their own."""
    x = F.embedding(ids, w.table)
    q, k, v = (torch.stack(t.split(WIDTH // HEADS, -1), 1) for t in (x @ w.qkv).split(WIDTH, -1))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return loss_of(x + torch.cat(a.unbind(1), -1), ids, w)


@idiom("streams")
def matmul_softmax(ids, w):
    x = F.embedding(ids, w.table)
    for _ in range(2):
        s, v = scores(x, w)
        x = x + merged(s.masked_fill(hidden(), INF).softmax(-1) @ v)
    return loss_of(x, ids, w)


@idiom("streams", "sibling")
def einsum_where(ids, w):
    x = F.embedding(ids, w.table)
    q, k, v = (t.view(BATCH, TOKENS, HEADS, -1) for t in (x @ w.qkv).split(WIDTH, -1))
    r = torch.arange(TOKENS)
    p = torch.where(r[:, None] >= r[None, :], torch.einsum("bthd,bshd->bhts", q, k), INF).softmax(-1)
    return loss_of(x + torch.einsum("bhts,bshd->bthd", p, v).reshape(x.shape), ids, w)


@idiom("streams", "sibling")
def time_first(ids, w):
    x = F.embedding(ids.t(), w.table)
    q, k, v = (t.reshape(TOKENS, BATCH * HEADS, -1).transpose(0, 1) for t in (x @ w.qkv).split(WIDTH, -1))
    p = torch.bmm(q, k.transpose(1, 2)).masked_fill(hidden(), INF).softmax(-1)
    x = x + torch.bmm(p, v).transpose(0, 1).reshape(x.shape)
    return F.cross_entropy((x @ w.table.t())[:-1].reshape(-1, VOCAB), ids.t()[1:].reshape(-1))


@idiom("streams", "sibling")
def multi_head_attention_forward(ids, w):
    x = F.embedding(ids, w.table).transpose(0, 1)
    mask = torch.full((TOKENS, TOKENS), INF, dtype=x.dtype).triu(1)
    y, _ = F.multi_head_attention_forward(
        x,
        x,
        x,
        WIDTH,
        HEADS,
        w.qkv.t(),
        None,
        None,
        None,
        False,
        0.0,
        w.mix,
        None,
        attn_mask=mask,
        need_weights=False,
    )
    return loss_of((x + y).transpose(0, 1), ids, w)


@idiom("streams", "sibling")
def fused_float_mask_of_two_dims(ids, w):
    x = F.embedding(ids, w.table)
    mask = torch.full((TOKENS, TOKENS), INF, dtype=x.dtype).triu(1)
    return loss_of(x + attend(x, w, attn_mask=mask), ids, w)


@idiom("streams", "sibling")
def fused_bool_mask_of_two_dims(ids, w):
    x = F.embedding(ids, w.table)
    return loss_of(x + attend(x, w, attn_mask=~hidden()), ids, w)


@idiom("streams")
def fused_mask_with_padding(ids, w):
    x = F.embedding(ids, w.table)
    mask = (~hidden())[None, None] & (ids != 0)[:, None, None, :] | torch.eye(TOKENS, dtype=torch.bool)
    return loss_of(x + attend(x, w, attn_mask=mask), ids, w)


@idiom()  # a stored matrix of tokens by tokens is refused; the README says so
def mask_from_a_buffer(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    return loss_of(x + merged(s.masked_fill(~BUFFER[:, :, :TOKENS, :TOKENS], INF).softmax(-1) @ v), ids, w)


@idiom("sibling")
def mask_from_a_buffer_fused(ids, w):
    x = F.embedding(ids, w.table)
    return loss_of(x + attend(x, w, attn_mask=BUFFER[:, :, :TOKENS, :TOKENS]), ids, w)


@idiom()  # so is a mask that is written into
def mask_made_in_place(ids, w):
    x = F.embedding(ids, w.table)
    mask = torch.full((1, 1, TOKENS, TOKENS), INF, dtype=x.dtype)
    mask.triu_(1)
    for _ in range(2):
        x = x + attend(x, w, attn_mask=mask)
    return loss_of(x, ids, w)


@idiom("streams")
def soft_capped_scores(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    s = (s / 5).tanh() * 5 + torch.full((TOKENS, TOKENS), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    return loss_of((x + merged(s.softmax(-1) @ v)).div(3).tanh(), ids, w)


@idiom("streams", "sibling")
def alibi(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    r = torch.arange(TOKENS)
    s = s.masked_fill(hidden(), INF) - (r[:, None] - r[None, :]).to(x.dtype) * 0.3
    return loss_of(x + merged(s.softmax(-1) @ v), ids, w)


@idiom("streams")
def relative_bias(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    r = torch.arange(TOKENS)
    bias = w.mix[(r[:, None] - r[None, :]).clamp(0, WIDTH - 1)].permute(2, 0, 1)[None, :HEADS]
    return loss_of(x + merged((s + bias).masked_fill(hidden(), INF).softmax(-1) @ v), ids, w)


@idiom("sibling")
def relative_bias_fused(ids, w):
    x = F.embedding(ids, w.table)
    r = torch.arange(TOKENS)
    bias = (
        w.mix[(r[:, None] - r[None, :]).clamp(0, WIDTH - 1)]
        .permute(2, 0, 1)[None, :HEADS]
        .masked_fill(hidden(), INF)
    )
    return loss_of(x + attend(x, w, attn_mask=bias), ids, w)


@idiom("streams", "sibling")
def scores_of_two_layers(ids, w):
    """The second layer adds the first one's scores to its own (RealFormer): they are recomputed, never
    kept."""
    x, before = base(ids, w), 0
    for _ in range(2):
        s, v = scores(x, w)
        before = s + before
        x = x + merged(before.masked_fill(hidden(), INF).softmax(-1) @ v)
    return loss_of(x, ids, w)


@idiom()
def attention_sinks(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    sink = w.mix[0, :HEADS].view(1, HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)
    p = torch.cat([s.masked_fill(hidden(), INF), sink], -1).softmax(-1)[..., :-1]
    return loss_of(x + merged(p @ v), ids, w)


@idiom("streams")
def linear_attention(ids, w):
    x = F.embedding(ids, w.table)
    s, v = scores(x, w)
    return loss_of(x + merged(s.tril() @ v), ids, w)


@idiom("streams", "sibling")
def normalised_queries(ids, w):
    x = F.embedding(ids, w.table)
    q, k, v = qkv(x, w)
    y = F.scaled_dot_product_attention(
        F.normalize(q, dim=-1), F.rms_norm(k, (WIDTH // HEADS,)), v, is_causal=True, scale=3.0
    )
    return loss_of(F.layer_norm(x + merged(y), (WIDTH,)), ids, w)


@idiom("streams", "sibling")
def grouped_heads(ids, w):
    x = F.embedding(ids, w.table)
    k, v = (heads(t)[:, :1].repeat_interleave(HEADS, 1) for t in (x @ w.qkv[:, WIDTH:]).split(WIDTH, -1))
    return loss_of(x + merged(F.scaled_dot_product_attention(heads(x @ w.mix), k, v, is_causal=True)), ids, w)


@idiom("streams")
def grouped_heads_features_first(ids, w):
    """Keys made as ``[b, d, t]``: behind the repeated heads lie narrow ones whose last dimension is not
    contiguous."""
    x = F.embedding(ids, w.table)
    k = (
        (w.qkv[:, :4].t() @ x.transpose(1, 2))
        .view(BATCH, 1, 4, TOKENS)
        .transpose(2, 3)
        .repeat_interleave(HEADS, 1)
    )
    v = (x @ w.qkv[:, 4:8]).view(BATCH, TOKENS, 1, 4).transpose(1, 2).repeat_interleave(HEADS, 1)
    return loss_of(x + merged(F.scaled_dot_product_attention(heads(x @ w.mix), k, v, is_causal=True)), ids, w)


@idiom("streams", "sibling")
def value_residual(ids, w):
    x = F.embedding(ids, w.table)
    first = x @ w.mix
    for _ in range(3):
        q, k, v = qkv(x, w)
        x = x + merged(F.scaled_dot_product_attention(q, k, v + heads(first), is_causal=True))
    return loss_of(x, ids, w)


@idiom("streams")
def routed_experts(ids, w):
    x = base(ids, w)
    value, index = (x @ w.mix).softmax(-1).topk(2, -1)
    gate = torch.zeros_like(x).scatter(-1, index, value)
    return loss_of(x + torch.einsum("bte,ed->btd", gate, w.mix.tanh()), ids, w)


# Positions


@idiom("streams", "sibling")
def positions_looked_up(ids, w):
    x = F.embedding(ids, w.table) + F.embedding(torch.arange(TOKENS), w.place[0])
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams", "sibling")
def positions_indexed(ids, w):
    x = F.embedding(ids, w.table) + w.place[0][torch.arange(TOKENS)]
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams")
def positions_sliced(ids, w):
    x = F.embedding(ids, w.table) + w.place[:, :TOKENS]
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams")
def positions_of_this_very_length(ids, w):
    x = F.embedding(ids, w.table) + w.exact_place
    return loss_of(x + attend(x, w), ids, w)


@idiom()
def positions_sliced_from_the_embedding(ids, w):
    x = F.embedding(ids, w.table) + w.table[:TOKENS]
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams")
def rotary_halves(ids, w):
    def turned(t):
        a, b = t.chunk(2, -1)
        return torch.cat([a * COS[:TOKENS] - b * SIN[:TOKENS], a * SIN[:TOKENS] + b * COS[:TOKENS]], -1)

    x = F.embedding(ids, w.table)
    q, k, v = qkv(x, w)
    return loss_of(
        x + merged(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)), ids, w
    )


@idiom("streams", "sibling")
def rotary_interleaved(ids, w):
    def turned(t):
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack(
            [a * COS[:TOKENS] - b * SIN[:TOKENS], a * SIN[:TOKENS] + b * COS[:TOKENS]], -1
        ).flatten(-2)

    x = F.embedding(ids, w.table)
    q, k, v = qkv(x, w)
    return loss_of(
        x + merged(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)), ids, w
    )


@idiom("sibling")
def rotary_complex(ids, w):
    def turned(t):
        return torch.view_as_real(
            torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * torch.complex(COS, SIN)[:TOKENS]
        ).flatten(-2)

    x = F.embedding(ids, w.table)
    q, k, v = qkv(x, w)
    return loss_of(
        x + merged(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)), ids, w
    )


ANGLES = torch.outer(torch.arange(20.0, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))
COS, SIN = ANGLES.cos(), ANGLES.sin()
BUFFER = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()


# Targets


def loss_on(x, targets, w):
    return F.cross_entropy((x @ w.table.t()).view(-1, VOCAB), targets.reshape(-1), ignore_index=-100)


@idiom("streams")
def targets_rolled(ids, w):
    return loss_on(base(ids, w), ids.roll(-1, 1), w)


@idiom("streams", "sibling")
def targets_joined(ids, w):
    return loss_on(base(ids, w), torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1), w)


@idiom("streams", "sibling")
def targets_padded(ids, w):
    return loss_on(base(ids, w), F.pad(ids, (0, 1), value=-100)[:, 1:], w)


@idiom("streams", "sibling")
def targets_assigned(ids, w):
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return loss_on(base(ids, w), targets, w)


@idiom("streams")
def targets_assigned_by_mask(ids, w):
    targets = ids.roll(-1, 1).clone()
    targets[targets % 3 == 0] = -100
    return loss_on(base(ids, w), targets, w)


@idiom("streams", "sibling")
def targets_filled_in_place(ids, w):
    targets = ids.roll(-1, 1)
    targets.masked_fill_(ids % 3 == 0, -100)
    return loss_on(base(ids, w), targets, w)


@idiom("streams")
def targets_from_the_caller(ids, w):
    return loss_on(base(ids, w)[:, :-1].contiguous(), ids[:, 1:], w)


# Losses


@idiom("streams", "sibling")
def summed_loss(ids, w):
    return F.cross_entropy(
        (base(ids, w) @ w.table.t())[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="sum"
    )


@idiom("streams")
def class_dimension_in_the_middle(ids, w):
    return F.cross_entropy((base(ids, w) @ w.table.t()).transpose(1, 2)[..., :-1], ids[:, 1:])


@idiom("streams", "sibling")
def label_smoothing(ids, w):
    return F.cross_entropy(
        (base(ids, w) @ w.table.t())[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), label_smoothing=0.1
    )


@idiom("streams", "sibling")
def weighted_tokens(ids, w):
    loss = F.cross_entropy(
        (base(ids, w) @ w.table.t())[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="none"
    )
    weight = (ids[:, 1:] > 3).to(loss.dtype).view(-1)
    return (loss * weight).sum() / weight.sum()


@idiom("streams", "sibling")
def z_loss(ids, w):
    logits = base(ids, w) @ w.table.t()
    return (
        F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        + 0.01 * logits.logsumexp(-1).square().mean()
    )


@idiom("streams", "sibling")
def log_sum_exp_minus_gathered(ids, w):
    logits = (base(ids, w) @ w.table.t())[:, :-1]
    return (logits.logsumexp(-1) - logits.gather(-1, ids[:, 1:, None])[..., 0]).mean()


@idiom("streams")
def one_hot_targets(ids, w):
    return (
        -((base(ids, w) @ w.table.t())[:, :-1].log_softmax(-1) * F.one_hot(ids[:, 1:], VOCAB)).sum(-1).mean()
    )


@idiom("streams", "sibling")
def gathered_log_probabilities(ids, w):
    return -(base(ids, w) @ w.table.t())[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


@idiom("streams")
def gathered_by_a_narrower_index(ids, w):
    """``gather`` lets the index have fewer rows than the table: it reads the first ones."""
    return -(base(ids, w) @ w.table.t()).log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


@idiom()
def scattered_by_a_narrower_index(ids, w):
    targets = torch.zeros(BATCH, TOKENS, VOCAB, dtype=torch.float64).scatter(-1, ids[:, 1:, None], 1.0)
    return -((base(ids, w) @ w.table.t()).log_softmax(-1) * targets).sum()


@idiom("streams")
def preference_pair(ids, w):
    rows = (base(ids, w) @ w.table.t())[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(1)
    return -F.logsigmoid(rows[0] - rows[1])


@idiom("streams", "sibling")
def clipped_ratio(ids, w):
    rows = (base(ids, w) @ w.table.t())[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (rows - rows.detach() + 0.1).exp()
    gain = torch.tensor([[1.0], [-0.5]], dtype=torch.float64)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean(1).mean()


@idiom("streams", "sibling")
def entropy(ids, w):
    rows = (base(ids, w) @ w.table.t()).log_softmax(-1)
    return (rows.exp() * rows).sum(-1).mean()


@idiom("streams")
def two_shifts(ids, w):
    logits = base(ids, w) @ w.table.t()
    return sum(F.cross_entropy(logits[:, :-k].reshape(-1, VOCAB), ids[:, k:].reshape(-1)) for k in (1, 2))


@idiom()
def multi_token_prediction(ids, w):
    """A second layer over hidden states and the embeddings of the tokens after them."""
    x = base(ids, w)
    y = x[:, :-1] @ w.mix + F.embedding(ids[:, 1:], w.table)
    return loss_of(x, ids, w) + F.cross_entropy(
        ((y + attend(y, w)) @ w.table.t())[:, :-1].reshape(-1, VOCAB), ids[:, 2:].reshape(-1)
    )


@idiom("streams", "sibling")
def auxiliary_loss_behind_detach(ids, w):
    x = base(ids, w)
    return loss_of(x, ids, w) + (x.detach() @ w.mix).square().mean()


# What mixes tokens in other ways: exact, streamed or not


@idiom()
def mean_pooled(ids, w):
    return F.cross_entropy(base(ids, w).mean(1) @ w.table.t(), ids[:, 0])


@idiom("streams")
def variance_of_features(ids, w):
    x = base(ids, w)
    return loss_of(x, ids, w) + F.relu(1 - (x.var(dim=(0, 1)) + 1e-4).sqrt()).mean()


@idiom("sibling")
def maximum_pooled(ids, w):
    return F.cross_entropy(base(ids, w).amax(1) @ w.table.t(), ids[:, 0])


@idiom("sibling")
def last_token_pooled(ids, w):
    return F.cross_entropy(base(ids, w)[torch.arange(BATCH), torch.tensor([5, 9])] @ w.table.t(), ids[:, 0])


@idiom()
def attention_pooled(ids, w):
    x = base(ids, w)
    return F.cross_entropy(((x @ w.mix[:, :1]).softmax(1) * x).sum(1) @ w.table.t(), ids[:, 0])


@idiom("streams")
def cumulative_features(ids, w):
    x = base(ids, w)
    return loss_of(x + (x @ w.mix).cumsum(1), ids, w)


@idiom("streams", "sibling")
def cumulative_features_without_gradient(ids, w):
    x = F.embedding(ids, w.table)
    with torch.no_grad():
        mean = (x @ w.mix).cumsum(1)
    return loss_of(x + attend(x + mean, w), ids, w)


@idiom()
def normalised_over_tokens(ids, w):
    x = base(ids, w)
    return loss_of((x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-3).sqrt(), ids, w)


@idiom("streams", "sibling")
def shifted_by_padding(ids, w):
    x = F.embedding(ids, w.table)
    x = x + (x - F.pad(x, (0, 0, 1, -1))) @ w.mix
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams", "sibling")
def shifted_by_joining(ids, w):
    x = F.embedding(ids, w.table)
    x = x + (x - torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)) @ w.mix
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams")
def causal_convolution(ids, w):
    x = F.embedding(ids, w.table)
    kernel = w.mix[:, :3].unsqueeze(1)
    x = x + F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), kernel, groups=WIDTH).transpose(1, 2)
    return loss_of(x + attend(x, w), ids, w)


@idiom("streams", "sibling")
def features_padded(ids, w):
    x = base(ids, w)
    return loss_of(x + F.pad(x @ w.mix, (1, 0))[..., :-1], ids, w)


@idiom("streams", "compiled", "sibling")
def squeezed_gate(ids, w):
    """Run node by node, ``squeeze`` would drop the rows of a chunk of one; compiled code knows which
    dimensions it drops."""
    x = base(ids, w)
    return loss_of(x * (x @ w.mix[:, :1]).squeeze().unsqueeze(-1), ids, w)


@idiom("sibling")
def product_added_to_a_weight(ids, w):
    x = base(ids, w)
    mixed = torch.baddbmm(w.mix.expand(BATCH, -1, -1), x.transpose(1, 2), x @ w.mix)
    return loss_of(x @ mixed, ids, w)


@idiom()
def counts_by_index_add(ids, w):
    return torch.zeros_like(w.table).index_add(0, ids.view(-1), base(ids, w).view(-1, WIDTH)).square().sum()


@idiom()
def gradients_scaled_by_frequency(ids, w):
    x = F.embedding(ids, w.table, scale_grad_by_freq=True)
    return (x + attend(x, w)).square().mean()


@idiom("sibling")
def two_valued_pointwise(ids, w):
    return loss_of(base(ids, w) * torch.frexp(F.embedding(ids, w.table).detach())[0], ids, w)


@idiom("streams")
def shifted_across_sequences(ids, w):
    """The last token of a sequence predicts the first one of the next."""
    logits = (base(ids, w) @ w.table.t()).view(-1, VOCAB)
    return F.cross_entropy(logits[:-2], ids.view(-1)[2:], ignore_index=3, label_smoothing=0.1)


def numbers_of_rows(x, ids, w, flat=False):
    """The first token of a sequence has the last class, counted from the end."""
    logits, targets = x @ w.table.t(), ids.index_fill(1, torch.tensor([0]), -1)
    if flat:
        picked = logits.view(-1, VOCAB)[torch.arange(ids.numel()), targets.view(-1)]
    else:
        picked = logits[torch.arange(BATCH)[:, None], torch.arange(TOKENS), targets]
    return (logits.logsumexp(-1).mean() - picked.mean()).square()


@idiom("streams")
def numbers_by_ranges(ids, w):
    return numbers_of_rows(base(ids, w), ids, w)


@idiom("streams", "sibling")
def numbers_by_a_range_of_all(ids, w):
    return numbers_of_rows(base(ids, w), ids, w, flat=True)


@idiom("streams")
def hardest_tokens_of_a_batch(ids, w):
    losses = F.cross_entropy(
        base(ids, w)[:, :-1].flatten(0, 1) @ w.table.t(), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.topk(losses.numel() // 2)[0].mean()


@idiom("streams")
def codes_with_delays(ids, w):
    """MusicGen: each codebook comes some rows after the one before, so there are more rows than tokens."""
    length = ids.shape[1]
    rows = torch.full((BATCH, 2, length + 2), VOCAB)
    for k in range(2):
        rows[:, k, k : k + length] = ids
    given, wanted = rows[..., :-1], rows[..., 1:]
    x = sum(w.table[given[:, k].clamp(max=VOCAB - 1)] for k in range(2))
    logits = (x + attend(x, w)) @ w.table.t()
    losses = 0.0
    for k in range(2):
        known = (wanted[:, k] < VOCAB).flatten()
        each = F.cross_entropy(
            logits.flatten(0, 1), wanted[:, k].flatten().clamp(max=VOCAB - 1), reduction="none"
        )
        losses = losses + (each * known).sum() / known.sum()
    return losses


@idiom("streams")
def residual_in_place(ids, w):
    x = base(ids, w)
    y = x * 1.5
    y.add_((x @ w.mix).tanh())
    x = x + attend(x + y, w)
    y.mul_(2.0)
    return loss_of(x + y, ids, w)


def graded(function, ids, weights):
    loss = function(ids, weights)
    return loss, torch.autograd.grad(loss, list(vars(weights).values()), allow_unused=True)


def flagged(flag):
    return {name for name, (_, flags) in IDIOMS.items() if flag in flags}


@pytest.mark.parametrize(
    "name", representatives(IDIOMS, set(IDIOMS) - flagged("sibling"), flagged("compiled"))
)
def test_an_idiom_is_exact(name, interpreted):
    function, flags = IDIOMS[name]
    weights, ids = Weights(), torch.randint(VOCAB, (BATCH, TOKENS))
    loss, grads = graded(function, ids, weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotStreamed)
        got, got_grads = graded(
            torch.compile(function, backend="streambp", options={"chunk_size": 4}), ids, weights
        )
    assert abs(got - loss) <= 1e-10 * abs(loss)
    for key, a, b in zip(vars(weights), got_grads, grads):
        assert (a is None) == (b is None), key
        assert a is None or (a - b).norm() <= 1e-10 * b.norm(), (
            f"{key}: off by {((a - b).norm() / b.norm()).item():.1e}"
        )
    refusals = [str(w.message) for w in caught if issubclass(w.category, NotStreamed)]
    assert "streams" not in flags or not refusals, refusals[0]


@pytest.mark.parametrize(
    "name",
    [
        "fused_causal",
        "matmul_softmax",
        "cumulative_features",
        pytest.param("shifted_by_padding", marks=pytest.mark.slow),
        "mean_pooled",
    ],
)
def test_an_idiom_without_gradients_is_exact(name, interpreted):
    weights, ids = Weights(), torch.randint(VOCAB, (BATCH, TOKENS))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        loss = IDIOMS[name][0](ids, weights)
        got = torch.compile(IDIOMS[name][0], backend="streambp", options={"chunk_size": 4})(ids, weights)
    assert abs(got - loss) <= 1e-10 * abs(loss)


def every_other_row(x):
    """A part of the rows is written to, whose number is a symbol at the second length."""
    x = x + 0.3 * x.mT.reshape(x.shape).tanh()
    x[:, 4:9] = x[:, :5] * 2
    x[:, 1::2] *= 0.5
    return x


def sampled(x):
    """Rows between the tokens: at the second length, their places are numbers made of symbols."""
    at = torch.stack((x[..., 0].tanh(), torch.zeros_like(x[..., 0])), -1)[:, None]
    return F.grid_sample(x.mT[:, :, None], at, align_corners=False)[:, :, 0].mT


OPERATORS = {
    "a maximum of everything": lambda x: x / x.amax(),
    "a complex number": lambda x: torch.exp(1j * x).imag,
    "every other row": every_other_row,
    "rows in between": sampled,
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_along_tokens_is_no_internal_error(name, interpreted):
    w = Weights()

    def step(ids):
        x = F.embedding(ids, w.table)
        return loss_of(x + attend(x, w) + OPERATORS[name](x.tanh()), ids, w)

    compiled = torch.compile(step, backend="streambp", options={"chunk_size": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (TOKENS, 18, 20):
            ids = torch.randint(VOCAB, (BATCH, length))
            found, expected = (torch.autograd.grad(f(ids), (w.table, w.qkv)) for f in (compiled, step))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not [str(w.message) for w in caught if "internal error" in str(w.message)]


def test_every_token_of_a_long_text_sees_itself(interpreted):
    """An identity of more than 255 tokens: its indices do not fit into a byte."""
    w, ids = Weights(), torch.randint(VOCAB, (1, 260))

    def step(ids):
        at = torch.arange(ids.shape[1])
        mask = (at[:, None] >= at) & (ids != 0)[:, None, None] | torch.eye(ids.shape[1], dtype=torch.bool)
        x = F.embedding(ids, w.table)
        return loss_of(x + attend(x, w, attn_mask=mask), ids, w)

    compiled = torch.compile(step, backend="streambp", options={"chunk_size": 100, "strict": True})
    found, expected = (torch.autograd.grad(f(ids), (w.table, w.qkv)) for f in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_dropout_is_differentiated_with_its_own_bits(fresh_dynamo):
    """Compiled for real: the slope along a direction, same seed on both sides, is what the gradient says."""

    def dropped(ids, w):
        x = F.embedding(ids, w.table)
        return loss_of(x + F.dropout(attend(x, w), 0.3, True), ids, w)

    weights, ids = Weights(), torch.randint(VOCAB, (BATCH, TOKENS))
    compiled = torch.compile(dropped, backend="streambp", options={"chunk_size": 4})

    start = weights.table.detach().clone()

    def at(step):
        torch.manual_seed(1)
        weights.table.data.copy_(start + step * direction)
        return compiled(ids, weights)

    direction = torch.randn_like(weights.table)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStreamed)
        (gradient,) = torch.autograd.grad(at(0), [weights.table])
        slope = (at(1e-5) - at(-1e-5)) / 2e-5
    assert abs(slope - (gradient * direction).sum()) <= 1e-6 * abs(slope)

"""Small decoders that are not of Hugging Face, in the styles that people write them: attention, blocks,
experts, mixers.

Every model takes token ids and targets ``[B, T]`` and returns its loss; what else it takes is its own
`Decoder.batch`. They are written one after another on purpose, each the way its authors would, and not for
what the backend happens to know: benchmarks/zoo.py gives each a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, LAYERS, LONGEST = 1024, 64, 4, 2, 4096
HEAD = WIDTH // HEADS
PAIRS = 2048  # positions of weights that have an entry for each pair of them
SEPARATOR = 3  # ends a document of a packed sequence


class Decoder(nn.Module):
    """Embedding, layers, norm, head and loss; a subclass or a kind of layer says the rest."""

    def __init__(self, layer: Callable[[int], nn.Module], positions: bool = True, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH) if positions else None
        self.layers = nn.ModuleList(layer(i) for i in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def batch(self, length: int) -> dict[str, torch.Tensor]:
        make = torch.Generator().manual_seed(2)
        ids = torch.randint(0, VOCAB, (2, length + 1), generator=make)
        ids[:, length // 3 :: length // 3] = SEPARATOR
        targets = ids[:, 1:].clone()
        targets[1, -length // 4 :] = -100
        return dict(ids=ids[:, :-1].contiguous(), targets=targets)

    def embed(self, ids):
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return x

    def hidden(self, ids, x, **given):
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)

    def forward(self, ids, targets, **given):
        return self.loss(self.hidden(ids, self.embed(ids), **given), targets)


def heads(x, count: int = HEADS):
    """``[B, T, h d]`` → ``[B, h, T, d]``."""
    return x.view(x.size(0), x.size(1), count, -1).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.size(0), x.size(2), -1)


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 3 * WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Projections around ``mix(query, key, value)``, which a subclass writes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *given):
        query, key, value = (heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(merged(self.mix(query, key, value, *given)))

    def mix(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, attention: nn.Module | None = None, feed_forward: nn.Module | None = None):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention() if attention is None else attention
        self.feed_forward = FeedForward() if feed_forward is None else feed_forward

    def forward(self, x, *given):
        x = x + self.attention(self.first(x), *given)
        return x + self.feed_forward(self.second(x))


def blocks(attention: Callable[[], nn.Module], **options) -> Callable[[], Decoder]:
    """A plain decoder with a kind of attention of its own."""
    return lambda: Decoder(lambda i: Block(attention()), **options)


# Attention


class StoredMask(Attention):
    """nanoGPT's slow path, minGPT, and many lectures: a lower triangle in a buffer, cut to the length at
    hand."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST), persistent=False
        )

    def mix(self, query, key, value):
        length = query.size(2)
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(key.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ value


class ComputedTriangle(Attention):
    """A lecture's other spelling: an upper triangle of minus infinities, added."""

    def mix(self, query, key, value):
        length = query.size(2)
        mask = torch.triu(
            torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device), diagonal=1
        )
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(HEAD) + mask
        return torch.matmul(torch.softmax(scores, dim=-1), value)


class Alibi(Attention):
    def mix(self, query, key, value):
        at = torch.arange(query.size(2), device=query.device)
        slopes = torch.tensor(
            [2 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], device=query.device, dtype=query.dtype
        )
        distance = (at[None, :] - at[:, None]).to(query.dtype)
        bias = slopes[:, None, None] * distance
        bias = bias.masked_fill(at[None, :] > at[:, None], float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])


class RelativeBias(Attention):
    """T5's buckets of distances, causal, softmax by hand."""

    def __init__(self, buckets: int = 16, farthest: int = 64):
        super().__init__()
        self.buckets, self.farthest = buckets, farthest
        self.bias = nn.Embedding(buckets, HEADS)

    def bucket(self, distance):
        exact = self.buckets // 2
        far = (
            exact
            + (
                torch.log(distance.float().clamp(min=1) / exact)
                / math.log(self.farthest / exact)
                * (self.buckets - exact)
            ).long()
        )
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def mix(self, query, key, value):
        at = torch.arange(query.size(2), device=query.device)
        distance = (at[:, None] - at[None, :]).clamp(min=0)
        bias = self.bias(self.bucket(distance)).permute(2, 0, 1)
        scores = query @ key.mT / HEAD**0.5 + bias
        scores = torch.where(at[:, None] >= at[None, :], scores, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ value


class RelativeShift(Attention):
    """Transformer-XL: scores of relative positions, shifted by a view of padded rows."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Linear(WIDTH, WIDTH, bias=False)
        self.content, self.position = (nn.Parameter(torch.zeros(HEADS, 1, HEAD)) for _ in range(2))

    def mix(self, query, key, value):
        batch, count, length, _ = query.shape
        behind = torch.arange(length - 1, -1, -1, device=query.device, dtype=query.dtype)
        rates = 10000 ** (-torch.arange(0, WIDTH, 2, device=query.device, dtype=query.dtype) / WIDTH)
        angles = torch.outer(behind, rates)
        relative = self.relative(torch.cat([angles.sin(), angles.cos()], dim=-1))
        relative = relative.view(length, count, -1).transpose(0, 1)
        scores = (query + self.position) @ relative.mT
        padded = F.pad(scores, (1, 0)).view(batch, count, length + 1, length)
        scores = (query + self.content) @ key.mT + padded[:, :, 1:].view_as(scores)
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        return (scores / HEAD**0.5).masked_fill(later, float("-inf")).softmax(-1) @ value


class RelativeShiftBothWays(Attention):
    """The Conformer's: every query sees every key, and there are as many positions on either side."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Embedding(2 * LONGEST - 1, WIDTH)

    def mix(self, query, key, value):
        batch, count, length, _ = query.shape
        behind = torch.arange(LONGEST + length - 2, LONGEST - length - 1, -1, device=query.device)
        scores = query @ self.relative(behind).view(-1, count, HEAD).permute(1, 2, 0)
        zeros = torch.zeros(batch, count, length, 1, device=scores.device, dtype=scores.dtype)
        padded = torch.cat([zeros, scores], dim=-1).view(batch, count, -1, length)
        shifted = padded[:, :, 1:].view_as(scores)[..., : scores.size(-1) // 2 + 1]
        return ((query @ key.mT + shifted) / HEAD**0.5).softmax(-1) @ value


class LearnedBias(Attention):
    """A learned number for each pair of positions, added to the scores of all heads."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(0.02 * torch.randn(PAIRS, PAIRS))

    def mix(self, query, key, value):
        length = query.size(2)
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = query @ key.mT / HEAD**0.5 + self.bias[:length, :length]
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ value


class Sinks(Attention):
    """A learned score per head that takes its part of the softmax and gives nothing (gpt-oss)."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def mix(self, query, key, value):
        at = torch.arange(query.size(2), device=query.device)
        scores = (query @ key.transpose(-1, -2)) * HEAD**-0.5
        scores = scores.masked_fill(at[:, None] < at[None, :], -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(query.size(0), -1, query.size(2), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return weights @ value


class Window(Attention):
    """The last 24 tokens, by an arange mask for SDPA."""

    def mix(self, query, key, value):
        at = torch.arange(query.size(2), device=query.device)
        distance = at.unsqueeze(1) - at.unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=(distance >= 0) & (distance < 24))


class Chunked(Attention):
    """Tokens see their own chunk of 16 only, causally (Llama 4)."""

    def mix(self, query, key, value):
        at = torch.arange(query.size(2), device=query.device)
        mask = (at[:, None] >= at[None, :]) & (at[:, None] // 16 == at[None, :] // 16)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Capped(Attention):
    """QK-norm with a learned temperature, soft-capped scores, an additive mask of -1e9, softmax in float32 or
    more."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mix(self, query, key, value):
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        scores = 20.0 * torch.tanh(torch.einsum("bhqd,bhkd->bhqk", query, key) * self.temperature * 8 / 20.0)
        length = query.shape[-2]
        scores = scores + (1 - torch.ones(length, length, device=query.device).tril()) * -1e9
        weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(
            value.dtype
        )
        return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class Differential(nn.Module):
    """The difference of two attention maps (Differential Transformer)."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixing, self.norm = nn.Parameter(torch.randn(HEAD // 2) * 0.1), nn.RMSNorm(HEAD)

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 2 * HEADS, HEAD // 2).transpose(1, 2)
        key = self.key(x).view(batch, length, 2 * HEADS, HEAD // 2).transpose(1, 2)
        value = heads(self.value(x))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.transpose(-1, -2) * (HEAD // 2) ** -0.5).masked_fill(later, float("-inf"))
        weights = F.softmax(scores, dim=-1).view(batch, HEADS, 2, length, length)
        weights = weights[:, :, 0] - torch.sigmoid(self.mixing.sum()) * weights[:, :, 1]
        return self.out(merged(self.norm(weights @ value) * 0.2))


class Latent(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): keys and values from a narrow latent, one rotary key for all
    heads."""

    def __init__(self, latent: int = 24, rotary: int = 8):
        super().__init__()
        self.latent, self.rotary = latent, rotary
        self.query = nn.Linear(WIDTH, HEADS * (HEAD + rotary), bias=False)
        self.down, self.norm = nn.Linear(WIDTH, latent + rotary, bias=False), nn.RMSNorm(latent)
        self.up, self.out = (
            nn.Linear(latent, HEADS * 2 * HEAD, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        query, turned_query = heads(self.query(x)).split([HEAD, self.rotary], dim=-1)
        latent, turned_key = self.down(x).split([self.latent, self.rotary], dim=-1)
        key, value = heads(self.up(self.norm(latent))).split([HEAD, HEAD], dim=-1)
        cos, sin = rotation(x.size(1), self.rotary, x)
        turned_key = rotated(turned_key.unsqueeze(1), cos, sin).expand(-1, HEADS, -1, -1)
        query, key = (
            torch.cat([query, rotated(turned_query, cos, sin)], dim=-1),
            torch.cat([key, turned_key], dim=-1),
        )
        return self.out(merged(F.scaled_dot_product_attention(query, key, value, is_causal=True)))


def rotation(length: int, width: int, like):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=like.dtype) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=like.dtype), frequencies)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotated(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class ComplexRotary(nn.Module):
    """Meta's Llama: rotation as a complex product, key heads repeated, a mask for SDPA-free attention."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv, self.wo = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, HEAD, 2)[: HEAD // 2].double() / HEAD))
        angles = torch.outer(torch.arange(LONGEST).double(), frequencies)
        self.register_buffer("cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turn(self, x, cis):
        pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * cis[None, :, None, :]).flatten(3).type_as(x)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.wq(x), self.wk(x), self.wv(x)
        query = self.turn(query.view(batch, length, HEADS, HEAD), self.cis[:length])
        key = self.turn(key.view(batch, length, HEADS // 2, HEAD), self.cis[:length])
        key = (
            key[:, :, :, None, :]
            .expand(batch, length, HEADS // 2, 2, HEAD)
            .reshape(batch, length, HEADS, HEAD)
        )
        value = torch.repeat_interleave(value.view(batch, length, HEADS // 2, HEAD), 2, dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask = torch.full((length, length), float("-inf"), device=x.device)
        mask = torch.triu(mask, diagonal=1).type_as(x)
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(HEAD) + mask
        out = torch.matmul(F.softmax(scores.double(), dim=-1).type_as(query), value)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class SequenceFirst(Decoder):
    """Megatron and fairseq: hidden states ``[T, B, d]``, heads folded into the batch, baddbmm."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.block_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

        def forward(self, x, mask):
            length, batch, _ = x.shape
            query, key, value = (
                self.qkv(self.norm(x)).view(length, batch * HEADS, 3 * HEAD).split(HEAD, dim=-1)
            )
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
            scores = torch.baddbmm(
                mask.expand(batch * HEADS, -1, -1), query, key.transpose(1, 2), alpha=HEAD**-0.5
            )
            out = torch.bmm(torch.softmax(scores, -1), value)
            x = x + self.out(out.transpose(0, 1).contiguous().view(length, batch, WIDTH))
            return x + self.feed_forward(self.block_norm(x))

    def __init__(self):
        super().__init__(lambda i: self.Layer())

    def hidden(self, ids, x):
        x = x.transpose(0, 1).contiguous()
        length = x.size(0)
        mask = torch.full((1, length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return x.transpose(0, 1)

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        counted = (targets != -100).to(chosen.dtype)
        return -(chosen * counted).sum() / counted.sum()


class Flex(Attention):
    """flex_attention, causal, with a bias by distance."""

    def mix(self, query, key, value):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def causal(batch, head, row, column):
            return row >= column

        def nearer(score, batch, head, row, column):
            return score - 0.1 * (row - column)

        mask = create_block_mask(causal, None, None, query.size(2), query.size(2), device=query.device)
        return flex_attention(query, key, value, score_mod=nearer, block_mask=mask)


class Packed(Decoder):
    """Documents packed into a sequence; who may see whom is counted from separators, once, for all layers."""

    class Mixed(Attention):
        def mix(self, query, key, value, mask):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def __init__(self):
        super().__init__(lambda i: Block(self.Mixed()))

    def hidden(self, ids, x):
        ends = (ids == SEPARATOR).long()
        document = ends.cumsum(-1) - ends
        at = torch.arange(ids.shape[1], device=ids.device)
        mask = (document[:, :, None] == document[:, None, :]) & (at[:, None] >= at)
        for layer in self.layers:
            x = layer(x, mask[:, None])
        return x


class Prefix(Decoder):
    """Prefix LM: a prompt that sees all of itself, and a causal rest."""

    def __init__(self):
        super().__init__(lambda i: Block(Packed.Mixed()))

    def batch(self, length: int) -> dict[str, torch.Tensor]:
        return dict(super().batch(length), prefix=torch.tensor([length // 5, length // 3]))

    def hidden(self, ids, x, prefix):
        at = torch.arange(ids.shape[1], device=ids.device)
        mask = (at[None, :, None] >= at[None, None, :]) | (at[None, None, :] < prefix[:, None, None])
        for layer in self.layers:
            x = layer(x, mask.unsqueeze(1))
        return x


# Blocks


class Parallel(nn.Module):
    """Attention and feed-forward side by side on one norm (GPT-J, PaLM)."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.feed_forward = nn.LayerNorm(WIDTH), Attention(), FeedForward()

    def forward(self, x):
        normed = self.norm(x)
        return x + self.attention(normed) + self.feed_forward(normed)


class Sandwich(nn.Module):
    """Norms before and after, LayerScale, and dropout that is off."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(0.1 * torch.ones(WIDTH)) for _ in range(2))
        self.attention, self.feed_forward, self.dropout = Attention(), FeedForward(), nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.dropout(self.scales[0] * self.norms[1](self.attention(self.norms[0](x))))
        return x + self.dropout(self.scales[1] * self.norms[3](self.feed_forward(self.norms[2](x))))


class PostNorm(nn.Module):
    """The transformer of 2017."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.attention, self.feed_forward = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attention(),
            FeedForward(),
        )

    def forward(self, x):
        x = self.first(x + self.attention(x))
        return self.second(x + self.feed_forward(x))


class InPlace(nn.Module):
    """Whatever autograd lets one write over is written over: sums, masks, activations, a slice of the
    keys."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        query, key, value = (heads(part).clone() for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        query.mul_(HEAD**-0.5)
        key[..., : HEAD // 2] = key[..., : HEAD // 2] * 0.5
        scores = query @ key.transpose(-2, -1)
        scores.masked_fill_(
            torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu_(1), float("-inf")
        )
        mixed = self.out(merged(scores.softmax(-1) @ value))
        mixed += x
        made = self.feed_forward(self.second(mixed))
        return made.add_(mixed)


class SharedLayers(Decoder):
    """ALBERT: one layer, four times."""

    def __init__(self):
        super().__init__(lambda i: Block())
        self.layers = self.layers[:1]

    def hidden(self, ids, x):
        for _ in range(4):
            x = self.layers[0](x)
        return x


class Skips(Decoder):
    """U-net: the second half adds what the first half made, in reverse (modded-nanoGPT)."""

    def __init__(self):
        super().__init__(lambda i: Block(), positions=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.weights = nn.Parameter(torch.ones(2))

    def hidden(self, ids, x):
        start, kept = x, []
        for layer in self.layers[:2]:
            x = layer(0.9 * x + 0.1 * start)
            kept.append(x)
        for i, layer in enumerate(self.layers[2:]):
            x = layer(x + self.weights[i] * kept.pop())
        return x

    def loss(self, x, targets):
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (WIDTH,))) / 15)
        return F.cross_entropy(
            logits.float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1), targets.flatten()
        )


class HyperConnections(Decoder):
    """Three residual streams, mixed anew around every layer (arXiv 2409.19606, the static form and a dynamic
    gate)."""

    class Layer(nn.Module):
        def __init__(self, streams: int):
            super().__init__()
            self.into, self.out = nn.Parameter(torch.randn(streams) * 0.3), nn.Parameter(torch.ones(streams))
            self.across, self.gate = nn.Parameter(torch.eye(streams) + 0.1), nn.Linear(WIDTH, 1)
            self.layer = Block()

        def forward(self, streams):
            gates = torch.tanh(self.gate(streams)) * 0.1 + self.into[:, None]
            x = (streams * gates).sum(dim=2)
            made = self.layer(x)
            return torch.einsum("btsd,sr->btrd", streams, self.across) + made.unsqueeze(2) * self.out[:, None]

    def __init__(self):
        super().__init__(lambda i: self.Layer(3))

    def hidden(self, ids, x):
        streams = x.unsqueeze(2).repeat(1, 1, 3, 1)
        for layer in self.layers:
            streams = layer(streams)
        return streams.sum(2)


class Handing(Decoder):
    """Layers that hand a second value on."""

    def hidden(self, ids, x):
        handed = None
        for layer in self.layers:
            x, handed = layer(x, handed)
        return x


class ValueResidual(Handing):
    """Every layer mixes its values with those of the first (ResFormer)."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.block_norm, self.feed_forward = (
                nn.LayerNorm(WIDTH),
                nn.LayerNorm(WIDTH),
                FeedForward(),
            )
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.part = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, first=None):
            normed = self.norm(x)
            value = self.v(normed)
            first = value if first is None else first
            mixed = self.part * value + (1 - self.part) * first
            out = F.scaled_dot_product_attention(
                heads(self.q(normed)), heads(self.k(normed)), heads(mixed), is_causal=True
            )
            x = x + self.o(merged(out))
            return x + self.feed_forward(self.block_norm(x)), first

    def __init__(self):
        super().__init__(lambda i: self.Layer())
        self.layers.append(self.Layer())


class SharedKeys(Handing):
    """Two layers read the keys and values that the first of them made (cross-layer attention)."""

    class Layer(nn.Module):
        def __init__(self, makes: bool):
            super().__init__()
            self.norm, self.q, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.kv = nn.Linear(WIDTH, WIDTH) if makes else None
            self.block_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

        def forward(self, x, shared):
            normed = self.norm(x)
            if self.kv is not None:
                shared = [heads(part, 2) for part in self.kv(normed).chunk(2, -1)]
            out = F.scaled_dot_product_attention(
                heads(self.q(normed)), *shared, is_causal=True, enable_gqa=True
            )
            x = x + self.o(merged(out))
            return x + self.feed_forward(self.block_norm(x)), shared

    def __init__(self):
        super().__init__(lambda i: self.Layer(i % 2 == 0))


class LayerEmbeddings(Decoder):
    """Per-layer embeddings: every layer looks the tokens up again, narrow and gated (Gemma 3n)."""

    def __init__(self, width: int = 16):
        super().__init__(lambda i: Block())
        self.tables = nn.Embedding(VOCAB, LAYERS * width)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(LAYERS))
        self.outs = nn.ModuleList(nn.Linear(width, WIDTH) for _ in range(LAYERS))

    def hidden(self, ids, x):
        looked_up = self.tables(ids).unflatten(-1, (LAYERS, -1))
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = x + self.outs[i](F.silu(self.gates[i](x)) * looked_up[:, :, i])
        return x


class TorchEncoder(Decoder):
    """torch.nn.TransformerEncoder with a causal mask, norm first."""

    def __init__(self):
        super().__init__(lambda i: nn.Identity())
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 3 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def hidden(self, ids, x):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        return self.layers(x, mask=mask, is_causal=True)


class TorchDecoder(Decoder):
    """torch.nn.TransformerDecoder over the memory of an encoder, whose length is its own."""

    def __init__(self):
        super().__init__(lambda i: nn.Identity())
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 3 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, LAYERS)
        self.reader = nn.Linear(20, WIDTH)

    def batch(self, length: int) -> dict[str, torch.Tensor]:
        make = torch.Generator().manual_seed(3)
        return dict(super().batch(length), source=torch.randn(2, 50, 20, generator=make))

    def hidden(self, ids, x, source):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=x.dtype)
        return self.layers(x, self.reader(source.to(x.dtype)), tgt_mask=mask, tgt_is_causal=True)


class OwnNorm(torch.autograd.Function):
    """RMSNorm with a backward by hand."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, weighted = x * scale, grad * weight
        dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return dx, (grad * normed).flatten(0, -2).sum(0), None


class OwnNormLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return OwnNorm.apply(x, self.weight, 1e-6)


def own_norm() -> Decoder:
    model = Decoder(lambda i: Block())
    for layer in model.layers:
        layer.first, layer.second = OwnNormLayer(), OwnNormLayer()
    return model


class TokenWise(nn.Module):
    """No attention at all."""

    def __init__(self):
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


# Experts


class Experts(nn.Module):
    """Top-2 of four; a subclass says how tokens meet their experts."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.count = count
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, WIDTH) * WIDTH**-0.5)

    def route(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class SortedExperts(Experts):
    """Tokens sorted by expert, a batch of rows per expert, added back where they came from."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        order = chosen.view(-1).argsort(stable=True)
        tokens = order // 2
        expert = chosen.view(-1)[order]
        rows = flat[tokens].unsqueeze(1)
        made = torch.bmm(F.silu(torch.bmm(rows, self.up[expert])), self.down[expert]).squeeze(1)
        made = made * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, tokens, made).view_as(x)


class MaskedExperts(Experts):
    """All experts on all tokens, each weighted by a mask of who chose it."""

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i in range(self.count):
            part = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + part * (F.silu(x @ self.up[i]) @ self.down[i])
        return out


class LoopedExperts(Experts):
    """A loop over experts, each of which computes the tokens that chose it, and adds them back."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for i in range(self.count):
            tokens, slot = torch.where(chosen == i)
            made = F.silu(flat[tokens] @ self.up[i]) @ self.down[i]
            out.index_add_(0, tokens, made * weights[tokens, slot, None])
        return out.view_as(x)


class OneHotExperts(Experts):
    """The einsum style of GShard: choices as one-hot vectors, with the balance loss of Switch beside the
    output."""

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        hot = F.one_hot(chosen, self.count).to(x.dtype)
        gates = torch.einsum("btk,btke->bte", weights, hot)
        made = torch.einsum("btd,edf->btef", x, self.up)
        made = torch.einsum("btef,efd->bted", F.gelu(made), self.down)
        self.balance = self.count * (hot.sum(2).mean((0, 1)) * probabilities.mean((0, 1))).sum()
        return torch.einsum("bted,bte->btd", made, gates)


class Balanced(Decoder):
    """Experts whose balance loss is added to the model's."""

    def __init__(self):
        super().__init__(lambda i: Block(feed_forward=OneHotExperts()))

    def forward(self, ids, targets):
        loss = super().forward(ids, targets)
        return loss + 0.01 * sum(layer.feed_forward.balance for layer in self.layers)


# Mixers that are not attention


class Convolution(nn.Module):
    """A causal depthwise convolution of four tokens, gated (Hyena's and Mamba's short filter)."""

    def __init__(self, kernel: int = 4):
        super().__init__()
        self.kernel = kernel
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Conv1d(WIDTH, WIDTH, kernel, groups=WIDTH, padding=kernel - 1)

    def forward(self, x):
        x, gate = self.into(x).chunk(2, dim=-1)
        x = self.filter(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
        return self.out(F.silu(x) * gate)


class LinearAttention(Attention):
    """Causal linear attention by cumulative sums of outer products."""

    def mix(self, query, key, value):
        query, key = F.elu(query) + 1, F.elu(key) + 1
        state = torch.einsum("bhtd,bhte->bhtde", key, value).cumsum(dim=2)
        total = (query * key.cumsum(dim=2)).sum(-1, keepdim=True)
        return torch.einsum("bhtd,bhtde->bhte", query, state) / total


class GatedDelta(Attention):
    """The gated delta rule, one token after another."""

    def __init__(self):
        super().__init__()
        self.decay, self.beta = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)

    def forward(self, x):
        query, key, value = (heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        decay, beta = self.decay(x).sigmoid().transpose(1, 2), self.beta(x).sigmoid().transpose(1, 2)
        state = x.new_zeros(x.size(0), HEADS, HEAD, HEAD)
        out = []
        for t in range(x.size(1)):
            state = state * decay[:, :, t, None, None]
            expected = (state * key[:, :, t, :, None]).sum(-2)
            change = (value[:, :, t] - expected) * beta[:, :, t, None]
            state = state + key[:, :, t, :, None] * change[:, :, None, :]
            out.append((state * query[:, :, t, :, None]).sum(-2))
        return self.out(merged(torch.stack(out, dim=2)))


class Shift(nn.Module):
    """RWKV's channel mix: every token is blended with the one before it."""

    def __init__(self):
        super().__init__()
        self.blend = nn.Parameter(torch.rand(WIDTH))
        self.key, self.value, self.gate = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        mixed = before + (x - before) * self.blend
        return torch.sigmoid(self.gate(mixed)) * self.value(torch.relu(self.key(mixed)) ** 2)


ARCHITECTURES: dict[str, Callable[[], Decoder]] = {
    "nanogpt": lambda: Decoder(lambda i: Block(), tied=True),
    "stored mask": blocks(StoredMask),
    "added triangle": blocks(ComputedTriangle),
    "alibi": blocks(Alibi, positions=False),
    "relative bias": blocks(RelativeBias, positions=False),
    "relative shift": blocks(RelativeShift, positions=False),
    "relative shift both ways": blocks(RelativeShiftBothWays, positions=False),
    "learned bias": blocks(LearnedBias, positions=False),
    "sinks": blocks(Sinks),
    "window": blocks(Window),
    "chunked": blocks(Chunked),
    "capped": blocks(Capped),
    "differential": blocks(Differential),
    "latent": blocks(Latent, positions=False),
    "complex rotary": blocks(ComplexRotary, positions=False),
    "sequence first": SequenceFirst,
    "flex": blocks(Flex),
    "packed": Packed,
    "prefix": Prefix,
    "parallel": lambda: Decoder(lambda i: Parallel()),
    "sandwich": lambda: Decoder(lambda i: Sandwich()),
    "post-norm": lambda: Decoder(lambda i: PostNorm()),
    "in place": lambda: Decoder(lambda i: InPlace()),
    "shared layers": SharedLayers,
    "u-net skips": Skips,
    "hyper-connections": HyperConnections,
    "value residual": ValueResidual,
    "shared keys": SharedKeys,
    "layer embeddings": LayerEmbeddings,
    "torch encoder": TorchEncoder,
    "torch decoder": TorchDecoder,
    "own norm": own_norm,
    "token-wise": lambda: Decoder(lambda i: TokenWise()),
    "sorted experts": lambda: Decoder(lambda i: Block(feed_forward=SortedExperts())),
    "masked experts": lambda: Decoder(lambda i: Block(feed_forward=MaskedExperts())),
    "looped experts": lambda: Decoder(lambda i: Block(feed_forward=LoopedExperts())),
    "one-hot experts": Balanced,
    "convolution": lambda: Decoder(lambda i: Block(Convolution())),
    "token shift": lambda: Decoder(lambda i: Block(Attention(), Shift())),
    "linear attention": blocks(LinearAttention),
    "gated delta": blocks(GatedDelta),
}

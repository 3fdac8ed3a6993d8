"""A small decoder in plain torch, float64, for setups that need no model of a library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LAYERS = 1536, 48, 4  # logits dominate the memory of a step, as they do in practice


class Block(nn.Module):
    """Pre-norm causal attention and an MLP."""

    def __init__(self, width: int = WIDTH, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mapped(self, x: Tensor) -> Tensor:
        """The MLP, token by token."""
        return self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.mapped(self.norm2(x))


class Decoder(nn.Module):
    """Token ids in; the loss of the next token out.

    checkpointed  with activation checkpointing per layer
    tied          head and embedding are one weight
    unused        a layer whose parameters get no gradient
    joined        head and loss are one module
    """

    def __init__(
        self, checkpointed: bool = False, tied: bool = False, unused: bool = False, joined: bool = False
    ):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.joined = nn.RMSNorm(WIDTH), joined
        self.head = HeadAndLoss() if joined else nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if unused:
            self.unused = Block()

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.hidden(ids)
        return self.head(hidden, ids) if self.joined else next_token_loss(self.head(hidden), ids)


class HeadAndLoss(nn.Linear):
    """The logits exist inside of its forward only."""

    def __init__(self):
        super().__init__(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(super().forward(x), ids)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids_of(length: int, seed: int = 0, batch: int = 2) -> Tensor:
    """Token ids ``[batch, length]``, the same for the same seed."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoder(**options: bool) -> Decoder:
    """A decoder of the same weights in every call."""
    torch.manual_seed(0)
    return Decoder(**options).double()

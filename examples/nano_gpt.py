"""A hand-written GPT, trained on the bytes of the Python standard library.

python examples/nano_gpt.py --tokens 1024 --steps 20
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gradients import gradients, largest_difference
from examples.corpus import Batches, byte_ids


class Block(nn.Module):
    """Pre-norm attention and MLP over a residual stream ``[b, t, width]``."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class GPT(nn.Module):
    """A causal language model with learned positions and a tied head.

    tokens  the longest sequence
    """

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy of every next token of ids ``[b, t]``."""
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def exactness(model: GPT, ids: Tensor, options: dict) -> tuple[float, float]:
    """One step in float64, eager and streamed: relative differences of the loss and of the worst gradient."""
    eager = copy.deepcopy(model).double()
    streamed = copy.deepcopy(eager)
    expected = eager(ids)
    expected.backward()
    loss = torch.compile(streamed, backend="streambp", options=options)(ids)
    loss.backward()
    return abs(loss.item() / expected.item() - 1), largest_difference(gradients(streamed), gradients(eager))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="length of a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (%(default)s)")
    parser.add_argument("--chunk-size", type=int, default=None, help="tokens per chunk (chosen by streambp)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text (%(default)s)")
    chosen = parser.parse_args()
    if min(chosen.tokens, chosen.batch) < 1 or chosen.tokens < 2:
        parser.error("--tokens must be 2 or more, --batch 1 or more")
    options = {} if chosen.chunk_size is None else {"chunk_size": chosen.chunk_size}

    torch.manual_seed(chosen.seed)
    batches = Batches(byte_ids(), chosen.tokens, chosen.seed)
    model = GPT(vocabulary=256, tokens=chosen.tokens, width=192, heads=6, layers=4)

    def draw() -> Tensor:
        return torch.cat([next(batches) for _ in range(chosen.batch)])

    loss_difference, gradient_difference = exactness(model, draw(), options)
    print(
        f"float64, streambp against eager: loss {loss_difference:.1e}, largest relative gradient "
        f"difference {gradient_difference:.1e}"
    )

    model.compile(backend="streambp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, chosen.steps + 1):
        optimizer.zero_grad()
        loss = model(draw())
        loss.backward()
        optimizer.step()
        print(f"step {step:3}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()

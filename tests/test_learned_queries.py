"""Attention of learned queries to all tokens streams along its keys: pooling heads, latents that read."""

import pytest
import torch
import torch.nn.functional as F
from models import gradients, total_error, worst_error
from selection import representatives
from torch import Tensor, nn

from benchmarks.memory import peak
from streambp_compile import explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT, WIDTH, LATENTS, BATCH = 1e-10, 16, 3, 2


class Reader(nn.Module):
    """Latents read a text, with masks and heads as ``read`` has them; each token meets what they found."""

    def __init__(self, read, heads: int = 4, key_heads: int = 4):
        super().__init__()
        self.read, self.heads, self.key_heads = read, heads, key_heads
        self.latents = nn.Parameter(torch.randn(1, LATENTS, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH * key_heads // heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        q = self.q(self.latents).expand(len(x), -1, -1).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        found = self.out(self.read(q, k, v).transpose(1, 2).flatten(2))
        return (x * found.mean(1, keepdim=True)).square().sum() / x.shape[1]


def plainly(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True)


def masked(q, k, v):
    keys = torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, keys % 3 > torch.arange(LATENTS)[:, None] - 1)


def masked_completely(q, k, v):
    """The last latent sees nothing."""
    seen = (torch.arange(LATENTS) < LATENTS - 1)[:, None].expand(-1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, seen)


def biased(q, k, v):
    far = -torch.arange(k.shape[2], dtype=q.dtype) * torch.arange(1, q.shape[1] + 1)[:, None, None] / 50
    return F.scaled_dot_product_attention(q, k, v, far[None], enable_gqa=k.shape[1] < q.shape[1])


READS = [
    (plainly, 4, 4),
    (grouped, 4, 2),
    (grouped, 4, 1),
    (masked, 2, 2),
    (masked_completely, 2, 2),
    (biased, 4, 4),
    (biased, 4, 2),
]
CHOSEN = {(grouped, 4, 2), (masked_completely, 2, 2), (biased, 4, 4)}


@pytest.mark.long
@pytest.mark.parametrize(
    "reads", representatives(READS, CHOSEN), ids=lambda r: " ".join(map(str, (r[0].__name__, *r[1:])))
)
def test_gradients(reads):
    read, heads, key_heads = reads
    model = Reader(read, heads, key_heads).double()
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=8, strict=True))
    for length in (37, 21):
        x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
        found, expected = (gradients(model, lambda f=f: f(x)) for f in (step, model))
        assert worst_error(found, expected) < EXACT


@pytest.mark.long
def test_scores_exist_for_one_chunk():
    model, x = Reader(plainly), torch.randn(BATCH, 2048, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=128))
    step(x).backward()
    assert peak(lambda: step(x).backward()) < 1.25 * x.nbytes
    torch._dynamo.reset()
    assert all(r.streamed for r in explain(model, x).regions)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_halves_are_as_close_as_in_eager(dtype):
    torch.manual_seed(0)
    model, x = Reader(plainly), torch.randn(BATCH, 300, WIDTH)
    truth = gradients(model.double(), lambda: model(x.double()))
    x = x.to(dtype)
    eager = gradients(model.to(dtype), lambda: model(x))
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=64, strict=True))
    found = gradients(model, lambda: step(x))
    assert total_error(found, truth) <= 1.5 * total_error(eager, truth)

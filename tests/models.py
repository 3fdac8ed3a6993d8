"""Small models for whole-model tests, and the errors of their gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_compile.backend import streambp

VOCABULARY = 256


def ids_of(batch: int = 2, length: int = 97) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


class Layer(nn.Module):
    """Pre-norm attention and a GELU MLP, biases included, written against SDPA."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """The loss shifts inside: rows ``[:-1]`` of the logits meet labels ``[1:]``."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, labels)


class Asserting(Plain):
    """Asserts something of labels, of the hidden states, of the logits and of the loss."""

    def __init__(self, limit: int, **given):
        super().__init__(width=32, **given)
        self.limit, self.layers = limit, nn.ModuleList([*self.layers, Checked()])

    def loss(self, x, labels):
        assert (labels < self.limit).all(), "labels"
        logits = self.head(self.norm(x))
        assert logits.isfinite().all(), "logits"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert loss > 0
        return loss


class Checked(nn.Module):
    def forward(self, x):
        assert (~x.isnan()).all(), "hidden states"
        return x


class MixingLayer(nn.Module):
    """A residual layer around ``mix``: it gets ``parts`` projections, each ``[b, t, width]``, and then, if
    ``weight`` names a shape, a parameter."""

    def __init__(self, mix, width: int, parts: int = 3, weight: tuple[int, ...] | None = None):
        super().__init__()
        self.mix, self.norm, self.parts = mix, nn.LayerNorm(width), parts
        self.into, self.out = nn.Linear(width, parts * width), nn.Linear(width, width)
        self.weight = None if weight is None else nn.Parameter(torch.rand(weight))

    def forward(self, x: Tensor) -> Tensor:
        weights = () if self.weight is None else (self.weight,)
        return x + self.out(self.mix(*self.into(self.norm(x)).chunk(self.parts, -1), *weights))


class Mixing(nn.Module):
    """Layers under a cross-entropy of next tokens."""

    def __init__(self, width: int, *layers: nn.Module):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.Sequential(*layers)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Norm(nn.Module):
    """RMSNorm in the input's own dtype."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            p(y).view(batch, length, -1, self.head_width).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaLike(nn.Module):
    """The targets come aligned with the tokens."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([LlamaLayer(width, heads, kv_heads) for _ in range(layers)])
        self.norm, self.head = Norm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.half = width // heads // 2

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        speed = 10000.0 ** (-torch.arange(self.half, dtype=x.dtype) / self.half)
        angle = torch.arange(ids.shape[1], dtype=x.dtype)[:, None] * speed
        cos, sin = (f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).view(-1, VOCABULARY), y.reshape(-1))


def hugging_face(name: str, **options) -> nn.Module:
    """A two-layer model of a family of Hugging Face, in float64."""
    import transformers

    if name == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=512,
            use_cache=False,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config).double()
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
        max_position_embeddings=512,
    )
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def gradients(model: nn.Module, loss) -> dict[str, Tensor]:
    """Gradients of one or several losses (a function that returns one, or None if it ran backward itself), on
    empty ``.grad``."""
    model.zero_grad()
    made = loss()
    if made is not None:
        made.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def counted(model: nn.Module, chunk_size: int):
    """The compiled model, and the list of Dynamo graphs that it has come to so far."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return streambp(graph, inputs, options={"chunk_size": chunk_size})

    return torch.compile(model, backend=backend), graphs


def truth_of(model: nn.Module, loss) -> dict[str, Tensor]:
    """Gradients of ``loss(model)`` in float64, from the very weights of the model."""
    exact = copy.deepcopy(model).double()
    return gradients(exact, lambda: loss(exact))


def worst_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient."""
    assert found.keys() == truth.keys()
    return max(((found[n] - g).norm() / g.norm()).item() for n, g in truth.items())


def total_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The relative error of all gradients together."""
    assert found.keys() == truth.keys()
    wrong = sum((found[n].double() - g).norm() ** 2 for n, g in truth.items())
    return (wrong / sum(g.norm() ** 2 for g in truth.values())).sqrt().item()


class Tripled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.5

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad

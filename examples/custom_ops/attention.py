"""Causal attention of one's own, with its own kernel and backward kernel.

The rows name the labels of queries and of keys. A chunk body calls the same kernel: with the chunk's
queries, with the keys that they can reach, and with the place of the first query among those keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streambp_compile
from streambp_compile import PAST, equation

HEADS = 4


def probabilities(q: Tensor, k: Tensor, scale: float, first: int) -> Tensor:
    place = torch.arange(q.shape[2], device=q.device)[:, None] + first
    later = torch.arange(k.shape[2], device=q.device) > place
    return (q @ k.transpose(-1, -2) * scale).masked_fill(later, -torch.inf).softmax(-1)


@torch.library.custom_op("example_attention::forward", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int) -> Tensor:
    """Query i is token ``first + i`` and sees the keys up to it; ``[b, h, t, d]`` each."""
    return probabilities(q, k, scale, first) @ v


@torch.library.custom_op("example_attention::backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and what these queries add to those of the keys and values."""
    p = probabilities(q, k, scale, first)
    scores = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return scores @ k, scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


def backward(ctx, grad: Tensor):
    return *attention_backward(grad, *ctx.saved_tensors, ctx.scale, 0), None, None


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], output)
    ctx.scale = inputs[3]


attention.register_fake(lambda q, k, v, scale, first: q.new_empty(*q.shape[:3], v.shape[3]))
attention_backward.register_fake(
    lambda grad, q, k, v, out, scale, first: tuple(x.new_empty(x.shape) for x in (q, k, v))
)
attention.register_autograd(backward, setup_context=setup_context)


def emit(body, node):
    """The kernel on the chunk's queries; their place is that of the chunk in its range of keys."""
    operands = (body.operand(edge) for edge in body.edges(node))
    return body.graph.call_function(node.target, (*operands, node.args[3], body.scalar("offset")))


def emit_backward(body, node):
    """The same; what the chunk adds to the gradients of keys goes into their accumulators."""
    operands = (body.operand(edge) for edge in body.edges(node))
    grads = body.graph.call_function(node.target, (*operands, node.args[5], body.scalar("offset")))
    return body.rows_and_key_sums(node, grads)


@streambp_compile.rule("example_attention::forward", cost="product", emit=emit)
def rows(node):
    return equation(node, "bhqd,bhkd,bhke->bhqe", rows="q", keys="k", reach={"k": PAST})


@streambp_compile.rule("example_attention::backward", cost="product", linear="grad", emit=emit_backward)
def rows_of_gradients(node):
    """The first result has a row per query, the others have one per key; their features bear other labels."""
    text = "bhqe,bhqd,bhkd,bhke,bhqe->bhqD,bhkD,bhkE"
    return equation(node, text, rows="q", keys="k", reach={"k": PAST})


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.into, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.into(self.norm(x)).chunk(3, -1))
        mixed = attention(q, k, v, q.shape[-1] ** -0.5, 0)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


VOCABULARY, WIDTH, LENGTH, CHUNK, BOUND = 97, 32, 61, 16, 1e-10


class Model(nn.Module):
    """Embeddings, two layers, and a head with its loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.Sequential(*(Layer(WIDTH) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    """Two training steps whose streamed gradients must be the eager ones; every region must stream."""
    torch.manual_seed(0)
    model = Model().double()
    streamed = torch.compile(model, backend="streambp", options={"chunk_size": CHUNK, "strict": True})
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        ids, found = torch.randint(VOCABULARY, (2, LENGTH)), {}
        for name, loss in (("eager", model), ("streamed", streamed)):
            model.zero_grad()
            loss(ids).backward()
            found[name] = [p.grad.clone() for p in model.parameters()]
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found["streamed"], found["eager"]))
        assert error < BOUND, f"step {number}: relative error {error:.1e}"
        print(f"step {number}: gradients in chunks of {CHUNK} tokens are those of eager, to {error:.0e}")
        descent.step()


if __name__ == "__main__":
    main()

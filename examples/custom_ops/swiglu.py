"""A fused activation of one's own, with its backward op: ``silu(gate) * up``.

Two rows say all that streaming needs: row t of every result is made of row t of every operand, and in which
operands the ops are linear.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streambp_compile
from streambp_compile import equation


@torch.library.custom_op("example_swiglu::forward", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@torch.library.custom_op("example_swiglu::backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    s = gate.sigmoid()
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
swiglu_backward.register_fake(lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)))
swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@streambp_compile.rule("example_swiglu::forward", cost="kernel", linear="up")
def rows(node):
    return equation(node, "bth,bth->bth")


@streambp_compile.rule("example_swiglu::backward", cost="kernel", linear="grad")
def rows_of_gradients(node):
    return equation(node, "bth,bth,bth->bth,bth")


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(swiglu(*self.into(self.norm(x)).chunk(2, -1)))


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

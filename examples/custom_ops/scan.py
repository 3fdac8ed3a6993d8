"""A gated scan of one's own, ``h[t] = gate[t] * h[t-1] + value[t]``; its kernel can start from a state.

One row says that row t reads all rows before it (all behind it, where the scan runs in reverse), and which
argument takes the state that the rows before a chunk left.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streambp_compile
from streambp_compile import FUTURE, PAST, Scan, equation


@torch.library.custom_op("example_scan::gated", mutates_args=())
def gated_scan(gate: Tensor, value: Tensor, reverse: bool, state: Tensor | None) -> Tensor:
    """``[b, t, d]`` each, from the last row to the first if ``reverse``; ``state`` is ``h`` before them,
    ``[b, 1, d]``."""
    h = torch.zeros_like(value[:, 0]) if state is None else state[:, 0]
    rows = list(zip(gate.unbind(1), value.unbind(1)))
    found = []
    for g, v in reversed(rows) if reverse else rows:
        h = g * h + v
        found.append(h)
    return torch.stack(found[::-1] if reverse else found, 1)


def backward(ctx, grad: Tensor):
    """The gradient of ``h`` is the scan of the incoming one from the end, by the gate of the next row."""
    gate, h = ctx.saved_tensors
    behind, before = F.pad(gate, (0, 0, -1, 1)), F.pad(h, (0, 0, 1, -1))
    grad = gated_scan(behind, grad, True, None)
    return grad * before, grad, None, None


gated_scan.register_fake(lambda gate, value, reverse, state: value.new_empty(value.shape))
gated_scan.register_autograd(
    backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
)


@streambp_compile.rule(
    "example_scan::gated", cost="kernel", linear="value", scan=Scan(identity=0.0, state="state")
)
def rows(node):
    return equation(node, "btd,btd->btd", reach={"t": FUTURE if node.args[2] else PAST})


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.into, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(self.norm(x)).chunk(2, -1)
        return x + self.out(gated_scan(gate.sigmoid(), value, False, None))


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

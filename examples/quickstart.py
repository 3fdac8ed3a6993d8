"""One argument of torch.compile: the same loss, the same gradients, a fraction of the memory."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = Qwen3ForCausalLM(config)
ids = torch.randint(0, config.vocab_size, (1, 1000))


def loss_of(ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


expected = loss_of(ids)
expected_grads = torch.autograd.grad(expected, list(model.parameters()))

streamed = torch.compile(
    loss_of, backend="streambp", options={"chunk_size": 128}
)  # found by name: nothing to import
loss = streamed(ids)
loss.backward()

difference = max((p.grad - g).norm() / g.norm() for p, g in zip(model.parameters(), expected_grads))
print(
    f"loss {loss.item():.6f} (eager {expected.item():.6f}); largest relative gradient difference "
    f"{difference.item():.1e}"
)

"""Models of real size without memory: weights and inputs are fake tensors on a GPU that need not be there.

torch has to believe in a CUDA device for its kernels to be chosen and for Inductor to write Triton; nothing
runs on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch._inductor.config
import torch._subclasses.fake_tensor as fake_tensor
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model: layers, width, feed-forward width, heads of 128, whether the head is the embedding,
    whether only adapters learn."""

    title: str
    layers: int
    width: int
    hidden: int
    heads: int
    tied: bool = False
    lora: bool = False


def pretend() -> None:
    """Keep torch from touching a device that is only believed in."""
    fake_tensor.init_gpu_context = lambda device: None  # it would allocate there
    torch._inductor.config.joint_graph_constant_folding = False  # it reads constants, which are fake


SHAPES = {
    s.title: s
    for s in (
        Shape("Qwen3-4B", 36, 2560, 9728, 32, tied=True),
        Shape("Qwen3-8B", 36, 4096, 12288, 32),
        Shape("Qwen3-14B", 40, 5120, 17408, 40),
        Shape("Qwen3-32B LoRA", 64, 5120, 25600, 64, lora=True),
    )
}
VOCABULARY, KEY_HEADS, HEAD_WIDTH, RANK = 151936, 8, 128, 16


class LowRank(nn.Module):
    """A frozen linear layer and a learned product of two thin ones beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def adapted(model: nn.Module) -> nn.Module:
    """The model frozen, with adapters on every linear layer of its layers."""
    model.requires_grad_(False)
    for parent in [m for layer in model.model.layers for m in layer.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child))
    return model


def fake_model(mode, shape: Shape, layers: int, checkpointed: bool = False) -> nn.Module:
    """The model with so many layers in bfloat16 on CUDA, its weights fake tensors of ``mode``. Use it inside
    ``mode``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_WIDTH,
        use_cache=False,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).train()
        model = (adapted(model) if shape.lora else model).to(torch.bfloat16)
    if checkpointed:
        getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )()  # renamed in transformers 5
    return on_device(model, mode)


def on_device(model: nn.Module, mode, device: str = "cuda") -> nn.Module:
    """A model with its weights and buffers, built on ``meta``, made fake tensors of ``mode`` on a device."""
    made: dict[int, nn.Parameter] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    with mode:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:  # tied weights stay one
                    made.setdefault(id(weight), nn.Parameter(fake(weight), weight.requires_grad))
                    module._parameters[name] = made[id(weight)]
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = fake(value)
    return model


def weights_and_gradients(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters())

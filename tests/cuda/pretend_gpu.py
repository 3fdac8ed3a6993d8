"""Models of fake tensors, on a CPU or on the CUDA device of pretend_gpu.c, at any size and in no memory.

PRETEND_GPU=a100 .venv-cuda/bin/python-gpu your_script.py        # see docs/testing-without-a-gpu.md
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # or transformers fetches kernels

import torch
import torch._inductor.config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

torch._inductor.config.joint_graph_constant_folding = False  # it reads constants: no values here
torch._inductor.config.shape_padding = False  # it times products


def model_on(
    mode: FakeTensorMode,
    build: Callable[[], nn.Module],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> nn.Module:
    """The module of ``build()``, with fake weights and buffers on ``device``. Call it inside ``mode``.

    mode   the fake tensor mode of the weights; the inputs must be made inside it as well
    build  makes the module; nothing is allocated meanwhile
    dtype  of floating-point weights
    """
    with torch.device("meta"):
        model = build().to(dtype)
    with mode:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(fake(weight, device), weight.requires_grad)
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = fake(value, device)
    return model


def fake(value: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype on ``device``, of the fake mode that is active."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

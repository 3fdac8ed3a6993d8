"""Weights quantised by torchao, frozen beneath adapters of PEFT or trained themselves, on a small Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable

import peft
import torch
from torch import nn
from torchao import quantization
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization.qat import QATConfig

from .adapters import llama
from .decoder import ids_of
from .measurement import Job, Way, gradients


def is_projection(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "proj" in name


def quantised(config: Callable[[], object], model: nn.Module) -> None:
    quantization.quantize_(model, config(), filter_fn=is_projection)


def in_float8(model: nn.Module) -> None:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=is_projection)


def trained(
    way: Way, change: Callable[[nn.Module], None], adapter: bool = False, dtype: torch.dtype = torch.float32
) -> Job:
    """
    change   quantises the model in place
    adapter  is it frozen, beneath a LoRA?
    dtype    of what is not quantised
    """
    model = llama(hidden_size=64).to(dtype)
    change(model)
    if way is Way.CHECKPOINTED:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if adapter:
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        )
        torch.manual_seed(1)
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            nn.init.normal_(parameter, std=0.02)
    loss = way.compile(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)

    def step(length: int) -> None:
        model.zero_grad()
        loss(ids_of(length)).backward()

    return Job(step, lambda: gradients(model))


def of(change: Callable, *args: object, **options: object) -> Callable[[Way], Job]:
    return functools.partial(trained, change=functools.partial(change, *args), **options)


def quantisation_aware() -> object:
    return QATConfig(quantization.Int8DynamicActivationIntxWeightConfig(), step="prepare")


SETUPS = {
    "torchao, int8 weights, LoRA": of(quantised, quantization.Int8WeightOnlyConfig, adapter=True),
    "torchao, float8 weights, LoRA": of(quantised, quantization.Float8WeightOnlyConfig, adapter=True),
    "torchao, intx weights, LoRA": of(quantised, quantization.IntxWeightOnlyConfig, adapter=True),
    "torchao, quantisation-aware training": of(quantised, quantisation_aware),
    "torchao, int8 weights trained": of(quantised, int8_weight_only_quantized_training),
    # In float64, because a number between two of float8 may be rounded either way: the gradients of
    # stock Inductor are 2e-2 away from eager's in float32.
    "torchao, float8 products, emulated": of(in_float8, dtype=torch.float64),
}

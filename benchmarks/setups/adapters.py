"""Adapters of PEFT on a small Llama."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import peft
import torch
from torch import nn

from .decoder import VOCABULARY, ids_of
from .measurement import Job, Way, gradients


def llama(kind: str = "LlamaForCausalLM", **options: object) -> nn.Module:
    """A small Llama in float64, the same weights in every call. Its norms compute in float32 all the same."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return getattr(transformers, kind)(transformers.LlamaConfig(**{**sizes, **options})).double()


def adapted(way: Way, config: Callable, disabled: bool = False, checkpoints: bool = True) -> Job:
    """A Llama with an adapter, and a gradient of its base where the adapter is disabled.

    checkpoints  does the adapter go with activation checkpointing?
    """
    base = llama()
    if way is Way.CHECKPOINTED and checkpoints:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    model = peft.get_peft_model(base, config(task_type="CAUSAL_LM")).double()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(parameter.requires_grad or disabled and "norm" in name)
    loss = way.compile(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)

    def step(length: int) -> None:
        model.zero_grad()
        with model.disable_adapter() if disabled else contextlib.nullcontext():
            loss(ids_of(length)).backward()

    return Job(step, lambda: gradients(model))


def of(config: type, **options: object) -> Callable[[Way], Job]:
    return functools.partial(adapted, config=functools.partial(config, **options))


LAYERS = ["q_proj", "v_proj", "down_proj"]
SETUPS = {
    "PEFT, LoRA": of(peft.LoraConfig, target_modules=LAYERS),
    "PEFT, LoRA everywhere": of(peft.LoraConfig, target_modules="all-linear"),
    "PEFT, LoRA of embedding and head": of(
        peft.LoraConfig, target_modules=["embed_tokens", "q_proj", "lm_head"]
    ),
    "PEFT, modules_to_save": of(peft.LoraConfig, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "PEFT, disabled adapter": functools.partial(
        adapted, config=functools.partial(peft.LoraConfig, target_modules=["q_proj"]), disabled=True
    ),
    "PEFT, DoRA": of(peft.LoraConfig, target_modules=LAYERS, use_dora=True),
    "PEFT, VeRA": of(peft.VeraConfig, target_modules=["q_proj"], r=8),
    "PEFT, IA3": of(
        peft.IA3Config,
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "PEFT, AdaLoRA": of(peft.AdaLoraConfig, target_modules=["q_proj"], total_step=100),
    "PEFT, OFT": of(peft.OFTConfig, target_modules=["q_proj"], oft_block_size=16),
    "PEFT, trainable tokens": of(peft.TrainableTokensConfig, token_indices=[1, 2, 3]),
    "PEFT, prompt tuning": of(peft.PromptTuningConfig, num_virtual_tokens=8),
    "PEFT, P-tuning": of(peft.PromptEncoderConfig, num_virtual_tokens=8, encoder_hidden_size=32),
    "PEFT, prefix tuning": functools.partial(
        adapted,
        config=functools.partial(peft.PrefixTuningConfig, num_virtual_tokens=8),
        checkpoints=False,  # which PEFT refuses
    ),
}

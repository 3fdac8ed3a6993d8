"""Architectures, one row each: exact or not, how much of it streams, what it costs, and the reason of every refusal.

    python benchmarks/zoo.py                       all rows
    python benchmarks/zoo.py --only llama,mixtral  some of them
    python benchmarks/zoo.py --save zoo            also to benchmarks/results/zoo.md

Models are small and random, built from their configurations. Every row is a process of its own. *Error*: the largest relative difference of a
parameter's gradient from eager's in float64 (Hugging Face models compute norms, rotary tables and their loss in float32 inside; there the
difference is held under 1e-5), at an odd length and chunk length, two sequences, the second padded where the model takes a mask.
*Streamed*: regions streamed of all regions, occurrences counted. *Peak*: allocator events of one float32 step at ``--tokens`` tokens,
as a part of eager gradient checkpointing's where the model has it, of plain eager's otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LENGTH, CHUNK = 77, 24  # of the exactness check: neither divides the other


@dataclass(frozen=True)
class Row:
    """A model to build.

    kind     dense, moe, recurrent, encoder, or own (not of Hugging Face)
    build    makes the model, and a function from it and a length to the arguments of its loss
    exact    the largest error that passes
    """

    kind: str
    build: Callable
    exact: float = 1e-5


ROWS: dict[str, Row] = {}

# Hugging Face causal language models. What a configuration has is set; nothing else is known about a family.

SMALL = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=8192, attention_dropout=0.0, hidden_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, dropout=0.0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0, residual_dropout=0.0, resid_dropout=0.0,
    embedding_dropout=0.0, layerdrop=0.0, classifier_dropout=0.0, summary_first_dropout=0.0, embed_dropout=0.0, ffn_dropout=0.0,
    n_embd=64, n_layer=2, n_head=4, n_positions=8192, n_ctx=8192, n_inner=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=8192,
    ffn_dim=96, num_layers=2, word_embed_proj_dim=64, rotary_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    n_group=1, topk_group=1, first_k_dense_replace=1, sliding_window=32, attention_window_size=32, moe_num_experts=4, moe_k=2,
    num_heads=4, attention_heads=4, num_kv_heads=2, num_query_groups=2, multi_query=True, state_size=8, mamba_d_state=8,
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, expand=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, lru_width=64,
    output_router_logits=False, moe_layer_start_index=0, num_codebooks=1, hidden_size_per_layer_input=16, vocab_size_per_layer_input=320,
    laurel_rank=8, num_kv_shared_layers=0, moe_num_shared_experts=1, n_shared_experts=1, index_n_heads=2, index_head_dim=16, index_topk=16,
    dim_model=64, dim_head=16, dim_ff=96, n_embed=64,
)


def hugging_face(family: str, **given) -> Callable:
    def build():
        import torch
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        kind = CONFIG_MAPPING[family]
        known = kind()
        asked = {k: v for k, v in SMALL.items() if hasattr(known, k) and k not in given}
        pattern = given.pop("layer_types", None)
        if pattern is not None:
            asked["layer_types"] = list(pattern)
        elif isinstance(getattr(known, "layer_types", None), (list, tuple)):
            kinds = list(dict.fromkeys(known.layer_types))
            asked["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
            for name in ("num_hidden_layers", "num_layers", "n_layer"):
                if name in asked:
                    asked[name] = len(asked["layer_types"])
        config = kind(**{**asked, **given})
        config.use_cache = False
        model = MODEL_FOR_CAUSAL_LM_MAPPING[kind](config)

        def arguments(length: int):
            make = torch.Generator().manual_seed(2)
            ids = torch.randint(3, getattr(config, "vocab_size", 320), (2, length), generator=make)
            mask = torch.ones_like(ids)
            labels = ids.clone()
            mask[1, -length // 4:] = 0
            labels[mask == 0] = -100
            return dict(input_ids=ids, labels=labels, attention_mask=mask)

        return model, arguments, lambda model, **batch: model(**batch).loss

    return build


for _family, _options in {
    "afmoe": {}, "apertus": {}, "arcee": {}, "bert": dict(is_decoder=True), "biogpt": {}, "bitnet": {}, "bloom": {}, "codegen": {}, "cohere": {},
    "cohere2": {}, "ctrl": {}, "doge": {}, "ernie4_5": {}, "exaone4": {}, "falcon": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "gemma3n_text": {},
    "gemma4_text": {}, "glm": {}, "glm4": {}, "gpt2": {}, "gpt_bigcode": {}, "gpt_neo": dict(attention_types=[[["global", "local"], 1]]), "gpt_neox": {}, "gptj": {},
    "granite": {}, "helium": {}, "hunyuan_v1_dense": {}, "internlm3": {}, "jais2": {}, "llama": {}, "minicpm3": {}, "ministral": {}, "ministral3": {},
    "mistral": {}, "modernbert-decoder": {}, "mpt": {}, "nanochat": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": {}, "openai-gpt": {},
    "opt": {}, "persimmon": {}, "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": {}, "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {},
    "vaultgemma": {}, "xglm": {}, "youtu": {},
}.items():
    ROWS[_family] = Row("dense", hugging_face(_family, **_options))
for _family, _options in {
    "dbrx": {}, "deepseek_v2": {}, "deepseek_v3": {}, "dots1": {}, "ernie4_5_moe": {}, "flex_olmo": {}, "glm4_moe": {}, "gpt_oss": {}, "granitemoe": {},
    "granitemoeshared": {}, "hunyuan_v1_moe": {}, "jetmoe": {}, "llama4_text": {}, "longcat_flash": {}, "minimax_m2": {}, "mixtral": {}, "olmoe": {}, "phimoe": {},
    "qwen2_moe": {}, "qwen3_moe": {}, "solar_open": {},
}.items():
    ROWS[_family] = Row("moe", hugging_face(_family, **_options))
for _family, _options in {
    "bamba": {}, "falcon_h1": {}, "falcon_mamba": {}, "granitemoehybrid": {}, "jamba": {}, "lfm2": {}, "mamba": {}, "mamba2": {}, "minimax": {},
    "qwen3_next": {}, "recurrent_gemma": {}, "rwkv": {}, "zamba2": {},
}.items():
    ROWS[_family] = Row("recurrent", hugging_face(_family, **_options))


# A row's process

def measure(name: str, tokens: int) -> dict:
    """Run one row. The answer has error, streamed and all regions, reasons, peaks; or an error."""
    import copy

    import torch
    from benchmarks.gradients import largest_difference
    from benchmarks.memory import peak

    from streambp_compile import NotStreamed, explain

    torch.set_num_threads(2)
    torch.manual_seed(0)
    row = ROWS[name]
    model, arguments, loss = row.build()
    model.train()
    answer: dict = {"kind": row.kind, "exact": row.exact}

    def gradients(model, step, batch):
        model.zero_grad()
        value = step(**batch)
        value.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    double = copy.deepcopy(model).double()
    batch = arguments(LENGTH)
    start = time.perf_counter()
    try:
        truth = gradients(double, lambda **b: loss(double, **b), batch)
    except Exception as error:  # noqa: BLE001 (a model whose ops have no float64, or that does not run at all)
        answer["note"] = f"float32: {first_line(error)}"
        double = copy.deepcopy(model)
        truth = gradients(double, lambda **b: loss(double, **b), batch)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = torch.compile(lambda **b: loss(double, **b), backend="streambp", options={"chunk_size": CHUNK})
        ours = gradients(double, step, batch)
        answer["error"] = largest_difference(iter(ours), truth)
        answer["reasons"] = list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, NotStreamed)))
    answer["seconds"] = time.perf_counter() - start
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = explain(lambda **b: loss(model, **b), **arguments(LENGTH))
        answer["regions"] = sum(r.times for r in report.regions)
        answer["streamed"] = sum(r.times for r in report.regions if r.streamed)
        answer["reads"] = report.reads()
        torch._dynamo.reset()
        if tokens:
            batch = arguments(tokens)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            compiled = torch.compile(lambda **b: loss(model, **b), backend="streambp")
            compiled(**batch).backward()
            answer["peak"] = peak(lambda: compiled(**batch).backward())
            if getattr(model, "supports_gradient_checkpointing", False):
                model.gradient_checkpointing_enable()
                answer["against"] = "checkpointing"
            loss(model, **batch).backward()
            answer["eager"] = peak(lambda: loss(model, **batch).backward())
    return answer


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# The table's process

@dataclass
class Result:
    name: str
    answer: dict = field(default_factory=dict)

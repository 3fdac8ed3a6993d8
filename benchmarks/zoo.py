"""Architectures, one row each: is it exact, how much of it streams, at what cost, and what is refused why.

    python benchmarks/zoo.py                           all rows
    python benchmarks/zoo.py --only llama,mixtral      some of them, by name or by kind
    python benchmarks/zoo.py --tokens 0 --interpret    gradients alone, quickly: chunk bodies interpreted
    python benchmarks/zoo.py --save zoo                also to benchmarks/results/zoo.md

Models are small and random; those of Hugging Face are built from their configurations. Every row is a process
of its own. *Error*: the largest relative difference of a parameter's gradient from eager's in float64, at a
length and a chunk length of which neither divides the other, two sequences, the second padded where the model
takes a mask. It must stay under 1e-9, or under 1e-5 where the model itself computes in float32 inside (norms,
rotary tables and the loss of Hugging Face) or an op of it has no float64. Where such a model is so badly
conditioned that eager's own gradients move further than that when its weights are rounded to float32, the
error must stay under that movement, and the notes say so. *Streamed*: regions streamed of all regions,
occurrences counted, with those that hold no more than what enters and leaves them. *Keys*: which keys a row
of attention reads, and whether the masks prove it. *Peak*: allocator events of one float32 step at
``--tokens`` tokens, two sequences; as a part of eager's with every layer checkpointed.

With ``--interpret``, what Inductor would fuse exists in memory, so that a peak is an upper bound; a row over
its bound is measured again, compiled, and says so in its notes.

A row fails that is not exact, or whose peak is half of checkpointing's or more, whatever the report says.
Such rows are listed at the end, and their number is the exit status.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processes import first_line, last_answer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LENGTH, CHUNK = 77, 24  # of the exactness check: neither divides the other
# Bytes from which glibc takes a buffer from the system. The profiler's small blocks land in freed buffers,
# which are then too short for the next one: eager's 2048 steps of a recurrence took 20 GiB that way.
MAPPED = 4 << 20
HALF = 0.5  # of checkpointing's peak: what a row should stay under


@dataclass(frozen=True)
class Row:
    """A model to build.

    kind     dense, moe, recurrent (hybrids as well), encoder (encoder-decoders as well), speech, vision, or
             own (not of Hugging Face)
    build    length in tokens → model, the arguments of one batch, and a function from both to the loss
    exact    the largest error that passes
    unrolls  its graph grows with the length, so that no long step can be measured
    draws    it draws random numbers in training that no setting turns off, and is measured in eval mode
    """

    kind: str
    build: Callable
    exact: float = 1e-5
    unrolls: bool = False
    draws: bool = False


ROWS: dict[str, Row] = {}

# Hugging Face. What a configuration has is set from these small values; nothing else is known about a family.

SMALL = dict(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    dropout=0.0,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    activation_dropout=0.0,
    residual_dropout=0.0,
    resid_dropout=0.0,
    embedding_dropout=0.0,
    layerdrop=0.0,
    classifier_dropout=0.0,
    summary_first_dropout=0.0,
    embed_dropout=0.0,
    ffn_dropout=0.0,
    dropout_rate=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    mlp_dropout=0.0,
    head_pdrop=0.0,
    dropout_prob=0.0,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=8192,
    n_ctx=8192,
    n_inner=96,
    d_model=64,
    n_heads=4,
    n_layers=2,
    max_seq_len=8192,
    ffn_dim=96,
    num_layers=2,
    word_embed_proj_dim=64,
    rotary_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    sliding_window=32,
    attention_window_size=32,
    moe_num_experts=4,
    moe_k=2,
    moe_topk=2,
    num_heads=4,
    attention_heads=4,
    num_kv_heads=2,
    num_query_groups=2,
    multi_query=True,
    state_size=8,
    mamba_d_state=8,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=8,
    chunk_size=32,
    mamba_chunk_size=32,
    expand=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    lru_width=64,
    output_router_logits=False,
    moe_layer_start_index=0,
    num_codebooks=1,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=1024,
    laurel_rank=8,
    num_kv_shared_layers=0,
    moe_num_shared_experts=1,
    n_shared_experts=1,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=16,
    dim_model=64,
    dim_head=16,
    dim_ff=96,
    n_embed=64,
    embedding_size=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    d_ff=96,
    d_kv=16,
    num_decoder_layers=2,
    dim=64,
    hidden_dim=96,
    decoder_start_token_id=1,
    type_vocab_size=2,
    moe_intermediate_size_mlp=96,
    intermediate_size_mlp=96,
)


def hugging_face(
    family: str,
    head: str | None = None,
    *,
    batch: Callable | None = None,
    attention: str | None = None,
    experts: str | None = None,
    **given,
) -> Callable:
    """A family from its configuration.

    head       the model class, the family's causal language model by default
    batch      configuration, length → arguments; token ids, labels and a padding mask by default
    attention  which of the library's attention functions, experts which of its loops over experts; its own
               choice by default
    given      settings beside `SMALL`
    """

    def build(length: int):
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        transformers.logging.set_verbosity_error()
        configuration = CONFIG_MAPPING[family]
        config = configuration(**settings(configuration, given))
        config.use_cache = False
        if attention:
            config._attn_implementation = attention
        if experts:
            config._experts_implementation = experts
        torch.manual_seed(0)
        model = (getattr(transformers, head) if head else MODEL_FOR_CAUSAL_LM_MAPPING[configuration])(config)
        return model, (batch or texts)(config, length), lambda model, **arguments: model(**arguments).loss

    return build


def settings(configuration, given: dict) -> dict:
    """What a configuration knows of `SMALL`: two layers, or two of every kind of layer where there are
    kinds."""
    known = configuration()

    def settable(name: str) -> bool:
        found = getattr(configuration, configuration.attribute_map.get(name, name), None)
        try:
            if hasattr(known, name) and isinstance(found, property):
                setattr(configuration(), name, SMALL.get(name))  # some raise: XLNet has no longest sequence
            return hasattr(known, name)
        except (AttributeError, NotImplementedError):
            return False
        except RuntimeError:  # layers differ in it, and want to be asked one by one
            return False

    asked = {k: v for k, v in SMALL.items() if k not in given and settable(k)}
    asked |= {k: 0 for k, v in asked.items() if v == 0.0 and type(getattr(known, k)) is int}
    if "qk_rope_head_dim" in asked:  # latent attention: the part that rotates, and no groups of heads
        asked["head_dim"] = asked["qk_rope_head_dim"]
        if "num_attention_heads" in asked:
            asked["num_key_value_heads"] = asked["num_attention_heads"]
    drawn = ("dropout", "drop_path")
    rates = {k for k, v in vars(known).items() if any(d in k for d in drawn) and isinstance(v, float) and v}
    asked.update({name: 0.0 for name in rates - {*given, *asked} if settable(name)})
    kinds = list(dict.fromkeys(getattr(known, "layer_types", None) or ()))
    if kinds and settable("layer_types") and "layer_types" not in given:
        asked["layer_types"] = kinds * 2
    layers = len({**asked, **given}.get("layer_types", ()))
    if layers:
        asked.update(
            {name: layers for name in ("num_hidden_layers", "num_layers", "n_layer") if name in asked}
        )
    return {**asked, **given}


def texts(config, length: int) -> dict:
    import torch

    ids = torch.randint(
        3,
        getattr(config, "vocab_size", None) or config.get_text_config().vocab_size,
        (2, length),
        generator=torch.Generator().manual_seed(2),
    )
    mask = torch.ones_like(ids)
    mask[1, -length // 4 :] = 0
    return dict(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)


def bare(config, length: int) -> dict:
    """No padding and no mask."""
    batch = texts(config, length)
    return dict(input_ids=batch["input_ids"], labels=batch["labels"])


def left_padded(config, length: int) -> dict:
    batch = texts(config, length)
    return {name: value.flip(1) for name, value in batch.items()}


def packed(config, length: int) -> dict:
    """Three documents in a sequence, told apart by positions that start again."""
    import torch

    batch = bare(config, length)
    third = -(-length // 3)
    positions = torch.arange(length) % third
    return dict(batch, position_ids=positions.expand(2, length).contiguous())


def translations(config, length: int) -> dict:
    """A source with a mask, and a target a third as long."""
    source, target = texts(config, length), texts(config, length // 3)
    return dict(
        input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=target["labels"]
    )


def images(config, length: int) -> dict:
    """A square image of about that many patches."""
    import torch

    side = round(length**0.5) * config.patch_size
    make = torch.Generator().manual_seed(2)
    return dict(
        pixel_values=torch.randn(2, 3, side, side, generator=make),
        labels=torch.tensor([0, 1]),
        interpolate_pos_encoding=True,
    )


def frames(config, length: int) -> dict:
    """Features of frames, the second sequence padded, and a text of a sixth of their number."""
    import torch

    make = torch.Generator().manual_seed(2)
    mask = texts(config, length)["attention_mask"]
    return dict(
        input_features=torch.randn(2, length, config.feature_projection_input_dim, generator=make),
        attention_mask=mask,
        labels=torch.randint(3, config.vocab_size, (2, max(3, length // 6)), generator=make),
    )


def waves(config, length: int) -> dict:
    """Samples of sound, as many as make that many frames, and a text of a sixth of the frames."""
    import torch

    make, step = torch.Generator().manual_seed(2), math.prod(config.conv_stride)
    return dict(
        input_values=torch.randn(2, length * step + step // 2, generator=make),
        labels=torch.randint(3, config.vocab_size, (2, max(3, length // 6)), generator=make),
    )


def codes(config, length: int) -> dict:
    """Codes of sound, in each of several books."""
    import torch

    make, books = torch.Generator().manual_seed(2), config.num_codebooks
    ids = torch.randint(0, config.vocab_size - 2, (2, length, books), generator=make)
    return dict(input_ids=ids.transpose(1, 2).reshape(2 * books, length), labels=ids)


def documents(config, length: int) -> dict:
    """Words with their places on a page, and a picture of the page."""
    import torch

    make = torch.Generator().manual_seed(2)
    corner = torch.randint(0, 500, (2, length, 2), generator=make)
    size = torch.randint(1, 400, (2, length, 2), generator=make)
    return dict(
        texts(config, length),
        bbox=torch.cat((corner, corner + size), -1),
        pixel_values=torch.randn(2, 3, config.input_size, config.input_size, generator=make),
        labels=torch.randint(0, 2, (2, length), generator=make),
    )


def pictures(config, length: int) -> dict:
    """A square image, of the size that the model is made for."""
    import torch

    make, side = torch.Generator().manual_seed(2), config.image_size
    return dict(pixel_values=torch.randn(2, 3, side, side, generator=make), labels=torch.tensor([0, 1]))


def with_image(config, length: int) -> dict:
    """A text with the tokens of an image in it, of which no label is known."""
    import torch

    batch = texts(config.text_config, length)
    ids, image = batch["input_ids"], torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    image[:, 5 : 5 + IMAGE_TOKENS] = True
    ids[image] = config.image_token_id
    return dict(batch, labels=batch["labels"].masked_fill(image, -100))


def pictured(config, length: int) -> dict:
    """The same, and the image."""
    return dict(with_image(config, length), pixel_values=pixels(2, config))


def typed(config, length: int) -> dict:
    """The same, and which tokens are an image's."""
    batch = pictured(config, length)
    return dict(batch, token_type_ids=(batch["input_ids"] == config.image_token_id).long())


def grids(config, length: int) -> dict:
    """The same for a model that is given the patches of an image one after the other, and their grid."""
    import torch

    batch, vision = with_image(config, length), config.vision_config
    rows, make = int((IMAGE_TOKENS * 4) ** 0.5), torch.Generator().manual_seed(2)
    numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
    return dict(
        batch,
        pixel_values=torch.randn(2 * rows * rows, numbers, generator=make),
        image_grid_thw=torch.tensor([[1, rows, rows]] * 2),
        mm_token_type_ids=(batch["input_ids"] == config.image_token_id).int(),
    )


def tiles(config, length: int) -> dict:
    """The same, the images of both sequences as tiles of four tokens each."""
    return dict(with_image(config, length), pixel_values=pixels(2 * IMAGE_TOKENS // 4, config))


def listed(config, length: int) -> dict:
    """The same, with a list of images for each sequence."""
    return dict(with_image(config, length), pixel_values=pixels(2, config).unsqueeze(1))


def pixels(count: int, config):
    import torch

    side, make = config.vision_config.image_size, torch.Generator().manual_seed(2)
    rows, columns = side if isinstance(side, (list, tuple)) else (side, side)
    return torch.randn(count, 3, rows, columns, generator=make)


IMAGE_TOKENS = 16
IMAGE_TOKEN = 2  # which no text has
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
)


def multimodal(
    family: str,
    head: str,
    decoder: str,
    vision: dict,
    *,
    batch: Callable,
    words: dict | None = None,
    **given,
) -> Callable:
    """A family of decoders behind an encoder of images.

    words, vision  settings of the two, the decoder's beside `SMALL`
    """

    def build(length: int):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        text = dict(settings(CONFIG_MAPPING[decoder], words or {}), model_type=decoder)
        parts = dict(text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN)
        return hugging_face(family, head, batch=batch, **parts, **given)(length)

    return build


def qwen_vl(family: str, name: str, **vision) -> Callable:
    """A Qwen-VL, with settings of its encoder of images beside depth, heads and patches."""
    return multimodal(
        family,
        f"{name}ForConditionalGeneration",
        f"{family}_text",
        dict(depth=2, num_heads=2, patch_size=4, **vision),
        batch=grids,
        words=dict(rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e4)),
    )


def sized(family: str, head: str, **given) -> Callable:
    """A vision model that is built for images of about so many patches as there shall be tokens."""

    def build(length: int):
        side = dict(image_size=round(length**0.5) * 4, patch_size=4)
        return hugging_face(family, head, batch=pictures, **side, **given)(length)

    return build


DENSE = {
    "apertus": {},
    "arcee": {},
    "bert": dict(is_decoder=True),
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {},
    "cohere": {},
    "cohere2": {},
    "cpmant": {},
    "ctrl": {},
    "cwm": {},
    "diffllama": {},
    "doge": {},
    "ernie4_5": {},
    "exaone4": {},
    "falcon": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {},
    "gemma4_text": dict(head_dim=16, global_head_dim=32),
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=32),
    "gpt_neox": {},
    "gptj": {},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "internlm3": {},
    "jais2": {},
    "llama": {},
    "minicpm3": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "modernbert-decoder": {},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "openai-gpt": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "xglm": {},
    "youtu": {},
}
MOE = {
    "afmoe": {},
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2, hidden_size=64),
    ),
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "jetmoe": {},
    "llama4_text": {},
    "longcat_flash": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "solar_open": {},
}
RECURRENT = {
    "bamba": dict(attn_layer_indices=[1]),
    "falcon_h1": dict(mamba_d_ssm=128),
    "falcon_mamba": {},
    "granitemoehybrid": {},
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2),
    "lfm2": {},
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba": {},
    "mamba2": dict(num_heads=8, n_groups=1),
    "minimax": {},
    "qwen3_next": dict(experts="batched_mm"),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "rwkv": {},
    "zamba2": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
}
LOOPS = ("recurrent_gemma", "rwkv")  # over the tokens: see `Row.unrolls`
for _kind, _families in (("dense", DENSE), ("moe", MOE), ("recurrent", RECURRENT)):
    for _family, _given in _families.items():
        ROWS[_family] = Row(
            _kind, hugging_face(_family, **_given), unrolls=_family in LOOPS, draws=_family == "phimoe"
        )

# Other ways to train the same models.
ROWS |= {
    "llama, no mask": Row("dense", hugging_face("llama", batch=bare)),
    "llama, left padding": Row("dense", hugging_face("llama", batch=left_padded)),
    "llama, packed": Row("dense", hugging_face("llama", batch=packed)),
    "llama, eager attention": Row("dense", hugging_face("llama", attention="eager")),
    "qwen3, window, packed": Row(
        "dense",
        hugging_face(
            "qwen3",
            batch=packed,
            use_sliding_window=True,
            max_window_layers=1,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "gemma3_text, eager attention": Row("dense", hugging_face("gemma3_text", attention="eager")),
    "mixtral, batched experts": Row("moe", hugging_face("mixtral", experts="batched_mm")),
    "mixtral, looped experts": Row("moe", hugging_face("mixtral", experts="eager")),
    "mixtral, router loss": Row(
        "moe", hugging_face("mixtral", experts="batched_mm", output_router_logits=True)
    ),
    "deepseek_v3, batched experts": Row("moe", hugging_face("deepseek_v3", experts="batched_mm")),
    "qwen3_moe, batched experts": Row("moe", hugging_face("qwen3_moe", experts="batched_mm")),
    "gpt_oss, batched experts": Row("moe", hugging_face("gpt_oss", experts="batched_mm")),
}

ROWS |= {
    "BERT": Row("encoder", hugging_face("bert", "BertForMaskedLM")),
    "RoBERTa": Row("encoder", hugging_face("roberta", "RobertaForMaskedLM")),
    "DistilBERT": Row("encoder", hugging_face("distilbert", "DistilBertForMaskedLM")),
    "ALBERT": Row("encoder", hugging_face("albert", "AlbertForMaskedLM")),
    "DeBERTa": Row(
        "encoder",
        hugging_face(
            "deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
        ),
    ),
    "ModernBERT": Row("encoder", hugging_face("modernbert", "ModernBertForMaskedLM", local_attention=32)),
    "T5": Row(
        "encoder",
        hugging_face("t5", "T5ForConditionalGeneration", batch=translations, decoder_start_token_id=0),
    ),
    "BART": Row("encoder", hugging_face("bart", "BartForConditionalGeneration", batch=translations)),
    "ViT": Row(
        "encoder", hugging_face("vit", "ViTForImageClassification", batch=images, patch_size=4, image_size=36)
    ),
}

# Sound: the loss of connectionist temporal classification (it breaks the graph, so that it reads logits). Two
# of the layers in front of the frames, not seven.
CTC = dict(apply_spec_augment=False, ctc_zero_infinity=True, ctc_loss_reduction="mean")
FRAMES = dict(conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2)
NEIGHBOURS = dict(num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4)
ROWS |= {
    "Wav2Vec2-BERT": Row(
        "speech",
        hugging_face(
            "wav2vec2-bert", "Wav2Vec2BertForCTC", batch=frames, feature_projection_input_dim=40, **CTC
        ),
    ),
    "WavLM": Row("speech", hugging_face("wavlm", "WavLMForCTC", batch=waves, **CTC, **FRAMES, **NEIGHBOURS)),
    "MusicGen": Row(
        "speech",
        hugging_face(
            "musicgen_decoder",
            "MusicgenForCausalLM",
            batch=codes,
            num_codebooks=2,
            audio_channels=1,
            pad_token_id=1023,
        ),
    ),
    "LLaVA": Row(
        "vision",
        multimodal(
            "llava",
            "LlavaForConditionalGeneration",
            "llama",
            dict(VISION, model_type="clip_vision_model", projection_dim=32),
            batch=pictured,
        ),
    ),
    "Gemma 3, images": Row(
        "vision",
        multimodal(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "gemma3_text",
            dict(VISION, model_type="siglip_vision_model"),
            batch=typed,
            mm_tokens_per_image=IMAGE_TOKENS,
        ),
    ),
    "Qwen2-VL": Row("vision", qwen_vl("qwen2_vl", "Qwen2VL", embed_dim=32, hidden_size=64)),
    "Qwen2.5-VL": Row(
        "vision",
        qwen_vl(
            "qwen2_5_vl",
            "Qwen2_5_VL",
            hidden_size=32,
            intermediate_size=64,
            out_hidden_size=64,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
    ),
    "Qwen3-VL": Row(
        "vision",
        qwen_vl(
            "qwen3_vl",
            "Qwen3VL",
            hidden_size=32,
            intermediate_size=64,
            out_hidden_size=64,
            deepstack_visual_indexes=[0, 1],
        ),
    ),
    "InternVL": Row(
        "vision",
        multimodal(
            "internvl",
            "InternVLForConditionalGeneration",
            "qwen2",
            dict(VISION, model_type="internvl_vision", image_size=[16, 16], patch_size=[4, 4]),
            batch=tiles,
        ),
    ),
    "Idefics 3": Row(
        "vision",
        multimodal(
            "idefics3",
            "Idefics3ForConditionalGeneration",
            "llama",
            dict(VISION, model_type="idefics3_vision"),
            batch=listed,
            scale_factor=1,
        ),
    ),
    "DINOv2": Row("vision", sized("dinov2", "Dinov2ForImageClassification")),
    "LayoutLMv3": Row(
        "vision",
        hugging_face(
            "layoutlmv3",
            "LayoutLMv3ForTokenClassification",
            batch=documents,
            hidden_size=256,
            coordinate_size=32,
            shape_size=64,
            input_size=32,
            patch_size=4,
            num_labels=2,
        ),
    ),
}

# Not of Hugging Face: benchmarks/architectures.py.


def own(name: str) -> Callable:
    def build(length: int):
        import torch

        from benchmarks.architectures import ARCHITECTURES

        torch.manual_seed(0)
        model = ARCHITECTURES[name]()
        return model, model.batch(length), lambda model, **arguments: model(**arguments)

    return build


OWN = (
    "nanogpt",
    "stored mask",
    "added triangle",
    "alibi",
    "relative bias",
    "relative shift",
    "relative shift both ways",
    "learned bias",
    "sinks",
    "window",
    "chunked",
    "capped",
    "differential",
    "latent",
    "complex rotary",
    "sequence first",
    "flex",
    "packed",
    "prefix",
    "parallel",
    "sandwich",
    "post-norm",
    "in place",
    "shared layers",
    "u-net skips",
    "hyper-connections",
    "value residual",
    "shared keys",
    "layer embeddings",
    "torch encoder",
    "torch decoder",
    "own norm",
    "token-wise",
    "sorted experts",
    "masked experts",
    "looped experts",
    "one-hot experts",
    "convolution",
    "token shift",
    "linear attention",
    "gated delta",
)
for _name in OWN:
    ROWS[_name] = Row("own", own(_name), exact=1e-9, unrolls=_name == "gated delta")


# A row's process


class NotRun(Exception):
    """The model does not run at all, with or without this backend."""


def measure(name: str, tokens: int) -> dict:
    """Run one row: error, regions streamed and all, keys, reasons, peaks."""
    import torch

    torch.set_num_threads(2)
    row = ROWS[name]
    answer = exactness(row)
    torch._dynamo.reset()
    if tokens and not row.unrolls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer |= peaks(row, tokens)
    return answer


def exactness(row: Row) -> dict:
    """The error of a step's loss and gradients, and the report of its compilation."""
    import torch

    from streambp_compile import NotStreamed
    from streambp_compile.backend import Reporting
    from streambp_compile.config import Config
    from streambp_compile.reporting.report import Report

    model, batch, loss = built(row, LENGTH)
    truth, model, note = reference(model, batch, loss)
    report = Report()

    backend = Reporting(Config(chunk_size=CHUNK), report)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = gradients(
            model, torch.compile(lambda **b: loss(model, **b), backend=backend), widened(batch, model)
        )
    error, noise = largest_error(ours, truth), 0.0
    if row.exact < error:
        noise = rounding(model, lambda **b: loss(model, **b), widened(batch, model), truth)
        note = "; ".join(
            filter(
                None,
                (note, f"eager's own gradients move by {noise:.0e} when the weights are rounded to float32"),
            )
        )
    graphs = f"{len(report.split)} graphs" if len(report.split) != 1 else ""
    return dict(
        error=error,
        noise=noise,
        regions=sum(r.times for r in report.regions),
        streamed=sum(r.times for r in report.regions if r.streamed is not None or r.has_nothing_to_stream),
        keys=keys_of(report),
        reasons=list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, NotStreamed))),
        note="; ".join(filter(None, (note, graphs))),
    )


def built(row: Row, length: int):
    try:
        model, batch, loss = row.build(length)
    except Exception as error:
        raise NotRun(f"not built: {first_line(error)}") from error
    return model.train(not row.draws), batch, loss


def reference(model, batch: dict, loss: Callable):
    """Eager's loss and gradients in float64, or in float32 where an op of the model has no float64; the model
    of that precision; a note."""
    double = copy.deepcopy(model).double()
    try:
        return gradients(double, lambda **b: loss(double, **b), widened(batch, double)), double, ""
    except Exception as error:  # noqa: BLE001 (whatever the model's author did not foresee)
        note = f"in float32: {first_line(error)}"
    try:
        return gradients(model, lambda **b: loss(model, **b), batch), model, note
    except Exception as error:
        raise NotRun(f"does not run: {first_line(error)}") from error


def rounding(model, step: Callable, batch: dict, truth: list, seed: int = 0) -> float:
    """How far eager's gradients move when every weight moves by at most half a unit in float32's last place.

    No implementation of a model that computes in float32 inside can be told from another more closely than
    that.
    """
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + (2 * torch.rand_like(parameter) - 1) * 2.0**-24)
    return largest_error(gradients(model, step, batch), truth)


def widened(batch: dict, model) -> dict:
    """Inputs that are no ids, in the precision of the model."""
    dtype = next(model.parameters()).dtype
    return {
        name: value.to(dtype) if getattr(value, "is_floating_point", bool)() else value
        for name, value in batch.items()
    }


def gradients(model, step: Callable, batch: dict) -> list:
    """The loss and the gradient of every parameter, zeros where there is none."""
    import torch

    model.zero_grad()
    value = step(**batch)
    value.backward()
    return [
        value.detach(),
        *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def largest_error(found: list, expected: list) -> float:
    """Of all tensors, the largest norm of the difference over the norm of what is expected, or over a
    millionth of the largest such norm.

    Some gradients are zero in exact arithmetic (a bias of keys moves all scores of a softmax alike), and hold
    nothing but rounding.
    """
    norms = [e.double().norm().item() for e in expected]
    least = 1e-6 * max(norms)
    return max(
        (f.double() - e.double()).norm().item() / (max(norm, least) or 1.0)  # all may be zero
        for f, e, norm in zip(found, expected, norms, strict=True)
    )


def keys_of(report) -> list[str]:
    """What is proved of the keys that attention reads, once for every answer."""
    from streambp_compile.passes.ir import READS_KEYS
    from streambp_compile.reporting.region_report import proof

    found = []
    for region in report.regions:
        for schedule in filter(None, (region.forward, region.backward)):
            for sweep, body in zip(schedule.program.sweeps, schedule.bodies):
                if any(b.role in READS_KEYS for b in body.bindings):
                    found.append(proof(sweep.keys))
    return list(dict.fromkeys(found))


def peaks(row: Row, tokens: int) -> dict:
    """Bytes of one step above what is held before it, ours and eager's with checkpointing."""
    import torch

    from benchmarks.memory import peak

    model, batch, loss = built(row, tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    compiled = torch.compile(lambda **b: loss(model, **b), backend="streambp")
    compiled(**batch).backward()
    ours = peak(lambda: compiled(**batch).backward())
    checkpoint_layers(model)
    loss(model, **batch).backward()
    return dict(peak=ours, eager=peak(lambda: loss(model, **batch).backward()))


def checkpoint_layers(model) -> None:
    """Gradient checkpointing of every layer: the model's own, or around the members of its lists of
    layers."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        return
    stacks = [
        m
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and all(any(True for _ in c.parameters()) for c in m)
    ]
    inner = {
        m for stack in stacks for layer in stack for m in layer.modules() if isinstance(m, nn.ModuleList)
    }
    for layer in {layer for stack in stacks if stack not in inner for layer in stack}:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def interpret_bodies() -> None:
    """Run what Inductor would compile node by node: seconds in place of a minute for a row."""
    import torch

    from streambp_compile import internals

    class NodeByNode(torch.fx.Interpreter):
        """Runs a view as a reshape, since some kernels of a CPU return other strides than their fake ones.

        Inductor chooses all strides by itself; torch's ``aot_eager`` fails there.
        """

        def call_function(self, target, args, kwargs):
            target = torch.ops.aten.reshape.default if target == torch.ops.aten.view.default else target
            return super().call_function(target, args, kwargs)

    def interpreted(module, example_inputs, **kwargs):
        def call(args: list):
            return NodeByNode(module).boxed_run(args)

        call._boxed_call = True
        return call

    internals.inductor.compile_fx_inner = interpreted
    internals.stored_bodies.is_on = lambda: False


def serve(name: str, chosen: argparse.Namespace) -> None:
    """One row's answer as the last line of stdout."""
    import traceback

    if chosen.interpret:
        interpret_bodies()
    try:
        answer = measure(name, chosen.tokens)
    except NotRun as missing:
        answer = dict(missing=str(missing))
    except Exception as error:  # noqa: BLE001 (the table says what broke)
        traceback.print_exc()
        answer = dict(failed=first_line(error))
    print(json.dumps(answer))


# The table's process


def run(name: str, chosen: argparse.Namespace) -> dict:
    """A row in a process of its own, stopped after ``--limit`` seconds.

    An interpreted row whose peak is too high runs once more, compiled: what Inductor fuses was counted.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--row", name, "--tokens", str(chosen.tokens)]
    start = time.perf_counter()
    answer = last_answer([*command, *["--interpret"] * chosen.interpret], chosen.limit)
    if chosen.interpret and "peak" in answer and not is_half(answer):
        compiled = last_answer(command, chosen.limit)
        if "peak" in compiled:
            answer = dict(compiled, note="; ".join(filter(None, ["compiled", compiled["note"]])))
    return dict(answer, seconds=time.perf_counter() - start)


def is_exact(name: str, answer: dict) -> bool:
    bound = ROWS[name].exact
    return answer.get("error", float("inf")) <= (
        max(bound, answer.get("noise", 0.0)) if bound > 1e-9 else bound
    )


def is_streamed(answer: dict) -> bool:
    return answer.get("regions", 0) > 0 and answer["streamed"] == answer["regions"]


def is_proved(answer: dict) -> bool:
    """Are all its regions streamed, with keys that look back alone?"""
    return is_streamed(answer) and all(keys.startswith(("causal", "window")) for keys in answer["keys"])


def is_half(answer: dict) -> bool:
    return "peak" in answer and answer["peak"] < HALF * answer["eager"]


def failures(answers: dict[str, dict]) -> list[str]:
    """What is wrong with each row that fails: not exact, or a peak of half of checkpointing's or more."""
    found = []
    for name, answer in answers.items():
        if "missing" in answer:
            continue
        if not is_exact(name, answer):
            found.append(f"{name}: {answer.get('failed') or 'an error of ' + format(answer['error'], '.0e')}")
        elif "peak" in answer and not is_half(answer):
            found.append(f"{name}: {answer['peak'] / answer['eager']:.2f} of checkpointing's peak")
    return found


def table(answers: dict[str, dict]) -> str:
    """A Markdown table; every value that is not there is a dash."""
    lines = [
        [
            "architecture",
            "kind",
            "error",
            "exact",
            "streamed",
            "keys",
            "peak",
            "of checkpointing's",
            "refused, and notes",
        ]
    ]
    for name, answer in answers.items():
        lines.append(
            [
                name,
                ROWS[name].kind,
                f"{answer['error']:.0e}" if "error" in answer else "–",
                "–" if "missing" in answer else "yes" if is_exact(name, answer) else "**no**",
                f"{answer['streamed']}/{answer['regions']}" if "regions" in answer else "–",
                ", ".join(shown(keys) for keys in answer.get("keys", ())) or "–",
                f"{answer['peak'] / 2**20:.1f} MiB" if "peak" in answer else "–",
                f"{answer['peak'] / answer['eager']:.2f}" if "peak" in answer else "–",
                remarks(answer),
            ]
        )
    rule = ["---"] * 2 + ["---:"] + ["---"] + ["---:"] + ["---"] + ["---:"] * 2 + ["---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def shown(keys: str) -> str:
    """``causal, proved`` → ``causal: proved``; a window with its length."""
    return (
        re.sub(r"window of (\d+), ", r"window \1: ", keys)
        .replace("causal, ", "causal: ")
        .replace("band, ", "band: ")
    )


def remarks(answer: dict) -> str:
    texts = [shortened(reason) for reason in answer.get("reasons", ())]
    texts += [answer[key] for key in ("note", "missing", "failed") if answer.get(key)]
    return "; ".join(text.replace("|", "¦") for text in dict.fromkeys(texts))


def shortened(reason: str) -> str:
    """A refusal without what all of them say, and without the folders of the file."""
    text = reason.removeprefix("streambp cannot stream a region: ").replace("; gradients stay exact", "")
    text = re.sub(r"\S*/([\w.-]+\.py:\d+): (.*?): ", r"\1 `\2`: ", text)
    text = re.sub(r"\S*/([\w.-]+\.py:\d+)", r"\1", text)
    return text if len(text) <= 240 else text[:239] + "…"


def summary(answers: dict[str, dict]) -> str:
    """A line per kind: how many rows ran, are exact, stream altogether, with keys proved, and stay under half
    of checkpointing's peak."""
    lines = []
    for kind in dict.fromkeys(ROWS[name].kind for name in answers):
        ran = {n: a for n, a in answers.items() if ROWS[n].kind == kind and "missing" not in a}
        count = Counter()
        for name, answer in ran.items():
            count["exact"] += is_exact(name, answer)
            count["streamed"] += is_streamed(answer)
            count["proved"] += is_proved(answer)
            count["peak"] += "peak" in answer
            count["half"] += is_half(answer)
        half = (
            f", {count['half']} of {count['peak']} under half of checkpointing's peak"
            if count["peak"]
            else ""
        )
        lines.append(
            f"{kind}: {len(ran)} rows, {count['exact']} exact, {count['streamed']} with all regions "
            f"streamed, {count['proved']} of them with keys proved{half}"
        )
    return "\n".join(f"- {line}" for line in lines)


def arguments() -> argparse.Namespace:

    def some(text: str) -> list[str]:
        asked = [part.strip() for part in text.split(",") if part.strip()]
        kinds = {row.kind for row in ROWS.values()}
        unknown = [
            part
            for part in asked
            if part not in kinds and not any(name == part or name.startswith(f"{part},") for name in ROWS)
        ]
        if unknown or not asked:
            raise argparse.ArgumentTypeError(
                f"unknown row {', '.join(unknown) or text!r}; kinds are {', '.join(sorted(kinds))}, rows "
                f"{', '.join(ROWS)}"
            )
        return [
            name
            for name, row in ROWS.items()
            if any(part in (name, row.kind, name.split(",")[0]) for part in asked)
        ]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        help="length at which the peak is measured, 0 for no peak (%(default)s)",
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run chunk bodies node by node; compile those of rows whose peak is then too high",
    )
    parser.add_argument(
        "--only", type=some, default=list(ROWS), metavar="A,B,...", help="rows or kinds (all)"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for a row (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="rows that run at a time (%(default)s)")
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.tokens < 0 or chosen.limit <= 0 or chosen.jobs < 1:
        parser.error("--tokens must be 0 or more, --limit more than 0, --jobs 1 or more")
    return chosen


def main() -> int:
    chosen = arguments()
    if chosen.row:
        serve(chosen.row, chosen)
        return 0
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MAPPED))
    answers: dict[str, dict] = {}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for i, (name, answer) in enumerate(
            zip(chosen.only, pool.map(lambda name: run(name, chosen), chosen.only))
        ):
            answers[name] = answer
            print(f"[{i + 1}/{len(chosen.only)}] {name}: {json.dumps(answer)}", file=sys.stderr, flush=True)
    failed = failures(answers)
    ending = "\n".join([f"{len(failed)} of {len(answers)} rows fail", *(f"- {row}" for row in failed)])
    text = f"{table(answers)}\n\n{summary(answers)}\n\n{ending}"
    print(text)
    if chosen.save:
        import torch
        import transformers

        RESULTS.mkdir(exist_ok=True)
        command = " ".join(["python benchmarks/zoo.py", *sys.argv[1:]])
        versions = (
            f"T={chosen.tokens} for the peak; torch {torch.__version__}, transformers "
            f"{transformers.__version__}"
        )
        (RESULTS / f"{chosen.save}.md").write_text(f"`{command}`\n\n{versions}\n\n{text}\n", encoding="utf-8")
    return min(len(failed), 100)


if __name__ == "__main__":
    sys.exit(main())

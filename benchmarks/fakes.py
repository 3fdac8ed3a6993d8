"""The paper's models at real size, without memory: sources for the planner (streambp_compile/tools/plan/)."""

from __future__ import annotations

from dataclasses import dataclass

from streambp_compile.tools.plan.sources import PlannedModel, config_class, source_of_config


@dataclass(frozen=True)
class Shape:
    """A model with 8 key heads: layers, width, feed-forward width, heads of 128, whether the head is the
    embedding, whether only adapters learn, its family in transformers, its vocabulary."""

    title: str
    layers: int
    width: int
    hidden: int
    heads: int
    tied: bool = False
    lora: bool = False
    family: str = "qwen3"
    vocabulary: int = 151936

    @property
    def trained(self) -> str:
        return "lora" if self.lora else "full"

    def source(self) -> PlannedModel:
        config = config_class(self.family)(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_WIDTH,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=self.tied,
        )
        return source_of_config(config, self.title)


SHAPES = {
    s.title: s
    for s in (
        Shape("Qwen3-4B", 36, 2560, 9728, 32, tied=True),
        Shape("Qwen3-8B", 36, 4096, 12288, 32),
        Shape("Qwen3-14B", 40, 5120, 17408, 40),
        Shape("Qwen3-32B LoRA", 64, 5120, 25600, 64, lora=True),
        Shape("Llama-3.1-8B", 32, 4096, 14336, 32, family="llama", vocabulary=128256),
    )
}
KEY_HEADS, HEAD_WIDTH = 8, 128

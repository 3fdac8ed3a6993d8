"""Sizes of everything that is measured: the real ones, and tiny ones that prove the measuring code on a CPU
or on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.tables import GIB, MIB


@dataclass(frozen=True)
class Shape:
    """A Qwen3-shaped decoder. ``layers`` is the depth of the whole model, ``timed`` the depth at which steps
    are timed."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    timed: int

    def config(self, layers: int, longest: int):
        """Its transformers configuration, with ``layers`` layers, for sequences of up to ``longest``
        tokens."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_width,
            max_position_embeddings=longest,
            tie_word_embeddings=self.tied,
            use_cache=False,
            attn_implementation="sdpa",
        )


@dataclass(frozen=True)
class Scale:
    """What the parts of one run measure.

    shapes       models of the time part, the main one first; the main one is the memory part's and the
                 profile's as well
    lengths      tokens per step of the time part, in order of worth
    chunks       fixed chunk lengths of streambp, timed at ``chunk_lengths`` tokens
    cap          bytes that the memory part may use; ``first`` are its first two lengths, ``grain`` the step
                 of its search
    profiled     tokens of the profiled step
    checked      tokens of the correctness part, two lengths; ``chunk`` its chunk length, ``other_chunk``
                 another one
    width        hidden width and feed-forward width of the correctness part's models, and the width of one
                 head
    head         rows, width and words of the correctness part's head and loss
    attended     rows and keys of the attention part
    duel         model of the duel, ``duelled`` its tokens, ``kept`` a memory budget in which streambp may
                 keep all that is worth keeping
    """

    shapes: tuple[Shape, ...]
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    chunk_lengths: tuple[int, ...]
    cap: int
    first: tuple[int, int]
    grain: int
    profiled: int
    checked: tuple[int, int]
    chunk: int
    other_chunk: int
    width: tuple[int, int, int]
    head: tuple[int, int, int]
    attended: tuple[tuple[int, int], ...]
    duel: Shape
    duelled: int
    kept: str


QWEN3_8B = Shape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, tied=False, timed=4)
QWEN3_4B = Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936, tied=True, timed=4)
SMALL = Shape("small", 64, 128, 3, 4, 2, 16, 512, tied=False, timed=2)

REAL = Scale(
    shapes=(QWEN3_8B, QWEN3_4B),
    lengths=(32768, 12288, 65536, 24576, 6144),
    chunks=(2048, 4096, 8192, 1024),
    chunk_lengths=(32768, 12288),
    cap=80 * GIB,
    first=(8192, 16384),
    grain=1024,
    profiled=32768,
    checked=(1111, 1500),
    chunk=256,
    other_chunk=384,
    width=(256, 512, 64),
    head=(4096, 2048, 151936),
    attended=((2048, 32768), (4096, 32768), (8192, 32768), (4096, 8192)),
    duel=QWEN3_4B,
    duelled=27648,
    kept="40GiB",
)
TINY = Scale(
    shapes=(SMALL,),
    lengths=(320, 192),
    chunks=(64, 128),
    chunk_lengths=(320,),
    cap=12 * MIB,
    first=(128, 256),
    grain=64,
    profiled=256,
    checked=(111, 150),
    chunk=32,
    other_chunk=48,
    width=(64, 96, 16),
    head=(128, 64, 2048),
    attended=((64, 256),),
    duel=SMALL,
    duelled=256,
    kept="40MiB",
)

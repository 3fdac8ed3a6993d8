"""Real text that every machine has: the sources of Python's standard library, as bytes or as tokens of a
vocabulary trained on them."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).resolve().parents[1] / "out"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
END = "<|endoftext|>"


def python_sources() -> list[str]:
    """The text of every module of the standard library, its tests left out, in the order of their names.

    Raises FileNotFoundError where Python was installed without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(root).parts))
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in paths]
    if sum(map(len, texts)) < 1_000_000:
        raise FileNotFoundError(
            f"this Python came without the sources of its standard library (looked in {root})"
        )
    return texts


def byte_ids() -> torch.Tensor:
    """The sources as bytes: int64 ids below 256."""
    return torch.frombuffer(bytearray("\n".join(python_sources()).encode()), dtype=torch.uint8).long()


def token_ids(vocabulary: int) -> torch.Tensor:
    """The sources as int64 ids of a byte-level BPE vocabulary trained on them; both are kept under ``out/``
    for the next run.

    vocabulary  number of tokens, 300 to 65536 (ids are kept in two bytes)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not 300 <= vocabulary <= 65536:
        raise ValueError(f"the vocabulary must have 300 to 65536 tokens; got {vocabulary}")
    name = f"python-{platform.python_version()}-{vocabulary}"
    kept, described = OUT / f"{name}.npy", OUT / f"{name}.json"
    if not (kept.exists() and described.exists()):
        OUT.mkdir(exist_ok=True)
        texts = python_sources()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(texts, trainer)
        end = tokenizer.token_to_id(END)
        ids = [np.array([*tokenizer.encode(text).ids, end], dtype=np.uint16) for text in texts]
        tokenizer.save(str(described))
        partial = kept.with_suffix(
            ".partial.npy"
        )  # an interrupted run must not leave half a file under the final name
        np.save(partial, np.concatenate(ids))
        partial.rename(kept)
    return torch.from_numpy(np.load(kept).astype(np.int64))


class Batches:
    """An endless iterator over random windows of a stream of ids, each of shape [1, tokens].

    ids     1-d tensor of int64 ids
    tokens  length of a window
    seed    the same seed gives the same windows
    """

    def __init__(self, ids: torch.Tensor, tokens: int, seed: int = 0):
        if tokens > len(ids):
            raise ValueError(f"the corpus has {len(ids):,} tokens; {tokens:,} are too many for one sequence")
        self.ids, self.tokens = ids, tokens
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        start = int(torch.randint(len(self.ids) - self.tokens + 1, (1,), generator=self.generator))
        return self.ids[start : start + self.tokens].unsqueeze(0)

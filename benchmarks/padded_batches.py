"""Seconds and peak memory of a step of padded and packed batches, beside plain causal ones.

    python benchmarks/padded_batches.py --tokens 4096 --save

A small Llama of transformers takes one sequence: without a mask, with an attention mask of ones, padded
behind, and packed from equal documents by position ids. streambp and eager with every layer checkpointed
take turns, some rounds each; the table has medians. *Of plain*: of the same contender without a mask.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import zoo  # noqa: E402
from benchmarks.memory import peak  # noqa: E402
from benchmarks.tables import MIB, markdown, processor  # noqa: E402

PAGE = Path(__file__).resolve().parent / "results" / "padded-batches.md"


def model_for(tokens: int):
    import transformers

    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=4096)
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=tokens, use_cache=False)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def batches(tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(1))
    ones, plain = torch.ones_like(ids), dict(input_ids=ids, labels=ids.clone())
    found = {"plain": plain, "mask of ones": plain | dict(attention_mask=ones)}
    for part in (8, 2):
        mask = ones.clone()
        mask[:, -tokens // part :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found[f"a {part}th padded" if part > 2 else "half padded"] = dict(
            input_ids=ids, labels=labels, attention_mask=mask
        )
    for count in (4, 16):
        position_ids = torch.arange(tokens // count).repeat(count)[None]
        found[f"{count} documents packed"] = plain | dict(position_ids=position_ids)
    return found


def seconds(step: Callable, batch: dict) -> float:
    start = time.perf_counter()
    step(**batch).backward()
    return time.perf_counter() - start


def table(tokens: int, rounds: int) -> str:
    ours, eager = model_for(tokens), model_for(tokens)
    zoo.checkpoint_layers(eager)
    given = batches(tokens)
    steps = {
        "streambp": torch.compile(lambda **batch: ours(**batch).loss, backend="streambp"),
        "checkpointing": lambda **batch: eager(**batch).loss,
    }
    for step in steps.values():
        for batch in given.values():
            step(**batch).backward()
    taken = {(kind, name): [] for name in steps for kind in given}
    for _ in range(rounds):
        for kind, batch in given.items():
            for name, step in steps.items():
                taken[kind, name].append(seconds(step, batch))
    medians = {key: statistics.median(values) for key, values in taken.items()}
    rows = []
    for kind, batch in given.items():
        row = [kind]
        for name, step in steps.items():
            held = peak(lambda s=step, b=batch: s(**b).backward())
            time_of, plain = medians[kind, name], medians["plain", name]
            row += [f"{time_of:.2f}", f"{time_of / plain:.2f}", f"{held / MIB:.0f}"]
        rows.append(row)
    heads = [f"{name}: {column}" for name in steps for column in ("s", "of plain", "MiB")]
    return markdown(["batch", *heads], rows)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--tokens", type=int, default=4096)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    chosen = parse.parse_args()
    warnings.simplefilter("ignore")
    made = table(chosen.tokens, chosen.rounds)
    text = "\n\n".join(
        [
            f"`python benchmarks/padded_batches.py --tokens {chosen.tokens} --rounds {chosen.rounds} --save`",
            __doc__.split("\n\n", 2)[2].strip(),
            f"torch {torch.__version__}; {processor()}, {torch.get_num_threads()} threads.",
            made,
        ]
    )
    print(text)
    if chosen.save:
        PAGE.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Train a Qwen3-shaped model of 25M parameters on long texts, beside gradient checkpointing.

    python examples/long_context.py                             8192 tokens a step; the table within two
                                                                minutes on two cores, then training
    python examples/long_context.py --quick                     2048 tokens a step, three steps of training
    python examples/long_context.py --tokens 32768 --alone      without waiting for gradient checkpointing
    python examples/long_context.py --chunk-size 256 --steps 5

First one step each way: the loss, the largest relative difference of any parameter's gradient, the peak of
live memory above weights and gradients, and the seconds. The table is printed and the plot of live memory is
saved at once; then it trains. The table, the plot and the losses are left in ``out/``.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import matplotlib
    import torch
    from tqdm import tqdm
    from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

    from benchmarks.gradients import gradients, largest_difference
    from benchmarks.memory import live_memory
    from examples.corpus import OUT, Batches, token_ids
except ModuleNotFoundError as error:
    if error.name in ("benchmarks", "examples"):
        raise
    sys.exit(f"{error.name} is not installed; `make venv` installs it, or: pip install -e '.[examples]'")

MIB = 2**20
VOCABULARY = 12288
WARM_UP = 256  # tokens of the step before those of gradient checkpointing that count; it compiles nothing
QUICK = {"tokens": 2048, "steps": 3}


@dataclass(frozen=True)
class Method:
    """A way to take a step: a model, and the function from ids to its loss."""

    name: str
    model: PreTrainedModel
    loss_of: Callable[[torch.Tensor], torch.Tensor]

    def step(self, ids: torch.Tensor) -> float:
        """Forward and backward; gradients end up in buffers that are allocated from the second step on."""
        self.model.zero_grad(set_to_none=False)
        loss = self.loss_of(ids)
        loss.backward()
        return loss.item()

    def watched(self, ids: torch.Tensor) -> tuple[float, float, list[tuple[float, int]]]:
        """A step's seconds, its loss, and live memory over it."""
        found: list[float] = []

        def step() -> None:
            start = time.perf_counter()
            found.append(self.step(ids))
            found.append(time.perf_counter() - start)

        curve = live_memory(step)
        return found[1], found[0], curve


@dataclass(frozen=True)
class Measured:
    """One step of a method: loss, gradients of all parameters, live memory over time, and seconds
    (median)."""

    name: str
    loss: float
    gradients: list[torch.Tensor]
    curve: list[tuple[float, int]]
    seconds: float

    @property
    def peak(self) -> int:
        return max(held for _, held in self.curve)


def arguments() -> argparse.Namespace:
    def at_least(least: int) -> Callable[[str], int]:
        def number(text: str) -> int:
            value = int(text)
            if value < least:
                raise argparse.ArgumentTypeError(f"must be {least} or more, got {value}")
            return value

        return number

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=at_least(2), default=8192, help="length of a sequence (%(default)s)")
    parser.add_argument(
        "--steps", type=at_least(0), default=12, help="training steps after the comparison (%(default)s)"
    )
    parser.add_argument(
        "--chunk-size", type=at_least(1), default=None, help="tokens per chunk (chosen by streambp)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text (%(default)s)")
    parser.add_argument("--layers", type=at_least(1), default=6, help="depth of the model (%(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="of AdamW, after a short warm-up (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=1, help="timed steps of each method (%(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK['tokens']} tokens and {QUICK['steps']} steps, unless given",
    )
    parser.add_argument("--alone", action="store_true", help="do not compare with gradient checkpointing")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    chosen = parser.parse_args()
    compiler = os.environ.get("CXX", "g++")
    if not any(shutil.which(name) for name in (compiler, "g++", "c++", "clang++")):
        parser.error(
            f"torch.compile needs a C++ compiler and found none (looked for {compiler}); install g++ or "
            "clang, or set CXX"
        )
    return chosen


def build(layers: int, tokens: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=max(tokens, 32768),
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


def methods(model: PreTrainedModel, chunk_size: int | None, alone: bool) -> list[Method]:
    def loss_of(of: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: of(input_ids=ids, labels=ids).loss

    options = {} if chunk_size is None else {"chunk_size": chunk_size}
    streamed = Method("streambp", model, torch.compile(loss_of(model), backend="streambp", options=options))
    if alone:
        return [streamed]
    twin = copy.deepcopy(model)
    # the name that transformers 5 prefers, or the one that every version before knows
    getattr(twin, "activation_checkpointing_enable", twin.gradient_checkpointing_enable)()
    return [Method("gradient checkpointing", twin, loss_of(twin)), streamed]


def measure(ways: list[Method], ids: torch.Tensor, rounds: int) -> list[Measured]:
    """Warm up, then steps in turns, so that a slow moment of the machine falls on all. Each is timed, and its
    memory watched."""
    for way in ways:
        compiles = way.name == "streambp"
        print(
            f"  {'compiling and first step' if compiles else 'warming up'}: {way.name} ...",
            end=" ",
            flush=True,
        )
        start = time.perf_counter()
        way.step(ids if compiles else ids[:, :WARM_UP])
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    last: dict[str, list] = {}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            taken, *last[way.name] = way.watched(ids)
            seconds[way.name].append(taken)
    return [
        Measured(way.name, loss, gradients(way.model), curve, statistics.median(seconds[way.name]))
        for way in ways
        for loss, curve in [last[way.name]]
    ]


def table(results: list[Measured]) -> str:
    lines = [f"{'one step':24}{'loss':>12}{'gradient difference':>22}{'peak MiB':>12}{'seconds':>10}"]
    for result in results:
        first = result is results[0]
        difference = "–" if first else f"{largest_difference(result.gradients, results[0].gradients):.1e}"
        lines.append(
            f"{result.name:24}{result.loss:12.6f}{difference:>22}{result.peak / MIB:12.1f}"
            f"{result.seconds:10.2f}"
        )
    return "\n".join(lines)


def plot(results: list[Measured], title: str, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for result in results:
        seconds, held = zip(*result.curve)
        mib = [bytes_ / MIB for bytes_ in held]
        (line,) = axes.plot(
            seconds,
            mib,
            drawstyle="steps-post",
            linewidth=1,
            label=f"{result.name}: peak {result.peak / MIB:,.0f} MiB",
        )
        axes.fill_between(seconds, mib, step="post", alpha=0.25, color=line.get_color(), linewidth=0)
    axes.set(
        title=title, xlabel="seconds into the step", ylabel="live memory above weights and gradients, MiB"
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.2 * max(result.peak for result in results) / MIB)  # room for the legend
    axes.legend(loc="upper right", ncols=len(results))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def train(way: Method, batches: Batches, steps: int, learning_rate: float) -> list[float]:
    optimizer = torch.optim.AdamW(
        way.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    losses: list[float] = []
    with tqdm(total=steps, desc="training", unit="step") as bar:
        for _ in range(steps):
            start = time.perf_counter()
            ids = next(batches)
            losses.append(way.step(ids))
            torch.nn.utils.clip_grad_norm_(way.model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, {ids.numel() / (time.perf_counter() - start):,.0f} tokens/s"
            )
            bar.update()
    return losses


def main() -> None:
    chosen = arguments()
    print(f"reading the Python standard library as tokens (vocabulary of {VOCABULARY:,}) ...", flush=True)
    try:
        ids = token_ids(VOCABULARY)
        batches = Batches(ids, chosen.tokens, chosen.seed)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"long_context.py: {error}")
    model = build(chosen.layers, chosen.tokens, chosen.seed)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{len(ids):,} tokens of text; a model of {count / 1e6:.1f}M parameters; {chosen.tokens:,} tokens "
        f"a step; {torch.get_num_threads()} threads\n",
        flush=True,
    )
    OUT.mkdir(exist_ok=True)

    ways = methods(model, chosen.chunk_size, chosen.alone)
    results = measure(ways, next(batches), chosen.rounds)
    text = table(results)
    print(f"\n{text}\n")
    if len(results) > 1:
        share = results[-1].peak / results[0].peak
        print(f"Look at peak MiB: the same loss and the same gradients in {share:.0%} of the memory.")
    (OUT / "comparison.txt").write_text(text + "\n", encoding="utf-8")
    plot(
        results,
        f"One training step, {chosen.tokens:,} tokens, {count / 1e6:.0f}M parameters",
        OUT / "memory.png",
    )
    print(f"live memory over the step: {(OUT / 'memory.png').relative_to(OUT.parent)}\n", flush=True)

    streamed = ways[-1]
    del ways, results
    if chosen.steps:
        losses = train(streamed, batches, chosen.steps, chosen.learning_rate)
        rows = [f"{step},{loss:.6f}" for step, loss in enumerate(losses, 1)]
        (OUT / "loss.csv").write_text("\n".join(["step,loss", *rows]) + "\n", encoding="utf-8")
        print(
            f"loss {losses[0]:.3f} → {losses[-1]:.3f} over {chosen.steps} steps of {chosen.tokens:,} tokens"
        )


if __name__ == "__main__":
    main()

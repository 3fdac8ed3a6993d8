"""Ways to take the same training step: peak memory, time, compilation and exactness, in one table.

    python benchmarks/peers.py --tokens 8192
    python benchmarks/peers.py --tokens 8192 --methods checkpointing,streambp --rounds 5 --save t8192
    python benchmarks/peers.py --tokens 65536 --device cuda --dtype bfloat16
    python benchmarks/peers.py --tokens 8192 --published other/bin/python
    python benchmarks/peers.py --tokens 8192 --methods checkpointing,streambp,streambp:400MiB,streambp:offload

A value behind a colon is a memory budget of streambp, or of Inductor (``inductor-budget:0.3``); ``--picture``
draws time against peak. ``--published`` also runs the code that the authors of StreamBP published. It wants
an older transformers, so it gets an interpreter of its own, with
``pip install torch==2.13.0 transformers==4.51.3 trl==0.17.0 streambp==1.0``;
chunks of a third of the sequence in layers, of 100 tokens in the head.

Every method is a process of its own with cold compilation caches. All of them stay alive and wait; this
process lets one at a time take a step, round by round and every second round in reverse, so that a slow
moment of the machine falls on all alike. Between steps a process holds weights and gradients, and about a
gigabyte of libraries and compiled code: choose no more methods than the memory of the machine holds.

The model is Qwen3-shaped with random weights: vocabulary 32768, width 512, 6 layers, feed-forward 1536, 8
heads over 4 key heads of 64, head not tied; one sequence. Peak: bytes during one step (loss and backward)
above what is held before it, weights and allocated gradients; on a CPU by the events of torch's allocator
(benchmarks/memory.py), on a GPU by ``torch.cuda.max_memory_allocated``. Inductor's auto_chunker leaves short
sequences alone (it wants logits eight times the size of the head's weight, which is T >= 4096 here) and says
so nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import processes  # noqa: E402
from benchmarks.tables import MIB, markdown, processor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REFERENCE = "checkpointing"


@dataclass(frozen=True)
class Peer:
    """A method: what its row is called, whether layers are checkpointed, its compiler, how its process
    prepares torch, what wraps the model, the compiler's options."""

    title: str
    checkpointed: bool = False
    backend: str | None = None
    prepare: Callable[[], None] = lambda: None
    wrap: Callable | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def enable_auto_chunker() -> None:
    from torch._inductor import config

    if not hasattr(config, "auto_chunker"):
        raise RuntimeError("this torch has no torch._inductor.config.auto_chunker")
    config.auto_chunker.enable = True


def set_memory_budget(share: float) -> None:
    from torch._functorch import config

    config.activation_memory_budget = share


def wrap_published(model, tokens: int):
    from streambp import StreamModel

    wrapped = StreamModel(
        model,
        gradient_accumulation_steps=1,
        logits_chunk_size=100,
        stream_checkpoint=True,
        checkpoint_chunk_size=-(-tokens // 3),
    )
    wrapped.gradient_checkpointing_enable()
    return wrapped.train()


PUBLISHED = "published"
PEERS = {
    "eager": Peer("eager"),
    REFERENCE: Peer("gradient checkpointing", checkpointed=True),
    "inductor": Peer("Inductor", backend="inductor"),
    "inductor-checkpointing": Peer("Inductor + checkpointing", checkpointed=True, backend="inductor"),
    "inductor-chunker": Peer(
        "Inductor + checkpointing + auto_chunker",
        checkpointed=True,
        backend="inductor",
        prepare=enable_auto_chunker,
    ),
    PUBLISHED: Peer("StreamBP's published code", wrap=wrap_published),
    "streambp": Peer("streambp", backend="streambp"),
}
WITH_VALUE = ("streambp:BUDGET", "streambp:offload", "streambp:lossy", "inductor-budget:SHARE")
METHODS = ", ".join((*PEERS, *WITH_VALUE))
CHOSEN = ("inductor-budget:0.3",)  # of those with a value, what runs if no methods are named


def peer_of(name: str) -> Peer:
    """A method by its name, with a value behind a colon or without. Raises ValueError."""
    kind, colon, value = name.partition(":")
    if not colon and kind in PEERS:
        return PEERS[kind]
    if kind == "inductor-budget" and value:
        share = float(value)
        return Peer(
            f"Inductor, activation_memory_budget={share:g}",
            backend="inductor",
            prepare=lambda: set_memory_budget(share),
        )
    if kind == "streambp" and value:
        options = {value: True} if value in ("offload", "lossy") else {"memory_budget": value}
        return Peer(f"streambp, {value}", backend="streambp", options=options)
    raise ValueError(name)


# A method's process


class Step:
    """One training step of one method, and what can be asked about it."""

    def __init__(self, name: str, chosen: argparse.Namespace):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        peer = peer_of(name)
        if chosen.device == "cpu":
            torch.set_num_threads(chosen.threads)
        peer.prepare()
        torch.manual_seed(chosen.seed)
        config = Qwen3Config(
            vocab_size=32768,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=chosen.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=max(chosen.tokens, 32768),
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.model = Qwen3ForCausalLM(config).to(getattr(torch, chosen.dtype)).train().to(chosen.device)
        if peer.checkpointed:
            # the name that transformers 5 prefers, or the one that every version before knows
            getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)()
        if peer.wrap:
            self.model = peer.wrap(self.model, chosen.tokens)
        self.backward_inside = peer.wrap is not None  # the published code goes backward within its forward
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.ids = torch.randint(0, config.vocab_size, (1, chosen.tokens)).to(chosen.device)
        self.loss_of = self.plain_loss
        if peer.backend:
            options = dict(peer.options)
            if peer.backend == "streambp" and chosen.chunk_size:
                options["chunk_size"] = chosen.chunk_size
            self.loss_of = torch.compile(self.plain_loss, backend=peer.backend, options=options or None)
        self.chosen = chosen

    def plain_loss(self, ids):
        mask = (
            {"attention_mask": ids.new_ones(ids.shape)} if self.backward_inside else {}
        )  # the published code wants one
        return self.model(input_ids=ids, labels=ids, **mask).loss

    def synchronize(self) -> None:
        if self.chosen.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def take(self):
        """Loss and backward, gradients added to what is there."""
        loss = self.loss_of(self.ids)
        if not self.backward_inside:
            loss.backward()
        self.synchronize()
        return loss.detach()

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.synchronize()

    def release(self) -> None:
        """Hand cached device memory back: other methods' processes share the device."""
        if self.chosen.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def first(self, reference: str | None, write: bool) -> dict:
        """The first step, compilation included; its gradients are compared with a reference file, or become
        that file."""
        import torch
        from torch._dynamo.utils import counters

        start = time.perf_counter()
        loss = self.take()
        answer = {"first": time.perf_counter() - start, "loss": loss.item()}
        if "streambp" in counters:
            answer["bodies"] = counters["streambp"]["bodies"]
        found = [p.grad for p in self.model.parameters()]
        if write:
            torch.save([g.cpu() for g in found], reference)
        elif (
            reference is not None and not self.backward_inside
        ):  # its transformers draws other random weights
            from benchmarks.gradients import largest_difference

            answer["difference"] = largest_difference(
                (g.cpu() for g in found), torch.load(reference, mmap=True)
            )
        self.release()
        return answer

    def peak(self) -> dict:
        """Bytes at the highest point of a step above what is held before it."""
        import torch

        self.take()
        self.zero()
        if self.chosen.device == "cuda":
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.take()
            answer = {"peak": torch.cuda.max_memory_allocated() - held}
        else:
            from benchmarks.memory import peak

            answer = {"peak": peak(self.take)}
        self.release()
        return answer

    def seconds(self) -> dict:
        """Seconds of one step."""
        if self.chosen.device == "cuda":
            self.take()  # refills the allocator's cache, which `release` emptied
        self.zero()
        start = time.perf_counter()
        self.take()
        answer = {"seconds": time.perf_counter() - start}
        self.release()
        return answer


def serve(name: str, chosen: argparse.Namespace) -> None:
    """Answer requests, one JSON object a line, until the input ends. Errors are answers too."""
    answers = processes.answers()
    step: Step | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "first":
                step = Step(name, chosen)
                answer = step.first(request["reference"], request["write"])
            elif request["do"] == "peak":
                answer = step.peak()
            else:
                answer = step.seconds()
        except Exception as error:  # noqa: BLE001 (a method that fails, whatever the reason, is a row of the table)
            traceback.print_exc()
            answer = {"error": processes.first_line(error)}
        processes.send(answers, answer)
        if "error" in answer:
            return


# The table's process


@dataclass
class Row:
    """A method's process, and what it answered so far."""

    name: str
    worker: processes.Worker
    answers: dict = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return "error" not in self.answers

    def ask(self, **request) -> dict:
        """Send a request, wait for its answer, and remember it."""
        if not self.alive:
            return {}
        self.worker.ask(request)
        answer = self.worker.answer()
        self.answers.update(answer)
        return answer


def start(name: str, scratch: Path, flags: list[str], python: str) -> Row:
    caches = scratch / name
    caches.mkdir()
    environment = dict(
        os.environ, TORCHINDUCTOR_CACHE_DIR=str(caches), TRITON_CACHE_DIR=str(caches / "triton")
    )
    command = [python, __file__, "--method", name, *flags]
    return Row(name, processes.start(command, scratch / f"{name}.log", environment))


def measure(chosen: argparse.Namespace, flags: list[str]) -> list[Row]:
    """Run all methods. The reference goes first, because the others compare their gradients with its."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="streambp-peers-") as folder:
        scratch = Path(folder)
        reference = str(scratch / "gradients.pt") if REFERENCE in chosen.methods else None
        try:
            for name in sorted(chosen.methods, key=lambda n: n != REFERENCE):
                row = rows[name] = start(
                    name, scratch, flags, chosen.published if name == PUBLISHED else sys.executable
                )
                report(name, "first step", row.ask(do="first", reference=reference, write=name == REFERENCE))
                report(name, "memory", row.ask(do="peak"))
                if name == REFERENCE and not row.alive:
                    reference = None
            for number in range(chosen.rounds):
                for name in chosen.methods if number % 2 == 0 else reversed(chosen.methods):
                    answer = rows[name].ask(do="seconds")
                    if "seconds" in answer:
                        rows[name].seconds.append(answer["seconds"])
                    report(name, f"round {number + 1} of {chosen.rounds}", answer)
        finally:
            for row in rows.values():
                row.worker.stop()
    return [rows[name] for name in chosen.methods]


def report(name: str, what: str, answer: dict) -> None:
    """Progress, on stderr: the table alone is on stdout."""
    if answer:
        values = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in answer.items())
        print(f"{name}: {what}: {values}", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """A Markdown table; ``×`` is the median over the rounds of a method's seconds divided by checkpointing's
    in the same round."""
    heads = [
        "method",
        "peak MiB",
        "seconds",
        "× checkpointing",
        "first step s",
        "bodies",
        "loss",
        "gradient difference",
    ]
    reference = next((row.seconds for row in rows if row.name == REFERENCE), [])
    lines = []
    for row in rows:
        got = row.answers
        ratios = [a / b for a, b in zip(row.seconds, reference)]
        lines.append(
            [
                peer_of(row.name).title,
                f"{got['peak'] / MIB:.1f}" if "peak" in got else "–",
                f"{statistics.median(row.seconds):.3g}" if row.seconds else "–",
                f"{statistics.median(ratios):.2f}" if ratios and row.name != REFERENCE else "–",
                f"{got['first']:.1f}" if "first" in got else "–",
                str(got.get("bodies", "–")),
                f"{got['loss']:.6f}" if "loss" in got else "–",
                f"{got['difference']:.1e}" if "difference" in got else "–",
            ]
        )
    failed = [f"{peer_of(row.name).title} failed: {row.answers['error']}" for row in rows if not row.alive]
    return "\n".join([markdown(heads, lines), *(["", *failed] if failed else [])])


def draw(rows: list[Row], described: str, file: str) -> None:
    """Median seconds of a step against its peak; streambp's plans joined by a line."""
    from matplotlib import pyplot

    points = [
        (row, row.answers["peak"] / MIB, statistics.median(row.seconds))
        for row in rows
        if row.seconds and "peak" in row.answers
    ]
    points.sort(key=lambda point: (point[1], -point[2]))
    figure, axes = pyplot.subplots(figsize=(9, 6))
    ours = [point for point in points if point[0].name.startswith("streambp")]
    others = [point for point in points if point not in ours]
    axes.plot(*zip(*(point[1:] for point in ours)), "-", color="#1a7f4b")
    for number, (row, *place) in enumerate([*ours, *others], 1):
        color = "#1a7f4b" if number <= len(ours) else "#5f6b7a"
        axes.plot(*place, "o", color=color, label=f"{number}  {peer_of(row.name).title}")
        axes.annotate(str(number), place, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, markerscale=0.5)
    axes.set(xscale="log", xlabel="peak above weights and gradients, MiB", ylabel="seconds a step")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title(described, fontsize=8)
    figure.savefig(file, bbox_inches="tight")


def circumstances(chosen: argparse.Namespace) -> str:
    """What a reader needs to repeat or judge the table."""
    import torch
    import transformers

    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("peers.py: --device cuda, but torch finds no GPU")
    machine = (
        torch.cuda.get_device_name()
        if chosen.device == "cuda"
        else f"{processor()}, {chosen.threads} threads"
    )
    chunks = f", chunk_size {chosen.chunk_size}" if chosen.chunk_size else ""
    return (
        f"T={chosen.tokens}, {chosen.layers} layers, {chosen.dtype}, {chosen.device}{chunks}; median of "
        f"{chosen.rounds} rounds; {machine}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}"
    )


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The choices, and the part of them that a method's process is started with."""

    def some(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        try:
            list(map(peer_of, names))
        except ValueError as unknown:
            raise argparse.ArgumentTypeError(f"unknown method {unknown}; there are {METHODS}") from None
        if not names:
            raise argparse.ArgumentTypeError(f"no methods; there are {METHODS}")
        return list(dict.fromkeys(names))

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="depth of the model (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--chunk-size", type=int, default=None, help="tokens per chunk of streambp (its own choice)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    passed_on = [action for action in parser._actions if action.dest != "help"]
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each method (%(default)s)")
    parser.add_argument("--methods", type=some, default=None, metavar="A,B,...", help=f"of {METHODS} (all)")
    parser.add_argument(
        "--published",
        metavar="PYTHON",
        help="an interpreter that has StreamBP's published code: adds its row",
    )
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    parser.add_argument("--picture", metavar="FILE", help="also draw seconds against peak")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.methods is None:
        named = [name for name in PEERS if name != PUBLISHED or chosen.published]
        chosen.methods = [*named, *CHOSEN]
    if PUBLISHED in chosen.methods and not chosen.published:
        parser.error(f"the method {PUBLISHED} needs --published PYTHON")
    for name in ("tokens", "layers", "threads", "rounds"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if chosen.chunk_size is not None and chosen.chunk_size < 1:
        parser.error("--chunk-size must be 1 or more")
    flags = [
        part
        for action in passed_on
        if getattr(chosen, action.dest) is not None
        for part in (action.option_strings[0], str(getattr(chosen, action.dest)))
    ]
    return chosen, flags


def main() -> None:
    chosen, flags = arguments()
    if chosen.method:
        serve(chosen.method, chosen)
        return
    described = circumstances(chosen)
    rows = measure(chosen, flags)
    text = table(rows)
    print(f"\n{described}\n\n{text}")
    if chosen.picture:
        draw(rows, described, chosen.picture)
    if chosen.save:
        RESULTS.mkdir(exist_ok=True)
        command = " ".join(["python benchmarks/peers.py", *sys.argv[1:]])
        (RESULTS / f"{chosen.save}.md").write_text(
            f"`{command}`\n\n{described}\n\n{text}\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

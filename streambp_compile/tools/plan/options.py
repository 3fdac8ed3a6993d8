"""The command line of the planner."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

import torch

from ...config import budget_of
from ...passes.planning.devices import Device, named
from .sources import source_of
from .training import OPTIMIZERS, TRAINED
from .whole_model import Setting

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
RESERVE = 2**30  # bytes of a GPU for the CUDA context, workspaces of libraries, and fragments
DESCRIPTION = """\
Will a training step fit, with what peak, and how long will it take, beside plain checkpointing?
Nothing is downloaded or computed, and no GPU is needed: the step runs on tensors without contents,
and every allocation is counted. Seconds are estimates, by the data sheet of the device and the shares
of it that large kernels sustain (passes/planning/devices.py, cost_model.py), without the optimizer
and without communication between devices."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        "python -m streambp_compile.plan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add(
        "model",
        help="a config.json of Hugging Face, its folder, a model type (qwen3) or configuration class "
        "(Qwen3Config) of transformers, or module:function that returns a module and its inputs; the "
        "function may take batch and tokens",
    )
    add("--tokens", type=tokens_of, default=32768, help="of each sequence, such as 131072 or 128k")
    add("--batch", type=int, default=1, help="sequences")
    add("--gpu", default="H100", help="such as h200, a100-40 or rtx 4090, or cpu")
    add("--memory", help="of the device, such as 80GiB; by default all of it")
    add("--reserve", help="for the context of CUDA and workspaces of libraries, 1GiB on GPUs")
    add("--dtype", choices=list(DTYPES), help="bf16 for configurations; a function's as it is")
    add("--train", default="full", help=f"what is trained: {TRAINED}")
    add("--optimizer", default="adamw", help="; ".join(f"{k}: {v[2]}" for k, v in OPTIMIZERS.items()))
    add(
        "--shards",
        type=int,
        default=1,
        help="devices that share weights, gradients and state (FSDP2, ZeRO-3)",
    )
    add("--chunk-size", type=int, help="tokens per chunk; by default each sweep chooses")
    add_questions(add)
    return found


def add_questions(add: Callable) -> None:
    """Add options for the kind of question, and for the form of the answer."""
    add("--offload", action="store_true", help="also with layer inputs in host memory")
    add("--lossy", action="store_true", help="also with layer inputs in 8 bits: gradients are not exact")
    add("--budget", help="also the fastest plan with which training takes no more than this, such as 60GiB")
    add("--longest", action="store_true", help="the longest sequence that fits, instead of --tokens")
    add(
        "--pareto", nargs="?", const="", metavar="FILE", help="peak against time for all plans; drawn to FILE"
    )
    add(
        "--html",
        metavar="FILE",
        help="also write the page of the whole step's report; of two GPUs, both side by side",
    )
    add("--compare", metavar="GPUS", help="the same for several GPUs, separated by commas")
    add("--no-checkpointing", action="store_true", help="without the column of plain checkpointing")
    add("--json", action="store_true", help="values instead of a table, in bytes and seconds")


def tokens_of(text: str) -> int:
    """Parse a number of tokens, such as ``131072`` or ``128k``."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.replace("_", "").replace(",", ""))
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 131072 or 128k")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def bytes_of_text(name: str, text: str) -> int:
    """Parse a size in bytes. Raises ValueError for any other text."""
    try:
        found = budget_of(text)
    except ValueError:
        found = 0.0
    if isinstance(found, float) or not found:
        raise ValueError(f"{name} must be a size such as 60GiB; got {text!r}")
    return found


def settings_of(chosen: argparse.Namespace) -> list[Setting]:
    """Build one setting for each device. Raises ValueError for an unknown device, model or choice."""
    names: Sequence[str] = chosen.compare.split(",") if chosen.compare else [chosen.gpu]
    devices = [named(name.strip()) for name in names]
    source = source_of(chosen.model)
    for name in ("batch", "shards", "chunk_size"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(chosen, name)}")
    return [
        Setting(
            source,
            device,
            chosen.tokens,
            chosen.batch,
            DTYPES[chosen.dtype] if chosen.dtype else None,
            chosen.train,
            chosen.optimizer,
            chosen.shards,
            chosen.chunk_size,
        )
        for device in devices
    ]


def memory_of(chosen: argparse.Namespace, device: Device) -> tuple[int, int]:
    """Return the bytes of the device, and those of them that are set aside."""
    memory = bytes_of_text("memory", chosen.memory) if chosen.memory else device.memory
    aside = RESERVE if device.kind == "cuda" else 0
    return memory, aside if chosen.reserve is None else reserve_of(chosen.reserve)


def reserve_of(text: str) -> int:
    return 0 if text.strip() == "0" else bytes_of_text("reserve", text)

"""What each attention kernel makes of a chunk: FLOP per second forward and backward, the first call, scratch.

A chunk's queries attend to all keys before them and to their own, as the last chunk of a sequence does. Keys
are shared by several query heads. The backward is timed in two ways: for all query heads of a key head in one
call, where the kernel makes gradients of keys for each of them and adds those up, and with a call for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.on_gpu import scale as scales
from benchmarks.on_gpu.methods import NotHere
from benchmarks.on_gpu.runner import Job, Settings, why
from benchmarks.on_gpu.stage import Stage
from benchmarks.on_gpu.worker import Order
from benchmarks.tables import MIB, markdown
from streambp_compile.passes.kernels.attention import streaming

KERNELS = ("flash", "cudnn")
TOGETHER, APART = "one call", "a call for each"  # for the query heads of a key head
OURS = torch.ops.streambp


def jobs(settings: Settings) -> list[Job]:
    scale = getattr(scales, settings.scale)
    return [
        Job(kernel, tuple({"kernel": kernel, "rows": r, "keys": k} for r, k in scale.attended), 60)
        for kernel in KERNELS
    ]


class Session:
    def __init__(self, order: Order, stage: Stage):
        self.order, self.stage = order, stage
        self.shape = order.scale.shapes[0]

    def run(self, case: dict) -> Iterator[dict]:
        if self.stage.kind != "cuda":
            raise NotHere("these kernels need a GPU")
        rows, keys = case["rows"], case["keys"]
        q, grad = (self.drawn(rows, self.shape.heads) for _ in range(2))
        k, v = (self.drawn(keys, self.shape.key_heads) for _ in range(2))
        scale, start = self.shape.head_width**-0.5, keys - rows
        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        made: list[tuple] = []

        def forward() -> None:
            made[:] = [OURS.attention(q, k, v, None, True, scale, start, kernel=case["kernel"])]

        def backward() -> None:
            OURS.attention_backward_(
                grad, q, k, v, *made[0], None, True, scale, start, dk, dv, kernel=case["kernel"]
            )

        products = 2 * 2 * self.shape.heads * self.shape.head_width * rows * (start + rows / 2)
        found = {"flop": products, "forward": self.timed(forward)}
        for name, fills in ((TOGETHER, 1 << 60), (APART, 0)):
            with mock.patch.object(streaming, "GROUPS_FILL", fills):
                found[name] = self.timed(backward)
        yield found

    def drawn(self, rows: int, heads: int) -> torch.Tensor:
        """Random rows, laid out as projections leave them."""
        made = torch.randn(
            1, rows, heads, self.shape.head_width, device=self.stage.device, dtype=torch.bfloat16
        )
        return made.transpose(1, 2)

    def timed(self, call: Callable[[], None]) -> dict:
        """Seconds of the first call and of later ones, and the bytes that one takes at its peak."""
        first = self.stage.seconds(call)
        return {
            "first": first,
            "seconds": statistics.median(self.stage.seconds(call) for _ in range(7)),
            "peak": self.stage.peak(call, torch.nn.Module()),
        }


# Tables


def tables(findings: list[dict], settings: Settings) -> str:
    shape = getattr(scales, settings.scale).shapes[0]
    about = (
        f"bfloat16, {shape.heads} query heads of {shape.head_width}, {shape.key_heads} key heads; the last "
        "rows of a sequence attend to all of its keys, causally. TFLOP/s count what causality leaves, 2.5 "
        "times as much backward. Peaks hold results and scratch; *first* is the first call, with what a "
        "kernel plans."
    )
    heads = ["kernel", "rows", "keys", "call", "ms", "TFLOP/s", "first ms", "peak MiB"]
    rows = [row for f in findings if not why(f) for row in rows_of(f)]
    notes = [f"- {f['job']}, {f['case']['rows']} rows: {why(f)}" for f in findings if why(f)]
    return "\n\n".join([about, markdown(heads, rows, texts=4), *(["\n".join(notes)] if notes else [])])


def rows_of(f: dict) -> Iterator[list[str]]:
    case = f["case"]
    for name, factor in (("forward", 1.0), (TOGETHER, 2.5), (APART, 2.5)):
        measured = f[name]
        yield [
            case["kernel"],
            str(case["rows"]),
            str(case["keys"]),
            name if factor == 1.0 else f"backward, {name}",
            f"{1e3 * measured['seconds']:.2f}",
            f"{factor * f['flop'] / measured['seconds'] / 1e12:.0f}",
            f"{1e3 * measured['first']:.0f}",
            f"{measured['peak'] / MIB:.0f}",
        ]

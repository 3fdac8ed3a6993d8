"""A method's process: it gets one job, measures its cases one after another, and answers with a line per
finding.

Answers: ``{"started": i}`` before case i, ``{"found": {...}}`` for each thing measured, then ``{"finished":
i}``. A case that fails is a finding too. If the device no longer works after a failure, the process ends, and
the other cases get a new one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field

from benchmarks import processes
from benchmarks.on_gpu import scale


@dataclass(frozen=True)
class Order:
    """What a session is told beside its cases: sizes, timed rounds, the moment to stop, and what other jobs
    found before."""

    job: str
    scale: scale.Scale
    rounds: int
    stop: float
    known: list = field(default_factory=list)

    def left(self) -> float:
        """Seconds until this process should have answered everything."""
        return self.stop - time.monotonic()


def serve() -> None:
    """Answer one request from standard input. Libraries are imported before it is read, so that a process can
    be started ahead."""
    stream = processes.answers()
    import torch
    import transformers

    from benchmarks.on_gpu.stage import Stage

    transformers.logging.set_verbosity_error()
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:
        return
    if request["kind"] == "cpu":
        torch.set_num_threads(request["threads"])
    if request["interpret"]:
        from benchmarks import zoo

        zoo.interpret_bodies()
    torch.manual_seed(0)
    order = Order(
        request["job"],
        getattr(scale, request["scale"]),
        request["rounds"],
        time.monotonic() + request["seconds"],
        request["known"],
    )
    session = importlib.import_module(request["part"]).Session(order, Stage(request["kind"]))
    for number, case in enumerate(request["cases"]):
        if order.left() <= 0:
            break
        processes.send(stream, {"started": number})
        measure(session, case, stream)
        processes.send(stream, {"finished": number})


def measure(session, case: dict, stream) -> None:
    """Send the findings of one case; a failure is one of them."""
    from benchmarks.on_gpu.methods import NotHere

    broken = False
    try:
        for found in session.run(case):
            processes.send(stream, {"found": found})
    except NotHere as missing:
        processes.send(stream, {"found": {"missing": str(missing)}})
    except Exception as error:  # noqa: BLE001 (whatever the reason, it is a row of the table)
        traceback.print_exc()
        processes.send(stream, {"found": {"failed": shortened(error)}})
        broken = True
    if broken and not still_works(session):  # only here has the exception let go of the failed step's memory
        os._exit(1)


def still_works(session) -> bool:
    """Free what a failed case left, and see whether the device still answers: after an illegal access it
    never does."""
    try:
        session.stage.synchronize()
        session.stage.release()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        return False
    return True


def shortened(error: BaseException) -> str:
    """One line; of an allocator's message the part that says how much was asked for."""
    import torch

    text = processes.first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory" + text.partition("out of memory")[2].split(". GPU")[0]
    return text if len(text) <= 240 else text[:239] + "…"

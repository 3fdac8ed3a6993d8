"""A process per method: requests and answers are JSON objects, one a line, over its standard input and
output.

A method that crashes, hangs or runs out of memory ends its own process, and costs a benchmark one row.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass
class Worker:
    """A process that answers requests; start it with `start`."""

    process: subprocess.Popen
    log: Path
    lines: queue.Queue

    def ask(self, request: dict) -> None:
        """Send a request. What a dead process does not read, `answer` reports."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass

    def answer(self, seconds: float | None = None) -> dict:
        """The next answer; ``{"error": why}`` if the process ended, or took more than ``seconds`` and was
        stopped."""
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.kill()
            return {"error": f"stopped: no answer within {seconds:.0f} s", "ended": True}
        return json.loads(line) if line else {"error": self.ending(), "ended": True}

    def ending(self) -> str:
        code = self.process.wait()
        if code == -9:
            return "killed, most likely for want of memory"
        return f"ended with status {code}: {self.last_words()}"

    def last_words(self) -> str:
        return self.tail(1) or "no message"

    def tail(self, lines: int = 30) -> str:
        """The last lines of what the process and its libraries printed."""
        return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 20) -> None:
        """Let the process end by itself, and end it if it does not."""
        try:
            self.process.stdin.close()
            self.process.wait(timeout=seconds)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()


def last_answer(command: Sequence[str], seconds: float):
    """What a process of its own prints as JSON in its last line; ``{"failed": why}`` if it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {seconds:.0f} seconds"}
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        return {"failed": f"its process ended with {done.returncode}: {last[0][:200]}"}
    if "failed" in answer:
        print(done.stderr, file=sys.stderr, flush=True)
    return answer


def start(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Worker:
    """Start a worker; what it and its libraries print goes to ``log``."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return Worker(process, log, lines)


def answers() -> TextIO:
    """In a worker: where answers go. Whatever libraries print on standard output goes to standard error from
    here on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def send(stream: TextIO, answer: dict) -> None:
    print(json.dumps(answer), file=stream, flush=True)


def first_line(error: BaseException) -> str:
    """``ValueError: the first line of its message``, cut where that is very long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"

"""Refusals: reasons why something cannot be streamed, as values.

The package ``streambp_compile`` turns them into warnings or errors.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Refusal:
    """The reason why a region cannot be streamed, and a remedy for its author."""

    op: str
    reason: str
    hint: str
    where: str = ""

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.op}{at}: {self.reason}. {self.hint}"


class CannotStream(Exception):
    """An exception that carries a `Refusal` out of a pass to the pipeline, which makes it a value."""

    def __init__(self, refusal: Refusal):
        super().__init__(str(refusal))
        self.refusal = refusal


def target_name(node: Node) -> str:
    """Return the operator that computes a node; for one of several results, the operator that has these."""
    if node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), (tuple, list)):
        node = node.args[0]
    return str(node.target)


def where_of(node: Node) -> str:
    """Find the user's own line that made this node. Returns ``file:line: code``, ``file:line`` if the code is
    unknown, and an empty text if the line is."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            code = lines[i + 1] if i + 1 < len(lines) else ""
            parts = lines[i].split(", ")
            file, line = parts[0][5:].strip('"'), parts[1].removeprefix("line ")
            return f"{file}:{line}: {code}" if code else f"{file}:{line}"
    return ""


def refuse(node: Node, reason: str, hint: str) -> CannotStream:
    return CannotStream(Refusal(target_name(node), reason, hint, where_of(node)))

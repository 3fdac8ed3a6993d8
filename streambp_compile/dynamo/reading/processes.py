"""Graphs that several processes compute together: DTensors, and collectives in the user's own code.

Every process has to run the same collectives in the same order. So the cuts of such a graph, and its
chunk lengths, must not depend on anything that differs between processes: their data, their clocks, the
free memory of their devices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from ... import internals
from ...passes.ir import CannotStream, Refusal, is_equal, value_of, where_of
from ...passes.rules import communicates
from .values import fake_of


def spans_processes(nodes: Iterable[Node]) -> bool:
    """Is any of these values spread over several processes, or made by a collective?"""
    return any(internals.is_sharded(fake_of(n)) or communicates(n) for n in nodes)


def check_parts(nodes: Iterable[Node]) -> None:
    """Raise `CannotStream` for a DTensor of which one process holds more than another. The processes would
    run different numbers of chunks."""
    for node in nodes:
        if internals.is_uneven(fake_of(node)):
            raise CannotStream(
                Refusal(
                    str(node),
                    f"A dimension of this DTensor, {list(fake_of(node).shape)}, does not divide evenly "
                    "among the processes that share it, which would run different numbers of chunks",
                    "Pad tokens or the vocabulary to a multiple of the processes",
                    where_of(node),
                )
            )


def routed(nodes: Iterable[Node]) -> Node | None:
    """Find the first exchange that sends more to one process than to another, as in routing tokens to
    experts. A ring, which sends all to one process, is none. Such sizes differ between processes, and so
    would the processes' cuts and plans."""
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    for node in (n for n in nodes if n.target is exchange):
        sizes = [value_of(s) if isinstance(s, Node) else s for lists in node.args[1:3] for s in lists]
        parts = [s for s in sizes if not (isinstance(s, int) and s == 0)]
        if not all(is_equal(part, parts[0]) for part in parts):
            return node
    return None

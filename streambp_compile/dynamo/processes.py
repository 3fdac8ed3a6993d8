"""What several processes compute together: DTensors, and collectives in the user's own code.

Every process has to run the same collectives in the same order. So what such a graph is cut into, and how
long chunks are, may depend on nothing that one process has and another has not: neither on its data nor on
its clock, nor on what is free on its device.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from .. import internals
from ..passes.ir import CannotStream, Refusal, where_of
from ..passes.rules import communicates
from .values import fake_of


def spans_processes(nodes: Iterable[Node]) -> bool:
    """Is any of these values on several processes, or made by a collective?"""
    return any(internals.is_sharded(fake_of(n)) or communicates(n) for n in nodes)


def check_parts(nodes: Iterable[Node]) -> None:
    """Raises `CannotStream` for DTensors of which one process holds more than another: they would not run
    equally many chunks."""
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

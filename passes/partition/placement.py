"""Place values at full length: compute them as late as they are read, where less memory is held then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from ..ir import Program, bytes_of, is_tensor, is_view, value_of, viewed
from ..rules import is_random


def placed_late(program: Program) -> Program:
    """Delay values at full length until the sweep that reads them. Values computed from weights alone are
    always delayed: the weights are in memory in any case. Others are delayed if the operands that are held
    for them take no more memory than they do. Random numbers are drawn where they were."""
    first, ends = first_sweeps(program), last_steps_of_memory(program)
    latest = latest_steps(program, first)
    steps = {n: step for step, nodes in enumerate(program.full_length) for n in nodes}
    held = Held(program, latest)
    for node in reversed(steps):
        readers = [steps[u] for u in node.users if u in steps]
        before = (ends[a] for a in (viewed(a, steps) for a in node.all_input_nodes) if a in ends)
        late = min([*readers, first.get(node, len(program.sweeps)), *before])
        if late > steps[node] and not is_random(node) and held.may_wait(node):
            steps[node] = late
    count = len(program.full_length)
    moved = tuple(tuple(n for n in steps if steps[n] == step) for step in range(count))
    return replace(program, full_length=moved)


def last_steps_of_memory(program: Program) -> dict[Node, int]:
    """Find the last step at which each overwritten value can be read at full length."""
    return {source: at for at, sweep in enumerate(program.sweeps) for _, source in sweep.in_place}


def latest_steps(program: Program, first: Mapping[Node, int]) -> dict[Node, int]:
    """Find the last step at which each value at full length may be computed.

    first  the result of `first_sweeps`
    """
    found: dict[Node, int] = {}
    for node in (n for nodes in reversed(program.full_length) for n in reversed(nodes)):
        readers = [found[u] for u in node.users if u in found]
        found[node] = min([*readers, first.get(node, len(program.sweeps))])
    return found


def first_sweeps(program: Program) -> dict[Node, int]:
    """Find the first sweep that reads each value."""
    found: dict[Node, int] = {}
    for at, sweep in reversed(list(enumerate(program.sweeps))):
        found.update((a, at) for n in sweep.nodes for a in n.all_input_nodes)
    return found


class Held:
    """Values that stay in memory longer because a value at full length is delayed.

    roots  value at full length → the values it is computed from, back to those that must exist earlier
           (something reads them earlier, or sweeps compute them): they are held until it is computed
    """

    def __init__(self, program: Program, latest: Mapping[Node, int]):
        inputs = set(program.inputs)
        self.roots: dict[Node, frozenset[Node]] = {}
        for node in (n for nodes in program.full_length for n in nodes):
            found: set[Node] = set()
            for a in map(viewed, node.all_input_nodes):
                if latest.get(a, -1) >= latest[node]:
                    found |= self.roots[a]
                elif a not in inputs:
                    found.add(a)
            self.roots[node] = frozenset(found)

    def may_wait(self, node: Node) -> bool:
        """Do the values held for a delayed value take no more memory than the value itself? A view holds its
        base early or late."""
        longer = sum(bytes_of(value_of(n)) for n in self.roots[node] if is_tensor(n))
        return is_view(node) or is_tensor(node) and longer <= bytes_of(value_of(node))

"""Programs that run for some sequences of the batch at a time.

This module slices inputs for each turn and places its results. It makes no decisions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..passes.ir import Program, value_of
from ..regions.batch_parts import BatchParts, part_of
from .memory_layouts import has_layout, memory_like
from .rematerialisation import same_view
from .runner import Runner, Turn
from .sizes import Sizes


class InTurns:
    """A runner for the whole batch, built on one for some sequences of it."""

    def __init__(self, runner: Runner, batch: BatchParts):
        self.runner, self.batch = runner, batch
        self.over = roots(runner.program)

    def __call__(self, inputs: dict[Node, Any], owned: frozenset[Node] = frozenset()) -> list[object]:
        """Run the program for all sequences, and return its outputs. Inputs in ``owned`` may be overwritten;
        the dictionary is emptied while it runs."""
        given = dict(inputs)
        inputs.clear()
        owned = owned.intersection(self.batch.marks)  # inputs that all turns read are not overwritten
        sizes = Sizes(given, self.whole)
        memory, totals = self.memory(given, owned, sizes), dict[tuple[Node, int | None], torch.Tensor]()
        results: list[object] = []
        turns = sizes(self.batch.size) // self.batch.at_once
        for turn in range(turns):
            parts = {n: self.part(n, value, turn, turns) for n, value in given.items()}
            if turn == turns - 1:
                given.clear()
            into = {n: self.part(n, value, turn, turns) for n, value in memory.items()}
            results = self.runner(parts, owned, Turn(self.batch.sums, totals, into))
            for out, value in zip(self.runner.program.outputs, results):
                if out in into and not same_view(value, into[out]):
                    into[out].copy_(value)
        outputs = self.runner.program.outputs
        return [memory.get(o, value) if isinstance(o, Node) else value for o, value in zip(outputs, results)]

    def part(self, node: Node, value: Any, turn: int, turns: int) -> Any:
        """Slice the part of a value that a turn reads or writes; other values are shared by all turns."""
        mark = self.batch.marks.get(node)
        return value if mark is None else part_of(value, mark, turn, turns)

    def whole(self, node: Node) -> object:
        """Return the fake value of an input for all sequences, which determines the sizes of a call."""
        return self.batch.whole.get(node, value_of(node))

    def memory(
        self, given: dict[Node, Any], owned: frozenset[Node], sizes: Sizes
    ) -> dict[Node, torch.Tensor]:
        """Allocate memory for the outputs that have a part for each sequence. An output that overwrites an
        input takes the input's memory, if that is ours."""
        found: dict[Node, torch.Tensor] = {}
        for out in self.runner.program.outputs:
            if not isinstance(out, Node) or out not in self.batch.marks:
                continue
            fake, root = self.batch.whole[out], self.over.get(out)
            shape = [sizes(s) for s in fake.shape]
            if out in given:
                found[out] = given[out]
            elif root in owned and has_layout(given[root], shape, fake) and given[root].dtype == fake.dtype:
                found[out] = given[root]
            else:
                found[out] = memory_like(fake, shape)
        return found


def roots(program: Program) -> dict[Node, Node]:
    """Map each value to the input whose memory it takes over, if there is one."""
    over = dict(pair for sweep in program.sweeps for pair in sweep.in_place)
    found = {}
    for out in over:
        root = out
        while root in over:
            root = over[root]
        if root in program.inputs:
            found[out] = root
    return found

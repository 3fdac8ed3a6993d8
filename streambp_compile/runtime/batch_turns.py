"""A program that runs for some sequences of the batch at a time: what is cut for each turn, and where its
results go. Nothing is decided here."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..batch_parts import BatchParts, part_of
from ..passes.ir import Program, value_of
from .memory_layouts import has_layout, memory_like
from .rematerialisation import same_view
from .runner import Runner, Turn
from .sizes import Sizes


class InTurns:
    """A runner for the whole batch, out of one for some sequences of it."""

    def __init__(self, runner: Runner, batch: BatchParts):
        self.runner, self.batch = runner, batch
        self.over = roots(runner.program)

    def __call__(self, inputs: dict[Node, Any], owned: frozenset[Node] = frozenset()) -> list[object]:
        """Outputs of the program for all sequences. Inputs in ``owned`` may be overwritten; the dictionary is
        emptied on the way."""
        given = dict(inputs)
        inputs.clear()
        owned = owned.intersection(self.batch.marks)  # what all turns read stays as it is
        memory, totals = self.memory(given, owned), dict[tuple[Node, int | None], torch.Tensor]()
        results: list[object] = []
        for turn in range(self.batch.turns):
            parts = {n: self.part(n, value, turn) for n, value in given.items()}
            if turn == self.batch.turns - 1:
                given.clear()
            into = {n: self.part(n, value, turn) for n, value in memory.items()}
            results = self.runner(parts, owned, Turn(self.batch.sums, totals, into))
            for out, value in zip(self.runner.program.outputs, results):
                if out in into and not same_view(value, into[out]):
                    into[out].copy_(value)
        outputs = self.runner.program.outputs
        return [memory.get(o, value) if isinstance(o, Node) else value for o, value in zip(outputs, results)]

    def part(self, node: Node, value: Any, turn: int) -> Any:
        """What a turn reads or writes of a value."""
        mark = self.batch.marks.get(node)
        return value if mark is None else part_of(value, mark, turn, self.batch.turns)

    def whole(self, node: Node) -> object:
        """The fake value of an input for all sequences: what tells the sizes of a call."""
        return self.batch.whole.get(node, value_of(node))

    def memory(self, given: dict[Node, Any], owned: frozenset[Node]) -> dict[Node, torch.Tensor]:
        """Memory of the outputs with a part for each sequence: that of the input which they are written over,
        if it is ours, or new."""
        sizes, found = Sizes(given, self.whole), dict[Node, torch.Tensor]()
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
    """Value → the input whose memory it takes over, if there is one."""
    over = dict(pair for sweep in program.sweeps for pair in sweep.in_place)
    found = {}
    for out in over:
        root = out
        while root in over:
            root = over[root]
        if root in program.inputs:
            found[out] = root
    return found

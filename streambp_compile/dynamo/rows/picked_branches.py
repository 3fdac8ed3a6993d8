"""Branches on whether a mask picks a row, with the proof that they do nothing where it picks none. Dynamo
has traced the side on which a row is picked (internals/branch_tracing.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import outputs_of
from ...passes.rules import is_zeros
from ...passes.rules.forward import added_values, chosen_value, copied_value, keeps_zeros, mutated
from ...passes.zero_values import Entries, zeros_of
from ..reading.aten import inserted
from ..reading.values import fake_of, storage_of, wants_gradient

aten, streambp = torch.ops.aten, torch.ops.streambp


class DoesSomethingElse(Exception):
    """Raised where a branch may have an effect although its mask picks no row."""


def is_in_branches(node: Node) -> bool:
    return node.target in (internals.begin_branch, internals.end_branch)


def prove_branches(module: GraphModule) -> dict[str, tuple[int, ...]]:
    """Remove the calls that enclose branches, if each does nothing where no row is picked. The graph then has
    one more output for each branch, behind the others: whether a row is picked. Returns the inputs that
    only branches read: name → the indices of these branches."""
    nested = (m for m in module.modules() if isinstance(m, GraphModule) and m is not module)
    sides = [Side(end) for end in module.graph.find_nodes(op="call_function", target=internals.end_branch)]
    try:
        if any(is_in_branches(n) for m in nested for n in m.graph.nodes):
            raise DoesSomethingElse("a branch is inside a higher-order operator")
        for side in sides:
            side.check()
    except DoesSomethingElse as reason:
        internals.log.debug("a branch on picked rows stays as it is: %s", reason)
        return {}
    found = read_in_branches(module, sides)
    if sides:
        (output,) = module.graph.find_nodes(op="output")
        output.args = ((*outputs_of(module), *(side.taken() for side in sides)),)
    for node in filter(is_in_branches, reversed(module.graph.nodes)):
        module.graph.erase_node(node)
    module.recompile()
    return found


def read_in_branches(module: GraphModule, sides: Sequence[Side]) -> dict[str, tuple[int, ...]]:
    """Find the inputs with gradients that only branches read, and the indices of these branches."""
    inside: dict[Node, int] = {}
    for i, side in enumerate(sides):  # an inner branch comes before the one around it
        for node in side.nodes():
            inside.setdefault(node, i)
    given = [n for n in module.graph.find_nodes(op="placeholder") if n.users and wants_gradient(n)]
    return {
        n.name: tuple(sorted({inside[user] for user in n.users}))
        for n in given
        if all(user in inside for user in n.users)
    }


class Taken:
    """The branches that a call has taken, known after it has run."""

    flags: Sequence[torch.Tensor] = ()


class GradientIfTaken(torch.autograd.Function):
    """Identity whose gradient is None where none of some branches was taken. Code that is skipped leaves
    the ``.grad`` of its weights None, and optimizers then skip them, too."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, taken: Taken, branches: tuple[int, ...]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.taken, ctx.branches = taken, branches
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        flags = [ctx.taken.flags[i] for i in ctx.branches]
        taken = any(internals.is_fake(flag) or flag for flag in flags)  # a simulated step takes all branches
        return (gradient if taken else None), None, None


def with_gradients_if_taken(
    call: Callable, read: Mapping[str, tuple[int, ...]], branches: int, placeholders: Sequence[Node]
) -> Callable:
    """Wrap a call so that inputs of branches that were not taken get no gradient. The wrapped call drops
    its last results, one for each branch.

    read  inputs that only branches read, as `prove_branches` returns them
    """
    if not branches:
        return call
    places = {i: read[n.name] for i, n in enumerate(placeholders) if n.name in read}

    def run(*args: object) -> tuple:
        taken, given = Taken(), list(args)
        for i, among in places.items() if torch.is_grad_enabled() else ():
            given[i] = GradientIfTaken.apply(given[i], taken, among)
        results = tuple(call(*given))
        taken.flags = results[-branches:]
        return results[:-branches]

    return run


@dataclass
class Side:
    """The side of a branch on which rows are picked.

    end    the call behind it in the graph
    zeros  value → whether it is zero or false where no row is picked
    """

    end: Node

    def __post_init__(self) -> None:
        self.begin, self.before, self.after = self.end.args
        self.entries, way = zeros_of(Entries(self.mask))
        self.memory = {storage_of(n) for n in way}
        self.zeros: dict[Node, bool] = {self.mask: True}

    @property
    def mask(self) -> Node:
        return self.begin.args[0]

    def taken(self) -> Node:
        with self.begin.graph.inserting_before(self.begin):
            return inserted(self.mask, torch.any, (self.mask,))

    def nodes(self) -> Iterator[Node]:
        node = self.begin.next
        while node is not self.end:
            yield node
            node = node.next

    def check(self) -> None:
        """Raise `DoesSomethingElse` if the side may have an effect where no row is picked."""
        for node in self.nodes():
            if node.target in internals.ASSERTIONS or internals.is_hook(node):
                raise DoesSomethingElse(f"{node} is an assertion or a hook")
            written = mutated(node)
            if written is not None and not self.writes_nothing(node, written):
                raise DoesSomethingElse(f"{node} writes into a value")
        for was, now in zip(self.before, self.after):
            same = internals.describe(fake_of(was)) == internals.describe(fake_of(now))
            if not same or self.unchanged(now) is not self.unchanged(was):
                raise DoesSomethingElse(f"{now} is no longer {was}")
        for node in self.begin.graph.nodes:
            if (written := mutated(node)) is not None and storage_of(written) in self.memory:
                raise DoesSomethingElse(f"{node} writes into the mask, or into what it is made of")

    def writes_nothing(self, node: Node, written: Node) -> bool:
        value = copied_value(node)
        return self.unchanged(node if value is None else value) is self.unchanged(written)

    def unchanged(self, node: Node) -> Node:
        """Find the value that a value equals where no row is picked."""
        while True:
            choice, values = chosen_value(node), added_values(node)
            if choice is not None and self.is_zero(choice.condition):
                node = choice.where_false
            elif values is not None and self.is_zero(values[1]):
                node = values[0]
            elif values is not None and self.is_zero(values[0]):
                node = values[1]
            else:
                return node

    def is_zero(self, node: object) -> bool:
        """Is a value zero, or false, where no row is picked?"""
        if isinstance(node, Node) and node not in self.zeros:
            self.zeros[node] = self.made_of_zeros(node)
        return isinstance(node, Node) and self.zeros[node]

    def made_of_zeros(self, node: Node) -> bool:
        if node.op != "call_function":
            return False
        entries, way = zeros_of(Entries(node))
        if entries == self.entries:
            self.memory.update(map(storage_of, way))
            return True
        if node.target is operator.getitem:
            call = node.args[0]
            return call.target is streambp.picked_rows.default and self.is_zero(call.args[0][0])
        values = added_values(node)
        if values is not None:
            return all(map(self.is_zero, values))
        return is_zeros(node) or (keeps_zeros(node) and self.is_zero(node.args[0]))

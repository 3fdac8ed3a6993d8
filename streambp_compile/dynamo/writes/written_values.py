"""Values that are written into after they were made: ``mask = zeros(...); mask[rows, ends] = 1``.

Python reads such a value by its first name, or by a view of it, and sees every write since. Here every
write makes a new value, and later readers of an old name read the new value. So a value is the same
wherever it is read, and rewrites may look at its operands. Values that are still written in place are
marked, and rewrites do not look through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ... import internals
from ...passes.ir import arguments, is_view
from ...passes.rules import find_rule, form_of, functional
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, cuts_into_pieces, is_blank, is_mutable, mutated, part_of, slice_of
from ..reading.aten import inserted
from ..reading.modes import GradientModes, gradient_modes
from ..reading.values import CHANGED, fake_of, storage_of, wants_gradient
from .written_inputs import same_layout


def write_new_values(module: GraphModule) -> GraphModule:
    """Replace writes into values by new values. Values that are filled block by block are left for later,
    because `distribute_loops` reads those writes."""
    replace_writes(read_from_writers(module), lambda names: not is_filled_by_blocks(names))
    return module


def write_filled_values(module: GraphModule) -> GraphModule:
    """Replace writes into values by new values, also where values are filled block by block."""
    replace_writes(module, lambda names: True)
    return module


def replace_writes(module: GraphModule, chosen: Callable[[list[Node]], bool]) -> None:
    if any(is_mutable(node) or mutated(node) is not None for node in module.graph.nodes):
        modes = gradient_modes(module.graph)
        for names in list(written_values(module, modes)):
            if chosen(names) and not is_chain(names):
                Values(names, modes).rewrite()
        mark_changed(module)


def memory_of(node: Node) -> int | None:
    """Identify the memory of a value, or of the pieces that a split gives."""
    if node.op == "call_function" and cuts_into_pieces(node) and fake_of(node):
        return storage_of(next(iter(node.users), node))
    return storage_of(node)


def written_values(module: GraphModule, modes: GradientModes) -> Iterator[list[Node]]:
    """Yield all names of each value that is made in the graph and written into. Values are left out where
    no new value can replace every write. The first name is the value."""
    of_memory: dict[int, list[Node]] = {}
    for node in module.graph.nodes:
        memory = memory_of(node)
        if memory is not None:
            of_memory.setdefault(memory, []).append(node)
    for names in of_memory.values():
        (base, *others), known = names, set(names)
        writes = [n for n in others if is_write(n)]
        if not writes or base.op != "call_function" or len({modes[n] for n in names}) > 1:
            continue
        if all(is_name(n, known) for n in others) and all(may_put(n.args[0], base) for n in writes):
            yield names


def is_write(node: Node) -> bool:
    """Does a node write into its first operand alone, by an op that also exists without the write?"""
    target = mutated(node)
    return (
        target is not None
        and target is node.args[0]
        and functional(node.target) is not None
        and torch.Tag.inplace_view not in node.target.tags
    )


def is_name(node: Node, names: set[Node]) -> bool:
    """Is a node another name of the value that its first operand names?"""
    if not node.args or node.args[0] not in names:
        return False
    return is_write(node) or is_view(node) or cuts_into_pieces(node.args[0])


def is_chain(names: list[Node]) -> bool:
    """Is each write the only reader of the value before it (``total += part``)? Then each write is a value
    of its own as it stands, and may stay."""
    writes = [n for n in names if is_write(n)]
    earlier = [names[0], *writes[:-1]]
    return all(n.args[0] is a and list(a.users) == [n] for a, n in zip(earlier, writes))


def is_filled_by_blocks(names: list[Node]) -> bool:
    """Is a blank value filled by blocks of its rows, each copied to its place?"""
    base, *others = names
    writes = [n for n in others if is_write(n)]
    return is_blank(base) and all(form_of(n) is Form.ASSIGN and is_block(n.args[0], base) for n in writes)


def is_block(node: Node, base: Node) -> bool:
    """Is a node a slice of consecutive rows of another, or one of its rows?"""
    return node.args[:1] == (base,) and slice_of(node, fake_of(base).dim()) is not None


def may_put(name: Node, base: Node) -> bool:
    """Can new contents of a name be put into the value that it is a view of?"""
    while name is not base:
        if not is_write(name) and not has_inverse(name):
            return False
        name = name.args[0]
    return True


RESHAPES = (Part.MERGE, Part.RESHAPE, Part.SHAPED_AS)


def has_inverse(view: Node) -> bool:
    rule = find_rule(view)
    return (rule is not None and rule.put is not None) or part_of(view) in (Part.MOVE, *RESHAPES)


class Values:
    """The values that a piece of memory holds, one after the other.

    sources  view, or write → the name that it is of
    version  the number of writes so far
    found    name → the version, and the node that stands for the name in it
    """

    def __init__(self, names: list[Node], modes: GradientModes):
        self.base, self.sources = names[0], {name: name.args[0] for name in names[1:]}
        self.modes, self.version = modes, 0
        self.found: dict[Node, tuple[int, Node | None]] = {self.base: (0, self.base)}

    def rewrite(self) -> None:
        names = {self.base, *self.sources}
        forget_later_gradient(self.base)
        for node in sorted(names.union(*(name.users for name in names))):
            if node in self.sources and is_write(node):
                self.write(node)
                continue
            for name in [a for a in node.all_input_nodes if a in names]:
                node.replace_input_with(name, self.now(name, node))
            if node in self.sources:
                forget_later_gradient(node)
                self.found[node] = (self.version, node)
        for node in filter(is_write, reversed(self.sources)):
            node.graph.erase_node(node)

    def inserted(self, reader: Node, target: Callable, args: tuple, kwargs: dict | None = None) -> Node:
        """Insert a call in front of a reader. The reader may be the graph's output, which has no value
        itself."""
        like = reader if isinstance(fake_of(reader), torch.Tensor) else args[0]
        with reader.graph.inserting_before(reader):
            node = inserted(like, target, args, kwargs)
        self.modes[node] = self.modes[reader]
        return node

    def now(self, name: Node, reader: Node) -> Node:
        """Find the node that stands for a name where ``reader`` reads it."""
        version, node = self.found[name]
        if version == self.version and node is not None:
            return node
        node = self.now(self.sources[name], reader)
        if not is_write(name):
            node = self.inserted(reader, name.target, (node, *name.args[1:]), dict(name.kwargs))
        if self.modes[reader] == self.modes[self.base]:  # else it is this reader's own
            self.found[name] = (self.version, node)
        return node

    def write(self, node: Node) -> None:
        """Replace a write by a new value, of which the write changes all or a part."""
        name = self.sources[node]
        args, kwargs = map_arg(
            ((name, *node.args[1:]), node.kwargs),
            lambda a: self.now(a, node) if a in self.found else a,
        )
        if form_of(node) is Form.ASSIGN:  # a copy: its source may be written into later
            new = self.inserted(node, torch.ops.aten.clone.default, (args[1],))
        else:
            new = self.inserted(node, functional(node.target), args, kwargs)
        new = self.as_written(node, new, args[0])
        while name is not self.base:
            source = self.sources[name]
            if not is_write(name):
                new = self.put_back(node, name, self.now(source, node), new)
            name = source
        if fake_of(self.base).is_contiguous() and not fake_of(new).is_contiguous():
            new = self.inserted(node, torch.ops.aten.contiguous.default, (new,))
        self.version += 1
        self.found[self.base] = (self.version, new)
        self.found[node] = (-1, None)

    def as_written(self, like: Node, new: Node, old: Node) -> Node:
        """Convert a value to the dtype, shape and device of the value that it replaces."""
        wanted, given = fake_of(old), fake_of(new)
        if given.device != wanted.device:
            new = self.inserted(like, torch.ops.aten.to.device, (new, wanted.device, wanted.dtype))
        elif given.dtype != wanted.dtype:
            new = self.inserted(like, torch.ops.aten.to.dtype, (new, wanted.dtype))
        if tuple(given.shape) == tuple(wanted.shape):
            return new
        if all(isinstance(size, int) for size in wanted.shape):
            return self.inserted(like, torch.ops.aten.expand.default, (new, list(wanted.shape)))
        # symbols must come from a node to be traced
        return self.inserted(like, torch.ops.aten.expand_as.default, (new, old))

    def put_back(self, like: Node, view: Node, source: Node, new: Node) -> Node:
        """Insert the base of a view, with new numbers where the view has them."""
        rule = find_rule(view)
        if rule is not None and rule.put is not None:
            return self.inserted(like, rule.put, (source, new, *view.args[1:]))
        if part_of(view) in RESHAPES:
            return self.inserted(like, torch.ops.aten.reshape_as.default, (new, source))
        given = arguments(view)
        if "dims" not in given:
            return self.inserted(like, view.target, (new, *view.args[1:]))
        dims = [d % len(given["dims"]) for d in given["dims"]]
        back = [dims.index(d) for d in range(len(dims))]
        return self.inserted(like, torch.ops.aten.permute.default, (new, back))


def forget_later_gradient(node: Node) -> None:
    """Detach the fake value of a node whose operands have no gradient. Dynamo's fake value may have the
    gradient of a later write, which the new value does not have."""
    if not wants_gradient(node) or not isinstance(node.target, torch._ops.OpOverload):
        return
    args, kwargs = map_arg((node.args, node.kwargs), fake_of)
    with internals.faked(fake_of(node)):
        if not node.target(*args, **kwargs).requires_grad:
            node.meta["example_value"] = fake_of(node).detach()


def read_from_writers(module: GraphModule) -> GraphModule:
    """Let later readers of a value read the result of a write that stays."""
    place = {n: i for i, n in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = mutated(node)
        if target is not None and target.op == "call_function" and is_result(node, target):
            target.replace_all_uses_with(node, lambda user, at=place[node]: place[user] > at)
    return module


def is_result(node: Node, target: Node) -> bool:
    """Does a write return the value that it writes into?"""
    made, written = fake_of(node), fake_of(target)
    same = storage_of(node) is not None and storage_of(node) == storage_of(target)
    return same and same_layout(made, written)


def mark_changed(module: GraphModule) -> None:
    """Mark values whose memory is written into after they were made."""
    last: dict[int | None, int] = {}
    for i, node in enumerate(module.graph.nodes):
        target = mutated(node)
        written = [target] if target is not None else node.all_input_nodes if is_mutable(node) else []
        last.update({memory_of(n): i for n in written})
    for i, node in enumerate(module.graph.nodes):
        node.meta[CHANGED] = last.get(memory_of(node), -1) > i and memory_of(node) is not None

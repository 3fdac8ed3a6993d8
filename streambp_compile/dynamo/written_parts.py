"""Values that are changed part by part, and read in between: ``x[..., i, :i] = row + row @ x[..., :i, :i]``.

Forward substitution inside the blocks of a delta rule is written so. Here every write makes a new value, and
what reads the old one afterwards reads that, so that a value is what it is wherever it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..passes.ir import is_view
from ..passes.rules import find_rule, form_of, functional
from ..passes.rules.facets import Form
from ..passes.rules.forward import mutated
from .aten import inserted
from .block_splits import may_split
from .modes import is_switch
from .values import fake_of, storage_of


def write_parts(module: GraphModule) -> GraphModule:
    """Make new values of what is written in part, in graphs that cut tokens into blocks."""
    if any(may_split(node) for node in module.graph.nodes):
        for names in list(changed_in_part(module)):
            Values(names).rewrite()
    return module


def changed_in_part(module: GraphModule) -> Iterator[list[Node]]:
    """All names of the memory of each value that is made in the graph and written in parts, known ones. The
    first name is the value."""
    of_memory: dict[int, list[Node]] = {}
    for node in module.graph.nodes:
        memory = storage_of(node)
        if memory is not None:
            of_memory.setdefault(memory, []).append(node)
    for names in of_memory.values():
        base, *others = names
        parted = any(is_write(n) and is_view(n.args[0]) for n in others)
        known = all(n.args and n.args[0] in names and (is_view(n) or is_write(n)) for n in others)
        if parted and known and base.op == "call_function" and not is_switched(base, names[-1]):
            if all(may_put(n.args[0], base) for n in others if is_write(n)):
                yield names


def is_write(node: Node) -> bool:
    """Does a node write into its first operand alone, as an op does that gives the result as a new value?"""
    target = mutated(node)
    return target is not None and target is node.args[0] and functional(node.target) is not None


def may_put(name: Node, base: Node) -> bool:
    """Can new numbers of a name be put into the value that it is of?"""
    while name is not base:
        if not is_write(name) and put_of(name) is None:
            return False
        name = name.args[0]
    return True


def put_of(node: Node) -> torch._ops.OpOverload | None:
    """The op that puts new numbers into what a view is of."""
    found = find_rule(node)
    return None if found is None else found.put


def is_switched(first: Node, last: Node) -> bool:
    """Does the mode of gradients change between two nodes?"""
    node = first
    while node is not last:
        if is_switch(node):
            return True
        node = node.next
    return False


class Values:
    """The values that a piece of memory holds, one after the other.

    sources  view, or write → the name that it is of
    version  how many writes there were
    found    name → a node that stands for it, and in which version
    """

    def __init__(self, names: list[Node]):
        self.base, self.sources = names[0], {name: name.args[0] for name in names[1:]}
        self.version = 0
        self.found: dict[Node, tuple[int, Node | None]] = {self.base: (0, self.base)}

    def rewrite(self) -> None:
        names = {self.base, *self.sources}
        readers = {u for name in names for u in name.users}
        for node in [n for n in self.base.graph.nodes if n in readers or n in names]:
            if node in self.sources and is_write(node):
                self.write(node)
                continue
            for name in [a for a in node.all_input_nodes if a in names]:
                node.replace_input_with(name, self.now(name, node))
            if node in self.sources:
                self.found[node] = (self.version, node)
        for node in filter(is_write, reversed(self.sources)):
            node.graph.erase_node(node)

    def now(self, name: Node, reader: Node) -> Node:
        """What stands for a name where a node reads it."""
        version, node = self.found[name]
        if version == self.version and node is not None:
            return node
        node = self.now(self.sources[name], reader)
        if not is_write(name):
            with reader.graph.inserting_before(reader):
                node = inserted(name, name.target, (node, *name.args[1:]))
        self.found[name] = (self.version, node)
        return node

    def write(self, node: Node) -> None:
        """The new value, of which a write changes a part."""
        name = self.sources[node]
        with node.graph.inserting_before(node):
            args, kwargs = map_arg(
                ((name, *node.args[1:]), node.kwargs),
                lambda a: self.now(a, node) if a in self.found else a,
            )
            new = (
                assigned(node, *args)
                if form_of(node) is Form.ASSIGN
                else inserted(node, functional(node.target), args, kwargs)
            )
            while name is not self.base:
                source = self.sources[name]
                if not is_write(name):
                    new = inserted(node, put_of(name), (self.now(source, node), new, *name.args[1:]))
                name = source
        self.version += 1
        self.found[self.base] = (self.version, new)
        self.found[node] = (-1, None)


def assigned(like: Node, old: Node, new: Node, *_more: object) -> Node:
    """A value as it stands in the place of another: in its dtype and shape."""
    if fake_of(new).dtype != fake_of(old).dtype:
        new = inserted(like, torch.Tensor.to, (new, fake_of(old).dtype))
    shape = fake_of(old).shape
    if all(isinstance(size, int) for size in shape):
        return inserted(like, torch.Tensor.expand, (new, shape))
    return inserted(like, torch.Tensor.expand_as, (new, old))  # a symbol outside a node has no tracer

"""Loops over the blocks of a sequence that Dynamo has unrolled: their iterations and states.

Iteration i consists of the nodes that are computed from block i and from iteration i - 1. All iterations
have to do the same, node by node.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...passes.ir import ancestors, arguments, draws_random, hint
from ...passes.phases import check_time
from ...passes.rules.forward import cuts_into_pieces, is_blank, mutated, slice_of
from ..reading.modes import is_switch
from ..reading.token_axes import SHORTEST_STREAMED
from ..reading.values import fake_of, is_parameter, storage_of


@dataclass(frozen=True)
class Sliced:
    """A value that is split into blocks of ``length`` rows along ``dim``. Length 0: into single rows,
    without that dimension."""

    base: Node
    dim: int
    length: int


@dataclass(frozen=True)
class State:
    """A value that each iteration reads from the one before it. ``source`` is its position in the
    iteration, or the sliced value whose previous block it is. ``initial`` takes its place in the first
    iteration."""

    source: int | Sliced
    initial: Node


@dataclass(frozen=True)
class Loop:
    """A loop that was unrolled.

    pieces   node → the value that it is a block of, and the number of the block
    steps    the nodes of each iteration; equal positions do the same. None: the last one lacks it
    states   values that iterations pass on
    written  values that are written block by block → the position of the value that is written
    """

    pieces: Mapping[Node, tuple[Sliced, int]]
    steps: Sequence[Sequence[Node | None]]
    states: Sequence[State]
    written: Mapping[Sliced, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.steps)

    @functools.cached_property
    def nodes(self) -> frozenset[Node]:
        return frozenset(n for step in self.steps for n in step if n is not None)

    @functools.cached_property
    def template(self) -> list[Node]:
        """Nodes of the second iteration. Unlike in the first, states differ there from values that are the
        same for all."""
        return [n for n in self.steps[1] if n is not None]

    @functools.cached_property
    def read(self) -> dict[Node, int | Sliced | State]:
        """Meaning of nodes for the second iteration: a block, a position, or a state."""
        blocks = {n: key for n, (key, i) in self.pieces.items() if i == 1}
        own = {n: p for p, n in enumerate(self.template)}
        before = {n: s for s in self.states for n in self.left_by_first(s)}
        return {**blocks, **own, **before}

    def left_by_first(self, state: State) -> list[Node | None]:
        if isinstance(state.source, int):
            return [self.steps[0][state.source]]
        return [n for n, piece in self.pieces.items() if piece == (state.source, 0)]

    def operand(self, node: Node) -> int | Sliced | State | Node:
        """Classify an operand of the template: a position, a block, a state, or a node that all iterations
        read."""
        return self.read.get(node, node)

    def results(self) -> set[int]:
        """Collect the positions that are read after the loop, and those that it writes block by block."""
        read = {
            p
            for step in self.steps
            for p, n in enumerate(step)
            if n is not None and any(u not in self.nodes for u in n.users)
        }
        return read | set(self.written.values())


def find_loop(graph: Graph, tried: set[tuple]) -> Loop | None:
    """Find the first loop of a graph whose iterations pass on a state. ``tried`` collects the groups of
    values that were searched, so that none is searched twice."""
    names = Names()
    for group in groups(sliced_values(graph)):
        name = tuple(sorted(f"{key.base} {key.dim} {key.length}" for key in group))
        if name in tried:
            continue
        tried.add(name)
        pieces = {n: (key, i) for key, blocks in group.items() for i, same in blocks.items() for n in same}
        loop = Matching(graph, pieces, len(next(iter(group.values()))), names).matched()
        if loop is not None and loop.states and is_closed(loop):
            return loop
    return None


Blocks = dict[int, list[Node]]


def groups(found: Mapping[Sliced, Blocks]) -> Iterator[dict[Sliced, Blocks]]:
    """Yield the values that one loop may read: split into equally many blocks, and none computed from
    another's. They are the first such values, or the last: a projection of queries, keys and values that is
    split into three is no block of a loop over three."""
    for count in sorted({len(blocks) for blocks in found.values()}, reverse=True):
        for select in (independent, final):
            left = {key: blocks for key, blocks in found.items() if len(blocks) == count}
            while left:
                group = select(left)
                yield group
                left = {key: blocks for key, blocks in left.items() if key not in group}


def sliced_values(graph: Graph) -> dict[Sliced, Blocks]:
    """Find all values of inputs that are split into equal blocks, each of which is read. Returns the nodes
    of each block by its number. Weights are left out: their parts are those of layers."""
    found: dict[Sliced, Blocks] = {}
    of_inputs: set[Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and not is_parameter(fake_of(node))
        if given or not of_inputs.isdisjoint(node.all_input_nodes):
            of_inputs.add(node)
        for key, i in blocks_of(node):
            if key.base in of_inputs or is_blank(key.base):
                found.setdefault(key, {}).setdefault(i, []).append(node)
    return {key: blocks for key, blocks in found.items() if is_whole(key, blocks)}


def is_whole(key: Sliced, blocks: Blocks) -> bool:
    rows, count = fake_of(key.base).shape[key.dim], len(blocks)
    return count > 1 and set(blocks) == set(range(count)) and rows == count * (key.length or 1)


def blocks_of(node: Node) -> Iterator[tuple[Sliced, int]]:
    """Yield the value that a node is a block of, and the block's number. Blocks are ``x[:, a:b]``, ``x[:,
    i]``, or one of ``x.split(n, 1)``."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return
    if node.target is operator.getitem and cuts_into_pieces(source):
        base, fakes = source.args[0], fake_of(source)
        dim = arguments(source).get("dim", 0) % fake_of(base).dim()
        if fakes is not None and isinstance(node.args[1], int):
            lost = fakes[0].dim() < fake_of(base).dim()
            yield Sliced(base, dim, 0 if lost else hint(fakes[0].shape[dim])), node.args[1]
    elif isinstance(fake_of(source), torch.Tensor):
        part = slice_of(node, fake_of(source).dim())
        if part is None or type(part.start) is not int or part.start < 0:
            return
        if part.lost:
            yield Sliced(source, part.dim, 0), part.start
        elif part.start or part.stop is not None:
            rows = fake_of(node).shape[part.dim]
            if isinstance(rows, int) and rows and part.start % rows == 0:
                yield Sliced(source, part.dim, rows), part.start // rows


def independent(group: Mapping[Sliced, Blocks]) -> dict[Sliced, Blocks]:
    """Select the values of a group that are not computed from blocks of others."""
    graph = next(iter(group)).base.graph
    bases = {n: key.base for key, blocks in group.items() for same in blocks.values() for n in same}
    made, written = set(bases), set[Node | None]()
    for node in graph.nodes:
        if not made.isdisjoint(node.all_input_nodes) or not written.isdisjoint(node.all_input_nodes):
            made.add(node)
            written.add(bases.get(mutated(node)))
    return {key: blocks for key, blocks in group.items() if key.base not in made}


def final(group: Mapping[Sliced, Blocks]) -> dict[Sliced, Blocks]:
    """Select the values of a group from whose blocks no others are computed."""
    graph = next(iter(group)).base.graph
    bases = {n: key.base for key, blocks in group.items() for same in blocks.values() for n in same}
    needed, read = set(bases.values()), set[Node]()
    for node in reversed(graph.nodes):
        if node in needed or bases.get(mutated(node)) in read:
            needed.update((node, *node.all_input_nodes))
            read.update(node.all_input_nodes)
    return {
        key: blocks for key, blocks in group.items() if needed.isdisjoint(itertools.chain(*blocks.values()))
    }


def is_closed(loop: Loop) -> bool:
    """Can a loop be replaced as a whole? It can if all that reads it comes after its last node, and if its
    states keep their kind. In between there is no switch of modes, no random number of its own, and no
    write except into values that the loop has made."""
    first, last = min(loop.nodes), max(loop.nodes)
    node = first
    while node is not last.next:
        if is_switch(node) or (node in loop.nodes and draws_random(node)) or not may_write(node, loop):
            return False
        node = node.next
    readers = [u for n in loop.nodes for u in n.users if u not in loop.nodes]
    states = all(fits(loop, s) for s in loop.states)
    return states and all(last < u for u in readers) and all(is_output(loop, key) for key in loop.written)


def may_write(node: Node, loop: Loop) -> bool:
    """Does a node write into nothing, into a value that it alone reads, or into an output of the loop?"""
    target = mutated(node)
    if target is None:
        return True
    if target in loop.pieces:
        return node in loop.nodes and loop.pieces[target][0] in loop.written
    same = [n for n in loop.nodes if n < node and storage_of(n) == storage_of(target)]
    return same == [target] and list(target.users) == [node]


def fits(loop: Loop, state: State) -> bool:
    """Does a state have the same shape and dtype from the first iteration on?"""
    first, later = fake_of(state.initial), fake_of(loop.left_by_first(state)[0])
    if not isinstance(first, torch.Tensor) or not isinstance(later, torch.Tensor):
        return False
    return first.shape == later.shape and first.dtype == later.dtype


def is_output(loop: Loop, key: Sliced) -> bool:
    """Is a value that the loop writes still blank before it, and read only after it?"""
    last, blocks = max(loop.nodes), [n for n, (k, _) in loop.pieces.items() if k == key]
    written = all(is_write(u) and u.args[0] is n for n in blocks for u in n.users)
    return is_blank(key.base) and written and all(u in blocks or last < u for u in key.base.users)


def is_over_tokens(loop: Loop) -> bool:
    """Is each iteration one row of a sequence that an input has as it is? Blocks that a reshape has made of
    the rows are no tokens."""
    keys = {key for key, _ in loop.pieces.values()}
    if any(key.length > 1 for key in keys) or loop.count < SHORTEST_STREAMED:
        return False
    inputs = next(iter(keys)).base.graph.find_nodes(op="placeholder")
    given = {size for n in inputs if not is_parameter(fake_of(n)) for size in sizes_of(n)}
    made_of = ancestors(key.base for key in keys)
    return loop.count in given and not any(makes_blocks(n, loop.count, given) for n in made_of)


def makes_blocks(node: Node, count: int, given: Container[int]) -> bool:
    """Does a reshape split one of the given sizes into this many blocks?"""
    new = sizes_of(node)
    return any(
        size in given
        and size not in new
        and size % count == 0
        and sizes_of(a).count(count) < new.count(count)
        for a in node.all_input_nodes
        for size in sizes_of(a)
    )


def sizes_of(node: Node) -> list[int]:
    fake = fake_of(node)
    return list(map(hint, fake.shape)) if isinstance(fake, torch.Tensor) else []


def is_write(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


class Names:
    """Names of values, equal for those that are computed alike. All searches for loops in a graph share
    them."""

    def __init__(self) -> None:
        self.names: dict[Node, int] = {}
        self.numbers: dict[str, int] = {}

    def of(self, node: Node) -> int | Node:
        """Return the name of a value that is of no block. A value that may be unlike all others is returned
        itself."""
        if node.op not in ("call_function", "call_method") or mutated(node) or draws_random(node):
            return node
        if any(mutated(u) is node for u in node.users):
            return node
        if node not in self.names:
            args = map_arg((node.args, node.kwargs), lambda a: f"<{self.of(a)}>")
            self.names[node] = self.numbers.setdefault(f"{node.target} {args}", len(self.numbers))
        return self.names[node]


class Matching:
    """Matches the iterations over the same pieces, node by node.

    at        node → its iteration
    position  node → its position in that iteration
    reader    the iteration that is being matched
    """

    def __init__(self, graph: Graph, pieces: Mapping[Node, tuple[Sliced, int]], count: int, names: Names):
        self.pieces, self.count = pieces, count
        self.at: dict[Node, int] = {}
        self.position: dict[Node, int] = {}
        self.reader = 1
        self.states: dict[int | Sliced, Node] = {}
        self.name = names.of
        lists: list[list[Node]] = [[] for _ in range(count)]
        for node in graph.nodes:
            check_time()
            if node in pieces:
                self.at[node] = pieces[node][1]
            elif node.op != "output" and not is_blank(node):
                made_of = [self.at[a] for a in node.all_input_nodes if a in self.at]
                if made_of:
                    self.at[node] = max(made_of)
                    lists[max(made_of)].append(node)
                else:
                    self.name(node)  # named in graph order, which avoids deep recursion
        self.lists = lists

    def matched(self) -> Loop | None:
        """Match all iterations. Returns None if they are not alike."""
        first, *others, last = self.lists
        if not first or any(len(nodes) != len(first) for nodes in others):
            return None
        steps: list[list[Node | None]] = [list(first)]
        self.position = {n: p for p, n in enumerate(first)}
        for nodes in (*others, last):
            self.reader = len(steps)
            step = self.step(steps[-1], nodes, nodes is last)
            if step is None:
                return None
            steps.append(step)
        if None in steps[1]:
            return None
        states = [State(source, initial) for source, initial in self.states.items()]
        return Loop(self.pieces, steps, states, self.written(steps))

    def written(self, steps: Sequence[Sequence[Node | None]]) -> dict[Sliced, int]:
        """Find the values that are written block by block, with the position of what is written."""
        writes = [n for n in steps[1] if n is not None and is_write(n) and n.args[0] in self.pieces]
        found = {self.pieces[n.args[0]][0]: n.args[1] for n in writes if n.args[1] in self.position}
        blocks = {self.pieces[n.args[0]][0]: fake_of(n.args[0]) for n in writes}
        return {
            key: self.position[n]
            for key, n in found.items()
            if fake_of(n).dtype == blocks[key].dtype and fake_of(n).shape == blocks[key].shape
        }

    def step(
        self, before: Sequence[Node | None], nodes: Sequence[Node], is_last: bool
    ) -> list[Node | None] | None:
        """Match the nodes of an iteration with the positions of the one before it. The last one may lack
        nodes that no other node needs."""
        found: list[Node | None] = []
        left = iter(nodes)
        node = next(left, None)
        for place, old in enumerate(before):
            if node is not None and old is not None and self.is_alike(old, node):
                self.position[node] = place
                found.append(node)
                node = next(left, None)
            elif is_last:
                found.append(None)
            else:
                return None
        return found

    def is_alike(self, old: object, new: object) -> bool:
        """Does a node do the same as one of the iteration before?"""
        assert isinstance(old, Node) and isinstance(new, Node)
        if old.op != new.op or old.target is not new.target and old.target != new.target:
            return False
        return self.agree((old.args, old.kwargs), (new.args, new.kwargs))

    def agree(self, old: object, new: object) -> bool:
        """Are two arguments the same, each seen from its own iteration?"""
        if isinstance(old, Node) and isinstance(new, Node):
            return self.is_same_operand(old, new)
        if type(old) is not type(new):
            return False
        if isinstance(old, (list, tuple)):
            return len(old) == len(new) and all(map(self.agree, old, new))
        if isinstance(old, dict):
            return list(old) == list(new) and all(map(self.agree, old.values(), new.values()))
        if isinstance(old, slice):
            return self.agree((old.start, old.stop, old.step), (new.start, new.stop, new.step))
        return old == new

    def is_same_operand(self, old: Node, new: Node) -> bool:
        ours, theirs = self.place_of(old), self.place_of(new)
        if theirs is None:
            return ours is None and self.name(old) == self.name(new)
        if self.at[new] < self.reader - 1:  # it is a state from two iterations before
            return False
        if ours is not None:  # the same position, one iteration apart
            return ours == theirs and self.at[old] + 1 == self.at[new]
        # The first iteration reads the initial value, the second one the state that the first has left.
        if self.reader != 1 or self.at[new] != 0 or old in self.at:
            return False
        return self.name(self.states.setdefault(theirs, old)) == self.name(old)

    def place_of(self, node: Node) -> int | Sliced | None:
        return self.pieces[node][0] if node in self.pieces else self.position.get(node)

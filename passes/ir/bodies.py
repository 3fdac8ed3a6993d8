"""Chunk bodies: the graph of one chunk, and the way in which a driver slices its inputs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from .facts import Mark
from .layouts import is_expanded
from .values import Size, value_of, written_by


class BindingRole(enum.Enum):
    """The way in which a driver prepares one input of a chunk body."""

    ROWS = "rows"  # rows of the chunk; ``[…, outer, C, inner, …]`` where tokens share their dimension
    KEYS = "keys"  # the key range of the chunk
    WHOLE = "whole"  # the value as it is
    SCALAR = "scalar"  # an integer: a `Scalar`, or a size of the model
    WRITE = "write"  # like ROWS, for a buffer that the body fills
    APPEND = "append"  # like KEYS, for a buffer that the body fills and reads
    RESULT = "result"  # like WHOLE, for memory that the body fills
    TOTAL = "total"  # an accumulator
    KEYTOTAL = "keytotal"  # the key range of an accumulator
    CARRY = "carry"  # the state of a scan: the body advances it, or only reads it in a sweep that restores it

    def __str__(self) -> str:
        return self.value


def in_blocks(name: str, block: int) -> str:
    """Name a scalar that counts blocks of tokens: ``rows_8`` for ``rows`` in blocks of eight."""
    return name if block == 1 else f"{name}_{block}"


def parted_name(name: str) -> tuple[str, int]:
    """Split the name of a scalar into its name in tokens and the tokens of the block that it counts."""
    own, _, block = name.partition("_")
    return own, int(block or 1)


READS_KEYS = (BindingRole.KEYS, BindingRole.APPEND, BindingRole.KEYTOTAL)
"""Cut to the key range of a chunk."""
FILLED = (BindingRole.WRITE, BindingRole.APPEND)
"""Buffers of rows that a sweep fills."""
ACCUMULATORS = (BindingRole.TOTAL, BindingRole.KEYTOTAL)
OF_ROWS = (BindingRole.ROWS, BindingRole.WRITE)
"""Cut to the rows of a chunk."""


@dataclass(frozen=True)
class Binding:
    """One input of a chunk body.

    low         the token of row 0 of the source, after any shift
    output      for a source with several outputs: the index of the output
    size        for a scalar that is a size of the model: the symbol
    columns     for rows of a matrix at full length: its dimension of keys, which is sliced like keys
    state_rows  for a state: its number of rows
    filling     for a state or an accumulator: its value before the first row
    """

    role: BindingRole
    source: Node | None
    name: str
    mark: Mark | None = None
    low: int = 0
    size: torch.SymInt | None = None
    columns: Mark | None = None
    filling: float = 0.0
    output: int | None = None
    state_rows: int = 1

    def __str__(self) -> str:
        return f"{self.role!s:<8} {self.name}"

    @property
    def node(self) -> Node:
        """The source of a binding, which is known to have one."""
        assert self.source is not None, f"{self} has no source"
        return self.source

    def at(self, sizes: Callable[[Size], int]) -> Binding:
        """Return the binding at the sizes of one call."""
        if self.mark is None or self.mark.sequences is None:
            return self
        return replace(self, mark=self.mark.at(sizes))

    @property
    def tokens(self) -> Mark:
        """The token dimension of a binding, which is known to have one."""
        assert self.mark is not None, f"{self} has no token dimension"
        return self.mark


def numbers_told(binding: Binding) -> list[object]:
    """List the numbers that an input of a body determines. A scalar determines itself. A tensor determines
    its sizes, except the size of its rows, for which the body has a number of its own. An expanded tensor
    that is read whole also determines its strides."""
    value = binding.size if binding.source is None else value_of(binding.source, binding.output)
    if not isinstance(value, torch.Tensor):
        return [value]
    sizes = [s for d, s in enumerate(value.shape) if binding.mark is None or d != binding.mark.dim]
    of_rows = binding.mark is not None and binding.role in OF_ROWS
    as_it_is = binding.role is BindingRole.WHOLE and is_expanded(value)
    return [
        *sizes,
        *([binding.tokens.outer_size] if of_rows else ()),
        *(value.stride() if as_it_is else ()),
    ]


@dataclass(frozen=True)
class ChosenKernel:
    """The attention kernel of a body, and the reason why it was chosen over those before it in the table.

    uneven  the kernel for rows and keys that ranges decide, where that is another one
    """

    name: str
    reason: str
    uneven: str = ""

    @property
    def arguments(self) -> dict[str, str]:
        """The operator's arguments that name the kernels."""
        return {"kernel": self.name} | ({"uneven": self.uneven} if self.uneven else {})

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Body:
    """A chunk body: its graph, and the way to slice its inputs. It writes all results into its inputs.

    kernels  the kernels that were chosen for its attention, each once
    """

    graph: GraphModule
    bindings: tuple[Binding, ...]
    kernels: tuple[ChosenKernel, ...] = ()


def canonical_order(graph: Graph) -> list[Node]:
    """List the nodes of a body that are read, in an order that follows from what they compute alone. Bodies
    that are traced at two lengths may differ in the order of their nodes and inputs.

    Nodes that write into memory, and nodes that read memory which a node writes into, stay in the order of
    the graph.
    """
    ordered: dict[Node, None] = {}
    for node in in_fixed_order(graph):
        stack = [node]
        while stack:
            awaited = [n for n in reversed(stack[-1].all_input_nodes) if n not in ordered]
            if awaited:
                stack += awaited
            else:
                ordered.setdefault(stack.pop())
    return list(ordered)


def in_fixed_order(graph: Graph) -> list[Node]:
    """List the nodes whose order in a body matters."""
    memory: dict[Node, set[Node]] = {}  # node → the nodes whose memory its value may share
    for node in graph.nodes:
        shared = (memory[n] for n in node.all_input_nodes) if may_share_memory(node) else ()
        memory[node] = {node}.union(*shared)
    written = set[Node]().union(*(memory[w] for n in graph.nodes for w in written_by(n)))
    return [
        n
        for n in graph.nodes
        if n.op != "placeholder"
        and (n.is_impure() or any(not written.isdisjoint(memory[i]) for i in n.all_input_nodes))
    ]


def may_share_memory(node: Node) -> bool:
    """May the value of a node share memory with one of its inputs?"""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)

"""Group values at full length that one compiled function computes, as Inductor fuses them.

Operator by operator, each value would be written to memory and read again. For a few numbers that does
not matter, and compiling them would take longer than they do. It matters for values as large as a
weight, such as a normalised or masked weight and its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from ..ir import Fusion, Program, bytes_of, has_gaps, is_tensor, is_view, value_of, viewed
from ..rules import CostClass, cost_of, is_random

LARGE = 1 << 20  # bytes: smaller values cost too little to be worth compiling
WITHOUT_MEMORY = (CostClass.VIEW, CostClass.FREE)

Part = Node | Fusion


def fusions(program: Program, alone: Collection[Node] = ()) -> tuple[tuple[Part, ...], ...]:
    """Group the nodes at full length, step by step, into single nodes and fusions.

    alone  nodes that run by themselves in any case
    """
    return tuple(
        parts_of_step(nodes, read_outside(program, step), alone)
        for step, nodes in enumerate(program.full_length)
    )


def read_outside(program: Program, step: int) -> set[Node]:
    """Find the values that other steps, sweeps or the program's outputs read."""
    others = (
        *program.full_length[:step],
        *program.full_length[step + 1 :],
        *(s.nodes for s in program.sweeps),
    )
    found = {a for nodes in others for n in nodes for a in n.all_input_nodes}
    return found | {o for o in program.outputs if isinstance(o, Node)}


def parts_of_step(
    nodes: Sequence[Node], outside: set[Node], alone: Collection[Node] = ()
) -> tuple[Part, ...]:
    """Order one step's nodes for execution, and fuse them where that is worth compiling."""
    if not any(is_large(n) for n in nodes):
        return tuple(nodes)
    fusible = fusible_nodes(nodes, outside).difference(alone)
    while True:
        parts = alternating(nodes, fusible)
        odd = {n for part in parts for n in results_of(part, nodes, outside) if not has_memory(n)}
        odd |= ahead_of_views(parts, fusible)
        if not odd.intersection(fusible):
            break
        fusible -= odd
    found: list[Part] = []
    for part in parts:
        together = is_worth_a_function(part, fusible)
        found += [Fusion(tuple(part), results_of(part, nodes, outside))] if together else part
    return tuple(found)


def is_worth_a_function(part: Sequence[Node], fusible: set[Node]) -> bool:
    return fusible.issuperset(part) and sum(map(has_memory, part)) > 1 and any(map(is_large, part))


def ahead_of_views(parts: Sequence[Sequence[Node]], fusible: set[Node]) -> set[Node]:
    """Find nodes that run one by one and read a view before it is made. A fusion would make the view again,
    but a single node cannot."""
    step, made, found = {n for part in parts for n in part}, set[Node](), set[Node]()
    for part in parts:
        alone = not is_worth_a_function(part, fusible)
        for node in part:
            if alone and not made.issuperset(a for a in node.all_input_nodes if a in step):
                found.add(node)
            made.add(node)
    return found


def fusible_nodes(nodes: Sequence[Node], outside: set[Node]) -> set[Node]:
    """Find nodes that Inductor fuses with their neighbours. Views and constants belong to a fusion only if
    nothing else reads them. A fusion makes other views again."""
    found: set[Node] = set()
    inside = set(nodes)
    for node in reversed(nodes):
        if node.op != "call_function" or is_random(node) or not all(map(is_readable, node.all_input_nodes)):
            continue
        if has_memory(node):
            if cost_of(node) is CostClass.FUSED:
                found.add(node)
        elif node not in outside and node.users and found.issuperset(u for u in node.users if u in inside):
            found.add(node)
    return found


def alternating(nodes: Sequence[Node], fusible: set[Node]) -> list[list[Node]]:
    """Order the nodes for execution, in parts that alternate between fusible and other nodes. Each part holds
    all nodes of its kind that are ready."""
    parts: list[list[Node]] = []
    waiting, kind = list(nodes), False
    while waiting:
        left, part = set(waiting), []
        for node in waiting:
            operands = map(viewed, node.all_input_nodes) if kind else node.all_input_nodes
            if (node in fusible) is kind and left.isdisjoint(operands):
                part.append(node)
                left.discard(node)
        parts += [part] if part else []
        waiting, kind = [n for n in waiting if n in left], not kind
    return parts


def results_of(part: Sequence[Node], nodes: Sequence[Node], outside: set[Node]) -> tuple[Node, ...]:
    """Find the nodes of a part that others read."""
    own, step = set(part), set(nodes)
    return tuple(n for n in part if n in outside or any(u in step and u not in own for u in n.users))


def is_readable(node: Node) -> bool:
    """Can a compiled function take the value? It can take a number, or a tensor without gaps in memory. A
    slice of a larger tensor has other strides than those traced if the larger one was computed in another
    way."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return not has_gaps(value)
    return isinstance(value, (torch.SymInt, int, float))


def has_memory(node: Node) -> bool:
    """Is a node's value one tensor in memory of its own?"""
    return is_tensor(node) and not is_view(node) and cost_of(node) not in WITHOUT_MEMORY


def is_large(node: Node) -> bool:
    return has_memory(node) and bytes_of(value_of(node)) >= LARGE

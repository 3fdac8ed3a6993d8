"""The programs of a region: sweeps for its forward and for its backward, or for both at once."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..passes.ir import (
    Analysis,
    CannotStream,
    Kind,
    Program,
    Refusal,
    Shared,
    bytes_of,
    is_tensor,
    tensor_operands,
    value_of,
)
from ..passes.linearity import is_linear
from ..passes.partition import partition
from ..passes.phases import Abandoned
from ..passes.planning.devices import Device
from ..passes.planning.kept_values import worth_keeping
from ..passes.rules import along_of, is_product, is_random
from .joint_regions import Joint, is_one_number


@dataclass(frozen=True)
class Programs:
    """The programs of a region.

    There is no backward where there are no tangents, or where the forward computes the gradients.

    saved  values that the forward hands to the backward
    fused  the forward computes the gradients as well
    """

    forward: Program
    backward: Program | None = None
    saved: tuple[Node, ...] = ()
    fused: bool = False


def directions(programs: Programs) -> tuple[Program, ...]:
    """Return the forward's program, and the backward's if there is one."""
    return (programs.forward,) if programs.backward is None else (programs.forward, programs.backward)


def partitioned(
    region: Joint, analysis: Analysis, keep: int, device: Device, movable: Sequence[Node]
) -> Programs:
    """Partition both directions; or build one program where the forward can compute the gradients.

    keep     how many of the values worth keeping on this device the forward keeps
    movable  inputs that such a forward may write gradients over

    Raises `CannotStream`.
    """
    forward = partition(region.graph, analysis, region.forward)
    check_streams(region, analysis, forward)
    if not region.tangents:
        return Programs(forward)
    both = in_one_sweep(region, analysis, forward, movable)
    if both is not None:
        return Programs(both, fused=True)
    given = sums_of_forward(region.graph, forward)
    backward = partition_backward(region, analysis, given)
    if keep:
        kept = worth_keeping(backward, region.tangents, analysis, device)[:keep]
        given = given.union(n for value in kept for n in value.nodes)
        backward = partition_backward(region, analysis, given)
    saved = saved_values(region, backward, given)
    handed_on = tuple(n for n in saved if n not in region.primals)
    return Programs(returning(region, analysis, forward, handed_on), backward, saved)


def partition_backward(region: Joint, analysis: Analysis, given: Iterable[Node]) -> Program:
    """Partition the gradients, which may be written over incoming ones."""
    outputs = region.backward
    return partition(region.graph, analysis, outputs, given, movable=region.tangents, gradients=outputs)


def saved_values(region: Joint, backward: Program, given: Container[Node]) -> tuple[Node, ...]:
    """List the values that the forward saves for the backward: inputs, and values that are given to it.
    Raises `CannotStream` for anything else."""
    saved = tuple(n for n in backward.inputs if n not in region.tangents and n.op != "get_attr")
    if not all(n in region.primals or n in given for n in saved):
        raise CannotStream(
            Refusal(
                "region",
                "The backward of this region reads a constant that its forward does not save",
                "Please report this model with the region's graph, as printed by streambp_compile.explain",
            )
        )
    return saved


def returning(region: Joint, analysis: Analysis, forward: Program, more: tuple[Node, ...]) -> Program:
    """Extend a forward's outputs by more values. The program stays the same where it computes them already
    and they exist when it ends. It is partitioned again where they are seeds that only the backward reads,
    or a later sweep overwrites them."""
    outputs = (*region.forward, *more)
    overwritten = {source for sweep in forward.sweeps for _, source in sweep.in_place}
    if computed(forward).difference(overwritten).issuperset(more):
        return replace(forward, outputs=outputs)
    return partition(region.graph, analysis, outputs)


def computed(program: Program) -> set[Node]:
    """Collect the values that exist at full length, or as sums, after a program has run."""
    sweeps = (n for s in program.sweeps for n in (*s.writes, *s.sums, *s.keysums))
    return {*program.inputs, *sweeps, *(n for nodes in program.full_length for n in nodes)}


def check_streams(region: Joint, analysis: Analysis, forward: Program) -> None:
    """Refuse a region with nothing to stream, or with matrix products that have no token dimension."""
    if forward.sweeps:
        return
    at_once = [n for nodes in forward.full_length for n in nodes]
    if any(is_product(n) and isinstance(analysis.facts[n], Shared) for n in at_once):
        raise CannotStream(
            Refusal(
                "region",
                "This region's matrix products do not involve the sequence being chunked",
                "Nothing to do for a small branch: a region streams along one of several independent "
                "sequences",
            )
        )
    calls = (n for n in region.graph.nodes if n.op == "call_function" and is_tensor(n))
    if all(analysis.kinds[n] is Kind.WHOLE for n in calls):
        raise CannotStream(Refusal("region", "This region has no token dimension", "Nothing to do"))


def sums_of_forward(graph: Graph, forward: Program) -> frozenset[Node]:
    """Collect the values that the forward hands to the backward instead of recomputing them. These are sums
    over chunks, seeds that it draws, and the few numbers per token that it keeps. Values from other
    processes are as wide as hidden states, so they are sent again."""
    made = {n for s in forward.sweeps for n in (*s.writes, *s.sums, *s.keysums)}
    late, received = [], set[Node]()
    for node in (n for nodes in forward.full_length for n in nodes):
        of_sweeps = made.intersection(node.all_input_nodes)
        if of_sweeps:
            made.add(node)
            if brings_others_rows(node) or of_sweeps <= received:
                received.add(node)
            else:
                late += [node] if is_tensor(node) else []
    seeds = (n for n in graph.nodes if is_random(n))
    sums = {n for s in forward.sweeps for n in s.sums}
    beside = (u for n in sums if n.target is operator.getitem for u in n.args[0].users)
    return frozenset({*late, *seeds, *forward.statistics, *sums, *beside})


def brings_others_rows(node: Node) -> bool:
    """Is it a collective that brings at least as many bytes as this process holds? The result of a
    reduce-scatter holds less."""
    if along_of(node) is None:
        return False
    return bytes_of(value_of(node)) >= bytes_of(value_of(tensor_operands(node)[0]))


def in_one_sweep(
    region: Joint, analysis: Analysis, forward: Program, movable: Sequence[Node]
) -> Program | None:
    """Build one program for a loss whose rows need no sum over rows; None where that is impossible. The sweep
    that computes such a loss also computes its gradient. The incoming tangent is one number, so gradients
    that are linear in it may be computed for 1 and scaled later: three products instead of four."""
    if not is_one_number(region.tangents) or len(forward.sweeps) != 1:
        return None
    if not is_linear(region.graph, region.tangents[0], region.backward):
        return None
    try:
        outputs = (*region.forward, *region.backward)
        both = partition(region.graph, analysis, outputs, movable=movable, gradients=region.backward)
    except Abandoned:
        raise
    except CannotStream:
        return None
    return both if len(both.sweeps) == 1 else None

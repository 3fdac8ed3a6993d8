"""The passes in order, each result verified: from a region's joint graph to its runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from .passes.analyze import analyze
from .passes.ir import Analysis, CannotStream, Mark, Refusal, Shared, Size, is_tensor
from .passes.kernels.attention import Target
from .passes.linearity import is_linear
from .passes.lower import Body, lower
from .passes.normalization.normalize import normalize
from .passes.normalization.sorted_rows import undo_sorts
from .passes.partition import Program, partition
from .passes.planning.chunk_length import chunk_lengths
from .passes.planning.devices import REFERENCE_CPU, Device
from .passes.rules import is_product, is_random
from .passes.stages import Abandoned, stage, unwatched
from .passes.token_propagation import Signatures, TokenPropagation
from .passes.verify import verify_analysis, verify_program
from .runtime.runner import Runner

CompileBody = Callable[[Body, int], Callable]


@dataclass(frozen=True)
class Schedule:
    """One direction of a region: its program, its chunk bodies, and what executes them."""

    program: Program
    bodies: tuple[Body, ...]
    chunks: tuple[int, ...]
    runner: Runner = field(repr=False)


@dataclass(frozen=True)
class StreamedRegion:
    """A region whose forward and backward run in sweeps.

    saved   what the forward hands to the backward: region inputs, and the sums that the backward reads
    fused   the forward computes gradients for a unit tangent, which the backward only scales
    device  what its chunk lengths were chosen for
    """

    joint: GraphModule
    analysis: Analysis
    placeholders: tuple[Node, ...]
    tangents: tuple[Node, ...]
    saved: tuple[Node, ...]
    forward: Schedule
    backward: Schedule | None
    fused: bool
    device: Device


def outputs_of(module: GraphModule) -> tuple[object, ...]:
    return tuple(next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0])


def stream(
    joint: GraphModule,
    length: Size,
    seeds: Mapping[int, tuple[Mark, ...]],
    forward_outputs: int,
    tangents: int,
    tangent_of: Sequence[int],
    chunk_size: int | None,
    compile_body: CompileBody,
    checkable: Sequence[int] = (),
    target: Target = Target("cpu"),
    device: Device = REFERENCE_CPU,
) -> StreamedRegion:
    """Sweeps for a region's joint graph (or, with no tangents, for its forward alone).

    seeds       input position → token marks of that input
    tangent_of  for each tangent, the forward output it is the gradient of
    checkable   positions of inputs that may be masks: the result may have conditions on them, which its
                caller checks at every call
    target      the device that chunk bodies are written for
    device      what chunk lengths are chosen for
    Raises `CannotStream`.
    """
    with stage("normalising the joint graph"):
        module = undo_sorts(normalize(joint))
    graph = module.graph
    placeholders = tuple(n for n in graph.nodes if n.op == "placeholder")
    primals, tangent_nodes = (
        placeholders[: len(placeholders) - tangents],
        placeholders[len(placeholders) - tangents :],
    )
    outputs = outputs_of(module)
    forward_part, backward_part = outputs[:forward_outputs], outputs[forward_outputs:]
    with stage("following tokens through the joint graph"):
        marks = {primals[i]: m for i, m in seeds.items()}
        known = Signatures(graph)
        marks.update(
            marks_of_tangents(TokenPropagation(graph, marks, known), forward_part, tangent_nodes, tangent_of)
        )
        analysis = analyze(graph, length, marks, {primals[i] for i in checkable}, known)
        verify_analysis(graph, analysis)

    def swept(outputs: Sequence[object], **more) -> Program:
        with stage("assigning operations to sweeps"):
            return partition(graph, analysis, outputs, **more)

    def schedule(program: Program) -> Schedule:
        with stage("writing chunk bodies"):
            verify_program(program, analysis)
            bodies = lower(program, analysis, target)
            chunks = chunk_lengths(program, analysis, chunk_size, device)
        with stage("compiling chunk bodies"), unwatched():
            compiled = tuple(compile_body(b, c) for b, c in zip(bodies, chunks))
        return Schedule(program, bodies, chunks, Runner(program, analysis, bodies, compiled, chunks))

    forward = swept(forward_part)
    if not forward.sweeps and any(
        is_product(n) and isinstance(analysis.facts[n], Shared) for stage in forward.whole for n in stage
    ):
        raise CannotStream(
            Refusal(
                "region",
                "its products are of no token of the sequence that streams in it",
                "Of sequences that no op lets see one another, one streams in a region",
            )
        )
    if not forward.sweeps and not any(
        is_tensor(n) and analysis.kinds[n] != "whole" for n in graph.nodes if n.op == "call_function"
    ):
        raise CannotStream(Refusal("region", "carries no tokens", "Nothing to do"))
    if not tangents:
        return StreamedRegion(module, analysis, primals, (), (), schedule(forward), None, False, device)
    with stage("assigning operations to sweeps"):
        both = in_one_sweep(graph, analysis, forward_part, backward_part, forward, tangent_nodes)
    if both is not None:
        return StreamedRegion(
            module, analysis, primals, tangent_nodes, (), schedule(both), None, True, device
        )
    sums = sums_of_forward(graph, analysis, forward, tangent_nodes)
    backward = swept(backward_part, given=sums, movable=tangent_nodes)
    saved = tuple(n for n in backward.given if n not in tangent_nodes and n.op != "get_attr")
    if not all(n in primals or n in sums for n in saved):
        raise CannotStream(
            Refusal(
                "region",
                "its backward reads a constant that the forward does not hand on",
                "Report the graph",
            )
        )
    forward = swept((*forward_part, *(n for n in saved if n not in primals)))
    return StreamedRegion(
        module, analysis, primals, tangent_nodes, saved, schedule(forward), schedule(backward), False, device
    )


def marks_of_tangents(
    propagation: TokenPropagation, forward_part, tangents, tangent_of
) -> dict[Node, tuple[Mark, ...]]:
    """A tangent carries tokens where the output does whose gradient it is."""
    found = {}
    for tangent, index in zip(tangents, tangent_of):
        output = forward_part[index]
        if isinstance(output, Node) and is_tensor(tangent):
            found[tangent] = tuple(propagation.of(output).values())
    return found


def sums_of_forward(graph, analysis: Analysis, forward: Program, tangents) -> frozenset[Node]:
    """What the forward adds up over chunks, seeds that it draws, and the few numbers per token that it keeps:
    handed on, not made again."""
    late = {n for stage in forward.whole[1:] for n in stage if is_tensor(n)}
    late |= {n for n in graph.nodes if is_random(n)}
    return frozenset(late | set(forward.distilled) | {n for s in forward.sweeps for n in s.sums})


def in_one_sweep(
    graph, analysis: Analysis, forward_part, backward_part, forward: Program, tangents
) -> Program | None:
    """The program of a loss whose rows need no sum of themselves: its gradient comes out of the very sweep
    that computes it.

    The incoming tangent is one number, so gradients that are linear in it may be computed for 1 and scaled
    later: three products instead of four.
    """
    if (
        len(tangents) != 1
        or any(not is_tensor(t) or t.meta["val"].numel() != 1 for t in tangents)
        or len(forward.sweeps) != 1
    ):
        return None
    if not is_linear(graph, tangents[0], backward_part):
        return None
    try:
        both = partition(graph, analysis, (*forward_part, *backward_part))
    except Abandoned:
        raise
    except CannotStream:
        return None
    return both if len(both.sweeps) == 1 else None


def unit(tangent: Node) -> torch.Tensor:
    value = tangent.meta["val"]
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)

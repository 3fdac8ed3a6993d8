"""The passes in order, each result verified: from a region's joint graph to its runners.

normalize → propagate tokens → analyze → partition → plan → lower → compile → run
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, GraphModule, Node

from .passes.analyze import analyze
from .passes.ir import (
    Analysis,
    Body,
    CannotStream,
    Kind,
    Mark,
    Plan,
    Program,
    Refusal,
    Shared,
    Size,
    is_tensor,
    value_of,
)
from .passes.kernels.attention import Target
from .passes.linearity import is_linear
from .passes.lower import lower, lower_fusions
from .passes.normalization.folded_products import unfold_products
from .passes.normalization.normalize import normalize
from .passes.normalization.sorted_rows import undo_sorts
from .passes.normalization.token_reductions import merge_over_tokens
from .passes.partition import partition
from .passes.phases import Abandoned, phase, untimed
from .passes.planning.choices import Choices
from .passes.planning.devices import REFERENCE_CPU, Device
from .passes.planning.kept_values import KeptValue, worth_keeping
from .passes.planning.plan import CPU, plan
from .passes.planning.shorter_chunks import shorter_chunks
from .passes.rules import is_product, is_random
from .passes.shifted_copies import copy_shifted
from .passes.token_propagation import Signatures, TokenPropagation
from .passes.verify import (
    verify_analysis,
    verify_body,
    verify_fused_body,
    verify_normalized,
    verify_plan,
    verify_program,
)
from .runtime.runner import Runner

CompileBody = Callable[[Body, int], Callable]
BytesHeld = Callable[[Body, Callable, int], int]
InputMarks = Mapping[int, tuple[Mark, ...]]


@dataclass(frozen=True)
class Schedule:
    """One direction of a region: its program, its plan, its chunk bodies, and what executes them."""

    program: Program
    plan: Plan
    bodies: tuple[Body, ...]
    runner: Runner = field(repr=False)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens per chunk of every sweep."""
        return self.plan.chunks


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

    @functools.cached_property
    def worth_keeping(self) -> tuple[KeptValue, ...]:
        """Values that the forward could keep beside ``saved`` to save time, the best first."""
        if self.backward is None:
            return ()
        return worth_keeping(self.backward.program, self.tangents, self.analysis, self.device)

    def has_own_memory(self, output: Node) -> bool:
        """Is an output of the forward in memory of its own, which the backward does not read?"""
        program = self.forward.program
        viewed = {a for nodes in program.full_length for n in nodes for a in n.all_input_nodes}
        written = {n for sweep in program.sweeps for n in sweep.writes}
        once = program.outputs.count(output) == 1
        return output in written and once and output not in viewed and output not in self.saved


@dataclass(frozen=True)
class Joint:
    """A normal joint graph: its inputs, and its outputs of the forward and of the backward.

    tangent_of  for each tangent, the forward output it is the gradient of
    """

    module: GraphModule
    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    tangent_of: tuple[int, ...]
    forward: tuple[object, ...]
    backward: tuple[object, ...]

    @property
    def graph(self) -> Graph:
        return self.module.graph


@dataclass(frozen=True)
class Programs:
    """The programs of a region; without a backward where there are no tangents, or where the forward computes
    it.

    saved  what the forward hands to the backward
    """

    forward: Program
    backward: Program | None = None
    saved: tuple[Node, ...] = ()
    fused: bool = False


def outputs_of(module: GraphModule) -> tuple[object, ...]:
    return tuple(next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0])


def stream(
    joint: GraphModule,
    length: Size,
    input_marks: InputMarks,
    forward_outputs: int,
    tangents: int,
    tangent_of: Sequence[int],
    choices: Choices,
    compile_body: CompileBody,
    checkable: Sequence[int] = (),
    target: Target = CPU,
    device: Device = REFERENCE_CPU,
    movable: Sequence[int] = (),
    held: BytesHeld | None = None,
) -> StreamedRegion:
    """Sweeps for a region's joint graph (or, with no tangents, for its forward alone).

    input_marks  input position → token marks of that input
    tangent_of   for each tangent, the forward output it is the gradient of
    checkable    positions of inputs that may be masks; the caller checks the result's conditions on them
    target       the device that chunk bodies are written for
    device       what chunk lengths are chosen for
    movable      positions of inputs that a caller may hand over, so that gradients are written over them
    held         tells the bytes that a compiled body takes for so many tokens; None: as the cost model says
    Raises `CannotStream`.
    """
    region, analysis = followed(joint, length, input_marks, forward_outputs, tangents, tangent_of, checkable)
    programs = assigned(region, analysis, choices.keep, device, [region.primals[i] for i in movable])
    how = (analysis, choices, compile_body, target, device, held)
    return StreamedRegion(
        region.module,
        analysis,
        region.primals,
        region.tangents,
        programs.saved,
        schedule(programs.forward, *how),
        None if programs.backward is None else schedule(programs.backward, *how),
        programs.fused,
        device,
    )


def followed(
    joint: GraphModule,
    length: Size,
    input_marks: InputMarks,
    forward_outputs: int,
    tangents: int,
    tangent_of: Sequence[int],
    checkable: Sequence[int],
) -> tuple[Joint, Analysis]:
    """A joint graph in normal form, and where its tokens are. Raises `CannotStream`."""
    with phase("normalising the joint graph"):
        region = parted(undo_sorts(normalize(joint)), forward_outputs, tangents, tangent_of)
        verify_normalized(region.graph)
    with phase("following tokens through the joint graph"):
        region, analysis = analyzed(region, length, input_marks, checkable)
        verify_analysis(region.graph, analysis)
    return region, analysis


def assigned(
    region: Joint, analysis: Analysis, keep: int, device: Device, movable: Sequence[Node] = ()
) -> Programs:
    """The sweeps of a region whose forward keeps so many values. Raises `CannotStream`."""
    with phase("assigning operations to sweeps"):
        programs = partitioned(region, analysis, keep, device, movable)
        for program in directions(programs):
            verify_program(program, analysis)
    return programs


def schedule(
    program: Program,
    analysis: Analysis,
    choices: Choices,
    compile_body: CompileBody,
    target: Target,
    device: Device,
    held: BytesHeld | None = None,
) -> Schedule:
    """Chunk lengths, compiled chunk bodies and the runner of one direction."""
    with phase("choosing chunk lengths"):
        planned = plan(program, analysis, choices, target, device)
        verify_plan(planned, program)
    with phase("writing chunk bodies"):
        bodies, fused = lower(program, analysis, planned), lower_fusions(planned)
        for body, sweep in zip(bodies, program.sweeps):
            verify_body(body, sweep, analysis)
        for fusion, body in fused.items():
            verify_fused_body(body, fusion)
    with phase("compiling chunk bodies"), untimed():
        compiled = tuple(map(compile_body, bodies, planned.chunks))
        functions = {fusion: (body, compile_body(body, 1)) for fusion, body in fused.items()}
        if held is not None:
            taken = functools.partial(bytes_taken, held, bodies, compiled)
            chunks = shorter_chunks(program, analysis, choices, device, planned.chunks, taken)
            planned = replace(planned, chunks=chunks)
    return Schedule(program, planned, bodies, Runner(program, analysis, planned, bodies, compiled, functions))


def bytes_taken(
    held: BytesHeld, bodies: Sequence[Body], compiled: Sequence[Callable], at: int, tokens: int
) -> int:
    """Bytes that the compiled body of one sweep takes for a chunk of so many tokens."""
    return held(bodies[at], compiled[at], tokens)


def directions(programs: Programs) -> tuple[Program, ...]:
    """The forward's program, and the backward's if it has one."""
    return (programs.forward,) if programs.backward is None else (programs.forward, programs.backward)


def parted(module: GraphModule, forward_outputs: int, tangents: int, tangent_of: Sequence[int]) -> Joint:
    """Which inputs and outputs of a joint graph are the forward's, and which the backward's."""
    inputs = tuple(n for n in module.graph.nodes if n.op == "placeholder")
    first_tangent, outputs = len(inputs) - tangents, outputs_of(module)
    return Joint(
        module,
        inputs[:first_tangent],
        inputs[first_tangent:],
        tuple(tangent_of),
        outputs[:forward_outputs],
        outputs[forward_outputs:],
    )


def analyzed(
    region: Joint, length: Size, input_marks: InputMarks, checkable: Sequence[int]
) -> tuple[Joint, Analysis]:
    """The region, its reductions over tokens written for chunks, and the facts of its whole joint graph.

    Tokens of the inputs tell those of the tangents.
    """
    marks = {region.primals[i]: m for i, m in input_marks.items()}
    known = Signatures(region.graph)
    propagation = TokenPropagation(region.graph, marks, known)
    while any([rewrite(region.graph, propagation) for rewrite in WHERE_TOKENS_ARE]):
        region = with_outputs_of_graph(region)
        known = Signatures(region.graph)
        propagation = TokenPropagation(region.graph, marks, known)
    marks.update(marks_of_tangents(region, propagation))
    analysis = analyze(region.graph, length, marks, {region.primals[i] for i in checkable}, known)
    return region, copy_shifted(region.graph, analysis)


WHERE_TOKENS_ARE = (merge_over_tokens, unfold_products)  # each leaves nothing that it would write again


def with_outputs_of_graph(region: Joint) -> Joint:
    """The same region after its graph was rewritten."""
    region.module.recompile()
    outputs, forward = outputs_of(region.module), len(region.forward)
    return replace(region, forward=outputs[:forward], backward=outputs[forward:])


def marks_of_tangents(region: Joint, propagation: TokenPropagation) -> dict[Node, tuple[Mark, ...]]:
    """A tangent carries tokens where the output does whose gradient it is."""
    found = {}
    for tangent, index in zip(region.tangents, region.tangent_of):
        output = region.forward[index]
        if isinstance(output, Node) and is_tensor(tangent):
            found[tangent] = tuple(propagation.of(output).values())
    return found


def partitioned(
    region: Joint, analysis: Analysis, keep: int, device: Device, movable: Sequence[Node]
) -> Programs:
    """The programs of both directions; or one for both, where the forward can compute the gradients as well.

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
    """The program of the gradients, which may be written over incoming ones."""
    outputs = region.backward
    return partition(region.graph, analysis, outputs, given, movable=region.tangents, gradients=outputs)


def saved_values(region: Joint, backward: Program, given: Container[Node]) -> tuple[Node, ...]:
    """What the forward saves for the backward: inputs, and values that are given to it.

    Raises `CannotStream` for anything else.
    """
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
    """A forward that returns more values.

    It computes them already, unless they are seeds that only the backward reads: then it is another program.
    """
    outputs = (*region.forward, *more)
    if computed(forward).issuperset(more):
        return replace(forward, outputs=outputs)
    return partition(region.graph, analysis, outputs)


def computed(program: Program) -> set[Node]:
    """What exists at full length, or added up, when a program has run."""
    sweeps = (n for s in program.sweeps for n in (*s.writes, *s.sums, *s.keysums))
    return {*program.inputs, *sweeps, *(n for nodes in program.full_length for n in nodes)}


def check_streams(region: Joint, analysis: Analysis, forward: Program) -> None:
    """Refuse a region with nothing to stream, or with matrix products that are of no token."""
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
    """What the forward adds up over chunks, seeds that it draws, and the few numbers per token that it keeps:
    handed on, not made again."""
    made = {n for s in forward.sweeps for n in (*s.writes, *s.sums, *s.keysums)}
    late = []
    for node in (n for nodes in forward.full_length for n in nodes):
        if not made.isdisjoint(node.all_input_nodes):
            made.add(node)
            late += [node] if is_tensor(node) else []
    seeds = (n for n in graph.nodes if is_random(n))
    sums = {n for s in forward.sweeps for n in s.sums}
    beside = (u for n in sums if n.target is operator.getitem for u in n.args[0].users)
    return frozenset({*late, *seeds, *forward.statistics, *sums, *beside})


def in_one_sweep(
    region: Joint, analysis: Analysis, forward: Program, movable: Sequence[Node]
) -> Program | None:
    """The program of a loss whose rows need no sum of themselves: its gradient comes out of the very sweep
    that computes it.

    The incoming tangent is one number, so gradients that are linear in it may be computed for 1 and scaled
    later: three products instead of four.
    """
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


def is_one_number(tangents: Iterable[Node]) -> bool:
    """Is there one tangent, of one entry?"""
    tangents = tuple(tangents)
    return len(tangents) == 1 and is_tensor(tangents[0]) and value_of(tangents[0]).numel() == 1


def unit(tangent: Node) -> torch.Tensor:
    value = value_of(tangent)
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)

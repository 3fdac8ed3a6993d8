"""The passes in order, each result verified: from a region's joint graph to its runners.

normalize → propagate tokens → analyze → partition → plan → lower → compile → run
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from .passes.ir import Analysis, Body, CannotStream, Plan, Program
from .passes.kernels.attention import Target
from .passes.lower import lower, lower_fusions
from .passes.normalization.normalize import normal_form
from .passes.phases import Abandoned, phase, untimed
from .passes.planning.choices import Choices
from .passes.planning.devices import REFERENCE_CPU, Device
from .passes.planning.kept_values import KeptValue, worth_keeping
from .passes.planning.plan import CPU, plan
from .passes.planning.shorter_chunks import shorter_chunks
from .passes.rules import communicates
from .passes.verify import (
    verify_analysis,
    verify_body,
    verify_chunks,
    verify_fused_body,
    verify_normalized,
    verify_plan,
    verify_program,
)
from .regions.batch_parts import BatchParts, Follow, in_turn, may_take_turns, worth_parting
from .regions.joint_regions import Ends, Joint, JointInputs, analyzed, parted
from .regions.region_programs import Programs, directions, partitioned
from .runtime.batch_turns import InTurns
from .runtime.runner import Runner

CompileBody = Callable[[Body, int], Callable]
BytesHeld = Callable[[Body, Callable, int], int]


@dataclass(frozen=True)
class Schedule:
    """One direction of a region: its program, its plan, its chunk bodies, and its runner."""

    program: Program
    plan: Plan
    bodies: tuple[Body, ...]
    runner: Runner | InTurns = field(repr=False)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens per chunk of every sweep."""
        return self.plan.chunks


@dataclass(frozen=True)
class StreamedRegion:
    """A region whose forward and backward run in sweeps.

    saved   values that the forward hands to the backward: region inputs, and sums that the backward reads
    fused   the forward computes gradients for a unit tangent, which the backward only scales
    device  the device that its chunk lengths were chosen for
    batch   the division of its batch, if it runs for some sequences at a time; graphs and programs are then
            those for some sequences
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
    batch: BatchParts | None = None

    @property
    def checked_inputs(self) -> tuple[Node, ...]:
        """The inputs in which the conditions of its analysis are written."""
        return self.placeholders if self.batch is None else self.batch.inputs

    @property
    def turns(self) -> int:
        """The number of times that its programs run in one call."""
        return 1 if self.batch is None else self.batch.turns

    @functools.cached_property
    def worth_keeping(self) -> tuple[KeptValue, ...]:
        """Values that the forward could keep beside ``saved`` to save time, the best first."""
        if self.backward is None:
            return ()
        found = worth_keeping(self.backward.program, self.tangents, self.analysis, self.device)
        return tuple(replace(v, bytes=v.bytes * self.turns, seconds=v.seconds * self.turns) for v in found)

    def has_own_memory(self, output: Node) -> bool:
        """Is an output of the forward in memory of its own, which the backward does not read?"""
        program = self.forward.program
        viewed = {a for nodes in program.full_length for n in nodes for a in n.all_input_nodes}
        written = {n for sweep in program.sweeps for n in sweep.writes}
        once = program.outputs.count(output) == 1
        return output in written and once and output not in viewed and output not in self.saved


def collectives_of(region: StreamedRegion | None) -> dict[str, str]:
    """List the collectives of a region in their order, for each group of processes. All processes of a group
    must agree on this list."""
    found: dict[str, list[str]] = {}
    for schedule in () if region is None else filter(None, (region.forward, region.backward)):
        sweeps = [
            (f"{s.direction} by {c}", s.nodes) for s, c in zip(schedule.program.sweeps, schedule.chunks)
        ]
        whole = [("full length", nodes) for nodes in schedule.program.full_length]
        steps = itertools.chain.from_iterable(itertools.zip_longest(whole, sweeps))
        for name, nodes in filter(None, steps):
            for node in filter(communicates, nodes):
                if node.args and isinstance(node.args[-1], str):
                    found.setdefault(node.args[-1], []).append(f"{name}: {node.target}")
    return {group: "\n".join([f"{region.turns} turns", *lines]) for group, lines in found.items() if region}


@dataclass(frozen=True)
class Machine:
    """The compiler of chunk bodies, and the device that they are for.

    target  the device that chunk bodies are written for
    device  the device that chunk lengths are chosen for
    held    returns the bytes that a compiled body takes for a number of tokens; None: the cost model decides
    """

    compile_body: CompileBody
    target: Target = CPU
    device: Device = REFERENCE_CPU
    held: BytesHeld | None = None


def stream(
    joint: GraphModule, ends: Ends, inputs: JointInputs, choices: Choices, machine: Machine
) -> StreamedRegion:
    """Build the sweeps for a region's joint graph (or, with no tangents, for its forward alone). Raises
    `CannotStream`."""
    device, follow = machine.device, functools.partial(analyzed, inputs=inputs)
    region, analysis = followed(joint, ends, follow)
    programs = assigned(region, analysis, choices.keep, device, [region.primals[i] for i in inputs.movable])
    region, analysis, programs, batch = by_batch(region, analysis, programs, follow, choices, device)
    how = (analysis, choices, machine, batch)
    forward = schedule(programs.forward, *how)
    backward = None if programs.backward is None else schedule(programs.backward, *how)
    given = (region.primals, region.tangents, programs.saved)
    return StreamedRegion(region.module, analysis, *given, forward, backward, programs.fused, device, batch)


def by_batch(
    whole: Joint,
    analysis: Analysis,
    programs: Programs,
    follow: Follow,
    choices: Choices,
    device: Device,
) -> tuple[Joint, Analysis, Programs, BatchParts | None]:
    """Rewrite a region for some sequences of its batch (`batch_parts`), where that is possible and saves
    memory.

    Otherwise the region is returned as it is.

    follow  analyses a joint graph whose inputs have the same tokens
    """
    for found in worth_parting(whole, analysis, programs, choices, device):
        with phase("looking at the sequences of the batch"):
            some = in_turn(whole, analysis, found, follow)
        if some is None:
            continue
        part, facts, batch = some
        verify_analysis(part.graph, facts)
        try:
            parts = assigned(part, facts, choices.keep, device)
        except Abandoned:
            raise
        except CannotStream:
            continue
        if may_take_turns(parts, batch, programs):
            return part, facts, parts, batch
    return whole, analysis, programs, None


def followed(joint: GraphModule, ends: Ends, follow: Follow) -> tuple[Joint, Analysis]:
    """Normalize a joint graph, and locate its tokens. Raises `CannotStream`."""
    with phase("normalising the joint graph"):
        region = parted(normal_form(joint), ends)
        verify_normalized(region.graph)
    with phase("following tokens through the joint graph"):
        region, analysis = follow(region)
        verify_analysis(region.graph, analysis)
    return region, analysis


def assigned(
    region: Joint, analysis: Analysis, keep: int, device: Device, movable: Sequence[Node] = ()
) -> Programs:
    """Assign a region's operations to sweeps, where its forward keeps ``keep`` values. Raises
    `CannotStream`."""
    with phase("assigning operations to sweeps"):
        programs = partitioned(region, analysis, keep, device, movable)
        for program in directions(programs):
            verify_program(program, analysis)
    return programs


def schedule(
    program: Program,
    analysis: Analysis,
    choices: Choices,
    machine: Machine,
    batch: BatchParts | None = None,
) -> Schedule:
    """Choose chunk lengths, compile chunk bodies, and build the runner of one direction."""
    device, compile_body = machine.device, machine.compile_body
    with phase("choosing chunk lengths"):
        planned = plan(program, analysis, choices, machine.target, device, batch.sums if batch else ())
        verify_plan(planned, program)
        verify_chunks(planned, program, analysis)
    with phase("writing chunk bodies"):
        bodies, fused = lower(program, analysis, planned), lower_fusions(planned)
        for body, sweep in zip(bodies, program.sweeps):
            verify_body(body, sweep, analysis)
        for fusion, body in fused.items():
            verify_fused_body(body, fusion)
    with phase("compiling chunk bodies"), untimed():
        compiled = tuple(map(compile_body, bodies, planned.chunks))
        functions = {fusion: (body, compile_body(body, 1)) for fusion, body in fused.items()}
        if machine.held is not None:
            taken = functools.partial(bytes_taken, machine.held, bodies, compiled)
            chunks = shorter_chunks(program, analysis, choices, device, planned.chunks, taken)
            planned = replace(planned, chunks=chunks)
    runner = Runner(program, analysis, planned, bodies, compiled, functions)
    whole = runner if batch is None else InTurns(runner, batch)
    return Schedule(program, planned, bodies, whole)


def bytes_taken(
    held: BytesHeld, bodies: Sequence[Body], compiled: Sequence[Callable], at: int, tokens: int
) -> int:
    """Compute the bytes that the compiled body of one sweep takes for a chunk of ``tokens`` tokens."""
    return held(bodies[at], compiled[at], tokens)

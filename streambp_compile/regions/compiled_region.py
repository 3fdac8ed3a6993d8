"""One distinct region, compiled: AOTAutograd → pipeline → Inductor, as an autograd node of its own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from .. import internals
from ..config import Config
from ..device.target_device import planned_for, target_of
from ..dynamo.attention.attention_calls import torch_attention, with_input_for_ranges
from ..dynamo.blocks.blocks import write_out
from ..dynamo.reading.mixing import made_of_weights
from ..dynamo.reading.processes import routed, spans_processes
from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, is_parameter
from ..dynamo.writes.written_inputs import written_buffers, written_storages
from ..passes.ir import (
    Body,
    CannotStream,
    Condition,
    EveryRowHasVisibleKey,
    Mark,
    MaskedOutsideBand,
    PositionsIncrease,
    Refusal,
    VisibleRanges,
    bytes_of,
    outputs_of,
    target_name,
    value_of,
    viewed,
    where_of,
)
from ..passes.phases import Abandoned, abandoned, phase, stage, time_limit
from ..passes.planning.choices import DEFAULT, Choices
from ..passes.split import Region
from ..passes.width import LOGITS, bytes_needed, widest_at_full_length
from ..pipeline import Machine, StreamedRegion, collectives_of, stream
from ..reporting.notices import NotStreamed, PlansDiffer, StreamHint, mebibytes
from ..reporting.region_report import RegionReport
from ..runtime.mask_guards import CallAnswer, Guard
from ..runtime.memory_simulation import bytes_of_chunk
from ..runtime.opaque_calls import Driver, boxed, driver_of
from ..runtime.places import InRegion, within
from ..runtime.runner import lines_of, noting
from .candidate import Candidate, NothingToStream
from .joint_regions import Ends, JointInputs
from .region_drivers import forward_and_backward, run_forward

HELP = {
    EveryRowHasVisibleKey: "Pad on the right, or mask with booleans or -inf instead of the lowest number.",
    PositionsIncrease: "Number the tokens of each packed sequence in ascending order.",
    VisibleRanges: "Pad at one end of each sequence, and give each packed document an id of its own.",
    MaskedOutsideBand: "Make causal masks by torch.tril or is_causal=True inside the compiled function.",
}


NO_RANGES = (0, 1, 0, 2)  # the shape of ranges of keys where no attention reads any


class TraceAgain(Exception):
    """The region runs unchunked and has been rewritten to torch's own attention, so it must be traced
    again."""


class CompiledRegion:
    """One distinct region: traced by AOTAutograd, then streamed if the passes allow it, else compiled
    unchunked."""

    def __init__(
        self,
        module: GraphModule,
        inputs: list[object],
        region: Region,
        axis: Axis | None,
        config: Config,
        refuse: Callable[[Refusal, int | None], None],
        may_check: bool = True,
        unfit: Refusal | None = None,
        choices: Choices = DEFAULT,
        by_ranges: bool = True,
    ):
        self.module, self.fakes, self.region, self.axis = module, inputs, region, axis
        self.config, self.refuse = config, refuse
        self.given = (module, inputs)
        self.candidate = Candidate(region, axis, inputs, unfit)
        self.spans_processes = spans_processes((*region.inputs, *region.nodes))
        self.may_check, self.choices = may_check and not self.spans_processes, choices
        self.by_ranges = by_ranges and self.may_check
        self.without: dict[type[Condition], CompiledRegion] = {}
        self.variants: dict[Choices, CompiledRegion] = {choices: self}
        self.flat = [
            (i, n if part is internals.local_of(value) else None)
            for i, (n, value) in enumerate(zip(self.candidate.inputs, inputs))
            for part in internals.parts_of(value)
        ]  # AOTAutograd's inputs: index of the region's input, and its node if the part is all of it or local
        self.ranges = self.add_ranges() if self.by_ranges else None
        self.writes = len(written_storages(region)) > len(written_buffers(region))
        self.report = RegionReport(module, recomputable=region.recomputable)
        self.streamed: StreamedRegion | None = None
        self.guard: Guard | None = None
        self.bodies: list[internals.CompiledBody] = []
        self.unchecked = self.compiled() if region.nodes else None
        self.call = self.checked if self.guard else self.plain()

    def add_ranges(self) -> int | None:
        """Add an input for ranges of keys in place of masks. Returns its position among AOTAutograd's inputs;
        None where no attention has a mask."""
        module = with_input_for_ranges(self.module)
        if module is None:
            return None
        like = next(f for f in self.fakes if isinstance(f, torch.Tensor))
        self.module = module
        self.fakes = [*self.fakes, like.new_empty(NO_RANGES, dtype=torch.int64, device="cpu")]
        self.flat.append((len(self.fakes) - 1, None))
        return len(self.flat) - 1

    def plain(self) -> Callable | None:
        """Return the call for inputs of which no masks are checked."""
        return self.unchecked if self.ranges is None or self.unchecked is None else partial(self.run, None)

    def compiled(self) -> Callable:
        """Compile the region, streamed or unchunked; by Inductor alone if an internal error occurs."""
        with internals.floats_are_tensors():
            return self.streamed_or_unchunked()

    def streamed_or_unchunked(self) -> Callable:
        try:
            with internals.mode_of(self.fakes), internals.of_regions():
                try:
                    call = self.traced()
                except TraceAgain:
                    call = self.traced()
            if self.streamed is not None and self.streamed.analysis.checked:
                self.guard = Guard(
                    self.streamed.checked_inputs, self.streamed.analysis.checked, [i for i, _ in self.flat]
                )
            return call
        except internals.NO_DEFECTS:
            raise
        except Exception as error:
            return self.unstreamed(error)

    def unstreamed(self, error: Exception) -> Callable:
        """Compile the region by Inductor alone after an internal error. Raises `NotStreamed` under
        ``strict``."""
        internals.log.debug("compiling a region failed", exc_info=error)
        doing = "tracing the region" if self.report.joint is None else "compiling the region"
        refusal = refusal_of(error, doing, "region", self.module)
        if self.config.strict:
            raise NotStreamed(str(refusal)) from error
        self.written_out()
        call = internals.compile_plainly(self.module, self.fakes, self.config.mode)
        self.streamed = self.report.streamed = None
        if self.report.refusal is None:
            self.report.refusal = refusal
            self.refuse(refusal, None)
        return call

    def traced(self) -> Callable:
        """Compile the region by AOTAutograd and the compilers that it calls."""
        compile_ = internals.aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=self.compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=self.cut,
            decompositions=internals.decompositions(),
        )
        with stage("AOTAutograd"):
            return compile_(self.module, self.fakes)

    def checked(self, *inputs: object) -> object:
        """Run the region, and skip keys only where the masks among its inputs allow it."""
        return self.call_for(self.guard.answer(inputs))(*inputs)

    def call_for(self, answer: CallAnswer) -> Callable:
        """Choose the call for inputs whose masks gave this answer."""
        if answer.broken is not None:
            return self.reading_all(answer.broken)
        return partial(self.run, answer.ranges)

    def run(self, ranges: torch.Tensor | None, *inputs: object) -> object:
        """Run the region as it was compiled.

        ranges  the keys that masks show each row; None: no attention reads them
        """
        if self.ranges is None:
            return self.unchecked(*inputs)
        return self.unchecked(
            *inputs, torch.empty(NO_RANGES, dtype=torch.int64) if ranges is None else ranges
        )

    def reading_all(self, broken: Condition) -> Callable:
        """Return the same region without conditions of this kind, which the first call that breaks one
        compiles."""
        kind = type(broken)
        if kind not in self.without:
            warnings.warn(
                f"streambp: This call's mask breaks the assumption that {broken}. The region is compiled "
                f"again without it; results stay exact, but attention takes longer. {HELP[kind]}",
                StreamHint,
                stacklevel=2,
            )
            self.without[kind] = self.compiled_again(self.choices, kind is VisibleRanges)
        return self.without[kind].call

    def chosen(self, choices: Choices) -> CompiledRegion:
        """Compile the same region for other choices; return itself if it runs unchunked."""
        if self.streamed is None:
            return self
        if choices not in self.variants:
            self.variants[choices] = self.compiled_again(choices, self.may_check, self.by_ranges)
        return self.variants[choices]

    def compiled_again(self, choices: Choices, may_check: bool, by_ranges: bool = False) -> CompiledRegion:
        """Compile the same region once more, outside of Dynamo."""
        parts = (*self.given, self.region, self.axis, self.config, self.refuse)
        mode = internals.detect_fake_mode(self.fakes)
        with internals.tracing_of(mode), internals.NothingReal(()):
            again = CompiledRegion(*parts, may_check, self.candidate.unfit, choices, by_ranges)
            again.settle()
        return again

    def compare_plans(self, text: str) -> None:
        """Check that all processes which run this region run its collectives in the same order.

        text  of the region, the same on every process

        Raises `PlansDiffer`.
        """
        for group, plan in collectives_of(self.streamed).items():
            others = internals.others_with_another(f"{self.config} {text}", group, plan)
            if others:
                raise PlansDiffer(
                    f"streambp: Processes {others} run other collectives than this one in the region at "
                    f"{self.begins()}, and would wait for each other. Compile the same functions with the "
                    "same options and shapes on every process, and name the device in "
                    'options={"device": ...} where their GPUs differ'
                )

    def begins(self) -> str:
        """Return the user's line of its first operation."""
        return next(filter(None, map(where_of, self.module.graph.nodes)), "")

    def is_graph_input(self, placeholder: Node) -> bool:
        """Is an input of the joint graph an input of the whole graph or a view of one? Such a value is alive
        in any case."""
        sources = dict(zip(self.streamed.placeholders, (node for _, node in self.flat)))
        source = sources.get(placeholder)
        return source is not None and viewed(source).op == "placeholder"

    def input_marks(self, tangent_of: Sequence[int]) -> dict[int, tuple[Mark, ...]]:
        """Map inputs of the joint graph to their token marks. Where the region makes its tokens itself, the
        tangents have the marks of its outputs.

        tangent_of  for each tangent, the output that it is the gradient of
        """
        marks, nodes = self.axis.marks, [n for _, n in self.flat]
        marked = any(n in marks and not is_parameter(fake_of(n)) for n in nodes if n is not None)
        if not marked and not self.spans_processes:  # the outputs may be DTensors, whose parts are others
            nodes += [self.region.outputs[i] for i in tangent_of]
        return {i: marks[n] for i, n in enumerate(nodes) if n in marks}

    def checkable(self) -> list[int]:
        """List the positions of inputs that may be masks: no parameters, and no gradients required."""
        return [
            i
            for i, (_, n) in enumerate(self.flat)
            if n is not None
            and self.may_check
            and isinstance(fake_of(n), torch.Tensor)
            and not internals.is_sharded(fake_of(n))
            and not fake_of(n).requires_grad
            and not isinstance(fake_of(n), torch.nn.Parameter)
        ]

    def returned(self) -> int:
        """Count the outputs that AOTAutograd makes of those of the region."""
        outputs = (internals.parts_of(fake_of(n)) for n in self.region.outputs)
        others = len(outputs_of(self.module)) - len(self.region.outputs)  # buffers that it writes into
        return sum(map(len, outputs)) + others

    def outputs(self) -> list[object]:
        """List the joint graph's output for each output of the region; the first part of a DTensor."""
        parts = [internals.parts_of(fake_of(n)) for n in self.region.outputs]
        ends = [0, *itertools.accumulate(map(len, parts))]
        flat = outputs_of(self.streamed.joint)
        return [flat[i] for i in ends[:-1]]

    def device(self) -> torch.device:
        """Return the device of the first input that is a tensor; the CPU if there is none."""
        return next((f.device for f in self.fakes if isinstance(f, torch.Tensor)), torch.device("cpu"))

    # Callbacks of AOTAutograd

    def cut(self, joint: GraphModule, joint_inputs, *, num_fwd_outputs: int, **kwargs):
        """Partition the joint graph: AOTAutograd's ``partition_fn``."""
        internals.read_meshes_of_primals(joint, len(joint_inputs[1]))
        self.report.joint = joint
        if not self.streams(joint, num_fwd_outputs, len(joint_inputs[1])):
            once = self.writes or routed(joint.graph.nodes) is not None
            return internals.keep_inputs_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, once=once, **kwargs
            )
        return forward_and_backward(self.streamed, num_fwd_outputs, self.located)

    def streams(self, graph_module: GraphModule, forward_outputs: int, tangents: int) -> bool:
        """Stream the region if the passes can; otherwise record the reason, and warn if it costs memory."""
        if self.report.refusal is not None:  # traced again, to run unchunked
            return False
        try:
            with time_limit(self.config.analysis_seconds, self.tell), phase("preparing the joint graph"):
                self.streamed = self.report.streamed = self.stream(graph_module, forward_outputs, tangents)
        except CannotStream as refused:
            if defect := isinstance(refused, Abandoned):
                internals.log.debug("streaming a region failed", exc_info=True)
            self.report.refusal = refusal_of(refused, "", "region", self.module)
            free = isinstance(refused, NothingToStream) or self.candidate.is_fragment(graph_module)
            self.report.costs_nothing = free and not defect
            if not self.report.costs_nothing:
                self.refuse(self.report.refusal, self.candidate.whole_cost(graph_module))
            if self.written_out():
                raise TraceAgain from None
        return self.streamed is not None

    def written_out(self) -> bool:
        """Replace the operators that exist only for streaming by torch's own. Were there any?"""
        return any([torch_attention(self.module), write_out(self.module)])

    def tell(self, text: str) -> None:
        warnings.warn(f"streambp: {text}. The region begins at {self.begins()}.", StreamHint, stacklevel=2)

    def stream(self, graph_module: GraphModule, forward_outputs: int, tangents: int) -> StreamedRegion:
        self.candidate.check(graph_module)
        internals.inline_numbers(graph_module)
        weighs = self.config.memory_budget is not None
        device = planned_for(self.config.device, self.fakes, weighs, self.spans_processes)
        before = forward_outputs - self.returned()
        tangent_of = self.candidate.tangent_of(graph_module, tangents, before)
        region = stream(
            graph_module,
            Ends(forward_outputs, tangent_of if tangents else ()),
            JointInputs(
                self.candidate.length(),
                self.input_marks([i - before for i in tangent_of] if tangents else ()),
                self.checkable(),
                [i for i, (_, n) in enumerate(self.flat) if n is not None and n.op != "placeholder"],
                self.ranges,
            ),
            replace(self.choices, chunk_size=self.config.chunk_size),
            Machine(self.compile_body, target_of(self.device(), device.capability), device, bytes_of_chunk),
        )
        self.check_width(region)
        self.note_full_length(region)
        return region

    def compile_body(self, body: Body, chunk: int) -> Callable:
        config = self.config
        self.bodies.append(internals.compile_body(body, chunk, config.mode, self.tell, config.cache))
        return self.bodies[-1]

    def settle(self) -> None:
        """Wait until the kernels of its bodies are built; if one cannot be, run the region unchunked."""
        try:
            for body in self.bodies:
                body.wait()
        except internals.NO_DEFECTS:
            raise
        except Exception as error:
            self.guard, self.unchecked = None, self.unstreamed(error)
            self.call = self.plain()

    def check_width(self, region: StreamedRegion) -> None:
        """Warn of values at full length that are wider than a streamed program may hold. Raises
        `CannotStream` under ``strict``."""
        programs = (s.program for s in (region.forward, region.backward) if s is not None)
        for node in dict.fromkeys(n for program in programs for n in program.too_wide):
            refusal = Refusal(
                target_name(node),
                "This value is much wider than the hidden states, and the streamed region keeps it at full "
                "length",
                "Reduce its features before an operation that reads other tokens' rows of it",
                where_of(node),
            )
            if self.config.strict:
                raise CannotStream(refusal)
            cost = mebibytes(bytes_of(value_of(node)))
            warnings.warn(f"streambp: {refusal}. It takes {cost}.", StreamHint, stacklevel=2)

    def note_full_length(self, region: StreamedRegion) -> None:
        """Note operations at full length that hold far more than the region's inputs and outputs. Operations
        that compute with weights alone are left out, because they do not grow with the tokens."""
        if region.fused:  # its operations at full length include gradients of weights
            return
        program = region.forward.program
        given = {p: None if n is None else fake_of(n) for p, (_, n) in zip(region.placeholders, self.flat)}
        taken, largest = widest_at_full_length(program, made_of_weights(region.joint.graph, given))
        if largest is not None and taken > LOGITS * bytes_needed(program, region.analysis):
            self.report.at_full_length, self.report.widest_part = taken, where_of(largest)
            internals.log.info("a part runs at full length, and holds %d bytes: %s", taken, where_of(largest))

    def compile_forward(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        return driver_of(module) or internals.compile_graph(module, inputs)

    def compile_backward(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        driver = driver_of(module)
        if driver is not None:
            return driver
        with internals.disable_current_modes():  # the first backward may be that of a memory simulation
            run = internals.compile_graph(module, inputs, is_backward=True)

        def take(args: list) -> list:
            with within(InRegion(self.report, "backward")):
                return run(args)

        return boxed(Driver("unchunked_backward", take))

    def compile_inference(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        if not self.streams(module, len(outputs_of(module)), 0):
            return internals.compile_graph(module, inputs, is_inference=True)
        return boxed(self.located(run_forward(self.streamed, outputs_of(self.streamed.joint))))

    def located(self, driver: Driver) -> Driver:
        """Wrap a driver so that its errors name the region."""
        direction = driver.__name__.rpartition("_")[2]

        def take(args: list) -> list:
            with (
                within(InRegion(self.report, direction)),
                noting(
                    lambda: (
                        f"streambp: in the {direction} of {self.report.name or 'a region'}"
                        f"{internals.this_process()} "
                        f"(streambp_compile.explain prints it){lines_of(self.module.graph.nodes)}"
                    )
                ),
            ):
                return driver.take(args)

        return Driver(driver.__name__, take)


def refusal_of(error: Exception, doing: str, what: str, module: GraphModule) -> Refusal:
    """Convert an error to a refusal; one without a line names the first line of the module.

    doing  the stage, if the error does not know it
    what   "region" or "graph": the part that runs unchunked
    """
    first = next(filter(None, map(where_of, module.graph.nodes)), "")
    if isinstance(error, CannotStream) and not isinstance(error, Abandoned):
        return replace(error.refusal, where=error.refusal.where or first)
    refusal = error.refusal if isinstance(error, Abandoned) else abandoned(doing, error).refusal
    return replace(refusal, op=what, where=first)

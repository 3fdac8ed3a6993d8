"""One distinct region, compiled: AOTAutograd → pipeline → Inductor, as an autograd node of its own."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from . import internals
from .config import Config
from .dynamo.attention import torch_attention
from .dynamo.block_functions import write_out
from .dynamo.regions import written_buffers, written_storages
from .dynamo.token_axes import SHORTEST_STREAMED, Axis, fake_of, is_parameter
from .passes.ir import (
    CannotStream,
    Condition,
    EveryRowHasVisibleKey,
    Layout,
    Mark,
    MaskedOutsideBand,
    PositionsIncrease,
    Refusal,
    Size,
    bytes_of,
    hint,
    is_tensor,
    value_of,
    viewed,
    where_of,
)
from .passes.kernels.products import scale_
from .passes.kernels.simulated_device import device_type
from .passes.phases import Abandoned, abandoned, phase, time_limit
from .passes.planning.choices import DEFAULT, Choices
from .passes.rules import CostClass, cost_of, find_rule, is_product
from .passes.split import Region
from .pipeline import StreamedRegion, outputs_of, stream, unit
from .report import NotStreamed, RegionReport, StreamHint, mebibytes
from .runtime.gradient_ownership import is_handed_over, ours_alone, sole_owners
from .runtime.mask_guards import Guard
from .runtime.memory_simulation import bytes_of_chunk
from .runtime.opaque_calls import Driver, boxed, driver_of, one_call
from .runtime.places import InRegion, within
from .runtime.runner import lines_of, noting
from .runtime.sizes import cannot_tell
from .target_device import planned_for, target_of

HELP = {
    EveryRowHasVisibleKey: "Pad on the right, or mask with booleans or -inf instead of the lowest number.",
    PositionsIncrease: "Number the tokens of each packed sequence in ascending order.",
    MaskedOutsideBand: "Make causal masks by torch.tril or is_causal=True inside the compiled function.",
}


WITHOUT_MEMORY = (CostClass.VIEW, CostClass.FREE)

SMALLEST_BLOCK = 512  # bytes: what torch's allocator on a GPU rounds up to


class NothingToStream(CannotStream):
    """Nothing to warn about: the graph is tiny, or has no tokens."""


class TraceAgain(Exception):
    """An unchunked region takes torch's own attention, and must be traced again with it."""


class CompiledRegion:
    """One distinct region: traced by AOTAutograd, then streamed if the passes can, else compiled
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
    ):
        self.module, self.fakes, self.region, self.axis, self.config, self.refuse = (
            module,
            inputs,
            region,
            axis,
            config,
            refuse,
        )
        self.may_check, self.unfit, self.choices = may_check, unfit, choices
        self.unconditional: CompiledRegion | None = None
        self.variants: dict[Choices, CompiledRegion] = {choices: self}
        self.inputs = [n for n in region.inputs if n.op != "get_attr"]
        self.flat = [
            (i, n if len(parts) == 1 else None)
            for i, (n, parts) in enumerate(zip(self.inputs, map(internals.parts_of, inputs)))
            for _ in parts
        ]  # what AOTAutograd takes: of which input it is, and its node unless that is a tensor subclass
        self.writes = len(written_storages(region)) > len(written_buffers(region))
        self.report = RegionReport(module, recomputable=region.recomputable)
        self.streamed: StreamedRegion | None = None
        self.guard: Guard | None = None
        self.unchecked = self.compiled() if region.nodes else None
        self.call = self.checked if self.guard else self.unchecked

    def compiled(self) -> Callable:
        """The region, streamed or unchunked; compiled by Inductor alone if an internal error occurs."""
        with internals.floats_are_tensors():
            return self.streamed_or_unchunked()

    def streamed_or_unchunked(self) -> Callable:
        try:
            with internals.detect_fake_mode(self.fakes), internals.effects_inside():
                try:
                    call = self.traced()
                except TraceAgain:
                    call = self.traced()
            if self.streamed is not None and self.streamed.analysis.conditions:
                self.guard = Guard(
                    self.streamed.placeholders, self.streamed.analysis.conditions, [i for i, _ in self.flat]
                )
            return call
        except internals.NO_DEFECTS:
            raise
        except Exception as error:
            internals.log.debug("compiling a region failed", exc_info=True)
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
        """The region through AOTAutograd and the compilers that it calls."""
        compile_ = internals.aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=self.compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=self.cut,
            decompositions=internals.decompositions(),
        )
        return compile_(self.module, self.fakes)

    def checked(self, *inputs: object) -> object:
        """A call that skips keys only where the masks of its inputs allow it."""
        return self.call_for(self.guard.broken(inputs))(*inputs)

    def call_for(self, broken: Condition | None) -> Callable:
        """The call for inputs that break this condition, or none."""
        return self.unchecked if broken is None else self.reading_all(broken)

    def reading_all(self, broken: Condition) -> Callable:
        """The same region without conditions, compiled when the first call breaks one."""
        if self.unconditional is None:
            warnings.warn(
                f"streambp: This call's mask breaks the assumption that {broken}. The region is compiled "
                "again without key pruning; results stay exact, but attention takes longer. "
                f"{HELP[type(broken)]}",
                StreamHint,
                stacklevel=2,
            )
            self.unconditional = self.compiled_again(self.choices, may_check=False)
        return self.unconditional.call

    def chosen(self, choices: Choices) -> CompiledRegion:
        """The same region, compiled for other choices; itself if it runs unchunked."""
        if self.streamed is None:
            return self
        if choices not in self.variants:
            self.variants[choices] = self.compiled_again(choices, self.may_check)
        return self.variants[choices]

    def compiled_again(self, choices: Choices, may_check: bool) -> CompiledRegion:
        """The same region, compiled outside of Dynamo."""
        parts = (self.module, self.fakes, self.region, self.axis, self.config, self.refuse)
        with internals.tracing_of(internals.detect_fake_mode(self.fakes)):
            return CompiledRegion(*parts, may_check, self.unfit, choices)

    def is_graph_input(self, placeholder: Node) -> bool:
        """Is an input of the joint graph one of the whole graph, or a view of one, which is alive in any
        case?"""
        sources = dict(zip(self.streamed.placeholders, (node for _, node in self.flat)))
        source = sources.get(placeholder)
        return source is not None and viewed(source).op == "placeholder"

    def input_marks(self) -> dict[int, tuple[Mark, ...]]:
        return {i: self.axis.marks[n] for i, (_, n) in enumerate(self.flat) if n in self.axis.marks}

    def length(self) -> Size:
        """How many tokens there are, as the inputs of this region tell it.

        The axis may name an input of another region that has as many rows (labels of strided features).
        """
        values = ((n, m) for n in (*self.inputs, *self.region.nodes) for m in self.axis.marks.get(n, ()))
        sizes = (fake_of(n).shape[m.dim] for n, m in values if (m.outer, m.inner) == (1, 1))
        same = (s for s in (self.axis.length, *sizes) if hint(s) == hint(self.axis.length))
        told = (s for s in same if not cannot_tell(self.fakes, [s]))
        return next((s for s in told if s == self.axis.length), self.axis.length)

    def checkable(self) -> list[int]:
        """Positions of inputs that may be masks: those that do not require gradients and are no
        parameters."""
        return [
            i
            for i, (_, n) in enumerate(self.flat)
            if n is not None
            and self.may_check
            and isinstance(fake_of(n), torch.Tensor)
            and not fake_of(n).requires_grad
            and not isinstance(fake_of(n), torch.nn.Parameter)
        ]

    def device(self) -> torch.device:
        """Where the region runs: the device of its first input that is a tensor."""
        return next((f.device for f in self.fakes if isinstance(f, torch.Tensor)), torch.device("cpu"))

    # What AOTAutograd calls

    def cut(self, joint: GraphModule, joint_inputs, *, num_fwd_outputs: int, **kwargs):
        """AOTAutograd's partition function."""
        self.report.joint = joint
        if not self.streams(joint, num_fwd_outputs, len(joint_inputs[1])):
            return internals.keep_inputs_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, writes=self.writes, **kwargs
            )
        return self.modules(num_fwd_outputs)

    def streams(self, graph_module: GraphModule, forward_outputs: int, tangents: int) -> bool:
        """Stream the region if the passes can; otherwise record why, and warn if it costs memory."""
        if self.report.refusal is not None:  # traced again, to run whole
            return False
        try:
            with time_limit(self.config.analysis_seconds, self.tell), phase("preparing the joint graph"):
                self.streamed = self.report.streamed = self.stream(graph_module, forward_outputs, tangents)
        except CannotStream as refused:
            if defect := isinstance(refused, Abandoned):
                internals.log.debug("streaming a region failed", exc_info=True)
            self.report.refusal = refusal_of(refused, "", "region", self.module)
            free = isinstance(refused, NothingToStream) or self.is_fragment(graph_module)
            self.report.costs_nothing = free and not defect
            if not self.report.costs_nothing:
                self.refuse(self.report.refusal, self.whole_cost(graph_module))
            if self.written_out():
                raise TraceAgain from None
        return self.streamed is not None

    def written_out(self) -> bool:
        """Write the operators that are there for streaming as torch's own. Are there any?"""
        return any([torch_attention(self.module), write_out(self.module)])

    def tell(self, text: str) -> None:
        where = next(filter(None, map(where_of, self.module.graph.nodes)), "")
        warnings.warn(f"streambp: {text}. The region begins at {where}.", StreamHint, stacklevel=2)

    def stream(self, graph_module: GraphModule, forward_outputs: int, tangents: int) -> StreamedRegion:
        self.check_tokens(graph_module)
        self.check_graph(graph_module)
        internals.inline_numbers(graph_module)
        device = planned_for(self.config.device, self.fakes)
        region = stream(
            graph_module,
            self.length(),
            self.input_marks(),
            forward_outputs,
            tangents,
            self.tangent_of(tangents),
            replace(self.choices, chunk_size=self.config.chunk_size),
            functools.partial(internals.compile_body, mode=self.config.mode, tell=self.tell),
            self.checkable(),
            target_of(self.device(), device.capability),
            device,
            [i for i, (_, n) in enumerate(self.flat) if n is not None and n.op != "placeholder"],
            bytes_of_chunk,
        )
        self.check_width(region)
        return region

    def check_width(self, region: StreamedRegion) -> None:
        """Warn of values at full length that are wider than a streamed program may hold.

        Raises `CannotStream` under ``strict``.
        """
        programs = (s.program for s in (region.forward, region.backward) if s is not None)
        for node in dict.fromkeys(n for program in programs for n in program.too_wide):
            refusal = Refusal(
                str(node.target),
                "This value is much wider than the hidden states, and the streamed region keeps it at full "
                "length",
                "Reduce its features before an operation that reads other tokens' rows of it",
                where_of(node),
            )
            if self.config.strict:
                raise CannotStream(refusal)
            cost = mebibytes(bytes_of(value_of(node)))
            warnings.warn(f"streambp: {refusal}. It takes {cost}.", StreamHint, stacklevel=2)

    def check_tokens(self, graph_module: GraphModule) -> None:
        """Raises `CannotStream` where there are no tokens to cut into chunks."""
        if self.unfit is not None:
            raise CannotStream(self.unfit)
        refused = NothingToStream if self.costs_nothing(graph_module) else CannotStream
        if self.axis is None:
            raise refused(
                Refusal(
                    "graph",
                    "No token dimension was found",
                    "Pass token ids or hidden states as tensors with a token dimension",
                )
            )
        self.check_marks(graph_module, refused)
        if refused is NothingToStream and not self.axis.moving.isdisjoint(self.region.nodes):
            raise NothingToStream(
                Refusal(
                    "region",
                    "This region moves rows from one sequence to another",
                    "Nothing to do: it holds no more than the rows that go in and out",
                )
            )
        if isinstance(self.axis.length, int) and self.axis.length < SHORTEST_STREAMED:
            raise NothingToStream(
                Refusal(
                    "region",
                    f"A sequence of {self.axis.length} tokens is too short to stream",
                    "Nothing to do: its memory is small",
                )
            )

    def check_marks(self, graph_module: GraphModule, refused: type[CannotStream]) -> None:
        """Raises `CannotStream`, or what is given, where no input brings tokens into the region."""
        if not any(n in self.axis.marks for n in (*self.inputs, *self.region.nodes)):
            small = self.whole_cost(graph_module) <= max(
                (bytes_of(fake_of(n)) for n in self.axis.marks), default=0
            )
            raise (NothingToStream if small else refused)(
                Refusal(
                    "region",
                    "This region has no token dimension",
                    "Nothing to do for small values; otherwise check which earlier operation removes the "
                    "token dimension",
                )
            )
        if not any(n in self.axis.marks and not is_parameter(fake_of(n)) for n in self.inputs) and not any(
            n in self.axis.mixing for n in self.region.nodes
        ):
            raise refused(
                Refusal(
                    "region",
                    "This region creates its tokens from values without a token dimension, such as an image",
                    "Nothing to do for image patches: the patch embedding runs unchunked",
                )
            )

    def check_graph(self, graph_module: GraphModule) -> None:
        """Raises `CannotStream` for sizes that no input tells, and for side effects."""
        sizes = (s for n in graph_module.graph.nodes if is_tensor(n) for s in value_of(n).shape)
        untold = cannot_tell(self.fakes, [self.length(), *sizes])
        if untold:
            raise CannotStream(
                Refusal(
                    "region",
                    f"A size of {untold[0]} cannot be derived from the sizes of the region's inputs",
                    "Pass a tensor or an integer that has this size",
                )
            )
        for node in graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.with_effects
        ):
            raise CannotStream(
                Refusal(
                    str(node.args[1]),
                    "This operation has a side effect, which must happen exactly once and in order",
                    "Move it out of the layers of the model",
                    where_of(node),
                )
            )

    def tangent_of(self, tangents: int) -> list[int]:
        """For each tangent, the output that it is the gradient of."""
        found = [
            i
            for i, n in enumerate(self.region.outputs)
            if isinstance(fake_of(n), torch.Tensor) and fake_of(n).requires_grad
        ]
        if tangents and len(found) != tangents:
            raise CannotStream(
                Refusal(
                    "region",
                    f"This region gets {tangents} gradients for {len(found)} differentiable outputs",
                    "Do not change the inputs of a layer in place",
                )
            )
        return found

    def costs_nothing(self, graph_module: GraphModule) -> bool:
        """Is no value inside larger than one that goes in or out, and exists in any case? Or than an
        allocator's smallest block?"""
        ends = (fake_of(n) for n in (*self.inputs, *self.region.outputs))
        widest = max((bytes_of(e) for e in ends if isinstance(e, torch.Tensor)), default=0)
        return self.whole_cost(graph_module) <= max(widest, SMALLEST_BLOCK)

    def is_fragment(self, graph_module: GraphModule) -> bool:
        """Is this a piece between graph breaks that takes no more memory than what goes in and out?

        It has no products, and Inductor fuses the rest.
        """
        calls = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        cheap = (cost_of(n) in WITHOUT_MEMORY or find_rule(n) and not is_product(n) for n in calls)
        return self.costs_nothing(graph_module) and all(cheap)

    def whole_cost(self, graph_module: GraphModule) -> int:
        return max(
            (
                bytes_of(value_of(n))
                for n in graph_module.graph.nodes
                if is_tensor(n) and n.op == "call_function"
            ),
            default=0,
        )

    def modules(self, forward_outputs: int) -> tuple[GraphModule, GraphModule]:
        """Forward and backward as graph modules of one call each, with their values in the order of
        AOTAutograd."""
        region = self.streamed
        owner = GraphModule({}, Graph())
        outputs = outputs_of(region.joint)
        if region.fused:
            kept = [o for o in outputs[forward_outputs:]]
            saved = list(dict.fromkeys(o for o in kept if isinstance(o, Node) and o not in region.tangents))
            returned = [*outputs[:forward_outputs], *saved]
            driver = self.located(run_forward(region, returned, forward_outputs))
            forward = one_call(owner, region.placeholders, driver, returned)
            backward = one_call(
                owner, [*saved, *region.tangents], run_scaled(saved, kept, region.tangents[0]), kept
            )
            return forward, backward
        symbols = [n for n in region.saved if not is_tensor(n)]
        tensors = [n for n in region.saved if is_tensor(n)]
        returned = [*outputs[:forward_outputs], *tensors, *symbols]
        forward = one_call(owner, region.placeholders, self.located(run_forward(region, returned)), returned)
        given = [*symbols, *tensors, *region.tangents]
        backward = one_call(
            owner, given, self.located(run_backward(region, given)), outputs[forward_outputs:]
        )
        return forward, backward

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
        """The same driver, whose errors name the region."""
        direction = driver.__name__.rpartition("_")[2]

        def take(args: list) -> list:
            with (
                within(InRegion(self.report, direction)),
                noting(
                    lambda: (
                        f"streambp: in the {direction} of {self.report.name or 'a region'} "
                        f"(streambp_compile.explain prints it){lines_of(self.module.graph.nodes)}"
                    )
                ),
            ):
                return driver.take(args)

        return Driver(driver.__name__, take)


def refusal_of(error: Exception, doing: str, what: str, module: GraphModule) -> Refusal:
    """An error as a refusal; without a line of its own, it names the first line of the module.

    doing  the stage, if the error does not know it
    what   "region" or "graph": what runs unchunked
    """
    first = next(filter(None, map(where_of, module.graph.nodes)), "")
    if isinstance(error, CannotStream) and not isinstance(error, Abandoned):
        return replace(error.refusal, where=error.refusal.where or first)
    refusal = error.refusal if isinstance(error, Abandoned) else abandoned(doing, error).refusal
    return replace(refusal, op=what, where=first)


def run_forward(region: StreamedRegion, outputs: Sequence[object], returned: int | None = None) -> Driver:
    """The forward of a region.

    returned  of a fused region, the number of outputs before the gradients, which `run_scaled` overwrites
    """
    runner = region.forward.runner
    index = {o: i for i, o in enumerate(region.forward.program.outputs) if isinstance(o, Node)}
    placeholders = region.placeholders

    def take(args: list) -> list:
        inputs = dict(zip(placeholders, args))
        args.clear()
        owned = frozenset(n for n, value in inputs.items() if is_handed_over(value))
        given = storages(value for n, value in inputs.items() if n not in owned)
        passed = {n: inputs[n] for n in outputs if n in inputs}
        for tangent in region.tangents if region.fused else ():
            inputs[tangent] = unit(tangent)
        results = runner(inputs, owned)
        values = [
            results[index[o]] if o in index else passed.get(o, o) if isinstance(o, Node) else o
            for o in outputs
        ]
        return (
            values
            if returned is None
            else [*values[:returned], *apart(values[returned:], given | storages(values[:returned]))]
        )

    return Driver("streambp_forward", take)


def storages(values: Iterable[object]) -> weakref.WeakSet:
    return weakref.WeakSet(v.untyped_storage() for v in values if isinstance(v, torch.Tensor))


def apart(values: Sequence[torch.Tensor], taken: weakref.WeakSet) -> list[torch.Tensor]:
    """The values as tensors of their own, in memory that may be overwritten; ``taken`` is memory of
    others."""
    found = []
    for value in values:
        own = value.untyped_storage() not in taken and Layout.of(value) is not None
        found.append(value.detach() if own else value.clone(memory_format=torch.contiguous_format))
        taken.add(found[-1].untyped_storage())
    return found


def run_scaled(saved: Sequence[Node], outputs: Sequence[object], unscaled: Node) -> Driver:
    """The backward of a fused head: scale gradients that exist already, for a unit tangent.

    They are scaled in place, unless the graph is kept and another backward will read them. On a GPU they are
    scaled by one as well: reading the tangent would synchronise. In half precision a tangent that is no power
    of two rounds them a second time.
    """

    def take(args: list) -> list:
        values, tangent = dict(zip(saved, args)), args[-1]
        args.clear()
        kept = internals.graph_is_kept()
        if not is_on_host(tangent) or tangent.item() != 1:
            for node in saved:
                values[node] = values[node].clone() if kept else values[node]
                scale_(values[node], tangent)
        values[unscaled] = tangent
        gradients = [values[o] if isinstance(o, Node) else o for o in outputs]
        return gradients if kept else sole_owners(gradients)

    return Driver("streambp_scale", take)


def is_on_host(value: torch.Tensor) -> bool:
    """Can its value be read without synchronising with a device?"""
    return device_type(value) == "cpu"


def run_backward(region: StreamedRegion, given: Sequence[Node]) -> Driver:
    runner = region.backward.runner
    tangents = region.tangents

    def take(args: list) -> list:
        inputs = dict(zip(given, args))
        args.clear()
        owned = frozenset(n for n in tangents if ours_alone(inputs[n]))
        return sole_owners(runner(inputs, owned))

    return Driver("streambp_backward", take)

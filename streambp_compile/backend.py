"""``torch.compile(..., backend="streambp")``: from a Dynamo graph to a chain of streamed regions.

    Dynamo graph → inline checkpoint wrappers → find the token axes → split → for each distinct region:
    AOTAutograd → pipeline → Inductor

Every region is an autograd node of its own, so that the gradients of a layer's weights reach autograd
(and its hooks) when the layer is done. Equal regions share one trace, one analysis and one compilation.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from . import internals
from .config import WITH_GRAPHS, Config
from .device.target_device import free_memory, is_on_gpu, memory_of_gpu
from .dynamo.attention.attention_calls import one_attention
from .dynamo.attention.flash_attn import flash_attn_as_attention
from .dynamo.attention.joint_attention import part_joint_attention
from .dynamo.attention.leading_columns import move_leading_columns
from .dynamo.attention.padded_masks import pad_before_masks
from .dynamo.attention.relative_shifts import write_relative_shifts
from .dynamo.attention.score_filters import write_score_filters
from .dynamo.attention.shared_keys import part_shared_keys
from .dynamo.attention.turned_matrices import part_turned_matrices
from .dynamo.blocks.blocks import part_blocks
from .dynamo.blocks.receptive_fields import write_receptive_fields
from .dynamo.blocks.strided_reads import write_strided_reads
from .dynamo.blocks.windows import cut_rows_first, write_windows
from .dynamo.loops.associative_scans import scan_in_blocks
from .dynamo.loops.tiles import taken
from .dynamo.loops.unrolled_loops import distribute_loops
from .dynamo.loops.unrolled_losses import merge_unrolled
from .dynamo.reading.aten import to_aten
from .dynamo.reading.graph_inputs import attributes_as_inputs, fakes_of, meshes_as_attributes, with_attributes
from .dynamo.reading.modes import is_switch, note_autocast, write_inference_as_no_grad
from .dynamo.reading.processes import check_parts, spans_processes
from .dynamo.reading.token_axes import batch_sizes, capturing_once, find_axes, joined
from .dynamo.reading.values import fake_of, own_of, wants_gradient
from .dynamo.rows.indexed_rows import index_rows
from .dynamo.rows.masked_values import choose_masked_values
from .dynamo.rows.picked_branches import is_in_branches, prove_branches, with_gradients_if_taken
from .dynamo.rows.picked_losses import ignore_cut_rows
from .dynamo.rows.picked_rows import depends_on_data, write_picked_rows
from .dynamo.rows.row_selection import select_rows_first
from .dynamo.rows.table_rows import take_table_rows_first
from .dynamo.user_code.assertions import part_assertions, with_assertions
from .dynamo.user_code.detached_values import detach_operands
from .dynamo.user_code.higher_order import fold_maps, has_other_transforms, inline_wrappers
from .dynamo.user_code.python_floats import floats_as_tensors, reads_number
from .dynamo.user_code.unknown_sizes import OfUnknownSize, part_unknown_sizes, write_counts_as_sums
from .dynamo.writes.early_values import early_views, weight_updates
from .dynamo.writes.returned_views import part_returned_views, with_returned_views
from .dynamo.writes.state_updates import only_updates_state
from .dynamo.writes.written_inputs import written_storages
from .dynamo.writes.written_values import write_filled_values, write_new_values
from .lazy.expressions import LazyRegion
from .memory.chain_plan import ChainPlan, may_leave
from .memory.memory_limits import Budget, FreeMemory, Limit, OverBudget
from .memory.planned_chain import Links, PlannedChain, SpendingChain, costs_of
from .memory.spare_memory import SpareMemory
from .passes.ir import UNKNOWN_SIZE, CannotStream, Refusal, bytes_of, copied, hint, outputs_of, where_of
from .passes.phases import SizeFixed, clocked, may_fix_sizes, phase, time_limit, untimed
from .passes.split import Region, split
from .regions.candidate import SMALLEST_BLOCK
from .regions.compiled_region import CompiledRegion, refusal_of
from .regions.cuts import (
    WIDER,
    WIDER_THAN_LAYERS,
    lazy_regions,
    subclass_between,
    traits_of,
    whole_graph,
    with_sizes,
)
from .regions.linked_regions import Cut, Later, linked
from .regions.region_axes import axis_of
from .regions.region_modules import build_region, region_text
from .reporting.hints import hint_at_freed_weights, hint_at_outputs, watched
from .reporting.notices import NotStreamed, PlansDiffer, StreamHint, mebibytes, warn_refused
from .reporting.progress import Compiling
from .reporting.region_report import RegionReport
from .reporting.report import Report, predict


def streambp(
    module: GraphModule, example_inputs: Sequence[object], *, mode: str | None = None, options=None
) -> Callable:
    """Compile a Dynamo graph: the backend, found through the entry point ``torch_dynamo_backends``. Raises
    ValueError for an unknown option or a bad value, and `NotStreamed` under ``strict`` where a region
    cannot be streamed."""
    internals.ignore_library_logging_from_now_on()  # again: torch._dynamo.reset forgets it
    chain = Chain(module, example_inputs, Config.of(mode, options))
    if internals.is_compiled_backward():
        chain.hint(COMPILED_AUTOGRAD)
        return internals.compile_plainly(module, example_inputs, mode)
    if not internals.is_ddp_piece():
        return chain.compiled()
    chain.hint(IN_PIECES)
    with internals.apart_from_ddp():
        return chain.compiled()


# Before Dynamo traces: torch.compile imports this module when it is called.
internals.ignore_library_logging_from_now_on()
internals.keep_ddp_graphs_whole(__package__)
internals.trace_scans_as(scan_in_blocks, __package__)
internals.trace_methods_of_attributes()
internals.capture_picked_rows(__package__)
internals.break_where_numbers_are_read(__package__)
internals.trace_value_checks_as_assertions(__package__)

COMPILED_AUTOGRAD = (
    "Compiled autograd traces the backward of streamed regions into graphs of its own. Gradients stay exact, "
    "but more of them may exist at a time. Set torch._dynamo.config.compiled_autograd = False"
)
IN_PIECES = (
    "DistributedDataParallel's optimizer cut the graph into gradient buckets before this backend was called, "
    'so that a loss may be cut off from its head and its logits exist. Pass backend="streambp" itself, not a '
    "function that calls it, or set torch._dynamo.config.optimize_ddp = False"
)


SHARE_OF_FREE = (
    "memory_budget is a share of what is free, which is not the same on every process, and processes that "
    "compute together must plan alike. It is left out; give a number of bytes instead"
)


SMALL = 0.05  # share of what a step holds in any case: a region that costs less gets no warning


@dataclass(frozen=True)
class Reporting:
    """A ``backend=`` of ``torch.compile`` with options that are already checked, which fills a report."""

    config: Config
    report: Report

    def __call__(self, module: GraphModule, example_inputs: Sequence[object]) -> Callable:
        return Chain(module, example_inputs, self.config, self.report).compiled()


TRANSFORMED = Refusal(
    "torch.func",
    "A torch.func transform (vjp, jvp) in the compiled function makes the backward part of the forward",
    "Compile the function that is transformed, or use torch.func.grad or loss.backward()",
)


UPDATE = Refusal(
    "graph",
    "It only writes into its inputs (an optimizer, a moving average, gradient clipping)",
    "Nothing to do",
)


class Chain:
    """Compiles one Dynamo graph to a function of the graph's inputs."""

    def __init__(
        self,
        module: GraphModule,
        example_inputs: Sequence[object],
        config: Config,
        report: Report | None = None,
    ):
        self.given, self.example_inputs = module, list(example_inputs)
        self.spans_processes = spans_processes(module.graph.nodes)
        self.config = config.on_every_process() if self.spans_processes else config
        self.attributes: list[torch.Tensor] = []
        self.branches, self.read_in_branches = 0, dict[str, tuple[int, ...]]()
        self.batch_is_fixed = False  # no other batch shares this graph
        self.of_unknown_size: OfUnknownSize | None = None
        self.held = 0  # bytes that a step holds in any case
        self.report = Report() if report is None else report
        self.only_updates = only_updates_state(module)
        if config.mode in WITH_GRAPHS and not self.only_updates:
            self.say_no_graphs()

    def say_no_graphs(self) -> None:
        """Warn or note that a mode which usually records CUDA graphs records none here."""
        text = (
            f"mode={self.config.mode!r} records no CUDA graphs here, because sizes and buffers change with "
            'every chunk. To launch fewer kernels, raise options={"chunk_size": ...}'
        )
        if self.config.mode == "reduce-overhead":
            self.hint(text)
        else:
            self.report.notes.append(f"note: {text}.")

    def compiled(self) -> Callable:
        """Compile the graph to a chain of regions, or by Inductor alone. Inductor alone compiles a graph that
        only updates values, and one that uneven DTensors or a defect of this package keep from being cut
        into regions."""
        if self.only_updates:
            return self.plain(UPDATE, costs_nothing=True)
        self.report.seconds["Dynamo"] = self.report.seconds.get("Dynamo", 0.0) + internals.seconds_so_far()
        with clocked(self.report.seconds), Compiling() as self.progress:
            try:
                with may_fix_sizes():
                    call = self.chained_or_plain()
            except SizeFixed:
                self.batch_is_fixed = True
                call = self.chained_or_plain()
            self.progress.last = self.report.headline
        if internals.log.isEnabledFor(logging.INFO):
            predict(self.report)
            internals.log.info("%s", self.report.summary)
        return call

    def chained_or_plain(self) -> Callable:
        """Compile a graph that does more than update values: `compiled`, without its timing and report."""
        if internals.on_cpu(self.example_inputs):
            internals.prepare_compiler()
        try:
            # A failure in there has changed nothing, so the graph may run as it was given.
            with internals.NothingReal([*self.example_inputs, *attributes_of(self.given)]):
                return self.chained()
        except (*internals.NO_DEFECTS, OverBudget, PlansDiffer):
            raise
        except Exception as error:
            internals.log.debug("a graph could not be cut into regions", exc_info=True)
            if is_of_data(self.given):
                internals.break_at_picked_rows()
            refusal = refusal_of(error, "linking regions", "graph", self.given)
            if self.config.strict:
                raise NotStreamed(str(refusal)) from error
        known = refusal.reason != UNKNOWN_SIZE.reason
        widest = widest_of(n for n in self.given.graph.nodes if n.op not in ("placeholder", "get_attr"))
        ends = widest_of([*placeholders_of(self.given), *self.given.graph.output_node().all_input_nodes])
        call = self.plain(
            refusal, small := refusal.op == TRANSFORMED.op and widest <= max(ends, SMALLEST_BLOCK)
        )
        if not small:
            self.refuse(refusal, widest or None if known else None)
        return call

    def plain(self, refusal: Refusal, costs_nothing: bool = False) -> Callable:
        """Compile the given graph by Inductor alone, and report it as one unchunked region."""
        call = internals.compile_plainly(self.given, self.example_inputs, self.config.mode)
        whole = RegionReport(self.given, refusal=refusal, costs_nothing=costs_nothing)
        fakes = fakes_of(placeholders_of(self.given), self.example_inputs)
        self.report.add(self.given, [whole], (), call, fakes)
        return call

    def rewritten(self) -> GraphModule:
        """Copy the graph and apply all rewrites that precede autograd."""
        module = copied(self.given)
        self.attributes = attributes_as_inputs(module)
        meshes_as_attributes(module)
        with phase("reading numbers that change"):
            constants = floats_as_tensors(module)
            if any(map(reads_number, module.graph.nodes)):
                internals.break_at_read_numbers()
        if constants:
            internals.make_constant(constants)
        for rewrite, doing in REWRITES:
            with phase(doing):
                module = rewrite(module)
            if rewrite is inline_wrappers:
                self.attributes += attributes_as_inputs(module)
            if rewrite is to_aten:
                self.prove_branches(module)
            if rewrite is note_autocast:
                self.of_unknown_size = part_unknown_sizes(module)
        if is_of_data(module):
            internals.break_at_picked_rows()
        return module

    def fakes_of(self, module: GraphModule) -> list[object]:
        """Return the fake values of all inputs of a module, attributes included."""
        return fakes_of(placeholders_of(module), [*self.example_inputs, *self.attributes])

    def prove_branches(self, module: GraphModule) -> None:
        """Prove that branches on picked rows may always be taken, or have Dynamo trace again. Dynamo has
        traced only one side of each of these branches."""
        before = len(outputs_of(module))
        with phase("reading branches on whether a mask picks rows"):
            self.read_in_branches = prove_branches(module)
        if any(map(is_in_branches, module.graph.nodes)):
            internals.break_at_picked_rows()
        self.branches = len(outputs_of(module)) - before

    def cut(self) -> Cut:
        graph = self.module.graph
        with phase("finding the token dimension"):
            axes = find_axes(self.module, self.fakes)
            for size in batch_sizes(axes):  # Dynamo guards on these: it compiles another graph for others
                int(size) if self.batch_is_fixed else bool(size <= MOST_SEQUENCES * hint(size))
        axis = joined(axes)
        with phase("cutting the graph into regions"):
            updates, views = weight_updates(graph), early_views(graph, axis)
            apart = {n for n in graph.nodes if is_switch(n)}.union(updates, views)
            regions = split(graph, traits_of(graph, axis), apart.__contains__) if axis else ()
            unfit = subclass_between(regions)
            if unfit is not None or not regions:
                return Cut(
                    () if unfit else axes,
                    (),
                    (),
                    [with_sizes(r, graph) for r in whole_graph(graph)],
                    {},
                    unfit,
                )
            lazy: dict[Node, Region] = {}
            broken = internals.graph_break(self.given)
            regions, lazy = lazy_regions(regions, axis, WIDER if broken is None else WIDER_THAN_LAYERS)
            own = () if self.of_unknown_size is None else self.of_unknown_size.returned
            hint_at_outputs(self.hint, self.returned().difference(own), regions, axis, broken)
            lazy = {n: with_sizes(region, graph) for n, region in lazy.items()}
        return Cut(axes, updates, views, [with_sizes(r, graph) for r in regions], lazy)

    def chained(self) -> Callable:
        """Cut the graph into regions, compile them and link them; raise `CannotStream` if that fails."""
        if has_other_transforms(self.given.graph):
            raise CannotStream(TRANSFORMED)
        check_parts(self.given.graph.nodes)
        with time_limit(self.config.analysis_seconds, self.hint), capturing_once():
            self.module = self.rewritten()
            self.placeholders = placeholders_of(self.module)
            self.fakes = self.fakes_of(self.module)
            views = part_returned_views(self.module)
            assertions = part_assertions(self.module)
            cut = self.cut()
        self.held = held_by(cut.regions, self.placeholders)
        built: dict[str, CompiledRegion] = {}

        def compiled(region: Region) -> CompiledRegion:
            module, inputs = build_region(self.module, region, cut.views)
            own = axis_of(region, cut.axes)
            text = region_text(module, inputs, own, region)
            if text not in built:
                built[text] = CompiledRegion(
                    module, inputs, region, own, self.config, self.refuse, unfit=cut.unfit
                )
                built[text].compare_plans(text)
            return built[text]

        links = [(compiled(region), region) for region in self.told(cut.regions)]
        for region in built.values():
            region.settle()
        later = self.computed_later(cut, compiled)
        parts = (later, self.placeholders, cut, outputs_of(self.module))
        links, call = self.planned(links, lambda chain, plan: linked(chain, plan, *parts), cut)
        call = with_assertions(call, assertions)
        call = with_returned_views(call, views, self.placeholders, outputs_of(self.module))
        if self.of_unknown_size is not None:
            call = self.of_unknown_size.after(call)
        call = with_gradients_if_taken(call, self.read_in_branches, self.branches, self.placeholders)
        self.record(links, [a.length for a in cut.axes], call)
        return watched(self.hint, with_attributes(call, self.attributes), self.example_inputs)

    def told(self, regions: Sequence[Region]) -> Iterator[Region]:
        """Yield the regions, and show on the terminal's progress line which one is compiled."""
        for i, region in enumerate(regions):
            where = next(filter(None, map(where_of, region.nodes)), "no operation")
            self.progress.region(i, len(regions), where)
            yield region

    def record(self, links: Links, lengths: Sequence[object], call: Callable) -> None:
        """Add the chain to the report, and the report to the structured trace."""
        known = len(self.report.regions)
        self.report.add(self.module, [r.report for r, _ in links], lengths, call, self.fakes)
        internals.trace_artifact("streambp_report", lambda: str(self.report))
        for region in self.report.regions[known:]:
            for name, text in region.artifacts():
                internals.trace_artifact(name, text)

    def planned(self, links: Links, link: Callable, cut: Cut) -> tuple[Links, Callable]:
        """Link the chain by the fastest plan within the user's budget or a GPU's free memory. Free memory
        counts on a GPU where the user states no budget. Raises `OverBudget`."""
        axes, limit = cut.axes, self.limit()
        if limit is None or not any(c.streamed is not None for c, _ in links):
            return links, link(links, self.unplanned(links))
        parts = (links, link, limit, axes, self.placeholders)
        spends = isinstance(limit, FreeMemory) and self.is_whole_step(cut)
        chain = self.spending(cut, *parts) if spends else PlannedChain(*parts)
        with untimed():
            plan = chain.plan(self.fakes, chain.expected)
            if isinstance(chain, SpendingChain) and plan == chain.default:
                chain.tell_most()
        if isinstance(limit, Budget):
            self.report.notes.append(f"note: The fastest plan within {mebibytes(limit.bytes)}: {plan}.")
        return chain.by(plan), chain

    def spending(self, cut: Cut, *parts) -> SpendingChain:
        """Build the chain that runs by the fastest plan for the GPU's free memory, learnt step by step."""
        repeatable = not cut.updates and not any(map(written_storages, cut.regions))
        spare = SpareMemory(memory_of_gpu(self.fakes))
        return SpendingChain(*parts, spare=spare, repeatable=repeatable, tell=self.note)

    def is_whole_step(self, cut: Cut) -> bool:
        """Does the backward begin at the outputs of this graph? It does not where an output is hidden states
        or logits, from which code outside the graph computes further."""
        marks = joined(cut.axes).marks if cut.axes else ()
        ends = [n for n in self.returned() if n not in cut.lazy and wants_gradient(n)]
        return bool(ends) and not any(n in marks for n in ends)

    def limit(self) -> Limit | None:
        """Choose the limit of a step's memory: the user's budget, or the free memory of a GPU. Free memory is
        no limit where the user says where layer inputs wait. It differs between processes, so where they
        compute together only a number of bytes is a limit."""
        config = self.config
        if self.spans_processes and (config.memory_budget is None or isinstance(config.memory_budget, float)):
            if config.memory_budget is not None:
                self.hint(SHARE_OF_FREE)
            return None
        budget = config.budget(self.fakes)
        if budget is not None:
            return Budget(budget, config.offload is not False, config.lossy)
        if config.offload is not None or config.lossy or not is_on_gpu(config.device, self.fakes):
            return None
        return FreeMemory(functools.partial(free_memory, None, self.fakes), self.hint)

    def unplanned(self, links: Links) -> ChainPlan:
        """Build the plan that the user's options name, for a chain without a memory limit."""
        plan = ChainPlan.default(len(links))
        if not (self.config.offload or self.config.lossy):
            return plan
        away = may_leave([costs_of(c) for c, _ in links])
        if self.config.offload or not away:
            return plan.offloading(away)
        plan = plan.compressing(away)
        self.report.notes.append(f"note: Without a budget, the plan is: {plan}.")
        return plan

    def computed_later(self, cut: Cut, compiled: Callable) -> dict[Node, Later]:
        """Describe the lazy outputs: those that are computed when they are read."""
        returned = self.returned()
        return {
            node: Later(
                region,
                None if region.outputs[0] is node else taken(node),
                functools.partial(self.outside_tracing, compiled, region),
                self.recordable(region, cut.views),
                returned,
                functools.cache(functools.partial(hint_at_freed_weights, self.hint, bytes_of(fake_of(node)))),
            )
            for node, region in cut.lazy.items()
        }

    def returned(self) -> frozenset[Node]:
        """Return the outputs of the graph that are nodes."""
        return frozenset(o for o in outputs_of(self.module) if isinstance(o, Node))

    @staticmethod
    def outside_tracing(compiled: Callable, region: Region) -> Callable:
        """Compile a lazy region when it is first read, long after Dynamo has finished."""
        mode = internals.detect_fake_mode([fake_of(n) for n in region.inputs])
        with internals.tracing_of(mode), internals.NothingReal(()):
            lazy = compiled(region)
            lazy.settle()
            return lazy.call

    def recordable(self, region: Region, views: Sequence[Node]) -> LazyRegion:
        """Build the lazy region that records operations on its output outside of the graph. Each recorded
        expression is compiled as a function of its own by this backend."""
        config = self.config

        def compile_expression(module: GraphModule) -> Callable:
            return torch.compile(
                module, backend=lambda graph, inputs: Chain(graph, inputs, config).compiled(), fullgraph=True
            )

        return LazyRegion(
            functools.cache(lambda: build_region(self.module, region, views)[0]), config, compile_expression
        )

    def note(self, text: str) -> None:
        self.report.notes.append(f"note: {text}.")
        internals.log.info("%s", text)

    def hint(self, text: str) -> None:
        self.report.notes.append(f"note: {text}.")
        warnings.warn(f"streambp: {text}.", StreamHint, stacklevel=2)

    def refuse(self, refusal: Refusal, cost: int | None) -> None:
        if self.config.strict:
            raise NotStreamed(str(refusal))
        if cost is not None and cost < SMALL * self.held:
            internals.log.debug("not worth a warning, at %d bytes of %d: %s", cost, self.held, refusal)
            return
        warn_refused(refusal, cost)


def placeholders_of(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def widest_of(nodes: Iterable[Node]) -> int:
    """Return the bytes of the largest value among some nodes. Values whose sizes depend on data are left out,
    and so are nested tensors."""
    fakes = (v for v in map(own_of, nodes) if isinstance(v, torch.Tensor) and not v.is_nested)
    return max((bytes_of(v) for v in fakes if not internals.is_unbacked(v)), default=0)


def attributes_of(module: GraphModule) -> list[torch.Tensor]:
    """Return the tensors that a module and its nested graphs have as attributes."""
    return [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)] + [
        *module.parameters(),
        *module.buffers(),
    ]


def held_by(regions: Sequence[Region], placeholders: Sequence[Node]) -> int:
    """Count the bytes that a step holds, however its regions run. These are gradients of the graph's inputs,
    and values that go from region to region."""
    between = {n for region in regions for n in region.inputs if n.op != "placeholder"}
    values = [own_of(n) for n in (*filter(wants_gradient, placeholders), *between)]
    return sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor) and not internals.is_unbacked(v))


def is_of_data(module: GraphModule) -> bool:
    """Does a graph contain an operation that only rewrites of this package can remove? Such operations are
    picked rows and branches on them."""
    return any(depends_on_data(n) or is_in_branches(n) for n in module.graph.nodes)


MOST_SEQUENCES = 4  # times as many as planned for: more would run in too many turns, or hold too much at once
# Rewrites before autograd, in this order, each with its name in reports of failures.
REWRITES: tuple[tuple[Callable[[GraphModule], GraphModule], str], ...] = (
    (write_inference_as_no_grad, "reading modes"),
    (inline_wrappers, "inlining activation checkpoints and nested compile regions"),
    (flash_attn_as_attention, "reading calls of flash_attn"),
    (fold_maps, "folding calls of torch.vmap"),
    (write_picked_rows, "reading rows that a mask picks"),
    (write_counts_as_sums, "reading counts of choices"),
    (to_aten, "writing Dynamo's graph in ATen operators"),
    (note_autocast, "reading modes"),
    (detach_operands, "reading what is computed without gradients"),
    (write_strided_reads, "reading values by strides"),
    (choose_masked_values, "reading values written under a mask"),
    (write_new_values, "reading values that are written into"),
    (take_table_rows_first, "reading rows of tables"),
    (cut_rows_first, "reading rows that are cut off"),
    (merge_unrolled, "joining the pieces of a loss"),
    (distribute_loops, "reading loops over blocks of tokens"),
    (write_filled_values, "reading values that are filled block by block"),
    (write_receptive_fields, "reading stacks of strided convolutions"),
    (write_windows, "writing filters and windows of tokens"),
    (write_score_filters, "reading filters of attention scores"),
    (write_relative_shifts, "reading relative shifts of attention scores"),
    (part_blocks, "finding blocks of tokens"),
    (index_rows, "reading row indices"),
    (ignore_cut_rows, "reading losses of rows that are cut off"),
    (select_rows_first, "moving row selections in front of the head"),
    (part_joint_attention, "parting attention over two streams"),
    (part_shared_keys, "parting the keys of attention"),
    (part_turned_matrices, "reading matrices by rows and by columns"),
    (move_leading_columns, "moving columns behind attention scores"),
    (pad_before_masks, "reading masks with more columns"),
    (one_attention, "reading calls of attention"),
)

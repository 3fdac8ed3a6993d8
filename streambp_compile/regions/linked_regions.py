"""The regions of a graph, linked to one function of its inputs, which runs in every call.

Regions run in order. Each value is dropped after its last reader. Values that autograd would save may be
recomputed, or wait in host memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import internals
from ..dynamo.loops.tiles import RowInterval
from ..dynamo.reading.token_axes import Axis
from ..dynamo.reading.values import fake_of, storage_of
from ..dynamo.writes.buffer_updates import Buffers, BufferState
from ..dynamo.writes.written_inputs import written_storages
from ..lazy.expressions import LazyRegion
from ..lazy.outputs import lazy_output, rows_of
from ..memory.chain_plan import ChainPlan
from ..passes.ir import Refusal
from ..passes.split import Region
from ..runtime.compression import Compression
from ..runtime.gradient_ownership import hand_over, plain_references
from ..runtime.mask_guards import CallAnswer, Question, answered, rounds
from ..runtime.offload import Offloading
from ..runtime.places import InLink, within
from ..runtime.rematerialisation import Again, Leave, Recipe, saved_as
from ..runtime.sizes import Sizes
from .compiled_region import CompiledRegion


@dataclass(frozen=True)
class Cut:
    """The pieces that a graph is cut into.

    axes     its token axes
    updates  changes of weights that are made before all regions
    views    views of inputs that are taken before all regions
    regions  the chain
    lazy     lazy outputs, and their regions
    unfit    the reason why no region can be streamed, if it is already known
    """

    axes: tuple[Axis, ...]
    updates: Sequence[Node]
    views: Sequence[Node]
    regions: Sequence[Region]
    lazy: Mapping[Node, Region]
    unfit: Refusal | None = None


@dataclass(frozen=True)
class Later:
    """An output that is computed when it is read.

    region      computes the output, or the value that it has some rows of
    taken       these rows (None: all)
    compile     compiles the region
    recordable  records operations on the output
    returned    all outputs of the graph
    freed       warns that an engine frees the weights, so that the output must be computed at once
    """

    region: Region
    taken: RowInterval | None
    compile: Callable[[], Callable]
    recordable: LazyRegion
    returned: frozenset[Node]
    freed: Callable[[internals.Engine], None]

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.region.inputs if n.op != "get_attr"]

    def result(
        self, state: BufferState, ready: dict[Node, Callable], made: dict[Node, torch.Tensor]
    ) -> torch.Tensor:
        """Return the output. ``made`` holds the values of one call that several outputs have rows of."""
        node, given = self.region.outputs[0], tuple(map(state.read, self.inputs))
        sizes = Sizes(dict(zip(self.inputs, given)), fake_of)
        if node not in made:
            made[node] = self.whole(given, sizes, ready)
        if self.taken is None:
            return made[node]
        return rows_of(made[node], self.taken.dim, sizes(self.taken.start), sizes(self.taken.stop))

    def whole(self, given: tuple, sizes: Sizes, ready: dict[Node, Callable]) -> torch.Tensor:
        node = self.region.outputs[0]

        def compute() -> torch.Tensor:
            if node not in ready:
                ready[node] = self.compile()
            return ready[node](*given)[0]

        engines = [internals.freed_by(v) for v in given if isinstance(v, torch.nn.Parameter)]
        for engine in filter(None, engines):
            self.freed(engine)
            return compute()
        shape = tuple(sizes(s) for s in fake_of(node).shape)
        exposed = [n.op == "placeholder" or n in self.returned for n in self.inputs]
        return lazy_output(self.recordable, given, exposed, compute, shape, fake_of(node))


def asked_of(links: Sequence[tuple[CompiledRegion, Region]]) -> list[Question | None]:
    """Build each region's question: do the conditions of its key ranges hold for values of the chain? The
    question is None for a region without conditions."""
    questions, generation = [], 0
    for compiled, region in links:
        inputs = [n for n in region.inputs if n.op != "get_attr"]
        reads = () if compiled.guard is None else tuple(inputs[i] for i in compiled.guard.reads)
        questions.append(Question(compiled.guard, reads, generation) if compiled.guard else None)
        generation += bool(written_storages(region))
    return questions


def dropped_after(links, later: Mapping[Node, Later], outputs: Sequence[object]) -> list[tuple[Node, ...]]:
    """List the values that have no reader after each region."""
    last: dict[Node, int] = {}
    for i, (_, region) in enumerate(links):
        for node in region.inputs:
            last[node] = i
    for node in (*outputs, *(n for lazy in later.values() for n in lazy.region.inputs)):
        if isinstance(node, Node):
            last[node] = len(links)
    return [
        tuple(n for n, at in last.items() if at == i and n.op != "placeholder") for i in range(len(links))
    ]


def handed_over(links: Sequence[tuple[CompiledRegion, Region]], dropped: Sequence[tuple[Node, ...]]) -> list:
    """List the values that each region may overwrite. The region must be the only reader, and the region that
    computed the value must have left it in memory of its own."""
    nodes = {n for _, region in links for n in (*region.inputs, *region.outputs)}
    sharing = Counter(map(storage_of, nodes))
    readers = Counter(n for _, region in links for n in region.inputs)
    free = {
        node
        for compiled, region in links
        if compiled.streamed is not None and not region.recomputable and not written_storages(region)
        for node, output in zip(region.outputs, compiled.outputs())
        if readers[node] == sharing[storage_of(node)] == 1 and compiled.streamed.has_own_memory(output)
    }
    return [tuple(n for n in gone if n in free) for gone in dropped]


def run_region(
    run: Callable,
    region: Region,
    values: dict[Node, object],
    state: BufferState,
    recipes: dict[Node, Again],
    leave: Leave | None = None,
) -> None:
    """Run one region on the values of the chain, and store its results among them.

    leave  returns the object that autograd keeps in place of a value that it would save
    """
    inputs = [state.read(n) for n in region.inputs if n.op != "get_attr"]
    if region.recomputable and torch.is_grad_enabled():
        recipe = Recipe.of(run, inputs)
        recipes.update((n, Again(recipe, i)) for i, n in enumerate(region.outputs))
    again = [(values[n], recipes[n]) for n in region.inputs if n in recipes]
    with saved_as(again, leave) if again or leave else contextlib.nullcontext():
        results = run(*inputs)
    values.update(zip(region.outputs, results))
    state.write(region, results[len(region.outputs) :])


def results_of(
    outputs: Sequence[object], state: BufferState, later: Mapping[Node, Later], ready: dict[Node, Callable]
) -> tuple:
    """Return the chain's results for the outputs of its graph."""
    made: dict[Node, torch.Tensor] = {}

    def result(output: object) -> object:
        if not isinstance(output, Node):
            return output
        return later[output].result(state, ready, made) if output in later else state.returned(output)

    return tuple(map(result, outputs))


def prepare_weights(cut: Cut, values: dict[Node, object]) -> None:
    """Apply the changes that the function makes to weights before it uses them, and take the early views."""
    with torch.no_grad():
        for node in cut.updates:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for node in cut.views:
        values[node] = node.target(*map_arg(node.args, values.__getitem__))


class Waiting:
    """Storage of regions' inputs until the backward, in one call.

    given  inputs of the chain, which stay as they are
    """

    def __init__(self, plan: ChainPlan, given: Sequence[object]):
        self.plan = plan
        self.offloading = Offloading(given, internals.is_fake) if plan.offloaded else None
        self.compression = Compression(given) if plan.compressed else None

    def kept(self, answers: dict[tuple, CallAnswer]) -> dict[tuple, CallAnswer]:
        """Keep the ranges of visible keys where they are, on the host; returns the answers."""
        for answer in answers.values():
            if self.offloading is not None and answer.ranges is not None:
                self.offloading.stay(answer.ranges)
        return answers

    def leave(self, index: int, region: Region, values: Mapping[Node, object]) -> Leave | None:
        """Choose how autograd keeps the values that a region saves; None: the values themselves."""
        if self.offloading is not None and index in self.plan.offloaded:
            return self.offloading.leave
        if self.compression is not None and index in self.plan.compressed:
            return self.compression.of(values.get(n) for n in region.inputs)
        return None


def linked(
    links,
    plan: ChainPlan,
    later: Mapping[Node, Later],
    placeholders: Sequence[Node],
    cut: Cut,
    outputs: Sequence[object],
) -> Callable:
    """Link the chain to one function, which runs the regions and drops values after their last use.

    plan  where the inputs of regions wait for the backward
    """
    dropped = dropped_after(links, later, outputs)
    ready: dict[Node, Callable] = {}
    questions = asked_of(links)
    asked = rounds(questions, {n: i for i, (_, region) in enumerate(links) for n in region.outputs})
    buffers = Buffers([region for _, region in links])
    steps = list(zip(range(len(links)), links, dropped, handed_over(links, dropped), questions, asked))

    def call(*args):
        plain_references()
        values: dict[Node, object] = dict(zip(placeholders, args))
        prepare_weights(cut, values)
        recipes: dict[Node, Again] = {}
        answers: dict[tuple, CallAnswer] = {}
        state = buffers.of_call(values)
        waiting = Waiting(plan, args)
        for index, (compiled, region), gone, free, question, asked_now in steps:
            answers.update(waiting.kept(answered(asked_now, values)) if asked_now else {})
            if compiled.call is not None:
                run = compiled.call if question is None else compiled.call_for(answers[question.key])
                hand_over([values[n] for n in free])
                with within(InLink(index, compiled.report)):
                    run_region(run, region, values, state, recipes, waiting.leave(index, region, values))
            for node in gone:
                values.pop(node, None)
        return results_of(outputs, state, later, ready)

    return call

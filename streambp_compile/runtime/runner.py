"""The drivers: they loop over chunks, slice inputs, add up and free. They make no decisions.

A `Runner` executes one `Program`. Its compiled bodies write every result into buffers that the runner
owns; memory beyond these exists for one chunk at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..passes.ir import (
    ACCUMULATORS,
    FILLED,
    READS_KEYS,
    Analysis,
    Binding,
    BindingRole,
    Body,
    Direction,
    Fusion,
    Plan,
    Program,
    Sweep,
    is_expanded,
    layout_of,
    part_nodes,
    part_results,
    parted_name,
    strides_of_part,
    total_dtype,
    value_of,
    where_of,
)
from ..passes.rules import for_any_layout
from .memory_layouts import aligned, has_layout, laid_out, memory_like, strided
from .places import InSweep, within
from .sizes import Sizes


def source_value(binding: Binding) -> torch.Tensor:
    """Return the fake value behind a binding."""
    return value_of(binding.node, binding.output)


@dataclass(frozen=True)
class Call:
    """One call of a runner.

    values  node → its value, until its last reader has run
    states  scan → the first token of each chunk → the state before it
    sizes   of this call
    length  tokens
    owned   inputs that may be overwritten
    turn    state shared with the other turns, if the batch runs in turns
    """

    values: dict[Node, Any]
    states: dict[Node, dict[int, torch.Tensor]]
    sizes: Sizes
    length: int
    owned: frozenset[Node]
    turn: Turn


@dataclass(frozen=True)
class Turn:
    """State that a call shares with the calls for the other sequences of a batch.

    sums    values that add up over all of them
    totals  their accumulators, once they exist
    memory  output → the memory that it is written to, if there is any
    """

    sums: frozenset[Node] = frozenset()
    totals: dict[tuple[Node, int | None], torch.Tensor] = field(default_factory=dict)
    memory: Mapping[Node, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, stop)`` and the keys ``[first_key, last_key)`` that they reach, of ``length`` in
    all."""

    start: int
    stop: int
    first_key: int
    last_key: int
    length: int

    def scalar(self, name: str) -> int:
        """Return an integer that bodies ask for by name."""
        own, block = parted_name(name)
        tokens = {
            "rows": self.stop - self.start,
            "keys": self.last_key - self.first_key,
            "first": self.start,
            "offset": self.start - self.first_key,
            "length": self.length,
        }[own]
        return -(-tokens // block)


def chunks_of(sweep: Sweep, chunk: int, length: int) -> Iterator[Chunk]:
    """Yield the chunks of a sweep in its order."""
    low, high = sweep.keys.lo, sweep.keys.hi
    starts = range(0, length, chunk)
    for start in reversed(starts) if sweep.direction is Direction.DESCENDING else starts:
        stop = min(start + chunk, length)
        first_key = max(0, start + int(low)) if low > -length else 0
        last_key = min(length, stop + int(high)) if high < length else length
        yield Chunk(start, stop, first_key, last_key, length)


class Runner:
    """Executes a program: steps at full length eagerly, sweeps chunk by chunk through their compiled
    bodies."""

    def __init__(
        self,
        program: Program,
        analysis: Analysis,
        plan: Plan,
        bodies: tuple[Body, ...],
        compiled: tuple[Callable, ...],
        fused: Mapping[Fusion, tuple[Body, Callable]],
    ):
        """Note the last reader of every value.

        fused  the body of each fusion of the plan, and that body compiled
        """
        self.program, self.analysis, self.plan = program, analysis, plan
        self.bodies, self.compiled, self.fused = bodies, compiled, fused
        self.constants = {n: constant_of(n) for n in program.inputs if n.op == "get_attr"}
        self.last_read = last_reads(program, plan)
        self.block = analysis.block(n for sweep in program.sweeps for n in sweep.nodes)

    def __call__(
        self, inputs: dict[Node, Any], owned: frozenset[Node] = frozenset(), turn: Turn | None = None
    ) -> list[object]:
        """Run the program, and return its outputs. Inputs in ``owned`` may be overwritten; the dictionary is
        emptied while it runs."""
        sizes = Sizes(inputs)
        values = {n: inputs[n] if n in inputs else self.constants[n] for n in self.program.inputs}
        inputs.clear()
        call = Call(values, {}, sizes, sizes(self.analysis.length), owned, turn or Turn())
        for step, parts in enumerate(self.plan.full_length):
            for part in parts:
                if isinstance(part, Fusion):
                    self.together(part, call)
                else:
                    values[part] = self.with_turns_before(part, self.at_full_length(part, values), call.turn)
                self.release(part, values)
            if step < len(self.program.sweeps):
                with within(InSweep(self.program, step)):
                    self.sweep(step, call)
                self.release(step, values)
        return [values[o] if isinstance(o, Node) else o for o in self.program.outputs]

    def release(self, part: object, values: dict[Node, Any]) -> None:
        """Drop the values that have no reader after a part."""
        for node in self.last_read.get(part, ()):
            values.pop(node, None)

    def together(self, fusion: Fusion, call: Call) -> None:
        """Run one compiled function at full length, and store its results among the values."""
        body, compiled = self.fused[fusion]
        with within(fusion.nodes[0]):
            for node in fusion.results:
                fake = value_of(node)
                call.values[node] = memory_like(fake, [call.sizes(s) for s in fake.shape])
            with noting(lambda: f"streambp: this happened at full length{lines_of(fusion.nodes)}"):
                compiled([self.input(binding, call) for binding in body.bindings])

    def at_full_length(self, node: Node, values: Mapping[Node, Any]) -> Any:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        if node in self.plan.kernels:
            kwargs = {**kwargs, **self.plan.kernels[node].arguments}
        with (
            within(node),
            noting(lambda: f"streambp: this happened at full length in {node}{lines_of([node])}"),
        ):
            return for_any_layout(node.target)(*args, **kwargs)

    def with_turns_before(self, node: Node, value: Any, turn: Turn) -> Any:
        """Add a sum over all sequences to those of earlier turns; return any other value as it is."""
        if node not in turn.sums:
            return value
        key, part = (node, None), value.to(total_dtype(value.dtype))
        turn.totals[key] = turn.totals[key].add_(part) if key in turn.totals else part.clone()
        return turn.totals[key].to(value.dtype)

    def sweep(self, step: int, call: Call) -> None:
        """Run one loop over chunks, and store its results among the values of the call."""
        sweep, body, compiled = self.program.sweeps[step], self.bodies[step], self.compiled[step]
        self.take_over(sweep, call)
        bound = []
        for binding in (b.at(call.sizes) for b in body.bindings):
            with within(binding):
                bound.append((binding, self.source(binding, sweep, call)))
        length = self.plan.chunk(step, self.block, call.sizes)
        for chunk in chunks_of(sweep, length, call.length):
            self.save_states(sweep, bound, chunk, call)
            with within(chunk), noting(lambda: f"streambp: this happened in {self.place(step, chunk)}"):
                compiled([cut(binding, source, chunk) for binding, source in bound])
        for binding, source in bound:
            with within(binding):
                self.collect(binding, source, call)
        for out, source in sweep.in_place:
            call.values[out] = call.values.pop(source)

    def take_over(self, sweep: Sweep, call: Call) -> None:
        """Move values that will be overwritten into memory of our own."""
        for _, source in sweep.in_place:
            value = call.values[source]
            own = value if source in call.owned or source not in self.program.inputs else value.clone()
            call.values[source] = laid_out(own, layout_of(value_of(source)))

    def save_states(self, sweep: Sweep, bound: list[tuple[Binding, Any]], chunk: Chunk, call: Call) -> None:
        """Save the states before a chunk from which a later sweep starts it."""
        for binding, state in bound:
            if binding.role is BindingRole.CARRY and binding.source in sweep.saved_states:
                with within(binding):
                    call.states.setdefault(binding.node, {})[chunk.start] = state.clone()

    def collect(self, binding: Binding, source: Any, call: Call) -> None:
        """Store a buffer or accumulator that the sweep has filled as a value."""
        if binding.role in FILLED:
            call.values[binding.node] = self.finished(binding, source, call.sizes)
        elif binding.role in ACCUMULATORS and binding.output is None:
            call.values[binding.node] = source.to(value_of(binding.node).dtype)

    def place(self, step: int, chunk: Chunk) -> str:
        """Describe the position of a chunk in words."""
        direction, count = self.program.sweeps[step].direction, len(self.program.sweeps)
        tokens = f"tokens {chunk.start} to {chunk.stop - 1} of {chunk.length}"
        return f"{tokens}, in sweep {step + 1} of {count} ({direction})"

    def source(self, binding: Binding, sweep: Sweep, call: Call) -> Any:
        """Prepare the source of a binding's slices. It is a value laid out as the body expects, a buffer to
        fill, or saved states."""
        role = binding.role
        if role is BindingRole.CARRY and binding.source in sweep.restored_states:
            return call.states[binding.node]
        if role in ACCUMULATORS or role is BindingRole.CARRY or role in FILLED:
            return self.buffer(binding, call)
        return self.input(binding, call)

    def input(self, binding: Binding, call: Call) -> Any:
        """Prepare the input that a body reads: a number, or a value laid out as the body expects."""
        role = binding.role
        if role is BindingRole.SCALAR:
            if binding.source is not None:
                return call.values[binding.source]
            return None if binding.size is None else call.sizes(binding.size)
        fake, value = source_value(binding), call.values[binding.node]
        if role is BindingRole.WHOLE:
            return value if is_expanded(fake) else laid_out(value, layout_of(fake))
        if role is BindingRole.ROWS:
            value = aligned(value, binding.tokens, -binding.low, call.length)
            if binding.columns is not None:
                return strided(value, strides_of_part(fake, value.shape))
        return laid_out(value, layout_of(fake))

    def buffer(self, binding: Binding, call: Call) -> torch.Tensor:
        """Allocate memory that a sweep writes: an accumulator, an initial state, or a row for every token."""
        fake = source_value(binding)
        shape = [call.sizes(s) for s in fake.shape]
        if binding.role in ACCUMULATORS:
            return self.accumulator(binding, shape, call.turn)
        if binding.role is BindingRole.CARRY:
            shape[binding.tokens.dim] = binding.state_rows
            return torch.full(shape, binding.filling, dtype=total_dtype(fake.dtype), device=fake.device)
        mark = binding.tokens
        shape[mark.dim] = mark.size(call.length)
        memory = call.turn.memory.get(binding.node)
        if memory is not None and has_layout(memory, shape, fake):
            return memory
        memory = memory_like(fake, shape)
        return memory if binding.columns is None else memory.zero_()  # no chunk writes keys beyond its range

    def accumulator(self, binding: Binding, shape: Sequence[int], turn: Turn) -> torch.Tensor:
        """Return the accumulator's initial value: the identity, or the total of earlier turns."""
        fake, key = source_value(binding), (binding.node, binding.output)
        if key in turn.totals:
            return turn.totals[key]
        total = torch.full(shape, binding.filling, dtype=total_dtype(fake.dtype), device=fake.device)
        if binding.node in turn.sums:
            turn.totals[key] = total
        return total

    def finished(self, binding: Binding, buffer: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Slice a filled buffer to the rows that count, and pad missing rows with zeros."""
        fake, mark, low = source_value(binding), binding.tokens, binding.low
        want = [sizes(s) for s in fake.shape]
        if list(buffer.shape) == want and low == 0:
            return buffer
        rows, length = (shape[mark.dim] // mark.step for shape in (want, buffer.shape))
        view = buffer.unflatten(mark.dim, (mark.outer, length, mark.inner))
        first, last = max(0, low), max(0, low, min(length, low + rows))
        seen = view.narrow(mark.dim + 1, min(first, length), last - first)
        if low < 0 or low + rows > length:  # rows before or after the tokens are padding
            full = torch.zeros(want, dtype=buffer.dtype, device=buffer.device)
            full.unflatten(mark.dim, (mark.outer, rows, mark.inner)).narrow(
                mark.dim + 1, first - low, last - first
            ).copy_(seen)
            return full
        cut_rows = seen.flatten(mark.dim, mark.dim + 2)
        return laid_out(cut_rows, layout_of(fake))


MOST_LINES = 8  # of the user's code, in a note on an error


def lines_of(nodes: Iterable[Node]) -> str:
    """List the user's lines that made some nodes, indented."""
    lines = list(dict.fromkeys(filter(None, map(where_of, nodes))))
    more = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "".join([", which runs" * bool(lines), *(f"\n  {line}" for line in [*lines[:MOST_LINES], *more])])


@contextlib.contextmanager
def noting(text: Callable[[], str]) -> Iterator[None]:
    """Add a note to an error that is raised inside; its type stays the same."""
    try:
        yield
    except Exception as error:
        note(error, text())
        raise


def note(error: Exception, text: str) -> None:
    """Add a note to an error; before Python 3.11, a line to its message."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def constant_of(node: Node) -> torch.Tensor:
    """Return a tensor that the graph holds as an attribute."""
    value: Any = node.graph.owning_module
    for name in node.target.split("."):
        value = getattr(value, name)
    return value


def cut(binding: Binding, source: Any, chunk: Chunk) -> Any:
    """Slice one input of a body for a chunk."""
    role = binding.role
    if role is BindingRole.SCALAR:
        named = binding.source is None and binding.size is None
        return chunk.scalar(binding.name) if named else source
    if role in (BindingRole.WHOLE, BindingRole.TOTAL):
        return source
    if role is BindingRole.CARRY:
        return source[chunk.start] if isinstance(source, dict) else source
    count = chunk.last_key - chunk.first_key
    if role in READS_KEYS:
        return source if binding.mark is None else source.narrow(binding.mark.dim, chunk.first_key, count)
    mark = binding.tokens
    if binding.columns is not None:
        source = source.narrow(binding.columns.dim, chunk.first_key, count)
    first, rows = chunk.start // mark.block, mark.count(chunk.stop - chunk.start)
    if mark.step == 1:
        return source.narrow(mark.dim, first, rows)
    length = source.shape[mark.dim] // mark.step
    return source.unflatten(mark.dim, (mark.outer, length, mark.inner)).narrow(mark.dim + 1, first, rows)


def last_reads(program: Program, plan: Plan) -> dict[object, tuple[Node, ...]]:
    """List the values whose last reader is each part at full length or each sweep. Sweeps are keyed by their
    number."""
    last: dict[Node, object] = {}  # a part, or the number of a sweep
    for step, parts in enumerate(plan.full_length):
        for part in parts:
            last.update((n, part) for n in part_results(part))
            last.update((a, part) for n in part_nodes(part) for a in n.all_input_nodes)
        if step < len(program.sweeps):
            last.update((a, step) for n in program.sweeps[step].nodes for a in n.all_input_nodes)
    found: dict[object, tuple[Node, ...]] = {}
    returned = {o for o in program.outputs if isinstance(o, Node)}
    for node, reader in last.items():
        if node not in returned:
            found[reader] = (*found.get(reader, ()), node)
    return found

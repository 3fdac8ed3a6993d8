"""The drivers: loop over chunks, cut inputs, add up, free. Nothing is decided here.

A `Runner` executes one `Program`. Its compiled bodies write every result into buffers that the runner owns;
memory beyond them
exists for one chunk at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..passes.ir import Analysis, Mark, Size, hint, value_of, where_of
from ..passes.lower import Binding, Body, total_dtype
from ..passes.partition import DESCENDING, Program, Sweep
from ..passes.rules import for_any_layout


@dataclass(frozen=True)
class Layout:
    """A dense memory layout: dimensions from outermost to innermost."""

    order: tuple[int, ...]

    @staticmethod
    def of(value: torch.Tensor) -> Layout | None:
        """The layout of a (fake) tensor, or None if it is not dense (expanded, or cut from something
        wider)."""
        sizes, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
        order = tuple(
            sorted(range(len(sizes)), key=lambda d: (-strides[d] if sizes[d] != 1 else -(1 << 62), d))
        )
        layout = Layout(order)
        return (
            layout
            if all(a == b or s == 1 for a, b, s in zip(layout.strides(sizes), strides, sizes))
            else None
        )

    def strides(self, sizes) -> list:
        result, step = [1] * len(sizes), 1
        for dim in reversed(self.order):
            result[dim] = step
            step = step * sizes[dim]
        return result


def layout_of(value: torch.Tensor) -> Layout:
    return Layout.of(value) or Layout(tuple(range(value.dim())))


def source_value(binding: Binding) -> torch.Tensor:
    """The fake value behind a binding."""
    value = value_of(binding.source)
    return value[binding.low] if isinstance(value, (tuple, list)) else value


class Sizes:
    """Sizes of this call, told from the sizes of its inputs."""

    def __init__(self, inputs: Mapping[Node, object], fake_of: Callable[[Node], object] = value_of):
        self.known: dict[object, int] = {}
        for node, value in inputs.items():
            fake = fake_of(node)
            if isinstance(fake, torch.Tensor):
                for size, actual in zip(fake.shape, value.shape):
                    self.learn(size, actual)
            elif isinstance(fake, torch.SymInt):
                self.learn(fake, value)

    def learn(self, size: Size, actual: int) -> None:
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            part, factor, rest = parted(size.node.expr)
            self.known[part] = (actual - rest) // factor

    def __call__(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        return self.known[expr] if expr in self.known else int(expr.subs(self.known))


@functools.lru_cache(4096)
def parted(expr) -> tuple[object, int, int]:
    """``factor * part + rest`` of a size's expression, with numbers taken out, so that what it tells is found
    in other sizes: of ``2 (h // 4) (w // 4) + 1``
    the product."""
    rest, product = expr.as_independent(*expr.free_symbols, as_Add=True)
    factor, part = product.as_coeff_Mul()
    return (part, int(factor), int(rest)) if rest.is_Integer and factor.is_Integer else (expr, 1, 0)


def cannot_tell(inputs: Sequence[object], sizes: Iterable[Size]) -> list[Size]:
    """The sizes that those of the inputs, given as fake values, do not tell."""
    sizes_of = (v.shape if isinstance(v, torch.Tensor) else [v] for v in inputs)
    given = {
        parted(s.node.expr)[0]: 1
        for v in sizes_of
        for s in v
        if isinstance(s, torch.SymInt) and not s.node.expr.is_number
    }
    wanted = {s.node.expr: s for s in sizes if isinstance(s, torch.SymInt)}
    return [s for expr, s in wanted.items() if expr not in given and expr.subs(given).free_symbols]


class Runner:
    """Executes a program: whole stages eagerly, sweeps chunk by chunk through their compiled bodies."""

    def __init__(
        self,
        program: Program,
        analysis: Analysis,
        bodies: tuple[Body, ...],
        compiled: tuple[Callable, ...],
        chunks: tuple[int, ...],
    ):
        self.program, self.analysis, self.bodies, self.compiled, self.chunks = (
            program,
            analysis,
            bodies,
            compiled,
            chunks,
        )
        self.constants = {n: constant_of(n) for n in program.given if n.op == "get_attr"}
        self.last_read = last_reads(program, analysis)

    def __call__(self, inputs: dict[Node, object], owned: frozenset[Node] = frozenset()) -> list[object]:
        """Outputs of the program. Inputs in ``owned`` may be overwritten; the dictionary is emptied on the
        way."""
        sizes = Sizes(inputs)
        values = {n: inputs[n] if n in inputs else self.constants[n] for n in self.program.given}
        inputs.clear()
        length = sizes(self.analysis.length)
        states: dict[Node, dict[int, torch.Tensor]] = {}
        for stage, nodes in enumerate(self.program.whole):
            for node in nodes:
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
                with noting(lambda: f"streambp: this happened at full length in {node}{lines_of([node])}"):
                    values[node] = for_any_layout(node.target)(*args, **kwargs)
            if stage < len(self.program.sweeps):
                self.sweep(stage, values, states, sizes, length, owned)
                for node in self.last_read[stage]:
                    values.pop(node, None)
        return [values[o] if isinstance(o, Node) else o for o in self.program.outputs]

    def sweep(
        self, stage: int, values: dict, states: dict, sizes: Sizes, length: int, owned: frozenset[Node]
    ) -> None:
        sweep, body, compiled, chunk = (
            self.program.sweeps[stage],
            self.bodies[stage],
            self.compiled[stage],
            self.chunks[stage],
        )
        in_place = dict(sweep.in_place)
        for source in in_place.values():
            own = values[source] if source in owned else values[source].clone()
            values[source] = laid_out(own, layout_of(value_of(source)))
        sources = [
            states[b.source]
            if b.role == "carry" and b.source in sweep.resumed
            else self.source(b, sweep, values, sizes, length)
            for b in body.bindings
        ]
        noted = [
            (states.setdefault(b.source, {}), s)
            for b, s in zip(body.bindings, sources)
            if b.role == "carry" and b.source in sweep.noted
        ]
        starts = range(0, length, chunk)
        for start in reversed(starts) if sweep.direction == DESCENDING else starts:
            stop = min(start + chunk, length)
            low, high = sweep.keys.lo, sweep.keys.hi
            first_key = max(0, start + int(low)) if low > -length else 0
            last_key = min(length, stop + int(high)) if high < length else length
            scalars = {
                "rows": stop - start,
                "keys": last_key - first_key,
                "first": start,
                "offset": start - first_key,
                "length": length,
            }
            for known, state in noted:
                known[start] = state.clone()
            with noting(lambda: f"streambp: this happened in {self.place(stage, start, stop, length)}"):
                compiled(
                    [
                        cut(b, s, start, stop, first_key, last_key, scalars)
                        for b, s in zip(body.bindings, sources)
                    ]
                )
        for binding, source in zip(body.bindings, sources):
            if binding.role in ("write", "feed"):
                values[binding.source] = self.finished(binding, source, sizes)
            elif binding.role in ("total", "keytotal") and not isinstance(
                value_of(binding.source), (tuple, list)
            ):
                values[binding.source] = source.to(value_of(binding.source).dtype)
        for out, source in in_place.items():
            values[out] = values.pop(source)

    def place(self, stage: int, start: int, stop: int, length: int) -> str:
        """Where a chunk is, in words."""
        direction, count = self.program.sweeps[stage].direction, len(self.program.sweeps)
        return f"tokens {start} to {stop - 1} of {length}, in sweep {stage + 1} of {count} ({direction})"

    def source(self, binding: Binding, sweep: Sweep, values: dict, sizes: Sizes, length: int):
        """What a binding is cut from: a value laid out as the body expects, or a buffer to fill."""
        if binding.role == "scalar":
            if binding.source is not None:
                return values[binding.source]
            return None if binding.size is None else sizes(binding.size)
        fake = source_value(binding)
        if binding.role in ("total", "keytotal"):
            return torch.zeros(
                [sizes(s) for s in fake.shape], dtype=total_dtype(fake.dtype), device=fake.device
            )
        if binding.role == "carry":
            shape = [1 if d == binding.mark.dim else sizes(s) for d, s in enumerate(fake.shape)]
            return torch.full(shape, binding.filling, dtype=total_dtype(fake.dtype), device=fake.device)
        if binding.role in ("write", "feed"):
            shape = self.padded(binding, fake, sizes, length)
            return torch.empty_strided(
                shape, layout_of(fake).strides(shape), dtype=fake.dtype, device=fake.device
            )
        value = values[binding.source]
        if binding.role == "whole":
            return value if Layout.of(fake) is None else laid_out(value, layout_of(fake))
        if binding.role == "rows":
            value = aligned(value, binding.mark, -binding.low, length)
        return laid_out(value, layout_of(fake))

    def padded(self, binding: Binding, fake: torch.Tensor, sizes: Sizes, length: int) -> list[int]:
        """The shape of a row buffer with a row for every token."""
        shape = [sizes(s) for s in fake.shape]
        mark = binding.mark
        shape[mark.dim] = mark.outer * length * mark.inner
        return shape

    def finished(self, binding: Binding, buffer: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """A filled buffer without the rows that do not count."""
        fake, mark = source_value(binding), binding.mark
        want = [sizes(s) for s in fake.shape]
        if list(buffer.shape) == want:
            return buffer
        rows = want[mark.dim] // (mark.outer * mark.inner)
        length = buffer.shape[mark.dim] // (mark.outer * mark.inner)
        view = buffer.unflatten(mark.dim, (mark.outer, length, mark.inner))
        if binding.low < 0 or rows > length:  # rows before or after the tokens are padding
            full = torch.zeros(want, dtype=buffer.dtype, device=buffer.device)
            full.unflatten(mark.dim, (mark.outer, rows, mark.inner)).narrow(
                mark.dim + 1, -binding.low, length
            ).copy_(view)
            return full
        cut_rows = view.narrow(mark.dim + 1, binding.low, rows).flatten(mark.dim, mark.dim + 2)
        return laid_out(cut_rows, layout_of(fake))


MOST_LINES = 8  # of the user's code, in a note on an error


def lines_of(nodes: Iterable[Node]) -> str:
    """The user's lines that made some nodes, as an indented list."""
    lines = list(dict.fromkeys(filter(None, map(where_of, nodes))))
    more = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "".join([", which runs" * bool(lines), *(f"\n  {line}" for line in [*lines[:MOST_LINES], *more])])


@contextlib.contextmanager
def noting(text: Callable[[], str]) -> Iterator[None]:
    """An error that happens inside stays of its type, and gets a note."""
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
    """A tensor that the graph carries with it."""
    value = node.graph.owning_module
    for name in node.target.split("."):
        value = getattr(value, name)
    return value


def aligned(value: torch.Tensor, mark: Mark, shift: int, length: int) -> torch.Tensor:
    """Row t of the result is row ``t + shift`` of the value; rows it does not have are zero."""
    rows = value.shape[mark.dim] // (mark.outer * mark.inner)
    if shift == 0 and rows == length:
        return value
    split = value.unflatten(mark.dim, (mark.outer, rows, mark.inner))
    low, high = max(0, -shift), min(length, rows - shift)  # tokens that have a row
    if low == 0 and high == length:
        return split.narrow(mark.dim + 1, shift, length).flatten(mark.dim, mark.dim + 2)
    shape = [*split.shape]
    shape[mark.dim + 1] = length
    full = value.new_zeros(shape)
    if low < high:
        full.narrow(mark.dim + 1, low, high - low).copy_(split.narrow(mark.dim + 1, low + shift, high - low))
    return full.flatten(mark.dim, mark.dim + 2)


def laid_out(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The value in exactly this dense layout; a copy only if it is laid out otherwise."""
    strides = layout.strides(value.shape)
    if all(a == b or s == 1 for a, b, s in zip(value.stride(), strides, value.shape)):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def cut(
    binding: Binding, source, start: int, stop: int, first_key: int, last_key: int, scalars: dict[str, int]
):
    """One input of a body for the chunk ``[start, stop)``."""
    role, mark = binding.role, binding.mark
    if role == "scalar":
        return scalars.get(binding.name, source) if binding.source is None else source
    if role in ("whole", "total"):
        return source
    if role == "carry":
        return source[start] if isinstance(source, dict) else source
    if role in ("keys", "feed", "keytotal"):
        return source.narrow(mark.dim, first_key, last_key - first_key) if mark is not None else source
    if binding.columns is not None:
        source = source.narrow(binding.columns.dim, first_key, last_key - first_key)
    if mark.outer == mark.inner == 1:
        return source.narrow(mark.dim, start, stop - start)
    length = source.shape[mark.dim] // (mark.outer * mark.inner)
    return source.unflatten(mark.dim, (mark.outer, length, mark.inner)).narrow(
        mark.dim + 1, start, stop - start
    )


def last_reads(program: Program, analysis: Analysis) -> tuple[tuple[Node, ...], ...]:
    """For each sweep, the values that nothing after it reads."""
    last: dict[Node, int] = {}
    for stage, sweep in enumerate(program.sweeps):
        for node in sweep.nodes:
            for operand in node.all_input_nodes:
                last[operand] = stage
    for stage, nodes in enumerate(program.whole):
        for node in nodes:
            for operand in node.all_input_nodes:
                last[operand] = max(last.get(operand, 0), stage)
    for output in program.outputs:
        if isinstance(output, Node):
            last[output] = len(program.sweeps)
    return tuple(tuple(n for n, at in last.items() if at == stage) for stage in range(len(program.sweeps)))

"""The operators of the algebra, which Inductor calls as they are; attention has a package of its own.

A trailing underscore marks an op that writes into its last arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .grouped import add_grouped_outer_, grouped_mm, grouped_outer
from .products import add_product_, copied_operands

aten = torch.ops.aten
LIBRARY = torch.library.Library("streambp", "DEF")
KERNELS: dict[torch._ops.OpOverload, object] = {}  # operators whose kernels call torch's operators


# bytes that a call takes beside its results
SCRATCH: dict[torch._ops.OpOverload, Callable[..., int]] = {
    product: copied_operands
    for product in (aten.bmm.default, aten.bmm.out, aten.baddbmm.default, aten.baddbmm.out)
}


def define(
    schema: str, kernel, meta, composed: bool = True, scratch: Callable[..., int] | None = None
) -> None:
    """Register an operator.

    kernel    the implementation
    meta      the same for tensors without data
    composed  the kernel calls torch's operators, so that it can be traced and simulated
    scratch   for a kernel that cannot: the most bytes that a call takes beside its results
    """
    tags = (torch.Tag.needs_exact_strides,) if hasattr(torch.Tag, "needs_exact_strides") else ()
    LIBRARY.define(schema, tags=tags)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, meta, "Meta")
    op = getattr(torch.ops.streambp, name).default
    if composed:
        KERNELS[op] = kernel
    if scratch is not None:
        SCRATCH[op] = scratch


def to_extreme(grad: Tensor, x: Tensor, dim: int, largest: bool) -> Tensor:
    """Compute the gradient of ``x.max(dim)`` (or ``min``): zero except where the value was taken from.
    ``grad`` has one entry along ``dim``."""
    index = (torch.max if largest else torch.min)(x, dim, keepdim=True).indices
    return torch.zeros_like(x, dtype=grad.dtype).scatter(dim, index, grad)


def shifted(x: Tensor, dim: int, by: int) -> Tensor:
    """Shift rows: row i is row ``i - by`` of ``x``, or zero where there is none."""
    count = max(0, x.shape[dim] - abs(by))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out.narrow(dim, max(0, by) if count else 0, count).copy_(
        x.narrow(dim, max(0, -by) if count else 0, count)
    )
    return out


def skewed(x: Tensor, dim: int, columns: int, offset: int, step: int, rows: int) -> Tensor:
    """Compute the relative shift of attention scores. Entry (i, j) is that of row ``i + rows`` and column ``j
    + step * i + offset`` of ``x``, or zero where there is none. Rows run along ``dim``, columns along the
    next dimension."""
    x = shifted(x, dim, -rows) if rows else x
    given, made = x.shape[dim + 1], torch.arange(columns, device=x.device)
    at = made + step * torch.arange(x.shape[dim], device=x.device)[:, None] + offset
    at = at.view(*at.shape, *[1] * (x.dim() - dim - 2))
    index = at.clamp(0, given - 1).expand(skewed_shape(x, dim, columns))
    return torch.where((at >= 0) & (at < given), x.gather(dim + 1, index), 0).contiguous()


def skewed_shape(x: Tensor, dim: int, columns: int) -> list[int]:
    return [*x.shape[: dim + 1], columns, *x.shape[dim + 2 :]]


def contracted(left: Tensor, right: Tensor, equation: str) -> Tensor:
    """Multiply two values by an equation of ``torch.einsum``."""
    return torch.einsum(equation, left, right).contiguous()


def contracted_meta(left: Tensor, right: Tensor, equation: str) -> Tensor:
    (first, second), made = equation.partition("->")[0].split(","), equation.partition("->")[2]
    sizes = dict(zip(first + second, (*left.shape, *right.shape)))
    return left.new_empty([sizes[label] for label in made])


def reverse_scan(x: Tensor, dim: int, kind: str) -> Tensor:
    """Scan from the last row to the first, by ``cumsum`` or another scan of ATen."""
    return getattr(aten, kind)(x.flip(dim), dim).flip(dim).contiguous()


def panels_mm(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute ``rows @ weight``, some columns at a time: ``[C, K]``, ``[K, N]`` → ``[C, N]``. This is a
    quarter faster in MKL where C is far below N."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for part, panel in zip(out.split(PANEL, 1), weight.split(PANEL, 1)):
        torch.mm(rows, panel, out=part)
    return out


PANEL = 2048  # columns


def grouped_mm_triton(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    from .grouped_triton import grouped_mm as launch

    return launch(rows, weight, order, ends)


def add_grouped_outer_triton_(
    left: Tensor, right: Tensor, order: Tensor, ends: Tensor, total: Tensor
) -> None:
    from .grouped_triton import add_grouped_outer_ as launch

    launch(left, right, order, ends, total)


def add_rows_(index: Tensor, rows: Tensor, padding: int, total: Tensor) -> None:
    """Compute ``total[index[i]] += rows[i]``, leaving the row ``padding`` alone."""
    spared = total.select(0, padding).clone() if padding >= 0 else None
    total.index_add_(0, index.reshape(-1), rows.reshape(-1, rows.shape[-1]).to(total.dtype))
    if spared is not None:
        total.select(0, padding).copy_(spared)


def sum_at(index: Tensor, source: Tensor, dim: int, size: int) -> Tensor:
    """Compute the gradient of ``x.gather(dim, index)``, where ``x`` has ``size`` entries along ``dim``."""
    return source.new_zeros(sum_shape(index, dim, size)).scatter_add(dim, index, source)


def sum_shape(index: Tensor, dim: int, size: int) -> list[int]:
    return [*index.shape[:dim], size, *index.shape[dim + 1 :]]


def add_at_(index: Tensor, source: Tensor, dim: int, total: Tensor) -> None:
    total.scatter_add_(dim, index, source.to(total.dtype))


def nothing(*_args) -> None:
    return None


def rows_at(full: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Copy rows ``[start, start+length)``. The operator is opaque, so that the bounds stay symbols."""
    return full.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def rows_meta(full: Tensor, dim: int, start, length) -> Tensor:
    shape = list(full.shape)
    shape[dim] = length
    return full.new_empty(shape)


def write_rows_(rows: Tensor, dim: int, start: int, full: Tensor) -> None:
    full.narrow(dim, start, rows.shape[dim]).copy_(rows)


def slide_rows_(rows: Tensor, dim: int, ahead: bool, state: Tensor) -> None:
    """Update a state to the last rows of itself and the rows behind it. With ``ahead``, it becomes the first
    rows of the new rows and itself."""
    count, rest = state.shape[dim], max(0, state.shape[dim] - rows.shape[dim])
    if ahead:
        kept = torch.cat((rows.narrow(dim, 0, count - rest), state.narrow(dim, 0, rest)), dim)
    else:
        first = rows.shape[dim] - (count - rest)
        kept = torch.cat((state.narrow(dim, count - rest, rest), rows.narrow(dim, first, count - rest)), dim)
    state.copy_(kept)


# Random numbers that depend on a seed and on their place among all tokens, and on nothing else: the forward,
# its recomputation, and chunks of every length see the same bits. The mixer is a 32-bit integer hash of
# multiply and shift (low-bias constants of the hash-prospector search); it is applied to both halves of place
# and seed. Products stay below 2**63, so that integers never overflow.

LOW = 0xFFFFFFFF


def mixed(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & LOW
    return x ^ (x >> 15)


def uniform_at(place: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Compute uniform numbers in [0, 1), 24 bits each: one for every place of a random stream.

    place  integers, the positions in the full value, in its order
    seed   one integer below 2**62
    """
    x = mixed((place & LOW) ^ ((seed + stream * 0x9E3779B1) & LOW))
    x = mixed((x + (place >> 32) + (seed >> 31)) & LOW)
    return ((x >> 8).to(torch.float32) * 2.0**-24).to(dtype)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed on the device, by the generator that ``torch.manual_seed`` sets. A copy from the host would
    synchronise."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def uniform(seed: Tensor, size: list[int], stream: int, dtype: torch.dtype) -> Tensor:
    count = 1
    for s in size:
        count = count * s
    return uniform_at(torch.arange(count, device=seed.device).view(size), seed, stream, dtype)


define("add_product_(Tensor left, Tensor right, Tensor(a!) total) -> ()", add_product_, nothing)
define(
    "panels_mm(Tensor rows, Tensor weight) -> Tensor",
    panels_mm,
    lambda rows, weight: rows.new_empty(rows.shape[0], weight.shape[1]),
)
define(
    "to_extreme(Tensor grad, Tensor x, int dim, bool largest) -> Tensor",
    to_extreme,
    lambda grad, x, dim, largest: torch.empty_like(x, dtype=grad.dtype),
)
define(
    "reverse_scan(Tensor x, int dim, str kind) -> Tensor",
    reverse_scan,
    lambda x, dim, kind: torch.empty_like(x, memory_format=torch.contiguous_format),
)
define(
    "shifted(Tensor x, int dim, int by) -> Tensor",
    shifted,
    lambda x, dim, by: torch.empty_like(x, memory_format=torch.contiguous_format),
)
define(
    "skewed(Tensor x, int dim, SymInt columns, SymInt offset, int step, int rows) -> Tensor",
    skewed,
    lambda x, dim, columns, offset, step, rows: x.new_empty(skewed_shape(x, dim, columns)),
)
define("contracted(Tensor left, Tensor right, str equation) -> Tensor", contracted, contracted_meta)
define(
    "grouped_mm(Tensor rows, Tensor weight, Tensor groups) -> Tensor",
    grouped_mm,
    lambda rows, weight, groups: rows.new_empty(rows.shape[0], weight.shape[2]),
)
define(
    "grouped_outer(Tensor left, Tensor right, Tensor groups, int count) -> Tensor",
    grouped_outer,
    lambda left, right, groups, count: left.new_empty(count, left.shape[1], right.shape[1]),
)
define(
    "add_grouped_outer_(Tensor left, Tensor right, Tensor groups, Tensor(a!) total) -> ()",
    add_grouped_outer_,
    nothing,
)
define(
    "grouped_mm_triton(Tensor rows, Tensor weight, Tensor order, Tensor ends) -> Tensor",
    grouped_mm_triton,
    lambda rows, weight, order, ends: rows.new_empty(rows.shape[0], weight.shape[2]),
    composed=False,
)
define(
    "add_grouped_outer_triton_(Tensor left, Tensor right, Tensor order, Tensor ends, Tensor(a!) total) -> ()",
    add_grouped_outer_triton_,
    nothing,
    composed=False,
)
define("add_rows_(Tensor index, Tensor rows, int padding, Tensor(a!) total) -> ()", add_rows_, nothing)
define(
    "sum_at(Tensor index, Tensor source, int dim, SymInt size) -> Tensor",
    sum_at,
    lambda index, source, dim, size: source.new_empty(sum_shape(index, dim, size)),
)
define("add_at_(Tensor index, Tensor source, int dim, Tensor(a!) total) -> ()", add_at_, nothing)
define("rows_at(Tensor full, int dim, SymInt start, SymInt length) -> Tensor", rows_at, rows_meta)
define("write_rows_(Tensor rows, int dim, SymInt start, Tensor(a!) full) -> ()", write_rows_, nothing)
define("slide_rows_(Tensor rows, int dim, bool ahead, Tensor(a!) state) -> ()", slide_rows_, nothing)
define(
    "seed(Device device) -> Tensor",
    draw_seed,
    lambda device: torch.empty((), dtype=torch.int64, device=device),
)
define(
    "uniform(Tensor seed, SymInt[] size, int stream, ScalarType dtype) -> Tensor",
    uniform,
    lambda seed, size, stream, dtype: seed.new_empty(size, dtype=dtype),
)


def keep_shift(ctx, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.by = inputs


def shifted_back(ctx, grad: Tensor):
    return torch.ops.streambp.shifted(grad, ctx.dim, -ctx.by), None, None


torch.library.register_autograd("streambp::shifted", shifted_back, setup_context=keep_shift)


def keep_scan(ctx, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.kind = inputs


def scanned_back(ctx, grad: Tensor):
    if ctx.kind != "cumsum":
        raise NotImplementedError(f"a reverse {ctx.kind} has no gradient")
    return grad.cumsum(ctx.dim), None, None


torch.library.register_autograd("streambp::reverse_scan", scanned_back, setup_context=keep_scan)

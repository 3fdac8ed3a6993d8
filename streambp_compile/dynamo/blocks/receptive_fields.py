"""Stacks of strided convolutions over an input, as functions of the rows that each token reads.

The input may be the samples of a wave, or the frames of a spectrogram. Row t of the last convolution is a
token. It reads an interval of rows of every value before it, which follows from the maps of the
convolutions, from the last to the first (`RowMap`). The input's intervals are copied, one entry of the
batch for each token. Then the same operations on them compute the tokens, each by itself, at any length of
the input. Rows that two entries read are computed for both. Where that is much, an entry has the rows of
several neighbouring tokens, which are a block of tokens (`TOGETHER`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...passes.ir import ancestors, arguments, hint
from ...passes.rules.forward import Part, is_pointwise, multiplies, part_of
from ..reading.aten import erase_unread, inserted
from ..reading.row_ties import operand_dim
from ..reading.token_axes import axes_of, traced
from ..reading.values import fake_of, is_changed
from ..rows.row_slices import may_be_repeated, repeated
from .row_maps import FILTERS, NotMapped, Number, RowMap, along, map_of

# Numbers that the convolutions of a stack compute, per number that they would compute whole: so few more
# that each token has an entry of its own, and so many more that the stack stays as it is.
LITTLE_WORK, MOST_WORK = 1.05, 2.5
TOGETHER = 8  # tokens of an entry, where one for each token would be more than little work


@dataclass
class FilterStack:
    """The values between an input and the last strided convolution.

    end       that convolution; ``dim`` is its dimension of tokens
    together  tokens of an entry
    frozen    whether products without gradients are computed, too
    needs     value → the dimension of its rows, and the rows that an entry reads
    ways      value → the rows of the input that it reads
    bases     the values whose rows are copied: inputs, and values made of them without gradients
    """

    end: Node
    dim: int
    together: int
    frozen: bool
    needs: dict[Node, tuple[int, RowMap]] = field(default_factory=dict)
    ways: dict[Node, RowMap] = field(default_factory=dict)
    bases: set[Node] = field(default_factory=set)

    @property
    def inner(self) -> list[Node]:
        """List the values that are computed, in the order of the graph."""
        return sorted(n for n in self.needs if n not in self.bases)

    @property
    def entries(self) -> Number:
        """The number of entries for each sequence."""
        more, scale = self.ways[self.end].number
        return more, scale * self.together


def write_receptive_fields(module: GraphModule) -> GraphModule:
    """Write stacks of strided convolutions over inputs as functions of the rows that each token reads."""
    found = [n for n in module.graph.nodes if part_of(n) in FILTERS]
    if not any(map(has_stride, found)):
        return module
    fakes = [fake_of(n) for n in module.graph.find_nodes(op="placeholder")]
    axes = axes_of(traced(module, fakes), fakes)
    written: set[Node] = set()
    for node in reversed(found):
        marks = [m for axis in axes for m in axis.marks.get(node, ()) if m.is_plain]
        dims = [m.dim for m in marks if m.dim >= 2]  # channels have no map of rows
        for dim in dims if node not in written else ():
            stack = best_stack(node, dim)
            if stack is not None:
                write(stack)
                written.update(stack.inner)
                break
    return module


def has_stride(node: Node) -> bool:
    """Is a node a convolution that makes fewer rows than it reads?"""
    dims = range(2, fake_of(node).dim()) if part_of(node) in FILTERS else ()
    return any(along(node, d, "stride") > 1 for d in dims)


def convolution_of(node: Node, dim: int) -> tuple:
    """Return the arguments of `convolved` behind the first, for rows along ``dim`` that need no padding.
    Raises `NotMapped` for padding along another dimension that differs on its two sides."""
    given, dims = arguments(node), range(2, fake_of(node).dim())
    others = {d: map_of(node, d) for d in dims if d != dim}
    if any(f.before != f.behind for f in others.values()):
        raise NotMapped
    strides, dilations = ([along(node, d, name) for d in dims] for name in ("stride", "dilation"))
    padding = [0 if d == dim else others[d].before for d in dims]
    operands = given["weight"], given.get("bias")
    return (*operands, strides, padding, dilations, given["groups"], fake_of(node).dtype)


# From the tokens to the input


def best_stack(end: Node, dim: int) -> FilterStack | None:
    """Find the stack of the last convolution. None where this is no stack over an input, or where too many
    rows would be computed more than once. Frozen filters are rather in it than its base."""
    for frozen, together in itertools.product((True, False), (1, TOGETHER)):
        stack = stack_of(end, dim, together, frozen)
        if stack is not None and extra_work(stack) <= (LITTLE_WORK if together == 1 else MOST_WORK):
            return stack
    return None


def stack_of(end: Node, dim: int, together: int, frozen: bool) -> FilterStack | None:
    """Find what lies between an input and the last convolution of a stack, and the rows that an entry reads.
    None where this is no stack over an input."""
    stack = FilterStack(end, dim, together, frozen, {end: (dim, RowMap(together, 0, together))})
    try:
        for node in reversed(list(end.graph.nodes)):
            if node in stack.needs:
                add_operands(stack, node)
        for node in stack.inner:
            add_way(stack, node)
    except NotMapped:
        return None
    if any(not set(n.users) <= stack.needs.keys() for n in stack.inner if n is not end):
        return None
    known = fake_of(end).requires_grad and any(map(has_stride, stack.inner))
    return stack if known else None


def add_operands(stack: FilterStack, node: Node) -> None:
    """Add what a token reads of a value's operands."""
    dim, rows = stack.needs[node]
    fixed = not fake_of(node).requires_grad and node is not stack.end and not is_changed(node)
    if fixed and not (stack.frozen and any(map(multiplies, ancestors([node])))):
        stack.bases.add(node)
        return
    if not may_be_repeated(node, stack.end):
        raise NotMapped
    for operand, at in rows_of_operands(node, dim):
        if is_filter(node):
            read = rows.of(map_of(node, dim))
            if part_of(node) is not Part.PAD:
                convolution_of(node, dim)
        elif part_of(node) is Part.GROUP_NORM:
            if not fake_of(operand).requires_grad:  # all its rows would be needed, and no filter tells them
                raise NotMapped
            read = rows.join(RowMap(rows.scale, 0, rows.scale))
            stack.needs[node] = dim, read
        else:
            read = rows
        known = stack.needs.get(operand)
        if known is not None and (known[0] != at or known[1].scale != read.scale):
            raise NotMapped
        stack.needs[operand] = at, read if known is None else read.join(known[1])


def rows_of_operands(node: Node, dim: int) -> Iterator[tuple[Node, int]]:
    """Yield the operands that have rows and a batch, each with its dimension of rows. Raises `NotMapped`
    for an operation that treats neither rows nor sequences one by one."""
    if is_filter(node) or part_of(node) is Part.GROUP_NORM:
        yield node.args[0], dim
        return
    plain = is_pointwise(node) or part_of(node) in (Part.MOVE, Part.NORM, Part.HEAD, Part.GATED)
    if not plain and (part_of(node) is not Part.RESHAPE or "sizes" in arguments(node)):
        raise NotMapped
    found = False
    for operand in node.all_input_nodes:
        if not isinstance(fake_of(operand), Tensor):
            raise NotMapped
        at = operand_dim(node, operand, dim)
        of_batch = operand_dim(node, operand, 0) == 0 and fake_of(operand).dim() > 1
        if at is not None and at > 0 and of_batch:
            found = True
            yield operand, at
        elif at is not None or fake_of(operand).dim() >= fake_of(node).dim():
            raise NotMapped
    if not found:
        raise NotMapped


def add_way(stack: FilterStack, node: Node) -> None:
    """Find the rows of the input that a value reads. Raises `NotMapped` if the operands have other numbers
    of rows, or if a number of zeros changes."""
    dim, _ = stack.needs[node]
    ways = [stack.ways[a] for a, _ in rows_of_operands(node, dim) if a in stack.ways] or [RowMap()]
    own = map_of(node, dim) if is_filter(node) else RowMap()
    if len({way.number for way in ways}) != 1 or not isinstance(own.more, int):
        raise NotMapped
    stack.ways[node] = own.of(ways[0])


def is_filter(node: Node) -> bool:
    """Is a node a convolution or padding, so that its rows are made of rows in other places?"""
    return part_of(node) in (*FILTERS, Part.PAD)


def extra_work(stack: FilterStack) -> float:
    """Compare what the filters compute for all tokens with what they compute for whole values."""
    whole = made = 0.0
    for node in (n for n in stack.inner if part_of(n) in FILTERS):
        (_, rows), weight = stack.needs[node], fake_of(arguments(node)["weight"])
        work = hint(fake_of(node).numel()) * weight[0].numel()
        whole, made = whole + work, made + work * rows.count / rows.scale
    return made / whole


# From the input to the tokens


def write(stack: FilterStack) -> None:
    """Replace the last convolution of a stack by the same function of receptive fields."""
    end = stack.end
    with end.graph.inserting_before(end):
        made = FieldWriter(stack).tokens()
    end.replace_all_uses_with(made)
    erase_unread(end.graph, [end])


class FieldWriter:
    """Inserts a stack's values as rows of each entry, ``[B entries, ..., n, ...]``.

    Statistics of all rows include those behind the steps of the last entry. They are rows of some more
    entries, which are computed beside the others, and only up to those statistics.

    base   the input, which every region reads for its sizes
    known  value → its rows for the entries, and for the entries behind them (None: not needed)
    """

    def __init__(self, stack: FilterStack):
        self.stack = stack
        self.base = max(stack.bases, key=lambda n: stack.needs[n][1].scale)
        self.along, _ = stack.needs[self.base]
        self.norms = [n for n in stack.inner if part_of(n) is Part.GROUP_NORM]
        self.known: dict[Node, tuple[Node, Node | None]] = {}

    def tokens(self) -> Node:
        """Insert the last convolution's result, with its rows as tokens."""
        for node in (*sorted(self.stack.bases), *self.stack.inner):
            self.known[node] = self.fields(node) if node in self.stack.bases else self.computed(node)
        end, dim = self.stack.end, self.stack.dim
        how = (dim, self.base, self.along, self.stack.ways[end].number)
        return inserted(end, tokens_of, (self.known[end][0], *how))

    def fields(self, node: Node) -> tuple[Node, Node | None]:
        """Insert the rows of a base, copied for each entry."""
        (dim, rows), end = self.stack.needs[node], self.stack.end
        how = (node, dim, rows.scale, rows.start, rows.count, self.base, self.along, self.stack.entries)
        norms = [self.stack.needs[n][1] for n in self.norms]
        behind = max((-(-(r.start + r.count) // r.scale) for r in norms), default=0)
        made, *late = (inserted(end, fields_of, (*how, n)) for n in ((0, behind) if behind else (0,)))
        made, *late = (inserted(end, torch.flatten, (n, 0, 1)) for n in (made, *late))
        return made, late[0] if late else None

    def computed(self, node: Node) -> tuple[Node, Node | None]:
        """Insert a value, from the rows of its operands."""
        apply = self.group_norm(node) if part_of(node) is Part.GROUP_NORM else partial(self.applied, node)
        return apply(0), apply(1) if any(node < norm for norm in self.norms) else None

    def applied(self, node: Node, which: int) -> Node:
        """Repeat an operation for the rows of the entries (``which`` = 0), or of those behind them (1)."""
        dim, rows = self.stack.needs[node]
        filtered = map_of(node, dim) if is_filter(node) else None
        read = rows if filtered is None else rows.of(filtered)
        values = {a: a for a in node.all_input_nodes}
        values |= {a: self.rows_of(a, read, which, node) for a, _ in rows_of_operands(node, dim)}
        if filtered is None:
            return repeated(node, dim, values, node)
        source = node.args[0]
        value = values[source]
        if filtered.more and source not in self.stack.bases:  # a base has zeros around its rows
            value = inserted(node, zero_outside, (value, *self.places(source, read, which)))
        if part_of(node) is Part.PAD:
            return value
        return inserted(node, convolved, (value, *convolution_of(node, dim)))

    def places(self, node: Node, rows: RowMap, which: int) -> tuple:
        """Return what `exists` needs to know of some of a value's rows."""
        before = self.stack.entries if which else None
        dim, number = self.stack.needs[node][0], self.stack.ways[node].number
        return dim, rows.scale, rows.start, self.base, self.along, number, before

    def rows_of(self, node: Node, rows: RowMap, which: int, like: Node) -> Node:
        """Insert some of the rows that each entry has of a value."""
        dim, known = self.stack.needs[node]
        made = self.known[node][which]
        if known == rows or made is None:
            return made
        return inserted(like, torch.narrow, (made, dim, rows.start - known.start, rows.count))

    def group_norm(self, node: Node) -> Callable[[int], Node]:
        """Insert the statistics of groups of channels over all rows of a sequence. A row counts for the one
        entry whose step it is in. Returns a function that inserts normalised rows, as `applied` does."""
        (_, rows), called, source = self.stack.needs[node], arguments(node), node.args[0]
        own = RowMap(rows.scale, 0, rows.scale)
        parts = [(self.rows_of(source, own, i, node), *self.places(source, own, i)) for i in (0, 1)]
        statistics = inserted(node, statistics_of, (*parts, called["num_groups"], called["eps"]))
        mean, scale = (inserted(node, torch.select, (statistics, 0, i)) for i in (0, 1))
        how = (mean, scale, called.get("weight"), called.get("bias"), fake_of(node).dtype)
        return lambda which: inserted(node, normalised, (self.rows_of(source, rows, which, node), *how))


# Functions of rows of each entry


def rows_behind(count: int, number: Number) -> int:
    """Count the rows that filters make of an input with ``count`` rows."""
    more, scale = number
    return (count + more) // scale + 1


def fields_of(
    x: Tensor,
    dim: int,
    step: int,
    start: int,
    width: int,
    base: Tensor,
    along: int,
    number: Number,
    behind: int,
) -> Tensor:
    """Copy the rows of ``x`` that each entry reads. There are as many entries as ``number`` tells of
    ``base``; with ``behind``, these are as many entries behind them."""
    count = rows_behind(base.shape[along], number)
    first, count = (count, behind) if behind else (0, count)
    return torch.ops.streambp.receptive_fields(x, dim, first, count, step, start, width)


def exists(
    x: Tensor,
    dim: int,
    step: int,
    start: int,
    base: Tensor,
    along: int,
    number: Number,
    before: Number | None,
) -> Tensor:
    """Tell which rows of ``[B entries, ..., n, ...]`` exist, as ``[1, entries, ..., n, ...]``. Entry t has
    the rows from ``step * t + start`` on.

    number  of all these rows
    before  number of the entries, where ``x`` is of those behind them
    """
    first = 0 if before is None else rows_behind(base.shape[along], before)
    entries = first + torch.arange(x.shape[0] // base.shape[0], device=x.device)
    places = entries.unsqueeze(1) * step + start + torch.arange(x.shape[dim], device=x.device)
    found = (places >= 0) & (places < rows_behind(base.shape[along], number))
    return found.view(1, -1, *[1] * (dim - 1), x.shape[dim], *[1] * (x.dim() - 1 - dim))


def zero_outside(x: Tensor, dim: int, step: int, start: int, base: Tensor, *how) -> Tensor:
    """Write zeros in place of rows that do not exist, as padding has them. The arguments are those of
    `exists`."""
    there = exists(x, dim, step, start, base, *how)
    return torch.where(there, x.unflatten(0, (base.shape[0], -1)), 0).flatten(0, 1)


def statistics_of(own: tuple, late: tuple, groups: int, eps: float) -> Tensor:
    """Compute the mean and the inverse deviation of groups of channels over all rows of each sequence, as
    ``torch.nn.GroupNorm`` does.

    own, late  rows of the entries, and of those behind; each with its places: the arguments of `exists`

    Returns ``[2, B, groups]``.
    """
    x, dim, _, _, base, along, number, _ = own
    batch, count = base.shape[0], rows_behind(base.shape[along], number)
    wide, over = torch.promote_types(x.dtype, torch.float32), [1, *range(3, x.dim() + 2)]
    numbers = count * (x[0].numel() // x.shape[dim] // groups)
    parts = [
        (exists(*given).unsqueeze(2), given[0].unflatten(0, (batch, -1)).unflatten(2, (groups, -1)).to(wide))
        for given in (own, late)
    ]
    mean = sum(torch.where(there, rows, 0).sum(over, keepdim=True) for there, rows in parts) / numbers
    squares = [torch.where(there, rows - mean, 0).square().sum(over, keepdim=True) for there, rows in parts]
    found = torch.stack([mean, torch.rsqrt(sum(squares) / numbers + eps)])
    return found.view(2, batch, groups)


def normalised(
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Apply statistics ``[B, groups]`` to groups of channels ``[B entries, C, ...]``."""
    shape = (mean.shape[0], 1, mean.shape[1], *[1] * (x.dim() - 1))
    rows = x.unflatten(0, (mean.shape[0], -1)).unflatten(2, (mean.shape[1], -1))
    made = ((rows - mean.view(shape)) * scale.view(shape)).flatten(2, 3).flatten(0, 1)
    channels = (-1, *[1] * (x.dim() - 2))
    made = made if weight is None else made * weight.view(channels)
    return (made if bias is None else made + bias.view(channels)).to(dtype)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the convolution of each entry of the batch, in autocast's dtype."""
    made = torch.ops.streambp.convolved(x.to(dtype), weight.to(dtype), strides, padding, dilations, groups)
    return made if bias is None else made + bias.to(dtype).view(-1, *[1] * (x.dim() - 2))


def tokens_of(x: Tensor, dim: int, base: Tensor, along: int, number: Number) -> Tensor:
    """Reshape the rows of all entries, ``[B entries, O, ..., n, ...]``, to ``[B, O, ..., tokens, ...]``. The
    last entry may have rows that are no tokens."""
    together = x.shape[dim]
    rows = x.unflatten(0, (base.shape[0], -1)).movedim(1, dim).flatten(dim, dim + 1)
    if together == 1:
        return rows
    size = rows_behind(base.shape[along], number)
    return torch.ops.streambp.regrouped(rows, dim, size, together, 1)

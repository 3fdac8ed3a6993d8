"""Properties of ops in graphs that autograd has not seen yet, for rewrites before autograd.

Ops above autograd (``cross_entropy_loss``, ``linear``, ``chunk``) are decomposed before the passes meet
them, and have no row in the table of signatures. Properties that an op's schema or tags tell are read
from those.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir import arguments, written_by
from . import find_rule

aten = torch.ops.aten
EXPANDS_TOGETHER = (aten.broadcast_tensors.default,)


def is_mutable(node: Node) -> bool:
    """Does an op write into an argument?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_argument(node: Node) -> Node | None:
    """Find the first value that an op writes into, by its schema."""
    return next(iter(written_by(node)), None)


# Python's operators that write into their first argument: ``x += y``, ``x[i] = y``.
WRITING = {
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("__i") and hasattr(operator, f"__{name[3:]}")
} | {operator.setitem}


def mutated(node: Node) -> Node | None:
    """Find the value that a node writes into, or None. A call without an ATen spelling says so by its name
    (``x.add_(y)``), or by ``out`` or ``inplace``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return written_argument(node)
    if isinstance(node.kwargs.get("out"), Node):
        return node.kwargs["out"]
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    spelt = name.endswith("_") and not name.endswith("__") and node.op in ("call_method", "call_function")
    writes = (
        node.kwargs.get("inplace") is True
        or node.target in WRITING
        or spelt
        and name not in ("and_", "or_", "not_", "is_")
    )
    return node.args[0] if writes and node.args and isinstance(node.args[0], Node) else None


class Part(enum.Enum):
    """The part that an op plays in a rewrite before autograd."""

    HEAD = "a product of rows and a weight"
    PRODUCTS = "a product of matrices, or several"
    MERGE = "dimensions of rows become one"
    JOIN = "values are put together along a dimension"
    TOTAL = "the sum of all there is"
    MEAN = "the mean of all there is"
    LOSS = "a loss of each row, then perhaps their sum or mean"
    INDEX = "rows that are chosen by number"
    CONVOLUTION = "a filter along the last dimension"
    PAD = "values put around"
    COPY = "the same values, perhaps of another dtype"
    POINTWISE = "pointwise, though torch does not tag it so"
    STACK = "values are put together along a new dimension"
    ALONG = "each row by itself, if along its dimension"
    ATTENTION = "scaled dot-product attention"
    MOVE = "dimensions change places"
    TRANSPOSE = "the last two dimensions, or all, change places"
    FILTER_OF_PLANES = "a filter along the last two dimensions"
    RESHAPE = "dimensions of size one come in, or one dimension becomes several"
    SHAPED_AS = "the same values in the shape of another value"
    EXPAND = "dimensions of size one are repeated"
    GATED = "one half of a dimension gates the other"
    GROUP_NORM = "groups of channels are normalised over all their numbers"
    NORM = "each row is normalised over its last dimensions"
    COUNT = "consecutive numbers"
    WINDOWS = "consecutive rows, one window behind another"
    STRIDED = "numbers at chosen places in the memory of a value"
    COLUMNS = "windows of a plane, one column each"
    MEAN_OF_WINDOWS = "the mean of each window along the last dimension"
    MAXIMUM_OF_WINDOWS = "the largest number of each window along the last dimension"
    REPEATED = "each row along the last dimension, several times one behind the other"
    TRIANGLE = "entries on one side of a diagonal of a matrix are zero"
    DIAGONAL = "a matrix with ones on its diagonal, else zeros"
    MASKED_SCATTER = "values put one after the other where a mask is true"
    DROPOUT = "numbers are dropped at random"


PARTS: dict[torch._ops.OpOverloadPacket, Part] = {
    **dict.fromkeys((aten.linear, aten.matmul, aten.mm), Part.HEAD),
    **dict.fromkeys((aten.bmm, aten.baddbmm, aten.addmm, aten.einsum), Part.PRODUCTS),
    **dict.fromkeys((aten.view, aten.reshape, aten.flatten), Part.MERGE),
    **dict.fromkeys((aten.cat, aten.concat, aten.concatenate), Part.JOIN),
    aten.sum: Part.TOTAL,
    aten.mean: Part.MEAN,
    **dict.fromkeys(
        (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd, aten.kl_div, aten.mse_loss), Part.LOSS
    ),
    **dict.fromkeys((aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss), Part.LOSS),
    **dict.fromkeys((aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits), Part.LOSS),
    **dict.fromkeys((aten.index, aten.index_select), Part.INDEX),
    aten.conv1d: Part.CONVOLUTION,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), Part.PAD),
    **dict.fromkeys(
        (aten.to, aten._to_copy, aten.type_as, aten.clone, aten.contiguous, aten.detach), Part.COPY
    ),
    **dict.fromkeys(
        (aten.log_sigmoid, aten.multiply, aten.subtract, aten.divide, aten.negative), Part.POINTWISE
    ),
    **dict.fromkeys((aten.absolute, aten.where, aten.full), Part.POINTWISE),
    **dict.fromkeys((aten.__and__, aten.__or__, aten.__xor__), Part.POINTWISE),
    aten.scaled_dot_product_attention: Part.ATTENTION,
    aten.stack: Part.STACK,
    **dict.fromkeys(
        (aten.log_softmax, aten.softmax, aten.logsumexp, aten.gather, aten.take_along_dim), Part.ALONG
    ),
    **dict.fromkeys(
        (aten.argmax, aten.argmin, aten.max, aten.min, aten.amax, aten.amin, aten.topk), Part.ALONG
    ),
    **dict.fromkeys((aten.transpose, aten.permute), Part.MOVE),
    **dict.fromkeys((aten.mT, aten.t, aten.numpy_T, aten.adjoint), Part.TRANSPOSE),
    aten.conv2d: Part.FILTER_OF_PLANES,
    **dict.fromkeys((aten.unflatten, aten.unsqueeze), Part.RESHAPE),
    **dict.fromkeys((aten.view_as, aten.reshape_as), Part.SHAPED_AS),
    **dict.fromkeys((aten.expand, aten.expand_as), Part.EXPAND),
    **dict.fromkeys((aten.layer_norm, aten.rms_norm), Part.NORM),
    aten.glu: Part.GATED,
    aten.group_norm: Part.GROUP_NORM,
    aten.arange: Part.COUNT,
    aten.unfold: Part.WINDOWS,
    **dict.fromkeys((aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter), Part.STRIDED),
    aten.im2col: Part.COLUMNS,
    aten.avg_pool1d: Part.MEAN_OF_WINDOWS,
    aten.max_pool1d: Part.MAXIMUM_OF_WINDOWS,
    **dict.fromkeys((aten.upsample_nearest1d, aten._upsample_nearest_exact1d), Part.REPEATED),
    **dict.fromkeys((aten.tril, aten.triu), Part.TRIANGLE),
    aten.eye: Part.DIAGONAL,
    **dict.fromkeys((aten.dropout, aten.native_dropout), Part.DROPOUT),
    **dict.fromkeys((aten.masked_scatter, aten.masked_scatter_), Part.MASKED_SCATTER),
    **dict.fromkeys((aten.var, aten.std, aten.norm, aten.linalg_vector_norm), Part.ALONG),
}


def part_of(node: Node) -> Part | None:
    """Return the part of a node's op, or None."""
    return PARTS.get(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else None


def is_pointwise(node: Node) -> bool:
    """Is every number of a node's result computed from the numbers in the same place?"""
    tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return (tagged and not is_mutable(node)) or part_of(node) in (Part.COPY, Part.POINTWISE)


def multiplies(node: Node) -> bool:
    """Is a node a product of matrices, a convolution, or attention?"""
    return part_of(node) in MULTIPLYING


MULTIPLYING = {Part.HEAD, Part.PRODUCTS, Part.ATTENTION, Part.CONVOLUTION, Part.FILTER_OF_PLANES}


def may_be_deferred(node: Node) -> bool:
    """May an op run later, together with the operations on its result? It must give the same numbers whenever
    it runs, row by row or summed."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_mutable(node):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    returns = node.target._schema.returns
    view = bool(returns) and returns[0].alias_info is not None
    return view or is_pointwise(node) or part_of(node) in DEFERRED


DEFERRED = set(Part) - {
    Part.HEAD,
    Part.PRODUCTS,
    Part.CONVOLUTION,
    Part.PAD,
    Part.ATTENTION,
    Part.NORM,
    Part.COUNT,
    Part.TRIANGLE,
    Part.WINDOWS,
    Part.MEAN_OF_WINDOWS,
    Part.MAXIMUM_OF_WINDOWS,
    Part.REPEATED,
}


def is_filled(node: Node) -> bool:
    """Does a node make a value of given sizes that is filled with one number?"""
    found = find_rule(node) if node.op == "call_function" else None
    return found is not None and found.filling is not None and found.shape_arg == 0


def is_blank(node: Node) -> bool:
    """Does a node make a tensor that is filled with one number, or uninitialised?"""
    name = getattr(node.target, "_opname", "").removeprefix("new_").removesuffix("_like")
    return name in ("zeros", "ones", "empty", "full")


def is_detached(node: Node) -> bool:
    """Does a node detach another value from its gradient, in any spelling?"""
    return node.target in (aten.detach.default, torch.detach, torch.Tensor.detach, "detach")


def is_along_last(node: Node) -> bool:
    """Is every dimension that an op names the last one, as -1? It is then the last one in a value of more
    dimensions, too."""
    given = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    named = [
        list(v) if isinstance(v, (list, tuple)) else [v]
        for name, v in given.items()
        if name in ("dim", "dims")
    ]
    return bool(named) and all(dims == [-1] for dims in named)


# Ops that read all numbers along a dimension, in any order.
ORDERLESS = {aten.softmax, aten.log_softmax, aten.logsumexp, aten.amax, aten.amin, aten.sum, aten.mean}
ORDERLESS |= {aten.var, aten.std, aten.norm, aten.linalg_vector_norm}


def is_orderless_along(node: Node, dim: int, rank: int) -> bool:
    """Does an op take all numbers along a dimension of its first operand, in any order?

    rank  dimensions of that operand
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in ORDERLESS:
        return False
    named = arguments(node).get("dim")
    dims = [named] if isinstance(named, int) else named
    return not dims or dim in {d % rank for d in dims}


def added_values(node: Node) -> tuple[Node, ...] | None:
    """Return the two values that an op adds, unscaled, or None. This includes ``x += y``."""
    if node.target not in (aten.add.Tensor, aten.add_.Tensor) or arguments(node)["alpha"] != 1:
        return None
    return tuple(node.args[:2])


def chosen_value(node: Node) -> Choice | None:
    """Return the condition and the values of a ``where``, or None."""
    return Choice(*node.args) if node.target is aten.where.self else None


@dataclass(frozen=True)
class Choice:
    condition: Node
    where_true: Node
    where_false: Node


def copied_value(node: Node) -> Node | None:
    """Return the value that a ``copy_`` writes over another, or None."""
    return node.args[1] if node.target is aten.copy_.default else None


def keeps_zeros(node: Node) -> bool:
    """Is a result zero, or false, where the first operand is?"""
    return part_of(node) in ZEROS_KEPT or (
        isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket is aten.any
    )


ZEROS_KEPT = frozenset(
    (Part.TOTAL, Part.MERGE, Part.COPY, Part.MOVE, Part.RESHAPE, Part.SHAPED_AS, Part.EXPAND)
)


def takes_lengths(target: torch._ops.OpOverload, name: str) -> bool:
    """Is an argument a length or a bound of rows, which may change from call to call? The type in the schema
    says so."""
    kind = next(a.real_type for a in target._schema.arguments if a.name == name)
    while hasattr(kind, "getElementType"):
        kind = kind.getElementType()
    return kind.kind() == "SymIntType" and target is not aten.select.int


def is_plain_loss(node: Node) -> bool:
    """Is a node a loss that sums its rows, or takes their mean, without weights?"""
    if part_of(node) is not Part.LOSS:
        return False
    given = arguments(node)
    return (
        given["reduction"] in (SUM, MEAN) and given.get("weight") is None and given.get("pos_weight") is None
    )


NONE, MEAN, SUM = range(3)  # values of an argument ``reduction``


def cuts_into_pieces(node: Node) -> bool:
    """Does a node cut all of a value into pieces along a dimension (``chunk``, ``split``)? The schema says
    so: it returns a list of views, and takes a dimension."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    schema = node.target._schema
    views = str(schema.returns[0].type) == "List[Tensor]" and schema.returns[0].alias_info is not None
    return views and any(a.name == "dim" for a in schema.arguments)


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to before ``stop`` (None: to the end) of a dimension.

    lost  it is the row ``start`` alone, without the dimension
    """

    dim: int
    start: object
    stop: object
    lost: bool = False

    def is_all(self) -> bool:
        return self.start == 0 and self.stop is None and not self.lost


def slice_of(node: Node, rank: int) -> Slice | None:
    """Return the consecutive rows that a node takes of its first operand, or the one row.

    These are ``x[:, a:b]`` and ``x[i]``. None for any other node.

    rank  dimensions of the operand
    """
    if node.target is aten.slice.Tensor:
        given = arguments(node)
        start, stop = given["start"] or 0, given["end"]
        stop = None if isinstance(stop, int) and stop >= TO_THE_END else stop
        return Slice(given["dim"] % rank, start, stop) if given["step"] == 1 else None
    if node.target is aten.narrow.default:
        dim, start, length = node.args[1:]
        if start == 0:
            return Slice(dim % rank, 0, length)
        known = isinstance(start, int) and isinstance(length, int)
        return Slice(dim % rank, start, start + length) if known else None
    if node.target is aten.select.int:
        return Slice(node.args[1] % rank, node.args[2], None, lost=True)
    return None


def steps_over_rows(node: Node) -> bool:
    """Does a node take every n-th row of a dimension (``x[:, ::2]``)?"""
    return node.target is aten.slice.Tensor and arguments(node)["step"] != 1


@dataclass(frozen=True)
class Along:
    """Rows that are read, or written, along a dimension at the places that an index has.

    The index has one place for each number of a row.

    values  the values that are written, or None; they are added where ``adds``
    """

    base: Node
    dim: int
    index: Node
    values: Node | None = None
    adds: bool = False


def read_or_written_along(node: Node) -> Along | None:
    """Return the read or write of a node along a dimension, by an index of as many dimensions. None for any
    other node."""
    if node.target in (aten.gather.default, aten.take_along_dim.default):
        given = arguments(node)
        index = given["index"] if node.target is aten.gather.default else given["indices"]
        return None if given["dim"] is None else Along(given["self"], given["dim"], index)
    if node.target in (aten.scatter.src, aten.scatter_add.default):
        given = arguments(node)
        adds = node.target is aten.scatter_add.default
        return Along(given["self"], given["dim"], given["index"], given["src"], adds)
    return None


TO_THE_END = (1 << 63) - 1


def with_arguments(node: Node, **changed: object) -> tuple[tuple, dict]:
    """Replace some of an op's arguments, by the names of its schema. Return all arguments as (args,
    kwargs)."""
    given = {**arguments(node), **changed}
    places = node.target._schema.arguments
    positional = tuple(given[a.name] for a in places if not a.kwarg_only)
    return positional, {a.name: given[a.name] for a in places if a.kwarg_only}

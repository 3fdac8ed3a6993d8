"""Rewrite a graph into the few forms that the rules know.

Every fused attention kernel, forward and backward, becomes the one streaming attention operator. A mask
that is proved to be causality and nothing else becomes causality. Repeated key heads become grouped
heads. The region's own backward nodes are used throughout, never re-derived. A node that cannot be
rewritten exactly stays as it is, and the rules decide about it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir import (
    are_alike,
    arguments,
    copied,
    is_floating,
    is_known,
    metadata_for,
    op_name,
    shape_of,
    value_of,
)
from ..mask_analysis.domains import Affine, Band
from ..mask_analysis.evaluation import evaluate
from ..rules import filling_of, form_of, is_zeros, windows_of
from ..rules.facets import Form
from ..rules.scans import is_reversible
from .collectives import name_dimensions
from .folded_products import unfold_products
from .hidden_entries import drop_hidden_shifts
from .learned_queries import attend_over_tokens
from .separate_views import separate_views
from .shifted_rows import shift_rows
from .size_nodes import SizeNodes
from .sorted_rows import undo_sorts
from .token_reductions import merge_over_tokens
from .transposed_sums import add_before_transposing
from .writing import Writing
from .written_rows import choose_by_place

aten, streambp = torch.ops.aten, torch.ops.streambp


def mean(x: torch.Tensor, dim=None, keepdim: bool = False, *, dtype=None) -> torch.Tensor:
    """Decompose a mean into a sum and a count, so that the sum can be streamed. Half precision is added up in
    float32, as the kernels do."""
    dims = list(range(x.dim())) if dim is None or (isinstance(dim, (list, tuple)) and not dim) else dim
    dims = [dims] if isinstance(dims, int) else dims
    count = 1
    for d in dims:
        count = count * x.shape[d]
    result = dtype or x.dtype
    total = torch.sum(x, dims, keepdim, dtype=torch.promote_types(result, torch.float32))
    return (total / count).to(result)


def var_mean(
    x: torch.Tensor, dim=None, *, correction=None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose a variance of more than features (batch norm) into a mean and a sum of squares about it. The
    sums of both can be streamed."""
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    if [d % x.dim() for d in dims] == [x.dim() - 1] or x.is_complex():
        return NotImplemented
    middle = mean(x, dims, True)
    squares = mean((x - middle).square(), dims, keepdim)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    freedom = torch.sym_max(count - (1 if correction is None else correction), 0)
    return squares * count / freedom, middle if keepdim else middle.squeeze(dims)


def var(x: torch.Tensor, dim=None, *, correction=None, keepdim: bool = False) -> torch.Tensor:
    both = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]


def repeat(x: torch.Tensor, repeats) -> torch.Tensor:
    """Decompose a repeat into an expansion that is laid out in memory, so that repeated rows stay rows. The
    result is contiguous, as the op's own result is: views of it rely on that."""
    x = x.reshape([1] * (len(repeats) - x.dim()) + list(x.shape))
    apart = [(r, s) if r != 1 else (s,) for r, s in zip(repeats, x.shape)]
    narrow = x.reshape([n for part in apart for n in ((1, part[1]) if len(part) == 2 else part)])
    laid_out = narrow.expand([n for part in apart for n in part]).clone(memory_format=torch.contiguous_format)
    return laid_out.view([r * s for r, s in zip(repeats, x.shape)])


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate values along a new dimension. Torch's decomposition concatenates along the dimension behind
    it, which may hold the tokens, and splits that again."""
    dim = dim % (tensors[0].dim() + 1)
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


def split(x: torch.Tensor, length, dim: int = 0) -> list[torch.Tensor]:
    """Decompose a split into pieces of one length, of which the last may be shorter, into slices."""
    size = x.shape[dim]
    if size == 0 or not (is_known(size) and is_known(length)):
        return NotImplemented
    ends = [min((i + 1) * length, size) for i in range(int(-(-size // length)))]
    return [aten.slice.Tensor(x, dim, i * length, end) for i, end in enumerate(ends)]


def split_with_sizes(x: torch.Tensor, lengths, dim: int = 0) -> list[torch.Tensor]:
    """Decompose a split into pieces of given lengths into slices, whose rows the rules can place."""
    if not all(map(is_known, (x.shape[dim], *lengths))):
        return NotImplemented
    ends = itertools.accumulate(lengths)
    return [aten.slice.Tensor(x, dim, end - n, end) for n, end in zip(lengths, ends)]


def index_put(x: torch.Tensor, indices, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """Decompose a write of one number where a mask is true into a choice by each token."""
    mask = indices[0] if len(indices) == 1 else None
    if accumulate or mask is None or mask.dtype is not torch.bool or values.numel() != 1:
        return NotImplemented
    return torch.where(mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())]), values.reshape([]), x)


def eye(rows: int, columns: int | None = None, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Compare indices, and return ones where they are equal. Torch's decomposition counts in the smallest
    unsigned dtype, in which no device has a range of more than 255 numbers."""
    if layout not in (None, torch.strided):
        return NotImplemented
    columns = rows if columns is None else columns
    equal = torch.arange(rows, device=device)[:, None] == torch.arange(columns, device=device)
    return equal.to(torch.get_default_dtype() if dtype is None else dtype)


def as_strided(x: torch.Tensor, size, stride, storage_offset=None) -> torch.Tensor:
    """Replace a contiguous value that is read as another contiguous one by a view. The decomposition of group
    norm reads values in this way."""
    steps, count = [], 1
    for n in reversed(size):
        steps.append(count)
        count = count * n
    plain = storage_offset in (None, 0) and x.is_contiguous() and x.storage_offset() == 0
    if not plain or list(stride) != steps[::-1] or count != x.numel():
        return NotImplemented
    return x.view(size)


def layer_norm(decomposed: Callable, x: torch.Tensor, shape, weight, bias, eps: float) -> tuple:
    """Compute the statistics of half-precision rows in float32 on every device.

    Torch rounds them on a CPU alone.

    decomposed  torch's own decomposition
    """
    accurate = x.to(torch.promote_types(x.dtype, torch.float32))
    result, average, deviation = decomposed(accurate, shape, weight, bias, eps)
    return result.to(x.dtype), average, deviation


def drop_whole_slices(graph: Graph) -> None:
    """Drop slices and paddings that change nothing. Torch keeps them where sizes are symbols: ``x[:, None]``
    slices all dimensions behind the new one."""
    for node in list(graph.nodes):
        windows = [w for _, w in windows_of(node) if w.by == w.low == 0 and are_alike(node, w.source)]
        if windows:
            node.replace_all_uses_with(windows[0].source)
            graph.erase_node(node)


def read_sizes_from_inputs(graph: Graph) -> None:
    """Read sizes and numbers of elements from inputs in place of intermediate values. Then no value must
    exist for its size alone."""
    sizes = SizeNodes(graph)
    asking = (aten.sym_size.int, aten.sym_numel.default)
    for node in (n for target in asking for n in graph.find_nodes(op="call_function", target=target)):
        if isinstance(value_of(node), torch.SymInt) and node.args[0].op != "placeholder":
            replacement = sizes.written(value_of(node), node)
            if replacement is not None:
                node.replace_all_uses_with(replacement)


def create_from_nothing(graph: Graph) -> None:
    """Replace creation ops that take a value as a model by plain constants. ``x.new_zeros(size)`` reads
    nothing of ``x``, and an empty value has no strides of its own to keep."""
    for node in list(graph.nodes):
        if form_of(node) is not Form.CREATED:
            continue
        size, value = arguments(node)["size"], value_of(node)
        with graph.inserting_before(node):
            new = graph.call_function(
                aten.full.default,
                (size, filling_of(node) or 0),  # an uninitialized value may as well be zero
                dict(dtype=value.dtype, device=value.device),
            )
        new.meta = metadata_for(node, value.new_empty(value.shape))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def draw_by_place(graph: Graph) -> None:
    """Compute random numbers from their places and a seed that is drawn once per call. Any chunk can then
    draw its own numbers again."""
    seeds: dict[torch.device, Node] = {}
    drawn = [n for n in graph.nodes if form_of(n) is Form.RANDOM]
    first = next((n for n in graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    for stream, node in enumerate(drawn):
        value = value_of(node)
        if value.device not in seeds:
            with graph.inserting_before(first):
                seed = graph.call_function(streambp.seed.default, (value.device,))
            seed.meta["val"] = value.new_empty((), dtype=torch.int64)
            seeds[value.device] = seed
        with graph.inserting_before(node):
            new = graph.call_function(
                streambp.uniform.default, (seeds[value.device], node.args[0], stream, value.dtype)
            )
        new.meta = metadata_for(node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def scatter_to_extremes(graph: Graph) -> None:
    """Rewrite the gradient of a maximum to find its place again, in place of reading it. Then the forward
    need not pass on places among keys."""
    for node in [n for n in graph.nodes if form_of(n) is Form.SCATTER]:
        base, dim, index, grad = node.args
        rank = len(shape_of(node))
        if form_of(index) is Form.UNSQUEEZE and index.args[1] % rank == dim % rank:
            index = index.args[0]
        chosen = index.args[0] if index.target is operator.getitem and index.args[1] == 1 else None
        if (
            chosen is None
            or form_of(chosen) not in (Form.MAXIMUM, Form.MINIMUM)
            or chosen.args[1] % rank != dim % rank
            or not is_zeros(base)
            or shape_of(chosen.args[0]) != shape_of(node)
        ):
            continue
        new = emitted(
            graph,
            node,
            streambp.to_extreme.default,
            (grad, chosen.args[0], dim % rank, form_of(chosen) is Form.MAXIMUM),
        )
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def scatter_to_zeros(graph: Graph) -> None:
    """Rewrite the gradient of ``gather`` to read no zeros, which may be wide."""
    sizes = SizeNodes(graph)
    for node in graph.find_nodes(op="call_function", target=aten.scatter_add.default):
        base, dim, index, source = node.args
        rank = len(shape_of(node))
        dim %= max(rank, 1)
        fits = all(shape_of(base)[i] == shape_of(index)[i] for i in range(rank) if i != dim)
        if not (rank and is_zeros(base) and fits and shape_of(index) == shape_of(source)):
            continue
        size = sizes.written(value_of(base).shape[dim], node)
        if size is not None:
            new = emitted(graph, node, streambp.sum_at.default, (index, source, dim, size))
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def put_in_each_row(graph: Graph) -> None:
    """Rewrite ``zeros[range(n), index] = numbers``, which puts one number into each row, to read no zeros.
    Torch's loss parallelism writes a gradient so. Negative places count from the end."""
    for node in list(graph.nodes):
        if form_of(node) is not Form.PUT_ROWS or len(shape_of(node)) != 2 or not is_zeros(node.args[0]):
            continue
        indices, numbers, writing = node.args[1], node.args[2], Writing(graph, node)
        if len(indices) != 2 or None in indices or form_of(indices[0]) is not Form.RANGE:
            continue
        every, index, rows = indices[0], indices[1], shape_of(node)[:1]
        counts = (every.kwargs["start"], every.kwargs["step"]) == (0, 1)
        size = writing.sizes.written(value_of(node).shape[1], node)
        if counts and all(shape_of(n) == rows for n in (every, index, numbers)) and size is not None:
            negative, from_end = writing(aten.lt.Scalar, index, 0), writing(aten.add.Scalar, index, size)
            index = writing(aten.where.self, negative, from_end, index)
            index, numbers = (writing(aten.unsqueeze.default, n, 1) for n in (index, numbers))
            node.replace_all_uses_with(
                emitted(graph, node, streambp.sum_at.default, (index, numbers, 1, size))
            )


def turn_scans(graph: Graph) -> None:
    """Rewrite a scan of flipped rows, flipped back, as a scan from the last row to the first. Every gradient
    of a scan has this form. Rows that are flipped twice are replaced by the rows themselves."""

    def flipped(node: Node) -> list[int] | None:
        return sorted(d % len(shape_of(node)) for d in node.args[1]) if form_of(node) is Form.FLIP else None

    floats = [n for n in graph.nodes if is_floating(n)]
    for node in floats:
        if flipped(node) and flipped(node) == flipped(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
    for node in floats:
        dims = flipped(node)
        if not dims:
            continue
        scan = node.args[0]
        if not is_reversible(scan) or [scan.args[1] % len(shape_of(scan))] != dims:
            continue
        source = scan.args[0]
        if flipped(source) == dims and value_of(source).dtype == value_of(node).dtype:
            call = (source.args[0], dims[0], op_name(scan))
            node.replace_all_uses_with(emitted(graph, node, streambp.reverse_scan.default, call))


def outputs_of(node: Node) -> dict[int, Node]:
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def fuse_attention(graph: Graph) -> None:
    """Rewrite each fused kernel without dropout, together with its backward, to ``streambp.attention``."""
    rewritten: list[Node] = []
    for node in list(graph.nodes):
        if form_of(node) is Form.FUSED_ATTENTION:
            replaced = forward_of(graph, node)
        elif form_of(node) is Form.FUSED_ATTENTION_BACKWARD:
            replaced = backward_of(graph, node)
        else:
            continue
        if replaced is None:
            continue
        rewritten.append(node)
        for index, user in outputs_of(node).items():
            if index < len(replaced.meta["val"]):
                user.replace_input_with(node, replaced)
                user.meta["val"] = replaced.meta["val"][index]
    for node in reversed(
        rewritten
    ):  # torch regards a kernel that could draw random numbers as impure, and keeps it
        for unread in [node, *node.users][::-1]:
            if not unread.users:
                graph.erase_node(unread)


def scale_of(given: float | None, query: Node) -> float:
    return float(given) if given is not None else 1 / math.sqrt(shape_of(query)[-1])


def forward_of(graph: Graph, node: Node) -> Node | None:
    args = arguments(node)
    mask = args.get("attn_mask", args.get("attn_bias"))
    if args["dropout_p"] != 0:
        return None
    if any(
        user.target is not operator.getitem or user.args[1] > 1 and user.users and not only_backward(user)
        for user in node.users
    ):
        return None
    mask = of_rank_four(graph, node, mask)
    call = (
        args["query"],
        args["key"],
        args["value"],
        mask,
        bool(args["is_causal"]),
        scale_of(args["scale"], args["query"]),
        0,
    )
    return emitted(graph, node, streambp.attention.default, call)


def of_rank_four(graph: Graph, before: Node, mask: Node | None) -> Node | None:
    while mask is not None and len(shape_of(mask)) < 4:
        with graph.inserting_before(before):
            wider = graph.call_function(aten.unsqueeze.default, (mask, 0))
        wider.meta["val"] = value_of(mask).unsqueeze(0)
        mask = wider
    return mask


def only_backward(node: Node) -> bool:
    return all(
        form_of(user) is Form.FUSED_ATTENTION_BACKWARD
        or user.op == "output"
        or (form_of(user) is Form.ALIAS and only_backward(user))
        for user in node.users
    )


def backward_of(graph: Graph, node: Node) -> Node | None:
    args = arguments(node)
    mask = args.get("attn_mask", args.get("attn_bias"))
    wants_bias = "grad_input_mask" in args and args["grad_input_mask"][3]
    if args["dropout_p"] != 0 or wants_bias:
        return None
    mask = of_rank_four(graph, node, mask)
    out, lse = (root_of(args[name]) for name in ("out", "logsumexp"))
    call = (
        args.get("grad_out", args.get("grad_out_")),
        args["query"],
        args["key"],
        args["value"],
        out,
        lse,
        mask,
        bool(args["is_causal"]),
        scale_of(args["scale"], args["query"]),
    )
    return emitted(graph, node, streambp.attention_backward.default, call)


def root_of(node: Node) -> Node:
    while form_of(node) is Form.ALIAS:
        node = node.args[0]
    return node


def emitted(graph: Graph, node: Node, target, args: tuple) -> Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    value = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
    new.meta = metadata_for(node, value)
    return new


def drop_proved_masks(graph: Graph) -> None:
    """Replace a mask that is proved to be causality alone by the kernel's own flag. Such a mask is
    ``where(key <= row, 0, -inf)``. A mask that adds zero everywhere is left out."""
    values = None
    for node in graph.nodes:
        if form_of(node) not in (Form.ATTENTION, Form.ATTENTION_BACKWARD):
            continue
        at = [a.name for a in node.target._schema.arguments].index("mask")
        mask = node.args[at]
        if mask is None:
            continue
        values = evaluate(graph) if values is None else values
        found = values.get(mask)
        if isinstance(found, Band) and found.exact and (found.lo, found.hi) == (-math.inf, 0):
            node.update_arg(at, None)
            node.update_arg(at + 1, True)
        elif isinstance(found, Affine) and not found.slopes and found.const == 0:
            node.update_arg(at, None)


def narrow_heads(node: Node) -> Node | None:
    """Find the ``[B, Hkv, T, D]`` behind ``expand`` and ``view`` to ``[B, Hkv*G, T, D]``, or None."""
    wide = shape_of(node)
    while form_of(node) in (Form.COPY, Form.RESHAPE, Form.EXPAND, Form.UNSQUEEZE):
        source = node.args[0]
        shape = shape_of(source)
        if len(shape) == 4 and len(shape_of(node)) == 5:
            group = shape_of(node)
            is_group = group == (shape[0], shape[1], 1, *shape[2:])
            repeats = wide[0] == shape[0] and wide[2:] == shape[2:] and wide[1] % shape[1] == 0
            return source if is_group and repeats and shape[1] < wide[1] else None
        if (
            len(shape) == 5
            and form_of(node) is Form.EXPAND
            and (shape[2] != 1 or shape_of(node)[:2] != shape[:2] or shape_of(node)[3:] != shape[3:])
        ):
            return None
        node = source
    return None


def summed_heads(grad: Node, narrow: tuple[int, ...]) -> Node | None:
    """Find the sum over repeated heads that the gradient of a repeat ends in. Returns None if something else
    reads the gradient."""
    node = grad
    while len(node.users) == 1:
        user = next(iter(node.users))
        if form_of(user) in (Form.RESHAPE, Form.COPY, Form.CAST):
            node = user
        elif form_of(user) is Form.SUM and [d % 5 for d in user.args[1]] == [2] and len(shape_of(node)) == 5:
            node = user
            break
        else:
            return None
    else:
        return None
    if shape_of(node)[-2:] != narrow[-2:]:
        return None
    keep = len(shape_of(node)) == 5
    if not keep:
        return node if shape_of(node) == narrow else None
    users = list(node.users)
    if len(users) == 1 and form_of(users[0]) in (Form.RESHAPE, Form.SQUEEZE) and shape_of(users[0]) == narrow:
        return users[0]
    return None


def group_heads(graph: Graph) -> None:
    """Attend with the narrow keys and values, so that streaming keeps them and not their copies."""
    forwards = [n for n in graph.nodes if form_of(n) is Form.ATTENTION]
    for node in forwards:
        key, value = (narrow_heads(n) for n in node.args[1:3])
        if key is None or value is None:
            continue
        backward = [
            u
            for u in node.args[0].users
            if form_of(u) is Form.ATTENTION_BACKWARD and u.args[2:4] == node.args[1:3]
        ]
        replacements = []
        for call in backward:
            grads = outputs_of(call)
            sums = {i: summed_heads(grads[i], shape_of(n)) for i, n in ((1, key), (2, value)) if i in grads}
            if None in sums.values():
                break
            replacements.append((call, sums))
        if len(replacements) != len(backward):
            continue
        node.update_arg(1, key)
        node.update_arg(2, value)
        for call, sums in replacements:
            call.update_arg(2, key)
            call.update_arg(3, value)
            old = call.meta["val"]
            call.meta["val"] = (old[0], torch.empty_like(value_of(key)), torch.empty_like(value_of(value)))
            for i, total in sums.items():
                grad = outputs_of(call)[i]
                grad.meta["val"] = call.meta["val"][i]
                if total is not None:
                    total.replace_all_uses_with(grad)


STEPS: tuple[Callable[[Graph], object], ...] = (
    drop_whole_slices,
    read_sizes_from_inputs,
    create_from_nothing,
    name_dimensions,
    choose_by_place,
    shift_rows,
    turn_scans,
    draw_by_place,
    scatter_to_extremes,
    scatter_to_zeros,
    put_in_each_row,
    fuse_attention,
    drop_proved_masks,
    group_heads,
    drop_hidden_shifts,
    add_before_transposing,
    separate_views,
)
"""The rewrites of a joint graph, in order."""

WHERE_TOKENS_ARE = (attend_over_tokens, merge_over_tokens, unfold_products)
"""The rewrites that need token dimensions, in order. They are repeated until none of them applies; none
applies to its own result."""


def normalize(module: GraphModule) -> GraphModule:
    """Copy a graph and rewrite it in the forms that the rules know; the given module is left alone."""
    result = copied(module)
    for step in STEPS:
        step(result.graph)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def normal_form(module: GraphModule, unsorted: set[int] | None = None) -> GraphModule:
    """Return a normalized copy of the graph, without the sorts that are undone in it.

    unsorted  see `undo_sorts`
    """
    return undo_sorts(normalize(module), unsorted)

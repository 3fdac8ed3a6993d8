"""Convolutions along the tokens that keep the number of tokens, rewritten before autograd sees them. Short
ones become sums of shifted rows. Others, of any length and in groups, become one operator with its
gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from ...passes.ir import arguments, is_equal
from ...passes.kernels import filters
from ...passes.rules.forward import Part, part_of, slice_of
from ..reading.aten import inserted
from ..reading.values import fake_of, is_changed

streambp = torch.ops.streambp
MOST_TAPS = 16


def look_back(module: GraphModule) -> GraphModule:
    """Rewrite convolutions along the tokens that keep the number of tokens. Short ones, dense or depthwise
    (causal filters), become sums of shifted rows, one for each tap. Others become an operator that reads
    the rows around."""
    for node in list(module.graph.nodes):
        if part_of(node) is Part.CONVOLUTION:
            pass_zeros_on(node)
    for node in list(module.graph.nodes):
        found = taps(node) if part_of(node) is Part.CONVOLUTION else None
        if found is None:
            continue
        ends, made, args = found
        with module.graph.inserting_before(node):
            new = inserted(ends[0], made, (*args, fake_of(node).dtype))
        for end in ends:
            end.replace_all_uses_with(new)
        for old in dict.fromkeys((*ends, node, node.all_input_nodes[0])):
            if not old.users and old.op == "call_function":
                module.graph.erase_node(old)
    return module


def taps(node: Node) -> tuple[list[Node], Callable, tuple] | None:
    """Match a convolution that gives one row for every row. Returns the nodes with those rows, the function
    that computes them, and its arguments. These are input, weight and bias, then either how far back each
    tap reads (`sum_of_taps`), or padding in front, dilation and groups (`filter_of_rows`). The rows are
    padded by the convolution itself or by ``F.pad``. A slice behind it may cut off rows at the end."""
    given = arguments(node)
    source, weight = given["input"], fake_of(given["weight"])
    stride, padding, dilation, groups = settings_of(node)
    count, channels = weight.shape[-1], fake_of(source).shape[-2]
    if stride != 1 or fake_of(source).dim() != 3:
        return None
    source, zeros = padded(source)
    before = {"valid": 0, "same": dilation * (count - 1) // 2}.get(padding, padding) + zeros
    rows, shifts = fake_of(source).shape[-1], tuple(before - k * dilation for k in range(count))
    ends = [node] if is_equal(fake_of(node).shape[-1], rows) else list(node.users)
    kept = all((n is node or is_prefix(n)) and is_equal(fake_of(n).shape[-1], rows) for n in ends)
    if not (ends and kept):
        return None
    operands = (source, given["weight"], given.get("bias"))
    plain = groups == 1 or groups == channels == weight.shape[0]
    # compare the length last: where it may change, Dynamo guards on the comparison
    if plain and count <= MOST_TAPS and rows > max(map(abs, shifts)):
        return ends, sum_of_taps, (*operands, shifts)
    return ends, filter_of_rows, (*operands, before, dilation, groups)


def settings_of(node: Node) -> tuple:
    """Return the stride, padding, dilation and groups of a convolution."""
    return tuple(single(arguments(node)[name]) for name in ("stride", "padding", "dilation", "groups"))


def padded(node: Node) -> tuple[Node, int]:
    """Return the rows that a node pads with zeros, and the number of zeros in front of them."""
    changed = any(map(is_changed, (node, *node.all_input_nodes)))
    pad = arguments(node) if part_of(node) is Part.PAD and not changed else {}
    plain = (
        pad.get("mode", "constant") == "constant" and not pad.get("value") and len(pad.get("pad", ())) == 2
    )
    return (pad["self"], pad["pad"][0]) if plain and isinstance(pad["pad"][0], int) else (node, 0)


def pass_zeros_on(node: Node) -> None:
    """Leave to a convolution the zeros in front that its own rows need, and pad its result by the others. Of
    zeros alone it makes its bias, which moves behind the convolutions that read it."""
    given, (source, zeros) = arguments(node), padded(arguments(node)["input"])
    stride, padding, dilation, groups = settings_of(node)
    more = zeros - dilation * (fake_of(given["weight"]).shape[-1] - 1)
    if more <= 0 or stride != 1 or padding not in (0, "valid") or not are_filters_of(node):
        return
    if not is_equal(fake_of(node).shape[-1], fake_of(source).shape[-1] + more):
        return
    with node.graph.inserting_before(node):
        rows = inserted(node, F.pad, (source, (zeros - more, 0)))
        rows = inserted(node, F.conv1d, (rows, given["weight"], None, 1, 0, dilation, groups))
        rows = inserted(node, F.pad, (rows, (more, 0)))
    for reader in list(node.users):
        own = {**arguments(reader), "input": rows}
        if given.get("bias") is not None:
            with node.graph.inserting_before(reader):
                how = (given["bias"], own["weight"], own.get("bias"), settings_of(reader)[-1])
                own["bias"] = inserted(reader, bias_behind, how)
        reader.args, reader.kwargs = tuple(own[a.name] for a in reader.target._schema.arguments), {}
    node.graph.erase_node(node)


def are_filters_of(node: Node) -> bool:
    """Are all readers of a value convolutions of its rows, and pad no more?"""
    found = [n for n in node.users if part_of(n) is Part.CONVOLUTION and arguments(n)["input"] is node]
    return len(found) == len(node.users) > 0 and all(settings_of(n)[1] in (0, "valid") for n in found)


def bias_behind(
    bias: torch.Tensor, weight: torch.Tensor, own: torch.Tensor | None, groups: int
) -> torch.Tensor:
    """Compute what a convolution makes of rows that are all ``bias``."""
    sums = (weight.sum(-1).unflatten(0, (groups, -1)) @ bias.view(groups, -1, 1)).flatten()
    return sums if own is None else sums + own


def sum_of_taps(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shifts: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the convolution of ``[B, C, T]`` by ``[O, C or 1, K]``. Tap k reads the row ``shifts[k]``
    before its own. Half precision is added up in float32, as the kernels do."""
    sum_dtype, total = torch.promote_types(dtype, torch.float32), None
    for k, by in enumerate(shifts):
        rows = x if by == 0 else F.pad(x, (by, -by))
        if weight.shape[1] == 1 < weight.shape[0] == x.shape[1]:
            part = rows.to(sum_dtype) * weight[:, 0, k, None].to(sum_dtype)
        else:
            part = F.linear(rows.transpose(1, 2), weight[:, :, k]).transpose(1, 2).to(sum_dtype)
        total = part if total is None else total + part
    return (total if bias is None else total + bias[:, None]).to(dtype)


def single(value: object) -> object:
    return value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value


def is_prefix(node: Node) -> bool:
    """Is a node ``x[..., :n]`` of ``[B, C, T]``?"""
    part = slice_of(node, 3)
    return part is not None and not part.lost and part.dim == 2 and part.start == 0


def filter_of_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: int,
    dilation: int,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the convolution of ``[B, C, T]`` by ``[O, C / groups, K]`` as one operator, in autocast's
    dtype. Tap k reads the row ``before - k * dilation`` before its own."""
    made = streambp.filtered(x.to(dtype), weight.to(dtype), before, dilation, groups)
    return made if bias is None else made + bias[:, None].to(dtype)


def keep_operands(ctx, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def filtered_back(ctx, grad: torch.Tensor):
    (x, weight), (before, dilation, groups) = ctx.saved_tensors, ctx.how
    behind = filters.reach(weight.shape[-1], before, dilation)[1]
    given = filter_grad = None
    if ctx.needs_input_grad[0]:
        given = streambp.filtered(grad, filters.turned(weight, groups), behind, dilation, groups)
    if ctx.needs_input_grad[1]:
        filter_grad = streambp.filter_grad(x, grad, weight, before, dilation, groups)
    return given, filter_grad, None, None, None


torch.library.register_autograd("streambp::filtered", filtered_back, setup_context=keep_operands)

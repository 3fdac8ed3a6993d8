"""What is rewritten in torch functions, before autograd sees it, because no rule could stream what it
becomes.

Gradients of what is written here come from autograd, as those of the user's own functions do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .. import internals
from ..passes.ir import is_equal
from .token_axes import fake_of

MOST_TAPS = 16


def look_back(module: GraphModule) -> GraphModule:
    """Write convolutions along the tokens that keep their number (short causal filters) as sums of shifted
    rows, one for each tap."""
    for node in list(module.graph.nodes):
        found = (
            taps(node) if node.target is torch.conv1d and isinstance(fake_of(node), torch.Tensor) else None
        )
        if found is None:
            continue
        ends, args = found
        with module.graph.inserting_before(node):
            new = inserted(ends[0], sum_of_taps, (*args, fake_of(node).dtype))
        for end in ends:
            end.replace_all_uses_with(new)
        for old in dict.fromkeys((*ends, node, node.all_input_nodes[0])):
            if not old.users and old.op == "call_function":
                module.graph.erase_node(old)
    return module


def taps(node: Node) -> tuple[list[Node], tuple] | None:
    """For a convolution that gives a row for every row: those rows; and what they are made of: input, weight,
    bias, how far back each tap reads.

    It pads in front as much as is cut off behind: by itself, by ``F.pad``, or with a slice after it.
    """
    given = named(node, "input", "weight", "bias", "stride", "padding", "dilation", "groups")
    source, weight = given["input"], fake_of(given["weight"])
    stride, padding, dilation, groups = (
        single(given.get(name, default))
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
    )
    count, channels = weight.shape[-1], fake_of(source).shape[-2]
    if (
        stride != 1
        or count > MOST_TAPS
        or fake_of(source).dim() != 3
        or not (groups == 1 or groups == channels == weight.shape[0])
    ):
        return None
    before = {"valid": 0, "same": dilation * (count - 1) // 2}.get(padding, padding)
    pad = named(source, "input", "pad", "mode", "value") if source.target in internals.PADDINGS else {}
    if (
        pad.get("mode", "constant") == "constant"
        and not pad.get("value")
        and len(pad.get("pad", ())) == 2
        and isinstance(pad["pad"][0], int)
    ):
        source, before = pad["input"], before + pad["pad"][0]
    rows, shifts = fake_of(source).shape[-1], tuple(before - k * dilation for k in range(count))
    if not rows > max(map(abs, shifts)):  # of a length that may change, Dynamo then guards on it
        return None
    ends = [node] if is_equal(fake_of(node).shape[-1], rows) else list(node.users)
    kept = all((n is node or is_prefix(n)) and is_equal(fake_of(n).shape[-1], rows) for n in ends)
    return (ends, (source, given["weight"], given.get("bias"), shifts)) if ends and kept else None


def sum_of_taps(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shifts: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A convolution of ``[B, C, T]`` by ``[O, C or 1, K]``, of which tap k reads the row ``shifts[k]`` before
    its own.

    Half precision is added up in float32, as the kernels do.
    """
    wide, total = torch.promote_types(dtype, torch.float32), None
    for k, by in enumerate(shifts):
        rows = x if by == 0 else F.pad(x, (by, -by))
        if weight.shape[1] == 1 < weight.shape[0] == x.shape[1]:
            part = rows.to(wide) * weight[:, 0, k, None].to(wide)
        else:
            part = F.linear(rows.transpose(1, 2), weight[:, :, k]).transpose(1, 2).to(wide)
        total = part if total is None else total + part
    return (total if bias is None else total + bias[:, None]).to(dtype)


def named(node: Node, *names: str) -> dict[str, object]:
    """Arguments of a call by the names of its parameters."""
    return {**dict(zip(names, node.args)), **node.kwargs}


def single(value: object) -> object:
    return value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value


def is_prefix(node: Node) -> bool:
    """``x[..., :n]`` of ``[B, C, T]``."""
    index = node.args[1] if node.target is operator.getitem else ()
    if not isinstance(index, tuple) or len(index) not in (2, 3) or not isinstance(index[-1], slice):
        return False
    *others, last = index
    everything = (
        others == [Ellipsis] or len(index) == 3 and all(i is Ellipsis or i == slice(None) for i in others)
    )
    return everything and last.start in (None, 0) and last.step in (None, 1)


def inserted(like: Node, target: Callable | str, args: tuple, kwargs: dict | None = None) -> Node:
    """A node in the place of another, with the fake value that Dynamo would have given it. A target by name
    is a method."""
    new = (like.graph.call_method if isinstance(target, str) else like.graph.call_function)(
        target, args, kwargs or {}
    )
    new.meta = {k: v for k, v in like.meta.items() if k != "example_value"}
    fakes = torch.fx.node.map_arg((args, kwargs or {}), fake_of)
    with internals.faked(fake_of(like)):
        new.meta["example_value"] = (getattr(torch.Tensor, target) if isinstance(target, str) else target)(
            *fakes[0], **fakes[1]
        )
    return new

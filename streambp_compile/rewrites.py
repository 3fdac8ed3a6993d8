"""What is rewritten in torch functions, before autograd sees it, because no rule could stream what it becomes.

Gradients of what is written here come from autograd, as those of the user's own functions do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from . import internals
from .axis import fake_of
from .passes.ir import is_equal
from .passes.split import mutated
from .recorded import POINTWISE
from .regions import is_switch


def even_heads(module: GraphModule) -> GraphModule:
    """Give fused attention values as wide as its queries (latent attention has narrower ones), padded with zeros and cut again.

    No kernel takes them uneven, and torch would fall back to matrices of tokens by tokens.
    """
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        given = named(node, "query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        queries, values = (int(fake_of(given[name]).shape[-1]) for name in ("query", "value"))
        if queries == values:
            continue
        missing = max(queries, values)
        given["scale"] = given.get("scale") or queries ** -0.5
        with module.graph.inserting_before(node):
            for name, width in (("query", queries), ("key", queries), ("value", values)):
                if width < missing:
                    given[name] = inserted(node, F.pad, (given[name], (0, missing - width)))
            attended = inserted(node, F.scaled_dot_product_attention, (), given)
            result = inserted(node, operator.getitem, (attended, (..., slice(None, values))))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    return module


MOST_TAPS = 16


def look_back(module: GraphModule) -> GraphModule:
    """Write convolutions along the tokens that keep their number (short causal filters) as sums of shifted rows, one for each tap."""
    for node in list(module.graph.nodes):
        found = taps(node) if node.target is torch.conv1d and isinstance(fake_of(node), torch.Tensor) else None
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
    """For a convolution that gives a row for every row: those rows; and what they are made of: input, weight, bias, how far back each tap reads.

    It pads in front as much as is cut off behind: by itself, by ``F.pad``, or with a slice after it.
    """
    given = named(node, "input", "weight", "bias", "stride", "padding", "dilation", "groups")
    source, weight = given["input"], fake_of(given["weight"])
    stride, padding, dilation, groups = (single(given.get(name, default)) for name, default in
                                         (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)))
    count, channels = weight.shape[-1], fake_of(source).shape[-2]
    if stride != 1 or count > MOST_TAPS or fake_of(source).dim() != 3 or not (groups == 1 or groups == channels == weight.shape[0]):
        return None
    before = {"valid": 0, "same": dilation * (count - 1) // 2}.get(padding, padding)
    pad = named(source, "input", "pad", "mode", "value") if source.target in internals.PADDINGS else {}
    if pad.get("mode", "constant") == "constant" and not pad.get("value") and len(pad.get("pad", ())) == 2 and isinstance(pad["pad"][0], int):
        source, before = pad["input"], before + pad["pad"][0]
    rows, shifts = fake_of(source).shape[-1], tuple(before - k * dilation for k in range(count))
    if not rows > max(map(abs, shifts)):  # of a length that may change, Dynamo then guards on it
        return None
    ends = [node] if is_equal(fake_of(node).shape[-1], rows) else list(node.users)
    kept = all((n is node or is_prefix(n)) and is_equal(fake_of(n).shape[-1], rows) for n in ends)
    return (ends, (source, given["weight"], given.get("bias"), shifts)) if ends and kept else None


def sum_of_taps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shifts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A convolution of ``[B, C, T]`` by ``[O, C or 1, K]``, of which tap k reads the row ``shifts[k]`` before its own.

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


def rows_first(module: GraphModule) -> GraphModule:
    """Read some rows of what a head makes, by index, from as many hidden states: ``head(x)[i]`` as ``head(x[i])``.

    The rows that nobody reads are then never made, and those that are have tokens of their own along which they stream.
    """
    for node in list(module.graph.nodes):
        made = way_to_head(node) if picks_rows(node) else []
        if not made or fake_of(made[-1]).numel() > fake_of(made[0]).numel() or not may_move(made[0], node):
            continue
        head, x = made[0], made[0].args[0]
        between = [n for n in made[1:-1] if moves_rows(n)]
        with module.graph.inserting_before(node):
            for step in between:
                x = inserted(step, torch.flatten, (x, 0, -2)) if name_of(step) in MERGING else inserted(step, step.target, (x, *step.args[1:]), step.kwargs)
            value = inserted(node, node.target, (x, *node.args[1:]), node.kwargs)
            for step in (n for n in made[:-1] if n not in between):
                value = inserted(step, step.target, *torch.fx.node.map_arg((step.args, step.kwargs), lambda a: value if a in (*made, head.args[0]) else a))
        node.replace_all_uses_with(value)
        for old in reversed(made):
            module.graph.erase_node(old)
    return module


def may_move(node: Node, to: Node) -> bool:
    """Does nothing lie between two nodes that switches a mode or writes into a value?"""
    while node is not to:
        if is_switch(node) or mutated(node) is not None:
            return False
        node = node.next
    return True


HEADS = ("linear", "matmul", "__matmul__", "mm")
MERGING = ("view", "reshape", "flatten")


def name_of(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def picks_rows(node: Node) -> bool:
    """``x[i]``, ``x[i, j]`` of whole numbers, or ``index_select``, that leave the last dimension as it is."""
    if not isinstance(fake_of(node), torch.Tensor) or not node.args or not isinstance(node.args[0], Node):
        return False
    rank = fake_of(node.args[0]).dim() if isinstance(fake_of(node.args[0]), torch.Tensor) else 0
    if name_of(node) == "index_select":
        dim = named(node, "input", "dim", "index")["dim"]
        return isinstance(dim, int) and dim % rank < rank - 1
    index = indices(node)
    tensors = [i for i in index if isinstance(i, Node) and isinstance(fake_of(i), torch.Tensor)]
    plain = all(i == slice(None) or i in tensors and fake_of(i).dtype in (torch.int64, torch.int32) for i in index)
    return bool(tensors) and plain and len(index) < rank


def indices(node: Node) -> tuple:
    if name_of(node) != "getitem":
        return ()
    return node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)


def way_to_head(node: Node) -> list[Node]:
    """From the product that widens rows to the values that are read by index: nodes that nobody else reads, each row by row of the one before."""
    way = [node]
    while True:
        before = way[0].args[0] if way[0] is node or moves_rows(way[0]) else row_by_row(way[0])
        if not isinstance(before, Node) or len(before.users) > 1 or not isinstance(fake_of(before), torch.Tensor):
            return []
        way.insert(0, before)
        if name_of(before) in HEADS and len(before.args) > 1 and isinstance(before.args[1], Node) and fake_of(before.args[1]).dim() == 2:
            x = before.args[0]
            return way if isinstance(x, Node) and fake_of(x).shape[-1] < fake_of(before).shape[-1] else []


def moves_rows(node: Node) -> bool:
    """Does it merge all dimensions of rows, or cut them, and leave the last dimension as it is?"""
    fake, x = fake_of(node), fake_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(x, torch.Tensor) or not is_equal(fake.shape[-1], x.shape[-1]):
        return False
    if name_of(node) in MERGING:
        return fake.dim() == 2
    index = indices(node)
    return bool(index) and len(index) < x.dim() and all(isinstance(i, (slice, int)) for i in index)


def row_by_row(node: Node) -> Node | None:
    """The one operand of a pointwise op that has rows."""
    if name_of(node) not in POINTWISE_NAMES:
        return None
    shape = fake_of(node).shape
    tensors = [a for a in node.all_input_nodes if isinstance(fake_of(a), torch.Tensor)]
    rows = [a for a in tensors if fake_of(a).shape == shape]
    return rows[0] if len(rows) == 1 and all(fake_of(a).dim() < 2 for a in tensors if a is not rows[0]) else None


POINTWISE_NAMES = frozenset(POINTWISE.split()) | {name.strip("_") for name in POINTWISE.split()}


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
    everything = others == [Ellipsis] or len(index) == 3 and all(i is Ellipsis or i == slice(None) for i in others)
    return everything and last.start in (None, 0) and last.step in (None, 1)


def inserted(like: Node, target: Callable | str, args: tuple, kwargs: dict | None = None) -> Node:
    """A node in the place of another, with the fake value that Dynamo would have given it. A target by name is a method."""
    new = (like.graph.call_method if isinstance(target, str) else like.graph.call_function)(target, args, kwargs or {})
    new.meta = {k: v for k, v in like.meta.items() if k != "example_value"}
    fakes = torch.fx.node.map_arg((args, kwargs or {}), fake_of)
    with internals.faked(fake_of(like)):
        new.meta["example_value"] = (getattr(torch.Tensor, target) if isinstance(target, str) else target)(*fakes[0], **fakes[1])
    return new

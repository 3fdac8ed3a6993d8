"""Values that are written where a mask is true, as a choice that each token makes by itself. Rewritten in
Dynamo's graph, before autograd sees it.

``x[mask] = row``, ``x[mask] = rows``, ``x[mask] = x[mask] + rows`` and ``x.masked_scatter(mask, rows)``
become ``torch.where``: no index is made whose length depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..passes.ir import arguments
from ..passes.rules import form_of, linear_of
from ..passes.rules.facets import Form
from ..passes.rules.forward import Part, is_pointwise, mutated, part_of, written_argument
from .aten import inserted
from .values import fake_of, storage_of

aten = torch.ops.aten


def choose_masked_values(module: GraphModule) -> GraphModule:
    """Write as a choice what puts one row (or one number) where a mask is true, or the rows of another value,
    one after the other."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if form_of(node) is Form.PUT_ROWS:
            found = row_under_mask(node) or rows_under_mask(node)
        else:
            found = rows_in_order(node) if part_of(node) is Part.MASKED_SCATTER else None
        if found is not None:
            replace(node, *found)
    return module


def replace(node: Node, base: Node, function: Callable[..., Tensor], given: tuple) -> None:
    """Compute a function of the base in place of a node, and write into the base what the node wrote."""
    with node.graph.inserting_before(node):
        new = inserted(node, function, (base, *given))
        if written_argument(node) is not None:
            value = fake_of(node)
            new = node.graph.call_function(aten.copy_.default, (base, new))
            new.meta = {**node.meta, "example_value": value}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def row_under_mask(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """For ``x[..., mask] = row``, the base, `under_mask` and its other operands. None where each true entry
    has a row of its own."""
    found = written_under_mask(node)
    if found is None:
        return None
    base, mask, values, ahead = found
    behind = fake_of(base).dim() - ahead - fake_of(mask).dim()
    row = fake_of(values)
    if row.dim() > ahead + 1 + behind or row.dim() > behind and row.shape[-behind - 1] != 1:
        return None
    return base, under_mask, (mask, values, ahead, behind)


def written_under_mask(node: Node) -> tuple[Node, Node, Node, int] | None:
    """For ``x[..., mask] = values``, the base, the mask, the values, and the dimensions ahead of the mask."""
    given = arguments(node)
    indices = given["indices"]
    used = [i for i, index in enumerate(indices) if index is not None]
    if given["accumulate"] or len(used) != 1 or fake_of(indices[used[0]]).dtype is not torch.bool:
        return None
    return given["self"], indices[used[0]], given["values"], used[0]


def under_mask(base: Tensor, mask: Tensor, row: Tensor, ahead: int, behind: int) -> Tensor:
    """A row where a mask is true.

    base    [*ahead, *mask, *behind], by the numbers of such dimensions
    row     broadcast to [*ahead, 1, *behind]
    """
    if row.dim() > behind:
        row = row.reshape(
            *row.shape[: row.dim() - behind - 1], *[1] * mask.dim(), *row.shape[row.dim() - behind :]
        )
    return torch.where(mask.reshape(*mask.shape, *[1] * behind), row, base)


def rows_under_mask(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """For ``x[mask] = rows``, the base, a function that puts the rows in order, and its other operands.

    Rows may be made of those that stand there (``x[mask] + rows``): what is linear in each number works on
    all rows as well, and the gradient of those that the mask does not choose is zero.
    """
    found = written_under_mask(node)
    if found is None:
        return None
    base, mask, rows, ahead = found
    if ahead or fake_of(base).dim() != fake_of(mask).dim() + 1 or fake_of(rows).dim() != 2:
        return None
    made = made_of_picked(rows, base, mask)
    given = [a for n in made for a in n.all_input_nodes if a not in made] if made else [rows]
    given = [a for a in dict.fromkeys(given) if a is not base]
    if any(is_written(n, node) for n in (*given, mask, *([base] if made else ()))):
        return None

    def put(base: Tensor, mask: Tensor, *operands: Tensor) -> Tensor:
        values = {base_node: base, **{n: spread(mask, v, count) for n, v in zip(given, operands)}}
        for each in made:
            args = map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = base if is_pick(each, base_node) else each.target(*args[0], **args[1])
        return torch.where(mask.unsqueeze(-1), values[rows], base)

    base_node, count = base, fake_of(rows).shape[0]
    return base, put, (mask, *given)


def made_of_picked(rows: Node, base: Node, mask: Node) -> list[Node]:
    """The operations, in order, that make rows of those that a mask picks from a value; none if the rows do
    not depend on that value, or by others than operations that are linear in each number."""
    found, stack = set(), [rows]
    while stack:
        node = stack.pop()
        if node in found or fake_of(node).dim() < 2:
            continue
        if is_pick(node, base) and node.args[1][0] is mask:
            found.add(node)
        elif node.op == "call_function" and is_pointwise(node) and linear_of(node) is not None:
            found.add(node)
            stack += node.all_input_nodes
    return sorted(found) if any(is_pick(n, base) for n in found) else []


def is_pick(node: Node, base: Node) -> bool:
    """Does it read the rows of a value that one mask picks (``x[mask]``)?"""
    if part_of(node) is not Part.INDEX or form_of(node) is not Form.LOOK_UP or node.args[0] is not base:
        return False
    indices = node.args[1]
    one = isinstance(indices, (list, tuple)) and all(i is None for i in indices[1:])
    return one and isinstance(indices[0], Node) and fake_of(indices[0]).dtype is torch.bool


def is_written(value: Node, until: Node) -> bool:
    """Is a value written into after it was made, and before a node runs?"""
    memory, node = storage_of(value), value.next
    while node is not until:
        written = mutated(node)
        if written is not None and storage_of(written) == memory:
            return True
        node = node.next
    return False


def spread(mask: Tensor, value: Tensor, count: object) -> Tensor:
    """Rows that belong to the true entries of a mask, each at its place; what has no rows of its own stays.

    mask   [*leading, T]
    value  [count, C], or what is broadcast to that
    """
    if value.dim() < 2 or value.shape[0] != count:
        return value
    return torch.nn.functional.embedding(places(mask), value)


def rows_in_order(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """For ``x.masked_scatter(mask, rows)`` that writes whole rows, the base, `in_order` and its other
    operands."""
    given = arguments(node)
    base, mask, source = (fake_of(given[name]) for name in ("self", "mask", "source"))
    width = base.shape[-1] if base.dim() else 1
    whole_rows = mask.dim() == base.dim() > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)
    if not whole_rows or source.dim() < 2 or source.shape[-1] != width or not source.shape[:-1].numel():
        return None
    return given["self"], in_order, (given["mask"], given["source"])


def in_order(base: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The rows of a value, one after the other, in place of the rows that a mask chooses.

    base    [*leading, T, C]
    mask    [*leading, T, C or 1], the same for all numbers of a row
    source  [*, C]
    """
    chosen = mask[..., 0].expand(base.shape[:-1])
    rows = torch.nn.functional.embedding(places(chosen), source.reshape(-1, source.shape[-1]))
    return torch.where(chosen.unsqueeze(-1), rows, base)


def places(chosen: Tensor) -> Tensor:
    """For each true entry of a mask [*leading, T], how many come before it."""
    upto = chosen.long().cumsum(-1)
    counts = upto[..., -1].flatten()
    earlier = (counts.cumsum(0) - counts).view(upto.shape[:-1]).unsqueeze(-1)
    return (upto + earlier - 1).clamp(min=0)

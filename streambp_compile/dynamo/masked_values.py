"""Values that are written where a mask is true, as a choice that each token makes by itself. Rewritten in
Dynamo's graph, before autograd sees it.

``x[mask] = row`` and ``x.masked_scatter(mask, rows)`` become ``torch.where``: no index is made whose length
depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..passes.ir import arguments
from ..passes.rules import form_of
from ..passes.rules.facets import Form
from ..passes.rules.forward import Part, part_of, written_argument
from .aten import inserted
from .values import fake_of

aten = torch.ops.aten


def choose_masked_values(module: GraphModule) -> GraphModule:
    """Write as a choice what puts one row (or one number) where a mask is true, or the rows of another value,
    one after the other."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if form_of(node) is Form.PUT_ROWS:
            found = row_under_mask(node)
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
    given = arguments(node)
    base, indices, values = given["self"], given["indices"], given["values"]
    used = [i for i, index in enumerate(indices) if index is not None]
    if given["accumulate"] or len(used) != 1 or fake_of(indices[used[0]]).dtype is not torch.bool:
        return None
    ahead, mask = used[0], indices[used[0]]
    behind = fake_of(base).dim() - ahead - fake_of(mask).dim()
    row = fake_of(values)
    if row.dim() > ahead + 1 + behind or row.dim() > behind and row.shape[-behind - 1] != 1:
        return None
    return base, under_mask, (mask, values, ahead, behind)


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
    upto = chosen.long().cumsum(-1)
    counts = upto[..., -1].flatten()
    earlier = (counts.cumsum(0) - counts).view(upto.shape[:-1]).unsqueeze(-1)
    place = (upto + earlier - 1).clamp(min=0)
    rows = torch.nn.functional.embedding(place, source.reshape(-1, source.shape[-1]))
    return torch.where(chosen.unsqueeze(-1), rows, base)

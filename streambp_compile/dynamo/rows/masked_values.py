"""Values that are written where a mask is true, as a choice that each token makes by itself. The rewrite is
done in Dynamo's graph, before autograd sees it.

``x[mask] = row``, ``x[mask] = rows`` and ``x.masked_scatter(mask, rows)`` become ``torch.where``, so
that no index has a length that depends on the data. Rows that are computed from those in the same places
(``x[mask] = x[mask] + rows``) exist once, as many as the mask picks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import arguments
from ...passes.rules import form_of
from ...passes.rules.facets import Form
from ...passes.rules.forward import Part, part_of, written_argument
from ..reading.aten import inserted
from ..reading.values import fake_of

aten = torch.ops.aten


def choose_masked_values(module: GraphModule) -> GraphModule:
    """Replace operations that put values where a mask is true by a choice. They put one row (or one number)
    at every true entry, or the rows of another value, one after the other."""
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
    """Replace a node by a function of its base. If the node wrote into the base, the new value is copied
    there."""
    with node.graph.inserting_before(node):
        new = inserted(node, function, (base, *given))
        if written_argument(node) is not None:
            value = fake_of(node)
            new = node.graph.call_function(aten.copy_.default, (base, new))
            new.meta = {**node.meta, "example_value": value}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def row_under_mask(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """Match ``x[..., mask] = row``: return the base, `under_mask` and its other operands. None where each
    true entry has a row of its own."""
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
    """Match ``x[..., mask] = values``: return the base, the mask, the values, and the dimensions ahead of
    the mask."""
    given = arguments(node)
    indices = given["indices"]
    used = [i for i, index in enumerate(indices) if index is not None]
    if given["accumulate"] or len(used) != 1 or fake_of(indices[used[0]]).dtype is not torch.bool:
        return None
    return given["self"], indices[used[0]], given["values"], used[0]


def under_mask(base: Tensor, mask: Tensor, row: Tensor, ahead: int, behind: int) -> Tensor:
    """Put one row wherever a mask is true.

    base    [*ahead, *mask, *behind]; ``ahead`` and ``behind`` are the numbers of such dimensions
    row     broadcast to [*ahead, 1, *behind]
    """
    if row.dim() > behind:
        row = row.reshape(
            *row.shape[: row.dim() - behind - 1], *[1] * mask.dim(), *row.shape[row.dim() - behind :]
        )
    return torch.where(mask.reshape(*mask.shape, *[1] * behind), row, base)


def rows_under_mask(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """Match ``x[mask] = rows`` with a row for each true entry: return the base, `each_in_order` and its
    other operands."""
    found = written_under_mask(node)
    if found is None:
        return None
    base, mask, rows, ahead = found
    if ahead or fake_of(base).dim() != fake_of(mask).dim() + 1 or fake_of(rows).dim() != 2:
        return None
    if internals.is_unbacked(fake_of(rows)) or not fake_of(rows).shape[0]:  # no rows to look up
        return None
    return base, each_in_order, (mask, rows)


def each_in_order(base: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Call `in_order` with a mask of rows.

    base  [*leading, T, C]
    mask  [*leading, T]
    rows  [*, C]
    """
    return in_order(base, mask.unsqueeze(-1), rows)


def rows_in_order(node: Node) -> tuple[Node, Callable[..., Tensor], tuple] | None:
    """Match ``x.masked_scatter(mask, rows)`` of whole rows: return the base, `in_order` and its other
    operands."""
    given = arguments(node)
    base, mask, source = (fake_of(given[name]) for name in ("self", "mask", "source"))
    width = base.shape[-1] if base.dim() else 1
    whole_rows = mask.dim() == base.dim() > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)
    if not whole_rows or source.dim() < 2 or source.shape[-1] != width or not source.shape[:-1].numel():
        return None
    return given["self"], in_order, (given["mask"], given["source"])


def in_order(base: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replace the rows that a mask chooses by the rows of a value, one after the other.

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

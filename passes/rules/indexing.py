"""Look-ups by index. A table that is looked up is read whole; the rows are those of the index."""

from __future__ import annotations

from torch.fx import Node

from ..ir import Signature, shape_of
from . import rule
from .signatures import aligned, argument


@rule("aten::embedding")
def embedding(node: Node) -> Signature:
    index = tuple(f"i{i}" for i in range(len(shape_of(node.args[1]))))
    return Signature((("v", "d"), index), ((*index, "d"),), contracts="all")


def emit_embedding_backward(body, node: Node):
    if body.kind(node) != "sum":
        return body.copy(node)
    return body.accumulate_rows(node, body.read(node.args[1]), body.summand(node, node.args[0]), padding=node.args[3])


@rule("aten::embedding_dense_backward", emit=emit_embedding_backward)
def embedding_backward(node: Node) -> Signature:
    index = tuple(f"i{i}" for i in range(len(shape_of(node.args[1]))))
    return Signature(((*index, "d"), index), ((None, "d"),))


@rule("aten::index_select")
def index_select(node: Node) -> Signature:
    rank = len(shape_of(node.args[0]))
    dim = node.args[1] % rank
    table = tuple("table" if i == dim else i for i in range(rank))
    return Signature((table, ("rows",)), (tuple("rows" if i == dim else i for i in range(rank)),), contracts="all")


@rule("aten::index.Tensor")
def index(node: Node) -> Signature:
    """``x[i, :, j]``: the index tensors broadcast together; their dims come where the first index was, or in front if they are apart."""
    x, indices = node.args[0], list(node.args[1])
    rank = len(shape_of(x))
    indices += [None] * (rank - len(indices))
    used = [i for i, ix in enumerate(indices) if ix is not None]
    spread = max(len(shape_of(indices[i])) for i in used)
    out = shape_of(node)
    together = used == list(range(used[0], used[-1] + 1))
    first = used[0] if together else 0
    kept = [i for i in range(rank) if i not in used]
    before = [i for i in kept if together and i < first]
    after = [i for i in kept if i not in before]
    index_labels = tuple(("i", j) for j in range(spread))
    shape = out[len(before):len(before) + spread]
    operands = [tuple(("read", i) if i in used else ("x", i) for i in range(rank))]
    for i in used:
        operands.append(tuple(None if j is None else ("i", j) for j in aligned(shape_of(indices[i]), shape)))
    outputs = (*(("x", i) for i in before), *index_labels, *(("x", i) for i in after))
    return Signature(tuple(operands), (outputs,), contracts="all")


def along_dim(node: Node, dim: int, operands: int) -> Signature:
    """Entries move along ``dim`` only; every other dimension stays put."""
    rank = len(shape_of(node))
    dim %= max(rank, 1)
    out = tuple(range(rank))
    inner = tuple(("moved", i) if i == dim else i for i in range(rank))
    return Signature((inner,) + (out,) * (operands - 1), (out,), contracts="all")


@rule("aten::gather")
def gather(node: Node) -> Signature:
    table, rows = shape_of(node.args[0]), shape_of(node)
    dim = node.args[1] % max(len(rows), 1)
    # An index narrower than the table along another dimension reads its first rows only.
    labels = tuple(("moved", i) if i == dim or table[i] != rows[i] else i for i in range(len(rows)))
    return Signature((labels, tuple(range(len(rows)))), (tuple(range(len(rows))),), contracts="all")


@rule("aten::scatter.value", "aten::scatter.src", "aten::scatter_add", "aten::scatter_reduce.two")
def scatter(node: Node) -> Signature:
    base = shape_of(node.args[0])
    dim = node.args[1] % max(len(base), 1)
    out = tuple(None if i == dim else i for i in range(len(base)))
    sources = [a for a in (node.args[2], node.args[3]) if isinstance(a, Node)]
    labels = tuple(("moved", i) if i == dim else i for i in range(len(base)))
    return Signature((labels,) * (1 + len(sources)), (out,), contracts="all")


@rule("aten::index_put", "aten::_unsafe_index_put", "aten::index_add")
def index_put(node: Node) -> Signature:
    """Accumulating into a constant adds up over chunks; anything else would need the order of its writes."""
    accumulates = bool(argument(node, 3, "accumulate", False))
    rank = len(shape_of(node))
    indices, values = node.args[1], node.args[2]
    used = [i for i, ix in enumerate(indices) if ix is not None]
    spread = max(len(shape_of(indices[i])) for i in used)
    lead = used == list(range(len(used)))
    kept = tuple(("x", i) for i in range(len(used), rank))
    index_labels = tuple(("i", j) for j in range(spread))
    value_labels = (*index_labels, *kept)[-len(shape_of(values)):] if lead else (None,) * len(shape_of(values))
    base = tuple(("written", i) if i in used else ("x", i) for i in range(rank))
    operands = [base]
    for i in used:
        labels = index_labels[spread - len(shape_of(indices[i])):]
        operands.append(labels)
    operands.append(value_labels)
    out = tuple(None if i in used else ("x", i) for i in range(rank))
    return Signature(tuple(operands), (out,), contracts="sum" if accumulates and lead else "all")

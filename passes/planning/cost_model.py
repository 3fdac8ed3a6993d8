"""Estimate the seconds of a sweep for a chunk length, by an additive roofline.

The estimate adds arithmetic at the device's rate and bytes at its bandwidth. Costs that a sweep has once
for all tokens do not depend on the chunk length. Costs that it has for every chunk (weights read, totals
read and written, earlier keys read, kernels launched) favour long chunks. Values that still fit into the
cache favour short ones.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch.fx import Node

from ..ir import (
    HERE,
    Analysis,
    Reach,
    Role,
    Shared,
    Signature,
    bytes_of,
    hint,
    is_row_wise,
    is_tensor,
    shape_of,
    tensor_operands,
    value_of,
)
from ..rules import cost_of, inner_width, is_product, rule_of
from ..rules.facets import CostClass
from .devices import Device

BACKWARD = 2.5  # ratio of products in attention's backward and forward: five to two


@dataclass(frozen=True)
class Cost:
    """Seconds of a sweep, term by term.

    products    matrix products at the device's full rate
    attention   fused attention at its rate, its last blocks included
    traffic     rows that kernels write and read, less those that stay in the cache
    tails       processors that idle while the last tiles of a product are made, half of them on average
    weights     weights that products read again for every chunk
    totals      sums over chunks, read and written for every chunk
    prefix      keys and values read, and their gradients added to, for every chunk
    launches    kernels launched
    """

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tails: float = 0.0
    weights: float = 0.0
    totals: float = 0.0
    prefix: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(astuple(self))

    @property
    def efficiency(self) -> float:
        """The share of their full rate at which products run; 1 without products. Their time includes tails,
        the weights read, and the totals added to."""
        taken = self.products + self.tails + self.weights + self.totals
        return self.products / taken if self.products else 1.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(term * times for term in astuple(self)))


@dataclass(frozen=True)
class Work:
    """The arithmetic and memory traffic of a sweep, on any device.

    tokens     rows of the sweep
    products   (dtype, FLOP, depth) over all tokens; depth is the number of terms that an entry of a row sums,
               0 for a sum over rows
    attention  (dtype, whether backward, FLOP, batch × heads) over all tokens
    traffic    bytes that kernels write and read over all tokens
    weights    bytes of token-free operands of products, per chunk
    totals     bytes of sums read and written, per chunk
    prefix     bytes of keys and their gradients, at full length
    keys       the range of keys that a chunk reaches
    kernels    kernels launched per chunk
    widest     bytes per token alive at the widest moment of a chunk
    single     bytes per token of the widest value by itself
    grouped    several query heads share a key head
    """

    tokens: int
    products: tuple[tuple[torch.dtype, float, int], ...]
    attention: tuple[tuple[torch.dtype, bool, float, int], ...]
    traffic: int
    weights: int
    totals: int
    prefix: int
    keys: Reach
    kernels: int
    widest: int
    single: int = 1
    grouped: bool = False

    def of_part(self, share: float) -> Work:
        """Scale the work to a share of the sequences of a batch."""
        return replace(
            self,
            products=tuple((dtype, flop * share, depth) for dtype, flop, depth in self.products),
            attention=tuple(
                (dtype, b, flop * share, max(1, int(heads * share)))
                for dtype, b, flop, heads in self.attention
            ),
            traffic=int(self.traffic * share),
            prefix=int(self.prefix * share),
            widest=max(1, int(self.widest * share)),
            single=max(1, int(self.single * share)),
        )

    def cost(self, chunk: int, device: Device, kernel: str | None = None, one_call: bool = False) -> Cost:
        """Estimate the seconds for chunks of ``chunk`` tokens.

        kernel    the attention kernel, of the device's table; None: the table's first
        one_call  attention's backward takes grouped heads in one call
        """
        apart = self.grouped and not one_call
        count = math.ceil(self.tokens / chunk)
        beyond = max(0.0, 1 - device.cache / (self.widest * chunk))
        return Cost(
            products=sum(flop / device.rate(dtype) for dtype, flop, _ in self.products),
            attention=sum(
                flop
                / device.attention_rate(dtype, backward, kernel, apart)
                * (1 + rows_beside(device, heads) / chunk)
                for dtype, backward, flop, heads in self.attention
            ),
            tails=count
            * device.processors
            * device.tile**2
            * sum(depth / device.rate(dtype) for dtype, _, depth in self.products),
            traffic=beyond * self.traffic / device.bandwidth,
            weights=count * self.weights / device.bandwidth,
            totals=count * self.totals / device.bandwidth,
            prefix=count * self.prefix * reached(self.keys, chunk, self.tokens) / device.bandwidth,
            launches=count * self.kernels * device.launch,
        )


def rows_beside(device: Device, heads: int) -> float:
    """Estimate the extra rows whose time a call of attention takes beyond its own. This is half of the rows
    that all processors take at once, unless the device states ``extra_rows``."""
    return device.extra_rows or device.processors * device.tile / (2 * heads)


def reached(keys: Reach, chunk: int, tokens: int) -> float:
    """Compute the share of all keys that a chunk of queries reaches, averaged over the sequence."""
    back, ahead = (min(-keys.lo, tokens), min(keys.hi, tokens))
    if back >= tokens and ahead >= tokens:
        return 1.0
    if max(back, ahead) >= tokens:  # causal: from one end of the sequence to the chunk
        return min(1.0, (tokens + chunk + 2 * max(0, min(back, ahead))) / (2 * tokens))
    return min(1.0, (back + ahead + chunk) / tokens)


def work_of(
    nodes: Sequence[Node],
    writes: Iterable[Node],
    sums: Iterable[Node],
    keysums: Iterable[Node],
    keys: Reach,
    analysis: Analysis,
) -> Work:
    """Sum the work of a sweep that computes ``nodes``, given in graph order."""
    length, moments = hint(analysis.length), Moments(nodes, analysis)
    written = [n for n in writes if n not in moments.widths and is_tensor(n)]
    products, fused = products_of(nodes)
    added = [n for n in sums if is_tensor(n) and cost_of(n) is not CostClass.SCATTER]
    key_edges = {
        e.operand
        for n in nodes
        for e in analysis.edges.get(n, ())
        if e.role is Role.KEYS and is_tensor(e.operand)
    }
    per_key = sum(numel(n) * (4 + value_of(n).dtype.itemsize) for n in keysums if is_tensor(n))
    return Work(
        tokens=length,
        products=tuple(product_work(n, s, is_row_wise(analysis.facts[n])) for n, s in products.items()),
        attention=tuple(attention_work(n, keys) for n in fused),
        traffic=moments.traffic() * length + sum(bytes_of(value_of(n)) for n in written),
        weights=sum(
            bytes_of(value_of(a))
            for n in products
            for a in tensor_operands(n)
            if is_tensor(a) and isinstance(analysis.facts.get(a), Shared)
        ),
        totals=sum(2 * numel(n) * max(4, value_of(n).dtype.itemsize) for n in added),
        prefix=sum(bytes_of(value_of(n)) for n in key_edges) + 2 * per_key,
        keys=keys,
        kernels=len(moments.steps) + len(written),
        widest=moments.widest(),
        single=moments.single,
        grouped=any(map(has_grouped_heads, fused)),
    )


def products_of(nodes: Iterable[Node]) -> tuple[dict[Node, Signature], list[Node]]:
    """Find matrix products with their signatures, and calls of attention."""
    found = {n: rule_of(n).signature(n) for n in nodes if is_product(n)}
    fused = [n for n, signature in found.items() if signature.rows is not None]
    return {n: s for n, s in found.items() if s.rows is None}, fused


def numel(node: Node) -> int:
    return math.prod(shape_of(node))


def product_work(node: Node, signature: Signature, row_wise: bool) -> tuple[torch.dtype, float, int]:
    """Compute a matrix product's dtype, its FLOP at full length, and its depth. Each element of the result
    takes two FLOP for each term that it sums. The depth is 0 unless the product is ``row_wise``. A label
    of one operand alone that the result lacks (a weight's group) is selected, not summed over."""
    sizes: dict[object, int] = {}
    bearers: Counter = Counter()
    for operand, labels in zip(tensor_operands(node), signature.operands):
        sizes.update(zip(labels, shape_of(operand)))
        bearers.update(labels)
    out = set(signature.outputs[0])
    summed = [x for x in bearers if x is not None and x not in out and bearers[x] > 1]
    depth = math.prod(sizes[x] for x in summed)
    result = math.prod(sizes[x] for x in out if x in sizes and x is not None)
    return value_of(node).dtype, 2.0 * result * depth, depth if row_wise else 0


def attention_work(node: Node, keys: Reach) -> tuple[torch.dtype, bool, float, int]:
    """Compute attention's dtype, whether it is a backward, its FLOP and its heads. The FLOP count the keys
    that rows reach, in two products forward and five backward. The first operand has a row per query,
    ``[…, rows, width]``. The features are those of the operands that have keys and no rows."""
    signature, operands = rule_of(node).signature(node), tensor_operands(node)
    backward = any(signature.keys in labels for labels in signature.outputs)
    rows, width = shape_of(operands[0])[-2:]
    heads = numel(operands[0]) // (rows * width)
    of_keys = [
        shape_of(a) for a, labels in zip(operands, signature.operands) if is_of_keys(labels, signature)
    ]
    pairs = heads * rows * of_keys[0][-2] * reached(keys, 1, rows)
    flop = 2.0 * pairs * sum(shape[-1] for shape in of_keys) * (BACKWARD if backward else 1)
    return value_of(operands[0]).dtype, backward, flop, heads


def has_grouped_heads(node: Node) -> bool:
    """Does attention have fewer key heads than query heads?"""
    signature, operands = rule_of(node).signature(node), tensor_operands(node)
    of_keys = (a for a, labels in zip(operands, signature.operands) if is_of_keys(labels, signature))
    return any(math.prod(shape_of(a)[:-2]) < math.prod(shape_of(operands[0])[:-2]) for a in of_keys)


def is_of_keys(labels: Sequence[object], signature: Signature) -> bool:
    """Has an operand of attention keys and no rows?"""
    return signature.keys in labels and signature.rows not in labels


class Moments:
    """The values that a chunk body holds in memory from kernel to kernel, modelled on Inductor.

    It holds the values that a kernel reads or writes. Nodes between kernels are fused, and recomputed
    from held values. A held value that is fused overwrites one of equal width that is not read later.

    widths  values held → bytes per token
    steps   in order: the value written (or None), the held values that it is computed from, and the inputs of
            the sweep that it is computed from
    """

    def __init__(self, nodes: Sequence[Node], analysis: Analysis):
        length = hint(analysis.length)
        inside = set(nodes)
        self.widths: dict[Node, int] = {}
        self.steps: list[tuple[Node | None, tuple[Node, ...], tuple[Node, ...]]] = []
        # bytes per token of the widest value by itself, or of all values alive inside one node
        self.single = max((inner_width(n, length) for n in nodes), default=0) or 1
        holds: dict[Node, tuple[Node, ...]] = {}  # node → held values that it is computed from
        given: dict[Node, tuple[Node, ...]] = {}  # node → inputs of the sweep that it is computed from
        for node in nodes:
            sources, inputs = held_by(node, holds), held_by(node, given)
            inputs = (
                *inputs,
                *(
                    e.operand
                    for e in analysis.edges.get(node, ())
                    if e.operand not in inside
                    and e.role is Role.ROWS
                    and e.reach == HERE
                    and is_tensor(e.operand)
                ),
            )
            holds[node], given[node] = sources, tuple(dict.fromkeys(inputs))
            if not is_row_wise(analysis.facts[node]):
                self.steps.append((None, sources, given[node]))
            elif cost_of(node) is not CostClass.VIEW:
                if is_tensor(node) and analysis.tokens_of(node).keys is None:
                    self.single = max(self.single, bytes_of(value_of(node)) // length)
                if is_kernel(node) or is_read_by_kernel(node):
                    self.steps.append((node, sources, given[node]))
                    self.widths[node] = width_of(node, length)
                    holds[node], given[node] = (node,), ()
        self.inputs = {n: width_of(n, length) for _, _, inputs in self.steps for n in inputs}

    def widest(self) -> int:
        """Compute the bytes per token alive at the widest moment."""
        last = {source: i for i, (_, sources, _) in enumerate(self.steps) for source in sources}
        alive = most = 0
        for i, (written, sources, _) in enumerate(self.steps):
            ending = [self.widths[s] for s in sources if last[s] == i]
            new = 0 if written is None else self.widths[written]
            overwrites = written is not None and not is_kernel(written) and new in ending
            most = max(most, alive if overwrites else alive + new)
            alive += (new if written in last else 0) - sum(ending)
        return max(most, self.single)

    def traffic(self) -> int:
        """Count the bytes per token that kernels write and read."""
        return sum(
            (0 if written is None else self.widths[written])
            + sum(self.widths[s] for s in sources)
            + sum(self.inputs[n] for n in inputs)
            for written, sources, inputs in self.steps
        )


def held_by(node: Node, known: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
    return tuple(
        dict.fromkeys(source for operand in node.all_input_nodes for source in known.get(operand, ()))
    )


def width_of(node: Node, length: int) -> int:
    """Count the bytes per token of a value, or of all outputs of a node."""
    values = value_of(node) if isinstance(value_of(node), (tuple, list)) else (value_of(node),)
    return sum(bytes_of(v) for v in values if isinstance(v, torch.Tensor)) // length


def is_kernel(node: Node) -> bool:
    """Does a node read and write memory? Nodes between such nodes are fused."""
    return cost_of(node) in (CostClass.PRODUCT, CostClass.KERNEL)


def is_read_by_kernel(node: Node) -> bool:
    return any(
        is_read_by_kernel(user) if cost_of(user) is CostClass.VIEW else is_kernel(user) for user in node.users
    )

"""Products of score matrices whose queries and keys were merged into one dimension.

A linear map over the heads of scores (talking heads) is a matrix product of rows that are pairs of a
query and a key: torch reshapes ``[B, Q, K, H]`` to ``[B * Q * K, H]`` first. No chunk can be cut out of
that. So a product is written as a contraction of its operands before they were reshaped, which still
have all their dimensions: ``bqkh,hg->bqkg``. The same holds for its gradients, and for sums over merged
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir import Label, Labels, Size, are_equal, arguments, hint, is_equal, shape_of, value_of
from ..rules import form_of, rule_of
from ..rules.facets import Form
from ..token_propagation import TokenPropagation
from .writing import Writing

aten, streambp = torch.ops.aten, torch.ops.streambp
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def unfold_products(graph: Graph, propagation: TokenPropagation) -> bool:
    """Rewrite products and sums that read merged queries and keys. Returns whether there were any."""
    readers = products_around(propagation.merging)
    made = [unfold_sum(graph, n) if form_of(n) is Form.SUM else unfold(graph, n) for n in readers]
    views = [n for n in made if n is not None]
    changed = unfold_reshapes(graph, [*views, *propagation.merging]) or bool(views)
    graph.eliminate_dead_code()
    return changed


def products_around(merging: Iterable[Node]) -> list[Node]:
    """Find products and sums that read these reshaped values, or views of them. Products whose results are
    reshaped are found as well."""
    found: dict[Node, None] = {}
    for start in merging:
        node = start.args[0]
        while is_rearranged(node):
            node = node.args[0]
        if form_of(node) is Form.MATRIX_PRODUCT:
            found[node] = None
        for value in (start, *readers_through(start)):
            reading = (n for n in value.users if form_of(n) in (Form.MATRIX_PRODUCT, Form.SUM))
            found.update(dict.fromkeys(reading))
    return list(found)


def is_rearranged(node: Node) -> bool:
    """Does a value hold the entries of its operand, in another shape or order?"""
    return form_of(node) in (Form.RESHAPE, Form.UNSQUEEZE, Form.SQUEEZE) or node.target in (
        aten.permute.default,
        aten.t.default,
        aten.clone.default,
    )


@dataclass(frozen=True)
class Folded:
    """A value as another one with some of its dimensions merged.

    dims  for each dimension of the value, those of the source that it holds, the slowest first;
          dimensions of size one are left out
    """

    source: Node
    dims: tuple[tuple[int, ...], ...]

    def sizes(self, dim: int) -> list[Size]:
        return [value_of(self.source).shape[d] for d in self.dims[dim]]


def folded(node: Node) -> Folded:
    """Trace a value back to its source, as far as dimensions are only merged and permuted."""
    found = Folded(node, tuple((d,) if s != 1 else () for d, s in enumerate(value_of(node).shape)))
    while is_rearranged(found.source):
        before = step_back(found.source)
        if before is None:
            break
        dims = tuple(tuple(d for at in group for d in before[at]) for group in found.dims)
        found = Folded(found.source.args[0], dims)
    return found


def step_back(node: Node) -> list[tuple[int, ...]] | None:
    """List the dimensions of its operand that each dimension of a rearranged value holds. Returns None if a
    dimension is split."""
    old, new = value_of(node.args[0]).shape, value_of(node).shape
    if node.target is aten.permute.default:
        return [(d % len(old),) if old[d % len(old)] != 1 else () for d in node.args[1]]
    if node.target is aten.t.default:
        return [(d,) for d in reversed(range(len(old)))]
    groups, at = [], 0
    left = [d for d, s in enumerate(old) if s != 1]
    for size in new:
        group, count = [], 1
        while not is_equal(count, size):
            if at == len(left):
                return None
            count, at = count * old[left[at]], at + 1
            group.append(left[at - 1])
            if hint(count) > hint(size):
                return None
        groups.append(tuple(group))
    return groups if at == len(left) else None


def unfold(graph: Graph, node: Node) -> Node | None:
    """Write a product as a contraction of its operands before merging; None where they do not fit."""
    given = arguments(node)
    signature = rule_of(node).signature(node)
    bias = given["self"] if len(signature.operands) == 3 else None
    plain = bias is None or (given["beta"], given["alpha"], len(shape_of(bias))) == (1, 1, 1)
    parts = [folded(operand) for operand in (node.args[:2] if bias is None else node.args[1:3])]
    labels = labels_of(parts, (*signature.operands[-2:], *signature.outputs)) if plain else None
    if labels is None:
        return None
    *texts, made = labels
    write = Writing(graph, node)
    left, right = (written_without_ones(write, part, text) for part, text in zip(parts, texts))
    first, second = ("".join(text[d] for d in sorted(text)) for text in texts)
    equation = f"{first},{second}->{''.join(made.values())}"
    new = write(streambp.contracted.default, left, right, equation)
    if bias is not None:
        if not is_equal(value_of(new).shape[-1], value_of(bias).shape[0]):
            return None
        new = write(aten.add.Tensor, new, bias)
    return replace_in_shape(write, new)


def labels_of(parts: Sequence[Folded], product: Sequence[Labels]) -> tuple[dict[int, str], ...] | None:
    """Choose a letter for each unmerged dimension of a product's operands and of its result. Returns None
    where operands are merged in different ways along a dimension that both have."""
    known: dict[Label, list[tuple[str, Size]]] = {}
    used, texts = iter(LETTERS), []
    for part, names in zip(parts, product):
        text: dict[int, str] = {}
        for at, name in enumerate(names):
            sizes = part.sizes(at)
            found = known.setdefault(name, [(next(used), size) for size in sizes])
            if len(found) != len(sizes) or not all(is_equal(a, b) for (_, a), b in zip(found, sizes)):
                return None
            text.update(zip(part.dims[at], (letter for letter, _ in found)))
        texts.append(text)
    return *texts, dict(enumerate(letter for name in product[-1] for letter, _ in known[name]))


def written_without_ones(write: Writing, part: Folded, text: dict[int, str]) -> Node:
    ones = [d for d in range(len(shape_of(part.source))) if d not in text]
    return write(aten.squeeze.dims, part.source, ones) if ones else part.source


def unfold_sum(graph: Graph, node: Node) -> Node | None:
    """Write a sum over merged dimensions as a sum over the dimensions before merging."""
    part, given = folded(node.args[0]), arguments(node)
    rank = len(shape_of(node.args[0]))
    dims = [d % rank for d in given["dim"] or range(rank)]
    summed = [d for at in dims for d in part.dims[at]]
    if part.source is node.args[0] or node.kwargs or not summed:
        return None
    write = Writing(graph, node)
    kept = [d for at in range(rank) if at not in dims for d in part.dims[at]]
    new = write(aten.sum.dim_IntList, part.source, sorted(summed))
    left = [d for d in range(len(shape_of(part.source))) if d not in summed]
    if kept != [d for d in left if d in kept]:
        return None
    return replace_in_shape(write, new)


def replace_in_shape(write: Writing, new: Node) -> Node | None:
    """Replace the value that is rewritten by another one, in the shape of the first. Returns None if a size
    of that shape cannot be read from inputs."""
    node, shape = write.node, value_of(write.node).shape
    if not are_equal(shape, value_of(new).shape):
        sizes = [write.sizes.written(size, node) for size in shape]
        if None in sizes:
            return None
        new = write(aten.view.default, new, sizes, value=value_of(new).view(shape))
    node.replace_all_uses_with(new)
    return new


def readers_through(start: Node) -> Iterator[Node]:
    """Yield the rearrangements of a value, those of these, and so on."""
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if is_rearranged(user):
                stack.append(user)
                yield user


def unfold_reshapes(graph: Graph, merging: Iterable[Node]) -> bool:
    """Rewrite a reshape that splits merged dimensions as a permutation of the value before merging. Returns
    whether there were any."""
    readers = dict.fromkeys(n for start in merging for n in readers_through(start))
    changed = False
    for node in [n for n in readers if form_of(n) is Form.RESHAPE]:
        part = folded(node.args[0])
        order = [d for group in part.dims for d in group]
        given = value_of(part.source).shape
        sizes = [s for s in value_of(node).shape if s != 1]
        if all(len(group) < 2 for group in part.dims) or len(order) != len(sizes):
            continue
        if not all(is_equal(given[d], size) for d, size in zip(order, sizes)):
            continue
        write = Writing(graph, node)
        order += [d for d in range(len(given)) if d not in order]
        node.update_arg(0, write(aten.permute.default, part.source, order))
        changed = True
    return changed

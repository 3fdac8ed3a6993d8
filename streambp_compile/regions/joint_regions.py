"""The joint graph of a region: inputs and outputs of forward and backward, and the facts of all values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from ..passes.analyze import analyze
from ..passes.ir import (
    Analysis,
    Mark,
    Ranges,
    Size,
    hint,
    is_equal,
    is_tensor,
    outputs_of,
    shape_of,
    value_of,
)
from ..passes.mask_analysis.evaluation import evaluate
from ..passes.normalization.normalize import WHERE_TOKENS_ARE
from ..passes.rules import ends_along
from ..passes.shifted_copies import copy_shifted
from ..passes.token_propagation import Signatures, TokenPropagation
from ..passes.visible_ranges import read_ranges


@dataclass(frozen=True)
class JointInputs:
    """Properties of the inputs of a region's joint graph, by their positions.

    length     the number of tokens
    marks      the token marks of an input, tangents included
    checkable  inputs that may be masks; the caller checks the result's conditions on them
    movable    inputs that a caller may hand over, so that gradients are written over them
    ranges     an input for ranges of keys, which attention may read in place of masks; None: there is none
    """

    length: Size
    marks: Mapping[int, tuple[Mark, ...]]
    checkable: Sequence[int] = ()
    movable: Sequence[int] = ()
    ranges: int | None = None


@dataclass(frozen=True)
class Joint:
    """A normal joint graph: its inputs, and its outputs of the forward and of the backward.

    tangent_of  for each tangent, the forward output that it is the gradient of
    """

    module: GraphModule
    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    tangent_of: tuple[int, ...]
    forward: tuple[object, ...]
    backward: tuple[object, ...]

    @property
    def graph(self) -> Graph:
        return self.module.graph


@dataclass(frozen=True)
class Ends:
    """Division of a joint graph's inputs and outputs between forward and backward.

    outputs     how many of its outputs are the forward's, which come first
    tangent_of  for each of its last inputs, the tangents: the forward output that it is the gradient of
    """

    outputs: int
    tangent_of: Sequence[int] = ()


def parted(module: GraphModule, ends: Ends) -> Joint:
    """Divide the inputs and outputs of a joint graph between forward and backward."""
    inputs = tuple(n for n in module.graph.nodes if n.op == "placeholder")
    first_tangent, outputs = len(inputs) - len(ends.tangent_of), outputs_of(module)
    return Joint(
        module,
        inputs[:first_tangent],
        inputs[first_tangent:],
        tuple(ends.tangent_of),
        outputs[: ends.outputs],
        outputs[ends.outputs :],
    )


def analyzed(region: Joint, inputs: JointInputs) -> tuple[Joint, Analysis]:
    """Rewrite reductions over tokens for chunks, and derive the facts of the whole joint graph. The tokens of
    the inputs determine those of the tangents. Where collectives gather or scatter as many rows as there
    are tokens, these rows are tokens as well, unless the value is known to have its tokens elsewhere."""
    nodes = (*region.primals, *region.tangents)
    marks, length = {nodes[i]: m for i, m in inputs.marks.items()}, inputs.length
    known = Signatures(region.graph)
    propagation = TokenPropagation(region.graph, marks, known)
    for node, dim in ends_along(region.graph):
        if is_equal(shape_of(node)[dim], length) and not propagation.of(node):
            marks[node] = (Mark(dim),)
            propagation = TokenPropagation(region.graph, marks, known)
    while any([rewrite(region.graph, propagation) for rewrite in WHERE_TOKENS_ARE]):
        region = with_outputs_of_graph(region)
        known = Signatures(region.graph)
        propagation = TokenPropagation(region.graph, marks, known)
    marks.update(marks_of_tangents(region, propagation))
    checkable = {region.primals[i] for i in inputs.checkable}
    masks = evaluate(region.graph, checkable.intersection(marks))
    ranges = Ranges()
    if inputs.ranges is not None:
        given = region.primals[inputs.ranges]
        ranges = read_ranges(region.graph, propagation, length, masks, given, checkable)
        if ranges:
            given.meta["val"] = value_of(given).new_empty(shape_of_ranges(ranges, length))
            known = Signatures(region.graph)
        if given.users and not is_equal(value_of(given).shape[2], 1):
            marks[given] = (Mark(2),)
    analysis = analyze(region.graph, length, marks, checkable, known, masks)
    return region, copy_shifted(region.graph, replace(analysis, ranges=ranges))


def shape_of_ranges(ranges: Ranges, length: Size) -> tuple[Size, ...]:
    """Return the sizes of the ranges: slots, masks, rows (one, if each row sees the same keys), and 2."""
    masks = max((v.batch for v in ranges.visible), key=hint)
    rows = 1 if all(v.same_for_all_rows for v in ranges.visible) else length
    return len(ranges.visible), masks, rows, 2


def with_outputs_of_graph(region: Joint) -> Joint:
    """Update the region's outputs after its graph was rewritten."""
    region.module.recompile()
    outputs, forward = outputs_of(region.module), len(region.forward)
    return replace(region, forward=outputs[:forward], backward=outputs[forward:])


def marks_of_tangents(region: Joint, propagation: TokenPropagation) -> dict[Node, tuple[Mark, ...]]:
    """Give each tangent the token marks of the output whose gradient it is."""
    found = {}
    for tangent, index in zip(region.tangents, region.tangent_of):
        output = region.forward[index]
        if isinstance(output, Node) and is_tensor(tangent):
            found[tangent] = tuple(propagation.of(output).values())
    return found


def is_one_number(tangents: Iterable[Node]) -> bool:
    """Is there exactly one tangent, and has it exactly one entry?"""
    tangents = tuple(tangents)
    return len(tangents) == 1 and is_tensor(tangents[0]) and value_of(tangents[0]).numel() == 1


def unit(tangent: Node) -> torch.Tensor:
    value = value_of(tangent)
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)

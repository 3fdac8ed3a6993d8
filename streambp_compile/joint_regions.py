"""The joint graph of a region: inputs and outputs of its forward and of its backward, and the facts of all
values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from .passes.analyze import analyze
from .passes.ir import Analysis, Mark, Size, is_equal, is_tensor, outputs_of, shape_of, value_of
from .passes.normalization.folded_products import unfold_products
from .passes.normalization.learned_queries import attend_over_tokens
from .passes.normalization.token_reductions import merge_over_tokens
from .passes.rules import ends_along
from .passes.shifted_copies import copy_shifted
from .passes.token_propagation import Signatures, TokenPropagation

InputMarks = Mapping[int, tuple[Mark, ...]]


@dataclass(frozen=True)
class Joint:
    """A normal joint graph: its inputs, and its outputs of the forward and of the backward.

    tangent_of  for each tangent, the forward output it is the gradient of
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


def parted(module: GraphModule, forward_outputs: int, tangents: int, tangent_of: Sequence[int]) -> Joint:
    """Which inputs and outputs of a joint graph are the forward's, and which the backward's."""
    inputs = tuple(n for n in module.graph.nodes if n.op == "placeholder")
    first_tangent, outputs = len(inputs) - tangents, outputs_of(module)
    return Joint(
        module,
        inputs[:first_tangent],
        inputs[first_tangent:],
        tuple(tangent_of),
        outputs[:forward_outputs],
        outputs[forward_outputs:],
    )


def analyzed(
    region: Joint, length: Size, input_marks: InputMarks, checkable: Sequence[int]
) -> tuple[Joint, Analysis]:
    """The region, its reductions over tokens written for chunks, and the facts of its whole joint graph.

    Tokens of the inputs tell those of the tangents. Where collectives gather or scatter as many rows as there
    are tokens, these are tokens as well, unless the value is known to have them elsewhere.
    """
    marks = {region.primals[i]: m for i, m in input_marks.items()}
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
    analysis = analyze(region.graph, length, marks, {region.primals[i] for i in checkable}, known)
    return region, copy_shifted(region.graph, analysis)


# Each leaves nothing that it would write again.
WHERE_TOKENS_ARE = (attend_over_tokens, merge_over_tokens, unfold_products)


def with_outputs_of_graph(region: Joint) -> Joint:
    """The same region after its graph was rewritten."""
    region.module.recompile()
    outputs, forward = outputs_of(region.module), len(region.forward)
    return replace(region, forward=outputs[:forward], backward=outputs[forward:])


def marks_of_tangents(region: Joint, propagation: TokenPropagation) -> dict[Node, tuple[Mark, ...]]:
    """A tangent carries tokens where the output does whose gradient it is."""
    found = {}
    for tangent, index in zip(region.tangents, region.tangent_of):
        output = region.forward[index]
        if isinstance(output, Node) and is_tensor(tangent):
            found[tangent] = tuple(propagation.of(output).values())
    return found


def is_one_number(tangents: Iterable[Node]) -> bool:
    """Is there one tangent, of one entry?"""
    tangents = tuple(tangents)
    return len(tangents) == 1 and is_tensor(tangents[0]) and value_of(tangents[0]).numel() == 1


def unit(tangent: Node) -> torch.Tensor:
    value = value_of(tangent)
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)

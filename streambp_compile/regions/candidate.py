"""Regions before the passes: are there tokens to cut into chunks, and what does each cost unchunked?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .. import internals
from ..dynamo.reading.processes import routed
from ..dynamo.reading.token_axes import SHORTEST_STREAMED, Axis
from ..dynamo.reading.values import fake_of, is_parameter, own_of
from ..passes.ir import (
    CannotStream,
    Refusal,
    Size,
    bytes_of,
    cannot_tell,
    hint,
    is_tensor,
    outputs_of,
    value_of,
    viewed,
    where_of,
)
from ..passes.rules import CostClass, cost_of, find_rule, is_product
from ..passes.rules.filters import is_convolution
from ..passes.rules.forward import mutated
from ..passes.split import Region

WITHOUT_MEMORY = (CostClass.VIEW, CostClass.FREE)
SMALLEST_BLOCK = 512  # bytes: torch's allocator on a GPU rounds sizes up to multiples of it


class NothingToStream(CannotStream):
    """A refusal without a warning: the graph is tiny, or has no tokens."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A region that may stream.

    axis   the sequence along which it may be cut; None if there is none
    fakes  the values of its inputs
    unfit  the reason why nothing of the graph streams, if there is one
    """

    region: Region
    axis: Axis | None
    fakes: Sequence[object]
    unfit: Refusal | None = None

    @functools.cached_property
    def inputs(self) -> list[Node]:
        return [n for n in self.region.inputs if n.op != "get_attr"]

    def length(self) -> Size:
        """Find the number of tokens as a size that the inputs of this region determine. The axis may name an
        input of another region that has as many rows (labels of strided features)."""
        values = ((n, m) for n in (*self.inputs, *self.region.nodes) for m in self.axis.marks.get(n, ()))
        sizes = (own_of(n).shape[m.dim] for n, m in values if m.is_plain)
        same = (s for s in (self.axis.length, *sizes) if hint(s) == hint(self.axis.length))
        told = (s for s in same if not cannot_tell(self.fakes, [s]))
        return next((s for s in told if s == self.axis.length), self.axis.length)

    def check(self, graph_module: GraphModule) -> None:
        """Refuse a region whose joint graph cannot be cut into chunks, whatever the passes find. Raises
        `CannotStream`."""
        self.check_tokens(graph_module)
        self.check_graph(graph_module)

    def check_tokens(self, graph_module: GraphModule) -> None:
        """Refuse a region that has no tokens to cut into chunks. Raises `CannotStream`."""
        if self.unfit is not None:
            raise CannotStream(self.unfit)
        refused = NothingToStream if self.costs_nothing(graph_module) else CannotStream
        if self.axis is None:
            raise refused(
                Refusal(
                    "graph",
                    "No token dimension was found",
                    "Pass token ids or hidden states as tensors with a token dimension",
                )
            )
        self.check_marks(graph_module, refused)
        if refused is NothingToStream and not self.axis.moving.isdisjoint(self.region.nodes):
            raise NothingToStream(
                Refusal(
                    "region",
                    "This region moves rows from one sequence to another",
                    "Nothing to do: it holds no more than the rows that go in and out",
                )
            )
        if isinstance(self.axis.length, int) and self.axis.length < SHORTEST_STREAMED:
            raise NothingToStream(
                Refusal(
                    "region",
                    f"A sequence of {self.axis.length} tokens is too short to stream",
                    "Nothing to do: its memory is small",
                )
            )

    def check_marks(self, graph_module: GraphModule, refused: type[CannotStream]) -> None:
        """Refuse a region in which no input has a token dimension. Raises ``refused``, or `NothingToStream`
        where the values are small."""
        if not any(n in self.axis.marks for n in (*self.inputs, *self.region.nodes)):
            small = self.whole_cost(graph_module) <= max(
                (bytes_of(own_of(n)) for n in self.axis.marks), default=0
            )
            raise (NothingToStream if small else refused)(
                Refusal(
                    "region",
                    "This region has no token dimension",
                    "Nothing to do for small values; otherwise check which earlier operation removes the "
                    "token dimension",
                )
            )
        if not any(n in self.axis.marks and not is_parameter(fake_of(n)) for n in self.inputs) and not any(
            n in self.axis.mixing for n in self.region.nodes
        ):
            raise refused(
                Refusal(
                    "region",
                    "This region creates its tokens from values without a token dimension, such as an image",
                    "Nothing to do for image patches: the patch embedding runs unchunked",
                )
            )

    def check_graph(self, graph_module: GraphModule) -> None:
        """Refuse sizes that no input determines, exchanges of tokens by routing, and side effects. Raises
        `CannotStream`."""
        exchange = routed(graph_module.graph.nodes)
        if exchange is not None:
            raise CannotStream(
                Refusal(
                    str(exchange.target),
                    "This exchange sends as many tokens to each process as routing says, so that processes "
                    "would plan differently",
                    "Nothing to do where experts are small: the layers between stream. To stream experts, "
                    "exchange equal parts (a capacity)",
                    where_of(exchange),
                )
            )
        sizes = (s for n in graph_module.graph.nodes if is_tensor(n) for s in value_of(n).shape)
        untold = cannot_tell(self.fakes, [self.length(), *sizes])
        if untold:
            raise CannotStream(
                Refusal(
                    "region",
                    f"A size of {untold[0]} cannot be derived from the sizes of the region's inputs",
                    "Pass a tensor or an integer that has this size",
                )
            )
        for node in graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.with_effects
        ):
            raise CannotStream(
                Refusal(
                    str(node.args[1]),
                    "This operation has a side effect, which must happen exactly once and in order",
                    "Move it out of the layers of the model",
                    where_of(node),
                )
            )

    def tangent_of(self, graph_module: GraphModule, tangents: int, before: int = 0) -> list[int]:
        """Find the index of the output that each tangent is the gradient of.

        before  outputs of the joint graph before those of the region: inputs that torch functions write into
                (running averages), as AOTAutograd returns them

        Raises `CannotStream` where tangents and differentiable outputs do not correspond.
        """
        parts = [(fake_of(n), part) for n in self.region.outputs for part in internals.parts_of(fake_of(n))]
        found = [i for i, (v, _) in enumerate(parts) if isinstance(v, torch.Tensor) and v.requires_grad]
        if tangents and not self.region.outputs:  # such as weights that ``max_norm`` renormalises
            raise (NothingToStream if self.costs_nothing(graph_module) else CannotStream)(
                Refusal(
                    "region",
                    "This region only writes into inputs of the compiled function",
                    "Nothing to do for weights; write rows of tokens into buffers outside the function",
                )
            )
        if tangents and len(found) != tangents:
            writing = next((n for n in self.region.nodes if mutated(n) is not None), None)
            raise CannotStream(
                Refusal(
                    "region" if writing is None else str(writing.target),
                    f"This region gets {tangents} gradients for {len(found)} differentiable outputs",
                    "Do not change the inputs of a layer in place, as max_norm of an embedding does, too",
                    "" if writing is None else where_of(writing),
                )
            )
        return [before + i for i in found]

    def costs_nothing(self, graph_module: GraphModule) -> bool:
        """Is every value inside at most as large as the largest input or output, or an allocator's block?
        Inputs and outputs exist in any case."""
        return self.whole_cost(graph_module) <= self.widest_end()

    def widest_end(self) -> int:
        """Compute the bytes of the largest input or output, at least one block of an allocator."""
        ends = (own_of(n) for n in (*self.inputs, *self.region.outputs))
        return max([SMALLEST_BLOCK, *(bytes_of(e) for e in ends if isinstance(e, torch.Tensor))])

    def is_fragment(self, graph_module: GraphModule) -> bool:
        """Does this piece take no more memory than its inputs and outputs?

        A piece between graph breaks may, and a filter that makes patches. Inductor fuses all operations but
        products, and a product's result is kept: all of these are counted.
        """
        calls = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        whole = [n for n in calls if cost_of(n) not in WITHOUT_MEMORY and (is_product(n) or not find_rule(n))]
        returned = {viewed(n) for n in outputs_of(graph_module) if isinstance(n, Node)}
        kept = sum(bytes_of(value_of(n)) for n in whole if is_tensor(n) and n not in returned)
        known = all(find_rule(n) or is_convolution(n) for n in whole)
        return known and kept <= self.widest_end() and self.costs_nothing(graph_module)

    def whole_cost(self, graph_module: GraphModule) -> int:
        return max(
            (
                bytes_of(value_of(n))
                for n in graph_module.graph.nodes
                if is_tensor(n) and n.op == "call_function"
            ),
            default=0,
        )

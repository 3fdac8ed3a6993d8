"""The ATen operators that a graph of torch functions runs, with the node that each comes from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ... import internals
from ...passes.ir import outputs_of


class Captured:
    """The forward of a graph, captured once.

    module   the ATen graph, whose outputs are the values of all tensor nodes
    names    node → the names of the ATen nodes that it became
    tensors  nodes that are tensors, in the order of those outputs
    """

    def __init__(self, graph_module: GraphModule, fakes: Sequence[object]):
        self.names: dict[Node, set[str]] = {}
        self.tensors: list[Node] = []
        names, tensors = self.names, self.tensors

        class CapturingInterpreter(torch.fx.Interpreter):
            def run_node(self, n: Node):
                before = internals.newest_captured()
                result = (
                    self.fetch_args_kwargs_from_env(n)[0][0] if internals.is_hook(n) else super().run_node(n)
                )
                names[n] = set(internals.captured_after(before))
                if isinstance(result, torch.Tensor) and n.op != "output":
                    tensors.append(n)
                    values.append(internals.local_of(result))
                return result

        values: list[torch.Tensor] = []

        def run(*args):
            tensors.clear()
            values.clear()
            CapturingInterpreter(graph_module).run(*args)
            return list(values)

        self.module = internals.capture(run, fakes)

    def values_in(self, rewritten: GraphModule) -> dict[Node, Node]:
        """Map each node to its value in the captured graph, or in a graph that passes made from it."""
        return {n: v for n, v in zip(self.tensors, outputs_of(rewritten)) if isinstance(v, Node)}

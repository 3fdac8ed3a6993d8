"""Sums that read views of their own.

The gradient of a bias is the sum of an incoming gradient. It is computed at full length, and so is the
view that it reads. If a sweep reads the same view, it has the incoming gradient under two names, and may
not write over it.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..ir import is_view
from ..rules import form_of
from ..rules.facets import Form


def separate_views(graph: Graph) -> None:
    """Give each sum that reads a shared view of a placeholder a view of its own."""
    for node in [n for n in graph.nodes if form_of(n) is Form.SUM]:
        chain: list[Node] = []
        source = node.args[0]
        while is_view(source):
            chain.append(source)
            source = source.args[0]
        if source.op == "placeholder" and any(len(view.users) > 1 for view in chain):
            own = {source: source}
            with graph.inserting_before(node):
                for view in reversed(chain):
                    own[view] = graph.node_copy(view, lambda n: own.get(n, n))
            node.replace_input_with(chain[0], own[chain[0]])

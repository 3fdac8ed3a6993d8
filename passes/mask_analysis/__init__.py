"""Which columns of a score matrix are provably empty: an abstract evaluation of the mask's own subgraph.

Masks are made from ranges, comparisons and padding rows. Evaluated over the domains of ``domains.py``, their
emptiness can be *proved*.
Nothing is assumed: an op without a row evaluates to ``None`` (unknown), and unknown prunes nothing. Where a
proof rests on a padding or
on a stored mask, its value says so, for a condition that is checked when the graph runs: lowest numbers (not
``-inf``) empty a row only
beside a key that is seen, and a stored mask may hold anything.
"""

from __future__ import annotations

from collections.abc import Container

from torch.fx import Graph, Node

from ..stages import checkpoint
from . import arithmetic, masks, places
from .domains import Abstract
from .evaluation import Evaluation

TABLE = {**places.TABLE, **arithmetic.TABLE, **masks.TABLE}


def evaluate(graph: Graph, with_tokens: Container[Node] | None = None) -> dict[Node, Abstract]:
    """The abstract value of every node of the graph (``None`` where nothing is known).

    with_tokens  the placeholders that carry tokens; others hold weights, which hide nothing. By default none
                 is taken for a weight
    """
    found = Evaluation(TABLE, with_tokens)
    for node in graph.nodes:
        checkpoint()
        found.visit(node)
    return found.values

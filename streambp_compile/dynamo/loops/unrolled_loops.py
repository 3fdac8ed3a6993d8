"""Loops over tokens, or over blocks of tokens, that Dynamo has unrolled."""

from __future__ import annotations

from torch.fx import GraphModule

from ... import internals
from .iterations import find_loop, is_over_tokens
from .loop_distribution import Distribution
from .token_loops import TokenDistribution


def distribute_loops(module: GraphModule) -> GraphModule:
    """Map the work that all unrolled iterations do alike over all blocks, or all tokens."""
    tried: set[tuple] = set()
    while (loop := find_loop(module.graph, tried)) is not None:
        before = set(module.graph.nodes)
        found = (TokenDistribution if is_over_tokens(loop) else Distribution)(module, loop)
        if not found.is_worth_it():
            continue
        try:
            found.rewrite()
        except Exception:  # it cannot be mapped over blocks; a write into a value of one block, for instance
            internals.log.debug("a loop stays unrolled", exc_info=True)
            for node in reversed(module.graph.nodes):
                if node not in before:
                    module.graph.erase_node(node)
    return module
